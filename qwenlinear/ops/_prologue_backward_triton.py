"""The prologue's backward kernels in Triton: everything between the inputs and the gradients is computed again.

The walk through a chunk carries, beside the three inputs before a token, what the tokens so far give to the input gradients of
the last three, which the next tokens complete. It goes on for three tokens behind its chunk. A chunk's part of the taps'
gradient stays in registers until its end; the parts of all chunks are added in a fixed order afterwards.
"""

from __future__ import annotations

import triton
import triton.language as tl

from qwenlinear.ops._prologue_triton import (
    INTEGERS,
    _at_start,
    _convolve,
    _extent,
    _load_group,
    _load_positions,
    _load_taps,
    _log_softplus,
    _opening,
    _past,
    _place,
    _section,
    _sigmoid,
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
def _reaching(du, position, d: tl.constexpr, PACKED: tl.constexpr):
    """du as far as the token d before it belongs to the same document."""
    if PACKED:
        return tl.where(position >= d, du, 0.0)
    return du


@triton.jit
def _step(
    x0,
    x1,
    x2,
    x3,
    dy,
    a1,
    a2,
    a3,
    w0,
    w1,
    w2,
    w3,
    position,
    W: tl.constexpr,
    NORM: tl.constexpr,
    PACKED: tl.constexpr,
):
    """One token: du, the finished gradient of the input three before it, and the three unfinished ones."""
    du = _through_norm_and_silu(_convolve(x0, x1, x2, x3, w0, w1, w2, w3, W), dy, NORM)
    if W > 3:
        a3 += w0 * _reaching(du, position, 3, PACKED)
    if W > 2:
        a2 += w1 * _reaching(du, position, 2, PACKED)
    if W > 1:
        a1 += w2 * _reaching(du, position, 1, PACKED)
    return du, a3, w3 * du, a1, a2


@triton.jit
def _convolution_backward(
    x_ptrs,
    x_row,
    dy_ptrs,
    dy_row,
    dx_ptrs,
    dx_row,
    weight_ptr,
    dw_ptrs,
    batch,
    first,
    T,
    L,
    position_ptr,
    document_ptr,
    state_ptr,
    channels,
    valid,
    C: tl.constexpr,
    W: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    NORM: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_STATE: tl.constexpr,
    NEEDS_DW: tl.constexpr,
    U: tl.constexpr,
):
    w0, w1, w2, w3 = _load_taps(weight_ptr, channels, valid, W, R, D)
    x1, x2, x3 = _opening(
        x_ptrs, x_row, batch, first, position_ptr, document_ptr, state_ptr, channels, valid, C, W, PACKED, HAS_STATE
    )
    a1 = tl.zeros([R, D], tl.float32)
    a2, a3 = a1, a1
    dw0, dw1, dw2, dw3 = a1, a1, a1, a1
    for start in range(0, L, U):
        xs = _load_group(x_ptrs, x_row, first + start, T, valid, U)
        dys = _load_group(dy_ptrs, dy_row, first + start, T, valid, U)
        positions = _load_positions(position_ptr, first + start, T, U, PACKED)
        for i in tl.static_range(U):
            token = first + start + i
            if PACKED:
                x1, x2, x3 = _at_start(
                    x1, x2, x3, positions[i], token, T, document_ptr, state_ptr, channels, valid, C, W, HAS_STATE
                )
            x0 = xs[i].to(tl.float32)
            du, done, a1, a2, a3 = _step(
                x0, x1, x2, x3, dys[i].to(tl.float32), a1, a2, a3, w0, w1, w2, w3, positions[i], W, NORM, PACKED
            )
            if NEEDS_DW:
                dw3 += du * x0
                dw2 += du * x1
                dw1 += du * x2
                dw0 += du * x3
            at = token - 3
            mask = valid & (start + i >= 3) & (at < T)
            tl.store(dx_ptrs + at.to(tl.int64) * dx_row, done.to(dx_ptrs.dtype.element_ty), mask=mask)
            x3, x2, x1 = x2, x1, x0
    xs = _load_group(x_ptrs, x_row, first + L, T, valid, 3)
    dys = _load_group(dy_ptrs, dy_row, first + L, T, valid, 3)
    positions = _load_positions(position_ptr, first + L, T, 3, PACKED)
    for i in tl.static_range(3):
        if PACKED:
            x1, x2, x3 = _at_start(
                x1, x2, x3, positions[i], first + L + i, T, document_ptr, state_ptr, channels, valid, C, W, HAS_STATE
            )
        x0 = xs[i].to(tl.float32)
        du, done, a1, a2, a3 = _step(
            x0, x1, x2, x3, dys[i].to(tl.float32), a1, a2, a3, w0, w1, w2, w3, positions[i], W, NORM, PACKED
        )
        at = first + L + i - 3
        tl.store(dx_ptrs + at.to(tl.int64) * dx_row, done.to(dx_ptrs.dtype.element_ty), mask=valid & (at < T))
        x3, x2, x1 = x2, x1, x0
    if NEEDS_DW:
        tl.store(dw_ptrs, dw0, mask=valid)
        tl.store(dw_ptrs + C, dw1, mask=valid)
        tl.store(dw_ptrs + 2 * C, dw2, mask=valid)
        tl.store(dw_ptrs + 3 * C, dw3, mask=valid)


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


@triton.jit(do_not_specialize=[*INTEGERS, "dx_row", "dgates_row"])
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
    dx_row,
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
    DX_UNIT: tl.constexpr,
    BH: tl.constexpr,
    GATE_ROWS: tl.constexpr,
    U: tl.constexpr,
):
    C: tl.constexpr = 2 * H * D + CV
    program = tl.program_id(0)
    x_batch = x_batch.to(tl.int64) * UNIT
    x_row = x_row.to(tl.int64) * UNIT
    dx_row = dx_row.to(tl.int64) * DX_UNIT
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


@triton.jit(do_not_specialize=[*INTEGERS, "dx_row"])
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
    dx_row,
    dstate_ptr,
    T,
    H: tl.constexpr,
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
    DX_UNIT: tl.constexpr,
):
    """The states' part, a program a document and block of channels; runs after the others, whose dx it adds to."""
    C: tl.constexpr = 2 * H * D + CV
    blocks: tl.constexpr = 2 * ((H + R - 1) // R) + (CV + R * D - 1) // (R * D)
    document = tl.program_id(0) // blocks
    section, inner, size, offset = _section(tl.program_id(0) % blocks, H, CV, R, D)
    valid = inner < size
    channels = inner + offset
    x_row = x_row.to(tl.int64) * UNIT
    dx_row = dx_row.to(tl.int64) * DX_UNIT
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
            dus = dus + (du,)
            x3, x2, x1 = x2, x1, x0
        for column in tl.static_range(W - 1):
            dstate = tl.zeros([R, D], tl.float32)
            for i in tl.static_range(column + 1):
                dstate += taps[column - i + 4 - W] * dus[i]
            if HAS_DFINAL:  # a short document hands some columns on
                mask = valid & (column >= length)
                dstate += tl.load(dfinal_ptr + states + column - length, mask=mask, other=0.0).to(tl.float32)
            tl.store(dstate_ptr + states + column, dstate.to(dstate_ptr.dtype.element_ty), mask=valid)
