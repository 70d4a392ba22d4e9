"""Products of a few rows in Triton against float64: every number of weights, sizes that fit nothing, what must not leak."""

from __future__ import annotations

import pytest
import torch

from qwenlinear.ops import _skinny_triton
from qwenlinear.ops.skinny import skinny_linear_op
from tests.kernels.reference import relative

ROUNDING = {torch.float32: 1e-6, torch.float16: 5e-4}


def exact(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    return x.double() @ torch.cat(weights).double().t()


@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
@pytest.mark.parametrize("rows", [(7,), (20, 9), (16, 5, 1), (12, 8, 3, 3)], ids=str)
@pytest.mark.parametrize(("N", "D"), [(1, 64), (1, 80), (3, 33), (8, 16)])
def test_against_float64(dtype, rows, N, D):
    torch.manual_seed(N + D)
    x, weights = torch.randn(N, D).to(dtype), [torch.randn(R, D).to(dtype) for R in rows]
    got = skinny_linear_op(x, weights)
    assert got.shape == (N, sum(rows))
    assert got.dtype == dtype
    assert relative(got, exact(x, weights)) < ROUNDING[dtype]


@pytest.mark.parametrize("BR", [1, 2, 8, 16])
def test_every_cut(BR):
    x, weights = torch.randn(2, 40), [torch.randn(R, 40) for R in (11, 3, 2, 2)]
    got = _skinny_triton.launch(x, weights, (BR, 64, 4))
    assert relative(got, exact(x, weights)) < 1e-6


def test_rows_are_read_where_they_lie_and_nothing_beside_them():
    """Memory before and after x and each weight is not-a-number: a masked load that multiplies would show it."""

    def walled(*shape: int) -> torch.Tensor:
        size = shape[0] * shape[1]
        memory = torch.full((size + 200,), float("nan"))
        return memory[100 : 100 + size].view(shape).normal_()

    x, weights = walled(3, 33), [walled(5, 33), walled(2, 33)]
    assert relative(skinny_linear_op(x, weights), exact(x, weights)) < 1e-6


def test_infinite_and_not_a_number_stay_where_they_are():
    x, weights = torch.randn(2, 12), [torch.randn(4, 12), torch.randn(3, 12)]
    x[1, 11], weights[1][2, 0] = float("inf"), float("nan")
    got = skinny_linear_op(x, weights)
    want = x @ torch.cat(weights).t()
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.isinf(), want.isinf())
    assert got[0, :6].isfinite().all()


def test_strided_rows_and_no_rows():
    x, weights = torch.randn(2, 3, 12)[:, 1], [torch.randn(4, 12)]
    assert not x.is_contiguous()
    assert relative(skinny_linear_op(x, weights), exact(x, weights)) < 1e-6
    assert skinny_linear_op(x[:0], weights).shape == (0, 4)


def test_the_operator_is_well_formed():
    torch.library.opcheck(skinny_linear_op, (torch.randn(2, 12), [torch.randn(4, 12), torch.randn(3, 12)]))
