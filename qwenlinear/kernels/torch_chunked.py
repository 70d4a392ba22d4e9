"""The chunked gated delta rule in plain PyTorch, with a backward pass of its own that stores only the states between chunks.

For one chunk of C tokens and one value head, with cumulative log-decay c, incoming state S, and q already scaled:

    D[i,j] = exp(c_i - c_j) for i >= j            A = strictly lower part of  beta_i (k_i . k_j) D[i,j]
    W      = (I + A)^-1  beta (v - e^c (k S))     the values that are written       ("WY", Yang et al. arXiv:2406.06484)
    o      = e^c (q S) + (q k^T * D) W
    S'     = e^c_C S + k^T (e^(c_C - c) W)

Keys and queries lie stacked as kq ``[rows, H, 2C, K]`` and the G = HV / H value heads of a key head side by side in the
columns of S ``[N, H, K, G V]``: one product reads the state for all of them and no key is repeated. Decays are summed and
subtracted in float64 (one strong decay must not drown the weak ones behind it) and exponentiated only as differences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from einops import rearrange
from torch import Tensor

from qwenlinear.kernels.chunk_layout import ChunkLayout

# exp() of this is zero in every dtype, so clamping changes no value; it keeps -inf (a full reset) from making inf - inf.
_LOG_ZERO = -1e4


@dataclass
class _Chunks:
    """What a chunk needs that does not depend on the state; made alike in the forward and in the backward pass."""

    kq: Tensor  # [rows, H, 2C, K], keys above scaled queries, normalised if asked for
    norm: Tensor | None  # [rows, H, 2C, 1], the factor that normalised (and scaled) kq
    v: Tensor  # [rows, H, G, C, V]
    beta: Tensor  # [rows, H, G, C, 1]
    decay: Tensor  # e^c, [rows, H, G, C, 1]
    tail: Tensor  # e^(c_C - c), [rows, H, G, C, 1]
    D: Tensor  # [rows, H, G, C, C], zero above the diagonal
    kqk: Tensor  # kq k^T, [rows, H, 1, 2C, C]
    X: Tensor  # (I + A)^-1, [rows, H, G, C, C]

    @classmethod
    def cut(
        cls, layout: ChunkLayout, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float, norm: bool
    ) -> _Chunks:
        """Cut the tokens into chunks and do everything within a chunk."""
        rows, C, dtype = layout.rows, layout.size, g.dtype
        H, K, HV, V = q.shape[2], q.shape[3], v.shape[2], v.shape[3]
        kq = g.new_empty(rows, H, 2 * C, K)
        layout.cut(k, kq[:, :, :C])
        layout.cut(q, kq[:, :, C:])
        factor = _normaliser(kq, scale) if norm else None
        if factor is not None:
            kq.mul_(factor)
        else:
            kq[:, :, C:].mul_(scale)
        groups = (H, HV // H)
        values = layout.cut(v, g.new_empty(rows, HV, C, V)).unflatten(1, groups)
        writes = layout.cut(beta, g.new_empty(rows, HV, C)).unflatten(1, groups).unsqueeze(-1)
        logs = layout.cut(g, g.new_empty(rows, HV, C, dtype=torch.float64)).unflatten(1, groups)
        c = logs.clamp_(min=_LOG_ZERO).cumsum(-1)
        upper = torch.full((C, C), -torch.inf, dtype=dtype, device=g.device).triu_(1)
        D = (c.unsqueeze(-1) - c.unsqueeze(-2)).to(dtype).add_(upper).exp_()
        kqk = (kq @ kq[:, :, :C].mT).unsqueeze(2)
        A = (D * kqk[..., :C, :]).mul_(writes)
        eye = torch.eye(C, dtype=dtype, device=g.device).expand_as(A)
        X = torch.linalg.solve_triangular(A, eye, upper=False, unitriangular=True)
        decay, tail = (x.to(dtype).exp_().unsqueeze(-1) for x in (c, c[..., -1:] - c))
        return cls(kq, factor, values, writes, decay, tail, D, kqk, X)

    def attention(self) -> Tensor:
        """(q k^T * D), ``[rows, H, G, C, C]``."""
        return self.kqk[..., self.D.shape[-1] :, :] * self.D


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
        with torch.autocast(q.device.type, enabled=False):
            chunks = _Chunks.cut(layout, q, k, v, g, beta, scale, norm)
            S = None if state is None else _merge_groups(layout.ranked(state), q.shape[2])
            keep = any(ctx.needs_input_grad[:6])
            out, final, states = _scan(chunks, S, want_final, keep, layout)
            ctx.save_for_backward(q, k, v, g, beta, state, states)
            return layout.join(out.flatten(1, 2), q), _give_back(final, v.shape[2], layout)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_out: Tensor | None, d_final: Tensor | None) -> tuple[Tensor | None, ...]:
        scale, norm, layout = ctx.options
        q, k, v, g, beta, state, states = ctx.saved_tensors
        with torch.autocast(q.device.type, enabled=False):
            chunks = _Chunks.cut(layout, q, k, v, g, beta, scale, norm)
            d_chunk = torch.zeros_like(chunks.v)
            if d_out is not None:
                layout.cut(d_out, d_chunk.flatten(1, 2))
            d_final = None if d_final is None else _merge_groups(layout.ranked(d_final), q.shape[2])
            (d_kq, d_v, d_g, d_b), dS = _scan_backward(chunks, states, d_chunk, d_final, state is not None, layout)
            d_kq = _backward_of_cut(chunks, d_kq, scale)
            d_k, d_q = (layout.join(x, q) for x in d_kq.chunk(2, dim=2))
            d_v = layout.join(d_v.flatten(1, 2), v)
            d_beta = layout.join(d_b.flatten(1, 2), beta)
            d_g = layout.join(d_g.flatten(1, 2), g).masked_fill_(g < _LOG_ZERO, 0)
            d_state = _give_back(dS, v.shape[2], layout) if ctx.needs_input_grad[5] else None
        return d_q, d_k, d_v, d_g, d_beta, d_state, None, None, None, None


def _scan(
    chunks: _Chunks, S: Tensor | None, want_final: bool, keep: bool, layout: ChunkLayout
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Advance all sequences chunk by chunk. Returns o by chunk, final states by rank, and the incoming states of the rows."""
    C, counts, starts = layout.size, layout.counts, layout.starts
    rows, H, G, _, V = chunks.v.shape
    K = chunks.kq.shape[-1]
    out = torch.empty_like(chunks.v)
    attention = chunks.attention()
    first = 0 if S is not None else counts[0]  # the first row with a state
    states = out.new_empty(rows - first, H, K, G * V) if keep else None
    final = out.new_empty(counts[0], H, K, G * V) if want_final else None
    for step, (start, n) in enumerate(zip(starts, counts, strict=True)):
        row = slice(start, start + n)
        values, carried = chunks.v[row], None
        if S is not None:
            S = S[:n]
            if states is not None:
                states[start - first : start - first + n] = S
            carried = _split_groups(chunks.kq[row] @ S, G)  # [n, H, G, 2C, V]
            values = values - chunks.decay[row] * carried[..., :C, :]
        W = chunks.X[row] @ (chunks.beta[row] * values)
        torch.matmul(attention[row], W, out=out[row])
        if carried is not None:
            out[row].addcmul_(chunks.decay[row], carried[..., C:, :])
        later = counts[step + 1] if step + 1 < len(counts) else 0
        needed = n if want_final else later
        if needed:
            S = _advance(chunks, slice(start, start + needed), None if S is None else S[:needed], W[:needed])
            if final is not None:
                final[later:n] = S[later:]
    return out, final, states


