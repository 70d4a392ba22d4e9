"""Where flash-linear-attention's convolution and norm stand in for the PyTorch ones: on a GPU that has them."""

from __future__ import annotations

import importlib
import importlib.metadata
from functools import lru_cache
from types import ModuleType

import torch
from packaging.version import InvalidVersion, Version
from torch import Tensor

MINIMUM_FLA = "0.6.0"


def why_not_fla(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why flash-linear-attention's modules do not run here.

    Args:
        device: where the tensors are.
        dtype: their dtype.

    Returns:
        One reason in words, or None when the modules run.
    """
    if device.type != "cuda":
        return f"tensors on {device.type}"
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return str(dtype).removeprefix("torch.")
    return _missing()


def fla_module(x: Tensor, name: str) -> ModuleType | None:
    """A module of flash-linear-attention, where it can run on this tensor.

    Args:
        x: the tensor that would go in.
        name: the module below ``fla.modules``.

    Returns:
        The imported module, or None: use PyTorch. Also None for a tensor without elements, which Triton cannot launch.
    """
    if x.numel() == 0 or why_not_fla(x.device, x.dtype) is not None:
        return None
    return importlib.import_module(f"fla.modules.{name}")


@lru_cache(maxsize=1)
def _missing() -> str | None:
    for distribution in ("fla-core", "flash-linear-attention"):
        try:
            text = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        try:
            if Version(Version(text).base_version) < Version(MINIMUM_FLA):
                return f"{distribution} {text} is older than {MINIMUM_FLA}"
        except InvalidVersion:
            return f"{distribution} has the unreadable version {text!r}"
        try:
            importlib.import_module("fla.modules")
        except Exception as error:  # a broken Triton or driver raises RuntimeError or OSError
            return f"{distribution} {text} cannot be imported ({error})"
        return None
    return "flash-linear-attention is not installed"
