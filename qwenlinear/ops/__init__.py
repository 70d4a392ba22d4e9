"""Fused operators around the recurrence, each with a PyTorch twin; imports without Triton."""

from qwenlinear.ops.epilogue import epilogue

__all__ = ["epilogue"]
