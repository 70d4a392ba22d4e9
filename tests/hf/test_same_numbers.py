"""An injected model computes what the untouched one computes on Transformers' PyTorch path."""

from __future__ import annotations

import pytest
import torch
from packaging.version import Version

pytest.importorskip("transformers", minversion="5.6")
import transformers

from tests.hf.models import CACHE, FAMILIES, CountingKernel, assert_same_gradients, make, pair, tokens

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("T", [1, 3, 70])
def test_logits_loss_and_every_gradient(family, T) -> None:
    theirs, ours, kernel = pair(family)
    ids = tokens(2, T)
    labels = ids if T > 1 else None
    want, got = theirs(ids, labels=labels), ours(ids, labels=labels)
    torch.testing.assert_close(got.logits, want.logits, **CLOSE)
    assert kernel.chunks + kernel.steps == 3
    if labels is not None:
        torch.testing.assert_close(got.loss, want.loss, **CLOSE)
    weights = torch.randn_like(want.logits)
    for output in (want, got):
        ((output.logits * weights).sum() + (output.loss if labels is not None else 0)).backward()
    assert_same_gradients(ours, theirs)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batch(family, side) -> None:
    theirs, ours, _ = pair(family)
    ids, mask = tokens(3, 12), torch.ones(3, 12, dtype=torch.int64)
    for row, length in enumerate([12, 7, 1]):
        padding = slice(0, 12 - length) if side == "left" else slice(length, 12)
        mask[row, padding], ids[row, padding] = 0, 0
    labels = ids.masked_fill(mask == 0, -100)
    want, got = (m(ids, attention_mask=mask, labels=labels) for m in (theirs, ours))
    real = mask.bool()
    torch.testing.assert_close(got.logits[real], want.logits[real], **CLOSE)
    want.loss.backward()
    got.loss.backward()
    assert_same_gradients(ours, theirs)


def test_padding_between_tokens_is_what_it_is_in_transformers() -> None:
    theirs, ours, _ = pair("3.5")
    ids, mask = tokens(2, 9), torch.ones(2, 9, dtype=torch.int64)
    mask[0, 3:5] = 0
    want, got = (m(ids, attention_mask=mask).logits for m in (theirs, ours))
    torch.testing.assert_close(got, want, **CLOSE)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("split", [[6, 1, 1], [2, 1, 4, 1], [1, 5, 2], [8]])
def test_going_on_from_a_cache(family, split) -> None:
    theirs, ours, _ = pair(family)
    ids = tokens(2, 8)
    caches = {}
    forgets = (
        Version(transformers.__version__) < Version("5.7") and max(split[1:], default=1) > 1
    )  # starts again at each longer piece
    with torch.no_grad():
        whole = ours(ids, use_cache=False).logits
        for piece, at in zip(ids.split(split, 1), whole.split(split, 1), strict=True):
            outputs = {}
            for name, model in (("theirs", theirs), ("ours", ours)):
                outputs[name] = model(piece, **{CACHE: caches.get(name)}, use_cache=True)
                caches[name] = outputs[name][CACHE]
            torch.testing.assert_close(outputs["ours"].logits, at, rtol=1e-4, atol=1e-5)
            if not forgets:
                torch.testing.assert_close(outputs["ours"].logits, outputs["theirs"].logits, **CLOSE)
    if forgets:
        return
    for mine, reference in zip(caches["ours"].layers, caches["theirs"].layers, strict=True):
        if hasattr(reference, "conv_states"):
            torch.testing.assert_close(mine.conv_states, reference.conv_states, **CLOSE)
            torch.testing.assert_close(mine.recurrent_states, reference.recurrent_states, **CLOSE)


def test_a_cache_moves_between_an_untouched_and_an_injected_model() -> None:
    theirs, ours, _ = pair("3.5")
    ids = tokens(1, 10)
    with torch.no_grad():
        want = theirs(ids, use_cache=False).logits
        cache = theirs(ids[:, :4], use_cache=True)[CACHE]
        second = ours(ids[:, 4:7], **{CACHE: cache}, use_cache=True)
        third = theirs(ids[:, 7:8], **{CACHE: second[CACHE]}, use_cache=True)
    torch.testing.assert_close(torch.cat([second.logits, third.logits], 1), want[:, 4:8], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(family, reentrant) -> None:
    theirs, ours, kernel = pair(family)
    ids = tokens(2, 9)
    theirs.train()
    theirs(ids, labels=ids, use_cache=False).loss.backward()
    ours.train()
    ours.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        ours.enable_input_require_grads()
    ours(ids, labels=ids, use_cache=False).loss.backward()
    assert kernel.chunks == 6  # once forward, once recomputed
    assert_same_gradients(ours, theirs)


def test_autocast() -> None:
    theirs, ours, kernel = pair("3.5")
    ids = tokens(2, 20)
    exact = theirs(ids).logits
    with torch.autocast("cpu", torch.bfloat16):
        want, got = theirs(ids).logits, ours(ids).logits
    assert (got - exact).norm() <= 1.5 * (want - exact).norm()
    assert kernel.chunks == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(dtype) -> None:
    theirs, ours, _ = pair("3.5")
    ids = tokens(2, 20)
    exact = theirs.double()(ids).logits
    got = ours.to(dtype)(ids).logits
    assert got.dtype == dtype
    want = make("3.5").to(dtype)(ids).logits
    assert (got - exact).norm() <= 1.5 * (want - exact).norm() + 1e-7 * exact.norm()


def test_heads_over_the_base_model() -> None:
    import copy

    from qwenlinear.hf import inject
    from tests.hf.models import EXPERTS, SIZES

    config = transformers.Qwen3NextConfig(**SIZES, **EXPERTS, num_labels=3)
    theirs = transformers.Qwen3NextForSequenceClassification(config).eval()
    ours, kernel = copy.deepcopy(theirs), CountingKernel()
    report = inject(ours, kernel)
    assert [layer.name for layer in report.injected] == [f"model.layers.{n}.linear_attn" for n in (0, 1, 3)]
    ids = tokens(2, 7)
    torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, **CLOSE)
    assert kernel.chunks == 3
