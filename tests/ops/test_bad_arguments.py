"""The operators' own words for arguments that do not fit; a state that would be written to is unchanged."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qwenlinear.ops import decode_prologue, epilogue, prologue, why_not_fused

X, W = torch.randn(2, 3, 8), torch.ones(8)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((X.long(), X.long(), W, 1e-6), "o needs a floating dtype, got torch.int64"),
        ((X, X.int(), W, 1e-6), "z needs a floating dtype, got torch.int32"),
        ((X, X, W.bool(), 1e-6), "weight needs a floating dtype, got torch.bool"),
        ((X.cfloat(), X.cfloat(), W, 1e-6), "o needs a floating dtype, got torch.complex64"),
        (([1.0], X, W, 1e-6), "o needs a tensor, got list"),
        ((X, None, W, 1e-6), "z needs a tensor, got NoneType"),
        ((X, X, W, "small"), "eps needs a number > 0, got 'small'"),
        ((X, X, W, -1e-6), "eps needs a number > 0, got -1e-06"),
        ((X, X, W, float("nan")), "eps needs a number > 0, got nan"),
    ],
)
def test_epilogue(arguments: tuple[Any, ...], told: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        epilogue(*arguments)
    assert str(caught.value) == told


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"qkv": None}, "qkv needs a tensor, got NoneType"),
        ({"b": [1]}, "b needs a tensor, got list"),
        ({"weight": torch.ones(32, 1, 4, dtype=torch.int64)}, "weight needs a floating dtype, got torch.int64"),
        ({"heads": 3}, "heads needs two whole numbers >= 1, got 3"),
        ({"heads": (1,)}, "heads needs two whole numbers >= 1, got (1,)"),
        ({"heads": (1.0, 2)}, "heads needs two whole numbers >= 1, got (1.0, 2)"),
        ({"head_dims": (8, 0)}, "head_dims needs two whole numbers >= 1, got (8, 0)"),
        ({"activation": ["silu"]}, "activation needs None or one of silu"),
        ({"initial_state": [1]}, "initial_state needs a tensor, got list"),
        ({"lengths": [4]}, "lengths needs a tensor, got list"),
    ],
)
def test_prologue(changes: dict[str, Any], told: str) -> None:
    arguments: dict[str, Any] = {
        "qkv": torch.randn(1, 4, 32),
        **{name: torch.randn(1, 4, 2) for name in "ba"},
        "weight": torch.randn(32, 1, 4),
        **{name: torch.zeros(2) for name in ("A_log", "dt_bias")},
        "heads": (1, 2),
        "head_dims": (8, 8),
    }
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        prologue(**{**arguments, **changes})
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"q": None}, "q needs a tensor, got NoneType"),
        ({"b": [1]}, "b needs a tensor, got list"),
        ({"conv_state": None}, "conv_state needs a tensor, got NoneType"),
        ({"dt_bias": 0.0}, "dt_bias needs a tensor, got float"),
        ({"activation": ["silu"]}, "activation needs None or one of silu"),
        ({"A_log": torch.zeros(4, dtype=torch.int64)}, "A_log needs shape [4] on cpu and a floating dtype"),
    ],
)
def test_decode_prologue(changes: dict[str, Any], told: str) -> None:
    state = torch.zeros(3, 48, 3)
    arguments: dict[str, Any] = {
        **{name: torch.randn(3, 1, 2, 4) for name in "qk"},
        "v": torch.randn(3, 1, 2, 2, 8),
        **{name: torch.randn(3, 1, 2, 2) for name in "ba"},
        "conv_state": state,
        "weight": torch.randn(48, 1, 4),
        **{name: torch.zeros(4) for name in ("A_log", "dt_bias")},
    }
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        decode_prologue(**{**arguments, **changes})
    assert told in str(caught.value)
    assert not state.any()


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.float32), (torch.device("cpu"), "float32"), (None, None)])
def test_why_not_fused(device: Any, dtype: Any) -> None:
    with pytest.raises(ValueError, match=r"device and dtype need a torch\.device and a torch\.dtype, got "):
        why_not_fused(device, dtype)
