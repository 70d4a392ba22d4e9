"""Products of a few tokens with large weights, as decoding has them: what they take is the time to read the weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from qwenlinear.ops.available import refuse_forward_mode, why_not_fused

MAX_TOKENS = 16
"""The most tokens of a product: what one instruction of the tensor cores takes, and more would make it one for cuBLAS."""

MAX_WEIGHTS = 4
"""The most weights of one launch."""


def skinny_linear(x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """``x @ weight.T`` for each of up to four weights, in one launch that reads every weight once, where it lies.

    In Triton where :func:`why_not_skinny` has nothing against it, else in PyTorch (:func:`skinny_linear_twin`). Sums are
    float32 (no TF32) and rounded once; two calls are equal bit by bit. There are no gradients.

    Args:
        x: ``[N, hidden]``, N tokens.
        weights: one to four of ``[rows, hidden]``, contiguous, in x's dtype and on its device; any rows, any hidden.

    Returns:
        ``[N, rows]`` for each weight: views of one buffer ``[N, all rows]``, side by side.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, a strided weight, or a gradient that would be wanted.
        NotImplementedError: forward-mode differentiation of the Triton form.

    Example:
        >>> x, first, second = torch.randn(2, 8), torch.randn(5, 8), torch.randn(3, 8)
        >>> y, z = skinny_linear(x, [first, second])
        >>> y.shape, z.shape, z.data_ptr() - y.data_ptr() == 5 * y.element_size()
        (torch.Size([2, 5]), torch.Size([2, 3]), True)
    """
    _check(x, weights)
    if why_not_skinny(x.device, x.dtype, x.shape[0]) is None:
        refuse_forward_mode("skinny_linear", x, *weights)
        y: Tensor = skinny_linear_op(x, list(weights))
        return y.split_with_sizes([weight.shape[0] for weight in weights], 1)
    return skinny_linear_twin(x, weights)


def skinny_linear_twin(x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """:func:`skinny_linear` in PyTorch: a product for each weight, put side by side.

    Args: those of :func:`skinny_linear`.

    Returns:
        Its views.

    Example:
        >>> skinny_linear_twin(torch.ones(1, 3), [torch.ones(1, 3), torch.zeros(2, 3)])
        (tensor([[3.]]), tensor([[0., 0.]]))
    """
    y = torch.cat([F.linear(x, weight) for weight in weights], 1)
    return y.split_with_sizes([weight.shape[0] for weight in weights], 1)


def why_not_skinny(device: torch.device, dtype: torch.dtype, tokens: int) -> str | None:
    """Why :func:`skinny_linear` does not run in Triton.

    Args:
        device: where the tensors are.
        dtype: of x and the weights.
        tokens: N.

    Returns:
        One reason in words, or None where it does. Launches nothing.

    Example:
        >>> why_not_skinny(torch.device("cuda"), torch.bfloat16, 300)
        '300 tokens, more than 16'
    """
    if tokens > MAX_TOKENS:
        return f"{tokens} tokens, more than {MAX_TOKENS}"
    return why_not_fused(device, dtype)


def _check(x: Tensor, weights: Sequence[Tensor]) -> None:
    if x.dim() != 2 or not x.is_floating_point():
        raise ValueError(f"x needs shape [N, hidden] and a floating dtype, got {list(x.shape)}, {x.dtype}")
    if not 1 <= len(weights) <= MAX_WEIGHTS:
        raise ValueError(f"weights needs one to {MAX_WEIGHTS} tensors, got {len(weights)}")
    for at, weight in enumerate(weights):
        if weight.dim() != 2 or weight.shape[1] != x.shape[1] or not weight.is_contiguous():
            got = f"{list(weight.shape)} with strides {list(weight.stride())}"
            raise ValueError(f"weights[{at}] needs shape [rows, {x.shape[1]}], contiguous, got {got}")
        if weight.dtype != x.dtype or weight.device != x.device:
            raise ValueError(f"weights[{at}] needs {x.dtype} on {x.device}, got {weight.dtype} on {weight.device}")
    if torch.is_grad_enabled() and any(t.requires_grad for t in (x, *weights)):
        raise ValueError(
            "skinny_linear needs a call without gradients, got an argument that requires them: use torch.no_grad(), or "
            "torch.nn.functional.linear, which has them"
        )


# ---- the Triton form as an operator --------------------------------------------------------------------------------


@torch.library.custom_op("qwenlinear::skinny_linear", mutates_args=(), schema="(Tensor x, Tensor[] weights) -> Tensor")
def skinny_linear_op(x: Tensor, weights: list[Tensor]) -> Tensor:
    """The Triton form: the whole buffer ``[N, all rows]``."""
    from qwenlinear.ops import _linear_triton

    return _linear_triton.launch(x, weights)


@skinny_linear_op.register_fake
def _(x: Tensor, weights: list[Tensor]) -> Tensor:
    return x.new_empty(x.shape[0], sum(weight.shape[0] for weight in weights))
