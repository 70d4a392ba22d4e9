"""Layouts of the input projections: any way there and back is the identity, and every layout computes the same."""

from __future__ import annotations

import pytest
import torch

from qwenlinear import GatedDeltaNetConfig, Qwen3_5GatedDeltaNet, Qwen3NextGatedDeltaNet, TorchKernel
from qwenlinear.hf import convert_lora, convert_weights

pytest.importorskip("hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st

MODULES = {
    "grouped": ["in_proj_qkvz", "in_proj_ba"],
    "flat": ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"],
    "fused": ["in_proj"],
}
LAYOUTS = st.sampled_from(list(MODULES))


@st.composite
def configs(draw) -> GatedDeltaNetConfig:
    heads = draw(st.integers(1, 3))
    return GatedDeltaNetConfig(
        hidden_size=draw(st.integers(1, 6)),
        linear_num_key_heads=heads,
        linear_num_value_heads=heads * draw(st.integers(1, 3)),
        linear_key_head_dim=draw(st.integers(1, 4)),
        linear_value_head_dim=draw(st.integers(1, 4)),
    )


def rows(config: GatedDeltaNetConfig, name: str) -> int:
    HV, qkv, z = config.linear_num_value_heads, config.conv_dim, config.value_dim
    sizes = {"in_proj_qkvz": qkv + z, "in_proj_ba": 2 * HV, "in_proj_qkv": qkv, "in_proj_z": z, "in_proj_b": HV}
    return {**sizes, "in_proj_a": HV, "in_proj": qkv + z + 2 * HV}[name]


def random_weights(config, layout, suffix=".weight", columns=True) -> dict[str, torch.Tensor]:
    shape = (config.hidden_size,) if columns else ()
    return {f"x.{name}{suffix}": torch.randn(rows(config, name), *shape) for name in MODULES[layout]}


@settings(max_examples=60, deadline=None)
@given(configs(), LAYOUTS, LAYOUTS, LAYOUTS)
def test_weights_there_and_back(config, first, second, third) -> None:
    weights = random_weights(config, first) | random_weights(config, first, ".bias", columns=False)
    weights["x.A_log"] = torch.randn(3)
    there = convert_weights(weights, config, second)
    assert sum(t.numel() for t in there.values()) == sum(t.numel() for t in weights.values())
    back = convert_weights(convert_weights(there, config, third), config, first)
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], weights[name]) for name in weights)


@settings(max_examples=60, deadline=None)
@given(configs(), LAYOUTS, LAYOUTS, st.data())
def test_adapters_there_and_back(config, first, second, data) -> None:
    """The update of the fused matrix is the same one in every layout, and A and B come back as they were."""
    chosen = data.draw(st.sets(st.sampled_from(MODULES[first]), min_size=1))
    adapters = {}
    for name in sorted(chosen):
        r = data.draw(st.integers(1, 3))
        adapters[name] = (torch.randn(r, config.hidden_size), torch.randn(rows(config, name), r))
    there = convert_lora(adapters, config, second)
    assert torch.equal(update(there, config, second), update(adapters, config, first))
    back = convert_lora(there, config, first)
    for name, (A, B) in adapters.items():
        assert torch.equal(back[name][0], A)
        assert torch.equal(back[name][1], B)
    for name in back.keys() - adapters.keys():
        assert not back[name][1].any()


def update(adapters, config, layout) -> torch.Tensor:
    """``[rows of the fused matrix, hidden]``, summed in an order that no layout changes."""
    deltas = {f"{name}.weight": torch.zeros(rows(config, name), config.hidden_size) for name in MODULES[layout]}
    for name, (A, B) in adapters.items():
        columns = B[:, :, None] * A[None]  # exact zeros where B has them
        deltas[f"{name}.weight"] = sum((columns[:, i] for i in range(A.shape[0])), deltas[f"{name}.weight"])
    return convert_weights(deltas, config, "fused")["in_proj.weight"]


