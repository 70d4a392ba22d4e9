"""What one token goes through before the kernel, in one launch: a warp takes one head's channels of one sequence.

Rows of q, k, v, b and a lie wherever the projections left them; the convolution's state is updated where it lies.
"""

# mypy: ignore-errors
# Triton's functions carry no types.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qwenlinear._launch import on, power_of_two
from qwenlinear.ops._gates_triton import _decay, _log_softplus


@triton.jit
def _convolve(x, state, weight, channel, inside, step, W: tl.constexpr):
    """The convolution of one token with the W-1 columns before it, then SiLU, in float32; the columns move on by one.

    Every load comes before every store: a store between them would make the loads behind it wait.
    """
    new = tl.load(x, mask=inside, other=0.0)
    taps = weight + channel * W
    u = new.to(tl.float32) * tl.load(taps + (W - 1), mask=inside, other=0.0).to(tl.float32)
    if W > 1:
        last = tl.load(state + (W - 2) * step, mask=inside, other=0.0)
        u += last.to(tl.float32) * tl.load(taps + (W - 2), mask=inside, other=0.0).to(tl.float32)
    if W > 2:
        second = tl.load(state + (W - 3) * step, mask=inside, other=0.0)
        u += second.to(tl.float32) * tl.load(taps + (W - 3), mask=inside, other=0.0).to(tl.float32)
    if W > 3:
        third = tl.load(state + (W - 4) * step, mask=inside, other=0.0)
        u += third.to(tl.float32) * tl.load(taps + (W - 4), mask=inside, other=0.0).to(tl.float32)
        tl.store(state + (W - 4) * step, second, mask=inside)
    if W > 2:
        tl.store(state + (W - 3) * step, last, mask=inside)
    if W > 1:
        tl.store(state + (W - 2) * step, new.to(state.dtype.element_ty), mask=inside)
    return u * tl.sigmoid(u)


@triton.jit
def decode_prologue_kernel(
    q, k, v, b, a, state, weight, A_log, dt_bias, q_out, k_out, v_out, g_out, beta_out,
    q_n, q_h, k_n, k_h, v_n, v_h, v_g, b_n, b_h, b_g, a_n, a_h, a_g, state_n, state_c, state_w,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, NORMALISE: tl.constexpr,
):  # fmt: skip
    n, unit = (tl.program_id(0) // (2 * H + HV)).to(tl.int64), tl.program_id(0) % (2 * H + HV)
    if unit < 2 * H:
        head, c = unit % H, tl.arange(0, BK)
        channel, inside = unit * K + c, c < K
        column = state + n * state_n + channel.to(tl.int64) * state_c
        if unit < H:
            x, out = q + n * q_n + head * q_h + c, q_out + (n * H + head) * K + c
        else:
            x, out = k + n * k_n + head * k_h + c, k_out + (n * H + head) * K + c
        y = _convolve(x, column, weight, channel, inside, state_w, W)
        if NORMALISE:
            y *= tl.rsqrt(tl.sum(tl.where(inside, y * y, 0.0), 0) + 1e-6)
        tl.store(out, y.to(q_out.dtype.element_ty), mask=inside)
    else:
        # other names than above: Triton wants a name of one type after the branches, and BK may differ from BV
        value_head, d = unit - 2 * H, tl.arange(0, BV)
        key_head, within = value_head // (HV // H), value_head % (HV // H)
        v_channel, v_inside = 2 * H * K + value_head * V + d, d < V
        v_column = state + n * state_n + v_channel.to(tl.int64) * state_c
        token = v + n * v_n + key_head * v_h + within * v_g + d
        written = _convolve(token, v_column, weight, v_channel, v_inside, state_w, W)
        tl.store(v_out + (n * HV + value_head) * V + d, written.to(v_out.dtype.element_ty), mask=v_inside)
        gate = tl.load(a + n * a_n + key_head * a_h + within * a_g).to(tl.float32)
        log_softplus, _ = _log_softplus(gate + tl.load(dt_bias + value_head).to(tl.float32))
        log_decay = tl.load(A_log + value_head).to(tl.float32) + log_softplus
        tl.store(g_out + n * HV + value_head, _decay(log_decay))
        strength = tl.sigmoid(tl.load(b + n * b_n + key_head * b_h + within * b_g).to(tl.float32))
        tl.store(beta_out + n * HV + value_head, strength.to(beta_out.dtype.element_ty))


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    b: Tensor,
    a: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    l2norm: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`qwenlinear.ops.decode_prologue` without its checks."""
    (B, _, H, K), (_, _, _, G, V), W = q.shape, v.shape, weight.shape[2]
    HV = H * G
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    outs = (
        q.new_empty(B, 1, H, K),
        q.new_empty(B, 1, H, K),
        q.new_empty(B, 1, HV, V),
        q.new_empty(B, 1, HV, dtype=torch.float32),
        b.new_empty(B, 1, HV),
    )
    if B:
        (q_n, _, q_h, _), (k_n, _, k_h, _), (v_n, _, v_h, v_g, _) = q.stride(), k.stride(), v.stride()
        (b_n, _, b_h, b_g), (a_n, _, a_h, a_g) = b.stride(), a.stride()
        with on(q.device):
            # everything by its place: names cost the host a look-up each, at every token
            decode_prologue_kernel[(B * (2 * H + HV),)](
                q, k, v, b, a, conv_state, weight.contiguous(), A_log.contiguous(), dt_bias.contiguous(), *outs,
                q_n, q_h, k_n, k_h, v_n, v_h, v_g, b_n, b_h, b_g, a_n, a_h, a_g, *conv_state.stride(),
                H, HV, K, V, W, power_of_two(K), power_of_two(V), l2norm, num_warps=1,
            )  # fmt: skip
    return outs
