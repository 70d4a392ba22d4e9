"""Kernels: the strategies that compute the gated delta rule."""

from qwenlinear.kernels.base import GatedDeltaKernel
from qwenlinear.kernels.capabilities import KernelCapabilities, Tolerance
from qwenlinear.kernels.inputs import DeltaRuleInputs
from qwenlinear.kernels.packing import PackedSequences
from qwenlinear.kernels.torch_kernel import TorchKernel

__all__ = [
    "DeltaRuleInputs",
    "GatedDeltaKernel",
    "KernelCapabilities",
    "PackedSequences",
    "Tolerance",
    "TorchKernel",
]