def _advance(chunks: _Chunks, row: slice, S: Tensor | None, W: Tensor) -> Tensor:
    """S' of these rows, ``[n, H, K, G V]``."""
    C = W.shape[-2]
    written = chunks.kq[row, :, :C].mT @ _columns(chunks.tail[row], W)
    return written if S is None else torch.addcmul(written, _last_decay(chunks, row), S)


@dataclass
class _Gradients:
    """Gradients by chunk while the backward scan fills them in."""

    kq: Tensor  # [rows, H, 2C, K]
    W: Tensor  # [rows, H, G, C, V]
    R: Tensor  # [rows, H, G, C, V], of beta (v - e^c (k S))
    g: Tensor  # [rows, H, G, C]
    read: Tensor  # [rows - first, H, 2C, G V], of what keys (above) and queries (below) read from the state


def _scan_backward(
    chunks: _Chunks, states: Tensor, d_out: Tensor, d_final: Tensor | None, from_state: bool, layout: ChunkLayout
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """Gradients of kq, v, g and beta by chunk, and of the initial states by rank.

    The gradient of a decay is summed from exactly the terms that hold it, never as a difference of larger sums: behind strong
    decays it is many orders smaller than they are.

    ``states`` are the incoming states of the rows from ``first`` on: of all rows where the call had a state, of those after
    step 0 where it started from zeros.
    """
    C, counts, starts = layout.size, layout.counts, layout.starts
    rows, H, G, _, V = chunks.v.shape
    first = 0 if from_state else counts[0]
    carried = chunks.kq[first:] @ states  # [rows - first, H, 2C, G V]
    values = chunks.v.clone()
    values[first:].addcmul_(chunks.decay[first:], _split_groups(carried[:, :, :C], G), value=-1)
    W = chunks.X @ (chunks.beta * values)
    d = _Gradients(
        kq=torch.zeros_like(chunks.kq),
        W=chunks.attention().mT @ d_out,
        R=torch.empty_like(W),
        g=W.new_zeros(rows, H, G, C),
        read=torch.empty_like(carried),
    )
    torch.mul(chunks.decay[first:], d_out[first:], out=_split_groups(d.read[:, :, C:], G))
    dS: Tensor | None = None  # of the states after this step, by rank, as far as they have a gradient
    for start, n in zip(reversed(starts), reversed(counts), strict=True):
        row = slice(start, start + n)
        if d_final is not None:  # sequences that end here have their final state's gradient
            dS = d_final[:n] if dS is None else torch.cat([dS, d_final[len(dS) : n]])
        if dS is not None:
            _backward_of_writes(chunks, slice(start, start + len(dS)), dS, W, d)
        torch.matmul(chunks.X[row].mT, d.W[row], out=d.R[row])
        if start < first:  # the first step read nothing
            dS = None
            break
        read = slice(start - first, start - first + n)
        torch.mul(d.R[row] * chunks.beta[row], -chunks.decay[row], out=_split_groups(d.read[read, :, :C], G))
        before = chunks.kq[row].mT @ d.read[read]
        if dS is not None:
            after = slice(start, start + len(dS))
            kept = _last_decay(chunks, after)
            before[: len(dS)].addcmul_(kept, dS)
            d.g[after] += (kept * dS * states[read][: len(dS)]).sum(2).unflatten(-1, (G, V)).sum(-1).unsqueeze(-1)
        dS = before
    d.kq[first:] += d.read @ states.mT
    d_log = (d.read * carried).unflatten(-1, (G, V)).sum(-1).unflatten(2, (2, C)).sum(2).transpose(2, 3)
    d.g[first:] += d_log.flip(-1).cumsum(-1).flip(-1)  # e^c_i holds the decays of all tokens up to i
    d_beta = (d.R * values).sum(-1) + _backward_within(chunks, W, d_out, d)
    return (d.kq, d.R.mul_(chunks.beta), d.g, d_beta), dS


def _backward_of_writes(chunks: _Chunks, row: slice, dS: Tensor, W: Tensor, d: _Gradients) -> None:
    """From the gradient of S' = e^c_C S + k^T (e^(c_C - c) W) to k, W and, through the second decay, g."""
    C, G = W.shape[-2], W.shape[2]
    keys, tail = chunks.kq[row, :, :C], chunks.tail[row]
    d_W = tail * _split_groups(keys @ dS, G)
    d.W[row] += d_W
    d.kq[row, :, :C] += _columns(tail, W[row]) @ dS.mT
    d_log = (d_W * W[row]).sum(-1)
    d.g[row, :, :, 1:] += d_log[..., :-1].cumsum(-1)  # e^(c_C - c_j) holds the decays of all tokens behind j


def _backward_within(chunks: _Chunks, W: Tensor, d_out: Tensor, d: _Gradients) -> Tensor:
    """From the gradients of o and R, through the C x C matrices of a chunk, to kq and g; returns the share of beta."""
    C = W.shape[-2]
    keys_keys, queries_keys = chunks.kqk[..., :C, :], chunks.kqk[..., C:, :]
    d_queries = (d_out @ W.mT).mul_(chunks.D)
    d_A = (d.R @ W.mT).neg_().mul_(chunks.D).tril_(-1)
    d_beta = d_A * keys_keys
    d_log = torch.addcmul(d_queries * queries_keys, d_beta, chunks.beta)  # of log D; its diagonal is constant
    behind = torch.ones(C, C, dtype=W.dtype, device=W.device).triu_(1)
    d.g += (d_log @ behind).tril_().sum(-2)  # D[i, j] holds the decays of the tokens in (j, i]
    d_kqk = torch.cat([(d_A * chunks.beta).sum(2), d_queries.sum(2)], dim=2)  # [rows, H, 2C, C]
    d.kq += d_kqk @ chunks.kq[:, :, :C]
    d.kq[:, :, :C] += d_kqk.mT @ chunks.kq
    return d_beta.sum(-1)


def _normaliser(kq: Tensor, scale: float) -> Tensor:
    """``[rows, H, 2C, 1]``: what l2norm multiplies keys and queries with, queries also with scale."""
    factor = torch.rsqrt(kq.square().sum(-1, keepdim=True) + 1e-6)
    factor[:, :, factor.shape[2] // 2 :] *= scale
    return factor


def _backward_of_cut(chunks: _Chunks, d_kq: Tensor, scale: float) -> Tensor:
    """From the gradient of kq to that of the keys and queries as they came."""
    C = d_kq.shape[2] // 2
    if chunks.norm is None:
        d_kq[:, :, C:] *= scale
        return d_kq
    along = (d_kq * chunks.kq).sum(-1, keepdim=True)
    along[:, :, C:] *= scale**-2 if scale else 0.0  # kq holds scale times the unit vector there
    return torch.addcmul(d_kq, along, chunks.kq, value=-1).mul_(chunks.norm)


def _merge_groups(state: Tensor, H: int) -> Tensor:
    """``[N, HV, K, V]`` to ``[N, H, K, G V]``."""
    grouped = rearrange(state, "n (h g) k v -> n h k (g v)", h=H)
    return grouped.contiguous()


def _give_back(state: Tensor | None, HV: int, layout: ChunkLayout) -> Tensor | None:
    """``[N, H, K, G V]`` by rank to ``[N, HV, K, V]`` in the caller's order."""
    if state is None:
        return None
    return layout.unranked(_split_groups(state, HV // state.shape[1]).flatten(1, 2)).contiguous()


def _split_groups(x: Tensor, G: int) -> Tensor:
    """A view of ``[n, H, rows, G V]`` as ``[n, H, G, rows, V]``."""
    return x.view(*x.shape[:-1], G, x.shape[-1] // G).transpose(2, 3)


def _columns(factor: Tensor, x: Tensor) -> Tensor:
    """factor times x ``[n, H, G, C, V]``, laid out as ``[n, H, C, G V]``."""
    n, H, G, C, V = x.shape
    out = x.new_empty(n, H, C, G * V)
    torch.mul(factor, x, out=_split_groups(out, G))
    return out


def _last_decay(chunks: _Chunks, row: slice) -> Tensor:
    """e^c_C of these rows, ``[n, H, 1, G V]``: what is kept of the state over a chunk."""
    return chunks.decay[row, :, :, -1].expand(-1, -1, -1, chunks.v.shape[-1]).flatten(2).unsqueeze(2)


def chunked_gated_delta_rule(*arguments: Any) -> tuple[Tensor, Tensor | None]:
    """:class:`ChunkedGatedDeltaRule` with a type."""
    return cast("tuple[Tensor, Tensor | None]", ChunkedGatedDeltaRule.apply(*arguments))
