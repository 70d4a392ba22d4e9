"""Kernels from outside, as their users would write them, pass the suite on what they can run on."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path

import pytest
import torch

from qwenlinear.testing import check_kernel

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what a package says at import about a machine without its favourite device
        spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", sorted((EXAMPLES / "kernels").glob("*.py")), ids=lambda path: path.stem)
def test_is_under_80_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 80


def test_flash_linear_attention_naive_functions() -> None:
    pytest.importorskip("fla.ops.gated_delta_rule.naive", exc_type=ImportError)
    kernel = load(EXAMPLES / "kernels/fla_naive.py").FLANaiveKernel()
    assert check_kernel(kernel, packings=50).passed


def test_attention_gym() -> None:
    pytest.importorskip("attn_gym.linear", exc_type=ImportError)
    kernel = load(EXAMPLES / "kernels/attention_gym.py").AttentionGymKernel()
    assert check_kernel(kernel, packings=50).passed


def test_the_kernel_of_twenty_lines() -> None:
    kernel = load(EXAMPLES / "custom_kernel.py").LoopKernel()
    report = check_kernel(kernel)
    assert report.passed
    assert not kernel.capabilities.packed
    assert torch.bfloat16 not in kernel.capabilities.dtypes
