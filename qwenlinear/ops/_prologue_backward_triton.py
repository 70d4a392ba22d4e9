"""The prologue's backward kernels in Triton: everything between the inputs and the gradients is computed again.

The walk through a chunk carries, beside the three inputs before a token, what the tokens so far give to the input gradients of
the last three, which the next tokens complete. It goes on for three tokens behind its chunk. A chunk's part of the taps'
gradient stays in registers until its end; the parts of all chunks are added in a fixed order afterwards.
"""

# mypy: ignore-errors
# Triton's functions carry no types; what they are called with is typed in _prologue_launch.

from __future__ import annotations

import triton
import triton.language as tl

from qwenlinear.ops._gates_triton import _log_softplus, _sigmoid
from qwenlinear.ops._prologue_triton import (
    INTEGERS,
    _at_start,
    _convolve,
    _extent,
    _load_group,
    _load_taps,
    _opening,
    _past,
    _place,
    _section,
    _within_one,
)


@triton.jit
def _through_norm_and_silu(u, dy, NORM: tl.constexpr):
    """The gradient of the convolution's output u, where y = l2norm(silu(u))."""
    sigmoid = _sigmoid(u)
    s = u * sigmoid
    if NORM:
        factor = tl.rsqrt(tl.sum(s * s, 1) + 1e-6)
        inner = tl.sum(s * dy, 1) * factor * factor
        dy = (dy - s * inner[:, None]) * factor[:, None]
    return dy * (sigmoid + s * (1.0 - sigmoid))


@triton.jit
def _reaching(du, position, d: tl.constexpr, STARTS: tl.constexpr):
    """du as far as the token d before it belongs to the same document."""
    if STARTS:
        return tl.where(position >= d, du, 0.0)
    return du


@triton.jit
def _backward_group(
    xs, dys, x1, x2, x3, a1, a2, a3, dw0, dw1, dw2, dw3, w0, w1, w2, w3, dx_ptrs, dx_row: tl.constexpr, token, begin, T,
    position_ptr, document_ptr, state_ptr, channels, valid,
    C: tl.constexpr, W: tl.constexpr, NORM: tl.constexpr, STARTS: tl.constexpr, HAS_STATE: tl.constexpr,
    NEEDS_DW: tl.constexpr, U: tl.constexpr,
):  # fmt: skip
    """U tokens, among which documents may start; a1 is the unfinished gradient of the input one before, and so on."""
    dx_ptrs += (token - 3).to(tl.int64) * dx_row
    for i in tl.static_range(U):
        position = 3
        if STARTS:
            position, x1, x2, x3 = _at_start(
                x1, x2, x3, token + i, T, position_ptr, document_ptr, state_ptr, channels, valid, C, W, HAS_STATE
            )
        x0 = xs[i].to(tl.float32)
        u = _convolve(x0, x1, x2, x3, w0, w1, w2, w3, W)
        du = _through_norm_and_silu(u, dys[i].to(tl.float32), NORM)
        if NEEDS_DW:
            dw3 += du * x0
            dw2 += du * x1
            dw1 += du * x2
            dw0 += du * x3
        if W > 3:
            a3 += w0 * _reaching(du, position, 3, STARTS)
        if W > 2:
            a2 += w1 * _reaching(du, position, 2, STARTS)
        if W > 1:
            a1 += w2 * _reaching(du, position, 1, STARTS)
        at = token + i - 3  # complete now
        mask = valid & (at >= begin) & (at < T)
        tl.store(dx_ptrs + i * dx_row, a3.to(dx_ptrs.dtype.element_ty), mask=mask)
        a3, a2, a1 = a2, a1, w3 * du
        x3, x2, x1 = x2, x1, x0
    return x1, x2, x3, a1, a2, a3, dw0, dw1, dw2, dw3


