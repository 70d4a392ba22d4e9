"""Where the Triton form of an operator runs, in words, so that nothing falls back silently."""

from __future__ import annotations

import importlib
from functools import lru_cache

import torch
from torch import Tensor

from qwenlinear.kernels.hardware import probe
from qwenlinear.kernels.tangents import carry_tangents

MAX_WIDTH = 4
"""The widest short convolution, in taps, that the Triton kernels are written for."""

MAX_HEAD_DIM = 256
"""The largest head size whose row a Triton program holds in registers."""

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MINIMUM_CAPABILITY = (8, 0)  # what Triton compiles for, and bfloat16 needs


def why_not_fused(
    device: torch.device,
    dtype: torch.dtype,
    *,
    activation: str | None = "silu",
    width: int = 1,
    head_dims: tuple[int, ...] = (),
    norm_size: int = 1,
) -> str | None:
    """Why the Triton form of an operator does not run on such tensors; the PyTorch twin does then.

    Args:
        device: where the tensors are.
        dtype: their dtype.
        activation: the activation after the convolution; default ``"silu"``.
        width: W, taps of the convolution; default 1 for an operator without one.
        head_dims: K and V of a prologue, whose programs take whole heads: powers of two; default none.
        norm_size: V of the epilogue's gated norm, any size up to 256; default 1 for an operator without one.

    Returns:
        One reason in words, or None where the Triton form runs. Launches nothing.

    Raises:
        ValueError: no device, or no dtype.

    Example:
        >>> why_not_fused(torch.device("cpu"), torch.float32)
        'tensors on cpu'
    """
    if not isinstance(device, torch.device) or not isinstance(dtype, torch.dtype):
        raise ValueError(f"device and dtype need a torch.device and a torch.dtype, got {device!r} and {dtype!r}")
    if device.type != "cuda":
        return f"tensors on {device.type}"
    if dtype not in _DTYPES:
        return str(dtype).removeprefix("torch.")
    reason = why_not_these_sizes(activation, width, head_dims, norm_size)
    if reason is not None:
        return reason
    return _why_not_here(device)


def why_not_these_sizes(
    activation: str | None, width: int, head_dims: tuple[int, ...], norm_size: int = 1
) -> str | None:
    """The part of :func:`why_not_fused` that no machine changes.

    Args:
        activation: the activation after the convolution.
        width: W, taps of the convolution.
        head_dims: K and V of a prologue.
        norm_size: V of a gated norm; default 1 for none.

    Returns:
        One reason in words, or None.
    """
    if activation not in ("silu", "swish"):
        return f"activation {activation}"
    if not 1 <= width <= MAX_WIDTH:
        return f"a convolution of {width} taps, more than {MAX_WIDTH}"
    for size in head_dims:
        if not 1 <= size <= MAX_HEAD_DIM or size & (size - 1):
            return f"heads of {size}, not a power of two up to {MAX_HEAD_DIM}"
    if not 1 <= norm_size <= MAX_HEAD_DIM:
        return f"a norm over {norm_size}, more than {MAX_HEAD_DIM}"
    return None


def refuse_forward_mode(name: str, *tensors: Tensor | None) -> None:
    """Forward-mode derivatives of an operator in Triton would be dropped without a word where nothing requires gradients.

    Args:
        name: the operator's.
        *tensors: what it is called with.

    Raises:
        NotImplementedError: one carries a tangent.
    """
    if carry_tangents(*tensors):
        raise NotImplementedError(
            f"{name} in Triton needs tensors without tangents, got forward-mode differentiation: use reverse mode"
        )


def _why_not_here(device: torch.device) -> str | None:
    """What the machine has against it."""
    capability = probe(device).capability
    if capability is not None and capability < _MINIMUM_CAPABILITY:
        return f"compute capability {capability[0]}.{capability[1]} is below 8.0"
    return _why_no_triton()


# What torch.compiler.assume_constant_result sets, without importing the compiler: what is installed is no part of a graph.
_why_not_here._dynamo_marked_constant = True  # type: ignore[attr-defined]


@lru_cache(maxsize=1)
def _why_no_triton() -> str | None:
    try:
        importlib.import_module("triton")
    except ImportError:
        return "Triton is not installed"
    except Exception as error:  # a broken driver raises RuntimeError or OSError
        return f"Triton cannot be imported ({error})"
    return None
