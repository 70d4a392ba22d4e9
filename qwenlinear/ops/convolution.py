"""The short convolution in PyTorch: W shifted multiply-adds over dense or packed sequences, and the state they leave.

A sequence is its state (the W-1 columns before its first token, zeros when it starts here) followed by its tokens, so a
piece shorter than W-1, an empty document and a sequence that goes on from a cache are no special cases.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qwenlinear.kernels.packing import PackedSequences
from qwenlinear.ops.activations import ACTIVATIONS


def short_convolution(
    x: Tensor,
    weight: Tensor,
    activation: str | None = "silu",
    initial_state: Tensor | None = None,
    packed: PackedSequences | None = None,
) -> Tensor:
    """The convolution in PyTorch: W shifted multiply-adds, then the first W-1 tokens of each packed document once more.

    Args:
        x: ``[B, T, C]``.
        weight: ``[C, 1, W]``.
        activation: a key of ``ACTIVATIONS``, or None.
        initial_state: ``[N, C, W-1]``, or None for zeros.
        packed: boundaries of packed documents, or None for dense rows.

    Returns:
        ``[B, T, C]`` in x's dtype, accumulated in float32 at least.
    """
    y = wide_convolution(x, weight, initial_state, packed)
    return (y if activation is None else ACTIVATIONS[activation](y)).to(x.dtype)


def wide_convolution(
    x: Tensor, weight: Tensor, initial_state: Tensor | None = None, packed: PackedSequences | None = None
) -> Tensor:
    """The convolution alone, not rounded.

    Args:
        x: ``[B, T, C]``.
        weight: ``[C, 1, W]``.
        initial_state: ``[N, C, W-1]``, or None for zeros.
        packed: boundaries of packed documents, or None for dense rows.

    Returns:
        ``[B, T, C]`` in float32, or float64 where x is.
    """
    W = weight.shape[2]
    wide = torch.promote_types(x.dtype, torch.float32)
    taps = weight.squeeze(1).t().to(wide)
    tokens = x.to(wide)
    past = None if initial_state is None else initial_state.to(wide).transpose(1, 2)
    if packed is None:
        y = _convolve(past, tokens, taps)
    else:
        y = _convolve(None, tokens, taps)
        heads = packed.derive(("convolution.heads", W, x.device), lambda: _Heads.of(packed, W, x.device))
        if heads.at.numel():  # the stream's first pass let them see the document before theirs
            opening = tokens[0].index_select(0, heads.openings).view(packed.num_sequences, W - 1, -1)
            redone = _convolve(past, opening, taps).flatten(0, 1)
            y = y.index_copy(1, heads.at, redone.index_select(0, heads.rows)[None])
    return y


def _convolve(past: Tensor | None, tokens: Tensor, taps: Tensor) -> Tensor:
    """``[N, T, C]`` of tokens ``[N, T, C]`` behind their past ``[N, W-1, C]``, or behind zeros."""
    if past is None:
        return _ShiftedTaps.apply(tokens, taps)  # type: ignore[no-any-return]
    return _ShiftedTaps.apply(torch.cat([past, tokens], 1), taps)[:, past.shape[1] :]  # type: ignore[no-any-return]


class _ShiftedTaps(torch.autograd.Function):
    """``y[:, t] = sum_d taps[W-1-d] * x[:, t-d]``, written out: autograd would allocate each shift's gradient apart."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, taps: Tensor) -> Tensor:
        ctx.save_for_backward(x, taps)
        T, last = x.shape[1], taps.shape[0] - 1
        y = x * taps[last]
        for d in range(1, min(last + 1, T)):
            y[:, d:].addcmul_(x[:, : T - d], taps[last - d])
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, taps = ctx.saved_tensors  # type: ignore[attr-defined]
        T, last = x.shape[1], taps.shape[0] - 1
        shifts = range(1, min(last + 1, T))
        dx = dtaps = None
        if ctx.needs_input_grad[0]:  # type: ignore[attr-defined]
            dx = dy * taps[last]
            for d in shifts:
                dx[:, : T - d].addcmul_(dy[:, d:], taps[last - d])
        if ctx.needs_input_grad[1]:  # type: ignore[attr-defined]
            dtaps = torch.zeros_like(taps)
            for d in (0, *shifts):
                dtaps[last - d] = (dy[:, d:] * x[:, : T - d]).sum((0, 1))
        return dx, dtaps


