"""GatedDeltaNet's parameters: drawn wide, kept wide, loaded, saved, copied, and adapters in their place."""

from __future__ import annotations

import copy
import io

import pytest
import torch

from qwenlinear.kernels import TorchKernel
from qwenlinear.layers import (
    GatedDeltaNet,
)

CLOSE = {"rtol": 1e-9, "atol": 1e-11}


def rand(*shape: int, dtype: torch.dtype = torch.float64, grad: bool = False) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=grad)


def gate(layer: GatedDeltaNet) -> tuple[torch.Tensor, torch.Tensor]:
    return layer.A_log, layer.dt_bias


def test_gate_is_drawn_wide_from_a_bfloat16_default(layer_class, config) -> None:
    """cases.md 7: HV = 4096, several seeds, and re-initialised after a cast."""
    many = {**vars(config), "linear_num_value_heads": 4096, "linear_value_head_dim": 1, "hidden_size": 1}
    try:
        torch.set_default_dtype(torch.bfloat16)
        for seed in range(5):
            torch.manual_seed(seed)
            layer = layer_class(many, TorchKernel())
            assert layer.out_proj.weight.dtype == torch.bfloat16
            for _ in range(2):
                assert layer.A_log.dtype == layer.dt_bias.dtype == torch.float32
                assert layer.A_log.isfinite().all()
                assert -4.61 < layer.A_log.min() < -1
                assert 2.7 < layer.A_log.max() < 2.78
                assert layer.A_log.unique().numel() > 3500  # drawn in float32, not widened from bfloat16
                assert (layer.dt_bias == 1).all()
                layer.half().reset_parameters()
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "cast",
    [
        lambda m: m.to(torch.bfloat16),
        lambda m: m.half(),
        lambda m: m.bfloat16(),
        lambda m: m.type(torch.bfloat16),
        lambda m: m.to("cpu", torch.float16),
        lambda m: torch.nn.ModuleList([m]).to(torch.bfloat16)[0],
        lambda m: copy.deepcopy(m.half()),
        lambda m: m.to(dtype=torch.float16).float().bfloat16(),
    ],
)
def test_gate_stays_float32_through_casts(make_layer, cast) -> None:
    """cases.md 8."""
    layer = make_layer(dtype=torch.float32)
    before = [p.detach().clone() for p in gate(layer)]
    layer.A_log.grad = torch.randn(4)
    layer = cast(layer)
    assert layer.conv1d.weight.dtype in (torch.bfloat16, torch.float16)
    for parameter, old in zip(gate(layer), before, strict=True):
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, old)
    if layer.A_log.grad is not None:
        assert layer.A_log.grad.dtype == torch.float32


def test_gate_may_be_float64(make_layer) -> None:
    layer = make_layer(dtype=torch.float32).double()
    assert layer.A_log.dtype == layer.dt_bias.dtype == torch.float64
    assert layer.float().A_log.dtype == torch.float32


@pytest.mark.parametrize("assign", [False, True])
def test_loading_keeps_the_gate_wide(make_layer, assign) -> None:
    source, layer = make_layer(dtype=torch.float32), make_layer(dtype=torch.float32).bfloat16()
    checkpoint_ = {name: value.bfloat16() for name, value in source.state_dict().items()}
    given = dict(checkpoint_)
    layer.load_state_dict(checkpoint_, assign=assign)
    assert all(checkpoint_[name] is given[name] for name in given)  # the caller's dictionary is not written to
    for name, parameter in layer.named_parameters():
        assert parameter.dtype == (torch.float32 if name in ("A_log", "dt_bias") else torch.bfloat16)
        assert torch.equal(parameter, given[name].to(parameter.dtype))
        assert parameter.requires_grad
    with pytest.raises(RuntimeError, match="size mismatch"):
        layer.load_state_dict({**given, "A_log": torch.zeros(5)})


