"""Operators around the recurrence, each in Triton with a PyTorch twin; importing this loads no Triton."""

from qwenlinear.ops.available import why_not_fused
from qwenlinear.ops.decode import decode_prologue
from qwenlinear.ops.epilogue import epilogue

__all__ = ["decode_prologue", "epilogue", "why_not_fused"]
