"""Products of a few rows: the PyTorch form, where the Triton form runs, and what is refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from qwenlinear.ops import skinny_linear
from qwenlinear.ops.skinny import MAX_ROWS, skinny_linear_op, why_not_skinny
from tests.kernels.reference import relative


@pytest.mark.parametrize("N", [0, 1, 3, 40])
def test_equals_separate_products(N):
    x, weights = torch.randn(N, 12), [torch.randn(R, 12) for R in (5, 1, 7)]
    want = torch.cat([F.linear(x, w) for w in weights], -1)
    got = skinny_linear(x, weights)
    assert torch.equal(got, want)
    assert got.is_contiguous()


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.bfloat16, 4e-3), (torch.float16, 5e-4), (torch.float32, 1e-6)])
def test_it_rounds_once(dtype, rounding):
    x, weights = torch.randn(3, 24).to(dtype), [torch.randn(R, 24).to(dtype) for R in (7, 4)]
    got = skinny_linear(x, weights)
    assert got.dtype == dtype
    assert relative(got, x.double() @ torch.cat(weights).double().t()) < rounding


def test_where_it_is_fused(monkeypatch):
    monkeypatch.setattr("qwenlinear.ops.skinny.why_not_fused", lambda device, dtype: None)
    asked = lambda N, *weights: why_not_skinny(torch.device("cuda"), torch.bfloat16, N, weights)  # noqa: E731
    assert asked(1, torch.ones(3, 4)) is None
    assert asked(MAX_ROWS, torch.ones(3, 4)) is None
    assert asked(MAX_ROWS + 1, torch.ones(3, 4)) == f"{MAX_ROWS + 1} rows, more than {MAX_ROWS}"
    assert asked(1, torch.ones(4, 3).t()) == "a weight that is not contiguous"
    reason = "float32, whose products stay PyTorch's"  # tensor cores would round its factors
    assert why_not_skinny(torch.device("cuda"), torch.float32, 1) == reason


def test_a_machine_without_triton_computes_in_pytorch():
    assert why_not_skinny(torch.device("cpu"), torch.float32, 1, [torch.ones(2, 2)]) == "tensors on cpu"


X = torch.randn(2, 6)
W = torch.randn(3, 6)


@pytest.mark.parametrize(
    ("x", "weights", "message"),
    [
        (X[None], [W], r"x needs shape \[N, D\] and a floating dtype, got \[1, 2, 6\]"),
        (X.long(), [W.long()], r"x needs shape \[N, D\] and a floating dtype, got \[2, 6\], torch.int64"),
        (X, [], "weights needs one to 4 tensors, got 0"),
        (X, [W] * 5, "weights needs one to 4 tensors, got 5"),
        (X, [W, W[:, :5]], r"weights\[1\] needs shape \[R, 6\], torch.float32, on cpu, got \[3, 5\]"),
        (X, [W[0]], r"weights\[0\] needs shape \[R, 6\]"),
        (X, [W.half()], r"weights\[0\] needs .* got \[3, 6\], torch.float16"),
        (X, [W.to("meta")], r"weights\[0\] needs .* on cpu, got .* on meta"),
        (X, [W.clone().requires_grad_()], "needs a call without gradients, .* torch.nn.functional.linear"),
        (X.clone().requires_grad_(), [W], "needs a call without gradients"),
    ],
    ids=str,
)
def test_what_does_not_fit(x, weights, message):
    with pytest.raises(ValueError, match=message):
        skinny_linear(x, weights)


def test_parameters_may_require_gradients_where_none_are_recorded():
    with torch.no_grad():
        y = skinny_linear(torch.ones(1, 8), [torch.nn.Parameter(torch.ones(2, 8))])
    assert torch.equal(y, torch.full((1, 2), 8.0))


def test_the_operator_has_shapes_without_a_gpu():
    with torch.device("meta"):
        y = skinny_linear_op(torch.empty(2, 6, dtype=torch.bfloat16), [torch.empty(3, 6, dtype=torch.bfloat16)] * 2)
    assert y.shape == (2, 6)
    assert y.dtype == torch.bfloat16
