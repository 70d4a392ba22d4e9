"""decode_prologue in PyTorch: one token of the layer's own path, its state in place, its errors."""

from __future__ import annotations

import pytest
import torch

from qwenlinear.kernels.lowering import l2norm
from qwenlinear.ops import decode_prologue
from qwenlinear.ops.convolution import short_convolution
from qwenlinear.ops.decode import decode_prologue_op
from qwenlinear.ops.gate import log_decay
from tests.kernels.reference import relative
from tests.ops.decode_cases import one_token


@pytest.mark.parametrize("W", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("activation", ["silu", "tanh", None])
def test_it_is_one_token_of_the_path_of_many(W, grouped, activation):
    call = one_token(torch.float64, W=W, grouped=grouped)
    state = call["conv_state"].clone()
    token = torch.cat([call[name].flatten(2) for name in "qkv"], 2)
    mixed = short_convolution(token, call["weight"], activation, state)
    got = decode_prologue(**call, activation=activation)
    q, k, v = mixed.split([16, 16, 64], -1)
    want = (
        l2norm(q.unflatten(-1, (2, 8))),
        l2norm(k.unflatten(-1, (2, 8))),
        v.unflatten(-1, (4, 16)),
        log_decay(call["a"].flatten(2), call["A_log"], call["dt_bias"]),
        call["b"].flatten(2).sigmoid(),
    )
    for x, right in zip(got, want, strict=True):
        torch.testing.assert_close(x, right, rtol=1e-12, atol=1e-12)
        assert x.is_contiguous()
    assert torch.equal(call["conv_state"], torch.cat([state, token.mT], 2)[..., 1:])


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.bfloat16, 4e-3), (torch.float16, 5e-4), (torch.float32, 1e-6)])
def test_it_rounds_once(dtype, rounding):
    call = one_token(dtype)
    exact = {name: x.double() for name, x in call.items()}
    for name, x, right in zip(
        ("q", "k", "v", "g", "beta"), decode_prologue(**call), decode_prologue(**exact), strict=True
    ):
        assert relative(x, right) < (1e-6 if name == "g" else rounding), name
        assert x.dtype == (torch.float32 if name == "g" else dtype)


def test_a_state_of_another_dtype_keeps_it():
    call = one_token(torch.bfloat16)
    call["conv_state"] = call["conv_state"].float()
    decode_prologue(**call)
    assert call["conv_state"].dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "x", "words"),
    [
        ("q", torch.zeros(3, 2, 2, 8), r"q needs shape \[B, 1, H, K\]"),
        ("k", torch.zeros(3, 1, 2, 9), r"k needs shape \[3, 1, 2, 8\]"),
        ("v", torch.zeros(3, 1, 4, 16), "v needs shape"),
        ("b", torch.zeros(3, 1, 4), "b needs shape"),
        ("a", torch.zeros(2, 1, 2, 2), "a needs shape"),
        ("weight", torch.zeros(96, 4), r"weight needs shape \[C, 1, W\]"),
        ("weight", torch.zeros(95, 1, 4), r"weight needs shape \[96, 1, 4\]"),
        ("conv_state", torch.zeros(3, 96, 4), r"conv_state needs shape \[3, 96, 3\]"),
        ("A_log", torch.zeros(2), r"A_log needs shape \[4\]"),
        ("dt_bias", torch.zeros(4, device="meta"), "dt_bias needs shape .* on cpu"),
        ("v", torch.zeros(3, 1, 2, 2, 16).half(), "v needs q's dtype"),
        (
            "conv_state",
            torch.zeros(3, 96, 3, dtype=torch.int64),
            "conv_state needs .* a floating dtype, .* torch.int64",
        ),
        ("b", torch.zeros(3, 1, 2, 2, dtype=torch.bool), "b needs .* a floating dtype"),
        ("conv_state", torch.zeros(1, 96, 3).expand(3, 96, 3), "conv_state with memory of its own .*clone"),
        ("activation", "swoosh", "activation needs None or one of silu"),
        ("weight", torch.zeros(96, 1, 4, requires_grad=True), "without gradients"),
    ],
)
def test_what_does_not_fit_is_an_error_and_the_state_is_as_it_was(name, x, words):
    call = one_token(torch.float32)
    kept = call["conv_state"].clone()
    with pytest.raises(ValueError, match=words):
        decode_prologue(**{**call, name: x})
    assert torch.equal(call["conv_state"], kept)


def test_a_state_of_inference_mode_is_not_overwritten_outside_of_it():
    call = one_token(torch.float32)
    with torch.inference_mode():
        call["conv_state"] = call["conv_state"].clone()
    kept = call["conv_state"].clone()
    with pytest.raises(ValueError, match="inference mode"):
        decode_prologue(**call)
    assert torch.equal(call["conv_state"], kept)
    with torch.inference_mode():
        decode_prologue(**call)
    assert not torch.equal(call["conv_state"], kept)


def test_parameters_may_require_gradients_where_none_are_recorded():
    call = one_token(torch.float32)
    call["weight"].requires_grad_()
    with torch.no_grad():
        assert not decode_prologue(**call)[0].requires_grad


def test_the_operator_has_shapes_without_a_kernel():
    call = {name: x.to("meta") for name, x in one_token(torch.bfloat16).items()}
    shapes = [tuple(x.shape) for x in decode_prologue_op(**call, l2norm=True)]
    assert shapes == [(3, 1, 2, 8), (3, 1, 2, 8), (3, 1, 4, 16), (3, 1, 4), (3, 1, 4)]
