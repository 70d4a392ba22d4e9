"""The recurrent form in Triton: a program keeps a block of columns of one head's state in registers for all of its tokens.

Columns of the state do not see one another (each is a recurrence over its own element of v), so a head is cut into as many
programs as fill the GPU. What bounds decoding is the state, read and written once: everything else is small beside it.
"""

# mypy: ignore-errors
# Triton's functions carry no types.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qwenlinear._launch import on, power_of_two, processors


@triton.jit
def step_kernel(
    q, k, v, g, beta, initial, o, final, cu_seqlens, T, scale,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    NORMALISE: tl.constexpr, PACKED: tl.constexpr, FROM_STATE: tl.constexpr, KEEP_STATE: tl.constexpr,
):  # fmt: skip
    """``final`` may be ``initial``: each element is read and written by one program, which reads first."""
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    WHOLE: tl.constexpr = (K == BK) and (V % BV == 0)
    program = tl.program_id(0)
    sequence, head, block = program // (BLOCKS * HV), program // BLOCKS % HV, program % BLOCKS
    key_head = head // (HV // H)
    rows, cols = tl.arange(0, BK), block * BV + tl.arange(0, BV)
    at = (sequence.to(tl.int64) * HV + head) * (K * V) + rows[:, None] * V + cols[None, :]
    inside = (rows < K)[:, None] & (cols < V)[None, :]
    if FROM_STATE:
        if WHOLE:  # noqa: SIM108 -- a constant, which drops the other branch
            S = tl.load(initial + at)
        else:
            S = tl.load(initial + at, mask=inside, other=0.0)
    else:
        S = tl.zeros([BK, BV], tl.float32)
    if PACKED:
        start = tl.load(cu_seqlens + sequence).to(tl.int64)
        tokens = (tl.load(cu_seqlens + sequence + 1) - start).to(tl.int32)
    else:
        start = sequence.to(tl.int64) * T
        tokens = T
    for t in range(tokens):
        key_row, value_row = (start + t) * H + key_head, (start + t) * HV + head
        q_t = tl.load(q + key_row * K + rows, mask=rows < K, other=0.0).to(tl.float32)
        k_t = tl.load(k + key_row * K + rows, mask=rows < K, other=0.0).to(tl.float32)
        v_t = tl.load(v + value_row * V + cols, mask=cols < V, other=0.0).to(tl.float32)
        decay = tl.exp(tl.load(g + value_row))
        strength = tl.load(beta + value_row).to(tl.float32)
        if NORMALISE:
            q_t *= tl.rsqrt(tl.sum(q_t * q_t, 0) + 1e-6)
            k_t *= tl.rsqrt(tl.sum(k_t * k_t, 0) + 1e-6)
        # Both products with the state before the write, so that they do not wait for each other:
        # S_new^T q = decay S^T q + (k^T q) written.
        remembered = decay * tl.sum(S * k_t[:, None], 0)
        read = decay * tl.sum(S * q_t[:, None], 0)
        written = strength * (v_t - remembered)
        o_t = scale * (read + tl.sum(k_t * q_t, 0) * written)
        S = S * decay + k_t[:, None] * written[None, :]
        tl.store(o + value_row * V + cols, o_t.to(o.dtype.element_ty), mask=cols < V)
    if KEEP_STATE:
        if WHOLE:
            tl.store(final + at, S)
        else:
            tl.store(final + at, S, mask=inside)


def tile(heads: int, K: int, V: int, multiprocessors: int) -> tuple[int, int, int]:
    """How a head's state is cut.

    Args:
        heads: states, N * HV.
        K: rows of a state.
        V: its columns.
        multiprocessors: of the device.

    Returns:
        Rows and columns of a program's block, powers of two, and its warps. Where 64 columns give enough programs to fill the
        device several times over they move the most bytes a second; with fewer states 16 give four times as many programs. A
        thread holds 64 elements. docs/performance-notes.md has what was measured.
    """
    BK = max(16, power_of_two(K))
    BV = 64 if heads * -(-V // 64) >= 8 * multiprocessors else 16
    BV = min(BV, max(16, power_of_two(V)))
    return BK, BV, max(1, BK * BV // 2048)


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    initial_state: Tensor | None,
    final_state: Tensor | None,
    cu_seqlens: Tensor | None,
    normalise: bool,
    cut: tuple[int, int, int] | None = None,
) -> Tensor:
    """Run all tokens of all sequences; every tensor is contiguous.

    Args:
        q: ``[B, T, H, K]``.
        k: ``[B, T, H, K]``.
        v: ``[B, T, HV, V]``.
        g: ``[B, T, HV]`` float32.
        beta: ``[B, T, HV]``.
        scale: factor on q.
        initial_state: ``[N, HV, K, V]`` float32, or None for zeros.
        final_state: the same, written; may be initial_state; None to drop it.
        cu_seqlens: ``[N+1]`` int32 boundaries where packed.
        normalise: whether q and k are still to be normalised.
        cut: as :func:`tile` returns, which is the default.

    Returns:
        ``o [B, T, HV, V]`` in q's dtype.
    """
    (B, T, H, K), (HV, V) = q.shape, v.shape[2:]
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    BK, BV, warps = cut or tile(N * HV, K, V, processors(q.device))
    o = torch.empty_like(v)
    with on(q.device):
        step_kernel[(N * HV * -(-V // BV),)](
            q, k, v, g, beta, initial_state, o, final_state, cu_seqlens, T, scale, H, HV, K, V, BK, BV,
            normalise, cu_seqlens is not None, initial_state is not None, final_state is not None, num_warps=warps,
        )  # fmt: skip
    return o
