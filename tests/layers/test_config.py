"""GatedDeltaNetConfig: Transformers' names and defaults, read from anything, validated."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from qwenlinear.layers import GatedDeltaNetConfig, Qwen3_5GatedDeltaNet

SIZES = {
    "hidden_size": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 3,
}


def test_defaults_are_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    theirs, next_ = transformers.Qwen3_5TextConfig(), transformers.Qwen3NextConfig()
    for field in dataclasses.fields(GatedDeltaNetConfig):
        assert field.default == getattr(theirs, field.name), field.name
        if field.name != "hidden_size":
            assert field.default == getattr(next_, field.name), field.name


def test_sizes_follow() -> None:
    config = GatedDeltaNetConfig(**SIZES)
    assert (config.key_dim, config.value_dim, config.conv_dim) == (16, 64, 96)


def test_is_frozen_and_keyword_only() -> None:
    with pytest.raises(TypeError):
        GatedDeltaNetConfig(32)
    with pytest.raises(dataclasses.FrozenInstanceError):
        GatedDeltaNetConfig().hidden_size = 1


@pytest.mark.parametrize(
    "holder",
    [
        GatedDeltaNetConfig(**SIZES),
        SIZES,
        SIZES | {"model_type": "qwen3_next", "vocab_size": 7},
        SimpleNamespace(**SIZES),
        SimpleNamespace(text_config=SimpleNamespace(**SIZES)),
        {"text_config": SIZES, "hidden_size": 7},
        SimpleNamespace(text_config=None, **SIZES),
    ],
    ids=["own", "mapping", "json", "object", "nested object", "nested mapping", "no text_config"],
)
def test_is_read_from(holder: object) -> None:
    assert GatedDeltaNetConfig.from_config(holder) == GatedDeltaNetConfig(**SIZES)


def test_is_read_from_transformers_objects() -> None:
    transformers = pytest.importorskip("transformers")
    text = {**SIZES, "num_hidden_layers": 2, "rms_norm_eps": 1e-5}
    wanted = GatedDeltaNetConfig(**SIZES, rms_norm_eps=1e-5)
    assert GatedDeltaNetConfig.from_config(transformers.Qwen3NextConfig(**text)) == wanted
    assert GatedDeltaNetConfig.from_config(transformers.Qwen3_5TextConfig(**text)) == wanted
    assert GatedDeltaNetConfig.from_config(transformers.Qwen3_5Config(text_config=text)) == wanted
    assert GatedDeltaNetConfig.from_config(transformers.Qwen3_5Config(text_config=text).to_dict()) == wanted


@pytest.mark.parametrize("holder", [{"hidden_size": 32}, SimpleNamespace(hidden_size=32), None, 3, "qwen"])
def test_missing_fields_are_all_named(holder: object) -> None:
    with pytest.raises(ValueError, match="linear_num_key_heads, linear_num_value_heads, linear_key_head_dim"):
        GatedDeltaNetConfig.from_config(holder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 0}, "hidden_size needs a whole number >= 1, got 0"),
        ({"hidden_size": 2.0}, "hidden_size needs a whole number"),
        ({"linear_conv_kernel_dim": True}, "linear_conv_kernel_dim needs a whole number"),
        ({"linear_num_key_heads": 4, "linear_num_value_heads": 2}, "multiple of linear_num_key_heads, got 2 and 4"),
        ({"linear_num_key_heads": 2, "linear_num_value_heads": 3}, "multiple of linear_num_key_heads, got 3 and 2"),
        ({"hidden_act": ["silu"]}, r"hidden_act needs one of silu, swish, .*, got \['silu'\]"),
        ({"hidden_act": "quick_gelu"}, "hidden_act needs one of silu, swish, .*, got 'quick_gelu'"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps needs a number > 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps needs a number > 0"),
    ],
)
def test_bad_values_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GatedDeltaNetConfig(**{**SIZES, **change})
    with pytest.raises(ValueError, match=message):
        Qwen3_5GatedDeltaNet({**SIZES, **change})
