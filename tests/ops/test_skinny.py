"""skinny_linear in PyTorch: what it computes, what it refuses, and what is said about it."""

from __future__ import annotations

import pytest
import torch

from qwenlinear.ops import available, skinny_linear, why_not_skinny
from qwenlinear.ops.skinny import MAX_TOKENS, skinny_linear_op
from tests.kernels.reference import relative

CUDA = torch.device("cuda")


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.bfloat16, 4e-3), (torch.float16, 5e-4), (torch.float32, 1e-6)])
@pytest.mark.parametrize("rows", [(5,), (8, 3), (7, 1, 4, 4)])
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_a_product_for_each_weight_in_one_buffer(dtype, rounding, rows, tokens):
    x, weights = torch.randn(tokens, 24).to(dtype), [torch.randn(count, 24).to(dtype) for count in rows]
    parts = skinny_linear(x, weights)
    for part, weight in zip(parts, weights, strict=True):
        assert part.dtype == dtype
        assert part.stride() == (sum(rows), 1)
        assert relative(part, x.double() @ weight.double().t()) < rounding
    assert len({part.untyped_storage().data_ptr() for part in parts}) == 1


@pytest.mark.parametrize(
    ("x", "weights", "words"),
    [
        (torch.zeros(1, 1, 8), [torch.zeros(2, 8)], r"x needs shape \[N, hidden\]"),
        (torch.zeros(1, 8, dtype=torch.int64), [torch.zeros(2, 8)], "a floating dtype, got .*int64"),
        (torch.zeros(1, 8), [], "weights needs one to 4 tensors, got 0"),
        (torch.zeros(1, 8), [torch.zeros(2, 8)] * 5, "weights needs one to 4 tensors, got 5"),
        (torch.zeros(1, 8), [torch.zeros(2, 8), torch.zeros(2, 9)], r"weights\[1\] needs shape \[rows, 8\]"),
        (torch.zeros(1, 8), [torch.zeros(8)], r"weights\[0\] needs shape \[rows, 8\]"),
        (torch.zeros(1, 8), [torch.zeros(8, 2).t()], r"weights\[0\] needs .*contiguous, got .*strides \[1, 2\]"),
        (torch.zeros(1, 8), [torch.zeros(2, 8).half()], r"weights\[0\] needs torch.float32 on cpu, got torch.float16"),
        (torch.zeros(1, 8), [torch.zeros(2, 8, device="meta")], r"weights\[0\] needs torch.float32 on cpu"),
        (torch.zeros(1, 8), [torch.zeros(2, 8, requires_grad=True)], "without gradients"),
        (torch.zeros(1, 8, requires_grad=True), [torch.zeros(2, 8)], "without gradients"),
    ],
)
def test_what_does_not_fit_is_an_error(x, weights, words):
    with pytest.raises(ValueError, match=words):
        skinny_linear(x, weights)


def test_parameters_may_require_gradients_where_none_are_recorded():
    with torch.no_grad():
        (y,) = skinny_linear(torch.ones(1, 8), [torch.nn.Parameter(torch.ones(2, 8))])
    assert torch.equal(y, torch.full((1, 2), 8.0))


def test_reasons_in_words(monkeypatch):
    assert why_not_skinny(torch.device("cpu"), torch.float32, 1) == "tensors on cpu"
    monkeypatch.setattr(available, "_why_not_here", lambda device: None)
    assert why_not_skinny(CUDA, torch.bfloat16, MAX_TOKENS) is None
    assert why_not_skinny(CUDA, torch.bfloat16, MAX_TOKENS + 1) == f"{MAX_TOKENS + 1} tokens, more than {MAX_TOKENS}"
    assert why_not_skinny(CUDA, torch.float64, 1) == "float64"


def test_the_operator_has_shapes_without_a_kernel():
    x, weights = torch.empty(3, 8, device="meta").bfloat16(), [torch.empty(n, 8, device="meta") for n in (5, 2)]
    y = skinny_linear_op(x, weights)
    assert (y.shape, y.dtype) == ((3, 7), torch.bfloat16)
