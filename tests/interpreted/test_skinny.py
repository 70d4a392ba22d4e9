"""The products of a few tokens in Triton against float64: any rows, any hidden, weights read where they lie."""

from __future__ import annotations

import pytest
import torch

from qwenlinear.ops import _skinny_triton
from qwenlinear.ops._skinny_triton import Tile
from qwenlinear.ops.skinny import skinny_linear_op, skinny_linear_twin
from tests.kernels.reference import relative

ROUNDING = {torch.float32: 1e-6, torch.float16: 5e-4}
DTYPES = pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
ROWS = [(20,), (33, 7), (3, 17, 1), (16, 5, 1, 40)]


def case(dtype, rows, hidden, tokens):
    return torch.randn(tokens, hidden).to(dtype), [torch.randn(count, hidden).to(dtype) for count in rows]


def exact(x, weights):
    return skinny_linear_twin(x.double(), [weight.double() for weight in weights])


@DTYPES
@pytest.mark.parametrize("rows", ROWS, ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 16])
def test_against_float64(dtype, rows, tokens):
    x, weights = case(dtype, rows, 72, tokens)
    got = skinny_linear_op(x, weights)
    assert got.dtype == dtype
    assert relative(got, exact(x, weights)) < ROUNDING[dtype]
    assert torch.equal(got, skinny_linear_op(x, weights))


@DTYPES
@pytest.mark.parametrize("hidden", [64, 45, 1])
@pytest.mark.parametrize("tokens", [1, 2, 4, 5])
def test_columns_in_several_blocks(dtype, hidden, tokens):
    x, weights = case(dtype, (11, 6), hidden, tokens)
    for tile in (Tile(16, 16, 1, 2, 4), Tile(32, 32, 1, 2, 4), Tile(16, 32, 2, 2, 4), Tile(16, 64, 4, 2, 4)):
        assert relative(_skinny_triton.launch(x, weights, tile), exact(x, weights)) < ROUNDING[dtype], tile


@pytest.mark.parametrize("K", [1, 45, 64, 1000, 2048, 2560, 4096, 5120, 7000, 16384])
@pytest.mark.parametrize("total", [1, 2048, 12352])
def test_a_tile_is_one_that_triton_takes(K, total):
    tile = _skinny_triton.choose(K, total)
    assert all(n & (n - 1) == 0 for n in (tile.BR, tile.BK, tile.split, tile.warps))
    assert tile.BK // tile.split >= 16  # the shortest product on tensor cores
    shared = tile.stages * tile.BK * 2 * (tile.BR + _skinny_triton.DOT_ROWS)
    assert shared <= 99 * 1024  # what the smallest device of compute capability 8.6 has


def test_nothing_outside_is_written_or_read():
    """Rows and tokens beyond the last are masked: what lies around in memory is not a number."""
    x = torch.full((5, 72), float("nan"))[1:4].normal_()
    memory = torch.full((40, 72), float("nan"))
    weights = [memory[1:8].normal_(), memory[10:23].normal_(), memory[30:31].normal_()]
    for tile in (None, Tile(16, 32, 2, 2, 4)):
        assert relative(_skinny_triton.launch(x, weights, tile), exact(x, weights)) < 1e-6


@pytest.mark.parametrize(("tokens", "rows", "hidden"), [(0, (4, 3), 8), (2, (0,), 8), (2, (4, 3), 0)])
def test_nothing_to_do(tokens, rows, hidden):
    x, weights = case(torch.float32, rows, hidden, tokens)
    assert torch.equal(skinny_linear_op(x, weights), torch.zeros(tokens, sum(rows)))


@pytest.mark.parametrize("rows", [(0, 4), (3, 0, 2), (0, 0, 5, 0)], ids=str)
def test_a_weight_without_rows(rows):
    x, weights = case(torch.float32, rows, 24, 2)
    assert relative(skinny_linear_op(x, weights), exact(x, weights)) < 1e-6


def test_a_strided_x_is_read_right():
    x, weights = torch.randn(72, 3).t(), [torch.randn(5, 72)]
    assert relative(skinny_linear_op(x, weights), exact(x, weights)) < 1e-6


def test_weights_are_not_copied(monkeypatch):
    handed = []
    x, weights = case(torch.float32, (5, 2), 72, 1)
    monkeypatch.setattr(_skinny_triton, "skinny_kernel", _Spy(handed))
    _skinny_triton.launch(x, weights)
    assert [handed[0].data_ptr(), *(t.data_ptr() for t in handed[1:3])] == [t.data_ptr() for t in (x, *weights)]


class _Spy:
    def __init__(self, handed):
        self.handed = handed

    def __getitem__(self, grid):
        return lambda *args, **options: self.handed.extend(args)


def test_infinite_and_not_a_number_stay_where_they_are():
    x, weights = torch.randn(2, 12), [torch.randn(4, 12), torch.randn(3, 12)]
    x[1, 11], weights[1][2, 0] = float("inf"), float("nan")
    for tile in (None, Tile(16, 32, 2, 2, 4)):
        got, want = _skinny_triton.launch(x, weights, tile), skinny_linear_twin(x, weights)
        assert torch.equal(got.isnan(), want.isnan())
        assert torch.equal(got.isinf(), want.isinf())
        assert got[0, :6].isfinite().all()


def test_the_operator_is_well_formed():
    torch.library.opcheck(skinny_linear_op, case(torch.float32, (5, 2), 24, 2))


def test_it_is_captured_whole():
    x, weights = case(torch.float32, (5, 2), 24, 2)
    whole = torch.compile(lambda x, *w: skinny_linear_op(x, list(w)) + 1, fullgraph=True, backend="aot_eager")
    assert torch.equal(whole(x, *weights), skinny_linear_op(x, weights) + 1)
