"""A Gated DeltaNet layer in the place of a Megatron-style attention: sequence first, documents in packed_seq_params.

    python examples/megatron_attention.py

prints

    3 documents in [12, 1, 32]: the adapter equals the layer, outputs 0e+00, gradients 0e+00

`MegatronAttention` takes what slime and Megatron-Core hand to `self_attention` and imports neither. Copy it into a layer
spec:

    submodules.self_attention = ModuleSpec(
        module=MegatronAttention, params={"layer": Qwen3_5GatedDeltaNet(hf_config, kernel=FlashQLAKernel())}
    )

It computes on the whole sequence with whole weights, on every tensor-parallel rank. Under sequence or context parallelism
gather hidden states (in document order) before it and scatter after it, as the trainer does for its own such layers.
"""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from qwenlinear import GatedDeltaNet, GatedDeltaNetConfig, PackedSequences, Qwen3_5GatedDeltaNet


class MegatronAttention(nn.Module):
    """A qwenlinear layer under the signature of Megatron's `SelfAttention`.

    Args:
        layer: the layer; its parameters keep Transformers' names below ``linear_attn``, as slime's converters expect.
        **kwargs: what a layer spec passes to every attention (config, layer_number, ...); the layer needs none of it.
    """

    def __init__(self, layer: GatedDeltaNet, **kwargs: Any) -> None:
        super().__init__()
        self.linear_attn = layer

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        key_value_states: Tensor | None = None,
        inference_context: Any = None,
        rotary_pos_emb: Any = None,
        rotary_pos_cos: Tensor | None = None,
        rotary_pos_sin: Tensor | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        sequence_len_offset: int | None = None,
        *,
        inference_params: Any = None,
    ) -> tuple[Tensor, None]:
        """Mix the tokens of each document.

        Args:
            hidden_states: ``[T, B, hidden_size]``, B = 1 with ``packed_seq_params``.
            attention_mask: None; the layer is causal by itself.
            packed_seq_params: holds ``cu_seqlens_q``, or ``cu_seqlens_q_padded`` where each document is followed by
                padding (which it then contains: nothing real looks at it). None for dense rows.
            rotary_pos_emb: and its like are not used: these layers have no rotary embedding.

        Returns:
            ``[T, B, hidden_size]`` and no bias.

        Raises:
            ValueError: an argument that this layer would have to drop.
        """
        unusable = {
            "attention_mask": attention_mask,  # Megatron: --no-create-attention-mask-in-dataloader
            "key_value_states": key_value_states,
            "attention_bias": attention_bias,
            "inference_context": inference_context,
            "inference_params": inference_params,
            "sequence_len_offset": sequence_len_offset,
        }
        given = [name for name, value in unusable.items() if value is not None]
        if given:
            raise ValueError(f"a Gated DeltaNet layer needs {' and '.join(given)} to be None: it would be dropped")
        documents = None if packed_seq_params is None else documents_of(packed_seq_params, hidden_states.device)
        output: Tensor = self.linear_attn(hidden_states.transpose(0, 1), cu_seqlens=documents)
        return output.transpose(0, 1), None


def documents_of(packed_seq_params: Any, device: torch.device) -> PackedSequences:
    """The boundaries of a batch, read once: kept on the object, and read again if somebody has rewritten the tensor."""
    if getattr(packed_seq_params, "qkv_format", "thd") not in ("thd", None):
        raise ValueError(f"packed_seq_params needs qkv_format 'thd', got {packed_seq_params.qkv_format!r}")
    cu_seqlens = getattr(packed_seq_params, "cu_seqlens_q_padded", None)
    if cu_seqlens is None:
        cu_seqlens = packed_seq_params.cu_seqlens_q
    known = getattr(packed_seq_params, "qwenlinear_documents", None)
    if known is None or known[0] is not cu_seqlens or known[1] != cu_seqlens._version:
        known = (cu_seqlens, cu_seqlens._version, PackedSequences.from_cu_seqlens(cu_seqlens, device=device))
        packed_seq_params.qwenlinear_documents = known
    documents: PackedSequences = known[2]
    return documents


def main() -> None:
    """Run the adapter and the layer inside it on the same documents."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.manual_seed(0)
    config = GatedDeltaNetConfig(
        hidden_size=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    )
    layer = Qwen3_5GatedDeltaNet(config)
    attention = MegatronAttention(layer, layer_number=1)
    packed = SimpleNamespace(qkv_format="thd", cu_seqlens_q=torch.tensor([0, 5, 6, 12], dtype=torch.int32))
    x = torch.randn(12, 1, 32, requires_grad=True)
    y = x.detach().transpose(0, 1).requires_grad_()
    ours, _ = attention(x, packed_seq_params=packed)
    plain = layer(y, cu_seqlens=packed.cu_seqlens_q)
    ours.square().sum().backward()
    plain.square().sum().backward()
    assert x.grad is not None
    assert y.grad is not None
    outputs = (ours.transpose(0, 1) - plain).abs().max().item()
    gradients = (x.grad.transpose(0, 1) - y.grad).abs().max().item()
    print(
        f"3 documents in {list(x.shape)}: the adapter equals the layer, outputs {outputs:.0e}, gradients {gradients:.0e}"
    )


if __name__ == "__main__":
    main()
