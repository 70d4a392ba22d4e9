"""Throw-away stand-ins of the agreed signatures, until the branches that write the operators are merged."""

from __future__ import annotations

import torch
from torch import Tensor


def prologue(qkv, b, a, weight, A_log, dt_bias, *, heads, head_dims, activation="silu", l2norm=True,
             initial_state=None, output_final_state=False, packed=None, lengths=None):
    from qwenlinear.kernels.lowering import l2norm as normalise
    from qwenlinear.ops import convolution as short_conv
    from qwenlinear.ops.gate import log_decay

    (H, HV), (K, V) = heads, head_dims
    packed = packed if packed is not None and packed.num_sequences > 1 else None
    state = None if initial_state is None else initial_state.to(qkv.dtype)
    y = short_conv.short_convolution(qkv, weight, activation, state, packed)
    final = short_conv.final_state(qkv, weight.shape[2], state, packed, lengths) if output_final_state else None
    q, k, v = y.split([H * K, H * K, HV * V], -1)
    q, k, v = q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (HV, V))
    if l2norm:
        q, k = normalise(q), normalise(k)
    g = log_decay(a, A_log, dt_bias).to(torch.promote_types(qkv.dtype, torch.float32))
    return q, k, v, g, b.sigmoid(), final


def decode_prologue(q, k, v, b, a, conv_state, weight, A_log, dt_bias, *, activation="silu", l2norm=True):
    H, K, V = q.shape[2], q.shape[3], v.shape[4]
    qkv = torch.cat([x.flatten(2) for x in (q, k, v)], -1)
    q, k, v, g, beta, final = prologue(
        qkv, b.flatten(2), a.flatten(2), weight, A_log, dt_bias, heads=(H, H * v.shape[3]), head_dims=(K, V),
        activation=activation, l2norm=l2norm, initial_state=conv_state, output_final_state=True,
    )
    conv_state.copy_(final)
    return q, k, v, g, beta