def check_lengths(lengths: Tensor, x: Tensor) -> None:
    """Check the lengths of a padded batch against its tokens.

    Args:
        lengths: meant as ``[B]`` int64, each in 0 .. T.
        x: ``[B, T, C]``.

    Raises:
        ValueError: another shape, dtype or device; on the CPU also a length below 0 or above T. Elsewhere reading them would
            synchronise, and in a graph that is being captured they have no values yet: there :func:`final_state` clamps.
    """
    B, T, _ = x.shape
    if tuple(lengths.shape) != (B,) or lengths.dtype != torch.int64:
        raise ValueError(f"lengths needs shape [{B}] and int64, got {list(lengths.shape)} and {lengths.dtype}")
    if lengths.device != x.device:
        raise ValueError(f"lengths needs the device {x.device} of the tokens, got {lengths.device}")
    if lengths.device.type == "cpu" and B and not torch.compiler.is_compiling():
        least, most = (int(value) for value in lengths.aminmax())
        if least < 0 or most > T:
            raise ValueError(f"lengths needs numbers from 0 to T={T}, got {least if least < 0 else most}")


def final_state(
    x: Tensor, width: int, state: Tensor | None, packed: PackedSequences | None, lengths: Tensor | None
) -> Tensor:
    """The last W-1 columns of each sequence's state and tokens, which the next call goes on from.

    Args:
        x: ``[B, T, C]``.
        width: W.
        state: ``[N, C, W-1]`` in x's dtype, or None for zeros.
        packed: boundaries of packed documents, or None for dense rows.
        lengths: ``[B]`` int64, the tokens of each row that count (clamped to 0 .. T), or None for all.

    Returns:
        ``[N, C, W-1]`` in x's dtype, contiguous, oldest first.
    """
    B, T, C = x.shape
    keep = width - 1
    N = B if packed is None else packed.num_sequences
    past = x.new_zeros(N, keep, C) if state is None else state.transpose(1, 2)
    if T == 0 or B == 0:
        last = past
    elif packed is None and lengths is None:
        recent = torch.cat([past, x[:, max(T - keep, 0) :]], 1)
        last = recent.narrow(1, recent.shape[1] - keep, keep)
    else:
        if packed is not None:
            tail = packed.derive(("convolution.tail", width, x.device), lambda: _Tail.of_packed(packed, keep, x.device))
        else:
            assert lengths is not None
            tail = _Tail.of(torch.arange(B, device=x.device) * T, lengths.clamp(0, T), keep)
        taken = x.flatten(0, 1).index_select(0, tail.tokens.flatten()).view(N, keep, C)
        last = torch.where(tail.is_token, taken, past.gather(1, tail.columns.expand(N, keep, C)))
    return last.transpose(1, 2).clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class _Tail:
    """Where the last W-1 columns of N sequences come from; all on the device, so that nothing synchronises."""

    tokens: Tensor  # [N, W-1] into the flattened tokens
    columns: Tensor  # [N, W-1, 1] into the state
    is_token: Tensor  # [N, W-1, 1] which of the two

    @classmethod
    def of(cls, starts: Tensor, lengths: Tensor, keep: int) -> _Tail:
        behind = lengths[:, None] + torch.arange(-keep, 0, device=lengths.device)  # < 0 counts back into the state
        tokens = starts[:, None] + behind.clamp(min=0)
        tokens = torch.where(behind >= 0, tokens, 0)  # an empty sequence at the very end has no token of its own
        return cls(tokens, (behind + keep).clamp(max=keep - 1)[..., None], (behind >= 0)[..., None])

    @classmethod
    def of_packed(cls, packed: PackedSequences, keep: int, device: torch.device) -> _Tail:
        bounds = packed._boundaries(device).long()
        return cls.of(bounds[:-1], bounds.diff(), keep)


@dataclass(frozen=True)
class _Heads:
    """The first W-1 tokens of each of N documents, the only ones that reach back over a boundary."""

    openings: Tensor  # [N*(W-1)] tokens that open each document; beyond a shorter one's end: any token, never used
    rows: Tensor  # [M] which of the N*(W-1) are real
    at: Tensor  # [M] their tokens

    @classmethod
    def of(cls, packed: PackedSequences, W: int, device: torch.device) -> _Heads:
        bounds = packed._boundaries(device).long()
        offsets = torch.arange(W - 1, device=device)
        openings = (bounds[:-1, None] + offsets).clamp(max=packed.total_tokens - 1).flatten()
        counts = bounds.diff().clamp(max=W - 1)
        total = sum(min(length, W - 1) for length in packed.lengths)  # known on the host: no synchronisation
        document = torch.repeat_interleave(torch.arange(packed.num_sequences, device=device), counts, output_size=total)
        place = torch.arange(total, device=device) - (counts.cumsum(0) - counts)[document]
        return cls(openings, document * (W - 1) + place, bounds[document] + place)
