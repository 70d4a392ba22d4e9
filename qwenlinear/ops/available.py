"""Stub: branch prologue owns this file."""

from __future__ import annotations

import importlib.util

import torch


def why_not_fused(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cuda":
        return f"tensors on {device.type}"
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return str(dtype).removeprefix("torch.")
    return None if importlib.util.find_spec("triton") else "Triton is not installed"
