"""The gated RMS norm in Triton: each input read once, each output written once, everything between in float32.

A row is one head of one token, V elements. o and dy are contiguous; z is read where the projection left it, through three
strides (tokens, key heads, value heads of a key head), of which those that fall together are merged.
"""

# mypy: ignore-errors
# Triton's functions carry no types.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qwenlinear._launch import on, power_of_two, processors

FORWARD = {"ROWS": 16, "num_warps": 4}
BACKWARD = {"ROWS": 8, "num_warps": 4}
BACKWARD_PROGRAMS = 6  # a multiprocessor: no more than fit at once, or a second wave runs almost alone


@triton.jit
def _z_offsets(row, size1, size2, stride0, stride1, stride2):
    outer = row // size2
    return (
        (outer // size1).to(tl.int64) * stride0
        + (outer % size1).to(tl.int64) * stride1
        + (row % size2).to(tl.int64) * stride2
    )


@triton.jit
def gated_rms_norm_kernel(
    o, z, weight, y, rows, size1, size2, stride0, stride1, stride2, eps,
    V: tl.constexpr, BV: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BV)[None, :]
    inside = (row < rows)[:, None] & (col < V)
    at = row.to(tl.int64)[:, None] * V + col
    at_z = _z_offsets(row, size1, size2, stride0, stride1, stride2)[:, None] + col
    x = tl.load(o + at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(z + at_z, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + col, mask=col < V, other=0.0).to(tl.float32)
    r = tl.rsqrt(tl.sum(x * x, 1) / V + eps)[:, None]
    answer = x * r * w * (gate * tl.sigmoid(gate))
    tl.store(y + at, answer.to(y.dtype.element_ty), mask=inside)


@triton.jit
def gated_rms_norm_backward_kernel(
    dy, o, z, weight, do, dz, partial, rows, size1, size2, stride0, stride1, stride2, eps,
    V: tl.constexpr, BV: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Programs stride over the blocks of rows and keep their part of the weight's gradient in registers."""
    program = tl.program_id(0)
    col = tl.arange(0, BV)[None, :]
    w = tl.load(weight + col, mask=col < V, other=0.0).to(tl.float32)
    dw = tl.zeros([ROWS, BV], tl.float32)
    for block in range(program, tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = block * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (col < V)
        at = row.to(tl.int64)[:, None] * V + col
        at_z = _z_offsets(row, size1, size2, stride0, stride1, stride2)[:, None] + col
        x = tl.load(o + at, mask=inside, other=0.0).to(tl.float32)
        gate = tl.load(z + at_z, mask=inside, other=0.0).to(tl.float32)
        d = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        s = tl.sigmoid(gate)
        r = tl.rsqrt(tl.sum(x * x, 1) / V + eps)[:, None]
        normed = x * r
        through = d * (gate * s)  # what reaches weight * normed
        dw += through * normed
        dgate = d * w * normed * (s * (1 + gate * (1 - s)))
        dnormed = through * w
        dx = r * (dnormed - normed * (tl.sum(dnormed * normed, 1) / V)[:, None])
        tl.store(do + at, dx.to(do.dtype.element_ty), mask=inside)
        tl.store(dz + at, dgate.to(dz.dtype.element_ty), mask=inside)
    tl.store(partial + program * V + col, tl.sum(dw, 0)[None, :], mask=col < V)


def forward(o: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``[..., V]`` in o's dtype."""
    o, (z, *layout), V = o.contiguous(), _laid_out(z), o.shape[-1]
    y, rows = torch.empty_like(o), o.numel() // V
    if rows:
        with on(o.device):
            gated_rms_norm_kernel[(-(-rows // FORWARD["ROWS"]),)](
                o, z, weight.contiguous(), y, rows, *layout, eps, V, power_of_two(V), **FORWARD
            )
    return y


def backward(dy: Tensor, o: Tensor, z: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of o and z, contiguous in their dtypes, and of the weight in its own."""
    dy, o, (z, *layout), V = dy.contiguous(), o.contiguous(), _laid_out(z), o.shape[-1]
    do, dz, rows = torch.empty_like(o), torch.empty(o.shape, dtype=z.dtype, device=z.device), o.numel() // V
    programs = min(-(-rows // BACKWARD["ROWS"]), BACKWARD_PROGRAMS * processors(o.device))
    partial = torch.empty(programs, V, dtype=torch.float32, device=o.device)
    if rows:
        with on(o.device):
            gated_rms_norm_backward_kernel[(programs,)](
                dy, o, z, weight.contiguous(), do, dz, partial, rows, *layout, eps,
                V, power_of_two(V), **BACKWARD,
            )  # fmt: skip
    return do, dz, partial.sum(0).to(weight.dtype)


def _laid_out(z: Tensor) -> tuple[Tensor, int, int, int, int, int]:
    """z and, for its leading dimensions merged to three, the sizes of the last two and all strides; copied where that fails."""
    if z.is_contiguous():  # the common case, without looking at each dimension
        V = z.shape[-1]
        return z, 1, max(1, z.numel() // max(1, V)), 0, 0, V
    merged: list[tuple[int, int]] = []  # (size, stride), the innermost first
    for size, stride in zip(reversed(z.shape[:-1]), reversed(z.stride()[:-1]), strict=True):
        if size == 1:
            continue
        if merged and stride == merged[-1][0] * merged[-1][1]:
            merged[-1] = (merged[-1][0] * size, merged[-1][1])
        else:
            merged.append((size, stride))
    if len(merged) > 3 or (z.stride(-1) != 1 and z.shape[-1] > 1):
        return _laid_out(z.contiguous())
    merged += [(1, 0)] * (3 - len(merged))
    (size2, stride2), (size1, stride1), (_, stride0) = merged
    return z, size1, size2, stride0, stride1, stride2
