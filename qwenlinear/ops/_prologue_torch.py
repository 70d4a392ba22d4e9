"""The prologue in PyTorch: the twin of the Triton form, on any device and in any floating dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from qwenlinear.kernels.packing import PackedSequences
from qwenlinear.ops.activations import ACTIVATIONS
from qwenlinear.ops.convolution import final_state, wide_convolution
from qwenlinear.ops.gate import log_decay

L2NORM_EPS = 1e-6
"""What every kernel of this layer adds to a head's sum of squares."""


def prologue_twin(
    qkv: Tensor,
    b: Tensor,
    a: Tensor,
    weight: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    heads: tuple[int, int],
    head_dims: tuple[int, int],
    activation: str | None,
    l2norm: bool,
    initial_state: Tensor | None,
    output_final_state: bool,
    packed: PackedSequences | None,
    lengths: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """What :func:`qwenlinear.ops.prologue` returns, of arguments that it checked."""
    (H, HV), (K, V) = heads, head_dims
    y = wide_convolution(qkv, weight, initial_state, packed)
    y = y if activation is None else ACTIVATIONS[activation](y)
    q, k, v = torch.split(y, [H * K, H * K, HV * V], -1)
    q, k, v = q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (HV, V))
    if l2norm:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2NORM_EPS) for x in (q, k))
    q, k, v = (x.to(qkv.dtype, memory_format=torch.contiguous_format).contiguous() for x in (q, k, v))
    g = log_decay(a, A_log, dt_bias).to(torch.promote_types(qkv.dtype, torch.float32))
    state = final_state(qkv, weight.shape[2], initial_state, packed, lengths) if output_final_state else None
    return q, k, v, g, b.sigmoid(), state
