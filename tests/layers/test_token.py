"""The products of one token: two launches where the projections are plain, their modules otherwise, and which, in words."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from qwenlinear.kernels import TorchKernel
from qwenlinear.layers import GatedDeltaNetCache, GatedDeltaNetConfig, token
from qwenlinear.layers.projection import projection_names
from qwenlinear.ops.skinny import skinny_linear_twin
from tests.layers.test_projection import NOT_PLAIN, rand

TWO = "projections: one launch for all input weights, and one for out_proj"


@pytest.fixture
def launches(monkeypatch) -> list[list[torch.Tensor]]:
    """The weights of each launch; here a launch is its twin, and a CPU is taken for what Triton runs on."""
    seen: list[list[torch.Tensor]] = []

    def launch(x, weights):
        assert x.dim() == 2
        seen.append(weights)
        return skinny_linear_twin(x, weights)

    monkeypatch.setattr(token, "why_not_skinny", lambda device, dtype, rows: "too many" if rows > 3 else None)
    monkeypatch.setattr(token, "launched", launch)
    return seen


@torch.no_grad()
def decoded(layer, x: torch.Tensor) -> tuple[torch.Tensor, GatedDeltaNetCache]:
    cache = GatedDeltaNetCache()
    return torch.cat([layer(piece, cache=cache) for piece in x.split([3, 1, 1, 1], 1)], 1), cache


def test_two_launches_of_the_very_weights(make_layer, launches) -> None:
    layer, x = make_layer(), rand(2, 6, 32)
    got, cache = decoded(layer, x)
    torch.testing.assert_close(got, layer(x), rtol=1e-9, atol=1e-11)
    inputs = [getattr(layer, name).weight for name in projection_names(layer)]
    assert len(launches) == 6  # the first three tokens go through the path of many
    for before, behind in zip(launches[::2], launches[1::2], strict=True):
        assert all(mine is theirs for mine, theirs in zip(before, inputs, strict=True))
        assert len(behind) == 1
        assert behind[0] is layer.out_proj.weight
    with torch.no_grad():
        assert TWO in layer.explain(x[:, :1], cache=cache)
    assert "decoding=two skinny products" in repr(layer)


@pytest.mark.parametrize("which", ["an input projection", "out_proj"])
@pytest.mark.parametrize(("change", "words"), NOT_PLAIN, ids=[change.__name__ for change, _ in NOT_PLAIN])
def test_a_module_that_is_more_than_its_weight_is_called(make_layer, launches, change, words, which) -> None:
    layer, x = make_layer(), rand(2, 6, 32)
    name = projection_names(layer)[0] if which == "an input projection" else "out_proj"
    change(layer, name)
    shape = (2, getattr(layer, name).weight.shape[1])
    said = token.readable(layer, [name], x.device, x.dtype, shape)
    assert said.startswith(f"{name} ")
    assert words.replace("of several dtypes", "a weight of torch.float32 for inputs of torch.float64") in said
    if change.__name__ == "narrow":
        return  # neither way takes it
    want, cache = decoded(layer, x)
    launched = [weights for weights in launches if weights[0] is getattr(layer, name).weight]
    assert not launched
    torch.testing.assert_close(want, layer(x), rtol=1e-9, atol=1e-11)
    if which == "an input projection":
        with torch.no_grad():
            assert f"projections: modules called: {said}; one launch for out_proj" in layer.explain(
                x[:, :1], cache=cache
            )
    assert f"decoding=products apart ({said})" in repr(layer)


def test_a_bias_of_the_output(make_layer, launches) -> None:
    layer, x = make_layer(), rand(2, 6, 32)
    layer.out_proj.bias = nn.Parameter(rand(32))
    got, cache = decoded(layer, x)
    torch.testing.assert_close(got, layer(x), rtol=1e-9, atol=1e-11)
    with torch.no_grad():
        text = layer.explain(x[:, :1], cache=cache)
    assert "projections: one launch for all input weights; out_proj is called: out_proj has a bias" in text


def test_more_sequences_than_a_launch_takes(make_layer, launches) -> None:
    layer, x = make_layer(), rand(4, 6, 32)
    got, cache = decoded(layer, x)
    assert not launches
    torch.testing.assert_close(got, layer(x), rtol=1e-9, atol=1e-11)
    with torch.no_grad():
        assert "projections: modules called: too many\n" in layer.explain(x[:, :1], cache=cache)


def test_on_a_cpu_the_modules_are_called(make_layer) -> None:
    layer, x = make_layer(), rand(2, 6, 32)
    _, cache = decoded(layer, x)
    with torch.no_grad():
        assert "projections: modules called: tensors on cpu\n" in layer.explain(x[:, :1], cache=cache)
    assert "decoding=products apart (tensors on cpu)" in repr(layer)


def test_gradients_never_meet_a_launch(make_layer, launches) -> None:
    layer, x, cache = make_layer(), rand(2, 6, 32, grad=True), GatedDeltaNetCache()
    got = torch.cat([layer(piece, cache=cache) for piece in x.split([3, 1, 1, 1], 1)], 1)
    assert not launches
    assert torch.autograd.grad(got.sum(), x)[0].abs().sum() > 0


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_autocast(make_layer, launches, weights) -> None:
    """Weights that autocast would cast are left to the modules, which cast them once for many calls."""
    layer, x = make_layer(dtype=torch.float32), torch.randn(2, 6, 32)
    want = layer(x)
    for name in (*projection_names(layer), "out_proj", "conv1d"):
        getattr(layer, name).to(weights)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, _ = decoded(layer, x)
        said = token.readable(layer, ["out_proj"], x.device, x.dtype, (2, 32))
    assert len(launches) == (6 if weights == torch.bfloat16 else 0)
    assert (got - want).norm() < 2e-2 * want.norm()
    if launches:
        assert said[0] is layer.out_proj.weight
    else:
        assert said == "out_proj has a weight of torch.float32 for inputs of torch.bfloat16"


def test_other_sizes(layer_class, config, launches) -> None:
    for change in (
        {"linear_num_value_heads": 2, "linear_value_head_dim": 5, "linear_key_head_dim": 3},
        {"linear_num_key_heads": 1, "linear_num_value_heads": 5},
        {"linear_conv_kernel_dim": 1},
    ):
        layer = layer_class(GatedDeltaNetConfig(**{**vars(config), **change}), TorchKernel()).double()
        x = rand(2, 6, 32)
        launches.clear()
        torch.testing.assert_close(decoded(layer, x)[0], layer(x), rtol=1e-9, atol=1e-11)
        assert len(launches) == 6
