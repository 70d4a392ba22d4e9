"""Padding reaches no real token, no state and no gradient: every row equals its real tokens run alone."""

from __future__ import annotations

import random

import pytest
import torch

from qwenlinear.layers import GatedDeltaNetBlock, GatedDeltaNetCache, GatedDeltaNetConfig
from qwenlinear.layers.padding import RightPadding

CLOSE = {"rtol": 1e-9, "atol": 1e-11}


def rand(*shape: int, grad: bool = False) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=grad)


def mask_of(spans: list[tuple[int, int]], T: int, dtype: torch.dtype = torch.bool) -> torch.Tensor:
    mask = torch.zeros(len(spans), T, dtype=dtype)
    for row, (start, end) in zip(mask, spans, strict=True):
        row[start:end] = 1
    return mask


def check_call(layer, spans, T, cache, fill, extra=0, dtype=torch.bool) -> None:
    """One padded call, from the cache as it is, against each row's real tokens alone; gradients too."""
    x = rand(len(spans), T, 32)
    mask = mask_of(spans, T, dtype)
    x[mask == 0] = fill
    x.requires_grad_()
    longer = torch.cat([torch.zeros(len(spans), extra, dtype=dtype), mask], 1)
    alone = [GatedDeltaNetCache() for _ in spans]
    if cache.num_sequences:
        for n, one in enumerate(alone):
            one.conv_state, one.recurrent_state = cache.conv_state[n : n + 1], cache.recurrent_state[n : n + 1]
    got = layer(x, cache=cache, attention_mask=longer)
    want = torch.zeros_like(x)
    rows = [layer(x[n : n + 1, a:b], cache=alone[n])[0] for n, (a, b) in enumerate(spans)]
    want = torch.stack(
        [torch.cat([x.new_zeros(a, 32), row, x.new_zeros(T - b, 32)]) for (a, b), row in zip(spans, rows, strict=True)]
    )
    torch.testing.assert_close(got, want, **CLOSE)
    recurrent = torch.cat([one.recurrent_state for one in alone])
    conv = torch.cat([one.conv_state for one in alone])
    torch.testing.assert_close(cache.recurrent_state, recurrent, **CLOSE)
    torch.testing.assert_close(cache.conv_state, conv, **CLOSE)
    weights = torch.randn_like(got), torch.randn_like(recurrent), torch.randn_like(conv)
    leaves = [x, *layer.parameters()]
    totals = [
        sum((value * weight).sum() for value, weight in zip(values, weights, strict=True))
        for values in ((got, cache.recurrent_state, cache.conv_state), (want, recurrent, conv))
    ]
    grads = [torch.autograd.grad(total, leaves, retain_graph=True, allow_unused=True) for total in totals]
    for mine, reference, leaf in zip(*grads, leaves, strict=True):
        zeros = torch.zeros_like(leaf)
        torch.testing.assert_close(zeros if mine is None else mine, zeros if reference is None else reference, **CLOSE)
    assert (grads[0][0][mask == 0] == 0).all()


SPANS = {
    "left": [(2, 6), (0, 6), (5, 6)],
    "right": [(0, 4), (0, 6), (0, 1)],
    "both": [(1, 4), (2, 6), (3, 4)],
    "whole row": [(0, 6), (0, 0), (3, 6)],
    "all": [(0, 0), (0, 0)],
    "none": [(0, 6), (0, 6)],
}


@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS.keys())
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("fill", [3.0, float("nan"), float("inf")])
def test_padding_of_every_kind(make_layer, spans, warm, fill) -> None:
    layer, cache = make_layer(), GatedDeltaNetCache()
    if warm:
        layer(rand(len(spans), 2, 32), cache=cache)
    check_call(layer, spans, 6, cache, fill)


def test_random_padding_in_a_row_of_cached_calls(make_layer) -> None:
    layer, draw = make_layer(), random.Random(0)
    for _ in range(12):
        B, cache = draw.randint(1, 4), GatedDeltaNetCache()
        for _ in range(draw.randint(1, 3)):
            T = draw.randint(1, 7)
            spans = [tuple(sorted((draw.randint(0, T), draw.randint(0, T)))) for _ in range(B)]
            dtype = draw.choice([torch.bool, torch.int64, torch.float32, torch.uint8])
            check_call(layer, spans, T, cache, draw.choice([1e3, float("nan")]), draw.randint(0, 5), dtype)


