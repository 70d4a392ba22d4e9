"""PackedSequences: the boundaries of packed documents, validated once and kept where nobody can rewrite them.

Libraries below cache what they derive from ``cu_seqlens`` by the tensor's identity, so a tensor that is rewritten in
place serves stale boundaries. This object therefore owns private copies, on the host and on each device that asked.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate, pairwise
from typing import TypeVar, cast

import torch
from torch import Tensor

from qwenlinear.checks import as_device, needs_values

_Derived = TypeVar("_Derived")
_MOST_TOKENS = 2**31 - 1


class PackedSequences:
    """Boundaries of N documents that lie one behind another in a batch of one; made once a batch, reused by every layer.

    Build it with :meth:`from_lengths`, :meth:`from_cu_seqlens` or :meth:`from_position_ids`. It is accepted wherever
    ``cu_seqlens`` is. Immutable, hashable, equal when the boundaries are equal. Documents of zero tokens are allowed.

    Example:
        >>> packed = PackedSequences.from_lengths([3, 0, 5])
        >>> packed
        PackedSequences(N=3, T=8, lengths=[3, 0, 5])
        >>> packed.cu_seqlens().tolist()
        [0, 3, 3, 8]
    """

    __slots__ = ("__weakref__", "_bounds", "_cache")
    _bounds: tuple[int, ...]
    _cache: dict[Hashable, object]

    def __init__(self) -> None:
        raise TypeError("PackedSequences is built with from_lengths, from_cu_seqlens or from_position_ids")

    @classmethod
    def _make(cls, bounds: tuple[int, ...], device: torch.device | str | None) -> PackedSequences:
        if bounds[-1] > _MOST_TOKENS:
            raise ValueError(f"documents need at most {_MOST_TOKENS} tokens together (int32), got {bounds[-1]}")
        where = torch.device("cpu") if device is None else as_device("device", device)
        self = object.__new__(cls)
        object.__setattr__(self, "_bounds", bounds)
        object.__setattr__(self, "_cache", {})
        if device is not None:
            self._boundaries(where)
        return self

    @classmethod
    def from_lengths(cls, lengths: Sequence[int] | Tensor, device: torch.device | str | None = None) -> PackedSequences:
        """Boundaries from document lengths.

        Args:
            lengths: N token counts, each >= 0, N >= 1. A tensor on a GPU costs one synchronisation.
            device: where the boundaries will be used, to copy them there now; None copies at first use.

        Returns:
            The boundaries ``[0, l0, l0 + l1, ...]``.

        Raises:
            ValueError: no lengths, or one that is not a whole number >= 0.

        Example:
            >>> PackedSequences.from_lengths([5, 7]).total_tokens
            12
        """
        values = _integers("lengths", lengths)
        if not values:
            raise ValueError("lengths needs at least one document, got none")
        if min(values) < 0:
            raise ValueError(
                f"lengths needs token counts >= 0, got {min(values)} at document {values.index(min(values))}"
            )
        return cls._make((0, *accumulate(values)), device)

    @classmethod
    def from_cu_seqlens(
        cls, cu_seqlens: Sequence[int] | Tensor, device: torch.device | str | None = None
    ) -> PackedSequences:
        """Boundaries from cumulative lengths, FlashAttention's convention.

        Args:
            cu_seqlens: ``[N+1]`` int32 or int64, starting at 0, never falling, ending at T. Copied: rewriting the tensor
                afterwards changes nothing here. On a GPU this is the one documented synchronisation.
            device: where the boundaries will be used; None means the tensor's own device.

        Returns:
            The same boundaries, owned.

        Raises:
            ValueError: wrong shape or dtype, a start other than 0, or a fall.

        Example:
            >>> PackedSequences.from_cu_seqlens(torch.tensor([0, 5, 12])).lengths
            (5, 7)
        """
        values = _integers("cu_seqlens", cu_seqlens)
        if len(values) < 2:
            raise ValueError(f"cu_seqlens needs shape [N+1] with N >= 1, got {len(values)} value(s)")
        if values[0] != 0:
            raise ValueError(f"cu_seqlens needs to start at 0, got {values[0]}")
        for index, (start, end) in enumerate(pairwise(values)):
            if end < start:
                raise ValueError(f"cu_seqlens needs to rise or stay, got {start} then {end} at document {index}")
        if device is None and isinstance(cu_seqlens, Tensor):
            device = cu_seqlens.device
        return cls._make(tuple(values), device)

    @classmethod
    def from_position_ids(
        cls, position_ids: Sequence[int] | Tensor, device: torch.device | str | None = None
    ) -> PackedSequences:
        """Boundaries from positions that restart at 0 with each document.

        Args:
            position_ids: ``[T]`` or ``[1, T]`` integers, 0, 1, 2, ... within a document. On a GPU reading them synchronises.
            device: where the boundaries will be used; None means the tensor's own device.

        Returns:
            One document per restart.

        Raises:
            ValueError: another shape, no token, a first position other than 0, or a step that is neither +1 nor a restart
                at 0 (what looks like a boundary is used or refused, never dropped).

        Example:
            >>> PackedSequences.from_position_ids(torch.tensor([[0, 1, 2, 0, 1]])).lengths
            (3, 2)
        """
        if isinstance(position_ids, Tensor):
            if position_ids.dim() == 2 and position_ids.shape[0] == 1:
                position_ids = position_ids[0]
            if device is None:
                device = position_ids.device
        values = _integers("position_ids", position_ids)
        if not values or values[0] != 0:
            raise ValueError(f"position_ids needs to start at 0, got {values[0] if values else 'no token'}")
        starts = [0]
        for index in range(1, len(values)):
            if values[index] == 0:
                starts.append(index)
            elif values[index] != values[index - 1] + 1:
                raise ValueError(
                    f"position_ids needs to count up by 1 or restart at 0, got {values[index - 1]} then {values[index]} "
                    f"at token {index}; pass cu_seqlens if this is a boundary"
                )
        return cls._make((*starts, len(values)), device)

    @property
    def num_sequences(self) -> int:
        """N, the number of documents, empty ones included."""
        return len(self._bounds) - 1

    @property
    def total_tokens(self) -> int:
        """T, the number of tokens of all documents."""
        return self._bounds[-1]

    @property
    def bounds(self) -> tuple[int, ...]:
        """The N+1 boundaries, on the host."""
        return self._bounds

    @property
    def lengths(self) -> tuple[int, ...]:
        """The N document lengths, in tokens."""
        return self.derive("lengths", lambda: tuple(end - start for start, end in pairwise(self._bounds)))

    @property
    def nonempty(self) -> PackedSequences:
        """The same documents without those of zero tokens; itself where there is none (or nothing else)."""

        def make() -> PackedSequences:
            kept = [length for length in self.lengths if length]
            return self if not kept or len(kept) == self.num_sequences else PackedSequences.from_lengths(kept)

        return self.derive("nonempty", make)

    def cu_seqlens(self, device: torch.device | str = "cpu", dtype: torch.dtype = torch.int32) -> Tensor:
        """A fresh copy of the boundaries, the caller's to keep.

        Args:
            device: where to put it.
            dtype: int32 (default) or int64.

        Returns:
            ``[N+1]`` cumulative lengths.

        Raises:
            ValueError: no device, or no dtype that holds whole numbers of this size.
        """
        if dtype not in (torch.int32, torch.int64):
            raise ValueError(f"dtype needs torch.int32 or torch.int64, got {dtype!r}")
        return self._boundaries(as_device("device", device)).to(dtype, copy=True)

    def _boundaries(self, device: torch.device, dtype: torch.dtype = torch.int32) -> Tensor:
        """``[N+1]``, shared and private: only for callees that read it, so that caches by identity hit."""
        return self.derive(
            ("cu_seqlens", device, dtype),
            lambda: torch.tensor(self._bounds, dtype=dtype, device="cpu").to(device),
        )

    def _nonempty_index(self, device: torch.device) -> Tensor:
        """``[M]`` int64, shared: which of the N documents have tokens."""

        def make() -> Tensor:
            return torch.tensor(
                [n for n, length in enumerate(self.lengths) if length], dtype=torch.int64, device="cpu"
            ).to(device)

        return self.derive(("nonempty_index", device), make)

    def segment_ids(self, device: torch.device | str = "cpu") -> Tensor:
        """Which document each token belongs to.

        Args:
            device: where it will be used.

        Returns:
            ``[T]`` int64, shared: do not write to it.

        Raises:
            ValueError: no device.
        """
        where = as_device("device", device)

        def make() -> Tensor:
            lengths = torch.tensor(self.lengths, dtype=torch.int64, device="cpu")
            return torch.repeat_interleave(torch.arange(self.num_sequences, device="cpu"), lengths).to(where)

        return self.derive(("segment_ids", where), make)

    def derive(self, key: Hashable, make: Callable[[], _Derived]) -> _Derived:
        """What a kernel derives from the boundaries, made at the first call and kept as long as this object.

        Args:
            key: names the value; put the kernel's own name and the device into it.
            make: computes it, from the boundaries alone. Runs outside inference mode and without gradients, so that the
                result can be saved for a later backward pass.

        Returns:
            The kept value.
        """
        if key not in self._cache:
            with torch.inference_mode(False), torch.no_grad():
                made = make()
            self._cache.setdefault(key, made)  # of two threads at their first call both go on with one value
        return cast(_Derived, self._cache[key])

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"PackedSequences is immutable; make a new one instead of setting {name}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PackedSequences) and self._bounds == other._bounds

    def __hash__(self) -> int:
        return hash(self._bounds)

    def __reduce__(
        self,
    ) -> tuple[object, ...]:  # copies and other processes get the boundaries, not the caches
        return PackedSequences.from_cu_seqlens, (self._bounds,)

    def __repr__(self) -> str:
        shown = ", ".join(map(str, self.lengths[:8])) + (", ..." if self.num_sequences > 8 else "")
        return f"PackedSequences(N={self.num_sequences}, T={self.total_tokens}, lengths=[{shown}])"


def _integers(name: str, values: Sequence[int] | Tensor) -> list[int]:
    if isinstance(values, Tensor):
        needs_values(name, values)
        if values.dim() != 1 or values.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"{name} needs a one-dimensional int32 or int64 tensor, got shape {list(values.shape)} and {values.dtype}"
            )
        return cast("list[int]", values.tolist())  # the one copy to the host; synchronises when values lie on a GPU
    try:
        if any(isinstance(value, bool) for value in values):
            raise TypeError
        return [operator.index(value) for value in values]  # NumPy's integers too
    except TypeError:
        raise ValueError(f"{name} needs whole numbers, got {values!r:.80}") from None
