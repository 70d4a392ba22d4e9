"""What runs in a layer, in words, and why not what is faster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from qwenlinear.layers.cache import GatedDeltaNetCache
from qwenlinear.layers.call import LayerCall, state_dtype
from qwenlinear.layers.config import GatedDeltaNetConfig
from qwenlinear.layers.gated_norm import GatedRMSNorm
from qwenlinear.layers.mixing import steps, why_norm_is_called, why_not_fused_prologue
from qwenlinear.layers.plain import why_not_plain
from qwenlinear.layers.projection import projection_names, why_called, why_not_plain_weights
from qwenlinear.layers.short_conv import ShortConvolution
from qwenlinear.layers.token import OUTPUT, readable
from qwenlinear.ops import why_not_fused

if TYPE_CHECKING:
    from qwenlinear.layers.gated_delta_net import GatedDeltaNet


def describe(layer: Any, config: GatedDeltaNetConfig) -> str:
    """What surrounds the kernel of a layer where it is, whatever the call: for its `repr`.

    Args:
        layer: one of this package, or an injected Transformers layer.
        config: its sizes.

    Returns:
        One line.
    """
    device, dtype = _taken(layer)
    called = (
        f"tensors on {device.type}" if device.type == "cpu" else why_not_plain_weights(layer, config, dtype, device)
    )
    projections = "fused" if called is None else f"called ({called})"
    prologue, epilogue = _prologue(layer, config, device, dtype), _epilogue(layer, config, device, dtype)
    said = [reason for reason in _why_called(layer, config, device, dtype, 1) if reason is not None]
    decoding = f"products apart ({said[0]})" if said else "two skinny products"  # as a rule one reason holds for both
    return f"projections={projections}, prologue={prologue}, epilogue={epilogue}, decoding={decoding}"


def _why_called(
    layer: Any, config: GatedDeltaNetConfig, device: torch.device, dtype: torch.dtype, batch: int
) -> tuple[str | None, str | None]:
    """Why the input projections of a token are called as modules, and why the output projection is."""
    given = readable(layer, projection_names(layer), device, dtype, (batch, config.hidden_size))
    taken = readable(layer, OUTPUT, device, dtype, (batch, config.value_dim))
    return given if isinstance(given, str) else None, taken if isinstance(taken, str) else None


def _taken(layer: Any) -> tuple[torch.device, torch.dtype]:
    """Where a layer's input is wanted and in which dtype: its projections', whose weights may be quantised or missing."""
    modules = (getattr(layer, name, None) for name in (*projection_names(layer), "out_proj", "norm"))
    for weight in (getattr(module, "weight", None) for module in modules):
        if isinstance(weight, Tensor) and weight.is_floating_point() and weight.dtype.itemsize > 1:
            return weight.device, weight.dtype
    return layer.A_log.device, layer.A_log.dtype


def explain_layer(
    layer: GatedDeltaNet, hidden_states: Tensor, call: LayerCall, cache: GatedDeltaNetCache | None
) -> str:
    """What a checked call would run; nothing is computed.

    Args:
        layer: whose call it is.
        hidden_states: ``[B, T, hidden_size]``; only its metadata is looked at.
        call: the other arguments.
        cache: the states to go on from.

    Returns:
        A few lines to print.
    """
    c, device, (B, T, _) = layer.config, hidden_states.device, hidden_states.shape
    dtype = layer._dtype(hidden_states)
    prologue = _prologue(layer, c, device, dtype)
    trains = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (hidden_states, *layer.parameters(), call.recurrent_state)
    )
    H, HV, K, V = (
        c.linear_num_key_heads,
        c.linear_num_value_heads,
        c.linear_key_head_dim,
        c.linear_value_head_dim,
    )
    q, k, v, beta = (
        torch.empty(B, T, *sizes, dtype=dtype, device=device, requires_grad=trains)
        for sizes in ((H, K), (H, K), (HV, V), (HV,))
    )
    g = beta.to(state_dtype(dtype))
    in_place = cache is not None and layer._why_not_in_place(hidden_states, call, cache) is None
    given = (q, k, v, g, beta, None, call.recurrent_state, cache is not None, prologue != "fused")
    kernel = layer.kernel.explain(*given, cu_seqlens=call.packed, state_in_place=in_place)
    return "\n".join(
        [
            f"{type(layer).__name__}: hidden_states {list(hidden_states.shape)} {hidden_states.dtype} on {device}",
            f"  projections: {_projections(layer, hidden_states, call, cache)}",
            f"  prologue: {prologue}",
            f"  epilogue: {_epilogue(layer, c, device, dtype)}",
            f"  padding: {'none' if call.padding is None else 'rows are rotated to padding at the right'}",
            f"  form: {_form(layer, hidden_states, call, cache, (q, k, v, g, beta))}",
            *(f"  {line}" for line in kernel.splitlines()),
        ]
    )


def _projections(layer: GatedDeltaNet, hidden_states: Tensor, call: LayerCall, cache: GatedDeltaNetCache | None) -> str:
    if cache is not None and layer._why_not_in_place(hidden_states, call, cache) is None:
        return _decoding(layer, hidden_states)
    reason = why_called(layer, layer.config, hidden_states)
    return "fused: three products, one input gradient" if reason is None else f"modules called: {reason}"


def _decoding(layer: GatedDeltaNet, hidden_states: Tensor) -> str:
    device, batch = hidden_states.device, hidden_states.shape[0]
    given, taken = _why_called(layer, layer.config, device, layer._dtype(hidden_states), batch)
    before = "one launch for all input weights" if given is None else f"modules called: {given}"
    if given == taken:
        return f"{before}, and one for out_proj" if taken is None else before
    return f"{before}; " + ("one launch for out_proj" if taken is None else f"out_proj is called: {taken}")


def _prologue(layer: Any, config: GatedDeltaNetConfig, device: torch.device, dtype: torch.dtype) -> str:
    reason = why_not_fused_prologue(config, device, dtype)
    if (
        isinstance(layer.conv1d, ShortConvolution)
        and (more := why_not_plain(layer.conv1d, ShortConvolution)) is not None
    ):
        reason = f"conv1d {more}"
    return "fused" if reason is None else f"PyTorch ({reason})"


def _epilogue(layer: Any, config: GatedDeltaNetConfig, device: torch.device, dtype: torch.dtype) -> str:
    called = why_norm_is_called(layer.norm)
    if called is not None and type(layer.norm) is not GatedRMSNorm:  # which runs the operator however it is called
        return f"norm {called}"
    reason = why_not_fused(device, dtype, norm_size=config.linear_value_head_dim)
    return "fused" if reason is None else f"PyTorch ({reason})"


def _form(
    layer: GatedDeltaNet,
    hidden_states: Tensor,
    call: LayerCall,
    cache: GatedDeltaNetCache | None,
    tensors: tuple[Tensor, ...],
) -> str:
    if not steps(layer.kernel, call.decodes, *tensors, call.recurrent_state):
        return "chunk"
    assert cache is not None
    reason = layer._why_not_in_place(hidden_states, call, cache)
    return "step, states in place" if reason is None else f"step, new states: {reason}"
