"""The decay gate stays finite, forward and backward, and equals the plain product wherever that is finite."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from qwenlinear.kernels import TorchKernel
from qwenlinear.ops.gate import log_decay


def plain(a: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor) -> torch.Tensor:
    return -A_log.exp() * torch.logaddexp(a + dt_bias, torch.zeros_like(a))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_equals_the_plain_product_with_gradients(dtype: torch.dtype) -> None:
    leaves = [torch.linspace(-60, 60, 4001), torch.empty(4001).uniform_(-5, 3), torch.randn(4001)]
    theirs = [x.double().requires_grad_() for x in leaves]
    ours = [x.to(dtype).requires_grad_() for x in leaves]
    want = plain(*theirs)
    got = log_decay(*ours)
    assert got.dtype == dtype
    condition = sum(x.abs() for x in leaves).double() + 1  # exp turns a rounding of its argument into this many
    assert ((got.double() - want).abs() <= 2 * torch.finfo(dtype).eps * condition * want.abs()).all()
    weights = torch.randn_like(want)
    want.backward(weights)
    got.backward(weights.to(dtype))
    for mine, reference in zip(ours, theirs, strict=True):
        error = (mine.grad.double() - reference.grad).abs()
        assert (error <= 4 * torch.finfo(dtype).eps * condition * reference.grad.abs()).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_extreme_factors_stay_finite(dtype: torch.dtype) -> None:
    """cases.md 9: A_log = 100 with a = -200 and with a = +100."""
    a = torch.tensor([-200.0, 100.0, 3e38, -3e38, 0.0], dtype=dtype, requires_grad=True)
    A_log = torch.tensor([100.0, 100.0, 3e38, -3e38, -100.0], dtype=dtype, requires_grad=True)
    dt_bias = torch.zeros(5, dtype=dtype, requires_grad=True)
    g = log_decay(a, A_log, dt_bias)
    want = [-math.exp(-100), -1e4, -1e4, 0.0, -math.exp(-100) * math.log(2)]
    torch.testing.assert_close(g, torch.tensor(want, dtype=dtype), rtol=1e-6, atol=1e-44)
    assert g.min() >= -1e4
    for grad in torch.autograd.grad(g.sum(), (a, A_log, dt_bias)):
        assert grad.isfinite().all()
        assert grad[1] == grad[2] == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_is_float32_from_any_activation(dtype: torch.dtype) -> None:
    a = torch.randn(2, 3, 4, dtype=dtype)
    g = log_decay(a, torch.zeros(4), torch.ones(4))
    assert g.dtype == torch.float32
    torch.testing.assert_close(g.double(), plain(a.double(), torch.zeros(4).double(), torch.ones(4).double()))


@pytest.mark.parametrize(
    ("A_log", "a"), [(100.0, -200.0), (100.0, 100.0), (-100.0, 0.0), (math.log(27.6), 1.0), (9.0, 1.0)]
)
def test_extreme_gates_through_the_recurrence(A_log: float, a: float) -> None:
    """cases.md 9: the float32 layer path equals the float64 recurrence written token by token, gradients included."""
    T, HV, K = 6, 4, 8
    q, k = torch.randn(2, 1, T, 2, K).unbind()
    v, beta = torch.randn(1, T, HV, K), torch.rand(1, T, HV)
    values = torch.full((1, T, HV), a)
    values[0, 3:] = 0.5

    def loop(q, k, v, beta, values, A):
        q, k = (x.repeat_interleave(HV // 2, 2) for x in (q, k))
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        decay = torch.exp(-torch.exp(A + torch.log(F.softplus(values, threshold=1e9))))
        S, o = v.new_zeros(HV, K, K), []
        for t in range(T):
            S = S * decay[0, t, :, None, None]
            u = beta[0, t, :, None] * (v[0, t] - torch.einsum("hkv,hk->hv", S, k[0, t]))
            S = S + k[0, t, :, :, None] * u[:, None, :]
            o.append(torch.einsum("hkv,hk->hv", S, q[0, t]) * K**-0.5)
        return torch.stack(o)[None]

    leaves = (q, k, v, beta, values, torch.full((HV,), A_log))
    wide = [x.double().requires_grad_() for x in leaves]
    narrow = [x.clone().requires_grad_() for x in leaves]
    want = loop(*wide)
    g = log_decay(narrow[4], narrow[5], torch.zeros(HV))
    got, _ = TorchKernel()(*narrow[:3], g, narrow[3], use_qk_l2norm_in_kernel=True)
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-6)
    weights = torch.randn_like(want)
    want.backward(weights)
    got.backward(weights.float())
    for mine, reference in zip(narrow, wide, strict=True):
        assert mine.grad.isfinite().all()
        torch.testing.assert_close(mine.grad.double(), reference.grad.nan_to_num(), rtol=1e-3, atol=1e-5)
