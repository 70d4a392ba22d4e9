"""Transformers' cache objects as one layer reads and writes them, releases 5.6 to 5.24.

A linear-attention slot holds the last W columns of the convolution's input ``[B, C, W]`` and the recurrent state
``[B, HV, K, V]``, in buffers that are written in place, so that a captured graph finds them where they were.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_TORN = "_qwenlinear_torn"  # what a slot has while a call writes to it, and afterwards where that failed


def read_states(cache: Any, layer_idx: int) -> tuple[Tensor | None, Tensor | None]:
    """The states that a layer goes on from.

    Args:
        cache: a Transformers ``Cache``.
        layer_idx: the layer's slot.

    Returns:
        ``[B, C, columns]`` the convolution's past input, oldest first (usually W columns, more while the cache records
        its past) and ``[B, HV, K, V]``; both None before the first call.

    Raises:
        ValueError: the states are some that a failed call had begun to write (:func:`writing`).
    """
    if hasattr(cache, "get_conv_state"):
        states = cache.get_conv_state(layer_idx), cache.get_recurrent_state(layer_idx)
    elif not cache.has_previous_state(layer_idx):
        return None, None
    else:
        layer = cache.layers[layer_idx]
        states = _first(layer.conv_states), _first(layer.recurrent_states)
    if any(state is not None for state in states) and hasattr(cache.layers[layer_idx], _TORN):
        raise ValueError(
            f"cache needs whole states, got some of layer {layer_idx} that a failed call had begun to write; take a new cache "
            "or reset() this one and run its sequences again, or go on from a copy made before that call"
        )
    return states


@contextmanager
def writing(cache: Any, layer_idx: int) -> Iterator[None]:
    """Around the writes of a call: what fails in between leaves states that no injected layer goes on from.

    The mark lies on the slot itself, so that a copy of the cache has it too and a reset slot, which has no past, is free of
    it at once. Compiled code is one graph here: it would set and drop the mark only after it ran.

    Args:
        cache: a Transformers ``Cache``.
        layer_idx: the layer's slot.
    """
    if torch.compiler.is_compiling():
        yield
        return
    slot = cache.layers[layer_idx]
    setattr(slot, _TORN, True)
    yield
    vars(slot).pop(_TORN, None)  # nested, the inner one was faster


def last_columns(past: Tensor | None, count: int) -> Tensor | None:
    """The newest columns of a past, with zeros before a sequence's first token.

    Args:
        past: ``[B, C, columns]`` or None.
        count: how many columns.

    Returns:
        ``[B, C, count]``, or None without a past.
    """
    if past is None:
        return None
    missing = count - past.shape[-1]
    return F.pad(past, (missing, 0)) if missing > 0 else past.narrow(-1, -missing, count)


def write_states(
    cache: Any, layer_idx: int, mixed: Tensor, past: Tensor | None, recurrent_state: Tensor, width: int
) -> None:
    """Leave the states of this call in the cache, through the cache's own methods.

    Args:
        cache: a Transformers ``Cache``.
        layer_idx: the layer's slot.
        mixed: ``[B, T, C]`` the convolution's input of this call.
        past: ``[B, C, W-1]`` what came before it, or None.
        recurrent_state: ``[B, HV, K, V]`` after the last token.
        width: W.
    """
    columns = mixed.transpose(1, 2)
    recording = getattr(cache, "is_recording_past", None)
    if recording is not None and recording(layer_idx):  # every column, for a rollback by `crop`
        options = {"conv_kernel_size": width}
    else:
        recent = columns if past is None else torch.cat([past.to(columns.dtype), columns], -1)
        recent = recent[..., -width:]
        columns, options = F.pad(recent, (width - recent.shape[-1], 0)), {}
    with writing(cache, layer_idx):
        cache.update_conv_state(columns, layer_idx, **options)
        cache.update_recurrent_state(recurrent_state, layer_idx)


def _first(states: Any) -> Tensor:
    state: Tensor = states[0] if isinstance(states, dict) else states
    return state
