"""Where the Triton forms run, in words."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from qwenlinear.kernels.hardware import Hardware
from qwenlinear.ops import available, why_not_fused

CUDA = torch.device("cuda")


@pytest.fixture
def on(monkeypatch):
    """Pretend that CUDA devices have this compute capability, and that Triton imports or says why not."""

    def pretend(capability: tuple[int, int] | None, triton: str | None = None) -> None:
        monkeypatch.setattr(available, "probe", lambda device: Hardware(device_type="cuda", capability=capability))
        monkeypatch.setattr(available, "_why_no_triton", lambda: triton)

    return pretend


def test_reasons_in_words(on) -> None:
    on((9, 0))
    assert why_not_fused(CUDA, torch.bfloat16, activation="silu", width=4, head_dims=(128, 256)) is None
    assert why_not_fused(CUDA, torch.float16, activation="swish", width=1) is None
    assert all(why_not_fused(CUDA, torch.bfloat16, norm_size=size) is None for size in (1, 20, 96, 100, 128, 256))
    assert why_not_fused(CUDA, torch.bfloat16, norm_size=257) == "a norm over 257, more than 256"
    assert why_not_fused(CUDA, torch.bfloat16, head_dims=(128, 96), norm_size=96) is not None
    assert why_not_fused(torch.device("cpu"), torch.bfloat16) == "tensors on cpu"
    assert why_not_fused(CUDA, torch.float64) == "float64"
    assert why_not_fused(CUDA, torch.float32, activation="gelu") == "activation gelu"
    assert why_not_fused(CUDA, torch.float32, activation=None) == "activation None"
    assert why_not_fused(CUDA, torch.float32, width=5) == "a convolution of 5 taps, more than 4"
    assert why_not_fused(CUDA, torch.float32, head_dims=(128, 96)) == "heads of 96, not a power of two up to 256"
    assert why_not_fused(CUDA, torch.float32, head_dims=(512,)) == "heads of 512, not a power of two up to 256"
    on((7, 5))
    assert why_not_fused(CUDA, torch.float16) == "compute capability 7.5 is below 8.0"
    on(None, "Triton is not installed")
    assert why_not_fused(CUDA, torch.float16) == "Triton is not installed"


def test_a_triton_that_does_not_import(monkeypatch) -> None:
    def broken(name: str) -> None:
        raise RuntimeError("0 active drivers")

    available._why_no_triton.cache_clear()
    monkeypatch.setattr(available.importlib, "import_module", broken)
    assert available._why_no_triton() == "Triton cannot be imported (0 active drivers)"
    available._why_no_triton.cache_clear()


def test_importing_the_operators_loads_no_triton() -> None:
    code = "import sys, qwenlinear.ops; assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
