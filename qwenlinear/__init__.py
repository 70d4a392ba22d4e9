"""qwenlinear: Gated DeltaNet layers of Qwen3-Next and Qwen3.5 with an injected kernel.

layer = Qwen3_5GatedDeltaNet(config, kernel=FLAKernel())
y = layer(hidden_states, cu_seqlens=PackedSequences.from_lengths([5, 7]))
"""

from qwenlinear.distributed import CommMemoryPolicy, GuardedProcessGroup
from qwenlinear.errors import Refusal, UnsupportedCall
from qwenlinear.kernels import (
    AutoKernel,
    FLAKernel,
    FlashQLAKernel,
    GatedDeltaKernel,
    PackedSequences,
    TorchKernel,
    TritonKernel,
    kernel_from_name,
)
from qwenlinear.layers import (
    GatedDeltaNet,
    GatedDeltaNetBlock,
    GatedDeltaNetCache,
    GatedDeltaNetConfig,
    Qwen3_5GatedDeltaNet,
    Qwen3NextGatedDeltaNet,
)

__version__ = "0.1.0"  # setup.cfg reads it

__all__ = [
    "AutoKernel",
    "CommMemoryPolicy",
    "FLAKernel",
    "FlashQLAKernel",
    "GatedDeltaKernel",
    "GatedDeltaNet",
    "GatedDeltaNetBlock",
    "GatedDeltaNetCache",
    "GatedDeltaNetConfig",
    "GuardedProcessGroup",
    "PackedSequences",
    "Qwen3NextGatedDeltaNet",
    "Qwen3_5GatedDeltaNet",
    "Refusal",
    "TorchKernel",
    "TritonKernel",
    "UnsupportedCall",
    "kernel_from_name",
]
