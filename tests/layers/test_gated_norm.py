"""The two norms equal Transformers' own, and say what they run on."""

from __future__ import annotations

import pytest
import torch

from qwenlinear.layers import GatedRMSNorm, ZeroCenteredRMSNorm
from qwenlinear.ops import available


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gated_norm_is_bitwise_transformers(dtype: torch.dtype) -> None:
    modeling = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    theirs, ours = modeling.Qwen3_5RMSNormGated(8, eps=1e-5).to(dtype), GatedRMSNorm(8, eps=1e-5).to(dtype)
    torch.nn.init.normal_(theirs.weight)
    ours.load_state_dict(theirs.state_dict())
    x, gate = torch.randn(2, 3, 5, 8, dtype=dtype).unbind()
    want, got = theirs(x, gate), ours(x, gate)
    assert got.dtype == dtype
    assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zero_centered_norm_equals_transformers(dtype: torch.dtype) -> None:
    modeling = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    theirs, ours = modeling.Qwen3_5RMSNorm(16).to(dtype), ZeroCenteredRMSNorm(16).to(dtype)
    torch.nn.init.normal_(theirs.weight)
    ours.load_state_dict(theirs.state_dict())
    x = 3 * torch.randn(2, 5, 16, dtype=dtype)
    got = ours(x)
    assert got.dtype == dtype
    torch.testing.assert_close(got, theirs(x), rtol=1e-6 if dtype == torch.float32 else 8e-3, atol=1e-6)


def test_float64_stays_float64() -> None:
    x, gate, weight = torch.randn(3, 4, 8, dtype=torch.float64).unbind()
    norm = GatedRMSNorm(8).double()
    want = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * gate * torch.sigmoid(gate)
    torch.testing.assert_close(norm(x, gate), want, rtol=1e-12, atol=1e-12)
    zero_centered = ZeroCenteredRMSNorm(8).double()
    zero_centered.weight.data.copy_(weight[0])
    want = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + weight[0])
    torch.testing.assert_close(zero_centered(x), want, rtol=1e-12, atol=1e-12)


def test_gradients() -> None:
    x, gate = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True).unbind()
    assert torch.autograd.gradcheck(GatedRMSNorm(8).double(), (x.detach().requires_grad_(), gate))
    assert torch.autograd.gradcheck(ZeroCenteredRMSNorm(8).double(), (x.detach().requires_grad_(),))


def test_repr_says_what_runs() -> None:
    assert repr(GatedRMSNorm(8)) == "GatedRMSNorm(8, eps=1e-06, runs in PyTorch: tensors on cpu)"


def test_what_runs_depends_on_the_size_of_a_head(monkeypatch) -> None:
    monkeypatch.setattr(available, "_why_not_here", lambda device: None)
    said = {size: GatedRMSNorm(size).implementation(torch.device("cuda"), torch.bfloat16) for size in (128, 96, 1, 300)}
    fused = dict.fromkeys((128, 96, 1), "runs fused")
    assert said == {**fused, 300: "runs in PyTorch: a norm over 300, more than 256"}


def test_reset_parameters() -> None:
    for norm, value in ((GatedRMSNorm(8), 1.0), (ZeroCenteredRMSNorm(8), 0.0)):
        norm.weight.data.fill_(9.0)
        norm.reset_parameters()
        assert (norm.weight == value).all()
