"""Operators around the recurrence, each in Triton with a PyTorch twin; importing this loads no Triton."""

from qwenlinear.ops._stub import decode_prologue, prologue
from qwenlinear.ops.available import why_not_fused
from qwenlinear.ops.epilogue import epilogue

__all__ = ["decode_prologue", "epilogue", "prologue", "why_not_fused"]
