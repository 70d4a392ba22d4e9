"""The prologue's kernels from the host: how the work is cut, what is allocated, what is launched."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qwenlinear._launch import on, power_of_two
from qwenlinear.ops._prologue_backward_triton import prologue_backward_kernel, prologue_state_backward_kernel
from qwenlinear.ops._prologue_triton import prologue_forward_kernel


@dataclass(frozen=True)
class Tiles:
    """How the work is cut.

    Args:
        channels: of a program, at most; a power of two.
        warps: of a program with as many channels; one with fewer has fewer.
        chunk: tokens of a program, at most.
        unroll: tokens loaded ahead; divides every chunk.
    """

    channels: int
    warps: int
    chunk: int
    unroll: int

    def fit(self, B: int, T: int, sizes: Sizes) -> Tiles:
        """Fewer channels where the heads are few, shorter chunks where the tokens are."""
        rows = min(self.channels // sizes.D, sizes.H & -sizes.H) or 1  # a power of two that divides H
        warps = max(1, self.warps * rows * sizes.D // self.channels)
        chunk = self.chunk
        while chunk > 2 * self.unroll and B * -(-T // chunk) * sizes.blocks(rows) < _ENOUGH_PROGRAMS:
            chunk //= 2
        return replace(self, channels=rows * sizes.D, warps=warps, chunk=chunk)

    def options(self) -> dict[str, int]:
        """What Triton is told beside the arguments."""
        return {"num_warps": self.warps}


_ENOUGH_PROGRAMS = 1024  # to fill the largest of today's GPUs about twice

FORWARD = Tiles(channels=512, warps=4, chunk=64, unroll=8)  # the best of six on an H200, docs/performance-notes.md
BACKWARD = Tiles(channels=256, warps=2, chunk=256, unroll=4)  # of eight


@dataclass(frozen=True)
class Sizes:
    """The compile-time sizes of a call: heads, the key head D that rows are as wide as, all of v's channels, taps."""

    H: int
    HV: int
    D: int
    CV: int
    W: int

    @property
    def C(self) -> int:
        """Channels of the convolution."""
        return 2 * self.H * self.D + self.CV

    def blocks(self, rows: int) -> int:
        """Programs side by side that cover the channels."""
        return 2 * -(-self.H // rows) + -(-self.CV // (rows * self.D))


@dataclass(frozen=True)
class Inputs:
    """A call's inputs; a batch's last dimension is contiguous, None stands for what there is not."""

    qkv: Tensor
    b: Tensor
    a: Tensor
    weight: Tensor
    A_log: Tensor
    dt_bias: Tensor
    initial_state: Tensor | None
    positions: Tensor | None
    documents: Tensor | None
    bounds: Tensor | None
    lengths: Tensor | None

    def laid_out(self) -> Inputs:
        """As the kernels read them: last dimensions contiguous, the small tensors whole, the state ``[N, W-1, C]``."""
        return Inputs(
            _rows(self.qkv),
            _rows(self.b),
            _rows(self.a),
            self.weight.contiguous(),
            self.A_log.contiguous(),
            self.dt_bias.contiguous(),
            None if self.initial_state is None else self.initial_state.transpose(1, 2).contiguous(),
            self.positions,
            self.documents,
            self.bounds,
            None if self.lengths is None else self.lengths.contiguous(),
        )

    @property
    def sequences(self) -> int:
        """N."""
        return self.qkv.shape[0] if self.bounds is None else self.bounds.shape[0] - 1

    def arguments(self) -> tuple[list[Tensor | int], int]:
        """Pointers and strides of qkv, b and a, qkv's in units that its rows are aligned to, and that unit."""
        unit = math.gcd(self.qkv.stride(0), self.qkv.stride(1), 16)
        strides = [self.qkv.stride(0) // unit, self.qkv.stride(1) // unit]
        pointers: list[Tensor | int] = [self.qkv, *strides, self.b, *self.b.stride()[:2], self.a, *self.a.stride()[:2]]
        return pointers, unit


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(2) == 1 else x.contiguous()


def gate_tile(HV: int, warps: int) -> dict[str, int]:
    """Heads (a power of two) and tokens of a gate program, 8 of its elements a thread."""
    BH = power_of_two(HV)
    return {"BH": BH, "GATE_ROWS": max(1, 256 * warps // BH)}


def forward(
    inputs: Inputs, sizes: Sizes, l2norm: bool, output_final_state: bool, tiles: Tiles = FORWARD
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Launch the forward pass.

    Args:
        inputs: on one device, at least one token.
        sizes: what they are made of.
        l2norm: whether q and k are normalised.
        output_final_state: whether the last answer is the final state, or empty.
        tiles: how the work is cut; default the one that was measured.

    Returns:
        q, k, v, g, beta, final state.
    """
    inputs = inputs.laid_out()
    x, (B, T, _) = inputs.qkv, inputs.qkv.shape
    tiles = tiles.fit(B, T, sizes)
    gate = gate_tile(sizes.HV, tiles.warps)
    q, k = (x.new_empty(B, T, sizes.H, sizes.D) for _ in range(2))
    v = x.new_empty(B, T, sizes.HV, sizes.CV // sizes.HV)
    g = x.new_empty(B, T, sizes.HV, dtype=torch.float32)
    beta = inputs.b.new_empty(B, T, sizes.HV)
    final = x.new_empty((inputs.sequences, sizes.C, sizes.W - 1) if output_final_state else (0,))
    rows = tiles.channels // sizes.D
    gate_programs = -(-B * T // gate["GATE_ROWS"])
    state_programs = inputs.sequences * -(-sizes.C // tiles.channels) if final.numel() else 0
    programs = gate_programs + state_programs + B * -(-T // tiles.chunk) * sizes.blocks(rows)
    pointers, unit = inputs.arguments()
    with on(x.device):
        prologue_forward_kernel[(programs,)](
            *pointers, inputs.weight, inputs.A_log, inputs.dt_bias, inputs.initial_state,
            inputs.positions, inputs.documents, inputs.bounds, inputs.lengths,
            q, k, v, g, beta, final, B, T, tiles.chunk, gate_programs, state_programs,
            H=sizes.H, HV=sizes.HV, CV=sizes.CV, W=sizes.W, R=rows, D=sizes.D, NORM=l2norm,
            PACKED=inputs.bounds is not None, HAS_STATE=inputs.initial_state is not None,
            HAS_LENGTHS=inputs.lengths is not None, UNIT=unit, **gate, U=tiles.unroll, **tiles.options(),
        )  # fmt: skip
    return q, k, v, g, beta, final


def backward(
    inputs: Inputs,
    sizes: Sizes,
    l2norm: bool,
    dy: tuple[Tensor, Tensor, Tensor] | None,
    dgates: tuple[Tensor, Tensor] | None,
    dfinal: Tensor | None,
    needs_dweight: bool,
    needs_dstate: bool,
    tiles: Tiles = BACKWARD,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Launch the backward pass.

    Args:
        inputs: as in the forward pass.
        sizes: what they are made of.
        l2norm: as in the forward pass.
        dy: gradients of q, k and v; None where nothing behind the convolution needs one.
        dgates: gradients of g and beta; None where nothing behind the gates needs one.
        dfinal: the final state's gradient, or None.
        needs_dweight: whether the taps need one.
        needs_dstate: whether the initial state needs one.
        tiles: how the work is cut; default the one that was measured.

    Returns:
        ``[B, T, C+2*HV]`` of qkv, b and a; ``[B, T, 2*HV]`` of b and a where their dtype is another, else empty;
        ``[C, 1, W]`` of the weight, ``[2, HV]`` float32 of A_log and dt_bias, the initial state's; each empty where it is
        not needed. What is not needed within the first is not written.
    """
    inputs = inputs.laid_out()
    x, (B, T, _) = inputs.qkv, inputs.qkv.shape
    tiles = tiles.fit(B, T, sizes)
    gate = gate_tile(sizes.HV, tiles.warps)
    rows, chunks = tiles.channels // sizes.D, B * -(-T // tiles.chunk)
    programs = 0 if dy is None else chunks * sizes.blocks(rows)
    gate_programs = 0 if dgates is None else -(-B * T // gate["GATE_ROWS"])
    dx = x.new_empty(B, T, sizes.C + 2 * sizes.HV)
    gates = torch.promote_types(inputs.b.dtype, inputs.a.dtype)
    apart = dgates is not None and gates != x.dtype
    dba = x.new_empty((B, T, 2 * sizes.HV) if apart else (0,), dtype=gates)
    dw = x.new_empty(chunks if needs_dweight and programs else 0, 4, sizes.C, dtype=torch.float32)
    dgate = x.new_empty(gate_programs, 2, sizes.HV, dtype=torch.float32)
    dstate = x.new_empty((inputs.sequences, sizes.C, sizes.W - 1) if needs_dstate and programs else (0,))
    pointers, unit = inputs.arguments()
    dq, dk, dv = (None, None, None) if dy is None else (t.contiguous() for t in dy)
    dg, dbeta = (None, None) if dgates is None else (t.contiguous() for t in dgates)
    constants = {
        "H": sizes.H, "HV": sizes.HV, "CV": sizes.CV, "W": sizes.W, "R": rows, "D": sizes.D, "NORM": l2norm, "UNIT": unit,
        "PACKED": inputs.bounds is not None, "HAS_STATE": inputs.initial_state is not None, **tiles.options(),
    }  # fmt: skip
    with on(x.device):
        if programs + gate_programs:
            prologue_backward_kernel[(programs + gate_programs,)](
                *pointers, inputs.weight, inputs.A_log, inputs.dt_bias, inputs.initial_state,
                inputs.positions, inputs.documents, dq, dk, dv, dg, dbeta, dx,
                dba if apart else dx[..., sizes.C :], (dba if apart else dx).stride(1), dw, dgate,
                B, T, tiles.chunk, gate_programs, NEEDS_DW=needs_dweight, **gate, U=tiles.unroll, **constants,
            )  # fmt: skip
        if programs and sizes.W > 1 and (needs_dstate or dfinal is not None):
            prologue_state_backward_kernel[(inputs.sequences * sizes.blocks(rows),)](
                *pointers[:3], inputs.weight, inputs.initial_state, inputs.bounds, inputs.lengths, dq, dk, dv,
                None if dfinal is None else dfinal.contiguous(), dx, dstate, T,
                HAS_LENGTHS=inputs.lengths is not None, HAS_DFINAL=dfinal is not None, NEEDS_DSTATE=needs_dstate, **constants,
            )  # fmt: skip
    dweight = x.new_empty(0, dtype=inputs.weight.dtype)
    if dw.numel():
        dweight = dw.sum(0)[4 - sizes.W :].t().to(inputs.weight.dtype).unsqueeze(1).contiguous()
    return dx, dba, dweight, dgate.sum(0) if gate_programs else dgate.flatten(), dstate
