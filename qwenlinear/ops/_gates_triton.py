"""The gates in Triton, finite for every input: log-decay and write strength of a block of tokens, and what they are made of.

The prologue's launch has programs of its own for them; decoding and the prologue's backward pass take the functions.
"""

# mypy: ignore-errors
# Triton's functions carry no types.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _sigmoid(x):
    # exp2 and rsqrt are an instruction each, where exp and a division handle subnormal numbers that change nothing here
    root = tl.rsqrt(1.0 + tl.exp2(x * -1.4426950408889634))
    return root * root


@triton.jit
def _log_softplus(x):
    """log(log(1 + exp(x))), finite for every finite x; and its derivative."""
    z = tl.exp(-tl.abs(x))
    one_more = 1.0 + z
    rest = one_more - 1.0
    log1p = tl.where(rest == 0.0, z, tl.log(one_more) * (z / tl.where(rest == 0.0, 1.0, rest)))
    softplus = tl.maximum(x, 0.0) + log1p
    sigmoid = tl.where(x >= 0.0, 1.0, z) / one_more
    small = x < -40.0
    softplus = tl.where(small, 1.0, softplus)
    return tl.where(small, x, tl.log(softplus)), tl.where(small, 1.0, sigmoid / softplus)


@triton.jit
def _at_most(x, limit: tl.constexpr):
    """min(x, limit), but not-a-number stays what it is: tl.minimum alone would make a proper gate of a broken parameter."""
    return tl.minimum(x, limit, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _decay(log_decay):
    """g of its logarithm log(-g), clamped at -1e4."""
    return -_at_most(tl.exp(_at_most(log_decay, 9.210340371976182)), 1e4)  # log(1e4), which may round to a little more


@triton.jit
def _gates_forward(
    program,
    b_ptr,
    b_batch,
    b_row,
    a_ptr,
    a_batch,
    a_row,
    A_log_ptr,
    dt_bias_ptr,
    g_ptr,
    beta_ptr,
    B,
    T,
    HV: tl.constexpr,
    BH: tl.constexpr,
    GATE_ROWS: tl.constexpr,
):
    heads = tl.arange(0, BH)
    rows = program.to(tl.int64) * GATE_ROWS + tl.arange(0, GATE_ROWS)
    batch, token = rows // T, rows % T
    mask = (rows < B.to(tl.int64) * T)[:, None] & (heads < HV)[None, :]
    out = rows[:, None] * HV + heads[None, :]
    b = tl.load(b_ptr + (batch * b_batch + token * b_row)[:, None] + heads[None, :], mask=mask, other=0.0)
    a = tl.load(a_ptr + (batch * a_batch + token * a_row)[:, None] + heads[None, :], mask=mask, other=0.0)
    A_log = tl.load(A_log_ptr + heads, mask=heads < HV, other=0.0).to(tl.float32)
    dt_bias = tl.load(dt_bias_ptr + heads, mask=heads < HV, other=0.0).to(tl.float32)
    log_softplus, _ = _log_softplus(a.to(tl.float32) + dt_bias[None, :])
    tl.store(g_ptr + out, _decay(A_log[None, :] + log_softplus), mask=mask)
    tl.store(beta_ptr + out, _sigmoid(b.to(tl.float32)).to(beta_ptr.dtype.element_ty), mask=mask)
