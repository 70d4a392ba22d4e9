"""The prologue's forward kernel in Triton: convolution, SiLU, norms, gates and final state, in one launch."""

# mypy: ignore-errors
# Triton's functions carry no types; what they are called with is typed in _prologue_launch.

from __future__ import annotations

import triton
import triton.language as tl

from qwenlinear.ops._prologue_triton import (
    INTEGERS,
    _at_start,
    _convolve,
    _decay,
    _extent,
    _load_group,
    _load_taps,
    _log_softplus,
    _opening,
    _past,
    _place,
    _section,
    _sigmoid,
    _within_one,
)


@triton.jit
def _gates_forward(
    program,
    b_ptr,
    b_batch,
    b_row,
    a_ptr,
    a_batch,
    a_row,
    A_log_ptr,
    dt_bias_ptr,
    g_ptr,
    beta_ptr,
    B,
    T,
    HV: tl.constexpr,
    BH: tl.constexpr,
    GATE_ROWS: tl.constexpr,
):
    heads = tl.arange(0, BH)
    rows = program.to(tl.int64) * GATE_ROWS + tl.arange(0, GATE_ROWS)
    batch, token = rows // T, rows % T
    mask = (rows < B.to(tl.int64) * T)[:, None] & (heads < HV)[None, :]
    out = rows[:, None] * HV + heads[None, :]
    b = tl.load(b_ptr + (batch * b_batch + token * b_row)[:, None] + heads[None, :], mask=mask, other=0.0)
    a = tl.load(a_ptr + (batch * a_batch + token * a_row)[:, None] + heads[None, :], mask=mask, other=0.0)
    A_log = tl.load(A_log_ptr + heads, mask=heads < HV, other=0.0).to(tl.float32)
    dt_bias = tl.load(dt_bias_ptr + heads, mask=heads < HV, other=0.0).to(tl.float32)
    log_softplus, _ = _log_softplus(a.to(tl.float32) + dt_bias[None, :])
    tl.store(g_ptr + out, _decay(A_log[None, :] + log_softplus), mask=mask)
    tl.store(beta_ptr + out, _sigmoid(b.to(tl.float32)).to(beta_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _final_state(
    program,
    blocks,
    x_ptr,
    x_batch,
    x_row,
    state_ptr,
    bounds_ptr,
    lengths_ptr,
    final_ptr,
    T,
    C: tl.constexpr,
    W: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_STATE: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The last W-1 inputs of one document, or what its state still holds of them."""
    document = program // blocks
    channels = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    valid = channels < C
    begin, _, length, _ = _extent(document, x_batch, x_row, bounds_ptr, lengths_ptr, T, PACKED, HAS_LENGTHS)
    out = (channels + document.to(tl.int64) * C) * (W - 1)
    for column in tl.static_range(W - 1):
        token = length - (W - 1) + column
        value = tl.load(x_ptr + begin + token.to(tl.int64) * x_row + channels, mask=valid & (token >= 0), other=0.0)
        if HAS_STATE:
            past = valid & (token < 0)
            value += _past(state_ptr, document, channels, past, length + column, C, W, HAS_STATE).to(value.dtype)
        tl.store(final_ptr + out + column, value.to(final_ptr.dtype.element_ty), mask=valid)


@triton.jit
def _forward_group(
    xs, x1, x2, x3, w0, w1, w2, w3, y_ptrs, y_row: tl.constexpr, token, T,
    position_ptr, document_ptr, state_ptr, channels, valid,
    C: tl.constexpr, W: tl.constexpr, NORM: tl.constexpr, STARTS: tl.constexpr, HAS_STATE: tl.constexpr, U: tl.constexpr,
):  # fmt: skip
    """U tokens, among which documents may start; hands on the last three inputs."""
    y_ptrs += token.to(tl.int64) * y_row
    for i in tl.static_range(U):
        if STARTS:
            _, x1, x2, x3 = _at_start(
                x1, x2, x3, token + i, T, position_ptr, document_ptr, state_ptr, channels, valid, C, W, HAS_STATE
            )
        x0 = xs[i].to(tl.float32)
        y = _convolve(x0, x1, x2, x3, w0, w1, w2, w3, W)
        y = y * _sigmoid(y)
        if NORM:
            y = y * tl.rsqrt(tl.sum(y * y, 1) + 1e-6)[:, None]
        tl.store(y_ptrs + i * y_row, y.to(y_ptrs.dtype.element_ty), mask=valid & (token + i < T))
        x3, x2, x1 = x2, x1, x0
    return x1, x2, x3


@triton.jit
def _convolution_forward(
    x_ptrs, x_row, y_ptrs, y_row: tl.constexpr, weight_ptr, batch, first, T, L,
    position_ptr, document_ptr, state_ptr, channels, valid,
    C: tl.constexpr, W: tl.constexpr, R: tl.constexpr, D: tl.constexpr, NORM: tl.constexpr, PACKED: tl.constexpr,
    HAS_STATE: tl.constexpr, U: tl.constexpr,
):  # fmt: skip
    """One program: a chunk of time of R rows of D channels."""
    w0, w1, w2, w3 = _load_taps(weight_ptr, channels, valid, W, R, D)
    x1, x2, x3 = _opening(
        x_ptrs, x_row, batch, first, position_ptr, document_ptr, state_ptr, channels, valid, C, W, PACKED, HAS_STATE
    )
    for start in range(0, L, U):
        token = first + start
        xs = _load_group(x_ptrs, x_row, token, T, valid, U)
        if PACKED:
            if _within_one(position_ptr, token, T, U):
                x1, x2, x3 = _forward_group(
                    xs, x1, x2, x3, w0, w1, w2, w3, y_ptrs, y_row, token, T, position_ptr, document_ptr, state_ptr,
                    channels, valid, C, W, NORM, False, HAS_STATE, U,
                )  # fmt: skip
            else:
                for i in range(U):
                    x0 = _load_group(x_ptrs, x_row, token + i, T, valid, 1)
                    x1, x2, x3 = _forward_group(
                        x0, x1, x2, x3, w0, w1, w2, w3, y_ptrs, y_row, token + i, T, position_ptr, document_ptr, state_ptr,
                        channels, valid, C, W, NORM, True, HAS_STATE, 1,
                    )  # fmt: skip
        else:
            x1, x2, x3 = _forward_group(
                xs, x1, x2, x3, w0, w1, w2, w3, y_ptrs, y_row, token, T, position_ptr, document_ptr, state_ptr,
                channels, valid, C, W, NORM, False, HAS_STATE, U,
            )  # fmt: skip


@triton.jit(do_not_specialize=INTEGERS)
def prologue_forward_kernel(
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
    bounds_ptr,
    lengths_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,
    beta_ptr,
    final_ptr,
    B,
    T,
    L,
    gate_programs,
    state_programs,
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
    UNIT: tl.constexpr,
    BH: tl.constexpr,
    GATE_ROWS: tl.constexpr,
    U: tl.constexpr,
):
    C: tl.constexpr = 2 * H * D + CV
    program = tl.program_id(0)
    x_batch = x_batch.to(tl.int64) * UNIT
    x_row = x_row.to(tl.int64) * UNIT
    if program < gate_programs:
        _gates_forward(
            program, b_ptr, b_batch, b_row, a_ptr, a_batch, a_row, A_log_ptr, dt_bias_ptr, g_ptr, beta_ptr, B, T,
            HV, BH, GATE_ROWS,
        )  # fmt: skip
    elif program < gate_programs + state_programs:
        _final_state(
            program - gate_programs, tl.cdiv(C, R * D), x_ptr, x_batch, x_row, state_ptr, bounds_ptr, lengths_ptr,
            final_ptr, T, C, W, PACKED, HAS_STATE, HAS_LENGTHS, R * D,
        )  # fmt: skip
    else:
        block, batch, first = _place(program - gate_programs - state_programs, T, L, H, CV, R, D)
        section, inner, size, offset = _section(block, H, CV, R, D)
        valid = inner < size
        channels = inner + offset
        x_ptrs = x_ptr + batch.to(tl.int64) * x_batch + channels
        at = batch.to(tl.int64) * T * size + inner
        if section == 2:
            _convolution_forward(
                x_ptrs, x_row, v_ptr + at, CV, weight_ptr, batch, first, T, L, position_ptr, document_ptr, state_ptr,
                channels, valid, C, W, R, D, False, PACKED, HAS_STATE, U,
            )  # fmt: skip
        else:
            y_ptr = q_ptr
            if section == 1:
                y_ptr = k_ptr
            _convolution_forward(
                x_ptrs, x_row, y_ptr + at, H * D, weight_ptr, batch, first, T, L, position_ptr, document_ptr, state_ptr,
                channels, valid, C, W, R, D, NORM, PACKED, HAS_STATE, U,
            )  # fmt: skip
