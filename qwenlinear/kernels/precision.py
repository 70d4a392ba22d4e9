"""Autocast, on any device: whether it is on, and computing without it."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

# Asked once: TorchDynamo cannot trace the question before PyTorch 2.12, and a call to the kernel should not pay for it.
_KNOWN = frozenset(
    name for name in ("cpu", "cuda", "xpu", "mps", "hpu", "xla") if torch.amp.is_autocast_available(name)
)


def autocast_enabled(device: torch.device) -> bool:
    """Whether autocast is on for tensors on this device.

    Args:
        device: any, also one that knows no autocast (``meta``).

    Returns:
        True inside an enabled ``torch.autocast`` for the device's type.
    """
    kind = device.type
    return (kind in _KNOWN or torch.amp.is_autocast_available(kind)) and torch.is_autocast_enabled(kind)


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """A context in which products on this device are computed in the dtypes they are given.

    Args:
        device: any, also one that knows no autocast (``meta``).

    Returns:
        The context; it does nothing where autocast is off.

    Example:
        >>> x = torch.ones(2, 2)
        >>> with torch.autocast("cpu", torch.bfloat16), without_autocast(x.device):
        ...     (x @ x).dtype
        torch.float32
    """
    return torch.autocast(device.type, enabled=False) if autocast_enabled(device) else contextlib.nullcontext()
