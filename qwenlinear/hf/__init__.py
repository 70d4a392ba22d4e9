"""Transformers' Qwen3-Next and Qwen3.5 models with an injected kernel, and their weights in other layouts.

report = inject(model, FLAKernel())

Transformers, safetensors and PEFT are imported by nothing here until something that needs them is called.
"""

from qwenlinear.hf.inject import inject, restore
from qwenlinear.hf.layouts import convert_lora, convert_weights
from qwenlinear.hf.report import InjectionReport, LayerReport
from qwenlinear.hf.weights import load_layers

__all__ = [
    "InjectionReport",
    "LayerReport",
    "convert_lora",
    "convert_weights",
    "inject",
    "load_layers",
    "restore",
]
