"""Layers: Gated DeltaNet as Qwen3-Next and Qwen3.5 have it, and what belongs around it."""

from qwenlinear.layers.block import GatedDeltaNetBlock
from qwenlinear.layers.cache import GatedDeltaNetCache
from qwenlinear.layers.config import GatedDeltaNetConfig
from qwenlinear.layers.gated_delta_net import GatedDeltaNet, Qwen3_5GatedDeltaNet, Qwen3NextGatedDeltaNet
from qwenlinear.layers.gated_norm import GatedRMSNorm, ZeroCenteredRMSNorm
from qwenlinear.layers.short_conv import ShortConvolution

__all__ = [
    "GatedDeltaNet",
    "GatedDeltaNetBlock",
    "GatedDeltaNetCache",
    "GatedDeltaNetConfig",
    "GatedRMSNorm",
    "Qwen3NextGatedDeltaNet",
    "Qwen3_5GatedDeltaNet",
    "ShortConvolution",
    "ZeroCenteredRMSNorm",
]
