"""The products of one token a sequence, which decoding reads all weights for: one launch for the input projections and one for
the output projection where their modules are plain ``nn.Linear`` on a GPU, otherwise the modules as they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qwenlinear.kernels.precision import autocast_enabled
from qwenlinear.kernels.tangents import forward_mode
from qwenlinear.layers.config import GatedDeltaNetConfig
from qwenlinear.layers.plain import why_not_plain
from qwenlinear.layers.projection import GROUPED, by_key_head, projection_names
from qwenlinear.ops.skinny import launched, why_not_skinny

OUTPUT = ("out_proj",)


class ProjectedToken(NamedTuple):
    """What the input projections make of one token a sequence: views of what the products returned. G is HV // H.

    Args:
        q: ``[B, 1, H, K]``.
        k: ``[B, 1, H, K]``.
        v: ``[B, 1, H, G, V]``.
        b: ``[B, 1, H, G]``.
        a: ``[B, 1, H, G]``.
        z: ``[B, 1, H, G, V]``.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    b: Tensor
    a: Tensor
    z: Tensor


def project_token(layer: Any, config: GatedDeltaNetConfig, x: Tensor) -> ProjectedToken:
    """Through the input projections; no weight and no activation is copied, and no gradient is known of.

    Args:
        layer: a module with the input projections of Qwen3-Next or Qwen3.5.
        config: its sizes.
        x: ``[B, 1, hidden_size]``.

    Returns:
        The parts by head.
    """
    names, B = projection_names(layer), x.shape[0]
    parts = _products(layer, names, x)
    if names == GROUPED:
        q, k, v, z, b, a = by_key_head(config, *parts)
        return ProjectedToken(q, k, v, b, a, z)
    H, K, V = config.linear_num_key_heads, config.linear_key_head_dim, config.linear_value_head_dim
    G, key_dim = config.linear_num_value_heads // H, H * K
    qkv, z, b, a = parts
    # methods of the tensor itself: `unflatten` and `split` are Python around them, at every token
    q, k, v = qkv.split_with_sizes((key_dim, key_dim, H * G * V), -1)
    return ProjectedToken(
        q.view(B, 1, H, K),
        k.view(B, 1, H, K),
        v.view(B, 1, H, G, V),
        b.view(B, 1, H, G),
        a.view(B, 1, H, G),
        z.view(B, 1, H, G, V),
    )


def project_output(layer: Any, o: Tensor) -> Tensor:
    """Through the output projection.

    Args:
        layer: a module with ``out_proj``.
        o: ``[B, 1, value_dim]``.

    Returns:
        ``[B, 1, hidden_size]``.
    """
    return _products(layer, OUTPUT, o)[0]


def readable(
    layer: Any, names: Iterable[str], device: torch.device, dtype: torch.dtype, shape: tuple[int, int]
) -> list[Tensor] | str:
    """The weights that one launch reads in place of calls of their modules, or why there is none.

    Args:
        layer: whose modules they are.
        names: of modules that take the same input.
        device: of the input.
        dtype: of the input.
        shape: B and the input's width.

    Returns:
        ``[rows, width]`` of each module, the parameters themselves; or one reason in words.
    """
    if autocast_enabled(device) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device.type)
    if (reason := why_not_skinny(device, dtype, shape[0])) is not None:
        return reason
    if forward_mode():
        return "derivatives are carried forward"
    weights = []
    for name in names:
        module = getattr(layer, name)
        if (reason := why_not_plain(module, nn.Linear)) is not None:
            return f"{name} {reason}"
        if _own(module, "bias") is not None:
            return f"{name} has a bias"
        weight = _own(module, "weight")
        if weight.dtype != dtype:
            return f"{name} has a weight of {weight.dtype} for inputs of {dtype}"
        if weight.shape[1] != shape[1] or weight.device != device or not weight.is_contiguous():
            return f"{name} has a weight of its own shape, device or layout"
        weights.append(weight)
    return weights


def _own(module: nn.Linear, name: str) -> Any:
    """An attribute that is a parameter as a rule: a module's own look-up is slow."""
    try:
        return module._parameters[name]
    except KeyError:
        return getattr(module, name)


def _products(layer: Any, names: tuple[str, ...], x: Tensor) -> tuple[Tensor, ...]:
    """``[B, 1, rows]`` of each module."""
    B, _, width = x.shape
    weights = readable(layer, names, x.device, x.dtype, (B, width))
    if isinstance(weights, str):
        return tuple(getattr(layer, name)(x) for name in names)
    if x.dtype != weights[0].dtype:  # under autocast
        x = x.to(weights[0].dtype)
    y = launched(x.view(B, width), weights)[:, None]
    return (y,) if len(weights) == 1 else y.split_with_sizes([weight.shape[0] for weight in weights], -1)
