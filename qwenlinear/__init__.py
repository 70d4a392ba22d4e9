"""qwenlinear: Gated DeltaNet layers of Qwen3-Next and Qwen3.5 with an injected kernel."""

from qwenlinear.errors import Refusal, UnsupportedCall
from qwenlinear.kernels import (
    AutoKernel,
    FLAKernel,
    FlashQLAKernel,
    GatedDeltaKernel,
    PackedSequences,
    TorchKernel,
    kernel_from_name,
)

__all__ = [
    "AutoKernel",
    "FLAKernel",
    "FlashQLAKernel",
    "GatedDeltaKernel",
    "PackedSequences",
    "Refusal",
    "TorchKernel",
    "UnsupportedCall",
    "kernel_from_name",
]
