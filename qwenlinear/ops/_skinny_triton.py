"""Products of a few tokens with the transposes of up to four weights in one launch, at the speed of reading the weights.

A program takes BR rows of one weight, over all of its columns, so that no two programs add to one number and two runs are
equal bit by bit. What limits it is how many bytes are under way: 25 to 32 KB for each multiprocessor. Two forms:
multiply and sum, in which every thread reads 16 bytes of each of its rows at once, and products on tensor cores, where the
tokens are padded to 16 and the columns of a block may be split over the warps.
"""

# mypy: ignore-errors
# Triton's functions carry no types.

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from qwenlinear._launch import on

SUMMED_TOKENS = 4
"""Tokens of one program that multiplies and sums: each needs accumulators of its own."""

DOT_TOKENS = 16
"""Tokens of a product on tensor cores."""


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


def choose(tokens: int, weights: Sequence[Tensor]) -> Tile:
    """The tile for a call. Float32 multiplies and sums for any number of tokens: tensor cores would round the factors."""
    if tokens <= SUMMED_TOKENS or weights[0].dtype == torch.float32:
        return Tile(4, 4096 // weights[0].element_size(), 0, 1, 1, 4)
    return Tile(16, 512, 4, 4, 1, 4)


def launch(x: Tensor, weights: Sequence[Tensor], tile: Tile | None = None) -> Tensor:
    """`qwenlinear.ops.skinny_linear` without its checks: ``[tokens, all rows]``."""
    tokens, K = x.shape
    rows = [weight.shape[0] for weight in weights]
    total = sum(rows)
    y = x.new_empty(tokens, total)
    if not (tokens and total and K):
        return y.zero_()
    BR, BK, split, stages, unroll, warps, evict, pdl = tile or choose(tokens, weights)
    blocks = sum([(count + BR - 1) // BR for count in rows])
    missing = 4 - len(rows)
    given = (x.contiguous(), *weights, *weights[:1] * missing, y, tokens, *rows, *[0] * missing, total)
    fixed = {"K": K, "WEIGHTS": len(rows), "BR": BR, "BK": BK, "STAGES": stages, "num_warps": warps}
    fixed |= {"EVICT": evict, "PDL": pdl, **({"launch_pdl": True} if pdl else {})}
    with on(x.device):
        if split:
            dot_kernel[(blocks,)](*given, **fixed, TOKENS=DOT_TOKENS, SPLIT=split)
        else:
            together = min(tokens, SUMMED_TOKENS)
            groups = (tokens + together - 1) // together
            summed_kernel[(blocks * groups,)](*given, **fixed, TOKENS=together, UNROLL=unroll)
    return y