def test_right_padding_leaves_the_state_of_the_real_tokens(make_layer) -> None:
    """cases.md 6: lengths 5 and 3 padded to 5, warm state, then one decode step."""
    layer, x, warm = make_layer(), rand(2, 5, 32), rand(2, 4, 32)
    token = rand(2, 1, 32)
    cache = GatedDeltaNetCache()
    layer(warm, cache=cache)
    layer(x, cache=cache, attention_mask=mask_of([(0, 5), (0, 3)], 5))
    with torch.no_grad():
        got = layer(token, cache=cache)
    for n, length in ((0, 5), (1, 3)):
        alone = torch.cat([warm[n], x[n, :length], token[n]])[None]
        torch.testing.assert_close(got[n, 0], layer(alone)[0, -1], **CLOSE)


def test_pads_neither_decay_nor_write(make_layer, recording_kernel) -> None:
    layer = make_layer(recording_kernel)
    layer(rand(2, 5, 32), attention_mask=mask_of([(0, 3), (2, 5)], 5))
    (_, inputs) = recording_kernel.calls.pop()
    for n in range(2):  # real tokens are rotated to the front
        assert (inputs.g[n, :3] < 0).all()
        assert (inputs.beta[n, :3] > 0).all()
        assert not inputs.g[n, 3:].any()
        assert not inputs.beta[n, 3:].any()


def test_mask_as_generation_grows_it(make_layer) -> None:
    """A left-padded prompt, then one token a call with a mask that gets longer."""
    layer, x = make_layer(), rand(2, 7, 32)
    mask = mask_of([(2, 7), (0, 7)], 7, torch.int64)
    want = layer(x, attention_mask=mask)
    cache, outputs = GatedDeltaNetCache(), []
    with torch.no_grad():
        outputs.append(layer(x[:, :4], cache=cache, attention_mask=mask[:, :4]))
        outputs.extend(layer(x[:, t : t + 1], cache=cache, attention_mask=mask[:, : t + 1]) for t in range(4, 7))
    torch.testing.assert_close(torch.cat(outputs, 1), want, **CLOSE)


def test_bad_gradients_at_pads_go_nowhere(make_layer) -> None:
    layer, x = make_layer(), rand(2, 5, 32, grad=True)
    mask = mask_of([(0, 3), (1, 5)], 5)
    output = layer(x, attention_mask=mask)
    upstream = rand(2, 5, 32)
    want = torch.autograd.grad(output, [x, *layer.parameters()], upstream, retain_graph=True)
    upstream[~mask] = float("nan")
    for a, b in zip(torch.autograd.grad(output, [x, *layer.parameters()], upstream), want, strict=True):
        assert torch.equal(a, b)


def test_rotation_round_trip_and_second_derivative() -> None:
    x = rand(3, 5, 2, grad=True)
    mask = mask_of([(1, 4), (0, 5), (3, 3)], 5)
    padding = RightPadding(mask, x)
    assert padding.lengths.tolist() == [3, 5, 0]
    aligned = padding.align(x)
    assert torch.equal(aligned[0], torch.cat([x[0, 1:4], torch.zeros(2, 2)]))
    assert torch.equal(padding.restore(aligned), x * mask[..., None])
    assert torch.autograd.gradcheck(padding.align, (x,))
    assert torch.autograd.gradgradcheck(padding.align, (x,))


def test_block_zeroes_padding() -> None:
    config = GatedDeltaNetConfig(hidden_size=32, linear_num_key_heads=1, linear_num_value_heads=2)
    block, x = GatedDeltaNetBlock(config, intermediate_size=16).double(), rand(2, 5, 32)
    mask = mask_of([(0, 3), (2, 5)], 5)
    want = [block(x[:1, :3]), block(x[1:, 2:])]
    x[~mask] = float("nan")
    x.requires_grad_()
    got = block(x, attention_mask=mask)
    torch.testing.assert_close(got[:1, :3], want[0], **CLOSE)
    torch.testing.assert_close(got[1:, 2:], want[1], **CLOSE)
    assert not got[~mask].any()
    got.square().sum().backward()
    assert all(p.grad.isfinite().all() for p in block.parameters())
    assert (x.grad[~mask] == 0).all()
    with pytest.raises(ValueError, match="attention_mask needs shape"):
        block(x, attention_mask=mask[:, 1:])


def test_an_additive_mask_is_refused() -> None:
    with pytest.raises(ValueError, match="looks like an additive mask"):
        RightPadding(torch.tensor([[-1e9, 0.0, 0.0]]), torch.zeros(1, 3, 4))
