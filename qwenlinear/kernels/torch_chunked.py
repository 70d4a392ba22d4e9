"""The chunked gated delta rule in plain PyTorch, with a backward pass of its own that stores a few states and recomputes the rest.

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

from dataclasses import dataclass
from typing import Any, cast

import torch
from einops import rearrange
from torch import Tensor

from qwenlinear.kernels.chunk_layout import Block, ChunkLayout, Group

# exp() of this is zero in every dtype, so clamping changes no value; it keeps -inf (a full reset) from making inf - inf.
_LOG_ZERO = -1e4


@dataclass
class _Call:
    """The tensors of a call as the layout sees them, ``[N, T, heads, ...]``, and its options."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    scale: float
    norm: bool

    @property
    def groups(self) -> tuple[int, int]:
        """H and G."""
        return self.q.shape[2], self.v.shape[2] // self.q.shape[2]


@dataclass
class _Chunks:
    """What the chunks of a block need that does not depend on the state; made alike in the forward and in the backward pass."""

    kq: Tensor  # [rows, H, 2C, K], keys above scaled queries, normalised if asked for
    factor: Tensor | None  # [rows, H, 2C, 1], what normalised (and scaled) kq
    beta: Tensor  # [rows, H, G, C, 1]
    decay: Tensor  # e^c, [rows, H, G, C, 1]
    tail: Tensor  # e^(c_C - c), [rows, H, G, C, 1]
    D: Tensor  # [rows, H, G, C, C], zero above the diagonal
    kqk: Tensor  # kq k^T, [rows, H, 1, 2C, C]
    X: Tensor  # (I + A)^-1, [rows, H, G, C, C]

    @classmethod
    def cut(cls, call: _Call, block: Block) -> _Chunks:
        """Cut a block's tokens into chunks and do everything within a chunk."""
        rows, C, groups, g = block.rows, block.size, call.groups, call.g
        kq, factor = _cut_keys_and_queries(call, block)
        beta = block.cut(call.beta, g.new_empty(rows, g.shape[2], C)).unflatten(1, groups).unsqueeze(-1)
        logs = block.cut(g, g.new_empty(rows, g.shape[2], C, dtype=torch.float64)).unflatten(1, groups)
        c = logs.clamp_(min=_LOG_ZERO).cumsum(-1)
        D = (c.unsqueeze(-1) - c.unsqueeze(-2)).to(g.dtype).exp_().tril_()
        kqk = (kq @ kq[:, :, :C].mT).unsqueeze(2)
        A = (D * kqk[..., :C, :]).mul_(beta)  # its diagonal is ignored below
        eye = torch.eye(C, dtype=g.dtype, device=g.device).expand_as(A)
        X = torch.linalg.solve_triangular(A, eye, upper=False, unitriangular=True)
        decay, tail = (x.to(g.dtype).exp_().unsqueeze(-1) for x in (c, c[..., -1:] - c))
        return cls(kq, factor, beta, decay, tail, D, kqk, X)

    def attention(self) -> Tensor:
        """(q k^T * D), ``[rows, H, G, C, C]``."""
        return self.kqk[..., self.D.shape[-1] :, :] * self.D

    def writing(self) -> Tensor:
        """(I + A)^-1 with beta in its columns, ``[rows, H, G, C, C]``: W is its product with v - e^c (k S)."""
        return self.X * self.beta.mT

    def kept(self, row: slice) -> Tensor:
        """e^c_C of these rows, ``[n, H, 1, G, 1]``: what is kept of the state ``[n, H, K, G, V]`` over a chunk."""
        return self.decay[row, :, :, -1].unsqueeze(2)


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
        call = _Call(*map(layout.fold, (q, k, v, g, beta)), scale, norm)
        keep = any(ctx.needs_input_grad[:6])
        out = torch.empty_like(v, memory_format=torch.contiguous_format)
        number = sum(group.number for group in layout.groups)
        final = g.new_empty(number, v.shape[2], q.shape[3], v.shape[3]) if want_final else None
        before: list[Tensor] = []  # the states before each block that has any
        with torch.autocast(q.device.type, enabled=False):
            for group in layout.groups:
                S = None if state is None else _merge_heads(group.take(state), q.shape[2])
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
        call = _Call(*map(layout.fold, (q, k, v, g, beta)), scale, norm)
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
                    dS = _backward_block(call, block, S, d_out, d_last, dS, folded)
                if d_state is not None and dS is not None:
                    group.put(d_state, 0, _split_heads(dS, d_state.shape[1]))
        grads[3].masked_fill_(g < _LOG_ZERO, 0)
        return (*grads, d_state, None, None, None, None)


