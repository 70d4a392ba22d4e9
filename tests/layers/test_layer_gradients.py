"""GatedDeltaNet: gradients, autocast, checkpointing, extreme gates."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from qwenlinear.kernels import PackedSequences, TorchKernel
from qwenlinear.layers import (
    GatedDeltaNetCache,
    GatedDeltaNetConfig,
)

CLOSE = {"rtol": 1e-9, "atol": 1e-11}


def rand(*shape: int, dtype: torch.dtype = torch.float64, grad: bool = False) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=grad)


def gradients(layer, outputs, inputs, seed=3):
    torch.manual_seed(seed)
    loss = sum((output * torch.randn_like(output)).sum() for output in outputs)
    return torch.autograd.grad(loss, [*inputs, *layer.parameters()])


def test_gradients_are_those_of_finite_differences(layer_class) -> None:
    config = GatedDeltaNetConfig(
        hidden_size=4,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        linear_key_head_dim=2,
        linear_value_head_dim=3,
        linear_conv_kernel_dim=3,
    )
    layer = layer_class(config, TorchKernel()).double()
    names = [name for name, _ in layer.named_parameters()]

    def run(x, conv_state, recurrent_state, *parameters):
        cache = GatedDeltaNetCache()
        cache.conv_state, cache.recurrent_state = conv_state, recurrent_state
        y = torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x,), {"cache": cache})
        return y, cache.conv_state, cache.recurrent_state

    leaves = [rand(1, 4, 4), rand(1, 10, 2), rand(1, 2, 2, 3), *(p.detach() for p in layer.parameters())]
    assert torch.autograd.gradcheck(run, [leaf.clone().requires_grad_() for leaf in leaves], fast_mode=True)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(make_layer, use_reentrant) -> None:
    layer, x, packed = make_layer(), rand(1, 12, 32, grad=True), PackedSequences.from_lengths([5, 7])
    outputs = layer(x, packed), checkpoint(layer, x, packed, use_reentrant=use_reentrant)
    assert torch.equal(*outputs)
    want, got = [], []
    for output, into in zip(outputs, (want, got), strict=True):
        layer.zero_grad()
        x.grad = None
        output.square().sum().backward()
        into.extend([x.grad, *(p.grad.clone() for p in layer.parameters())])
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def test_autocast(make_layer, recording_kernel) -> None:
    layer = make_layer(recording_kernel, torch.float32)
    x = rand(2, 9, 32, dtype=torch.float32, grad=True)
    want = layer(x)
    want_grads = gradients(layer, [want], [x])
    recording_kernel.calls.clear()
    seen = []
    run = recording_kernel._run
    recording_kernel._run = lambda inputs, form: (seen.append(torch.is_autocast_enabled("cpu")), run(inputs, form))[1]
    cache = GatedDeltaNetCache()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = layer(x, cache=cache)
    (_, inputs) = recording_kernel.calls.pop()
    assert seen == [False]  # the recurrence is not cast
    assert inputs.q.dtype == inputs.k.dtype == inputs.v.dtype == got.dtype == torch.bfloat16
    assert inputs.g.dtype == cache.recurrent_state.dtype == torch.float32
    assert cache.conv_state.dtype == torch.bfloat16
    assert (got.float() - want).norm() / want.norm() < 1e-2
    for name, a, b in zip(
        ["x", *dict(layer.named_parameters())], gradients(layer, [got], [x]), want_grads, strict=True
    ):
        assert a.dtype == torch.float32
        assert (a - b).norm() / b.norm() < 3e-2, name
    with torch.no_grad():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            layer(x[:, :1], cache=cache)
        layer(x[:, :1], cache=cache)  # a later call outside goes on from the same states
    assert cache.conv_state.dtype == torch.float32


def test_extreme_gates_through_a_layer(make_layer) -> None:
    """cases.md 9: A_log = 100 with a near -200 and near +100, weak and strong decay side by side, against float64."""
    exact, layer = make_layer(), make_layer()
    for one in (exact, layer):
        with torch.no_grad():
            one.A_log.copy_(torch.tensor([100.0, 100.0, -100.0, 4.0]))
            one.dt_bias.copy_(torch.tensor([-200.0, 100.0, 0.0, 20.0]))
    layer.float()
    x = rand(2, 70, 32)
    exact_x, narrow_x = x.clone().requires_grad_(), x.float().requires_grad_()
    want, got = exact(exact_x), layer(narrow_x)
    assert want.isfinite().all()
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)
    for a, b in zip(gradients(layer, [got.double()], [narrow_x]), gradients(exact, [want], [exact_x]), strict=True):
        assert a.isfinite().all()
        assert (a - b).norm() <= 1e-4 * b.norm() + 1e-12


@pytest.mark.parametrize("W", [1, 2, 6])
def test_other_convolution_widths(layer_class, config, W) -> None:
    layer = layer_class({**vars(config), "linear_conv_kernel_dim": W}, TorchKernel()).double()
    x, cache = rand(2, 9, 32), GatedDeltaNetCache()
    want = layer(x)
    with torch.no_grad():
        pieces = [layer(piece, cache=cache) for piece in x.split([5, 3, 1], 1)]
    torch.testing.assert_close(torch.cat(pieces, 1), want, **CLOSE)
    assert cache.conv_state.shape == (2, 64, W - 1)
    packed = layer(x[:1], torch.tensor([0, 4, 4, 9]), GatedDeltaNetCache())
    torch.testing.assert_close(packed, torch.cat([layer(x[:1, :4]), layer(x[:1, 4:])], 1), **CLOSE)
    mask, cache = torch.tensor([[0] * 4 + [1] * 5, [1] * 7 + [0] * 2]), GatedDeltaNetCache()
    padded = layer(x, cache=cache, attention_mask=mask)
    torch.testing.assert_close(padded[0, 4:], layer(x[:1, 4:])[0], **CLOSE)
    torch.testing.assert_close(
        layer(x[:, :1], cache=cache)[1], layer(torch.cat([x[1:, :7], x[1:, :1]], 1))[0, 7:], **CLOSE
    )


def test_repeated_runs_are_bitwise_equal(make_layer) -> None:
    layer, x = make_layer(dtype=torch.float32), rand(1, 12, 32, dtype=torch.float32, grad=True)
    cu = torch.tensor([0, 5, 12])
    first, second = layer(x, cu), layer(x, cu)
    assert torch.equal(first, second)
    for a, b in zip(gradients(layer, [first], [x]), gradients(layer, [second], [x]), strict=True):
        assert torch.equal(a, b)
