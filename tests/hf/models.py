"""Tiny random models of the three families, and a kernel that counts."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch

from qwenlinear import GatedDeltaKernel, TorchKernel

transformers = pytest.importorskip("transformers")

VOCABULARY = 97
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "initializer_range": 0.1,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "decoder_sparse_step": 1,
}
CACHE = "cache" if "cache" in inspect.signature(transformers.Qwen3NextModel.forward).parameters else "past_key_values"
"""What this release calls a model's cache."""

FAMILIES = ["next", "3.5", "3.5-moe"]


class CountingKernel(TorchKernel):
    """TorchKernel that counts its calls of each form, and documents."""

    def __init__(self) -> None:
        super().__init__()
        self.chunks = self.steps = 0
        self.documents: list[int] = []

    def _chunk(self, inputs):
        self.chunks += 1
        self.documents.append(1 if inputs.cu_seqlens is None else inputs.cu_seqlens.num_sequences)
        return super()._chunk(inputs)

    def _step(self, inputs):
        self.steps += 1
        return super()._step(inputs)


def make(family: str, **changes) -> torch.nn.Module:
    """A model in evaluation mode with weights that matter."""
    torch.manual_seed(1)
    if family == "next":
        model = transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**{**SIZES, **EXPERTS, **changes}))
    elif family == "3.5":
        model = transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**{**SIZES, **changes}))
    else:
        config = transformers.Qwen3_5MoeTextConfig(**{**SIZES, **EXPERTS, **changes})
        model = transformers.Qwen3_5MoeForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):  # a decay that lets gradients through: what vanishes can only be rounding
                parameter.uniform_(-4.0, -0.5)
            if name.endswith("embed_tokens.weight"):  # of unit size, as trained ones are: norms amplify no rounding
                parameter.normal_()
            if name.endswith(("dt_bias", "norm.weight")):
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def pair(family: str, kernel: GatedDeltaKernel | None = None, **changes):
    """The untouched model, an injected one with equal weights of its own, and its kernel."""
    from qwenlinear.hf import inject

    theirs = make(family, **changes)
    ours = copy.deepcopy(theirs)
    kernel = kernel or CountingKernel()
    inject(ours, kernel)
    return theirs, ours, kernel


def tokens(*shape: int) -> torch.Tensor:
    """Random ids without the padding id."""
    return torch.randint(2, VOCABULARY, shape)


def assert_same_gradients(ours, theirs, tolerance: float = 1e-5) -> None:
    """Each to 1e-5 of itself; what is nothing but rounding of the whole (a softmax over one token) counts as zero."""
    named = dict(theirs.named_parameters())
    rounding = 1e-7 * sum(p.grad.norm() ** 2 for p in named.values() if p.grad is not None) ** 0.5
    for name, parameter in ours.named_parameters():
        want = named[name].grad
        if want is None:
            assert parameter.grad is None, name
            continue
        assert (parameter.grad - want).norm() <= tolerance * want.norm() + rounding, name
