"""Packed documents of an injected model equal separate runs; what looks like a boundary is used or refused."""

from __future__ import annotations

import threading

import pytest
import torch

pytest.importorskip("transformers", minversion="5.6")
from tests.hf.models import CACHE, FAMILIES, CountingKernel, assert_same_gradients, make, pair, tokens

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
LENGTHS = [5, 1, 9, 3, 12]


def documents() -> list[torch.Tensor]:
    return [tokens(n) for n in LENGTHS]


def positions(lengths=LENGTHS) -> torch.Tensor:
    return torch.cat([torch.arange(n) for n in lengths])[None]


def collated(parts) -> dict[str, object]:
    """What Transformers' collator hands over, in torch."""
    from transformers import DataCollatorWithFlattening

    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    batch = collator([{"input_ids": part.tolist()} for part in parts])
    batch.pop("labels")
    return batch


def separate(model, parts) -> torch.Tensor:
    return torch.cat([model(part[None], use_cache=False).logits for part in parts], 1)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("way", ["collator", "position_ids", "seq_idx", "four rows"])
def test_five_documents_equal_five_runs(family, way) -> None:
    theirs, ours, kernel = pair(family)
    parts = documents()
    batch: dict[str, object] = {"input_ids": torch.cat(parts)[None], "position_ids": positions()}
    if way == "collator":
        batch = collated(parts)
    if way == "seq_idx":
        batch["seq_idx"] = torch.repeat_interleave(torch.arange(5), torch.tensor(LENGTHS))[None].int()
    if way == "four rows":
        if family == "next":
            pytest.skip("a text model without rows")
        batch["position_ids"] = positions().expand(4, 1, -1)
    got = ours(**batch, use_cache=False).logits
    assert kernel.documents == [5, 5, 5]
    want = separate(theirs, parts)
    torch.testing.assert_close(got, want, **CLOSE)
    weights = torch.randn_like(want)
    for output in (want, got):
        (output * weights).sum().backward()
    assert_same_gradients(ours, theirs)


@pytest.mark.parametrize("reentrant", [True, False])
def test_under_gradient_checkpointing(reentrant) -> None:
    theirs, ours, kernel = pair("3.5")
    parts = documents()
    want = separate(theirs, parts)
    ours.train()
    ours.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        ours.enable_input_require_grads()
    ids = torch.cat(parts)[None]
    got = ours(ids, position_ids=positions()).logits  # training with checkpointing uses no cache
    torch.testing.assert_close(got, want, **CLOSE)
    ours(ids.flip(1), use_cache=False)  # another call in between leaves nothing behind
    for output in (want, got):
        output.square().sum().backward()
    assert kernel.documents == [5] * 3 + [1] * 3 + [5] * 3
    assert_same_gradients(ours, theirs)


def test_several_rows_of_documents() -> None:
    theirs, ours, _ = pair("next")
    lengths = [[4, 6], [7, 3]]
    ids, places = tokens(2, 10), torch.cat([positions(row) for row in lengths])
    got = ours(ids, position_ids=places, use_cache=False).logits
    for row in range(2):
        want = separate(theirs, ids[row].split(lengths[row]))
        torch.testing.assert_close(got[row : row + 1], want, **CLOSE)


