"""Small layers for every test of this folder."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from qwenlinear.kernels import DeltaRuleInputs, GatedDeltaKernel, TorchKernel
from qwenlinear.layers import GatedDeltaNet, GatedDeltaNetConfig, Qwen3_5GatedDeltaNet, Qwen3NextGatedDeltaNet

MakeLayer = Callable[..., GatedDeltaNet]


class RecordingKernel(TorchKernel):
    """TorchKernel that keeps what it was called with."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, DeltaRuleInputs]] = []

    def _run(self, inputs, form):
        self.calls.append((form, inputs))
        return super()._run(inputs, form)


class FailingKernel(TorchKernel):
    """TorchKernel that fails while it runs."""

    def _run(self, inputs, form):
        raise RuntimeError("the kernel failed")


@pytest.fixture
def config() -> GatedDeltaNetConfig:
    return GatedDeltaNetConfig(
        hidden_size=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    )


@pytest.fixture(params=[Qwen3NextGatedDeltaNet, Qwen3_5GatedDeltaNet], ids=["next", "3.5"])
def layer_class(request: pytest.FixtureRequest) -> type[GatedDeltaNet]:
    return request.param


@pytest.fixture
def make_layer(layer_class: type[GatedDeltaNet], config: GatedDeltaNetConfig) -> MakeLayer:
    """A layer of either layout, float64 by default, with decays that matter within a few tokens."""

    def make(kernel: GatedDeltaKernel | None = None, dtype: torch.dtype = torch.float64) -> GatedDeltaNet:
        torch.manual_seed(1)
        layer = layer_class(config, kernel if kernel is not None else TorchKernel())
        with torch.no_grad():
            layer.A_log.uniform_(-3.0, 0.0)
            layer.dt_bias.normal_()
            layer.norm.weight.uniform_(0.5, 1.5)
        return layer.to(dtype)

    return make


@pytest.fixture
def recording_kernel() -> RecordingKernel:
    return RecordingKernel()


@pytest.fixture
def failing_kernel() -> FailingKernel:
    return FailingKernel()
