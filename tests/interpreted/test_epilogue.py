"""The gated norm's Triton form against float64, forward and backward, with z wherever a projection may have left it."""

from __future__ import annotations

import importlib

import pytest
import torch

from qwenlinear.ops import _epilogue_triton, available, epilogue
from qwenlinear.ops.epilogue import gated_rms_norm, gated_rms_norm_op
from tests.kernels.reference import relative

ROUNDING = {torch.float32: 1e-6, torch.float16: 5e-4}
EPS = 1e-6


def projected(dtype, B, T, H, G, V, where):
    """A buffer and the view of it that is z: ``[B, T, H*G, V]``, or grouped by key head ``[B, T, H, G, V]``."""
    if where == "behind":  # Qwen3.5: qkv | b | a | z
        buffer = torch.randn(B, T, 24 + H * G * V, dtype=torch.float64).to(dtype)
        return buffer, buffer[..., 24:].unflatten(-1, (H * G, V))
    if where == "grouped":  # Qwen3-Next: each key head's q, k, v, z
        buffer = torch.randn(B, T, H, 8 + 2 * G * V, dtype=torch.float64).to(dtype)
        return buffer, buffer[..., 8 + G * V :].unflatten(-1, (G, V))
    if where == "every other token":
        buffer = torch.randn(B, 2 * T, H * G, V, dtype=torch.float64).to(dtype)
        return buffer, buffer[:, ::2]
    buffer = torch.randn(B, T, V, H * G, dtype=torch.float64).to(dtype)  # no unit stride: copied
    return buffer, buffer.transpose(-1, -2)


def with_gradients(run, o, buffer, z_of, weight, dy):
    o, buffer, weight = (x.detach().requires_grad_() for x in (o, buffer, weight))
    y = run(o, z_of(buffer), weight, EPS)
    return (y, *torch.autograd.grad(y, [o, buffer, weight], dy))


@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
@pytest.mark.parametrize("where", ["behind", "grouped", "every other token", "transposed"])
@pytest.mark.parametrize(("H", "G", "V"), [(2, 2, 16), (1, 3, 32), (3, 1, 12), (1, 2, 20), (2, 1, 96), (1, 1, 100)])
def test_against_float64(dtype, where, H, G, V):
    B, T = 2, 7  # more rows than two programs take in one round
    buffer, z = projected(dtype, B, T, H, G, V, where)

    def z_of(x):
        return torch.as_strided(x, z.shape, z.stride(), z.storage_offset())

    o, dy = (torch.randn(z.shape).to(dtype) for _ in range(2))
    weight = torch.randn(V).to(dtype)
    got = with_gradients(gated_rms_norm_op, o, buffer, z_of, weight, dy)
    want = with_gradients(gated_rms_norm, o.double(), buffer.double(), z_of, weight.double(), dy.double())
    for name, x, exact in zip(("y", "do", "dz", "dweight"), got, want, strict=True):
        assert x.dtype == dtype
        assert relative(x, exact) < ROUNDING[dtype], name
    assert got[0].is_contiguous()
    do, dz, _ = _epilogue_triton.backward(dy, o, z, weight, EPS)
    assert do.is_contiguous()
    assert dz.is_contiguous()


@pytest.mark.parametrize(
    ("view", "copied"),
    [
        (lambda: torch.zeros(2, 3, 4, 8), False),
        (lambda: torch.zeros(2, 3, 50)[..., 18:].unflatten(-1, (4, 8)), False),
        (lambda: torch.zeros(2, 3, 2, 40)[..., 24:].unflatten(-1, (2, 8)), False),
        (
            lambda: torch.zeros(2, 5, 4, 40)[:, 1:4, ::3, 24:].unflatten(-1, (2, 8)),
            True,
        ),  # four strides, none of which merge
        (lambda: torch.zeros(2, 3, 4, 16)[..., ::2], True),
        (lambda: torch.zeros(1, 1, 4, 8).expand(2, 3, 4, 8), False),
    ],
)
def test_z_is_copied_only_where_three_strides_do_not_reach_it(view, copied):
    z = view()
    laid, *_ = _epilogue_triton._laid_out(z)
    assert (laid.data_ptr() != z.data_ptr()) is copied


@pytest.mark.parametrize("V", [96, 100, 20])
def test_the_public_function_runs_it_at_any_size(monkeypatch, V):
    monkeypatch.setattr(available, "_why_not_here", lambda device: None)

    def on_a_gpu(device, dtype, **sizes):
        return available.why_not_fused(torch.device("cuda"), dtype, **sizes)

    monkeypatch.setattr(importlib.import_module("qwenlinear.ops.epilogue"), "why_not_fused", on_a_gpu)
    o, z, weight = torch.randn(1, 5, 3, V), torch.randn(1, 5, 3, V), torch.randn(V)
    assert torch.equal(epilogue(o, z, weight, EPS), gated_rms_norm_op(o, z, weight, EPS))
    assert relative(epilogue(o, z, weight, EPS), gated_rms_norm(o.double(), z.double(), weight.double(), EPS)) < 1e-6
    with monkeypatch.context() as patch:
        patch.setattr(_epilogue_triton, "forward", None)
        with pytest.raises(TypeError):
            epilogue(o, z, weight, EPS)  # it is the launch that runs


def test_the_weight_keeps_its_own_dtype():
    o, z = torch.randn(2, 1, 3, 2, 8).half().requires_grad_().unbind()
    weight = torch.ones(8, requires_grad=True)
    (dweight,) = torch.autograd.grad(gated_rms_norm_op(o, z, weight, EPS).sum(), weight)
    assert dweight.dtype == torch.float32
    exact = torch.ones(8, dtype=torch.float64, requires_grad=True)
    (want,) = torch.autograd.grad(gated_rms_norm(o.double(), z.double(), exact, EPS).sum(), exact)
    assert relative(dweight, want) < 1e-6


@pytest.mark.parametrize("shape", [(2, 0, 4, 8), (0, 3, 4, 8)])
def test_no_row(shape):
    o, z, weight = torch.randn(shape).requires_grad_(), torch.randn(shape), torch.ones(8, requires_grad=True)
    y = gated_rms_norm_op(o, z, weight, EPS)
    do, dweight = torch.autograd.grad(y.sum(), [o, weight])
    assert y.shape == do.shape == shape
    assert torch.equal(dweight, torch.zeros(8))


def test_repeated_gradients_are_equal_bit_by_bit():
    o, z, dy = torch.randn(3, 1, 9, 4, 16).unbind()
    first, second = (_epilogue_triton.backward(dy, o, z, torch.ones(16), EPS) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


def test_the_operators_are_well_formed():
    o, z, weight = torch.randn(1, 2, 2, 8).requires_grad_(), torch.randn(1, 2, 2, 8).requires_grad_(), torch.ones(8)
    torch.library.opcheck(gated_rms_norm_op, (o, z, weight.requires_grad_(), EPS))


def test_it_is_captured_whole():
    o, z, weight = torch.randn(1, 2, 2, 8).requires_grad_(), torch.randn(1, 2, 2, 8), torch.ones(8)
    whole = torch.compile(lambda *x: gated_rms_norm_op(*x, EPS).square(), fullgraph=True, backend="aot_eager")
    (got,) = torch.autograd.grad(whole(o, z, weight).sum(), o)
    (want,) = torch.autograd.grad(gated_rms_norm_op(o, z, weight, EPS).square().sum(), o)
    assert torch.equal(got, want)
