"""ChunkLayout: how the tokens of all sequences are cut into chunks, so that no sequence needs a Python call of its own.

Sequences are ordered by their number of chunks, longest first, and taken in groups. Within a group chunks ("rows") are
step-major: step s holds the s-th chunk of every sequence that has one, so the sequences alive at a step are always the first of
that step's rows, and a scan over steps advances all of them together by plain slices. Consecutive steps make a block, which is
what is worked on at a time: on a CPU as much as stays in its caches, on a GPU enough to fill it. Memory for what happens within
chunks is that of one block, however long the sequences are.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor

from qwenlinear.kernels.packing import PackedSequences

_SIZES = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class TokenIndex:
    """Where the tokens of a block lie when they are not one regular slice.

    Args:
        gather: ``[rows * C]`` token of each slot (padding slots hold any token).
        padding: slots that are padding.
        slots: ``[t]`` slots that are tokens.
        tokens: ``[t]`` the token of each of those.
    """

    gather: Tensor
    padding: Tensor
    slots: Tensor
    tokens: Tensor


@dataclass(frozen=True)
class Block:
    """Consecutive steps of a group of sequences.

    Args:
        size: tokens of a chunk, C; the last chunk of a sequence is padded with zeros.
        counts: rows of each step, never rising.
        later: sequences that have a chunk after this block.
        first: whether the block begins at the first tokens of its sequences.
        view: ``(batch start, batch stop, token start, token stop)`` of a regular block, else None.
        index: its tokens where there is no such view.
    """

    size: int
    counts: tuple[int, ...]
    later: int
    first: bool
    view: tuple[int, int, int, int] | None = None
    index: TokenIndex | None = None

    @property
    def rows(self) -> int:
        """Chunks of the block."""
        return sum(self.counts)

    @property
    def whole(self) -> bool:
        """Whether the block is a view of the tokens: regular, without padding."""
        return self.view is not None and (self.view[3] - self.view[2]) % self.size == 0

    def walk(self) -> list[tuple[slice, int, int]]:
        """For each step its rows, their number, and how many of their sequences go on after it."""
        starts = [sum(self.counts[:step]) for step in range(len(self.counts))]
        following = (*self.counts[1:], self.later)
        return [(slice(s, s + n), n, later) for s, n, later in zip(starts, self.counts, following, strict=True)]

    def tokens(self, x: Tensor) -> Tensor:
        """The block's tokens, padding as zeros; a view where the block is :attr:`whole`.

        Args:
            x: ``[B, T, ...]``.

        Returns:
            ``[steps, n, C, ...]`` of a regular block, ``[rows, C, ...]`` of another.
        """
        C, tail = self.size, x.shape[2:]
        if self.view is None:
            assert self.index is not None
            slots = x[0].index_select(0, self.index.gather).index_fill_(0, self.index.padding, 0)
            return slots.view(-1, C, *tail)
        b0, b1, t0, t1 = self.view
        x = x[b0:b1, t0:t1]
        if not self.whole:  # one step, cut off by the end of the sequences
            padded = x.new_zeros(1, b1 - b0, C, *tail)
            padded[0, :, : t1 - t0] = x
            return padded
        return x.view(b1 - b0, -1, C, *tail).transpose(0, 1)

    def as_tokens(self, chunks: Tensor) -> Tensor:
        """A view of chunks ``[rows, heads, C, ...]`` in the order of :meth:`tokens`, C before heads."""
        if self.view is None:
            return chunks.transpose(1, 2)
        steps = len(self.counts)
        return chunks.view(steps, chunks.shape[0] // steps, *chunks.shape[1:]).transpose(2, 3)

    def cut(self, x: Tensor, chunks: Tensor) -> Tensor:
        """Copy tokens ``[B, T, heads, ...]`` into chunks ``[rows, heads, C, ...]``, casting on the way; returns chunks."""
        self.as_tokens(chunks).copy_(self.tokens(x))
        return chunks

    def join(self, chunks: Tensor, x: Tensor) -> None:
        """The inverse of :meth:`cut`: write chunks to their tokens in x."""
        source = self.as_tokens(chunks)
        if self.view is None:
            assert self.index is not None
            tokens = source.flatten(0, 1).index_select(0, self.index.slots)
            x[0].index_copy_(0, self.index.tokens, tokens.to(x.dtype))
        elif self.whole:
            self.tokens(x).copy_(source)
        else:
            b0, b1, t0, t1 = self.view
            x[b0:b1, t0:t1] = source[0, :, : t1 - t0]

    def steps(self, x: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
        """:meth:`tokens` of each step, heads first: ``[n, heads..., C, D]`` of x ``[B, T, heads..., D]``; cast if told."""
        tokens = self.tokens(x).to(dtype or x.dtype)
        if self.view is None:
            return cast("tuple[Tensor, ...]", tokens.movedim(1, -2).split(self.counts))
        return tokens.movedim(2, -2).unbind(0)


@dataclass(frozen=True)
class Group:
    """Sequences that advance together.

    Args:
        blocks: their steps, in order.
        number: how many sequences, n.
        start: the first of them in the caller's order, where they are consecutive.
        order: ``[n]`` which of the caller's sequences each one is, where they are not.
    """

    blocks: tuple[Block, ...]
    number: int
    start: int = 0
    order: Tensor | None = None

    def take(self, states: Tensor) -> Tensor:
        """The group's states ``[n, ...]`` out of all ``[N, ...]``; may be a view."""
        if self.order is None:
            return states[self.start : self.start + self.number]
        return states.index_select(0, self.order)

    def put(self, states: Tensor, begin: int, part: Tensor) -> None:
        """Write the states of the group's sequences from ``begin`` on to where they belong in ``states [N, ...]``."""
        end = begin + len(part)
        if self.order is None:
            states[self.start + begin : self.start + end] = part
        else:
            states.index_copy_(0, self.order[begin:end], part)


