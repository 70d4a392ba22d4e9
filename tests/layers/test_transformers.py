"""Both layers and the block with weights copied by name equal Transformers' own, full pass, cached decode, gradients."""

from __future__ import annotations

import copy

import pytest
import torch

from qwenlinear.kernels import TorchKernel
from qwenlinear.layers import GatedDeltaNetBlock, GatedDeltaNetCache, Qwen3_5GatedDeltaNet, Qwen3NextGatedDeltaNet

transformers = pytest.importorskip("transformers")
cache_utils = pytest.importorskip("transformers.cache_utils")
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "layer_types": ["linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


@pytest.fixture(params=["next", "3.5"])
def pair(request):
    """Transformers' layer with weights that matter, ours with its weights, and the config."""
    if request.param == "next":
        from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet as Theirs

        config, ours = transformers.Qwen3NextConfig(**SIZES), Qwen3NextGatedDeltaNet
    else:
        from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet as Theirs

        config, ours = transformers.Qwen3_5TextConfig(**SIZES), Qwen3_5GatedDeltaNet
    theirs = Theirs(config, layer_idx=0)
    with torch.no_grad():
        theirs.dt_bias.normal_()
        theirs.norm.weight.uniform_(0.5, 1.5)
    mine = ours(config, TorchKernel())
    mine.load_state_dict(theirs.state_dict())
    return theirs, mine, config


def test_names_shapes_and_order_are_the_same_both_ways(pair) -> None:
    theirs, ours, _ = pair
    assert [(n, p.shape) for n, p in ours.named_parameters()] == [(n, p.shape) for n, p in theirs.named_parameters()]
    assert list(ours.state_dict()) == list(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())


@pytest.mark.parametrize("T", [1, 5, 70, 130])
def test_full_pass_and_gradients(pair, T) -> None:
    theirs, ours, _ = pair
    x = torch.randn(2, T, 32)
    theirs_x, ours_x = x.clone().requires_grad_(), x.clone().requires_grad_()
    want, got = theirs(theirs_x), ours(ours_x)
    torch.testing.assert_close(got, want, **CLOSE)
    weights = torch.randn_like(want)
    (want * weights).sum().backward()
    (got * weights).sum().backward()
    named = dict(theirs.named_parameters())
    for name, mine, reference in [
        ("x", ours_x.grad, theirs_x.grad),
        *((n, p.grad, named[n].grad) for n, p in ours.named_parameters()),
    ]:
        assert (mine - reference).norm() <= 1e-5 * reference.norm(), name


@pytest.mark.parametrize("prompt", [1, 3, 70])
def test_cached_decode(pair, prompt) -> None:
    theirs, ours, config = pair
    x = torch.randn(2, prompt + 5, 32)
    their_cache, cache = cache_utils.DynamicCache(config=config), GatedDeltaNetCache()
    with torch.no_grad():
        for piece in [x[:, :prompt], *x[:, prompt:].split(1, 1)]:
            torch.testing.assert_close(ours(piece, cache=cache), theirs(piece, cache=their_cache), **CLOSE)
    layer = their_cache.layers[0]
    torch.testing.assert_close(cache.recurrent_state, layer.recurrent_states[0], **CLOSE)
    torch.testing.assert_close(cache.conv_state, layer.conv_states[0][..., -3:], **CLOSE)


def test_left_padding(pair) -> None:
    theirs, ours, _ = pair
    x, mask = torch.randn(2, 9, 32), torch.ones(2, 9, dtype=torch.int64)
    mask[0, :4] = 0
    torch.testing.assert_close(ours(x, attention_mask=mask), theirs(x, attention_mask=mask), **CLOSE)


def test_bfloat16(pair) -> None:
    theirs, ours, _ = pair
    x = torch.randn(2, 40, 32, dtype=torch.bfloat16)
    got = ours.bfloat16()(x)
    want = ours.double()(x.double())  # of the weights as bfloat16 has them
    their_error = (theirs.bfloat16()(x).double() - want).norm() / want.norm()
    our_error = (got.double() - want).norm() / want.norm()
    assert our_error < 1e-2
    assert our_error < 1.5 * their_error


def test_block_equals_the_decoder_layer() -> None:
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer

    config = transformers.Qwen3_5TextConfig(**SIZES)
    theirs, ours = Qwen3_5DecoderLayer(config, layer_idx=0), GatedDeltaNetBlock(config)
    with torch.no_grad():
        theirs.input_layernorm.weight.normal_()
        theirs.post_attention_layernorm.weight.normal_()
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    assert list(ours.state_dict()) == list(theirs.state_dict())
    x = torch.randn(2, 70, 32)
    theirs_x, ours_x = x.clone().requires_grad_(), x.clone().requires_grad_()
    want, got = theirs(theirs_x, position_embeddings=None), ours(ours_x)
    torch.testing.assert_close(got, want, **CLOSE)
    weights = torch.randn_like(want)
    (want * weights).sum().backward()
    (got * weights).sum().backward()
    exact = copy.deepcopy(ours).double()
    (exact(x.double()) * weights.double()).sum().backward()
    for (name, mine), reference, true in zip(
        ours.named_parameters(), theirs.parameters(), exact.parameters(), strict=True
    ):
        their_error = (reference.grad - true.grad).norm()  # what float32 costs them is not ours to match
        allowed = 1e-5 * true.grad.norm()
        assert (mine.grad - reference.grad).norm() <= allowed + their_error, name
        assert (mine.grad - true.grad).norm() <= max(allowed, their_error), name
    assert (ours_x.grad - theirs_x.grad).norm() <= 1e-5 * theirs_x.grad.norm()
