"""On a GPU: injected Transformers layers take the layers' own fused path, trained and decoding."""

from __future__ import annotations

import copy

import pytest
import torch

from qwenlinear import AutoKernel, TorchKernel
from qwenlinear.layers import projection
from tests.kernels.reference import relative

pytestmark = pytest.mark.gpu
DEVICE, T = torch.device("cuda"), 2100


@pytest.mark.parametrize("family", ["next", "3.5"])
def test_injected_layers_take_the_same_path(family, monkeypatch) -> None:
    pytest.importorskip("transformers", minversion="5.6")
    from qwenlinear.hf import inject
    from tests.hf.models import make

    monkeypatch.setattr(projection, "FEWEST_TOKENS", T)  # fused, at a length whose reference is still cheap

    sizes = {"hidden_size": 128, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
    model = make(family, **sizes).to(DEVICE, torch.bfloat16)
    inject(model, AutoKernel())
    layers = [block.linear_attn for block in model.model.layers if hasattr(block, "linear_attn")]
    assert len(layers) == 3
    for layer in layers:  # the model's own repr shows equal neighbours once
        words = "projections=fused, prologue=fused, epilogue=fused, decoding=two skinny products"
        assert words in repr(layer)
    ids = torch.randint(2, 97, (1, T), device=DEVICE)
    exact = copy.deepcopy(model).float()  # grouped products of experts know no float64
    inject(exact, TorchKernel())
    outputs = [m(ids, labels=ids) for m in (model, exact)]
    assert relative(outputs[0].logits, outputs[1].logits) < 5e-2
    outputs[0].loss.backward()
    layer = model.model.layers[0].linear_attn
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
    with torch.no_grad():
        want = model.generate(ids[:, :50], max_new_tokens=8, do_sample=False)
    assert want.shape == (1, 58)
