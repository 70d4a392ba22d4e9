"""What the forward and the backward pass of the chunked gated delta rule share: a call, the chunks of a block, one step.

The formulas are in :mod:`torch_chunked`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from qwenlinear.kernels.chunk_layout import Block, ChunkLayout

# exp() of this is zero in every dtype, so clamping changes no value; it keeps -inf (a full reset) from making inf - inf.
LOG_ZERO = -1e4
# Decays are powers of two: on a CPU exp2() takes a quarter of exp()'s time, and a fiftieth where the result is zero or infinite.
LOG2_E = math.log2(math.e)


class Call:
    """The tensors of a call as its layout sees them, ``[N, T, heads, ...]``, and its options."""

    def __init__(
        self, layout: ChunkLayout, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float, norm: bool
    ) -> None:
        self.q, self.k, self.v, self.g, self.beta = (layout.fold(x) for x in (q, k, v, g, beta))
        self.scale, self.norm = scale, norm
        self.groups = q.shape[2], v.shape[2] // q.shape[2]  # H and G
        self.grouped_v = self.v.unflatten(2, self.groups)


@dataclass
class Chunks:
    """What the chunks of a block need that does not depend on the state; made alike in the forward and in the backward pass."""

    kq: Tensor  # [rows, H, 2C, K], keys above scaled queries, normalised if asked for
    factor: Tensor | None  # [rows, H, 2C, 1], what normalised (and scaled) kq
    beta: Tensor  # [rows, H, G, C, 1]
    decay: Tensor  # e^c, [rows, H, G, C, 1]
    tail: Tensor  # e^(c_C - c), [rows, H, G, C, 1]
    D: Tensor  # [rows, H, G, C, C], zero above the diagonal
    kqk: Tensor  # kq k^T, [rows, H, 1, 2C, C]
    X: Tensor  # (I + A)^-1, [rows, H, G, C, C]

    @classmethod
    def cut(cls, call: Call, block: Block) -> Chunks:
        """Cut a block's tokens into chunks and do everything within a chunk."""
        rows, C, groups, g = block.rows, block.size, call.groups, call.g
        kq, factor = _cut_keys_and_queries(call, block)
        beta = block.cut(call.beta, g.new_empty(rows, g.shape[2], C)).unflatten(1, groups).unsqueeze(-1)
        logs = block.cut(g, g.new_empty(rows, g.shape[2], C, dtype=torch.float64)).unflatten(1, groups)
        c = logs.clamp_(min=LOG_ZERO).mul_(LOG2_E).cumsum(-1)
        D = (c.unsqueeze(-1) - c.unsqueeze(-2)).to(g.dtype).exp2_().tril_()
        kqk = (kq @ kq[:, :, :C].mT).unsqueeze(2)
        A = (D * kqk[..., :C, :]).mul_(beta)  # its diagonal is ignored below
        eye = torch.eye(C, dtype=g.dtype, device=g.device).expand_as(A)
        X = torch.linalg.solve_triangular(
            A, eye, upper=False, unitriangular=True, left=False
        )  # a third faster than left
        decay, tail = (x.to(g.dtype).exp2_().unsqueeze(-1) for x in (c, c[..., -1:] - c))
        return cls(kq, factor, beta, decay, tail, D, kqk, X)

    def attention(self) -> Tensor:
        """(q k^T * D), ``[rows, H, G, C, C]``."""
        return self.kqk[..., self.D.shape[-1] :, :] * self.D

    def writing(self) -> Tensor:
        """(I + A)^-1 with beta in its columns, ``[rows, H, G, C, C]``: W is its product with v - e^c (k S)."""
        return self.X * self.beta.mT


