"""Operators around the recurrence, each in Triton with a PyTorch twin; importing this loads no Triton."""

from qwenlinear.ops.available import why_not_fused
from qwenlinear.ops.decode import decode_prologue
from qwenlinear.ops.epilogue import epilogue
from qwenlinear.ops.prologue import prologue
from qwenlinear.ops.skinny import skinny_linear, why_not_skinny

__all__ = ["decode_prologue", "epilogue", "prologue", "skinny_linear", "why_not_fused", "why_not_skinny"]
