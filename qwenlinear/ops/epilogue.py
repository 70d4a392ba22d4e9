"""The epilogue of a Gated DeltaNet layer: the gated RMS norm between the kernel and the output projection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qwenlinear._launch import eager, needs_grad
from qwenlinear.checks import needs_eps, needs_floating
from qwenlinear.ops.available import refuse_forward_mode, why_not_fused


def epilogue(o: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``weight * rms_norm(o) * silu(z)`` over the last dimension, Transformers' ``Qwen3NextRMSNormGated``.

    In Triton where :func:`qwenlinear.ops.why_not_fused` has nothing against it: z is read in place, whatever its row strides,
    the answer is rounded once, and the backward pass computes again what the forward pass computed instead of keeping it.
    Otherwise in PyTorch (:func:`gated_rms_norm`), rounding where Transformers rounds.

    Args:
        o: ``[..., V]`` the kernel's output, any floating dtype.
        z: ``[..., V]`` the gate before its activation, o's shape and device; a strided view is not copied.
        weight: ``[V]``.
        eps: added to the mean square.

    Returns:
        ``[..., V]`` in o's dtype; computed in float32 at least. Differentiable once in Triton, in o, z and weight.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, an eps that is no number above 0.
        NotImplementedError: forward-mode differentiation of the Triton form.

    Example:
        >>> o, qkvz = torch.randn(1, 3, 2, 4), torch.randn(1, 3, 20)
        >>> epilogue(o, qkvz[..., 12:].unflatten(-1, (2, 4)), torch.ones(4), 1e-6).shape
        torch.Size([1, 3, 2, 4])
    """
    needs_floating("o", o)
    needs_floating("z", z)
    needs_floating("weight", weight)
    needs_eps("eps", eps)
    if o.dim() < 1 or z.shape != o.shape or z.device != o.device:
        raise ValueError(f"z needs o's shape {list(o.shape)} and device {o.device}, got {list(z.shape)} on {z.device}")
    if weight.shape != o.shape[-1:] or weight.device != o.device:
        raise ValueError(
            f"weight needs shape {list(o.shape[-1:])} on {o.device}, got {list(weight.shape)} on {weight.device}"
        )
    if why_not_fused(o.device, o.dtype, norm_size=o.shape[-1]) is None:
        refuse_forward_mode("epilogue", o, z, weight)
        run: Callable[..., Any] = gated_rms_norm_op
        if eager(o, z, weight):
            run = _GatedRMSNorm.apply if needs_grad(o, z, weight) else _run
        y: Tensor = run(o, z, weight, eps)
        return y
    return gated_rms_norm(o, z, weight, eps)


def gated_rms_norm(o: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The gated norm in PyTorch, rounding where Transformers rounds: the twin of the Triton form.

    Args: those of :func:`epilogue`.

    Returns:
        ``[..., V]`` in o's dtype.
    """
    wide = torch.promote_types(o.dtype, torch.float32)
    normed = o.to(wide)
    normed = normed * torch.rsqrt(normed.square().mean(-1, keepdim=True) + eps)
    return (weight * normed.to(o.dtype) * F.silu(z.to(wide))).to(o.dtype)


# ---- the Triton form as operators ----------------------------------------------------------------------------------


def _run(o: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The Triton form."""
    from qwenlinear.ops import _epilogue_triton

    return _epilogue_triton.forward(o, z, weight, eps)


gated_rms_norm_op = torch.library.custom_op(
    "qwenlinear::gated_rms_norm",
    _run,
    mutates_args=(),
    schema="(Tensor o, Tensor z, Tensor weight, float eps) -> Tensor",
)


def _run_backward(dy: Tensor, o: Tensor, z: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Its gradients."""
    from qwenlinear.ops import _epilogue_triton

    return _epilogue_triton.backward(dy, o, z, weight, eps)


gated_rms_norm_backward_op = torch.library.custom_op(
    "qwenlinear::gated_rms_norm_backward",
    _run_backward,
    mutates_args=(),
    schema="(Tensor dy, Tensor o, Tensor z, Tensor weight, float eps) -> (Tensor, Tensor, Tensor)",
)


@gated_rms_norm_op.register_fake
def _(o: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    return o.new_empty(o.shape)


@gated_rms_norm_backward_op.register_fake
def _(dy: Tensor, o: Tensor, z: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    return o.new_empty(o.shape), z.new_empty(z.shape), weight.new_empty(weight.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    tensors = (dy, *ctx.saved_tensors)
    run: Callable[..., Any] = (
        _run_backward if eager(*tensors) and not needs_grad(*tensors) else gated_rms_norm_backward_op
    )
    return (*run(*tensors, ctx.eps), None)


gated_rms_norm_op.register_autograd(_backward, setup_context=_keep)


class _GatedRMSNorm(torch.autograd.Function):
    """The operator's gradients without the dispatcher, in eager code; of a second derivative the operator knows to refuse it."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        y = _run(*inputs)
        _keep(ctx, inputs, y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return _backward(ctx, dy)
