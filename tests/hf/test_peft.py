"""LoRA by PEFT on the projections of an injected model: trains, merges, saves, loads; the same after restore."""

from __future__ import annotations

import copy

import pytest
import torch

from qwenlinear import TorchKernel
from qwenlinear.hf import inject, restore

pytest.importorskip("transformers", minversion="5.6")
pytest.importorskip("peft")
import peft

from tests.hf.models import CountingKernel, make, tokens

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
TARGETS = {
    "next": ["in_proj_qkvz", "in_proj_ba", "out_proj"],
    "3.5": ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"],
}


def adapted(family: str, kernel=None, first: bool = True):
    """A model with adapters, injected before (`first`) or after them; the adapters differ from zero."""
    model = make(family)
    if kernel is not None and first:
        inject(model, kernel)
    torch.manual_seed(7)
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=TARGETS[family], init_lora_weights=False)
    model = peft.get_peft_model(model, config)
    if kernel is not None and not first:
        report = inject(model, kernel)
        assert report.injected[0].name == "base_model.model.model.layers.0.linear_attn"
    return model


def steps(model, count: int = 3) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    torch.manual_seed(11)
    losses = []
    for _ in range(count):
        ids = tokens(2, 9)
        loss = model(input_ids=ids, labels=ids).loss
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


@pytest.mark.parametrize("family", TARGETS)
@pytest.mark.parametrize("first", [True, False])
def test_trains_merges_saves_and_loads(family, first, tmp_path) -> None:
    kernel = CountingKernel()
    theirs, ours = adapted(family), adapted(family, kernel, first)
    torch.testing.assert_close(steps(ours), steps(theirs), rtol=1e-4, atol=1e-5)
    assert kernel.chunks == 9
    ids = tokens(1, 8)
    ours.load_state_dict(theirs.state_dict())
    want, got = theirs(ids).logits, ours(ids).logits
    torch.testing.assert_close(got, want, **CLOSE)
    places = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    packed = ours(ids, position_ids=places, use_cache=False).logits
    separate = torch.cat([theirs(part, use_cache=False).logits for part in ids.split([3, 5], 1)], 1)
    torch.testing.assert_close(packed, separate, **CLOSE)

    ours.save_pretrained(tmp_path)
    fresh = make(family)
    inject(fresh, TorchKernel())
    loaded = peft.PeftModel.from_pretrained(fresh, tmp_path)
    torch.testing.assert_close(loaded(ids).logits, want, **CLOSE)

    merged = copy.deepcopy(ours).merge_and_unload()
    assert "kernel=CountingKernel()" in repr(merged)
    torch.testing.assert_close(merged(ids).logits, want, rtol=1e-4, atol=1e-5)

    calls = kernel.chunks
    assert restore(ours) == 3
    torch.testing.assert_close(ours(ids).logits, want, rtol=0, atol=0)
    torch.testing.assert_close(steps(ours, 2), steps(theirs, 2), rtol=0, atol=0)
    torch.testing.assert_close(ours.merge_and_unload()(ids).logits, theirs(ids).logits, rtol=1e-4, atol=1e-5)
    assert kernel.chunks == calls
    loaded_by_them = peft.PeftModel.from_pretrained(make(family), tmp_path)
    torch.testing.assert_close(loaded_by_them(ids).logits, want, rtol=0, atol=0)


def test_an_adapter_on_the_convolution_is_refused_before_and_after() -> None:
    config = peft.LoraConfig(r=64, target_modules=["conv1d"])  # a rank that its groups divide
    before = peft.get_peft_model(make("3.5"), config)
    with pytest.raises(ValueError, match="conv1d is not a plain"):
        inject(before, TorchKernel())
    model = make("3.5")
    inject(model, TorchKernel())
    after = peft.get_peft_model(model, config)
    with pytest.raises(ValueError, match="take conv1d out"):
        after(tokens(1, 4))
