"""Transformers' cache objects as one layer reads and writes them, releases 5.6 to 5.24.

A linear-attention slot holds the last W columns of the convolution's input ``[B, C, W]`` and the recurrent state
``[B, HV, K, V]``, in buffers that are written in place, so that a captured graph finds them where they were.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def read_states(cache: Any, layer_idx: int) -> tuple[Tensor | None, Tensor | None]:
    """The states that a layer goes on from.

    Args:
        cache: a Transformers ``Cache``.
        layer_idx: the layer's slot.

    Returns:
        ``[B, C, columns]`` the convolution's past input, oldest first (usually W columns, more while the cache records
        its past) and ``[B, HV, K, V]``; both None before the first call.
    """
    if hasattr(cache, "get_conv_state"):
        return cache.get_conv_state(layer_idx), cache.get_recurrent_state(layer_idx)
    if not cache.has_previous_state(layer_idx):
        return None, None
    layer = cache.layers[layer_idx]
    return _first(layer.conv_states), _first(layer.recurrent_states)


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
        cache.update_conv_state(columns, layer_idx, conv_kernel_size=width)
    else:
        recent = columns if past is None else torch.cat([past.to(columns.dtype), columns], -1)
        recent = recent[..., -width:]
        cache.update_conv_state(F.pad(recent, (width - recent.shape[-1], 0)), layer_idx)
    cache.update_recurrent_state(recurrent_state, layer_idx)


def _first(states: Any) -> Tensor:
    state: Tensor = states[0] if isinstance(states, dict) else states
    return state
