"""A call of an injected layer that fails while it writes to Transformers' cache: nobody goes on from what it left."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("transformers", minversion="5.6")
from transformers import DynamicCache, StaticCache

from tests.hf.models import CACHE, pair, tokens

TORN = "got some of layer 0 that a failed call had begun to write; take a new cache or reset\\(\\) this one"


class Interrupted(Exception):
    """What nobody foresees: an interrupt, a device out of memory."""


def fails(*args, **kwargs):
    raise Interrupted


def half_a_step(monkeypatch, cache, layer, kernel) -> None:
    """The kernel writes to the state, then something goes wrong."""
    whole = type(kernel)._step

    def step(self, inputs):
        whole(self, inputs)
        raise Interrupted

    monkeypatch.setattr(type(kernel), "_step", step)


def no_output(monkeypatch, cache, layer, kernel) -> None:
    monkeypatch.setattr(torch.nn.functional, "linear", fails_at(3 if hasattr(layer, "in_proj_qkvz") else 5))


def fails_at(count: int):
    """``linear`` that fails at its n-th call, the output projection's."""
    linear, calls = torch.nn.functional.linear, []

    def run(*args, **kwargs):
        calls.append(None)
        return fails() if len(calls) == count else linear(*args, **kwargs)

    return run


def no_conv_state(monkeypatch, cache, layer, kernel) -> None:
    monkeypatch.setattr(cache, "update_conv_state", fails)


def no_recurrent_state(monkeypatch, cache, layer, kernel) -> None:
    monkeypatch.setattr(cache, "update_recurrent_state", fails)


CASES = [(half_a_step, 1), (no_output, 1), (no_conv_state, 1), (no_recurrent_state, 1), (no_recurrent_state, 3)]


def caches(config):
    return {"dynamic": DynamicCache(config=config), "static": StaticCache(config=config, max_cache_len=32)}


@pytest.mark.parametrize("family", ["next", "3.5"])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize(("fault", "T"), CASES, ids=[f"{fault.__name__}-{T}" for fault, T in CASES])
@torch.no_grad()
def test_states_half_written_are_refused_until_reset(family, kind, fault, T) -> None:
    _, ours, kernel = pair(family)
    layer, cache = ours.model.layers[0].linear_attn, caches(ours.config)[kind]
    x = torch.randn(2, 5 + T, 32)
    prompt, rest = x[:, :5], x[:, 5:]
    layer(prompt, cache=cache)
    before = copy.deepcopy(cache)
    with pytest.MonkeyPatch.context() as patch:
        fault(patch, cache, layer, kernel)
        with pytest.raises(Interrupted):
            layer(rest, cache=cache)
    for torn in (cache, copy.deepcopy(cache)):
        for piece in (rest, rest[:, :1]):
            with pytest.raises(ValueError, match=TORN):
                layer(piece, cache=torn)
    want = layer(x)
    torch.testing.assert_close(layer(rest, cache=before), want[:, 5:], rtol=1e-5, atol=1e-5)
    cache.reset()
    got = torch.cat([layer(piece, cache=cache) for piece in (prompt, rest)], 1)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert vars(cache.layers[0]).keys() == vars(before.layers[0]).keys()  # nothing is left behind


@torch.no_grad()
def test_a_first_call_that_fails_between_its_two_writes() -> None:
    _, ours, _ = pair("3.5")
    layer, cache = ours.model.layers[0].linear_attn, DynamicCache(config=ours.config)
    x = torch.randn(1, 5, 32)
    with pytest.MonkeyPatch.context() as patch:
        no_recurrent_state(patch, cache, layer, None)
        with pytest.raises(Interrupted):
            layer(x, cache=cache)
    with pytest.raises(ValueError, match=TORN):
        layer(x, cache=cache)
    cache.reset()
    assert torch.equal(layer(x, cache=cache), layer(x))


@torch.no_grad()
def test_a_model_says_which_layer() -> None:
    _, ours, kernel = pair("3.5")
    cache = DynamicCache(config=ours.config)
    ours(tokens(1, 4), **{CACHE: cache}, use_cache=True)
    with pytest.MonkeyPatch.context() as patch:
        half_a_step(patch, cache, None, kernel)
        with pytest.raises(Interrupted):
            ours(tokens(1, 1), **{CACHE: cache}, use_cache=True)
    with pytest.raises(ValueError, match=TORN):
        ours(tokens(1, 1), **{CACHE: cache}, use_cache=True)


@torch.no_grad()
def test_a_refusal_leaves_the_cache_whole() -> None:
    """What is known beforehand comes before the first write."""
    _, ours, kernel = pair("3.5")
    layer, cache = ours.model.layers[0].linear_attn, DynamicCache(config=ours.config)
    x = torch.randn(1, 6, 32)
    layer(x[:, :5], cache=cache)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "refusals", fails)
        with pytest.raises(Interrupted):
            layer(x[:, 5:], cache=cache)
    torch.testing.assert_close(layer(x[:, 5:], cache=cache), layer(x)[:, 5:], rtol=1e-5, atol=1e-5)
