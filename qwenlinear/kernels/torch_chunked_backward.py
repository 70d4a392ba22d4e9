"""The backward pass of one block of the chunked gated delta rule: run it again, then its gradients from last to first step.

The formulas of the forward pass are in :mod:`torch_chunked`; ``d_x`` is the gradient of x.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qwenlinear.kernels.chunk_layout import Block
from qwenlinear.kernels.torch_chunks import Call, Chunks, Columns, split_groups, steps


@dataclass
class _Replay:
    """A block run again: what its gradients need from the scan. The first ``skip`` rows read no state."""

    skip: int
    states: Tensor  # [rows - skip, H, K, G V], incoming
    read: Tensor  # kq S, [rows - skip, H, 2C, G V]
    values: Tensor  # v - e^c (k S), [rows, H, G, C, V]
    W: Tensor  # [rows, H, G, C, V]


def _replay(call: Call, block: Block, chunks: Chunks, S: Tensor | None) -> _Replay:
    (H, G), C, counts = call.groups, block.size, block.counts
    K, V = call.q.shape[3], call.v.shape[3]
    rows, skip = block.rows, counts[0] if S is None else 0
    values = block.cut(call.v, call.g.new_empty(rows, H * G, C, V)).unflatten(1, (H, G))
    states, read = values.new_empty(rows - skip, H, K, G * V), values.new_empty(rows - skip, H, 2 * C, G * V)
    W, row, scratch = torch.empty_like(values), 0, Columns.empty(values, counts[0], H, G, C, V)
    if S is not None:
        S = S.clone()  # it advances in place, and what autograd saved serves a second backward pass too
    for step in steps(block, chunks, chunks.writing(), V):
        if step.n != scratch.split.shape[0]:
            scratch = Columns.empty(values, step.n, H, G, C, V)
        own, carried = slice(row, row + step.n), slice(row - skip, row - skip + step.n)
        row += step.n
        if S is not None:
            S = S[: step.n * H]
            states[carried].flatten(0, 1).copy_(S)
            torch.bmm(step.kq, S, out=read[carried].flatten(0, 1))
            keys = split_groups(read[carried, :, :C], (step.n, H, G))
            values[own].addcmul_(step.decay, keys, value=-1)
        torch.bmm(step.writing, values[own].flatten(0, 2), out=W[own].flatten(0, 2))
        if row < rows:
            S = step.advance(S, W[own], step.later, scratch)
    return _Replay(skip, states, read, values, W)


@dataclass
class _Gradients:
    """Gradients of a block's chunks while they are filled in."""

    kq: Tensor  # [rows, H, 2C, K]
    W: Tensor  # [rows, H, G, C, V]
    R: Tensor  # [rows, H, G, C, V], of beta (v - e^c (k S))
    g: Tensor  # [rows, H, G, C]
    read: Tensor  # [rows - skip, H, 2C, G V], of what keys (above) and queries (below) read from the state


def backward_block(
    call: Call,
    block: Block,
    S: Tensor | None,
    d_out: Tensor | None,
    d_final: Tensor | None,
    dS: Tensor | None,
    grads: list[Tensor],
) -> Tensor | None:
    """Write the gradients of a block's tokens.

    ``S`` are the states before the block, ``d_final`` the gradients of the group's final states, ``dS`` those of the states after
    the block as far as they have any. Returns the gradients of S. The gradient of a decay is summed from exactly the terms that
    hold it, never as a difference of larger sums: behind strong decays it is many orders smaller than they are.
    """
    chunks = Chunks.cut(call, block)
    run = _replay(call, block, chunks, S)
    d_chunk = torch.zeros_like(run.values)
    if d_out is not None:
        block.cut(d_out, d_chunk.flatten(1, 2))
    d = _Gradients(
        kq=torch.zeros_like(chunks.kq),
        W=chunks.attention().mT @ d_chunk,
        R=torch.empty_like(run.W),
        g=torch.zeros_like(chunks.beta).squeeze(-1),
        read=torch.empty_like(run.read),
    )
    dS = _scan_backward(block, chunks, run, d_chunk, d_final, dS, d)
    d_beta = (d.R * run.values).sum(-1) + _backward_within(chunks, run.W, d_chunk, d)
    d_keys, d_queries = _backward_of_cut(chunks, d.kq, call.scale).chunk(2, dim=2)
    parts = (d_queries, d_keys, *(x.flatten(1, 2) for x in (d.R.mul_(chunks.beta), d.g, d_beta)))
    for part, whole in zip(parts, grads, strict=True):
        block.join(part, whole)
    return dS


