"""Lowerings: normalisation, right and light on what it keeps for the backward pass; packing for packed-only kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from qwenlinear.kernels import KernelCapabilities, TorchKernel
from qwenlinear.kernels.lowering import _L2Norm, l2norm
from tests.kernels.reference import random_call, relative

ROUNDING = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 3e-3, torch.float16: 4e-4}


@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
def test_it_equals_the_plain_formula_in_float64(dtype):
    x = (3 * torch.randn(2, 7, 3, 16, dtype=torch.float64)).to(dtype)[:, ::2].requires_grad_()
    cotangent = torch.randn(x.shape, dtype=torch.float64).to(dtype)
    wide = x.detach().double().requires_grad_()
    y, exact = _L2Norm.apply(x, 1e-6), l2norm(wide)
    (dx,) = torch.autograd.grad(y, x, cotangent)
    (exact_dx,) = torch.autograd.grad(exact, wide, cotangent.double())
    assert (y.dtype, dx.dtype) == (dtype, dtype)
    assert relative(y, exact) < ROUNDING[dtype]
    assert relative(dx, exact_dx) < ROUNDING[dtype]


def test_gradients_numerically():
    assert torch.autograd.gradcheck(_L2Norm.apply, (torch.randn(3, 2, 5, dtype=torch.float64).requires_grad_(), 1e-6))


@pytest.mark.parametrize(("size", "expected"), [(0.0, 0.0), (6e4, 0.25)])
def test_zero_and_huge_rows_stay_finite(size, expected):
    x = torch.full((1, 1, 1, 16), size, dtype=torch.float16, requires_grad=True)
    y = _L2Norm.apply(x, 1e-6)
    y.sum().backward()
    assert torch.equal(y, torch.full_like(y, expected))
    assert x.grad.isfinite().all()


def test_the_backward_pass_keeps_the_answer_and_one_number_a_row():
    kept = []
    x = torch.randn(1, 8, 2, 128).bfloat16().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.nbytes) or t, lambda t: t):
        y = _L2Norm.apply(x, 1e-6)
    assert sorted(kept) == [8 * 2 * 4, y.nbytes]


def test_a_second_derivative_is_an_error():
    x = torch.randn(1, 2, 1, 4, requires_grad=True)
    (dx,) = torch.autograd.grad(_L2Norm.apply(x, 1e-6).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


class PackedOnly(TorchKernel):
    """Takes nothing but packed documents of at least one token."""

    capabilities = replace(TorchKernel.capabilities, dense=False)

    def _chunk(self, inputs):
        assert inputs.packed is not None
        assert inputs.B == 1
        assert 0 not in inputs.packed.lengths
        return super()._chunk(inputs)


@pytest.mark.parametrize(("B", "T"), [(3, 5), (1, 1), (2, 70)])
def test_rows_of_a_batch_are_packed_for_a_kernel_without_dense_input(B, T):
    call = random_call(B=B, T=T, H=2, HV=4, K=8, V=6, N=B)
    inputs = {name: tensor.requires_grad_() for name, tensor in call.items()}
    answers = [kernel(**inputs, output_final_state=True) for kernel in (TorchKernel(), PackedOnly())]
    for plain, packed in zip(*answers, strict=True):
        assert packed.shape == plain.shape
        assert relative(packed, plain) < 1e-6
    losses = [o.square().sum() + final.sum() for o, final in answers]
    gradients = [torch.autograd.grad(loss, list(inputs.values())) for loss in losses]
    for plain, packed in zip(*gradients, strict=True):
        assert relative(packed, plain) < 1e-5


@pytest.mark.parametrize(("B", "T"), [(2, 0), (0, 3)])
def test_packing_of_nothing(B, T):
    call = random_call(B=B, T=T, H=1, HV=1, K=4, V=4, N=B)
    o, final = PackedOnly()(**call, output_final_state=True)
    assert o.shape == (B, T, 1, 4)
    assert torch.equal(final, call["initial_state"])


def test_packing_of_rows_is_explained_and_must_be_possible():
    call = random_call(B=2, T=3, H=1, HV=1, K=4, V=4, N=2)
    assert "the 2 rows of the batch are packed one behind another" in PackedOnly().explain(**call)
    assert "packed one behind" not in TorchKernel().explain(**call)
    with pytest.raises(ValueError, match="packed=True where dense=False"):
        KernelCapabilities(dtypes=frozenset({torch.float32}), chunk=True, dense=False)
