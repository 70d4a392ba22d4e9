"""LayerCall: the arguments of one layer call, checked before anything runs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qwenlinear.kernels import PackedSequences
from qwenlinear.layers.cache import GatedDeltaNetCache, check_states
from qwenlinear.layers.config import GatedDeltaNetConfig
from qwenlinear.layers.padding import RightPadding


class LayerCall(NamedTuple):
    """What a layer goes on with; made by :meth:`check`.

    Args:
        packed: boundaries of packed documents, or None for dense input.
        padding: the rotation that an attention mask asks for, or None without one.
        conv_state: ``[N, conv_dim, W-1]``, or None at a sequence's start.
        recurrent_state: ``[N, HV, K, V]``, or None at a sequence's start.
        decodes: whether this is a cached call with one token a sequence.
    """

    packed: PackedSequences | None
    padding: RightPadding | None
    conv_state: Tensor | None
    recurrent_state: Tensor | None
    decodes: bool

    @classmethod
    def check(
        cls,
        config: GatedDeltaNetConfig,
        hidden_states: Tensor,
        cu_seqlens: Tensor | PackedSequences | None,
        cache: GatedDeltaNetCache | None,
        attention_mask: Tensor | None,
    ) -> LayerCall:
        """Check the arguments against one another.

        Args:
            config: the layer's sizes.
            hidden_states: ``[B, T, hidden_size]``, checked by :func:`check_input`.
            cu_seqlens: boundaries, read here once for convolution and kernel.
            cache: states to go on from.
            attention_mask: ``[B, T or longer]``.

        Returns:
            The checked call.

        Raises:
            ValueError: naming the argument, what it needs and what came.
        """
        if cu_seqlens is not None and attention_mask is not None:
            raise ValueError(
                "attention_mask and cu_seqlens need to come one without the other, got both: packed documents have no "
                "padding, so drop the mask, or unpack the documents"
            )
        packed = None if cu_seqlens is None else _packed(cu_seqlens, hidden_states)
        padding = None if attention_mask is None else RightPadding(attention_mask, hidden_states)
        if cache is None:
            return cls(packed, padding, None, None, False)
        _check_cache(config, cache, hidden_states.shape[0] if packed is None else packed.num_sequences, hidden_states)
        longest = hidden_states.shape[1] if packed is None else max(packed.lengths)
        return cls(packed, padding, cache.conv_state, cache.recurrent_state, longest == 1)


def check_input(config: GatedDeltaNetConfig, hidden_states: Tensor, cache: GatedDeltaNetCache | None) -> None:
    """Check what comes in by itself, so that a module around a layer can do it before its own first operation.

    Args:
        config: the layer's sizes.
        hidden_states: ``[B, T, hidden_size]`` any floating dtype.
        cache: a cache or None; its states are checked by :meth:`LayerCall.check`.

    Raises:
        ValueError: naming the argument, what it needs and what came.
    """
    if not isinstance(hidden_states, Tensor):
        raise ValueError(f"hidden_states needs a tensor, got {type(hidden_states).__name__}")
    if hidden_states.dim() != 3 or hidden_states.shape[2] != config.hidden_size:
        raise ValueError(f"hidden_states needs shape [B, T, {config.hidden_size}], got {list(hidden_states.shape)}")
    if not hidden_states.is_floating_point():
        raise ValueError(f"hidden_states needs a floating dtype, got {hidden_states.dtype}")
    if cache is not None and not isinstance(cache, GatedDeltaNetCache):
        raise ValueError(f"cache needs a GatedDeltaNetCache, got {type(cache).__name__}")


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of g and of the state where q has this one: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def _packed(cu_seqlens: Tensor | PackedSequences, hidden_states: Tensor) -> PackedSequences:
    """Boundaries for convolution and kernel; the one synchronisation when they came as a tensor on a GPU."""
    B, T, _ = hidden_states.shape
    if B != 1:
        raise ValueError(f"cu_seqlens needs a batch of one, got B={B}; flatten the batch to [1, B*T, hidden_size]")
    if not isinstance(cu_seqlens, PackedSequences):
        if not isinstance(cu_seqlens, Tensor):
            raise ValueError(f"cu_seqlens needs a tensor or a PackedSequences, got {type(cu_seqlens).__name__}")
        cu_seqlens = PackedSequences.from_cu_seqlens(cu_seqlens, device=hidden_states.device)
    if cu_seqlens.total_tokens != T:
        raise ValueError(f"cu_seqlens needs to end at T={T}, got {cu_seqlens.total_tokens}")
    return cu_seqlens


def _check_cache(config: GatedDeltaNetConfig, cache: GatedDeltaNetCache, N: int, hidden_states: Tensor) -> None:
    cache.check_whole()
    conv, recurrent = check_states(cache.conv_state, cache.recurrent_state)
    if conv is None or recurrent is None:
        return
    if recurrent.shape[0] != N:
        raise ValueError(
            f"cache needs the sequences it holds, {recurrent.shape[0]}, got a call with {N}; "
            "reorder() or reset() it, or use another cache"
        )
    c = config
    states = (N, c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim)
    for name, state, shape in (
        ("conv_state", conv, (N, c.conv_dim, c.linear_conv_kernel_dim - 1)),
        ("recurrent_state", recurrent, states),
    ):
        if tuple(state.shape) != shape:
            raise ValueError(f"cache.{name} needs shape {list(shape)}, got {list(state.shape)}: another layer's?")
        if state.device != hidden_states.device:
            raise ValueError(f"cache.{name} needs hidden_states' device {hidden_states.device}, got {state.device}")
    if recurrent.dtype != state_dtype(hidden_states.dtype):
        raise ValueError(
            f"cache.recurrent_state needs {state_dtype(hidden_states.dtype)} where hidden_states is "
            f"{hidden_states.dtype}, got {recurrent.dtype}"
        )