def test_a_fresh_adapter_keeps_its_rank() -> None:
    config = GatedDeltaNetConfig(hidden_size=4, linear_num_key_heads=1, linear_num_value_heads=2)
    fresh = {"in_proj_qkvz": (torch.randn(2, 4), torch.zeros(rows(config, "in_proj_qkvz"), 2))}
    there = convert_lora(fresh, config, "flat")
    assert {name: A.shape[0] for name, (A, _) in there.items()} == {"in_proj_qkv": 2, "in_proj_z": 2}


@pytest.mark.parametrize("shared", [False, True])
def test_equal_forwards(shared) -> None:
    sizes = {"hidden_size": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 4}
    config = GatedDeltaNetConfig(**sizes, linear_value_head_dim=8)
    flat = Qwen3_5GatedDeltaNet(config, TorchKernel())
    grouped = Qwen3NextGatedDeltaNet(config, TorchKernel())
    grouped.load_state_dict(convert_weights(flat.state_dict(), config, "grouped"))
    x = torch.randn(2, 9, 16)
    torch.testing.assert_close(grouped(x), flat(x), rtol=1e-5, atol=1e-6)
    A = torch.randn(3, 16)
    adapters = {
        name: (A if shared else torch.randn(3, 16), 0.3 * torch.randn(rows(config, name), 3))
        for name in MODULES["flat"]
    }
    converted = convert_lora(adapters, config, "grouped")
    assert [A.shape[0] for A, _ in converted.values()] == ([3, 3] if shared else [6, 6])
    for layer, pairs in ((flat, adapters), (grouped, converted)):
        with torch.no_grad():
            for name, (A, B) in pairs.items():
                getattr(layer, name).weight.add_(B @ A)
    torch.testing.assert_close(grouped(x), flat(x), rtol=1e-4, atol=1e-5)


def test_the_fused_matrix_is_the_projections_stacked() -> None:
    config = GatedDeltaNetConfig(hidden_size=4, linear_num_key_heads=2, linear_num_value_heads=2)
    weights = random_weights(config, "flat")
    fused = convert_weights(weights, config, "fused")["x.in_proj.weight"]
    assert torch.equal(fused, torch.cat(list(weights.values())))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w | {"x.in_proj.weight": torch.zeros(1, 4)}, "of one layout"),
        (lambda w: {k: v for k, v in w.items() if "_a" not in k}, "got none for in_proj_a"),
        (
            lambda w: w | {"x.in_proj_z.weight": torch.zeros(3, 4), "x.in_proj_a.weight": torch.zeros(3, 4)},
            "z.*; in_proj_a",
        ),
        (lambda w: w | {"y.in_proj_z.weight": torch.zeros(256, 4)}, "of one layer"),
        (lambda w: {"A_log": torch.zeros(2)}, "of one layer"),
    ],
)
def test_weights_that_do_not_fit(change, words) -> None:
    config = GatedDeltaNetConfig(hidden_size=4, linear_num_key_heads=2, linear_num_value_heads=2)
    with pytest.raises(ValueError, match=words):
        convert_weights(change(random_weights(config, "flat")), config, "grouped")


def test_adapters_that_do_not_fit() -> None:
    config = GatedDeltaNetConfig(hidden_size=4, linear_num_key_heads=2, linear_num_value_heads=2)
    A, B = torch.zeros(2, 4), torch.zeros(2, 2)
    with pytest.raises(ValueError, match="target needs one of"):
        convert_lora({"in_proj_b": (A, B)}, config, "rows")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="of one layout"):
        convert_lora({"in_proj_b": (A, B), "out_proj": (A, B)}, config, "grouped")
    with pytest.raises(ValueError, match="needs A \\[r, 4\\]"):
        convert_lora({"in_proj_b": (A.t(), B)}, config, "grouped")
    with pytest.raises(ValueError, match="B of in_proj_z needs 256 rows"):
        convert_lora({"in_proj_z": (A, B)}, config, "grouped")
