"""check_layer: both layers pass in every dtype; layers that are wrong on purpose fail by a case that names the fault."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from qwenlinear.kernels import AutoKernel, TorchKernel
from qwenlinear.layers import GatedDeltaNet, GatedDeltaNetConfig, Qwen3_5GatedDeltaNet, Qwen3NextGatedDeltaNet
from qwenlinear.testing import Case, ConformanceError, check_layer

CONFIG = GatedDeltaNetConfig(
    hidden_size=32,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
)


def make(layer_class: type[GatedDeltaNet], kernel=None, dtype=torch.float32) -> GatedDeltaNet:
    layer = layer_class(CONFIG, kernel if kernel is not None else TorchKernel())
    with torch.no_grad():
        layer.A_log.uniform_(-3.0, 0.0)
        layer.dt_bias.normal_()
    return layer.to(dtype)


@pytest.mark.parametrize("layer_class", [Qwen3NextGatedDeltaNet, Qwen3_5GatedDeltaNet])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_both_layers_pass(layer_class, dtype) -> None:
    report = check_layer(make(layer_class, dtype=dtype), first_failure=False)
    assert report.passed is True
    assert report.counts["refused"] == 0
    assert report.counts["passed"] > 35
    assert "gradient of A_log" in report.table()


def test_a_layer_on_auto_kernel_passes_and_is_left_as_it_was() -> None:
    layer = make(Qwen3_5GatedDeltaNet, AutoKernel()).eval()
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    assert check_layer(layer).passed
    assert not layer.training
    assert all(torch.equal(before[name], tensor) for name, tensor in layer.state_dict().items())
    assert all(parameter.grad is None for parameter in layer.parameters())


class IgnoresBoundaries(Qwen3_5GatedDeltaNet):
    def forward(self, hidden_states, cu_seqlens=None, cache=None, attention_mask=None):
        return super().forward(hidden_states, None, cache, attention_mask)


class IgnoresCache(Qwen3_5GatedDeltaNet):
    def forward(self, hidden_states, cu_seqlens=None, cache=None, attention_mask=None):
        if cache is not None:
            cache.reset()
        return super().forward(hidden_states, cu_seqlens, cache, attention_mask)


class LosesConvolutionState(Qwen3_5GatedDeltaNet):
    def forward(self, hidden_states, cu_seqlens=None, cache=None, attention_mask=None):
        if cache is not None and cache.conv_state is not None:
            cache.conv_state = torch.zeros_like(cache.conv_state)
        return super().forward(hidden_states, cu_seqlens, cache, attention_mask)


class ZeroesPadding(Qwen3_5GatedDeltaNet):
    """Zeroed hidden states are not neutral: the state still decays."""

    def forward(self, hidden_states, cu_seqlens=None, cache=None, attention_mask=None):
        if attention_mask is not None and cu_seqlens is None:
            hidden_states = hidden_states.masked_fill(attention_mask[..., None] == 0, 0)
            return super().forward(hidden_states, None, cache).masked_fill(attention_mask[..., None] == 0, 0)
        return super().forward(hidden_states, cu_seqlens, cache, attention_mask)


class DropsInTraining(Qwen3_5GatedDeltaNet):
    def forward(self, *args, **options):
        return super().forward(*args, **options) * (1.0 if self.training else 0.9)


class FollowsTheCast(Qwen3_5GatedDeltaNet):
    def _apply(self, fn, recurse=True):
        return nn.Module._apply(self, fn, recurse)


class MaskWithBoundaries(Qwen3_5GatedDeltaNet):
    def forward(self, hidden_states, cu_seqlens=None, cache=None, attention_mask=None):
        return super().forward(hidden_states, cu_seqlens, cache, None if cu_seqlens is not None else attention_mask)


class WritesInput(Qwen3_5GatedDeltaNet):
    def forward(self, hidden_states, *args, **options):
        hidden_states.data.mul_(2)
        return super().forward(hidden_states, *args, **options)


class DropsGradientOfGate(Qwen3_5GatedDeltaNet):
    def _project(self, hidden_states):
        parts = super()._project(hidden_states)
        return replace(parts, a=parts.a.detach())


class RedrawsOnMeta(Qwen3_5GatedDeltaNet):
    def load_state_dict(self, *args, **options):
        found = super().load_state_dict(*args, **options)
        self._reset_gate()
        return found


@pytest.mark.parametrize(
    ("layer_class", "words"),
    [
        (IgnoresBoundaries, "packed equals separate"),
        (IgnoresCache, "split equals one pass"),
        (LosesConvolutionState, "split equals one pass"),
        (ZeroesPadding, "padding at the"),
        (DropsInTraining, "evaluation mode"),
        (FollowsTheCast, "cast to bfloat16"),
        (MaskWithBoundaries, "mask and boundaries"),
        (WritesInput, "hidden_states was written to"),
        (DropsGradientOfGate, "gradient of in_proj_a.weight"),
        (RedrawsOnMeta, "is not what was saved"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_broken_layer_fails_by_name(layer_class, words: str) -> None:
    with pytest.raises(ConformanceError, match="check_layer") as caught:
        check_layer(make(layer_class))
    assert words in str(caught.value)
    first = str(caught.value).splitlines()[0]
    names = {"check_layer": check_layer, "Case": Case, "GatedDeltaNetConfig": GatedDeltaNetConfig}
    with pytest.raises(ConformanceError):
        eval(first, {**names, "TorchKernel": TorchKernel, layer_class.__name__: layer_class})
