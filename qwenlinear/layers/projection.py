"""The input projections of a layer: one product where its modules are plain ``nn.Linear``, otherwise the modules as they are.

The one product multiplies with the weights' rows in the order qkv | b | a | z, put together for the product and dropped after
it: parameters, names and optimizers know nothing of it, and Qwen3-Next's rows, grouped by key head, are put in order here and
not as activations. What is kept for the backward pass is the input and the parameters themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from qwenlinear.kernels.precision import autocast_enabled, without_autocast
from qwenlinear.layers.config import GatedDeltaNetConfig
from qwenlinear.layers.plain import why_not_plain

GROUPED = ("in_proj_qkvz", "in_proj_ba")
"""Qwen3-Next's modules; rows grouped by key head: q, k, its value heads' v, their z; and their b, a."""

FLAT = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
"""Qwen3.5's modules; heads in order."""

FEWEST_TOKENS = 4096
"""Below this many tokens the products are so short that copying the weights costs more than one of them saves."""


@dataclass(frozen=True)
class Projected:
    """What the input projections make of a batch.

    Args:
        qkv: ``[B, T, conv_dim]`` q, k and v side by side; rows may lie further apart than their length, as of b, a and z.
        b: ``[B, T, HV]`` before beta's sigmoid.
        a: ``[B, T, HV]`` before the decay's softplus.
        z: ``[B, T, HV, V]`` the output norm's gate.
    """

    qkv: Tensor
    b: Tensor
    a: Tensor
    z: Tensor


def project(layer: Any, config: GatedDeltaNetConfig, x: Tensor) -> Projected:
    """Through a layer's input projections, whatever has been put in their place (LoRA, quantised weights).

    Args:
        layer: a module with :data:`FLAT` or :data:`GROUPED`.
        config: its sizes.
        x: ``[B, T, hidden_size]``.

    Returns:
        The four parts: views of one buffer from one product where :func:`why_separate` has nothing against it.
    """
    if why_separate(layer, config, x) is None:
        if autocast_enabled(x.device):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        weights = [getattr(layer, name).weight for name in projection_names(layer)]
        qkv, b, a, z = _OneProduct.apply(x, _rows(config, projection_names(layer)), *weights)
        return Projected(qkv, b, a, z.unflatten(-1, (config.linear_num_value_heads, config.linear_value_head_dim)))
    if projection_names(layer) == FLAT:
        z = layer.in_proj_z(x).unflatten(-1, (config.linear_num_value_heads, config.linear_value_head_dim))
        return Projected(layer.in_proj_qkv(x), layer.in_proj_b(x), layer.in_proj_a(x), z)
    q, k, v, z, b, a = by_key_head(config, layer.in_proj_qkvz(x), layer.in_proj_ba(x))
    qkv = torch.cat([q.flatten(2), k.flatten(2), v.flatten(2)], -1)
    return Projected(qkv, b.flatten(2), a.flatten(2), z.flatten(2, 3))


def why_separate(layer: Any, config: GatedDeltaNetConfig, x: Tensor) -> str | None:
    """Why the projections are not one product.

    Args:
        layer: a module with :data:`FLAT` or :data:`GROUPED`.
        config: its sizes.
        x: ``[B, T, hidden_size]``; only its metadata is looked at.

    Returns:
        One reason in words, or None where they are.
    """
    return why_not_faster(x.device, x.shape[0] * x.shape[1]) or why_not_joined(layer, config, x.dtype, x.device)


def why_not_faster(device: torch.device, tokens: int) -> str | None:
    """Where one product of joined weights was found to gain nothing.

    Args:
        device: where the tensors are.
        tokens: B * T.

    Returns:
        One reason in words, or None.
    """
    if device.type == "cpu":
        return "on a cpu copying the weights costs more than one product saves"
    if tokens < FEWEST_TOKENS:
        return f"for {tokens} tokens, fewer than {FEWEST_TOKENS}, copying the weights costs more than one product saves"
    return None


