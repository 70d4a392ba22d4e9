"""qwenlinear: Gated DeltaNet layers of Qwen3-Next and Qwen3.5 with an injected kernel."""

from qwenlinear.errors import Refusal, UnsupportedCall
from qwenlinear.kernels import GatedDeltaKernel, PackedSequences, TorchKernel

__all__ = ["GatedDeltaKernel", "PackedSequences", "Refusal", "TorchKernel", "UnsupportedCall"]
