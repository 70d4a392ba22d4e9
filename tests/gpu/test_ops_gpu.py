"""The operators' Triton forms on a GPU, against their PyTorch twins in float64: the twins of tests/interpreted."""

from __future__ import annotations

import pytest
import torch

from qwenlinear.ops import decode_prologue, epilogue, skinny_linear, why_not_fused
from qwenlinear.ops.decode import decode_prologue_twin
from qwenlinear.ops.epilogue import gated_rms_norm
from qwenlinear.ops.skinny import MAX_ROWS, skinny_linear_twin
from tests.kernels.reference import relative
from tests.ops.decode_cases import one_token

pytestmark = pytest.mark.gpu

ROUNDING = {torch.bfloat16: 5e-3, torch.float16: 1e-3, torch.float32: 1e-5}
DTYPES = pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)


@pytest.fixture(autouse=True)
def _fused():
    if reason := why_not_fused(torch.device("cuda"), torch.bfloat16, width=4, head_dims=(128,)):
        pytest.skip(reason)


@DTYPES
@pytest.mark.parametrize(("T", "heads", "V", "row"), [(517, 32, 128, 12352), (33, 6, 64, 901), (1, 32, 128, 12352)])
def test_epilogue(dtype, T, heads, V, row):
    o, dy = (torch.randn(2, T, heads, V, device="cuda").to(dtype) for _ in range(2))
    buffer, weight = torch.randn(2, T, row, device="cuda").to(dtype), torch.randn(V, device="cuda").to(dtype)

    def with_gradients(run, o, buffer, weight, dy):
        leaves = [x.detach().requires_grad_() for x in (o, buffer, weight)]
        y = run(leaves[0], leaves[1][..., row - heads * V :].unflatten(-1, (heads, V)), leaves[2], 1e-6)
        return (y, *torch.autograd.grad(y, leaves, dy))

    got = with_gradients(epilogue, o, buffer, weight, dy)
    want = with_gradients(gated_rms_norm, *(x.double() for x in (o, buffer, weight, dy)))
    for name, x, exact in zip(("y", "do", "dz", "dweight"), got, want, strict=True):
        assert relative(x, exact) < ROUNDING[dtype], name


@DTYPES
@pytest.mark.parametrize("B", [1, 64, 256])
@pytest.mark.parametrize("grouped", [False, True])
def test_decode_prologue(dtype, B, grouped):
    call = one_token(dtype, B=B, H=16, G=2, K=128, V=128, grouped=grouped, device="cuda")
    exact = {name: x.double() for name, x in call.items()}
    got, want = decode_prologue(**call), decode_prologue_twin(**exact)
    for name, x, right in zip(("q", "k", "v", "g", "beta"), got, want, strict=True):
        assert relative(x, right) < (2e-6 if name == "g" else ROUNDING[dtype]), name
    assert torch.equal(call["conv_state"].double(), exact["conv_state"])


@pytest.mark.parametrize("W", [1, 2, 3, 4])
def test_decode_prologue_of_every_width(W):
    call = one_token(torch.float32, H=2, K=64, V=16, W=W, device="cuda")
    exact = {name: x.double() for name, x in call.items()}
    for x, right in zip(decode_prologue(**call), decode_prologue_twin(**exact), strict=True):
        assert relative(x, right) < 1e-5
    assert torch.equal(call["conv_state"].double(), exact["conv_state"])


def test_decode_prologue_and_epilogue_in_a_cuda_graph():
    call = one_token(torch.bfloat16, B=4, H=2, K=128, V=128, device="cuda")
    z, weight = torch.randn(4, 1, 4, 128, device="cuda").bfloat16(), torch.ones(128, device="cuda").bfloat16()

    def run(call):
        q, k, v, g, beta = decode_prologue(**call)
        return epilogue(v, z, weight, 1e-6), q, k, g, beta

    with torch.no_grad():
        run({**call, "conv_state": call["conv_state"].clone()})
        torch.cuda.synchronize()
        want_state = call["conv_state"].clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run(call)
        for _ in range(2):
            graph.replay()
            want = run({**call, "conv_state": want_state})
            for x, y in zip(captured, want, strict=True):
                assert torch.equal(x, y)
            assert torch.equal(call["conv_state"], want_state)


# ---- products of a few tokens --------------------------------------------------------------------------------------

SKINNY = {torch.bfloat16: 3e-3, torch.float16: 5e-4}


def skinny(dtype, rows, hidden, tokens):
    x = torch.randn(tokens, hidden, device="cuda").to(dtype)
    return x, [torch.randn(count, hidden, device="cuda").to(dtype) for count in rows]


@pytest.mark.parametrize("dtype", list(SKINNY), ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 8, MAX_ROWS])
@pytest.mark.parametrize(
    ("rows", "hidden"),
    [((8192, 4096, 32, 32), 2048), ((12288, 64), 2048), ((2048,), 4096), ((333, 7, 1), 1000), ((50, 9), 77), ((5,), 1)],
)
def test_skinny_linear(dtype, rows, hidden, tokens):
    x, weights = skinny(dtype, rows, hidden, tokens)
    got, again = skinny_linear(x, weights), skinny_linear(x, weights)
    exact = skinny_linear_twin(x.double(), [weight.double() for weight in weights])
    assert got.dtype == dtype
    assert torch.equal(got, again)
    for part, right in zip(got.split(rows, 1), exact.split(rows, 1), strict=True):
        assert relative(part, right) < SKINNY[dtype]


@pytest.mark.parametrize(("dtype", "tokens"), [(torch.bfloat16, MAX_ROWS + 1), (torch.float32, 1)], ids=str)
def test_skinny_linear_of_more_tokens_or_in_float32_is_pytorchs(dtype, tokens):
    x, weights = skinny(dtype, (64, 32), 256, tokens)
    assert torch.equal(skinny_linear(x, weights), skinny_linear_twin(x, weights))


def test_skinny_linear_in_a_cuda_graph():
    x, weights = skinny(torch.bfloat16, (300, 32), 256, 2)
    skinny_linear(x, weights)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = skinny_linear(x, weights)
    for _ in range(2):
        x.normal_()
        graph.replay()
        assert torch.equal(captured, skinny_linear(x, weights))


def test_skinny_linear_reads_weights_beyond_two_to_the_31_elements():
    weight = torch.zeros(2**21 + 8, 1024, device="cuda", dtype=torch.bfloat16)
    weight[-1] = 1.0
    y = skinny_linear(torch.ones(1, 1024, device="cuda", dtype=torch.bfloat16), [weight])
    assert y[0, -1].item() == 1024.0
    assert y[0, :-1].abs().max().item() == 0.0
