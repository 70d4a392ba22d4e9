"""A few rows times the transposes of up to four weights in one launch, at the speed of reading the weights.

A program takes BR rows of one weight, over all of its columns, so that no two programs add to one number and two runs are
equal bit by bit. What limits it is how many bytes are under way: 25 to 32 KB for each multiprocessor. It multiplies on tensor
cores, with x padded to 16 rows, so one row costs what sixteen do; the columns of a block may be split over the warps.
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

DOT_ROWS = 16
"""Rows of x of a product on tensor cores."""

_MANY_ROWS = 8192  # of all weights, from which on larger programs still fill the machine


class Tile(NamedTuple):
    """How the work is cut: rows and columns of a program's block, parts its columns are split into, loads ahead, warps."""

    BR: int
    BK: int
    split: int
    stages: int
    warps: int


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
def _columns(at, inside, WHOLE: tl.constexpr):
    if WHOLE:
        return tl.load(at)
    return tl.load(at, mask=inside, other=0.0)


@triton.jit(do_not_specialize=["tokens", "r0", "r1", "r2", "r3", "total"])
def skinny_kernel(
    x, w0, w1, w2, w3, y, tokens, r0, r1, r2, r3, total,
    K: tl.constexpr, WEIGHTS: tl.constexpr, TOKENS: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr,
    SPLIT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """All tokens at once; SPLIT parts of each block of columns are products of their own, added at the end."""
    w, rows, column, block = _place(tl.program_id(0), w0, w1, w2, w3, r0, r1, r2, r3, BR, WEIGHTS)
    row, token = block * BR + tl.arange(0, BR), tl.arange(0, TOKENS)
    source = tl.minimum(row, rows - 1).to(tl.int64) * K
    WHOLE: tl.constexpr = K % BK == 0
    if SPLIT == 1:
        k = tl.arange(0, BK)
        product = tl.zeros([BR, TOKENS], tl.float32)
        for start in tl.range(0, K, BK, num_stages=STAGES):
            inside = start + k < K
            weights = _columns(w + source[:, None] + (start + k)[None, :], inside[None, :], WHOLE)
            there = (token < tokens)[None, :] & inside[:, None]
            given = tl.load(x + token[None, :] * K + (start + k)[:, None], mask=there, other=0.0)
            product = tl.dot(weights, given, product, input_precision="ieee")
    else:
        BP: tl.constexpr = BK // SPLIT
        k = tl.arange(0, SPLIT)[:, None] * BP + tl.arange(0, BP)[None, :]
        products = tl.zeros([SPLIT, BR, TOKENS], tl.float32)
        for start in tl.range(0, K, BK, num_stages=STAGES):
            inside = start + k < K
            weights = _columns(w + source[None, :, None] + (start + k)[:, None, :], inside[:, None, :], WHOLE)
            there = (token < tokens)[None, None, :] & inside[:, :, None]
            given = tl.load(x + token[None, None, :] * K + (start + k)[:, :, None], mask=there, other=0.0)
            products = tl.dot(weights, given, products, input_precision="ieee")
        product = tl.sum(products, 0)
    out = y + token.to(tl.int64)[None, :] * total + column + row[:, None]
    tl.store(out, product.to(y.dtype.element_ty), mask=(row < rows)[:, None] & (token < tokens)[None, :])


@lru_cache(maxsize=256)
def choose(K: int, total: int) -> Tile:
    """How the work is cut; docs/performance-notes.md has what was measured.

    Args:
        K: columns of x and the weights.
        total: rows of all weights.

    Returns:
        A tile, whose warps share the columns. Programs share x in the second-level cache: half as many read half as much, where
        there are enough of them to fill the machine.
    """
    if total >= _MANY_ROWS:
        return Tile(64, max(64, min(128, power_of_two(K))), 1, 4, 4)
    return Tile(16, max(64, min(256, power_of_two(K))), 4, 6, 4)


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
    BR, BK, split, stages, warps = tile or choose(K, total)
    programs, absent = sum([(count + BR - 1) // BR for count in rows]), 4 - len(rows)
    given = (x.contiguous(), *weights, *[weights[0]] * absent, y, N, *rows, *[0] * absent, total, K, len(rows))
    with on(x.device):
        skinny_kernel[(programs,)](*given, DOT_ROWS, BR, BK, split, stages, num_warps=warps)
    return y
