"""An injected model decodes with the few-row products where they run, and its tokens stay what Transformers' are."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", minversion="5.6")

from qwenlinear.layers import token
from qwenlinear.ops.skinny import skinny_linear_twin
from tests.hf.models import CACHE, pair, tokens


@pytest.mark.parametrize("family", ["next", "3.5"])
@torch.no_grad()
def test_decoding(family, monkeypatch) -> None:
    theirs, ours, _ = pair(family)
    weights = []

    def launch(x, given):
        weights.extend(given)
        return skinny_linear_twin(x, given)

    monkeypatch.setattr(token, "why_not_skinny", lambda device, dtype, rows: None)
    monkeypatch.setattr(token, "launched", launch)
    assert "decoding=two skinny products" in repr(ours.model.layers[0].linear_attn)
    ids, caches = tokens(2, 8), {}
    for piece in ids.split([5, 1, 1, 1], 1):
        got, want = (
            model(piece, **{CACHE: caches.get(name)}, use_cache=True) for name, model in (("o", ours), ("t", theirs))
        )
        caches = {"o": got[CACHE], "t": want[CACHE]}
        torch.testing.assert_close(got.logits, want.logits, rtol=1e-5, atol=1e-5)
    layer = ours.model.layers[0].linear_attn
    mine = [weight for weight in weights if weight.data_ptr() in {p.data_ptr() for p in layer.parameters()}]
    names = {id(p): name for name, p in layer.named_parameters()}
    called = [names[id(weight)] for weight in mine]
    once = (
        ["in_proj_qkvz", "in_proj_ba"] if family == "next" else [f"in_proj_{part}" for part in ("qkv", "z", "b", "a")]
    )
    assert called == [f"{name}.weight" for name in (*once, "out_proj")] * 3