def _forward_block(
    call: _Call, group: Group, block: Block, S: Tensor | None, out: Tensor, final: Tensor | None
) -> Tensor | None:
    """Write o of a block, and the final states of sequences that end in it. Takes the incoming states and returns the outgoing."""
    (H, G), C, dtype = call.groups, block.size, call.g.dtype
    chunks = _Chunks.cut(call, block)
    writing, attention = chunks.writing(), chunks.attention()
    direct = block.whole and out.dtype == dtype
    buffer = out if direct else call.g.new_empty(block.rows, H * G, C, out.shape[-1])
    outs = block.steps(out) if direct else buffer.split(block.counts)
    values = block.steps(call.v)
    for (row, n, later), o, v in zip(block.walk(), outs, values, strict=True):
        o, v, read = o.unflatten(1, (H, G)), v.unflatten(1, (H, G)).to(dtype), None
        if S is not None:
            read = _split_groups(chunks.kq[row] @ S[:n], G)  # [n, H, G, 2C, V]
            v = torch.addcmul(v, chunks.decay[row], read[..., :C, :], value=-1)
        W = writing[row] @ v
        if read is None:
            o.copy_(attention[row] @ W)
        else:
            torch.addcmul(attention[row] @ W, chunks.decay[row], read[..., C:, :], out=o)
        S = _advance(chunks, row, S, W, later if final is None else n)
        if final is not None and S is not None:
            group.put(final, later, _split_heads(S[later:], H * G))
            S = S[:later]
    if not direct:
        block.join(buffer, out)
    return S


def _advance(chunks: _Chunks, row: slice, S: Tensor | None, W: Tensor, needed: int) -> Tensor | None:
    """S' of the first ``needed`` of these rows, in the memory of S."""
    if not needed:
        return None
    row, W = slice(row.start, row.start + needed), W[:needed]
    n, H, G, C, V = W.shape
    keys, tail = chunks.kq[row, :, :C].mT, _columns(chunks.tail[row], W)
    if S is None:
        return keys @ tail
    S = S[:needed]
    S.unflatten(-1, (G, V)).mul_(chunks.kept(row))
    S.flatten(0, 1).baddbmm_(keys.flatten(0, 1), tail.flatten(0, 1))
    return S


@dataclass
class _Replay:
    """A block run again: what its gradients need from the scan. The first ``skip`` rows read no state."""

    skip: int
    states: Tensor  # [rows - skip, H, K, G V], incoming
    read: Tensor  # kq S, [rows - skip, H, 2C, G V]
    values: Tensor  # v - e^c (k S), [rows, H, G, C, V]
    W: Tensor  # [rows, H, G, C, V]


def _replay(call: _Call, block: Block, chunks: _Chunks, S: Tensor | None) -> _Replay:
    (H, G), C = call.groups, block.size
    K, V = call.q.shape[3], call.v.shape[3]
    rows, skip = block.rows, block.counts[0] if S is None else 0
    values = block.cut(call.v, call.g.new_empty(rows, H * G, C, V)).unflatten(1, (H, G))
    states, read = values.new_empty(rows - skip, H, K, G * V), values.new_empty(rows - skip, H, 2 * C, G * V)
    W, writing = torch.empty_like(values), chunks.writing()
    for row, n, later in block.walk():
        if S is not None:
            own = slice(row.start - skip, row.stop - skip)
            states[own] = S = S[:n]
            torch.matmul(chunks.kq[row], S, out=read[own])
            values[row].addcmul_(chunks.decay[row], _split_groups(read[own, :, :C], G), value=-1)
        torch.matmul(writing[row], values[row], out=W[row])
        if row.stop < rows:
            S = _advance(chunks, row, S, W[row], later)
    return _Replay(skip, states, read, values, W)


@dataclass
class _Gradients:
    """Gradients of a block's chunks while they are filled in."""

    kq: Tensor  # [rows, H, 2C, K]
    W: Tensor  # [rows, H, G, C, V]
    R: Tensor  # [rows, H, G, C, V], of beta (v - e^c (k S))
    c: Tensor  # [rows, H, G, C]
    read: Tensor  # [rows - skip, H, 2C, G V], of what keys (above) and queries (below) read from the state


