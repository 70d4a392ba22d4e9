"""torch.compile(fullgraph=True) of a layer whose kernel declares compile_safe: training and decoding in place."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator

import pytest
import torch

from qwenlinear import GatedDeltaNetCache, PackedSequences, TorchKernel
from qwenlinear.layers import projection

CLOSE = {"rtol": 1e-9, "atol": 1e-11}


class CompileSafe(TorchKernel):
    """TorchKernel as a kernel that torch.compile can trace: token by token."""

    capabilities = dataclasses.replace(TorchKernel.capabilities, compile_safe=True)

    def _chunk(self, inputs):
        return self._step(inputs)


@pytest.fixture(autouse=True)
def nothing_stays_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    gc.collect()


@pytest.fixture
def compiled(make_layer):
    layer = make_layer(CompileSafe())
    return layer, torch.compile(layer, fullgraph=True, backend="aot_eager")


def rand(*shape: int, grad: bool = False) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=grad)


@pytest.mark.parametrize("joined", [False, True], ids=["separate", "joined"])
def test_training(compiled, monkeypatch, joined) -> None:
    if joined:
        monkeypatch.setattr(projection, "why_not_faster", lambda device, tokens: None)
    layer, fast = compiled
    x = rand(1, 4, 32, grad=True)
    for arguments in ({}, {"cu_seqlens": PackedSequences.from_lengths([1, 3])}):
        answers = []
        for run in (layer, fast):
            output = run(x, **arguments)
            answers.append([output, *torch.autograd.grad(output.square().sum(), [x, *layer.parameters()])])
        for got, want in zip(answers[1], answers[0], strict=True):
            torch.testing.assert_close(got, want, **CLOSE)


@pytest.mark.parametrize("joined", [False, True], ids=["separate", "joined"])
def test_inference(compiled, monkeypatch, joined) -> None:
    if joined:
        monkeypatch.setattr(projection, "why_not_faster", lambda device, tokens: None)
    layer, fast = compiled
    x = rand(1, 4, 32)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), layer(x), **CLOSE)
    layer.requires_grad_(False)
    torch.testing.assert_close(fast(x), layer(x), **CLOSE)


@torch.no_grad()
def test_decoding_in_place(compiled) -> None:
    layer, fast = compiled
    x, want, got = rand(2, 6, 32), GatedDeltaNetCache(), GatedDeltaNetCache()
    for cache in (want, got):
        layer(x[:, :3], cache=cache)
    places = id(got.conv_state), id(got.recurrent_state)
    for t in range(3, 6):
        token = x[:, t : t + 1]
        torch.testing.assert_close(fast(token, cache=got), layer(token, cache=want), **CLOSE)
        assert (id(got.conv_state), id(got.recurrent_state)) == places
        torch.testing.assert_close(got.recurrent_state, want.recurrent_state, **CLOSE)
        torch.testing.assert_close(got.conv_state, want.conv_state, **CLOSE)


def test_a_kernel_that_does_not_declare_it_says_so(make_layer) -> None:
    layer = make_layer()
    with pytest.raises(Exception, match="a kernel that does not declare compile_safe"):
        torch.compile(layer, fullgraph=True, backend="aot_eager")(rand(1, 4, 32))
