"""ChunkLayout: where the tokens of all sequences lie when they are cut into chunks, so that no sequence needs a Python call.

Rows (chunks) are step-major: step s holds the s-th chunk of every sequence that has one, sequences ordered by their number of
chunks, longest first. So the sequences alive at a step are always the first of that step's rows, and a scan over steps advances
all sequences together by plain slices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from qwenlinear.kernels.packing import PackedSequences

_SIZES = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class ChunkLayout:
    """The cut of B x T tokens (dense) or of T packed tokens into chunks of one size.

    Args:
        size: tokens of a chunk, C; the last chunk of a sequence is padded with zeros.
        counts: rows of each step, never rising; ``counts[0]`` is N.
        dense: ``(B, T)`` of dense input, else None.
        gather: ``[rows * C]`` token of each slot (padding slots hold any token), None when dense.
        padding: ``[P]`` slots that are padding, None when dense.
        scatter: ``[T]`` slot of each token, None when dense.
        order: ``[N]`` sequences by rank, None when dense (identity).
        rank: ``[N]`` the inverse of order, None when dense.
    """

    size: int
    counts: tuple[int, ...]
    dense: tuple[int, int] | None = None
    gather: Tensor | None = None
    padding: Tensor | None = None
    scatter: Tensor | None = None
    order: Tensor | None = None
    rank: Tensor | None = None

    @classmethod
    def of(cls, packed: PackedSequences | None, B: int, T: int, device: torch.device) -> ChunkLayout:
        """The layout of a call, made once a PackedSequences.

        Args:
            packed: boundaries without empty sequences, or None for dense input.
            B: batch size.
            T: tokens of a batch row, at least 1.
            device: where the indices are needed.

        Returns:
            The layout with the chunk size of least work.
        """
        if packed is None:
            size = _cheapest_size({T: B})
            return cls(size, (B,) * -(-T // size), dense=(B, T))
        return packed.derive((cls, device), lambda: _packed_layout(packed, device))

    @property
    def rows(self) -> int:
        """Chunks of all sequences."""
        return sum(self.counts)

    @property
    def starts(self) -> list[int]:
        """First row of each step."""
        return [0, *accumulate(self.counts[:-1])]

    def cut(self, x: Tensor, out: Tensor) -> Tensor:
        """Copy tokens into chunks, heads before tokens, casting on the way; padding becomes zero.

        Args:
            x: ``[B, T, heads, ...]``.
            out: ``[rows, heads, C, ...]``, written to.

        Returns:
            out.
        """
        C = self.size
        if self.dense is None:
            assert self.gather is not None
            assert self.padding is not None
            slots = x.flatten(0, 1).index_select(0, self.gather).index_fill_(0, self.padding, 0)
            return out.copy_(slots.unflatten(0, (-1, C)).transpose(1, 2))
        B, T = self.dense
        whole, rest = divmod(T, C)
        steps = out.unflatten(0, (-1, B)).transpose(2, 3)  # [steps, B, C, heads, ...]
        if whole:
            steps[:whole].copy_(x[:, : whole * C].unflatten(1, (whole, C)).transpose(0, 1))
        if rest:
            steps[whole, :, :rest].copy_(x[:, whole * C :])
            steps[whole, :, rest:].zero_()
        return out

    def join(self, chunks: Tensor, like: Tensor) -> Tensor:
        """The inverse of :meth:`cut`: tokens in their places.

        Args:
            chunks: ``[rows, heads, C, ...]``.
            like: a tensor of the wanted dtype, batch and token sizes.

        Returns:
            ``[B, T, heads, ...]`` in like's dtype, contiguous.
        """
        C = self.size
        if self.dense is None:
            assert self.scatter is not None
            tokens = chunks.transpose(1, 2).flatten(0, 1).index_select(0, self.scatter)
            return tokens.unsqueeze(0).to(like.dtype)
        B, T = self.dense
        out = like.new_empty(B, T, chunks.shape[1], *chunks.shape[3:])
        whole, rest = divmod(T, C)
        steps = chunks.unflatten(0, (-1, B)).transpose(2, 3)
        if whole:
            out[:, : whole * C].unflatten(1, (whole, C)).transpose(0, 1).copy_(steps[:whole])
        if rest:
            out[:, whole * C :].copy_(steps[whole, :, :rest])
        return out

    def ranked(self, states: Tensor) -> Tensor:
        """States ``[N, ...]`` from the caller's order into the order of rows."""
        return states if self.order is None else states.index_select(0, self.order)

    def unranked(self, states: Tensor) -> Tensor:
        """States ``[N, ...]`` from the order of rows into the caller's order."""
        return states if self.rank is None else states.index_select(0, self.rank)


def _cheapest_size(lengths: dict[int, int] | Counter[int]) -> int:
    """The chunk size of least work for these sequence lengths (length -> how many).

    The weights are operation counts for K = V = 128 and eight heads: a token's share of the products with the state and within
    its chunk, a chunk's pass over its state, and the launches of a step (about 0.1 ms on a CPU). They only have to rank
    seven sizes.
    """

    def work(size: int) -> float:
        chunks = sum(-(-length // size) * number for length, number in lengths.items())
        steps = -(-max(lengths) // size)
        return chunks * size * (98_000 + 1_000 * size) + chunks * 330_000 + steps * 2_500_000

    return min(_SIZES, key=work)


def token_slots(lengths: Tensor, size: int) -> tuple[list[int], Tensor, Tensor]:
    """Step-major slots of packed tokens.

    Args:
        lengths: ``[N]`` int64 on the CPU, each at least 1.
        size: tokens of a chunk.

    Returns:
        Rows of each step; ``[N]`` sequences by rank; ``[T]`` slot of each token.
    """
    chunks = (lengths + size - 1) // size
    order = torch.argsort(chunks, descending=True, stable=True)
    alive = torch.bincount(chunks)[1:].flip(0).cumsum(0).flip(0)  # sequences with more than s chunks
    starts = torch.cat([alive.new_zeros(1), alive.cumsum(0)[:-1]])
    rank = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device="cpu"))
    ends = lengths.cumsum(0)
    position = torch.arange(int(ends[-1]), device="cpu") - torch.repeat_interleave(ends - lengths, lengths)
    row = starts[position // size] + torch.repeat_interleave(rank, lengths)
    return alive.tolist(), order, row * size + position % size


def _packed_layout(packed: PackedSequences, device: torch.device) -> ChunkLayout:
    size = _cheapest_size(Counter(packed.lengths))
    counts, order, scatter = token_slots(torch.tensor(packed.lengths, dtype=torch.int64, device="cpu"), size)
    slots = sum(counts) * size
    gather = torch.zeros(slots, dtype=torch.int64, device="cpu").scatter_(
        0, scatter, torch.arange(len(scatter), device="cpu")
    )
    used = torch.zeros(slots, dtype=torch.bool, device="cpu").index_fill_(0, scatter, True)
    padding = (~used).nonzero().squeeze(1)
    rank = torch.argsort(order)
    move: Iterable[Tensor] = (gather, padding, scatter, order, rank)
    gather, padding, scatter, order, rank = (index.to(device) for index in move)
    return ChunkLayout(size, tuple(counts), None, gather, padding, scatter, order, rank)
