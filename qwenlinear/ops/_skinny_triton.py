"""A few rows times the transposes of up to four weights in one launch, at the speed of reading the weights.

A program takes BR rows of one weight, over all of its columns, so that no two programs add to one number and two runs are
equal bit by bit. What limits it is how many bytes are under way: 25 to 32 KB for each multiprocessor. Two forms:
multiply and sum, in which every thread reads 16 bytes of each of its rows at once, and products on tensor cores, where x is
padded to 16 rows and the columns of a block may be split over the warps.
"""

# mypy: ignore-errors
# Triton's functions carry no types.

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from qwenlinear._launch import on, power_of_two

SUMMED_ROWS = 4
"""Rows of x of one program that multiplies and sums: each needs accumulators of its own."""

DOT_ROWS = 16
"""Rows of x of a product on tensor cores."""

_THREAD = 128  # bytes of weights that a thread asks for at once: eight loads
_BLOCK = 8192  # bytes of one row's longest block
_MANY_ROWS = 8192  # of all weights, from which on larger programs still fill the machine


class Tile(NamedTuple):
    """How the work is cut. ``split``: 0 multiplies and sums; otherwise tensor cores, columns split over so many parts."""

    BR: int
    BK: int
    split: int
    stages: int
    unroll: int
    warps: int
    evict: str = ""
    pdl: bool = False


@triton.jit
def _place(block, w0, w1, w2, w3, r0, r1, r2, r3, BR: tl.constexpr, WEIGHTS: tl.constexpr):
    """Whose rows a block holds: the weight, its rows, its first column in the answer, the block's place in it."""
    w, rows, column = w0, r0, r0 - r0
    if WEIGHTS > 1:
        blocks = tl.cdiv(r0, BR)
        if block >= blocks:
            block -= blocks
            w, rows, column = w1, r1, r0
            if WEIGHTS > 2:
                blocks = tl.cdiv(r1, BR)
                if block >= blocks:
                    block -= blocks
                    w, rows, column = w2, r2, r0 + r1
                    if WEIGHTS > 3:
                        blocks = tl.cdiv(r2, BR)
                        if block >= blocks:
                            block -= blocks
                            w, rows, column = w3, r3, r0 + r1 + r2
    return w, rows, column, block


@triton.jit
def _columns(at, inside, WHOLE: tl.constexpr, EVICT: tl.constexpr = ""):
    if WHOLE:
        return tl.load(at, eviction_policy=EVICT)
    return tl.load(at, mask=inside, other=0.0, eviction_policy=EVICT)