def _backward_block(
    call: _Call,
    block: Block,
    S: Tensor | None,
    d_out: Tensor | None,
    d_final: Tensor | None,
    dS: Tensor | None,
    grads: list[Tensor],
) -> Tensor | None:
    """Write the gradients of a block's tokens.

    ``S`` are the states before the block, ``d_final`` the gradients of the group's final states, ``dS`` those of the states after
    the block as far as they have any. Returns the gradients of S.
    """
    chunks = _Chunks.cut(call, block)
    run = _replay(call, block, chunks, S)
    d_chunk = torch.zeros_like(run.values)
    if d_out is not None:
        block.cut(d_out, d_chunk.flatten(1, 2))
    d = _Gradients(
        kq=torch.zeros_like(chunks.kq),
        W=chunks.attention().mT @ d_chunk,
        R=torch.empty_like(run.W),
        c=torch.zeros_like(chunks.beta).squeeze(-1),
        read=torch.empty_like(run.read),
    )
    dS = _scan_backward(block, chunks, run, d_chunk, d_final, dS, d)
    d_beta = (d.R * run.values).sum(-1) + _backward_within(chunks, run.W, d_chunk, d)
    d_keys, d_queries = _backward_of_cut(chunks, d.kq, call.scale).chunk(2, dim=2)
    d_logs = d.c.flip(-1).cumsum(-1).flip(-1)
    parts = (d_queries, d_keys, *(x.flatten(1, 2) for x in (d.R.mul_(chunks.beta), d_logs, d_beta)))
    for part, whole in zip(parts, grads, strict=True):
        block.join(part, whole)
    return dS


def _scan_backward(
    block: Block,
    chunks: _Chunks,
    run: _Replay,
    d_out: Tensor,
    d_final: Tensor | None,
    dS: Tensor | None,
    d: _Gradients,
) -> Tensor | None:
    """Run a block's steps backwards: fill in what flows through the states, return the gradient of those before the block."""
    C, G, skip = block.size, run.W.shape[2], run.skip
    torch.mul(chunks.decay[skip:], d_out[skip:], out=_split_groups(d.read[:, :, C:], G))
    for row, n, _ in reversed(block.walk()):
        if d_final is not None:  # sequences that end here have their final state's gradient
            dS = d_final[:n] if dS is None else torch.cat([dS, d_final[len(dS) : n]])
        if dS is not None:
            _backward_of_writes(chunks, slice(row.start, row.start + len(dS)), dS, run.W, d)
        torch.matmul(chunks.X[row].mT, d.W[row], out=d.R[row])
        if row.start < skip:  # the first step read nothing
            dS = None
            break
        own = slice(row.start - skip, row.stop - skip)
        torch.mul(d.R[row] * chunks.beta[row], -chunks.decay[row], out=_split_groups(d.read[own, :, :C], G))
        before = chunks.kq[row].mT @ d.read[own]
        if dS is not None:
            after = slice(row.start, row.start + len(dS))
            kept = (dS.unflatten(-1, (G, -1)) * chunks.kept(after)).flatten(-2)
            before[: len(dS)].add_(kept)
            d.c[after, :, :, -1] += (kept * run.states[own][: len(dS)]).sum(2).unflatten(-1, (G, -1)).sum(-1)
        dS = before
    d.kq[skip:] += d.read @ run.states.mT
    d.c[skip:] += (d.read * run.read).unflatten(-1, (G, -1)).sum(-1).unflatten(2, (2, C)).sum(2).transpose(2, 3)
    return dS


def _backward_of_writes(chunks: _Chunks, row: slice, dS: Tensor, W: Tensor, d: _Gradients) -> None:
    """From the gradient of S' = e^c_C S + k^T (e^(c_C - c) W) to k, W and c."""
    C, G = W.shape[-2], W.shape[2]
    keys, tail = chunks.kq[row, :, :C], chunks.tail[row]
    d_W = tail * _split_groups(keys @ dS, G)
    d.W[row] += d_W
    d.kq[row, :, :C] += _columns(tail, W[row]) @ dS.mT
    d_log = (d_W * W[row]).sum(-1)
    d.c[row] -= d_log
    d.c[row, :, :, -1] += d_log.sum(-1)


