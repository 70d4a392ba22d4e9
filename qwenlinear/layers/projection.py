"""The input projections of a layer: fused where its modules are plain ``nn.Linear``, otherwise the modules as they are.

Fused means three products (q|k|v, b|a, z) and one input gradient. Rows are wanted in the order qkv | b | a | z: where a module
has them so, its weight is multiplied with as it is; Qwen3-Next's rows, grouped by key head, are put in order in a copy that is
dropped after the product, and not as activations. Parameters, names and optimizers know nothing of it. What is kept for the
backward pass is the input and the parameters themselves. The output norm's gate z is not projected before it is read, after the
kernel: neither it nor, going back, its gradient is there while the kernel needs memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

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
"""Below this many tokens the products are so short that what surrounds them costs more than fusing saves."""


@dataclass(frozen=True)
class Projected:
    """What the input projections make of a batch.

    Args:
        qkv: ``[B, T, conv_dim]`` q, k and v side by side; rows may lie further apart than their length, as of b and a.
        b: ``[B, T, HV]`` before beta's sigmoid.
        a: ``[B, T, HV]`` before the decay's softplus.
        z: projects the output norm's gate ``[B, T, HV, V]``, or gives it where it is there already; to be called once, after
            the kernel.
    """

    qkv: Tensor
    b: Tensor
    a: Tensor
    z: Callable[[], Tensor]


def project(layer: Any, config: GatedDeltaNetConfig, x: Tensor) -> Projected:
    """Through a layer's input projections, whatever has been put in their place (LoRA, quantised weights).

    Args:
        layer: a module with :data:`FLAT` or :data:`GROUPED`.
        config: its sizes.
        x: ``[B, T, hidden_size]``.

    Returns:
        The four parts: fused where :func:`why_called` has nothing against it.
    """
    names, heads = projection_names(layer), (config.linear_num_value_heads, config.linear_value_head_dim)
    if why_called(layer, config, x) is None:
        if autocast_enabled(x.device):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        return _fused(config, _Weights([getattr(layer, name).weight for name in names], _rows(config, names)), x)
    if names == FLAT:
        return Projected(
            layer.in_proj_qkv(x),
            layer.in_proj_b(x),
            layer.in_proj_a(x),
            lambda: layer.in_proj_z(x).unflatten(-1, heads),
        )
    q, k, v, z, b, a = by_key_head(config, layer.in_proj_qkvz(x), layer.in_proj_ba(x))
    qkv = torch.cat([q.flatten(2), k.flatten(2), v.flatten(2)], -1)
    gate = z.flatten(2, 3)
    return Projected(qkv, b.flatten(2), a.flatten(2), lambda: gate)


def why_called(layer: Any, config: GatedDeltaNetConfig, x: Tensor) -> str | None:
    """Why the projections are called as modules instead of being fused.

    Args:
        layer: a module with :data:`FLAT` or :data:`GROUPED`.
        config: its sizes.
        x: ``[B, T, hidden_size]``; only its metadata is looked at.

    Returns:
        One reason in words, or None.
    """
    return why_not_faster(x.device, x.shape[0] * x.shape[1]) or why_not_plain_weights(layer, config, x.dtype, x.device)


def why_not_faster(device: torch.device, tokens: int) -> str | None:
    """Where fusing was found to gain nothing.

    Args:
        device: where the tensors are.
        tokens: B * T.

    Returns:
        One reason in words, or None.
    """
    if device.type == "cpu":
        return "on a cpu that is faster"
    if tokens < FEWEST_TOKENS:
        return f"for {tokens} tokens, fewer than {FEWEST_TOKENS}, that is faster"
    return None


def why_not_plain_weights(
    layer: Any, config: GatedDeltaNetConfig, dtype: torch.dtype, device: torch.device
) -> str | None:
    """Why products of the weights would not be what the modules compute.

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


# ---- fused ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Rows:
    """Where one module's rows go among all rows, in the order qkv | b | a | z.

    Args:
        groups: how many times its pattern repeats (H where rows are grouped by key head).
        parts: the pattern: (first row among all, rows in one group) in the module's own order.
    """

    groups: int
    parts: tuple[tuple[int, int], ...]

    @property
    def count(self) -> int:
        """Rows of the module."""
        return self.groups * sum(size for _, size in self.parts)

    def among(self, span: tuple[int, int]) -> bool:
        """Whether some of them are among rows start..stop."""
        return any(span[0] <= at < span[1] for at, _ in self.parts)


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


class _Weights(NamedTuple):
    """The modules that have some rows of a span, and which rows theirs are."""

    weights: list[Tensor]
    rows: tuple[_Rows, ...]

    def among(self, span: tuple[int, int]) -> _Weights:
        """Those with rows in it."""
        found = [(w, piece) for w, piece in zip(*self, strict=True) if piece.among(span)]
        return _Weights([w for w, _ in found], tuple(piece for _, piece in found))


def _fused(config: GatedDeltaNetConfig, modules: _Weights, x: Tensor) -> Projected:
    """The input goes on through the first products to the last one, whose gradient so comes back to where theirs is added."""
    C, HV, V = config.conv_dim, config.linear_num_value_heads, config.linear_value_head_dim
    inner, total = C + 2 * HV, C + 2 * HV + HV * V
    mixing, gating = modules.among((0, inner)), modules.among((inner, total))
    qkv, b, a, through = _Mixing.apply(x, mixing.rows, (C, HV), *mixing.weights)
    last = through if x.requires_grad else x  # what came through wants a gradient wherever a weight does

    def z() -> Tensor:
        gate = _Gate.apply(last, gating.rows, (inner, total), *gating.weights)
        return cast(Tensor, gate.unflatten(-1, (HV, V)))

    return Projected(qkv, b, a, z)