def why_not_joined(layer: Any, config: GatedDeltaNetConfig, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why a product of the joined weights would not be what the modules compute.

    Args:
        layer: a module with :data:`FLAT` or :data:`GROUPED`.
        config: its sizes.
        dtype: of the input.
        device: of the input.

    Returns:
        One reason in words, or None.
    """
    names = projection_names(layer)
    modules: list[Any] = [getattr(layer, name) for name in names]
    for name, module, piece in zip(names, modules, _rows(config, names), strict=True):
        reason = why_not_plain(module, nn.Linear)
        if reason is not None:
            return f"{name} {reason}"
        if module.bias is not None:
            return f"{name} has a bias"
        if tuple(module.weight.shape) != (piece.count, config.hidden_size) or module.weight.device != device:
            return f"{name} has a weight of its own shape or device"
    dtypes = {module.weight.dtype for module in modules}
    cast = autocast_enabled(device)
    if len(dtypes) > 1 or (cast and torch.float64 in (*dtypes, dtype)) or (not cast and dtypes != {dtype}):
        return "weights and input are of several dtypes"
    return None


def projection_names(layer: Any) -> tuple[str, ...]:
    """What a layer's input projections are called: :data:`GROUPED` or :data:`FLAT`; to be compared, as a compiler copies it."""
    return GROUPED if hasattr(layer, "in_proj_qkvz") else FLAT


def by_key_head(config: GatedDeltaNetConfig, qkvz: Tensor, ba: Tensor) -> tuple[Tensor, ...]:
    """What Qwen3-Next's two projections returned, cut into its parts.

    Args:
        config: the layer's sizes. G is HV // H.
        qkvz: ``[B, T, 2 * key_dim + 2 * value_dim]``.
        ba: ``[B, T, 2 * HV]``.

    Returns:
        q, k, v, z, b, a, views: ``[B, T, H, K]`` twice, ``[B, T, H, G, V]`` twice, ``[B, T, H, G]`` twice.
    """
    H, K, V = config.linear_num_key_heads, config.linear_key_head_dim, config.linear_value_head_dim
    G = config.linear_num_value_heads // H
    B, T, _ = qkvz.shape
    q, k, v, z = qkvz.view(B, T, H, 2 * K + 2 * G * V).split_with_sizes((K, K, G * V, G * V), -1)
    b, a = ba.view(B, T, H, 2 * G).split_with_sizes((G, G), -1)
    return q, k, v.view(B, T, H, G, V), z.view(B, T, H, G, V), b, a


# ---- one product ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Rows:
    """Where one module's rows go among all rows, in the order qkv | b | a | z.

    Args:
        groups: how many times its pattern repeats (H where rows are grouped by key head).
        parts: the pattern: (first row in the joined weights, rows in one group) in the module's own order.
    """

    groups: int
    parts: tuple[tuple[int, int], ...]

    @property
    def count(self) -> int:
        """Rows of the module."""
        return self.groups * sum(size for _, size in self.parts)


def _rows(config: GatedDeltaNetConfig, names: tuple[str, ...]) -> tuple[_Rows, ...]:
    """Each module's rows, in the order of the names."""
    H, HV, K, V = (
        config.linear_num_key_heads,
        config.linear_num_value_heads,
        config.linear_key_head_dim,
        config.linear_value_head_dim,
    )
    C, G = config.conv_dim, HV // H
    if names == GROUPED:
        qkvz = (0, K), (config.key_dim, K), (2 * config.key_dim, G * V), (C + 2 * HV, G * V)
        return _Rows(H, qkvz), _Rows(H, ((C, G), (C + HV, G)))
    return _Rows(1, ((0, C),)), _Rows(1, ((C + 2 * HV, HV * V),)), _Rows(1, ((C, HV),)), _Rows(1, ((C + HV, HV),))


class _OneProduct(torch.autograd.Function):
    """x times the joined weights: qkv, b, a, z, views of one ``[B, T, conv_dim + 2*HV + value_dim]``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: tuple[_Rows, ...], *weights: Tensor) -> tuple[Tensor, ...]:
        # frozen weights have no use for x, which nobody else may keep
        ctx.save_for_backward(x if any(ctx.needs_input_grad[2:]) else None, *weights)
        ctx.rows, ctx.shape, ctx.dtype = rows, x.shape, x.dtype
        total = sum(piece.count for piece in rows)
        with without_autocast(x.device):
            y = x @ _join(weights, rows, 0, total, x.dtype).t()
        C, HV, value_dim = _sizes(rows)
        return torch.split(y, [C, HV, HV, value_dim], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dqkv: Tensor, db: Tensor, da: Tensor, dz: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        rows: tuple[_Rows, ...] = ctx.rows
        needs_x, _, *needs = ctx.needs_input_grad
        first, second = side_by_side([dqkv, db, da]), dz.flatten(0, 1)
        inner, total = first.shape[1], first.shape[1] + second.shape[1]
        dx = None
        dweights: list[Tensor | None] = [None] * len(weights)
        with without_autocast(first.device):
            if needs_x:
                dx = first @ _join(weights, rows, 0, inner, ctx.dtype)
                dx = dx.addmm_(second, _join(weights, rows, inner, total, ctx.dtype)).view(ctx.shape)
            if x is not None:
                dweights = _weight_gradients(x.flatten(0, 1), (first, second), weights, rows, needs)
        return (dx, None, *dweights)


def _sizes(rows: tuple[_Rows, ...]) -> tuple[int, int, int]:
    """conv_dim, HV, value_dim."""
    starts = sorted(start for piece in rows for start, _ in piece.parts)
    b, a, z = starts[-3:]
    return b, a - b, sum(piece.count for piece in rows) - z


def _join(weights: Sequence[Tensor], rows: tuple[_Rows, ...], start: int, stop: int, dtype: torch.dtype) -> Tensor:
    """Rows start..stop of the joined weights ``[stop - start, hidden_size]``: a weight itself where it is just those."""
    for weight, piece in zip(weights, rows, strict=True):
        if piece.groups == 1 and piece.parts == ((start, stop - start),) and weight.dtype == dtype:
            return weight
    joined = weights[0].new_empty(stop - start, weights[0].shape[1], dtype=dtype)
    for weight, piece in zip(weights, rows, strict=True):
        _exchange(joined, weight, piece, start, stop)
    return joined


def _exchange(joined: Tensor, weight: Tensor, piece: _Rows, start: int, stop: int, back: bool = False) -> None:
    """Copy a module's rows among start..stop of the joined ones there; or back."""
    sizes = [size for _, size in piece.parts]
    by_group = weight.view(piece.groups, sum(sizes), -1)
    for (at, size), mine in zip(piece.parts, by_group.split(sizes, 1), strict=True):
        if start <= at < stop:
            theirs = joined[at - start : at - start + piece.groups * size].view_as(mine)
            if back:
                mine.copy_(theirs)
            else:
                theirs.copy_(mine)


def _weight_gradients(
    x: Tensor,
    gradients: tuple[Tensor, Tensor],
    weights: Sequence[Tensor],
    rows: tuple[_Rows, ...],
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """Each parameter's gradient. Modules whose rows lie in one of the two gradients alone share its product."""
    bounds = (0, gradients[0].shape[1]), (gradients[0].shape[1], sum(g.shape[1] for g in gradients))
    wanted = [(piece, weight) for piece, weight, need in zip(rows, weights, needs, strict=True) if need]
    products: list[Tensor | None] = []
    for gradient, (start, stop) in zip(gradients, bounds, strict=True):
        inside = any(start <= at < stop for piece, _ in wanted for at, _ in piece.parts)
        products.append(gradient.t() @ x if inside else None)
    answers: list[Tensor | None] = []
    for weight, piece, need in zip(weights, rows, needs, strict=True):
        answers.append(_one_gradient(products, bounds, weight, piece) if need else None)
    return answers


def _one_gradient(
    products: list[Tensor | None], bounds: Sequence[tuple[int, int]], weight: Tensor, piece: _Rows
) -> Tensor:
    """A view of a product where a module's rows are one run of it, otherwise a copy in the module's order."""
    for product, (start, stop) in zip(products, bounds, strict=True):
        at, size = piece.parts[0]
        if product is not None and len(piece.parts) == piece.groups == 1 and start <= at < stop:
            return product[at - start : at - start + size].to(weight.dtype)
    gradient = weight.new_empty(weight.shape)
    for product, (start, stop) in zip(products, bounds, strict=True):
        if product is not None:
            _exchange(product, gradient, piece, start, stop, back=True)
    return gradient


def side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """Several ``[B, T, n]`` as the columns of one matrix: the memory itself where they lie so, otherwise a copy.

    Args:
        parts: same dtype and device.

    Returns:
        ``[B * T, sum of n]``.

    Example:
        >>> whole = torch.randn(2, 3, 10)
        >>> side_by_side(whole.split([5, 3, 2], -1)).data_ptr() == whole.data_ptr()
        True
    """
    first = parts[0]
    B, T, _ = first.shape
    width = sum(part.shape[2] for part in parts)
    if torch.compiler.is_compiling() or B * T == 0 or not _adjacent(parts):
        return torch.cat([part.flatten(0, 1) for part in parts], 1)
    row = first.stride(1) if T > 1 else max(first.stride(0), width)
    return first.as_strided((B * T, width), (row, 1))


def _adjacent(parts: Sequence[Tensor]) -> bool:
    """Whether each begins, in every row, where the one before it ends. Reads where memory lies, not what is in it."""
    first, at = parts[0], parts[0].storage_offset()
    B, T, _ = first.shape
    row = first.stride(1) if T > 1 else first.stride(0)
    if (B > 1 and T > 1 and first.stride(0) != T * row) or (B * T > 1 and row < sum(part.shape[2] for part in parts)):
        return False
    memory = first.untyped_storage().data_ptr()
    for part in parts:
        strides = zip(part.stride(), first.stride(), part.shape, strict=True)
        if part.untyped_storage().data_ptr() != memory or part.storage_offset() != at or part.dtype != first.dtype:
            return False
        if any(mine != theirs for mine, theirs, size in strides if size > 1) or (
            part.shape[2] > 1 and part.stride(2) != 1
        ):
            return False
        at += part.shape[2]
    return True
