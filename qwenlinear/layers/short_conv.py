"""ShortConvolution: the depthwise causal convolution before the recurrence, over dense, padded or packed sequences.

A sequence is its state (the W-1 columns before its first token, zeros when it starts here) followed by its tokens, so a
piece shorter than W-1, an empty document and a sequence that goes on from a cache are no special cases.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qwenlinear.kernels import PackedSequences
from qwenlinear.layers.config import ACTIVATIONS
from qwenlinear.layers.fused import fla_module, why_not_fla

_FLA_CHUNK = 64  # the tokens a program of FLA's convolution takes; its chunk indices count in them


class ShortConvolution(nn.Module):
    """Depthwise causal convolution without bias, then an activation; ``weight`` is ``nn.Conv1d``'s ``[C, 1, W]``.

    On a GPU flash-linear-attention's kernel runs where it is installed (activation None or silu), otherwise PyTorch
    with the same results: both accumulate in float32 at least and round once. `repr` says which.

    Args:
        channels: C.
        width: W, taps per channel.
        activation: a key of ``ACTIVATIONS``, or None for none.

    Raises:
        ValueError: a size that is none, an unknown activation.

    Example:
        >>> conv = ShortConvolution(8, 4)
        >>> packed = PackedSequences.from_lengths([3, 0, 5])
        >>> y, state = conv(torch.randn(1, 8, 8), cu_seqlens=packed, output_final_state=True)
        >>> y.shape, state.shape
        (torch.Size([1, 8, 8]), torch.Size([3, 8, 3]))
    """

    def __init__(self, channels: int, width: int, activation: str | None = "silu") -> None:
        super().__init__()
        for name, size in (("channels", channels), ("width", width)):
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"{name} needs a whole number >= 1, got {size!r}")
        if activation is not None and activation not in ACTIVATIONS:
            raise ValueError(f"activation needs None or one of {', '.join(ACTIVATIONS)}, got {activation!r}")
        self.channels = channels
        self.width = width
        self.activation = activation
        self.weight = nn.Parameter(torch.empty(channels, 1, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Redraw the weight as ``nn.Conv1d`` does: uniform within ``W ** -0.5``."""
        nn.init.uniform_(self.weight, -(self.width**-0.5), self.width**-0.5)

    def forward(
        self,
        x: Tensor,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        cu_seqlens: PackedSequences | None = None,
        lengths: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Convolve each sequence with what went before it.

        Args:
            x: ``[B, T, C]`` any floating dtype.
            initial_state: ``[N, C, W-1]`` the input's columns before each sequence, oldest first, any floating dtype;
                default None for zeros.
            output_final_state: whether to return the columns that the next call needs; default False.
            cu_seqlens: boundaries of packed documents (B is 1, N the documents); default None for dense input, N = B.
            lengths: ``[B]`` int64, the tokens of each row that count for its final state, the rest being padding at the
                right; default None for all. Not together with ``cu_seqlens``.

        Returns:
            ``[B, T, C]`` in x's dtype, and ``[N, C, W-1]`` in x's dtype or None.

        Raises:
            ValueError: a wrong shape, or boundaries that do not fit.
        """
        self._check(x, initial_state, cu_seqlens, lengths)
        packed = cu_seqlens if cu_seqlens is not None and cu_seqlens.num_sequences > 1 else None  # one is dense
        state = None if initial_state is None else initial_state.to(x.dtype)
        y = causal_convolution(x, self.weight, self.activation, state, packed)
        return y, _final_state(x, self.width, state, packed, lengths) if output_final_state else None

    def extra_repr(self) -> str:
        where = self.implementation(self.weight.device, self.weight.dtype)
        return f"{self.channels}, width={self.width}, activation={self.activation}, {where}"

    def implementation(self, device: torch.device, dtype: torch.dtype) -> str:
        """What runs on such tensors, in words."""
        reason = why_not_fla(device, dtype)
        if reason is None and self.activation not in _FLA_ACTIVATIONS:
            reason = f"activation {self.activation}"
        return "runs on flash-linear-attention" if reason is None else f"runs on PyTorch: {reason}"

    def _check(self, x: Tensor, state: Tensor | None, packed: PackedSequences | None, lengths: Tensor | None) -> None:
        if x.dim() != 3 or x.shape[2] != self.channels:
            raise ValueError(f"x needs shape [B, T, {self.channels}], got {list(x.shape)}")
        if packed is not None and not isinstance(packed, PackedSequences):
            raise ValueError(
                f"cu_seqlens needs a PackedSequences, got {type(packed).__name__}; from_cu_seqlens makes one"
            )
        if lengths is not None and (tuple(lengths.shape) != (x.shape[0],) or lengths.dtype != torch.int64):
            raise ValueError(
                f"lengths needs shape [{x.shape[0]}] and int64, got {list(lengths.shape)} and {lengths.dtype}"
            )
        if packed is not None and (x.shape[0] != 1 or packed.total_tokens != x.shape[1] or lengths is not None):
            raise ValueError(
                "cu_seqlens needs a batch of one that ends where it ends, and no lengths; got x "
                f"{list(x.shape)}, {packed.total_tokens} tokens{'' if lengths is None else ', lengths'}"
            )
        wanted = (x.shape[0] if packed is None else packed.num_sequences, self.channels, self.width - 1)
        if state is not None and tuple(state.shape) != wanted:
            raise ValueError(f"initial_state needs shape {list(wanted)} ([N, C, W-1]), got {list(state.shape)}")


_FLA_ACTIVATIONS = (None, "silu", "swish")


def causal_convolution(
    x: Tensor,
    weight: Tensor,
    activation: str | None = "silu",
    initial_state: Tensor | None = None,
    packed: PackedSequences | None = None,
) -> Tensor:
    """The convolution on what this machine has: flash-linear-attention's kernel, or PyTorch with the same results.

    Args:
        x: ``[B, T, C]`` any floating dtype.
        weight: ``[C, 1, W]``.
        activation: a key of ``ACTIVATIONS``, or None.
        initial_state: ``[N, C, W-1]`` in x's dtype, or None for zeros.
        packed: boundaries of packed documents, or None for dense rows.

    Returns:
        ``[B, T, C]`` in x's dtype, accumulated in float32 at least.
    """
    fla = fla_module(x, "causal_conv1d") if activation in _FLA_ACTIVATIONS else None
    if fla is None:
        return short_convolution(x, weight, activation, initial_state, packed)
    boundaries = {}
    if packed is not None:
        boundaries = {
            "cu_seqlens": packed._boundaries(x.device),
            "cu_seqlens_cpu": packed._boundaries(torch.device("cpu")),
            "chunk_indices": packed.derive(("short_conv.fla_chunks", x.device), lambda: _fla_chunks(packed, x.device)),
        }
    y, _ = fla.causal_conv1d(
        x,
        weight.squeeze(1),
        # FLA keeps W columns and never reads the first
        initial_state=None if initial_state is None else F.pad(initial_state, (1, 0)),
        output_final_state=False,
        activation=activation,
        **boundaries,
    )
    return y  # type: ignore[no-any-return]


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
    W = weight.shape[2]
    wide = torch.promote_types(x.dtype, torch.float32)
    taps = weight.squeeze(1).t().to(wide)
    tokens = x.to(wide)
    past = None if initial_state is None else initial_state.to(wide).transpose(1, 2)
    if packed is None:
        y = _convolve(past, tokens, taps)
    else:
        y = _convolve(None, tokens, taps)
        heads = packed.derive(("short_conv.heads", W, x.device), lambda: _Heads.of(packed, W, x.device))
        if heads.at.numel():  # the stream's first pass let them see the document before theirs
            opening = tokens[0].index_select(0, heads.openings).view(packed.num_sequences, W - 1, -1)
            redone = _convolve(past, opening, taps).flatten(0, 1)
            y = y.index_copy(1, heads.at, redone.index_select(0, heads.rows)[None])
    return (y if activation is None else ACTIVATIONS[activation](y)).to(x.dtype)


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


def _final_state(
    x: Tensor, width: int, state: Tensor | None, packed: PackedSequences | None, lengths: Tensor | None
) -> Tensor:
    """``[N, C, W-1]``: the last W-1 columns of each sequence's state and tokens."""
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
            tail = packed.derive(("short_conv.tail", width, x.device), lambda: _Tail.of_packed(packed, keep, x.device))
        else:
            assert lengths is not None
            tail = _Tail.of(torch.arange(B, device=x.device) * T, lengths, keep)
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


def _fla_chunks(packed: PackedSequences, device: torch.device) -> Tensor:
    """``[chunks, 2]`` (document, chunk within it): FLA's ``prepare_chunk_indices`` without its synchronisation."""
    counts = (packed._boundaries(device).diff() + _FLA_CHUNK - 1) // _FLA_CHUNK
    total = sum(-(-length // _FLA_CHUNK) for length in packed.lengths)
    document = torch.repeat_interleave(torch.arange(packed.num_sequences, device=device), counts, output_size=total)
    place = torch.arange(total, device=device) - (counts.cumsum(0) - counts)[document]
    return torch.stack([document, place], 1).to(torch.int32)
