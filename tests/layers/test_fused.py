"""What flash-linear-attention's modules are handed, and where they are not used; a fake stands in for them on a CPU."""

from __future__ import annotations

import importlib.metadata
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from qwenlinear.kernels import PackedSequences
from qwenlinear.layers import GatedRMSNorm, ShortConvolution, fused, gated_norm, short_conv

CUDA = torch.device("cuda")


@pytest.fixture
def installed(monkeypatch):
    """Pretend which version of which distribution is installed, and that its modules import."""

    def pretend(**versions: str) -> None:
        def version(name: str) -> str:
            if name.replace("-", "_") in versions:
                return versions[name.replace("-", "_")]
            raise importlib.metadata.PackageNotFoundError(name)

        monkeypatch.setattr(fused.importlib.metadata, "version", version)
        monkeypatch.setitem(sys.modules, "fla", ModuleType("fla"))
        monkeypatch.setitem(sys.modules, "fla.modules", ModuleType("fla.modules"))
        fused._missing.cache_clear()

    yield pretend
    fused._missing.cache_clear()


def test_where_flas_modules_run(installed, monkeypatch) -> None:
    installed(fla_core="0.6.0")
    assert fused.why_not_fla(CUDA, torch.bfloat16) is None
    assert fused.why_not_fla(CUDA, torch.float64) == "float64"
    assert fused.why_not_fla(torch.device("cpu"), torch.bfloat16) == "tensors on cpu"
    for newer in ("0.6.0.dev20260101", "0.6.0a0+git12", "0.10.0+cu130"):
        installed(flash_linear_attention=newer)
        assert fused.why_not_fla(CUDA, torch.float16) is None
    installed(fla_core="0.5.2")
    assert fused.why_not_fla(CUDA, torch.float16) == "fla-core 0.5.2 is older than 0.6.0"
    installed(fla_core="main")
    assert fused.why_not_fla(CUDA, torch.float16) == "fla-core has the unreadable version 'main'"
    installed()
    assert fused.why_not_fla(CUDA, torch.float16) == "flash-linear-attention is not installed"
    installed(fla_core="0.6.0")
    monkeypatch.setitem(sys.modules, "fla.modules", None)
    assert fused.why_not_fla(CUDA, torch.float16).startswith("fla-core 0.6.0 cannot be imported (")
    installed(fla_core="0.6.0")

    def broken(name: str) -> None:
        raise RuntimeError("0 active drivers")

    monkeypatch.setattr(fused.importlib, "import_module", broken)
    assert fused.why_not_fla(CUDA, torch.float16) == "fla-core 0.6.0 cannot be imported (0 active drivers)"


def test_repr_on_a_gpu_with_fla(installed) -> None:
    installed(fla_core="0.6.0")
    assert ShortConvolution(6, 4).implementation(CUDA, torch.bfloat16) == "runs on flash-linear-attention"
    assert GatedRMSNorm(8).implementation(CUDA, torch.bfloat16) == "runs on flash-linear-attention"
    assert ShortConvolution(6, 4, "gelu").implementation(CUDA, torch.bfloat16) == "runs on PyTorch: activation gelu"


def test_what_the_convolution_hands_over(monkeypatch) -> None:
    calls = []

    def causal_conv1d(x, weight, **options):
        calls.append((x, weight, options))
        return x + 1, None

    monkeypatch.setattr(short_conv, "fla_module", lambda x, name: SimpleNamespace(causal_conv1d=causal_conv1d))
    conv = ShortConvolution(6, 4)
    lengths = [100, 0, 64, 1]
    packed, x, state = PackedSequences.from_lengths(lengths), torch.randn(1, 165, 6), torch.randn(4, 6, 3)
    for _ in range(2):
        y, final = conv(x, state, True, packed)
    assert torch.equal(y, x + 1)
    assert torch.equal(final[1], state[1])
    assert torch.equal(final[3], torch.cat([state[3, :, 1:], x[0, 164:].t()], 1))
    (first_x, weight, first), (_, _, second) = calls
    assert first_x is x
    assert torch.equal(weight, conv.weight[:, 0])
    assert weight.is_contiguous()
    assert first["initial_state"].shape == (4, 6, 4)  # W columns, the first of which it never reads
    assert torch.equal(first["initial_state"][..., 1:], state)
    assert first["output_final_state"] is False
    assert first["activation"] == "silu"
    assert first["cu_seqlens"].tolist() == [0, 100, 100, 164, 165]
    assert first["chunk_indices"].tolist() == [[0, 0], [0, 1], [2, 0], [3, 0]]
    for name in ("cu_seqlens", "cu_seqlens_cpu", "chunk_indices"):
        assert first[name] is second[name]  # the same private tensor: caches by identity hit
    calls.clear()
    conv(x)
    ((_, _, options),) = calls
    assert options == {"initial_state": None, "output_final_state": False, "activation": "silu"}
    calls.clear()
    ShortConvolution(6, 4, "gelu")(x)
    assert not calls


def test_what_the_norm_hands_over(monkeypatch) -> None:
    calls = []

    def rms_norm_gated(*arguments, **options):
        calls.append((arguments, options))
        return arguments[0]

    monkeypatch.setattr(gated_norm, "fla_module", lambda x, name: SimpleNamespace(rms_norm_gated=rms_norm_gated))
    norm, x, gate = GatedRMSNorm(8, eps=1e-5), torch.randn(2, 8), torch.randn(2, 8)
    norm(x, gate)
    (((got_x, got_gate, weight, bias), options),) = calls
    assert got_x is x
    assert got_gate is gate
    assert weight is norm.weight
    assert bias is None
    assert options == {"activation": "swish", "eps": 1e-5}


def test_nothing_is_launched_without_elements(installed) -> None:
    installed(fla_core="0.6.0")
    assert fused.fla_module(torch.empty(1, 0, 6), "causal_conv1d") is None