@triton.jit
def _wait(PDL: tl.constexpr):
    """For the launch before this one, whose answer x is: weights may be asked for while it still runs."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def _sums(weights, given, BR: tl.constexpr, BK: tl.constexpr, VEC: tl.constexpr):
    """Products of a block, those that one thread holds side by side added up: fewer registers than one sum for each."""
    return tl.sum(tl.reshape(weights * given.to(tl.float32)[None, :], [BR, BK // VEC, VEC]), 2)


@triton.jit(do_not_specialize=["tokens", "r0", "r1", "r2", "r3", "total"])
def summed_kernel(
    x, w0, w1, w2, w3, y, tokens, r0, r1, r2, r3, total,
    K: tl.constexpr, WEIGHTS: tl.constexpr, TOKENS: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr, UNROLL: tl.constexpr, EVICT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Every thread keeps its own columns' sums; they meet once, at the end. TOKENS is 1 to 4."""
    groups = tl.cdiv(tokens, TOKENS)
    token = (tl.program_id(0) % groups) * TOKENS
    w, rows, column, block = _place(tl.program_id(0) // groups, w0, w1, w2, w3, r0, r1, r2, r3, BR, WEIGHTS)
    row, k = block * BR + tl.arange(0, BR), tl.arange(0, BK)
    at = w + tl.minimum(row, rows - 1).to(tl.int64)[:, None] * K + k[None, :]
    x0 = x + token * K + k
    x1 = x + tl.minimum(token + 1, tokens - 1) * K + k
    x2 = x + tl.minimum(token + 2, tokens - 1) * K + k
    x3 = x + tl.minimum(token + 3, tokens - 1) * K + k
    VEC: tl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth  # elements of one load of 16 bytes
    sum0 = tl.zeros([BR, BK // VEC], tl.float32)
    sum1, sum2, sum3 = sum0, sum0, sum0
    WHOLE: tl.constexpr = K % BK == 0
    for start in tl.range(0, K, BK, num_stages=STAGES, loop_unroll_factor=UNROLL):
        inside = start + k < K
        weights = _columns(at + start, inside[None, :], WHOLE, EVICT).to(tl.float32)
        _wait(PDL)
        sum0 += _sums(weights, _columns(x0 + start, inside, WHOLE), BR, BK, VEC)
        if TOKENS > 1:
            sum1 += _sums(weights, _columns(x1 + start, inside, WHOLE), BR, BK, VEC)
        if TOKENS > 2:
            sum2 += _sums(weights, _columns(x2 + start, inside, WHOLE), BR, BK, VEC)
        if TOKENS > 3:
            sum3 += _sums(weights, _columns(x3 + start, inside, WHOLE), BR, BK, VEC)
    out, here = y + token.to(tl.int64) * total + column + row, row < rows
    tl.store(out, tl.sum(sum0, 1).to(y.dtype.element_ty), mask=here)
    if TOKENS > 1:
        tl.store(out + total, tl.sum(sum1, 1).to(y.dtype.element_ty), mask=here & (token + 1 < tokens))
    if TOKENS > 2:
        tl.store(out + 2 * total, tl.sum(sum2, 1).to(y.dtype.element_ty), mask=here & (token + 2 < tokens))
    if TOKENS > 3:
        tl.store(out + 3 * total, tl.sum(sum3, 1).to(y.dtype.element_ty), mask=here & (token + 3 < tokens))


@triton.jit(do_not_specialize=["tokens", "r0", "r1", "r2", "r3", "total"])
def dot_kernel(
    x, w0, w1, w2, w3, y, tokens, r0, r1, r2, r3, total,
    K: tl.constexpr, WEIGHTS: tl.constexpr, TOKENS: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr,
    SPLIT: tl.constexpr, STAGES: tl.constexpr, EVICT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """On tensor cores, all tokens at once; SPLIT parts of each block of columns are products of their own, added at the end."""
    w, rows, column, block = _place(tl.program_id(0), w0, w1, w2, w3, r0, r1, r2, r3, BR, WEIGHTS)
    row, token = block * BR + tl.arange(0, BR), tl.arange(0, TOKENS)
    source = tl.minimum(row, rows - 1).to(tl.int64) * K
    WHOLE: tl.constexpr = K % BK == 0
    if SPLIT == 1:
        k = tl.arange(0, BK)
        product = tl.zeros([BR, TOKENS], tl.float32)
        for start in tl.range(0, K, BK, num_stages=STAGES):
            inside = start + k < K
            weights = _columns(w + source[:, None] + (start + k)[None, :], inside[None, :], WHOLE, EVICT)
            _wait(PDL)
            there = (token < tokens)[None, :] & inside[:, None]
            given = tl.load(x + token[None, :] * K + (start + k)[:, None], mask=there, other=0.0)
            product = tl.dot(weights, given, product, input_precision="ieee")
    else:
        BP: tl.constexpr = BK // SPLIT
        k = tl.arange(0, SPLIT)[:, None] * BP + tl.arange(0, BP)[None, :]
        products = tl.zeros([SPLIT, BR, TOKENS], tl.float32)
        for start in tl.range(0, K, BK, num_stages=STAGES):
            inside = start + k < K
            weights = _columns(w + source[None, :, None] + (start + k)[:, None, :], inside[:, None, :], WHOLE, EVICT)
            _wait(PDL)
            there = (token < tokens)[None, None, :] & inside[:, :, None]
            given = tl.load(x + token[None, None, :] * K + (start + k)[:, :, None], mask=there, other=0.0)
            products = tl.dot(weights, given, products, input_precision="ieee")
        product = tl.sum(products, 0)
    out = y + token.to(tl.int64)[None, :] * total + column + row[:, None]
    tl.store(out, product.to(y.dtype.element_ty), mask=(row < rows)[:, None] & (token < tokens)[None, :])


@lru_cache(maxsize=256)
def choose(rows: int, K: int, size: int, total: int) -> Tile:
    """How the work is cut; docs/performance-notes.md says why.

    Args:
        rows: of x.
        K: columns of x and the weights.
        size: bytes of an element.
        total: rows of all weights.

    Returns:
        A tile.
    """
    if rows > SUMMED_ROWS and size < 4:  # tensor cores would round float32's factors: it multiplies and sums any number
        # programs share x in the second-level cache: half as many read half as much, where there are enough of them
        if total >= _MANY_ROWS:
            return Tile(32, max(64, min(256, power_of_two(K))), 4, 4, 1, 4)
        return Tile(16, max(64, min(512, power_of_two(K))), 4, 3, 1, 4)
    BK = K & -K  # whole blocks, without a mask, where they are not too short
    if BK * size < 512:
        BK = power_of_two(K)
    BK = max(16, min(BK, _BLOCK // size))
    warps = max(1, min(8, BK * size // 1024))
    return Tile(max(4, min(32, warps * _THREAD * 32 // (BK * size))), BK, 0, 1, 1, warps)


def launch(x: Tensor, weights: Sequence[Tensor], tile: Tile | None = None) -> Tensor:
    """`qwenlinear.ops.skinny_linear` without its checks.

    Args:
        x: ``[N, K]``, N up to :data:`DOT_ROWS`.
        weights: one to four ``[R, K]``, contiguous.
        tile: how to cut the work; default :func:`choose`'s.

    Returns:
        ``[N, sum of R]`` in x's dtype.
    """
    N, K = x.shape
    rows = [weight.shape[0] for weight in weights]
    total = sum(rows)
    y = x.new_empty(N, total)
    if not (N and total and K):
        return y.zero_()
    BR, BK, split, stages, unroll, warps, evict, pdl = tile or choose(N, K, x.element_size(), total)
    programs, absent = sum([(count + BR - 1) // BR for count in rows]), 4 - len(rows)
    given = (x.contiguous(), *weights, *[weights[0]] * absent, y, N, *rows, *[0] * absent, total, K, len(rows))
    options = {"num_warps": warps, "launch_pdl": True} if pdl else {"num_warps": warps}
    with on(x.device):
        if split:
            dot_kernel[(programs,)](*given, DOT_ROWS, BR, BK, split, stages, evict, pdl, **options)
        else:
            together = min(N, SUMMED_ROWS)
            programs *= (N + together - 1) // together
            summed_kernel[(programs,)](*given, together, BR, BK, stages, unroll, evict, pdl, **options)
    return y