def _scan_backward(
    block: Block,
    chunks: Chunks,
    run: _Replay,
    d_out: Tensor,
    d_final: Tensor | None,
    dS: Tensor | None,
    d: _Gradients,
) -> Tensor | None:
    """Run a block's steps backwards: fill in what flows through the states, return the gradient of those before the block."""
    (rows, H, G, C, _), skip = run.W.shape, run.skip
    torch.mul(chunks.decay[skip:], d_out[skip:], out=split_groups(d.read[:, :, C:], (rows - skip, H, G)))
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
        torch.mul(d.R[row] * chunks.beta[row], -chunks.decay[row], out=split_groups(d.read[own, :, :C], (n, H, G)))
        before = chunks.kq[row].mT @ d.read[own]
        if dS is not None:
            after = slice(row.start, row.start + len(dS))
            columns = chunks.decay[after, :, :, -1].expand(-1, -1, -1, dS.shape[-1] // G).flatten(-2)
            kept = dS * columns.unsqueeze(2)
            before[: len(dS)].add_(kept)
            d.g[after] += (kept * run.states[own][: len(dS)]).sum(2).unflatten(-1, (G, -1)).sum(-1, keepdim=True)
        dS = before
    d.kq[skip:] += d.read @ run.states.mT
    d_log = d.read.mul_(run.read).unflatten(-1, (G, -1)).sum(-1).unflatten(2, (2, C)).sum(2).transpose(2, 3)
    d.g[skip:] += d_log.flip(-1).cumsum(-1).flip(-1)  # e^c_i holds the decays of all tokens up to i
    return dS


def _backward_of_writes(chunks: Chunks, row: slice, dS: Tensor, W: Tensor, d: _Gradients) -> None:
    """From the gradient of S' = e^c_C S + k^T (e^(c_C - c) W) to k, W and g."""
    _, H, G, C, _ = W.shape
    keys, tail = chunks.kq[row, :, :C], chunks.tail[row]
    d_W = tail * split_groups(keys @ dS, (len(dS), H, G))
    d.W[row] += d_W
    columns = Columns.empty(W, len(dS), H, G, C, W.shape[-1])
    torch.mul(tail, W[row], out=columns.split)
    d.kq[row, :, :C] += columns.merged.unflatten(0, (-1, H)) @ dS.mT
    d_log = (d_W * W[row]).sum(-1)
    d.g[row, :, :, 1:] += d_log[..., :-1].cumsum(-1)  # e^(c_C - c_j) holds the decays of all tokens behind j


def _backward_within(chunks: Chunks, W: Tensor, d_out: Tensor, d: _Gradients) -> Tensor:
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


def _backward_of_cut(chunks: Chunks, d_kq: Tensor, scale: float) -> Tensor:
    """From the gradient of kq to that of the keys and queries as they came."""
    C = d_kq.shape[2] // 2
    if chunks.factor is None:
        d_kq[:, :, C:] *= scale
        return d_kq
    along = (d_kq * chunks.kq).sum(-1, keepdim=True)
    queries = along[:, :, C:]  # kq holds scale times the unit vector there; the square of a small scale may be zero
    queries.div_(scale).div_(scale) if scale else queries.zero_()
    return torch.addcmul(d_kq, along, chunks.kq, value=-1).mul_(chunks.factor)