@triton.jit
def _convolution_backward(
    x_ptrs, x_row, dy_ptrs, dy_row: tl.constexpr, dx_ptrs, dx_row: tl.constexpr, weight_ptr, dw_ptrs, batch, first, T, L,
    position_ptr, document_ptr, state_ptr, channels, valid,
    C: tl.constexpr, W: tl.constexpr, R: tl.constexpr, D: tl.constexpr, NORM: tl.constexpr, PACKED: tl.constexpr,
    HAS_STATE: tl.constexpr, NEEDS_DW: tl.constexpr, U: tl.constexpr,
):  # fmt: skip
    """One program: a chunk of time of R rows of D channels, and three tokens behind it."""
    w0, w1, w2, w3 = _load_taps(weight_ptr, channels, valid, W, R, D)
    x1, x2, x3 = _opening(
        x_ptrs, x_row, batch, first, position_ptr, document_ptr, state_ptr, channels, valid, C, W, PACKED, HAS_STATE
    )
    a1 = tl.zeros([R, D], tl.float32)
    a2, a3 = a1, a1
    dw0, dw1, dw2, dw3 = a1, a1, a1, a1
    for start in range(0, L, U):
        token = first + start
        xs = _load_group(x_ptrs, x_row, token, T, valid, U)
        dys = _load_group(dy_ptrs, dy_row, token, T, valid, U)
        if PACKED:
            if _within_one(position_ptr, token, T, U):
                x1, x2, x3, a1, a2, a3, dw0, dw1, dw2, dw3 = _backward_group(
                    xs, dys, x1, x2, x3, a1, a2, a3, dw0, dw1, dw2, dw3, w0, w1, w2, w3, dx_ptrs, dx_row, token, first, T,
                    position_ptr, document_ptr, state_ptr, channels, valid, C, W, NORM, False, HAS_STATE, NEEDS_DW, U,
                )  # fmt: skip
            else:
                for i in range(U):
                    x0 = _load_group(x_ptrs, x_row, token + i, T, valid, 1)
                    dy = _load_group(dy_ptrs, dy_row, token + i, T, valid, 1)
                    x1, x2, x3, a1, a2, a3, dw0, dw1, dw2, dw3 = _backward_group(
                        x0, dy, x1, x2, x3, a1, a2, a3, dw0, dw1, dw2, dw3, w0, w1, w2, w3, dx_ptrs, dx_row, token + i, first, T,
                        position_ptr, document_ptr, state_ptr, channels, valid, C, W, NORM, True, HAS_STATE, NEEDS_DW, 1,
                    )  # fmt: skip
        else:
            x1, x2, x3, a1, a2, a3, dw0, dw1, dw2, dw3 = _backward_group(
                xs, dys, x1, x2, x3, a1, a2, a3, dw0, dw1, dw2, dw3, w0, w1, w2, w3, dx_ptrs, dx_row, token, first, T,
                position_ptr, document_ptr, state_ptr, channels, valid, C, W, NORM, False, HAS_STATE, NEEDS_DW, U,
            )  # fmt: skip
    if NEEDS_DW:
        tl.store(dw_ptrs, dw0, mask=valid)
        tl.store(dw_ptrs + C, dw1, mask=valid)
        tl.store(dw_ptrs + 2 * C, dw2, mask=valid)
        tl.store(dw_ptrs + 3 * C, dw3, mask=valid)
    token = first + L
    if PACKED:
        for i in range(3):
            x0 = _load_group(x_ptrs, x_row, token + i, T, valid, 1)
            dy = _load_group(dy_ptrs, dy_row, token + i, T, valid, 1)
            x1, x2, x3, a1, a2, a3, dw0, dw1, dw2, dw3 = _backward_group(
                x0, dy, x1, x2, x3, a1, a2, a3, dw0, dw1, dw2, dw3, w0, w1, w2, w3, dx_ptrs, dx_row, token + i, first, T,
                position_ptr, document_ptr, state_ptr, channels, valid, C, W, NORM, True, HAS_STATE, False, 1,
            )  # fmt: skip
    else:
        xs = _load_group(x_ptrs, x_row, token, T, valid, 3)
        dys = _load_group(dy_ptrs, dy_row, token, T, valid, 3)
        _backward_group(
            xs, dys, x1, x2, x3, a1, a2, a3, dw0, dw1, dw2, dw3, w0, w1, w2, w3, dx_ptrs, dx_row, token, first, T,
            position_ptr, document_ptr, state_ptr, channels, valid, C, W, NORM, False, HAS_STATE, False, 3,
        )  # fmt: skip


