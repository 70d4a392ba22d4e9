"""What every launch of a Triton kernel needs beside its arguments: the device to launch on, and how wide that device is."""

from __future__ import annotations

import contextlib
from functools import lru_cache
from typing import Any

import torch

_INTERPRETED_PROCESSORS = 2  # so that the interpreter's small cases take a persistent kernel round its loop


def on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """A context in which Triton launches on this device: it asks for the current one, whatever its tensors say.

    Args:
        device: of the tensors; a CPU only where Triton interprets.

    Returns:
        The context.
    """
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


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
