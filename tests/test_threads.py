"""Several threads at once: one layer with a cache each, kernels and boundaries whose first call several make together."""

from __future__ import annotations

import sys
import threading
import time
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from qwenlinear import AutoKernel, FLAKernel, FlashQLAKernel, GatedDeltaNetCache, PackedSequences, TorchKernel
from qwenlinear.kernels import fla as fla_module
from qwenlinear.kernels import flashqla as flashqla_module
from qwenlinear.layers import GatedDeltaNetConfig, Qwen3_5GatedDeltaNet, Qwen3NextGatedDeltaNet
from tests.kernels.machines import arguments, machine

THREADS = 4


@pytest.fixture(autouse=True)
def switching():
    """Threads take turns as often as they can."""
    held = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(held)


def together(call: Callable[[int], object]) -> list:
    """What each thread's call returns, all begun at once."""
    start = threading.Barrier(THREADS)

    def run(number: int) -> object:
        start.wait(30)
        return call(number)

    with ThreadPoolExecutor(THREADS) as pool:
        return [future.result(60) for future in [pool.submit(run, number) for number in range(THREADS)]]


def layer_of(kind, kernel):
    torch.manual_seed(0)
    config = GatedDeltaNetConfig(
        hidden_size=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    )
    return kind(config, kernel).double()


@pytest.mark.parametrize("kind", [Qwen3NextGatedDeltaNet, Qwen3_5GatedDeltaNet])
@pytest.mark.parametrize("kernel", [TorchKernel, AutoKernel])
def test_one_layer_decodes_with_a_cache_each(kind, kernel) -> None:
    layer = layer_of(kind, kernel())
    inputs = torch.randn(THREADS, 2, 40, 32, dtype=torch.float64)

    @torch.no_grad()
    def decode(number: int) -> tuple[torch.Tensor, GatedDeltaNetCache]:
        cache = GatedDeltaNetCache()
        pieces = inputs[number].split([4] + [1] * 36, 1)
        return torch.cat([layer(piece, cache=cache) for piece in pieces], 1), cache

    for number, (got, cache) in enumerate(together(decode)):
        with torch.no_grad():
            whole = GatedDeltaNetCache()
            want = layer(inputs[number], cache=whole)
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(cache.recurrent_state, whole.recurrent_state, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(cache.conv_state, whole.conv_state, rtol=1e-9, atol=1e-11)


def computes_with_torch(q, k, v, g, beta, scale, initial_state, output_final_state, *more, **further):
    normalise = further.get("use_qk_l2norm_in_kernel", False)
    return TorchKernel()(q, k, v, g, beta, scale, initial_state, output_final_state, normalise)


class HostFLAKernel(FLAKernel):
    """May be called with CPU tensors; its library is faked."""

    capabilities = replace(FLAKernel.capabilities, devices=None)


class HostFlashQLAKernel(FlashQLAKernel):
    """The same of FlashQLA."""

    capabilities = replace(FlashQLAKernel.capabilities, devices=None)


@pytest.fixture
def slow_libraries(mocker):
    """Faked libraries that import slowly, so that each step of a first call gives every other thread its turn."""
    torch.compiler.disable(lambda: None)  # imports the compiler, which patch.dict would take out of sys.modules again
    ops = types.ModuleType("fla.ops.gated_delta_rule")
    ops.chunk_gated_delta_rule = ops.fused_recurrent_gated_delta_rule = computes_with_torch
    theirs, index = types.ModuleType("flash_qla"), types.ModuleType("flash_qla.utils.index")
    theirs.chunk_gated_delta_rule, index.prepare_varlen_metadata = computes_with_torch, lambda *_: None
    utils = types.ModuleType("flash_qla.utils")
    modules = {"fla.ops.gated_delta_rule": ops, "flash_qla": theirs, "flash_qla.utils": utils}
    mocker.patch.dict(sys.modules, {**modules, "flash_qla.utils.index": index})

    def slowly(function):
        def run(*args, **kwargs):
            found = function(*args, **kwargs)
            time.sleep(0.05)
            return found

        return run

    for module in (fla_module, flashqla_module):
        mocker.patch.object(module, "import_function", slowly(module.import_function))
    mocker.patch.object(fla_module, "inspect", types.SimpleNamespace(unwrap=slowly(lambda function: function)))


@pytest.mark.usefixtures("slow_libraries")
@pytest.mark.parametrize("shared", [False, True], ids=["alone", "in AutoKernel"])
@pytest.mark.parametrize("kind", [HostFLAKernel, HostFlashQLAKernel])
def test_a_first_call_of_several_threads(kind, shared) -> None:
    probe = machine()
    kernel = AutoKernel([kind(hardware=probe)]) if shared else kind(hardware=probe)
    calls = [arguments(K=128, V=128, device="cpu", grad=False) for _ in range(THREADS)]

    def call(number: int) -> torch.Tensor:
        time.sleep(0.06 * number)  # into the first look of the others, between two of its steps
        return kernel(**calls[number])[0]

    for given, got in zip(calls, together(call), strict=True):
        want, _ = TorchKernel()(**given)
        torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)


def test_boundaries_derive_one_value_for_all_threads() -> None:
    packed = PackedSequences.from_lengths([3, 0, 5])

    def make() -> object:
        time.sleep(0.02)
        return object()

    assert len(set(together(lambda number: packed.derive("slow", make)))) == 1
    first, *others = together(lambda number: packed._boundaries(torch.device("cpu")))
    assert all(other is first for other in others)
    assert first.tolist() == [0, 3, 3, 8]