@triton.jit
def _gates_backward(
    program,
    b_ptr,
    b_batch,
    b_row,
    a_ptr,
    a_batch,
    a_row,
    A_log_ptr,
    dt_bias_ptr,
    dg_ptr,
    dbeta_ptr,
    dgates_ptr,
    dgates_row,
    partial_ptr,
    B,
    T,
    HV: tl.constexpr,
    BH: tl.constexpr,
    GATE_ROWS: tl.constexpr,
):
    heads = tl.arange(0, BH)
    rows = program.to(tl.int64) * GATE_ROWS + tl.arange(0, GATE_ROWS)
    batch, token = rows // T, rows % T
    here = heads < HV
    mask = (rows < B.to(tl.int64) * T)[:, None] & here[None, :]
    inner = rows[:, None] * HV + heads[None, :]
    b = tl.load(b_ptr + (batch * b_batch + token * b_row)[:, None] + heads[None, :], mask=mask, other=0.0)
    a = tl.load(a_ptr + (batch * a_batch + token * a_row)[:, None] + heads[None, :], mask=mask, other=0.0)
    dg = tl.load(dg_ptr + inner, mask=mask, other=0.0).to(tl.float32)
    dbeta = tl.load(dbeta_ptr + inner, mask=mask, other=0.0).to(tl.float32)
    A_log = tl.load(A_log_ptr + heads, mask=here, other=0.0).to(tl.float32)
    dt_bias = tl.load(dt_bias_ptr + heads, mask=here, other=0.0).to(tl.float32)
    log_softplus, slope = _log_softplus(a.to(tl.float32) + dt_bias[None, :])
    log_decay = A_log[None, :] + log_softplus
    free = mask & (log_decay < 9.210340371976182)  # log(1e4); beyond it g is clamped
    dA = tl.where(free, -dg * tl.exp(tl.minimum(log_decay, 9.210340371976182)), 0.0)
    da = dA * slope
    beta = _sigmoid(b.to(tl.float32))
    out = dgates_ptr + rows[:, None] * dgates_row + heads[None, :]
    tl.store(out, (dbeta * beta * (1.0 - beta)).to(dgates_ptr.dtype.element_ty), mask=mask)
    tl.store(out + HV, da.to(dgates_ptr.dtype.element_ty), mask=mask)
    part = partial_ptr + program.to(tl.int64) * 2 * HV + heads
    tl.store(part, tl.sum(dA, 0), mask=here)
    tl.store(part + HV, tl.sum(da, 0), mask=here)