class Step(NamedTuple):
    """One step of a block, of n sequences of which ``later`` go on after it, as flat batches of matrices."""

    n: int
    later: int
    kq: Tensor  # [n H, 2C, K]
    keys: Tensor  # [n H, K, C]
    writing: Tensor  # [n H G, C, C], beside it what else the forward pass multiplies values with, [n H G, 2C, C]
    decay: Tensor  # [n, H, G, C, 1]
    tail: Tensor  # [n, H, G, C, 1]
    kept: Tensor  # e^c_C, what is kept of the state over a chunk, in every column: [n H, 1, G V]

    def advance(self, S: Tensor | None, W: Tensor, needed: int, scratch: Columns) -> Tensor | None:
        """S' ``[n H, K, G V]`` of the first ``needed`` sequences from W ``[n, H, G, C, V]``, in the memory of S."""
        if not needed:
            return None
        torch.mul(self.tail, W, out=scratch.split)
        tail, keys, kept = scratch.merged, self.keys, self.kept
        if needed < self.n:
            rows = needed * self.tail.shape[1]
            tail, keys, kept = tail[:rows], keys[:rows], kept[:rows]
        if S is None:
            return torch.bmm(keys, tail)
        S = S.narrow(0, 0, keys.shape[0])
        return S.mul_(kept).baddbmm_(keys, tail)


def steps(block: Block, chunks: Chunks, writing: Tensor, V: int) -> Iterator[Step]:
    """The steps of a block in order; every tensor is split once, not sliced at every step."""
    (_, H, G, _, _), C, counts = chunks.beta.shape, block.size, block.counts
    heads = [n * H for n in counts]
    # A factor for every column: a row of the state is one loop then, not one for each value head (a third of the time).
    kept = chunks.decay[:, :, :, -1].expand(-1, -1, -1, V).reshape(-1, 1, G * V)
    return map(
        Step,
        counts,
        (*counts[1:], block.later),
        chunks.kq.flatten(0, 1).split(heads),
        chunks.kq[:, :, :C].mT.flatten(0, 1).split(heads),
        writing.flatten(0, 2).split([n * G for n in heads]),
        chunks.decay.split(counts),
        chunks.tail.split(counts),
        kept.split(heads),
    )


def _cut_keys_and_queries(call: Call, block: Block) -> tuple[Tensor, Tensor | None]:
    """kq ``[rows, H, 2C, K]`` and what normalised it, ``[rows, H, 2C, 1]``: 1 / norm for keys, scale / norm for queries."""
    C, (H, _), K = block.size, call.groups, call.q.shape[3]
    kq = call.g.new_empty(block.rows, H, 2 * C, K)
    if not call.norm:
        block.cut(call.k, kq[:, :, :C])
        block.cut(call.q, kq[:, :, C:]).mul_(call.scale)
        return kq, None
    factor = call.g.new_empty(block.rows, H, 2 * C, 1)
    for x, part, scale in ((call.k, slice(C), 1.0), (call.q, slice(C, None), call.scale)):
        tokens = block.tokens(x)
        norm = torch.linalg.vector_norm(tokens, dim=-1, keepdim=True, dtype=kq.dtype)
        own = block.as_tokens(factor[:, :, part])
        torch.mul(torch.rsqrt(norm.square_().add_(1e-6)), scale, out=own)
        torch.mul(tokens, own, out=block.as_tokens(kq[:, :, part]))
    return kq, factor


def split_groups(x: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """A view of ``[n, H, rows, G V]`` or ``[n H, rows, G V]`` as ``[n, H, G, rows, V]``."""
    n, H, G = shape
    return x.view(n, H, x.shape[-2], G, x.shape[-1] // G).transpose(2, 3)


class Columns(NamedTuple):
    """Memory for values with the heads of a group side by side, seen in two ways."""

    merged: Tensor  # [n H, C, G V]
    split: Tensor  # [n, H, G, C, V]

    @classmethod
    def empty(cls, like: Tensor, n: int, H: int, G: int, C: int, V: int) -> Columns:
        """Fresh memory on like's device, of its dtype."""
        merged = like.new_empty(n * H, C, G * V)
        return cls(merged, split_groups(merged, (n, H, G)))
