"""`generate` of an injected model gives the ids of the untouched one."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", minversion="5.6")
import transformers

from tests.hf.models import CACHE, FAMILIES, make, pair, tokens

GREEDY = {"do_sample": False, "max_new_tokens": 8}
WAYS = {
    "greedy": GREEDY,
    "beams": {**GREEDY, "num_beams": 3, "num_return_sequences": 2},
    "sampling": {"do_sample": True, "top_k": 20, "max_new_tokens": 8},
    "static": {**GREEDY, "cache_implementation": "static"},
    "without a cache": {**GREEDY, "use_cache": False},
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("padded", [False, True])
def test_same_ids(family, way, padded) -> None:
    theirs, ours, kernel = pair(family)
    ids, mask = tokens(3, 9), torch.ones(3, 9, dtype=torch.int64)
    if padded:
        mask[0, :4], mask[1, :8] = 0, 0
        ids = ids.masked_fill(mask == 0, 0)
    generated = []
    for model in (theirs, ours):
        torch.manual_seed(5)
        try:
            generated.append(model.generate(ids, attention_mask=mask, **WAYS[way]))
        except KeyError as error:  # of older releases, before any layer runs
            assert model is theirs
            pytest.skip(f"Transformers {transformers.__version__} cannot do it untouched either: {error!r}")
    assert torch.equal(*generated)
    assert generated[1].shape[1] == 17
    assert (kernel.chunks, kernel.steps) == ((3 * 8, 0) if way == "without a cache" else (3, 3 * 7))


def test_one_token_prompt() -> None:
    theirs, ours, _ = pair("3.5")
    ids = tokens(2, 1)
    assert torch.equal(ours.generate(ids, **GREEDY), theirs.generate(ids, **GREEDY))


def test_a_static_cache_keeps_its_addresses() -> None:
    theirs, ours, _ = pair("3.5")
    from transformers import StaticCache

    with torch.no_grad():
        cache = StaticCache(config=ours.config, max_cache_len=32)
        ours(tokens(1, 5), **{CACHE: cache}, use_cache=True)
        at = _addresses(cache)
        ours(tokens(1, 1), **{CACHE: cache}, use_cache=True)
        ours(tokens(1, 3), **{CACHE: cache}, use_cache=True)
        assert _addresses(cache) == at
        cache.reset()
        ids = tokens(1, 6)
        want = theirs(ids, use_cache=False).logits
        torch.testing.assert_close(ours(ids, **{CACHE: cache}, use_cache=True).logits, want, rtol=1e-5, atol=1e-5)
        assert _addresses(cache) == at


def _addresses(cache) -> list[int]:
    layer = cache.layers[0]
    states = [layer.conv_states, layer.recurrent_states]
    return [(state[0] if isinstance(state, dict) else state).data_ptr() for state in states]


def test_assisted_decoding_does_what_it_does_untouched() -> None:
    """Transformers refuses to roll a recurrent state back; the error is its own, injected or not."""
    theirs, ours, _ = pair("3.5")
    assistant = make("3.5", num_hidden_layers=1, layer_types=["full_attention"])
    ids = tokens(1, 6)
    answers = []
    for model in (theirs, ours):
        with pytest.raises(ValueError) as error:  # noqa: PT011  # Transformers' own words
            model.generate(ids, assistant_model=assistant, **GREEDY)
        answers.append(str(error.value))
    assert answers[0] == answers[1]


def test_an_injected_assistant_drafts_for_an_attention_model() -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    main = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, head_dim=16, pad_token_id=0, bos_token_id=1, eos_token_id=None,
        )
    ).eval()  # fmt: skip
    theirs, ours, kernel = pair("3.5")
    ids = tokens(1, 6)
    answers = [main.generate(ids, assistant_model=assistant, **GREEDY) for assistant in (theirs, ours, None)]
    assert torch.equal(answers[0], answers[1])
    assert torch.equal(answers[1], answers[2])
    assert kernel.chunks + kernel.steps > 0


def test_recorded_past_is_rolled_back_by_crop() -> None:
    """What `crop` restores of a layer, the convolution's columns, it restores after injected calls as well."""
    theirs, ours, _ = pair("3.5")
    from transformers import DynamicCache

    if not hasattr(DynamicCache, "is_recording_past"):
        pytest.skip("this release does not record the past")
    prompt, draft = tokens(1, 5), tokens(1, 4)
    states = []
    with torch.no_grad():
        for model in (theirs, ours):
            cache = DynamicCache(config=model.config)
            model(prompt, **{CACHE: cache}, use_cache=True)
            cache.activate_past_recording()
            for piece in (draft, draft[:, :1]):
                model(piece, **{CACHE: cache}, use_cache=True)
            cache.crop(-3)
            states.append(cache.layers[0].conv_states[0])
    assert states[0].shape == states[1].shape
    torch.testing.assert_close(*states, rtol=1e-5, atol=1e-5)


def test_an_error_leaves_the_cache_alone() -> None:
    from transformers import DynamicCache

    _, ours, kernel = pair("3.5")
    layer = ours.model.layers[0].linear_attn
    cache = DynamicCache(config=ours.config)
    with torch.no_grad():
        layer(torch.randn(1, 5, 32), cache=cache)
        before = [cache.layers[0].conv_states[0].clone(), cache.layers[0].recurrent_states[0].clone()]
        kernel._chunk = None  # whatever goes wrong in a kernel
        with pytest.raises(TypeError):
            layer(torch.randn(1, 5, 32), cache=cache)
    torch.testing.assert_close(
        before, [cache.layers[0].conv_states[0], cache.layers[0].recurrent_states[0]], rtol=0, atol=0
    )


def test_both_names_of_the_cache() -> None:
    from transformers import DynamicCache

    _, ours, _ = pair("3.5")
    layer, x = ours.model.layers[0].linear_attn, torch.randn(1, 6, 32)
    outputs = []
    with torch.no_grad():
        for name in ("cache", "cache_params"):
            cache = DynamicCache(config=ours.config)
            outputs.append(torch.cat([layer(piece, **{name: cache}) for piece in x.split(3, 1)], 1))
        assert torch.equal(*outputs)
        torch.testing.assert_close(outputs[0], layer(x), rtol=1e-5, atol=1e-5)
        with pytest.raises(ValueError, match="one without the other"):
            layer(x, cache=cache, cache_params=cache)
