"""Arguments of public functions, checked before anything runs: one ValueError with what is needed and what came."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def needs_tensor(name: str, value: object) -> None:
    """Require a tensor.

    Args:
        name: of the argument.
        value: what came.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} needs a tensor, got {type(value).__name__}")


def needs_floating(name: str, value: object) -> None:
    """Require a tensor of a floating dtype.

    Args:
        name: of the argument.
        value: what came.

    Raises:
        ValueError: it is none.
    """
    needs_tensor(name, value)
    assert isinstance(value, Tensor), "required just now"
    if not value.is_floating_point():
        raise ValueError(f"{name} needs a floating dtype, got {value.dtype}")


def needs_values(name: str, value: Tensor) -> None:
    """Require a tensor whose values can be read.

    Args:
        name: of the argument.
        value: what came.

    Raises:
        ValueError: it is on the meta device.
    """
    if value.is_meta:
        raise ValueError(f"{name} needs a tensor with values, got one on the meta device")


def needs_size(name: str, value: object) -> None:
    """Require a size.

    Args:
        name: of the argument.
        value: what came.

    Raises:
        ValueError: it is no whole number of at least 1.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} needs a whole number >= 1, got {value!r}")


def needs_eps(name: str, value: object) -> None:
    """Require what a norm adds to its mean square.

    Args:
        name: of the argument.
        value: what came.

    Raises:
        ValueError: it is no finite number above 0.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"{name} needs a number > 0, got {value!r}")


def as_device(name: str, value: object) -> torch.device:
    """Read a device that PyTorch knows, here or elsewhere.

    Args:
        name: of the argument.
        value: a device or its name.

    Returns:
        The device.

    Raises:
        ValueError: it is none.

    Example:
        >>> as_device("device", "cuda:1")
        device(type='cuda', index=1)
    """
    if isinstance(value, torch.device):
        return value
    try:
        return torch.device(value)  # type: ignore[call-overload,no-any-return]  # that is what is tried
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"{name} needs a device such as cpu or cuda:0, got {value!r}") from error
