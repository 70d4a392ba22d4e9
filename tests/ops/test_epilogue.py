"""The gated norm in PyTorch: formula, gradients, errors. Its Triton form runs in tests/interpreted and tests/gpu."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from qwenlinear.ops import epilogue
from qwenlinear.ops.epilogue import gated_rms_norm, gated_rms_norm_op
from tests.kernels.reference import relative


@pytest.mark.parametrize("V", [8, 12])
def test_it_is_the_formula(V):
    o, z, weight = torch.randn(2, 5, 3, V).double(), torch.randn(2, 5, 3, V).double(), torch.randn(V).double()
    want = F.rms_norm(o, (V,), weight, 1e-3) * F.silu(z)
    torch.testing.assert_close(epilogue(o, z, weight, 1e-3), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.bfloat16, 8e-3), (torch.float16, 1e-3), (torch.float32, 1e-6)])
def test_dtypes(dtype, rounding):
    o, z, weight = torch.randn(1, 9, 2, 16), torch.randn(1, 9, 2, 16), torch.randn(16)
    o, z, weight = (x.to(dtype) for x in (o, z, weight))
    y = epilogue(o, z, weight, 1e-6)
    assert y.dtype == dtype
    assert relative(y, gated_rms_norm(o.double(), z.double(), weight.double(), 1e-6)) < rounding


def test_gradients_numerically():
    o, z = torch.randn(2, 1, 3, 2, 5, dtype=torch.float64).requires_grad_().unbind()
    weight = torch.randn(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *x: epilogue(*x, 1e-6), (o, z, weight))


@pytest.mark.parametrize(
    ("o", "z", "weight", "words"),
    [
        ((2, 4), (2, 5), (4,), r"z needs o's shape \[2, 4\]"),
        ((2, 4), (1, 4), (4,), "z needs o's shape"),
        ((2, 4), (2, 4), (5,), r"weight needs shape \[4\]"),
        ((2, 4), (2, 4), (2, 4), "weight needs shape"),
        ((), (), (), "z needs o's shape"),
    ],
)
def test_shapes_that_do_not_fit(o, z, weight, words):
    with pytest.raises(ValueError, match=words):
        epilogue(torch.zeros(o), torch.zeros(z), torch.zeros(weight), 1e-6)


def test_the_operator_has_shapes_without_a_kernel():
    """Tracing needs no Triton."""
    o, z = (
        torch.empty(2, 3, 4, 8, device="meta", dtype=torch.bfloat16),
        torch.empty(2, 3, 4, 20, device="meta")[..., 12:],
    )
    weight = torch.empty(8, device="meta")
    y = gated_rms_norm_op(o.requires_grad_(), z.bfloat16(), weight, 1e-6)
    assert (y.shape, y.dtype, y.device.type) == ((2, 3, 4, 8), torch.bfloat16, "meta")
    (do,) = torch.autograd.grad(y.sum(), o)
    assert do.shape == o.shape
