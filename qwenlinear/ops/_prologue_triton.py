"""What the prologue's kernels are made of: each element is read once, worked on in registers, written once.

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
def _sigmoid(x):
    # exp2 and rsqrt are an instruction each, where exp and a division handle subnormal numbers that change nothing here
    root = tl.rsqrt(1.0 + tl.exp2(x * -1.4426950408889634))
    return root * root


@triton.jit
def _log_softplus(x):
    """log(log(1 + exp(x))), finite for every finite x; and its derivative."""
    z = tl.exp(-tl.abs(x))
    one_more = 1.0 + z
    rest = one_more - 1.0
    log1p = tl.where(rest == 0.0, z, tl.log(one_more) * (z / tl.where(rest == 0.0, 1.0, rest)))
    softplus = tl.maximum(x, 0.0) + log1p
    sigmoid = tl.where(x >= 0.0, 1.0, z) / one_more
    small = x < -40.0
    softplus = tl.where(small, 1.0, softplus)
    return tl.where(small, x, tl.log(softplus)), tl.where(small, 1.0, sigmoid / softplus)


@triton.jit
def _at_most(x, limit: tl.constexpr):
    """min(x, limit), but not-a-number stays what it is: tl.minimum alone would make a proper gate of a broken parameter."""
    return tl.minimum(x, limit, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _decay(log_decay):
    """g of its logarithm log(-g), clamped at -1e4."""
    return -_at_most(tl.exp(_at_most(log_decay, 9.210340371976182)), 1e4)  # log(1e4), which may round to a little more


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
def _place(program, T, L, H: tl.constexpr, CV: tl.constexpr, R: tl.constexpr, D: tl.constexpr):
    """A program's block of channels (neighbours run together, so that whole rows are read), row and first token."""
    blocks: tl.constexpr = 2 * ((H + R - 1) // R) + (CV + R * D - 1) // (R * D)
    chunk = program // blocks
    chunks = tl.cdiv(T, L)
    return program % blocks, chunk // chunks, chunk % chunks * L
