"""GatedDeltaNetCache: what one layer remembers of N sequences between calls."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from qwenlinear.checks import needs_floating
from qwenlinear.kernels.tangents import forward_mode
from qwenlinear.kernels.writable import why_not_writable


def check_states(conv_state: object, recurrent_state: object) -> tuple[Tensor | None, Tensor | None]:
    """Require both states of a cache or neither; they may have been set by hand.

    Args:
        conv_state: meant as a tensor or None.
        recurrent_state: the same.

    Returns:
        Both.

    Raises:
        ValueError: one without the other, or what is no tensor of a floating dtype with a row for each sequence.
    """
    if conv_state is None and recurrent_state is None:
        return None, None
    if conv_state is None or recurrent_state is None:
        raise ValueError("cache needs both its states or neither, got one of them None")
    for name, state, dims in (("conv_state", conv_state, 3), ("recurrent_state", recurrent_state, 4)):
        needs_floating(f"cache.{name}", state)
        if state.dim() != dims:  # type: ignore[attr-defined]  # a tensor by now
            raise ValueError(f"cache.{name} needs {dims} dimensions, got {list(state.shape)}")  # type: ignore[attr-defined]
    return conv_state, recurrent_state  # type: ignore[return-value]


class GatedDeltaNetCache:
    """State of one layer: the last columns of the convolution's input, and the recurrent state. Rows are sequences.

    Hand a fresh one to the first call and the same one to each later call. A model needs one for each layer: a layer refuses
    one that another layer filled. After N packed documents the next call is N packed documents or a batch of N. The graph is
    kept when gradients are on: call :meth:`detach` between steps of truncated back-propagation. Activation checkpointing
    runs a call a second time, when the cache has gone on: inside the checkpointed function use a :meth:`copy` made there.

    **In place.** One token a sequence, without gradients, is decoded in the memory of the states that a layer left here: the
    two tensors stay the same ones (a captured CUDA graph finds them) and their values change, so keep a :meth:`copy` and
    not a reference. Tensors that carry a graph, that were detached from one or put in by hand are never written to: the
    call leaves new ones, which later calls write.

    A call that raises leaves the cache unchanged: everything is checked before the first write. What fails while states are
    being written (out of memory, an interrupt) cannot be undone, and the cache refuses further calls until it is reset.

    Attributes:
        conv_state: ``[N, 2*key_dim+value_dim, W-1]`` in the activations' dtype, oldest column first; None before the
            first call. Columns before a sequence's first token are zero.
        recurrent_state: ``[N, HV, K, V]`` float32 (float64 in a float64 layer); None before the first call.

    Example:
        >>> cache = GatedDeltaNetCache()
        >>> cache
        GatedDeltaNetCache(empty)
    """

    conv_state: Tensor | None
    recurrent_state: Tensor | None
    _layer: weakref.ref[object] | None  # which layer filled it
    _own: tuple[Tensor, Tensor] | None  # states that nobody's graph reaches
    _torn: bool  # a call failed while it was writing
    _agreed: (
        tuple[object, torch.dtype] | None
    )  # the kernel and activations' dtype that were asked about these very states

    def __init__(self) -> None:
        self.reset()

    @property
    def num_sequences(self) -> int | None:
        """N, or None before the first call."""
        return None if self.recurrent_state is None else self.recurrent_state.shape[0]

    def reset(self) -> None:
        """Forget everything: the next call starts its sequences."""
        self.conv_state = None
        self.recurrent_state = None
        self._layer = None
        self._own = None
        self._torn = False
        self._agreed = None

    def check_layer(self, layer: object) -> None:
        """Refuse another layer's states: they would fit, and be wrong.

        Args:
            layer: the layer that is about to go on from them.

        Raises:
            ValueError: another layer filled this cache. States that were set by hand or loaded fit any layer.
        """
        filled_by = None if self._layer is None else self._layer()
        if filled_by is not None and filled_by is not layer:
            raise ValueError(
                "cache needs to be this layer's own, got one that another layer filled; make one GatedDeltaNetCache a layer"
            )

    def store(self, layer: object, conv_state: Tensor | None, recurrent_state: Tensor | None) -> None:
        """Take a layer's new states.

        Args:
            layer: whose they are.
            conv_state: ``[N, 2*key_dim+value_dim, W-1]``.
            recurrent_state: ``[N, HV, K, V]``.
        """
        self.conv_state, self.recurrent_state, self._layer = conv_state, recurrent_state, weakref.ref(layer)
        self._keep_own()

    def why_not_in_place(self) -> str | None:
        """Why a call that needs no gradients does not write its new states over the old ones.

        Returns:
            One reason in words, or None where it does.
        """
        conv, recurrent = self.conv_state, self.recurrent_state
        if conv is None or recurrent is None:
            return "the cache is empty"
        if self._own is None or self._own[0] is not conv or self._own[1] is not recurrent:
            return "its states carry a graph, were detached from one or put in by hand"
        reasons = (why_not_writable(*state) for state in (("a conv_state", conv), ("a recurrent_state", recurrent)))
        needed = next(filter(None, reasons), None)
        return None if needed is None else f"writing to its states needs {needed}"

    def agreed(self, kernel: object, dtype: torch.dtype, ask: Callable[[], None]) -> None:
        """Ask a kernel once, and not for each token, whether it takes a step from these states.

        Args:
            kernel: whom to ask; its answer rests on nothing that changes while the states are the same tensors.
            dtype: of the activations.
            ask: raises where it refuses.
        """
        if torch.compiler.is_compiling() or forward_mode():  # tangents come with a call, not with the states
            ask()
        elif self._agreed is None or self._agreed[0] is not kernel or self._agreed[1] != dtype:
            ask()
            self._agreed = (kernel, dtype)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Around the writes of a call in place: what fails in between leaves states that nobody may go on from."""
        self._torn = True
        yield
        self._torn = False

    def take_back(self, held: Mapping[str, object]) -> None:
        """Undo a layer's call, for a module around the layer that fails after it.

        Args:
            held: ``dict(vars(cache))`` from before the call. States that the call wrote in place are lost, and refused later.
        """
        if held["conv_state"] is not None and held["conv_state"] is self.conv_state:
            self._torn = True
        else:
            vars(self).update(held)

    def check_whole(self) -> None:
        """Refuse states that a failed call had begun to write.

        Raises:
            ValueError: there was such a call since the last :meth:`reset`.
        """
        if self._torn:
            raise ValueError(
                "cache needs whole states, got some that a failed call had begun to write; reset() it and run its sequences "
                "again, or go on from a copy() made before that call"
            )

    def _keep_own(self) -> None:
        conv, recurrent = self.conv_state, self.recurrent_state
        fresh = conv is not None and recurrent is not None and not (conv.requires_grad or recurrent.requires_grad)
        self._own = (conv, recurrent) if fresh else None  # type: ignore[assignment]
        self._agreed = None

    def __getstate__(self) -> dict[str, object]:  # a saved cache fits any layer of its shapes
        return {**self.__dict__, "_layer": None, "_agreed": None}

    def reorder(self, index: Tensor) -> None:
        """Keep, drop or repeat sequences, as beam search does: row i becomes what row ``index[i]`` was.

        Args:
            index: ``[M]`` int32 or int64, on the cache's device, each from 0 to N-1. Before the first call there is nothing
                to reorder, and only shape and dtype are checked.

        Raises:
            ValueError: another shape, dtype or device, or a row that is not there; the cache is unchanged then. On a GPU
                rows are not checked here, because reading them would make the host wait at every decoded token: there
                the device itself reports one that is not there, as it does for any index.
        """
        if not isinstance(index, Tensor) or index.dim() != 1 or index.dtype not in (torch.int32, torch.int64):
            got = f"{list(index.shape)} {index.dtype}" if isinstance(index, Tensor) else type(index).__name__
            raise ValueError(f"index needs a one-dimensional int32 or int64 tensor, got {got}")
        self.check_whole()
        conv, recurrent = check_states(self.conv_state, self.recurrent_state)
        if conv is None or recurrent is None:
            return
        N = recurrent.shape[0]
        if conv.shape[0] != N:
            raise ValueError(f"cache needs as many rows in both states, got {conv.shape[0]} and {N}")
        if index.device != recurrent.device:
            raise ValueError(f"index needs the cache's device {recurrent.device}, got {index.device}")
        if index.device.type == "cpu" and index.numel() and not torch.compiler.is_compiling():
            least, most = (int(value) for value in index.aminmax())
            if least < 0 or most >= N:
                got = str(least if least < 0 else most)
                raise ValueError(f"index needs rows from 0 to N-1={N - 1}, got {got}")
        self.conv_state, self.recurrent_state = conv.index_select(0, index), recurrent.index_select(0, index)
        self._keep_own()

    def copy(self) -> GatedDeltaNetCache:
        """An independent cache with the same states, for instance to branch a generation.

        Returns:
            A cache whose tensors are clones; the graph is kept.
        """
        other = GatedDeltaNetCache()
        other.conv_state = None if self.conv_state is None else self.conv_state.clone()
        other.recurrent_state = None if self.recurrent_state is None else self.recurrent_state.clone()
        other._layer, other._torn = self._layer, self._torn
        other._keep_own()
        return other

    def __copy__(self) -> GatedDeltaNetCache:  # one that shared its states would change with this one's
        return self.copy()

    def detach(self) -> None:
        """Cut the graph: later gradients stop here."""
        if self.conv_state is not None and self.recurrent_state is not None:
            self.conv_state, self.recurrent_state = self.conv_state.detach(), self.recurrent_state.detach()

    def __repr__(self) -> str:
        if self.conv_state is None or self.recurrent_state is None:
            return "GatedDeltaNetCache(empty)"
        conv, recurrent = list(self.conv_state.shape), list(self.recurrent_state.shape)
        return f"GatedDeltaNetCache(N={self.num_sequences}, conv_state={conv}, recurrent_state={recurrent})"
