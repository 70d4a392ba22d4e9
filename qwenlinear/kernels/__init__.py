"""Kernels: the strategies that compute the gated delta rule."""

from qwenlinear.kernels.auto import AutoKernel, add_kernel_arguments, kernel_from_args, kernel_from_name
from qwenlinear.kernels.base import GatedDeltaKernel
from qwenlinear.kernels.capabilities import KernelCapabilities, Tolerance
from qwenlinear.kernels.fla import FLAKernel
from qwenlinear.kernels.flashqla import FlashQLAKernel
from qwenlinear.kernels.inputs import DeltaRuleInputs
from qwenlinear.kernels.packing import PackedSequences
from qwenlinear.kernels.torch_kernel import TorchKernel
from qwenlinear.kernels.triton_kernel import TritonKernel

__all__ = [
    "AutoKernel",
    "DeltaRuleInputs",
    "FLAKernel",
    "FlashQLAKernel",
    "GatedDeltaKernel",
    "KernelCapabilities",
    "PackedSequences",
    "Tolerance",
    "TorchKernel",
    "TritonKernel",
    "add_kernel_arguments",
    "kernel_from_args",
    "kernel_from_name",
]