class _Mixing(torch.autograd.Function):
    """x times the rows of qkv, of b and of a; and x itself."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        # arguments without names of their own: without gradients TorchDynamo counts names and may drop ctx
        x, rows, sizes, *weights = inputs
        # frozen weights have no use for x, which nobody else may keep
        ctx.save_for_backward(x if any(ctx.needs_input_grad[3:]) else None, *weights)
        ctx.rows, ctx.sizes, ctx.dtype = rows, sizes, x.dtype
        ctx.set_materialize_grads(False)
        C, HV = sizes
        with without_autocast(x.device):
            qkv = x @ _joined(weights, rows, (0, C), x.dtype).t()
            ba = x @ _joined(weights, rows, (C, C + 2 * HV), x.dtype).t()
        # a view would be refused by its name, not by its version, once x has been changed in place
        return qkv, *ba.split_with_sizes((HV, HV), -1), x.detach()

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dqkv: Tensor | None, db: Tensor | None, da: Tensor | None, dx: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        (C, HV), (needs_x, _, _, *needs) = ctx.sizes, ctx.needs_input_grad
        some = next((d for d in (dqkv, db, da) if d is not None), None)
        if some is None:
            return (dx, None, None, *[None] * len(weights))
        given = zip((dqkv, db, da), (C, HV, HV), strict=True)
        gradient = side_by_side([some.new_zeros(*some.shape[:2], n) if d is None else d for d, n in given])
        with without_autocast(some.device):
            if needs_x:
                joined = _joined(weights, ctx.rows, (0, C + 2 * HV), ctx.dtype)
                dx = _added(dx, gradient, joined).view(*some.shape[:2], joined.shape[1])
            dweights = _weight_gradients(x, gradient, 0, weights, ctx.rows, needs)
        return (dx if needs_x else None, None, None, *dweights)


class _Gate(torch.autograd.Function):
    """x times the rows of z."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        x, rows, span, *weights = inputs
        ctx.save_for_backward(x if any(ctx.needs_input_grad[3:]) else None, *weights)
        ctx.rows, ctx.span, ctx.dtype = rows, span, x.dtype
        with without_autocast(x.device):
            return cast(Tensor, x @ _joined(weights, rows, span, x.dtype).t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        needs_x, _, _, *needs = ctx.needs_input_grad
        dx, gradient = None, dz.flatten(0, 1)
        with without_autocast(dz.device):
            if needs_x:
                joined = _joined(weights, ctx.rows, ctx.span, ctx.dtype)
                dx = (gradient @ joined).view(*dz.shape[:2], joined.shape[1])
            dweights = _weight_gradients(x, gradient, ctx.span[0], weights, ctx.rows, needs)
        return (dx, None, None, *dweights)


def _added(dx: Tensor | None, gradient: Tensor, weights: Tensor) -> Tensor:
    """``[B*T, hidden]``: what came back from behind and the product, in its memory, which nobody else has."""
    if dx is None:
        return gradient @ weights
    dx = dx.flatten(0, 1)
    if torch.compiler.is_compiling():  # which decides itself what may be written over
        return torch.addmm(dx, gradient, weights)
    return dx.addmm_(gradient, weights)


def _joined(weights: Sequence[Tensor], rows: tuple[_Rows, ...], span: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Rows start..stop of all, ``[stop - start, hidden_size]``: a weight itself where it is just those."""
    start, stop = span
    for weight, piece in zip(weights, rows, strict=True):
        if piece.groups == 1 and piece.parts == ((start, stop - start),) and weight.dtype == dtype:
            return weight
    joined = weights[0].new_empty(stop - start, weights[0].shape[1], dtype=dtype)
    for weight, piece in zip(weights, rows, strict=True):
        _exchange(joined, weight, piece, start)
    return joined


def _exchange(joined: Tensor, weight: Tensor, piece: _Rows, start: int, back: bool = False) -> None:
    """Copy those of a module's rows that are among the joined ones, of which start is the first, there; or back."""
    sizes, stop = [size for _, size in piece.parts], start + joined.shape[0]
    by_group = weight.view(piece.groups, sum(sizes), -1)
    for (at, size), mine in zip(piece.parts, by_group.split(sizes, 1), strict=True):
        if start <= at < stop:
            theirs = joined[at - start : at - start + piece.groups * size].view_as(mine)
            if back:
                mine.copy_(theirs)
            else:
                theirs.copy_(mine)


def _weight_gradients(
    x: Tensor | None,
    gradient: Tensor,
    start: int,
    weights: Sequence[Tensor],
    rows: tuple[_Rows, ...],
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """Each parameter's gradient from one product, of rows start.. of all: a view of it where a module's rows are one run there,
    otherwise a copy in the module's order, zero for rows that are not there."""
    if x is None:
        return [None] * len(weights)
    product = gradient.t() @ x.flatten(0, 1)
    answers: list[Tensor | None] = []
    for weight, piece, need in zip(weights, rows, needs, strict=True):
        (at, size), *more = piece.parts
        if not need:
            answers.append(None)
        elif piece.groups == 1 and not more:
            answers.append(product[at - start : at - start + size].to(weight.dtype))
        else:
            answer = weight.new_zeros(weight.shape)
            _exchange(product, answer, piece, start, back=True)
            answers.append(answer)
    return answers


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
