"""What every launch of a Triton kernel needs beside its arguments: how it is called, on which device, and how wide that is."""

from __future__ import annotations

import contextlib
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

_INTERPRETED_PROCESSORS = 2  # so that the interpreter's small cases take a persistent kernel round its loop
_NOTHING = contextlib.nullcontext()


def eager(x: Tensor) -> bool:
    """Whether an operator's launch may be called without PyTorch's dispatcher, which costs the host more than the launch does.

    Compilers, exporters and fake tensors need the registered operator; plain tensors in eager code do not, where no gradient
    is wanted.

    Args:
        x: the operator's first tensor.

    Returns:
        True for a plain tensor outside of a compiler.

    Example:
        >>> eager(torch.ones(1))
        True
    """
    return type(x) is Tensor and not torch.compiler.is_compiling()


def written(tensor: Tensor) -> None:
    """Tell autograd that a launch wrote to a tensor, so that whoever saved it for a backward pass hears of it.

    Args:
        tensor: what was changed in place.
    """
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)


def on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """A context in which Triton launches on this device: it asks for the current one, whatever its tensors say.

    Args:
        device: of the tensors; a CPU only where Triton interprets.

    Returns:
        The context.
    """
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(device)


@lru_cache(maxsize=64)
def processors(device: torch.device) -> int:
    """Multiprocessors of a device.

    Args:
        device: as in :func:`on`.

    Returns:
        How many programs of full width run at once.
    """
    if device.type != "cuda":
        return _INTERPRETED_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
