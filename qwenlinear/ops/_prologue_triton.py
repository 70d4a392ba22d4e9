"""The prologue's kernels in Triton: each element read once, worked on in registers, written once.

A program owns R rows of D = K channels (R heads of q, R of k, or as many channels of v) and walks through a chunk of time. What
the convolution reaches back to, three inputs, and in the backward pass the three input gradients that are not complete yet, it
carries in registers; a group of tokens is loaded ahead of its arithmetic, so that enough bytes are on their way. The gates and
the final convolution state are further programs of the same launch.

Taps are kept in four slots: slot 3 weighs the token itself, slot 3-d the token d before it. Only the last W are used.
"""

# mypy: ignore-errors
# Triton's functions carry no types; what they are called with is typed in _prologue_launch.

from __future__ import annotations

import triton
import triton.language as tl

from qwenlinear.ops._gates_triton import _gates_forward, _sigmoid

INTEGERS = [
    "x_batch",
    "x_row",
    "b_batch",
    "b_row",
    "a_batch",
    "a_row",
    "B",
    "T",
    "L",
    "gate_programs",
    "state_programs",
]
# not specialised: one compilation serves every length, and strides carry their alignment as UNIT


@triton.jit
def _load_taps(weight_ptr, channels, valid, W: tl.constexpr, R: tl.constexpr, D: tl.constexpr):
    slots = tl.arange(0, 4) + (W - 4)
    mask = valid[:, :, None] & (slots >= 0)[None, None, :]
    taps = tl.load(weight_ptr + channels[:, :, None] * W + slots[None, None, :], mask=mask, other=0.0)
    even, odd = tl.split(tl.reshape(taps.to(tl.float32), [R, D, 2, 2]))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    return w0, w1, w2, w3


@triton.jit
def _convolve(x0, x1, x2, x3, w0, w1, w2, w3, W: tl.constexpr):
    u = w3 * x0
    if W > 1:
        u += w2 * x1
    if W > 2:
        u += w1 * x2
    if W > 3:
        u += w0 * x3
    return u


@triton.jit
def _past(state_ptr, document, channels, valid, column, C, W: tl.constexpr, HAS_STATE: tl.constexpr):
    """Column ``column`` of a document's initial state, which lies here as ``[N, W-1, C]``; zeros without one."""
    if HAS_STATE:
        inside = (column >= 0) & (column < W - 1)
        at = state_ptr + (document.to(tl.int64) * (W - 1) + column) * C + channels
        return tl.load(at, mask=valid & inside, other=0.0).to(tl.float32)
    return tl.zeros(valid.shape, tl.float32)


@triton.jit
def _before(
    d: tl.constexpr,
    x_ptrs,
    x_row,
    state_ptr,
    document,
    position,
    channels,
    valid,
    C,
    W: tl.constexpr,
    HAS_STATE: tl.constexpr,
):
    """The input d tokens before the one at ``x_ptrs``, which is at ``position`` of its document."""
    if d >= W:
        return tl.zeros(valid.shape, tl.float32)
    own = tl.load(x_ptrs - d * x_row, mask=valid & (position >= d), other=0.0).to(tl.float32)
    if HAS_STATE:
        column = W - 1 + position - d
        past = _past(state_ptr, document, channels, valid & (position < d), column, C, W, HAS_STATE)
        return own + past
    return own


@triton.jit
def _section(block, H: tl.constexpr, CV: tl.constexpr, R: tl.constexpr, D: tl.constexpr):
    """Which section (0 q, 1 k, 2 v) a block of R rows lies in, its channels within it, and where the section starts."""
    key_blocks: tl.constexpr = (H + R - 1) // R
    section = tl.minimum(block // key_blocks, 2)
    within = (block - section * key_blocks) * R
    inner = (within + tl.arange(0, R))[:, None] * D + tl.arange(0, D)[None, :]
    size = tl.where(section == 2, CV, H * D)
    return section, inner, size, section * H * D


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
def _extent(document, batch_stride, row, bounds_ptr, lengths_ptr, T, PACKED: tl.constexpr, HAS_LENGTHS: tl.constexpr):
    """Where a document begins, in elements and in tokens; how many of its tokens count; and how many it has."""
    if PACKED:
        start = tl.load(bounds_ptr + document)
        tokens = tl.load(bounds_ptr + document + 1) - start
        first = start.to(tl.int64)
        begin = first * row
    else:
        tokens = T
        first = document.to(tl.int64) * T
        begin = document.to(tl.int64) * batch_stride
    length = tokens
    if HAS_LENGTHS:
        length = tl.minimum(tl.maximum(tl.load(lengths_ptr + document), 0), T).to(tl.int32)
    return begin, first, length, tokens


@triton.jit
def _load_group(ptrs, row, token, T, valid, U: tl.constexpr):
    """U tokens from ``token`` on, all on their way before the first is used; zeros behind the end."""
    ptrs += token.to(tl.int64) * row
    group = ()
    for i in tl.static_range(U):
        group = group + (tl.load(ptrs + i * row, mask=valid & (token + i < T), other=0.0),)  # noqa: RUF005
    return group


@triton.jit
def _within_one(position_ptr, token, T, U: tl.constexpr):
    """Whether U tokens lie in one document, no tap of theirs reaching before it: then nothing has to be looked up."""
    first = tl.load(position_ptr + token, mask=token < T, other=0)
    last = tl.load(position_ptr + token + (U - 1), mask=token + (U - 1) < T, other=0)
    return (first >= 3) & (last == first + (U - 1))


@triton.jit
def _at_start(
    x1, x2, x3, token, T, position_ptr, document_ptr, state_ptr, channels, valid, C, W: tl.constexpr, HAS_STATE: tl.constexpr
):  # fmt: skip
    """A token's position, and what lies before it: before a document's first, its initial state."""
    position = tl.load(position_ptr + token, mask=token < T, other=3)
    if position == 0:
        document = 0
        if HAS_STATE:
            document = tl.load(document_ptr + token)
        x1 = _past(state_ptr, document, channels, valid, W - 2, C, W, HAS_STATE)
        x2 = _past(state_ptr, document, channels, valid, W - 3, C, W, HAS_STATE)
        x3 = _past(state_ptr, document, channels, valid, W - 4, C, W, HAS_STATE)
    return position, x1, x2, x3


@triton.jit
def _opening(
    x_ptrs,
    x_row,
    batch,
    token,
    position_ptr,
    document_ptr,
    state_ptr,
    channels,
    valid,
    C,
    W: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_STATE: tl.constexpr,
):
    """The three inputs before a chunk's first token."""
    position, document = token, batch
    if PACKED:
        position = tl.load(position_ptr + token)
        if HAS_STATE:
            document = tl.load(document_ptr + token)
    at = x_ptrs + token.to(tl.int64) * x_row
    x1 = _before(1, at, x_row, state_ptr, document, position, channels, valid, C, W, HAS_STATE)
    x2 = _before(2, at, x_row, state_ptr, document, position, channels, valid, C, W, HAS_STATE)
    x3 = _before(3, at, x_row, state_ptr, document, position, channels, valid, C, W, HAS_STATE)
    return x1, x2, x3


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


@triton.jit
def _place(program, T, L, H: tl.constexpr, CV: tl.constexpr, R: tl.constexpr, D: tl.constexpr):
    """A program's block of channels (neighbours run together, so that whole rows are read), row and first token."""
    blocks: tl.constexpr = 2 * ((H + R - 1) // R) + (CV + R * D - 1) // (R * D)
    chunk = program // blocks
    chunks = tl.cdiv(T, L)
    return program % blocks, chunk // chunks, chunk % chunks * L
