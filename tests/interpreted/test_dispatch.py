"""A launch is called as a function in eager code alone: who traces or transforms operators sees the registered ones."""

from __future__ import annotations

import dataclasses
import importlib

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from qwenlinear import TritonKernel
from qwenlinear.ops import decode_prologue, epilogue, prologue, skinny_linear
from qwenlinear.ops.epilogue import gated_rms_norm
from tests.kernels.machines import machine
from tests.ops.decode_cases import one_token

_SLOW = "ignore:There is a performance drop:UserWarning"  # of vmap, which calls an operator for each element


class HostTritonKernel(TritonKernel):
    """TritonKernel that Triton's interpreter may run."""

    capabilities = dataclasses.replace(TritonKernel.capabilities, devices=None)


class Names(TorchDispatchMode):
    """Which of our operators PyTorch was asked for."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "qwenlinear":
            self.seen.append(func._opname)
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def _on_a_gpu(monkeypatch):
    for name in ("decode", "epilogue", "prologue", "skinny"):
        module = importlib.import_module(f"qwenlinear.ops.{name}")
        monkeypatch.setattr(module, "why_not_fused", lambda *args, **sizes: None)
    monkeypatch.setattr("qwenlinear.ops.skinny.DTYPES", (torch.float32,))


def _decode():
    given = one_token(torch.float32)

    def call(x):
        return decode_prologue(**{**given, "a": x, "conv_state": given["conv_state"].clone()})[3]

    return call, given["a"]


def _prologue():
    torch.manual_seed(0)
    b, a, weight = torch.randn(1, 5, 2), torch.randn(1, 5, 2), torch.randn(64, 1, 4)

    def call(x):
        gate = torch.zeros(2), torch.zeros(2)
        return prologue(x, b, a, weight, *gate, heads=(1, 2), head_dims=(16, 16))[2]

    return call, torch.randn(1, 5, 64)


def _epilogue():
    torch.manual_seed(0)
    z, weight = torch.randn(1, 5, 2, 16), torch.ones(16)
    return lambda x: epilogue(x, z, weight, 1e-6), torch.randn(1, 5, 2, 16)


def _step(in_place):
    torch.manual_seed(0)
    (q, k), v, state = torch.randn(2, 1, 1, 2, 16), torch.randn(1, 1, 2, 16), torch.randn(1, 2, 16, 16)
    gates, kernel = (torch.zeros(1, 1, 2), torch.ones(1, 1, 2)), HostTritonKernel(hardware=machine())

    def call(x):
        words = {"initial_state": state.clone(), "output_final_state": True, "state_in_place": in_place}
        return kernel.step(q * x, k, v, *gates, **words)[0]

    return call, torch.ones(1, 1, 2, 16)


def _skinny():
    torch.manual_seed(0)
    weights = [torch.randn(3, 16), torch.randn(2, 16)]
    return lambda x: skinny_linear(x, weights), torch.randn(1, 16)


CALLS = {
    "decode_prologue": _decode,
    "prologue": _prologue,
    "gated_rms_norm": _epilogue,
    "gated_delta_step": lambda: _step(False),
    "gated_delta_step_in_place": lambda: _step(True),
    "skinny_linear": _skinny,
}


@pytest.mark.parametrize("name", CALLS)
def test_a_mode_sees_the_operator(name):
    call, x = CALLS[name]()
    with Names() as names, torch.no_grad():
        got = call(x)
    assert names.seen == [name]
    assert torch.equal(got, call(x))


@pytest.mark.parametrize("pre_dispatch", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_a_trace_holds_the_operator_and_not_its_values(name, pre_dispatch):
    call, x = CALLS[name]()
    with torch.no_grad():
        traced = make_fx(call, pre_dispatch=pre_dispatch)(x)
        other = 2 * x + 0.25
        torch.testing.assert_close(traced(other), call(other), rtol=0, atol=0)
        assert not torch.equal(traced(other), call(x))


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:FutureWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", ["prologue", "gated_rms_norm", "skinny_linear"])
def test_a_jit_trace_holds_it_too(name):
    call, x = CALLS[name]()
    with torch.no_grad():
        traced = torch.jit.trace(call, (x,), check_trace=False)
        torch.testing.assert_close(traced(2 * x), call(2 * x), rtol=0, atol=0)


@pytest.mark.filterwarnings(_SLOW)
def test_vmap_of_one_argument():
    o, z, weight = torch.randn(3, 2, 16), torch.randn(2, 16), torch.ones(16)
    got = torch.vmap(lambda o: epilogue(o, z, weight, 1e-6))(o)
    torch.testing.assert_close(got, torch.stack([epilogue(one, z, weight, 1e-6) for one in o]), rtol=0, atol=0)
    got = torch.vmap(lambda z: epilogue(o[0], z, weight, 1e-6))(torch.stack([z, 2 * z]))
    torch.testing.assert_close(got[1], gated_rms_norm(o[0], 2 * z, weight, 1e-6))


def test_a_subclass_is_no_plain_tensor():
    o, z, weight = torch.randn(2, 16), torch.randn(2, 16), torch.ones(16)

    class Mine(torch.Tensor):
        seen: list[str] = []

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            cls.seen.append(getattr(func, "__name__", ""))
            return super().__torch_function__(func, types, args, kwargs or {})

    epilogue(o, z, weight.as_subclass(Mine), 1e-6)
    assert any("gated_rms_norm" in name for name in Mine.seen)


def test_eager_code_calls_the_launch(monkeypatch):
    def registered(*args):
        raise AssertionError("through the dispatcher")

    for name in ("decode", "epilogue", "prologue", "skinny"):
        module = importlib.import_module(f"qwenlinear.ops.{name}")
        for attribute in [attribute for attribute in vars(module) if attribute.endswith("_op")]:
            monkeypatch.setattr(module, attribute, registered)
    kernel = importlib.import_module("qwenlinear.kernels.triton_kernel")
    monkeypatch.setattr(kernel, "gated_delta_step", registered)
    monkeypatch.setattr(kernel, "gated_delta_step_in_place", registered)
    with torch.no_grad():
        for make in CALLS.values():
            call, x = make()
            call(x)
    for name in ("prologue", "gated_rms_norm"):
        call, x = CALLS[name]()
        call(x.requires_grad_()).sum().backward()
        assert x.grad is not None


@pytest.mark.filterwarnings(_SLOW)
@pytest.mark.parametrize("name", ["prologue", "gated_rms_norm"])
def test_gradients_are_the_operators(name):
    call, x = CALLS[name]()
    x.requires_grad_()
    with Names() as names:
        registered = call(x)
    assert names.seen == [name]
    direct = call(x)
    dy = torch.randn_like(direct)
    (want,), (got,) = (torch.autograd.grad(y, x, dy, retain_graph=True) for y in (registered, direct))
    assert torch.equal(got, want)
    with Names() as names:
        torch.autograd.grad(direct, x, dy, retain_graph=True)
    assert names.seen == [f"{name}_backward"]
    (batched,) = torch.autograd.grad(direct, x, torch.stack([dy, 2 * dy]), retain_graph=True, is_grads_batched=True)
    torch.testing.assert_close(batched, torch.stack([want, 2 * want]))
    (first,) = torch.autograd.grad(direct, x, dy, create_graph=True)
    with pytest.raises(RuntimeError, match=f"{name}_backward"):
        first.sum().backward()
