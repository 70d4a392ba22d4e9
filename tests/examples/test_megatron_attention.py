"""The sequence-first adapter equals the plain layer, document by document, and drops nothing."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from qwenlinear import GatedDeltaNetConfig, Qwen3_5GatedDeltaNet, TorchKernel

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("megatron_attention", ROOT / "examples/megatron_attention.py")
example = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(example)
CONFIG = GatedDeltaNetConfig(
    hidden_size=32, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8
)


def packed(*bounds: int, **more) -> SimpleNamespace:
    return SimpleNamespace(qkv_format="thd", cu_seqlens_q=torch.tensor(bounds, dtype=torch.int32), **more)


@pytest.fixture
def attention():
    return example.MegatronAttention(Qwen3_5GatedDeltaNet(CONFIG, TorchKernel()), config=None, layer_number=1)


def test_documents_outputs_and_gradients(attention) -> None:
    layer = attention.linear_attn
    x = torch.randn(14, 1, 32, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    got, bias = attention(x, None, rotary_pos_emb=object(), packed_seq_params=packed(0, 5, 6, 14))
    assert bias is None
    want = torch.cat([layer(part.transpose(0, 1)) for part in y.split([5, 1, 8])], 1).transpose(0, 1)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    weights = torch.randn_like(want)
    (got * weights).sum().backward()
    mine = [x.grad, *(p.grad.clone() for p in layer.parameters())]
    layer.zero_grad()
    (want * weights).sum().backward()
    for a, b in zip(mine, [y.grad, *(p.grad for p in layer.parameters())], strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()


def test_padding_between_documents_touches_nothing_real(attention) -> None:
    x = torch.randn(12, 1, 32)
    params = packed(0, 3, 8, cu_seqlens_q_padded=torch.tensor([0, 4, 12], dtype=torch.int32))
    got, _ = attention(x, packed_seq_params=params)
    layer = attention.linear_attn
    torch.testing.assert_close(got[:3, 0], layer(x[:3].transpose(0, 1))[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got[4:9, 0], layer(x[4:9].transpose(0, 1))[0], rtol=1e-5, atol=1e-5)


def test_dense_rows(attention) -> None:
    x = torch.randn(7, 3, 32)
    got, _ = attention(x)
    torch.testing.assert_close(got.transpose(0, 1), attention.linear_attn(x.transpose(0, 1)))


def test_boundaries_are_read_once_and_again_after_a_rewrite(attention) -> None:
    params, x = packed(0, 4, 10), torch.randn(10, 1, 32)
    attention(x, packed_seq_params=params)
    first = params.qwenlinear_documents[2]
    attention(x, packed_seq_params=params)
    assert params.qwenlinear_documents[2] is first
    params.cu_seqlens_q.copy_(torch.tensor([0, 7, 10]))
    got, _ = attention(x, packed_seq_params=params)
    want, _ = attention(x, packed_seq_params=packed(0, 7, 10))
    assert torch.equal(got, want)


@pytest.mark.parametrize("name", ["attention_mask", "attention_bias", "inference_context", "key_value_states"])
def test_nothing_is_dropped(attention, name) -> None:
    with pytest.raises(ValueError, match=f"needs {name} to be None"):
        attention(torch.randn(4, 1, 32), **{name: torch.ones(1)})


def test_another_format_is_refused(attention) -> None:
    params = packed(0, 4)
    params.qkv_format = "bshd"
    with pytest.raises(ValueError, match="'thd'"):
        attention(torch.randn(4, 1, 32), packed_seq_params=params)


def test_names_below_linear_attn(attention) -> None:
    assert all(name.startswith("linear_attn.") for name in attention.state_dict())


def test_it_runs() -> None:
    done = subprocess.run(
        [sys.executable, "examples/megatron_attention.py"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "", "OMP_NUM_THREADS": "1"},
    )
    assert done.stdout.startswith("3 documents in [12, 1, 32]: the adapter equals the layer, outputs 0e+00")
