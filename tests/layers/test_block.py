"""GatedDeltaNetBlock beside Transformers' own (tests there): sizes, packing, cache, errors."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from qwenlinear.kernels import TorchKernel
from qwenlinear.layers import GatedDeltaNetBlock, GatedDeltaNetCache

CLOSE = {"rtol": 1e-9, "atol": 1e-11}


def test_intermediate_size(config) -> None:
    fields = vars(config)
    assert GatedDeltaNetBlock(config).mlp.up_proj.out_features == 96
    assert GatedDeltaNetBlock(config, intermediate_size=48).mlp.up_proj.out_features == 48
    for holder in (
        SimpleNamespace(intermediate_size=40, **fields),
        {**fields, "intermediate_size": 40},
        SimpleNamespace(text_config=SimpleNamespace(intermediate_size=40, **fields)),
        {"text_config": {**fields, "intermediate_size": 40}},
    ):
        assert GatedDeltaNetBlock(holder).mlp.up_proj.out_features == 40
    with pytest.raises(ValueError, match="intermediate_size needs a whole number >= 1, got 0"):
        GatedDeltaNetBlock(config, intermediate_size=0)


def test_packed_and_cached(config) -> None:
    block, cache = GatedDeltaNetBlock(config, TorchKernel()).double(), GatedDeltaNetCache()
    x = torch.randn(1, 12, 32, dtype=torch.float64)
    want = torch.cat([block(x[:, :5]), block(x[:, 5:])], 1)
    torch.testing.assert_close(block(x, torch.tensor([0, 5, 12])), want, **CLOSE)
    with torch.no_grad():
        pieces = [block(piece, cache=cache) for piece in x.split([6, 5, 1], 1)]
    torch.testing.assert_close(torch.cat(pieces, 1), block(x), **CLOSE)
    assert block(x[:, :0]).shape == (1, 0, 32)


def test_parameters(config) -> None:
    block = GatedDeltaNetBlock(config, TorchKernel()).bfloat16()
    assert block.linear_attn.A_log.dtype == torch.float32
    for parameter in block.parameters():
        parameter.data.fill_(float("nan"))
    block.reset_parameters()
    assert all(p.isfinite().all() for p in block.parameters())
    assert not block.input_layernorm.weight.any()
    assert "kernel=TorchKernel()" in repr(block)


def test_a_failing_mlp_leaves_the_cache_unchanged(config) -> None:
    block, cache = GatedDeltaNetBlock(config, TorchKernel()), GatedDeltaNetCache()
    block(torch.randn(2, 3, 32), cache=cache)
    conv, recurrent = cache.conv_state, cache.recurrent_state
    block.mlp.forward = lambda x: 1 / 0
    with pytest.raises(ZeroDivisionError):
        block(torch.randn(2, 3, 32), cache=cache)
    assert cache.conv_state is conv
    assert cache.recurrent_state is recurrent


def test_gradients_of_padded_outputs_reach_no_weight(config) -> None:
    block = GatedDeltaNetBlock(config, TorchKernel())
    block.mlp.down_proj.bias = torch.nn.Parameter(torch.ones(32))  # as an adapter may add one
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 0]])
    x = torch.randn(2, 5, 32)
    y = block(x, attention_mask=mask)
    assert not y[mask == 0].any()
    gradient = torch.randn_like(y)
    want = torch.autograd.grad(y, list(block.parameters()), gradient, retain_graph=True)
    gradient[mask == 0] = torch.nan
    got = torch.autograd.grad(y, list(block.parameters()), gradient)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_bad_input_stops_before_the_first_norm(config) -> None:
    block, cache = GatedDeltaNetBlock(config, TorchKernel()), GatedDeltaNetCache()
    block.input_layernorm.forward = lambda x: 1 / 0
    mask = torch.ones(2, 3)
    for x, words in (
        (torch.randn(2, 3, 31), r"hidden_states needs shape \[B, T, 32\], got \[2, 3, 31\]"),
        (torch.randn(3, 32), r"hidden_states needs shape"),
        (None, "hidden_states needs a tensor, got NoneType"),
        (torch.zeros(2, 3, 32, dtype=torch.long), "hidden_states needs a floating dtype, got torch.int64"),
    ):
        with pytest.raises(ValueError, match=words):
            block(x, cache=cache, attention_mask=mask)
    with pytest.raises(ValueError, match="cache needs a GatedDeltaNetCache, got dict"):
        block(torch.randn(2, 3, 32), cache={})