def test_threads_have_their_own_boundaries() -> None:
    theirs, ours, _ = pair("3.5")
    work = [[tokens(n) for n in lengths] for lengths in ([3, 8], [6, 5], [11], [1, 1, 9])]
    wants = [separate(theirs, parts) for parts in work]
    gots: dict[int, torch.Tensor] = {}

    def call(index: int) -> None:
        for _ in range(5):
            parts = work[index]
            ids, places = torch.cat(parts)[None], positions([len(p) for p in parts])
            with torch.no_grad():
                gots[index] = ours(ids, position_ids=places, use_cache=False).logits

    threads = [threading.Thread(target=call, args=(index,)) for index in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for index, want in enumerate(wants):
        torch.testing.assert_close(gots[index], want, **CLOSE)


def test_a_layer_alone_takes_boundaries_with_an_empty_document() -> None:
    _, ours, _ = pair("3.5")
    layer, x = ours.model.layers[0].linear_attn, torch.randn(1, 9, 32)
    got = layer(x, cu_seq_lens_q=torch.tensor([0, 4, 4, 9], dtype=torch.int32))
    torch.testing.assert_close(got, torch.cat([layer(x[:, :4]), layer(x[:, 4:])], 1), **CLOSE)
    again = layer(x, seq_idx=torch.tensor([[0] * 4 + [2] * 5], dtype=torch.int32))
    assert torch.equal(again, got)
    one = layer(x, cu_seq_lens_q=torch.tensor([0, 9], dtype=torch.int32))
    assert torch.equal(one, layer(x))


def test_what_is_no_packing() -> None:
    """Left padding, ids that go on from a cache, three rows of multimodal ids."""
    theirs, ours, kernel = pair("3.5")
    ids, mask = tokens(2, 8), torch.ones(2, 8, dtype=torch.int64)
    mask[0, :3] = 0
    places = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
    got = ours(ids, attention_mask=mask, position_ids=places, use_cache=False).logits
    want = theirs(ids, attention_mask=mask, position_ids=places, use_cache=False).logits
    torch.testing.assert_close(got, want, **CLOSE)
    rows = positions([5, 3]).expand(3, 2, -1)
    got, want = (m(ids, position_ids=rows, use_cache=False).logits for m in (ours, theirs))
    torch.testing.assert_close(got, want, **CLOSE)
    with torch.no_grad():
        cache = ours(ids, use_cache=True)[CACHE]
        ours(ids[:, :3], position_ids=torch.tensor([[8, 9, 10]]), **{CACHE: cache}, use_cache=True)
    assert set(kernel.documents) == {1}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_cache": True}, "pass use_cache=False"),
        ({"attention_mask": torch.ones(1, 8, dtype=torch.int64)}, "leave the mask out"),
        ({"cu_seq_lens_q": torch.tensor([0, 4, 8])}, "start again at token 5"),
        ({"cu_seq_lens_q": torch.tensor([0, 5, 9])}, "end at B \\* T = 8"),
        ({"seq_idx": torch.tensor([[0] * 4 + [1] * 4])}, "start again at token 5"),
        ({"seq_idx": torch.tensor([[0] * 5 + [-1] * 3])}, "negative"),
        (
            {"seq_idx": torch.tensor([[0] * 5 + [1] * 3]), "cu_seq_lens_q": torch.tensor([0, 4, 8])},
            "the same documents",
        ),
        ({"cu_seq_lens_k": torch.tensor([0, 5, 8])}, "alone"),
        ({"position_ids": None, "cu_seqlens": torch.tensor([0, 5, 8])}, "cu_seq_lens_q"),
        ({"position_ids": None, "cu_seq_lens_q": torch.tensor([0, 5, 8]), "use_cache": True}, "use_cache=False"),
    ],
)
def test_refused(changes, words) -> None:
    _, ours, kernel = pair("3.5")
    call = {"position_ids": positions([5, 3]), "use_cache": False, **changes}
    with pytest.raises(ValueError, match=words):
        ours(tokens(1, 8), **call)
    assert kernel.chunks == 0


def test_padding_and_boundaries_together_are_refused_in_a_layer() -> None:
    _, ours, _ = pair("3.5")
    layer, x = ours.model.layers[0].linear_attn, torch.randn(1, 9, 32)
    with pytest.raises(ValueError, match="one without the other"):
        layer(x, cu_seq_lens_q=torch.tensor([0, 4, 9]), attention_mask=torch.ones(1, 9))
    with pytest.raises(ValueError, match="looks like boundaries"):
        layer(x, packed_seq_params=object())


def test_a_mask_of_ones_with_boundaries_of_the_collator() -> None:
    """Transformers drops a mask of ones before the layer; explicit boundaries stay."""
    _, ours, kernel = pair("next")
    ids = tokens(1, 8)
    ours(
        ids,
        attention_mask=torch.ones(1, 8, dtype=torch.int64),
        position_ids=positions([5, 3]),
        cu_seq_lens_q=torch.tensor([0, 5, 8], dtype=torch.int32),
        use_cache=False,
    )
    assert kernel.documents == [2, 2, 2]


def test_embeddings_instead_of_ids() -> None:
    _, ours, kernel = pair("3.5")
    x = ours.get_input_embeddings()(tokens(1, 8))
    ours.model(None, None, positions([5, 3]), None, x, use_cache=False)  # by position
    assert kernel.documents == [2, 2, 2]


def test_a_multimodal_model() -> None:
    import transformers

    from qwenlinear.hf import inject
    from tests.hf.models import SIZES

    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    config = transformers.Qwen3_5Config(text_config=SIZES, vision_config=vision)
    model, kernel = transformers.Qwen3_5ForConditionalGeneration(config).eval(), CountingKernel()
    text = make("3.5")
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.lm_head.load_state_dict(text.lm_head.state_dict())
    report = inject(model, kernel)
    assert len(report.injected) == 3
    parts = [tokens(5), tokens(3)]
    got = model(torch.cat(parts)[None], position_ids=positions([5, 3]), use_cache=False).logits
    torch.testing.assert_close(got, separate(text, parts), **CLOSE)
    assert kernel.documents == [2, 2, 2]