@dataclass(frozen=True)
class ChunkLayout:
    """The cut of B x T tokens (dense) or of T packed tokens into chunks of one size.

    Args:
        size: tokens of a chunk, C.
        groups: the sequences.
        shape: ``(N, T / N)`` for packed documents of one length, which are a dense batch; None leaves tensors as they are.
    """

    size: int
    groups: tuple[Group, ...]
    shape: tuple[int, int] | None = None

    @classmethod
    def of(
        cls,
        packed: PackedSequences | None,
        B: int,
        T: int,
        device: torch.device,
        row_bytes: int,
        state_bytes: int,
        keeps: bool,
    ) -> ChunkLayout:
        """The layout of a call.

        Args:
            packed: boundaries without empty sequences, or None for dense input.
            B: batch size.
            T: tokens of a batch row, at least 1.
            device: where the indices are needed.
            row_bytes: what the work within a chunk of 32 tokens takes of memory.
            state_bytes: the size of one sequence's state.
            keeps: whether the state before each block is kept, for a backward pass.

        Returns:
            The layout with the chunk size of least work.
        """
        budget = _budget(device)
        rows, sequences = max(1, budget // row_bytes), max(1, budget // state_bytes)
        step = _STEP_WORK["cpu" if device.type == "cpu" else "accelerator"]
        # The backward pass takes about four times row_bytes a row.
        weight = None if device.type != "cpu" else state_bytes / (4 * row_bytes) if keeps else math.inf
        if packed is None:
            return _dense_layout(B, T, _cheapest_size({T: B}, step), rows, sequences, weight)
        lengths = packed.lengths
        if min(lengths) == max(lengths):
            N, T = len(lengths), lengths[0]
            layout = _dense_layout(N, T, _cheapest_size({T: N}, step), rows, sequences, weight)
            return ChunkLayout(layout.size, layout.groups, (N, T))
        key = (cls, device, rows, sequences, weight)
        return packed.derive(key, lambda: _packed_layout(lengths, device, step, rows, sequences, weight))

    def fold(self, x: Tensor) -> Tensor:
        """Tokens ``[B, T, ...]`` as the blocks see them; a view."""
        return x if self.shape is None else x.view(*self.shape, *x.shape[2:])


# The launches of a step over all sequences, counted as floating-point operations of one head out of eight: about 30 us of a
# CPU of two cores, about 0.15 ms of a GPU.
_STEP_WORK = {"cpu": 800_000, "accelerator": 100_000_000}


def _budget(device: torch.device) -> int:
    """Bytes that a block's temporaries may take: what stays in the caches of a CPU's cores, what fills a GPU."""
    return max(2, torch.get_num_threads()) * 4_000_000 if device.type == "cpu" else 512_000_000


def _cheapest_size(lengths: Mapping[int, int], step_work: int) -> int:
    """The chunk size of least work for these sequence lengths (length -> how many).

    The weights are operation counts of one head for K = V = 128: a token's share of the products with the state and within
    its chunk, a chunk's pass over its state, and the launches of a step. They only have to rank seven sizes.
    """

    def work(size: int) -> float:
        chunks = sum(-(-length // size) * number for length, number in lengths.items())
        steps = -(-max(lengths) // size)
        return chunks * size * (98_000 + 1_000 * size) + chunks * 330_000 + steps * step_work

    return min(_SIZES, key=work)


def _block_rows(rows: int, chunks: int, sequences: int, weight: float | None) -> int:
    """How many rows to work on at a time, of at most ``rows``.

    On a CPU half of them are no slower, one after another or on two threads. Where states are kept, the memory of a block and
    that of the states, one a block and sequence, are least together where they are equal: short calls take smaller blocks,
    down to a quarter. Below that the blocks' own Python shows.

    Args:
        rows: what the budget allows.
        chunks: of the group.
        sequences: of the group.
        weight: a state's memory over a row's; infinite where none is kept, None to take all rows.
    """
    if weight is None:
        return rows
    most = (rows + 1) // 2
    return int(min(most, max((most + 1) // 2, math.sqrt(chunks * sequences * weight))))


def _cut_groups(number: int, rows: int, sequences: int) -> Iterator[tuple[int, int]]:
    """Ranges of sequences that advance together, of nearly equal size."""
    groups = -(-number // min(rows, sequences, number))
    bounds = [number * i // groups for i in range(groups + 1)]
    yield from pairwise(bounds)


@lru_cache(maxsize=256)
def _dense_layout(B: int, T: int, C: int, rows: int, sequences: int, weight: float | None) -> ChunkLayout:
    groups = []
    rest = T % C
    whole = T - rest
    for b0, b1 in _cut_groups(B, rows, sequences):
        n = b1 - b0
        stride = max(1, _block_rows(rows, n * (T // C), n, weight) // n) * C
        bounds = [*range(0, whole, stride), whole] if whole else [0]
        if rest:
            bounds.append(T)
        blocks = [
            Block(C, (n,) * -(-(t1 - t0) // C), n if t1 < T else 0, t0 == 0, view=(b0, b1, t0, t1))
            for t0, t1 in pairwise(bounds)
        ]
        groups.append(Group(tuple(blocks), n, start=b0))
    return ChunkLayout(C, tuple(groups))


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


def _packed_layout(
    lengths: tuple[int, ...], device: torch.device, step_work: int, rows: int, sequences: int, weight: float | None
) -> ChunkLayout:
    C = _cheapest_size(Counter(lengths), step_work)
    sizes = torch.tensor(lengths, dtype=torch.int64, device="cpu")
    begins = sizes.cumsum(0) - sizes
    order = torch.argsort((sizes + C - 1) // C, descending=True, stable=True)
    groups = []
    for first, last in _cut_groups(len(lengths), rows, sequences):
        mine = order[first:last]
        counts, rank, slots = token_slots(sizes[mine], C)
        assert torch.equal(rank, torch.arange(len(mine), device="cpu"))  # already in order
        own = sizes[mine]
        offsets = torch.repeat_interleave(begins[mine] - (own.cumsum(0) - own), own)
        tokens = torch.arange(len(slots), device="cpu") + offsets
        at_a_time = _block_rows(rows, sum(counts), len(mine), weight)
        blocks = tuple(_packed_blocks(C, counts, slots, tokens, at_a_time, device))
        groups.append(Group(blocks, len(mine), order=mine.to(device)))
    return ChunkLayout(C, tuple(groups))


def _packed_blocks(
    C: int, counts: list[int], slots: Tensor, tokens: Tensor, rows: int, device: torch.device
) -> Iterator[Block]:
    """Cut the steps of a group into blocks of at most so many rows (or one step)."""
    by_slot = torch.full((sum(counts) * C,), -1, dtype=torch.int64, device="cpu").scatter_(0, slots, tokens)
    step = 0
    while step < len(counts):
        begin = step
        while step < len(counts) and (step == begin or sum(counts[begin : step + 1]) <= rows):
            step += 1
        mine = tuple(counts[begin:step])
        gather, by_slot = by_slot.split([sum(mine) * C, len(by_slot) - sum(mine) * C])
        used = gather >= 0
        slot = used.nonzero().squeeze(1)
        parts = (gather.clamp(min=0), (~used).nonzero().squeeze(1), slot, gather[slot])
        index = TokenIndex(*(part.to(device) for part in parts))
        yield Block(C, mine, counts[step] if step < len(counts) else 0, begin == 0, index=index)
