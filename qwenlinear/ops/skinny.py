"""Products of a few rows with several weights, where reading the weights is all the work: the projections of a decoded token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from qwenlinear._launch import eager, needs_grad
from qwenlinear.ops.available import refuse_forward_mode, why_not_fused

MAX_ROWS = 16
"""Rows of x that one launch is for: what an instruction of the tensor cores takes."""

MAX_WEIGHTS = 4
"""Weights of one launch."""

DTYPES = (torch.bfloat16, torch.float16)
"""What tensor cores multiply without rounding the factors."""


def skinny_linear(x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """``torch.cat([F.linear(x, w) for w in weights], -1)`` for a few rows, where reading the weights is all the work.

    In one Triton launch (bfloat16 and float16) where :func:`why_not_skinny` has nothing against it, else in PyTorch
    (:func:`skinny_linear_twin`).
    There sums are float32 and rounded once, two calls are equal bit by bit, and no weight is copied. There are no gradients.

    Args:
        x: ``[N, D]``.
        weights: one to four ``[R, D]`` in x's dtype, any R and D.

    Returns:
        ``[N, sum of R]`` in x's dtype, contiguous: what ``split`` cuts into each weight's part without a copy.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, or a gradient that would be wanted.
        NotImplementedError: forward-mode differentiation of the Triton form.

    Example:
        >>> x, weights = torch.randn(1, 8), [torch.randn(3, 8), torch.randn(2, 8)]
        >>> y, z = skinny_linear(x, weights).split([3, 2], -1)
        >>> torch.allclose(y, x @ weights[0].t(), atol=1e-5), torch.allclose(z, x @ weights[1].t(), atol=1e-5)
        (True, True)
    """
    _check(x, weights)
    if why_not_skinny(x.device, x.dtype, x.shape[0], weights) is not None:
        return skinny_linear_twin(x, weights)
    refuse_forward_mode("skinny_linear", x, *weights)
    return launched(x, weights)


def skinny_linear_twin(x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """:func:`skinny_linear` in PyTorch: a product for each weight, put side by side.

    Args: those of :func:`skinny_linear`.

    Returns:
        ``[N, sum of R]``.

    Example:
        >>> skinny_linear_twin(torch.ones(1, 3), [torch.ones(1, 3), torch.zeros(2, 3)])
        tensor([[3., 0., 0.]])
    """
    return torch.cat([F.linear(x, w) for w in weights], -1)


def launched(x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """The Triton form for whoever has looked at everything already, at every token.

    Args:
        x: ``[N, D]``, N up to :data:`MAX_ROWS`.
        weights: one to four ``[R, D]``, contiguous, in x's dtype and on its device.

    Returns:
        ``[N, sum of R]``.
    """
    if eager(x, *weights):
        from qwenlinear.ops import _skinny_triton

        return _skinny_triton.launch(x, weights)
    y: Tensor = skinny_linear_op(x, list(weights))
    return y


def why_not_skinny(device: torch.device, dtype: torch.dtype, rows: int, weights: Sequence[Tensor] = ()) -> str | None:
    """Why a product of a few rows is left to PyTorch.

    Args:
        device: where the tensors are.
        dtype: of x.
        rows: N.
        weights: ``[R, D]`` each, of which only the metadata is looked at; default none of them.

    Returns:
        One reason in words, or None for one Triton launch.

    Example:
        >>> why_not_skinny(torch.device("cuda"), torch.bfloat16, 300)
        '300 rows, more than 16'
    """
    if rows > MAX_ROWS:
        return f"{rows} rows, more than {MAX_ROWS}"
    if (reason := why_not_fused(device, dtype)) is not None:
        return reason
    if dtype not in DTYPES:
        return f"{str(dtype).removeprefix('torch.')}, whose products stay PyTorch's"
    if not all(w.is_contiguous() for w in weights):
        return "a weight that is not contiguous"
    return None


def _check(x: Tensor, weights: Sequence[Tensor]) -> None:
    if x.dim() != 2 or not x.is_floating_point():
        raise ValueError(f"x needs shape [N, D] and a floating dtype, got {list(x.shape)}, {x.dtype}")
    if not 1 <= len(weights) <= MAX_WEIGHTS:
        raise ValueError(f"weights needs one to {MAX_WEIGHTS} tensors, got {len(weights)}")
    for i, w in enumerate(weights):
        if w.dim() != 2 or w.shape[1] != x.shape[1] or w.dtype != x.dtype or w.device != x.device:
            needs = f"shape [R, {x.shape[1]}], {x.dtype}, on {x.device}"
            raise ValueError(f"weights[{i}] needs {needs}, got {list(w.shape)}, {w.dtype}, on {w.device}")
    if needs_grad(x, *weights):
        raise ValueError(
            "skinny_linear needs a call without gradients, got an argument that requires them: use torch.no_grad(), or "
            "torch.nn.functional.linear, which has them"
        )


# ---- the Triton form as an operator --------------------------------------------------------------------------------


@torch.library.custom_op("qwenlinear::skinny_linear", mutates_args=(), schema="(Tensor x, Tensor[] weights) -> Tensor")
def skinny_linear_op(x: Tensor, weights: list[Tensor]) -> Tensor:
    """The Triton form."""
    from qwenlinear.ops import _skinny_triton

    return _skinny_triton.launch(x, weights)


@skinny_linear_op.register_fake
def _(x: Tensor, weights: list[Tensor]) -> Tensor:
    return x.new_empty(x.shape[0], sum(w.shape[0] for w in weights))
