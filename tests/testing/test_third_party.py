"""Kernels from outside, as their users would write them, pass the suite on what they can run on."""

from __future__ import annotations

import importlib.util
import sys
import types
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from qwenlinear.kernels import TorchKernel
from qwenlinear.testing import check_kernel
from qwenlinear.testing.generate import generate

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


def flashinfer_by_its_contract(
    q, k, v, g=None, beta=None, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None
):
    """What FlashInfer 0.6's documentation says of `chunk_gated_delta_rule`, computed by TorchKernel in float64."""
    assert all(x.dim() == 3 and x.is_contiguous() for x in (q, k, v))
    assert g.dtype == beta.dtype == torch.float32
    assert cu_seqlens.dtype == torch.int64
    assert not (g < 0).any()  # linear
    state = None if initial_state is None else initial_state.mT.contiguous().double()
    tokens = [x.unsqueeze(0).double() for x in (q, k, v, g.double().log(), beta)]
    o, final = TorchKernel()(*tokens, scale or q.shape[-1] ** -0.5, state, output_final_state, cu_seqlens=cu_seqlens)
    o = o[0].to(q.dtype)
    return (o, final.mT.contiguous().float()) if output_final_state else o


def test_flashinfer_conventions_by_a_stand_in(mocker) -> None:
    """FlashInfer runs on a GPU only; the example's own part, its conventions, is proven anywhere."""
    stand_in = types.ModuleType("flashinfer.gdn_prefill")
    stand_in.chunk_gated_delta_rule = flashinfer_by_its_contract
    mocker.patch.dict(sys.modules, {"flashinfer": types.ModuleType("flashinfer"), "flashinfer.gdn_prefill": stand_in})
    example = load(EXAMPLES / "kernels/flashinfer_gdn.py").FlashInferKernel
    anywhere = type("Anywhere", (example,), {"capabilities": replace(example.capabilities, devices=None)})
    cases = [case for case in generate(anywhere(), "cpu", packings=5) if case.T < 1000]
    report = check_kernel(anywhere(), cases=cases)
    assert report.passed
    assert report.counts["refused"] == 0