def _backward_within(chunks: _Chunks, W: Tensor, d_out: Tensor, d: _Gradients) -> Tensor:
    """From the gradients of o and R, through the C x C matrices of a chunk, to kq and c; returns the share of beta."""
    C = W.shape[-2]
    keys_keys, queries_keys = chunks.kqk[..., :C, :], chunks.kqk[..., C:, :]
    d_queries = (d_out @ W.mT).mul_(chunks.D)
    d_A = (d.R @ W.mT).neg_().mul_(chunks.D).tril_(-1)
    d_beta = d_A * keys_keys
    d_log = torch.addcmul(d_queries * queries_keys, d_beta, chunks.beta)
    d.c += d_log.sum(-1)
    d.c -= d_log.sum(-2)
    d_kqk = torch.cat([(d_A * chunks.beta).sum(2), d_queries.sum(2)], dim=2)  # [rows, H, 2C, C]
    d.kq += d_kqk @ chunks.kq[:, :, :C]
    d.kq[:, :, :C] += d_kqk.mT @ chunks.kq
    return d_beta.sum(-1)


def _cut_keys_and_queries(call: _Call, block: Block) -> tuple[Tensor, Tensor | None]:
    """kq ``[rows, H, 2C, K]`` and what normalised it, ``[rows, H, 2C, 1]``: 1 / norm for keys, scale / norm for queries."""
    C, (H, _), K = block.size, call.groups, call.q.shape[3]
    kq = call.g.new_empty(block.rows, H, 2 * C, K)
    if not call.norm:
        block.cut(call.k, kq[:, :, :C])
        block.cut(call.q, kq[:, :, C:]).mul_(call.scale)
        return kq, None
    factor = call.g.new_empty(block.rows, H, 2 * C, 1)
    for x, part, scale in ((call.k, slice(C), 1.0), (call.q, slice(C, None), call.scale)):
        tokens = block.tokens(x)
        norm = torch.linalg.vector_norm(tokens, dim=-1, keepdim=True, dtype=kq.dtype)
        own = block.as_tokens(factor[:, :, part])
        torch.mul(torch.rsqrt(norm.square_().add_(1e-6)), scale, out=own)
        torch.mul(tokens, own, out=block.as_tokens(kq[:, :, part]))
    return kq, factor


def _backward_of_cut(chunks: _Chunks, d_kq: Tensor, scale: float) -> Tensor:
    """From the gradient of kq to that of the keys and queries as they came."""
    C = d_kq.shape[2] // 2
    if chunks.factor is None:
        d_kq[:, :, C:] *= scale
        return d_kq
    along = (d_kq * chunks.kq).sum(-1, keepdim=True)
    along[:, :, C:] *= scale**-2 if scale else 0.0  # kq holds scale times the unit vector there
    return torch.addcmul(d_kq, along, chunks.kq, value=-1).mul_(chunks.factor)


def _merge_heads(states: Tensor, H: int) -> Tensor:
    """``[n, HV, K, V]`` to a copy ``[n, H, K, G V]``."""
    merged = rearrange(states, "n (h g) k v -> n h k (g v)", h=H)
    return merged.clone(memory_format=torch.contiguous_format)


def _split_heads(states: Tensor, HV: int) -> Tensor:
    """``[n, H, K, G V]`` to ``[n, HV, K, V]``."""
    return _split_groups(states, HV // states.shape[1]).flatten(1, 2)


def _split_groups(x: Tensor, G: int) -> Tensor:
    """A view of ``[n, H, rows, G V]`` as ``[n, H, G, rows, V]``."""
    return x.unflatten(-1, (G, -1)).transpose(2, 3)


def _columns(factor: Tensor, x: Tensor) -> Tensor:
    """factor times x ``[n, H, G, C, V]``, laid out as ``[n, H, C, G V]``."""
    n, H, G, C, V = x.shape
    out = x.new_empty(n, H, C, G * V)
    torch.mul(factor, x, out=_split_groups(out, G))
    return out


def chunked_gated_delta_rule(*arguments: Any) -> tuple[Tensor, Tensor | None]:
    """:class:`ChunkedGatedDeltaRule` with a type."""
    return cast("tuple[Tensor, Tensor | None]", ChunkedGatedDeltaRule.apply(*arguments))
