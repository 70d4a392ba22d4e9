"""A few rows times the transposes of up to four weights, in one launch.

What it costs is reading the weights once. A program takes whole rows of a weight, asks for all of them at once, so that as many
bytes as possible are under way, and multiplies them with each row of x in registers: no copy of a weight, no second pass over
partial sums, and the same order of additions in every run.
"""

# mypy: ignore-errors
# Triton's functions carry no types.

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from qwenlinear._launch import on, power_of_two

_TILE = 8192  # elements of weights in a program: 64 registers of each of 128 threads


@triton.jit
def skinny_kernel(
    x, y, w0, w1, w2, w3,
    N: tl.constexpr, D: tl.constexpr, R0: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr, R3: tl.constexpr,
    BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """BR rows of one of the weights, ``[R0 .. R3, D]``; a weight that is not there has R = 0."""
    B1: tl.constexpr = (R0 + BR - 1) // BR
    B2: tl.constexpr = B1 + (R1 + BR - 1) // BR
    B3: tl.constexpr = B2 + (R2 + BR - 1) // BR
    TOTAL: tl.constexpr = R0 + R1 + R2 + R3
    block = tl.program_id(0)
    w, first, rows, column = w0, block * BR, R0, 0
    if block >= B1:
        w, first, rows, column = w1, (block - B1) * BR, R1, R0
    if block >= B2:
        w, first, rows, column = w2, (block - B2) * BR, R2, R0 + R1
    if block >= B3:
        w, first, rows, column = w3, (block - B3) * BR, R3, R0 + R1 + R2
    row, d = first + tl.arange(0, BR), tl.arange(0, BD)
    inside = (row < rows)[:, None] & (d < D)[None, :]
    # read once: what stays in the cache should be states, not weights
    tile = tl.load(
        w + row[:, None].to(tl.int64) * D + d[None, :], mask=inside, other=0.0, eviction_policy="evict_first"
    )
    tile = tile.to(tl.float32)
    for n in tl.static_range(N):
        token = tl.load(x + n * D + d, mask=d < D, other=0.0).to(tl.float32)
        products = tl.where(inside, tile * token[None, :], 0.0)  # 0 times inf beyond a row's end would be NaN
        tl.store(y + n * TOTAL + column + row, tl.sum(products, 1).to(y.dtype.element_ty), mask=row < rows)


def tile(D: int) -> tuple[int, int, int]:
    """How the weights are cut.

    Args:
        D: length of a row.

    Returns:
        Rows and columns of a program's block, powers of two, and its warps. docs/performance-notes.md has what was measured.
    """
    BD = power_of_two(D)
    return max(1, _TILE // BD), BD, max(4, BD // 2048)


def launch(x: Tensor, weights: Sequence[Tensor], cut: tuple[int, int, int] | None = None) -> Tensor:
    """`qwenlinear.ops.skinny_linear` without its checks.

    Args:
        x: ``[N, D]``.
        weights: up to four ``[R, D]``, contiguous.
        cut: as :func:`tile` returns, which is the default.

    Returns:
        ``[N, sum of R]`` in x's dtype.
    """
    x = x.contiguous()
    N, D = x.shape
    sizes = [w.shape[0] for w in weights]
    absent = 4 - len(sizes)
    y = x.new_empty(N, sum(sizes))
    if y.numel():
        BR, BD, warps = cut or tile(D)
        with on(x.device):
            skinny_kernel[(sum([-(-size // BR) for size in sizes]),)](
                x, y, *weights, *[weights[0]] * absent, N, D, *sizes, *[0] * absent, BR, BD, num_warps=warps
            )
    return y
