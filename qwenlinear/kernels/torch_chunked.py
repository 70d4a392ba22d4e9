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
from qwenlinear.kernels.precision import without_autocast
from qwenlinear.kernels.torch_chunked_backward import backward_block
from qwenlinear.kernels.torch_chunks import LOG_ZERO, Call, Chunks, Columns, split_groups, steps


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
        with without_autocast(q.device):
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
        with without_autocast(q.device):
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
    (H, G), C, V = call.groups, block.size, out.shape[-1]
    chunks = Chunks.cut(call, block)
    writing = chunks.writing()
    both = torch.cat([writing, chunks.attention() @ writing], dim=-2)  # W above, what o has from within the chunk below
    direct = block.whole and out.dtype == call.g.dtype
    buffer = None if direct else call.g.new_empty(block.rows, H * G, C, V)
    outs = block.steps(out.unflatten(2, (H, G))) if buffer is None else buffer.unflatten(1, (H, G)).split(block.counts)
    values = block.steps(call.grouped_v, call.g.dtype)
    scratch = None
    for step, o, v in zip(steps(block, chunks, both, V), outs, values, strict=True):
        if scratch is None or scratch.n != step.n:
            scratch = _Scratch(step.kq, step.n, H, G, V)
        if S is None:
            scratch.values.copy_(v)
        else:
            torch.bmm(step.kq, S, out=scratch.read)
            torch.addcmul(v, step.decay, scratch.keys, value=-1, out=scratch.values)
        torch.bmm(step.writing, scratch.flat_values, out=scratch.both)
        if S is None:
            o.copy_(scratch.within)
        else:
            torch.addcmul(scratch.within, step.decay, scratch.queries, out=o)
        S = step.advance(S, scratch.W, step.later if final is None else step.n, scratch.columns)
        if final is not None and S is not None and step.later < step.n:
            group.put(final, step.later, split_groups(S[step.later * H :], (step.n - step.later, H, G)).flatten(1, 2))
            S = S[: step.later * H]
    if buffer is not None:
        block.join(buffer, out)
    return S


class _Scratch:
    """Memory of a step, with every view of it made once: a step is a handful of small operations, each as short as its call."""

    def __init__(self, kq: Tensor, n: int, H: int, G: int, V: int) -> None:
        self.n, C = n, kq.shape[1] // 2
        self.read = kq.new_empty(n * H, 2 * C, G * V)
        self.keys, self.queries = split_groups(self.read, (n, H, G)).split(C, dim=-2)  # k S and q S
        self.values = kq.new_empty(n, H, G, C, V)
        self.flat_values = self.values.flatten(0, 2)
        self.both = kq.new_empty(n * H * G, 2 * C, V)
        self.W, self.within = self.both.view(n, H, G, 2 * C, V).split(C, dim=-2)
        self.columns = Columns.empty(kq, n, H, G, C, V)


def _merge_heads(states: Tensor, H: int) -> Tensor:
    """``[n, HV, K, V]`` to a copy ``[n, H, K, G V]``."""
    merged = rearrange(states, "n (h g) k v -> n h k (g v)", h=H)
    return merged.clone(memory_format=torch.contiguous_format)


def chunked_gated_delta_rule(*arguments: Any) -> tuple[Tensor, Tensor | None]:
    """:class:`ChunkedGatedDeltaRule` with a type."""
    return cast("tuple[Tensor, Tensor | None]", ChunkedGatedDeltaRule.apply(*arguments))