@triton.jit(do_not_specialize=[*INTEGERS, "dgates_row"])
def prologue_backward_kernel(
    x_ptr,
    x_batch,
    x_row,
    b_ptr,
    b_batch,
    b_row,
    a_ptr,
    a_batch,
    a_row,
    weight_ptr,
    A_log_ptr,
    dt_bias_ptr,
    state_ptr,
    position_ptr,
    document_ptr,
    dq_ptr,
    dk_ptr,
    dv_ptr,
    dg_ptr,
    dbeta_ptr,
    dx_ptr,
    dgates_ptr,
    dgates_row,
    dw_ptr,
    dgate_ptr,
    B,
    T,
    L,
    gate_programs,
    H: tl.constexpr,
    HV: tl.constexpr,
    CV: tl.constexpr,
    W: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    NORM: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_STATE: tl.constexpr,
    NEEDS_DW: tl.constexpr,
    UNIT: tl.constexpr,
    BH: tl.constexpr,
    GATE_ROWS: tl.constexpr,
    U: tl.constexpr,
):
    C: tl.constexpr = 2 * H * D + CV
    dx_row: tl.constexpr = C + 2 * HV  # db and da lie behind
    program = tl.program_id(0)
    x_batch = x_batch.to(tl.int64) * UNIT
    x_row = x_row.to(tl.int64) * UNIT
    if program < gate_programs:
        _gates_backward(
            program, b_ptr, b_batch, b_row, a_ptr, a_batch, a_row, A_log_ptr, dt_bias_ptr, dg_ptr, dbeta_ptr,
            dgates_ptr, dgates_row, dgate_ptr, B, T, HV, BH, GATE_ROWS,
        )  # fmt: skip
    else:
        block, batch, first = _place(program - gate_programs, T, L, H, CV, R, D)
        section, inner, size, offset = _section(block, H, CV, R, D)
        valid = inner < size
        channels = inner + offset
        x_ptrs = x_ptr + batch.to(tl.int64) * x_batch + channels
        row = batch.to(tl.int64) * T
        dx_ptrs = dx_ptr + row * dx_row + channels
        dw_ptrs = dw_ptr + (batch * tl.cdiv(T, L) + first // L).to(tl.int64) * 4 * C + channels
        at = row * size + inner
        if section == 2:
            _convolution_backward(
                x_ptrs, x_row, dv_ptr + at, CV, dx_ptrs, dx_row, weight_ptr, dw_ptrs, batch, first, T, L, position_ptr,
                document_ptr, state_ptr, channels, valid, C, W, R, D, False, PACKED, HAS_STATE, NEEDS_DW, U,
            )  # fmt: skip
        else:
            dy_ptr = dq_ptr
            if section == 1:
                dy_ptr = dk_ptr
            _convolution_backward(
                x_ptrs, x_row, dy_ptr + at, H * D, dx_ptrs, dx_row, weight_ptr, dw_ptrs, batch, first, T, L, position_ptr,
                document_ptr, state_ptr, channels, valid, C, W, R, D, NORM, PACKED, HAS_STATE, NEEDS_DW, U,
            )  # fmt: skip


@triton.jit(do_not_specialize=INTEGERS)
def prologue_state_backward_kernel(
    x_ptr,
    x_batch,
    x_row,
    weight_ptr,
    state_ptr,
    bounds_ptr,
    lengths_ptr,
    dq_ptr,
    dk_ptr,
    dv_ptr,
    dfinal_ptr,
    dx_ptr,
    dstate_ptr,
    T,
    H: tl.constexpr,
    HV: tl.constexpr,
    CV: tl.constexpr,
    W: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    NORM: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_STATE: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    HAS_DFINAL: tl.constexpr,
    NEEDS_DSTATE: tl.constexpr,
    UNIT: tl.constexpr,
):
    """The states' part, a program a document and block of channels; runs after the others, whose dx it adds to."""
    C: tl.constexpr = 2 * H * D + CV
    dx_row: tl.constexpr = C + 2 * HV  # db and da lie behind
    blocks: tl.constexpr = 2 * ((H + R - 1) // R) + (CV + R * D - 1) // (R * D)
    document = tl.program_id(0) // blocks
    section, inner, size, offset = _section(tl.program_id(0) % blocks, H, CV, R, D)
    valid = inner < size
    channels = inner + offset
    x_row = x_row.to(tl.int64) * UNIT
    begin, row, length, tokens = _extent(
        document, x_batch.to(tl.int64) * UNIT, x_row, bounds_ptr, lengths_ptr, T, PACKED, HAS_LENGTHS
    )
    states = (channels + document.to(tl.int64) * C) * (W - 1)
    if HAS_DFINAL:
        for column in tl.static_range(W - 1):
            token = length - (W - 1) + column
            mask = valid & (token >= 0)
            at = dx_ptr + (row + token) * dx_row + channels
            dx = tl.load(at, mask=mask, other=0.0).to(tl.float32)
            dx += tl.load(dfinal_ptr + states + column, mask=mask, other=0.0).to(tl.float32)
            tl.store(at, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if NEEDS_DSTATE:
        dy_ptr = dq_ptr
        if section == 1:
            dy_ptr = dk_ptr
        if section == 2:
            dy_ptr = dv_ptr
        taps = _load_taps(weight_ptr, channels, valid, W, R, D)
        x1 = _past(state_ptr, document, channels, valid, W - 2, C, W, HAS_STATE)
        x2 = _past(state_ptr, document, channels, valid, W - 3, C, W, HAS_STATE)
        x3 = _past(state_ptr, document, channels, valid, W - 4, C, W, HAS_STATE)
        dus = ()
        for i in tl.static_range(W - 1):  # the tokens that a state's columns reach
            mask = valid & (i < tokens)
            x0 = tl.load(x_ptr + begin + i * x_row + channels, mask=mask, other=0.0).to(tl.float32)
            dy = tl.load(dy_ptr + (row + i) * size + inner, mask=mask, other=0.0).to(tl.float32)
            u = _convolve(x0, x1, x2, x3, taps[0], taps[1], taps[2], taps[3], W)
            du = _through_norm_and_silu(u, dy, NORM)
            if NORM:
                du = tl.where(section == 2, _through_norm_and_silu(u, dy, False), du)
            dus = dus + (du,)  # noqa: RUF005
            x3, x2, x1 = x2, x1, x0
        for column in tl.static_range(W - 1):
            dstate = tl.zeros([R, D], tl.float32)
            for i in tl.static_range(column + 1):
                dstate += taps[column - i + 4 - W] * dus[i]
            if HAS_DFINAL:  # a short document hands some columns on
                mask = valid & (column >= length)
                dstate += tl.load(dfinal_ptr + states + column - length, mask=mask, other=0.0).to(tl.float32)
            tl.store(dstate_ptr + states + column, dstate.to(dstate_ptr.dtype.element_ty), mask=valid)
