"""The chunked gated delta rule in plain PyTorch, with a backward pass of its own that stores little and recomputes the rest.

For one chunk of C tokens and one value head, with cumulative log-decay c, incoming state S, and q already scaled:

    D[i,j] = exp(c_i - c_j) for i >= j            A = strictly lower part of  beta_i (k_i . k_j) D[i,j]
    W      = (I + A)^-1  beta (v - e^c (k S))     the values that are written       ("WY", Yang et al. arXiv:2406.06484)
    o      = e^c (q S) + (q k^T * D) W
    S'     = e^c_C S + k^T (e^(c_C - c) W)

Keys and queries lie stacked as kq ``[rows, H, 2C, K]`` and the G = HV / H value heads of a key head side by side in the
columns of S ``[n, H, K, G V]``: one product reads the state for all of them and no key is repeated. Decays are summed and
subtracted in float64 (one strong decay must not drown the weak ones behind it) and exponentiated only as differences.

Chunks are worked on in blocks (:mod:`chunk_layout`) so that what happens within a chunk never leaves the caches and takes the
same memory for any number of tokens. The backward pass is given the state before each block and runs the block again.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from einops import rearrange
from torch import Tensor

from qwenlinear.kernels.chunk_layout import Block, ChunkLayout, Group
from qwenlinear.kernels.torch_chunked_backward import backward_block
from qwenlinear.kernels.torch_chunks import LOG_ZERO, Call, Chunks, split_groups, steps


class ChunkedGatedDeltaRule(torch.autograd.Function):
    """Forward and backward over a :class:`ChunkLayout`; arguments as in the kernel call, ``state`` may be None."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        state: Tensor | None,
        scale: float,
        norm: bool,
        want_final: bool,
        layout: ChunkLayout,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        ctx.options = (scale, norm, layout)
        call = Call(layout, q, k, v, g, beta, scale, norm)
        keep = any(ctx.needs_input_grad[:6])
        out = torch.empty_like(v, memory_format=torch.contiguous_format)
        number = sum(group.number for group in layout.groups)
        final = g.new_empty(number, v.shape[2], q.shape[3], v.shape[3]) if want_final else None
        before: list[Tensor] = []  # the states before each block that has any
        with torch.autocast(q.device.type, enabled=False):
            for group in layout.groups:
                S = None if state is None else _merge_heads(group.take(state), q.shape[2]).flatten(0, 1)
                for block in group.blocks:
                    if keep and S is not None:
                        before.append(S.clone())
                    S = _forward_block(call, group, block, S, layout.fold(out), final)
        ctx.save_for_backward(q, k, v, g, beta, state, *before)
        return out, final

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_out: Tensor | None, d_final: Tensor | None) -> tuple[Tensor | None, ...]:
        scale, norm, layout = ctx.options
        q, k, v, g, beta, state, *before = ctx.saved_tensors
        call = Call(layout, q, k, v, g, beta, scale, norm)
        grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, g, beta)]
        folded = [layout.fold(x) for x in grads]
        d_out = None if d_out is None else layout.fold(d_out)
        d_state = torch.zeros_like(state) if ctx.needs_input_grad[5] else None
        with torch.autocast(q.device.type, enabled=False):
            for group in reversed(layout.groups):
                d_last = None if d_final is None else _merge_heads(group.take(d_final), q.shape[2])
                dS: Tensor | None = None
                for block in reversed(group.blocks):
                    S = None if block.first and state is None else before.pop()
                    dS = backward_block(call, block, S, d_out, d_last, dS, folded)
                if d_state is not None and dS is not None:
                    group.put(d_state, 0, split_groups(dS, (len(dS), *call.groups)).flatten(1, 2))
        grads[3].masked_fill_(g < LOG_ZERO, 0)
        return (*grads, d_state, None, None, None, None)


def _forward_block(
    call: Call, group: Group, block: Block, S: Tensor | None, out: Tensor, final: Tensor | None
) -> Tensor | None:
    """Write o of a block and the final states of sequences that end in it; from the incoming states to the outgoing ones."""
    (H, G), C, dtype = call.groups, block.size, call.g.dtype
    chunks = Chunks.cut(call, block)
    attention = chunks.attention().flatten(0, 2).split([n * H * G for n in block.counts])
    direct = block.whole and out.dtype == dtype
    buffer = out if direct else call.g.new_empty(block.rows, H * G, C, out.shape[-1])
    outs = block.steps(out) if direct else buffer.split(block.counts)
    values = block.steps(call.v)
    for step, o, v, attend in zip(steps(block, chunks), outs, values, attention, strict=True):
        shape, read = (step.n, H, G, C, v.shape[-1]), None
        o, v = o.view(shape), v.view(shape).to(dtype)
        if S is not None:
            read = split_groups(torch.bmm(step.kq, S[: len(step.kq)]), (step.n, H, G))
            v = torch.addcmul(v, step.decay, read.narrow(3, 0, C), value=-1)
        W = torch.bmm(step.writing, v.reshape(-1, *shape[3:]))
        intra = torch.bmm(attend, W).view(shape)
        if read is None:
            o.copy_(intra)
        else:
            torch.addcmul(intra, step.decay, read.narrow(3, C, C), out=o)
        S = step.advance(S, W, step.later if final is None else step.n)
        if final is not None and S is not None and step.later < step.n:
            ended = split_groups(S[step.later * H :], (step.n - step.later, H, G)).flatten(1, 2)
            group.put(final, step.later, ended)
            S = S[: step.later * H]
    if not direct:
        block.join(buffer, out)
    return S


def _merge_heads(states: Tensor, H: int) -> Tensor:
    """``[n, HV, K, V]`` to a copy ``[n, H, K, G V]``."""
    merged = rearrange(states, "n (h g) k v -> n h k (g v)", h=H)
    return merged.clone(memory_format=torch.contiguous_format)


def chunked_gated_delta_rule(*arguments: Any) -> tuple[Tensor, Tensor | None]:
    """:class:`ChunkedGatedDeltaRule` with a type."""
    return cast("tuple[Tensor, Tensor | None]", ChunkedGatedDeltaRule.apply(*arguments))