@pytest.mark.parametrize("assign", [False, True])
def test_loading_hooks_rewrite_the_checkpoint(make_layer, assign) -> None:
    layer, other = make_layer(), make_layer()
    other.reset_parameters()
    old = layer.state_dict()
    old["out.weight"], old["a"] = old.pop("out_proj.weight"), old.pop("A_log").bfloat16()

    def rename(module, state_dict, prefix, *rest) -> None:
        state_dict[prefix + "out_proj.weight"] = state_dict.pop(prefix + "out.weight")
        state_dict[prefix + "A_log"] = state_dict.pop(prefix + "a")

    other.register_load_state_dict_pre_hook(rename)
    other.load_state_dict(old, assign=assign)
    assert torch.equal(other.out_proj.weight, layer.out_proj.weight)
    assert other.A_log.dtype == (torch.float32 if assign else torch.float64)


def test_adapters_in_place_of_projections(make_layer) -> None:
    class Adapter(torch.nn.Module):  # LoRA's form, without a weight of its own
        def __init__(self, base: torch.nn.Linear) -> None:
            super().__init__()
            self.base = base
            self.down = torch.nn.Linear(base.in_features, 2, bias=False, dtype=torch.float64)
            self.up = torch.nn.Linear(2, base.out_features, dtype=torch.float64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + self.up(self.down(x))

    layer, merged = make_layer(), make_layer()
    for name, module in list(layer.named_children()):
        if isinstance(module, torch.nn.Linear):
            adapter, plain = Adapter(module), getattr(merged, name)
            setattr(layer, name, adapter)
            plain.weight.data += adapter.up.weight @ adapter.down.weight
            plain.bias = torch.nn.Parameter(adapter.up.bias.detach())
    x, mask = rand(2, 6, 32), torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]])
    torch.testing.assert_close(layer(x, attention_mask=mask), merged(x, attention_mask=mask), **CLOSE)
    torch.testing.assert_close(layer(x[1:, :5]), layer(x, attention_mask=mask)[1:, :5], **CLOSE)
    assert "form: chunk" in layer.explain(x)


def test_save_and_load(make_layer) -> None:
    layer, buffer = make_layer(dtype=torch.float32).bfloat16(), io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    buffer.seek(0)
    saved = torch.load(buffer)
    assert saved["A_log"].dtype == saved["dt_bias"].dtype == torch.float32
    other = make_layer(dtype=torch.float32).bfloat16()
    other.reset_parameters()
    other.load_state_dict(saved)
    x = rand(1, 5, 32, dtype=torch.bfloat16)
    assert torch.equal(layer(x), other(x))


def test_meta_construction(layer_class, config) -> None:
    with torch.device("meta"):
        layer = layer_class(config, TorchKernel())
    assert all(p.is_meta for p in layer.parameters())
    layer.bfloat16().to_empty(device="cpu")
    for parameter in layer.parameters():
        parameter.data.fill_(float("nan"))
    layer.reset_parameters()
    assert all(p.isfinite().all() for p in layer.parameters())
    assert layer.A_log.dtype == layer.dt_bias.dtype == torch.float32
    assert layer(rand(1, 3, 32, dtype=torch.bfloat16)).isfinite().all()
    with torch.device("meta"):
        layer = layer_class(config, TorchKernel())
    layer.load_state_dict(layer_class(config).bfloat16().state_dict(), assign=True)
    assert layer.A_log.dtype == torch.float32


def test_reset_parameters_redraws_everything(make_layer) -> None:
    layer = make_layer()
    torch.manual_seed(1)
    before = {name: p.detach().clone() for name, p in layer.named_parameters()}
    layer.reset_parameters()
    for name, parameter in layer.named_parameters():
        assert not torch.equal(parameter, before[name]), name
    assert (layer.dt_bias == 1).all()
    assert (layer.norm.weight == 1).all()


def test_deepcopy_is_independent(make_layer) -> None:
    layer = make_layer()
    twin, x = copy.deepcopy(layer), rand(1, 4, 32)
    assert torch.equal(layer(x), twin(x))
    twin.A_log.data.add_(1)
    assert not torch.equal(layer(x), twin(x))
