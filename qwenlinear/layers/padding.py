"""RightPadding: a padded batch brought to the one form that a causal layer handles by itself, padding at the right.

Each row is rotated so that its real tokens come first. Nothing real then looks back at padding, whatever the state
before it, and padding only has to be kept from states (no write, no decay) and from gradients (filled, never multiplied).
"""

from __future__ import annotations

import torch
from torch import Tensor


def real_tokens(attention_mask: Tensor, hidden_states: Tensor) -> Tensor:
    """Read a mask against the hidden states that it came with.

    Args:
        attention_mask: ``[B, T or longer]`` any dtype, nonzero for real tokens, the last T columns count.
        hidden_states: ``[B, T, C]``.

    Returns:
        ``[B, T]`` bool, true for real tokens.

    Raises:
        ValueError: another shape or device.

    Example:
        >>> real_tokens(torch.tensor([[1, 0, 1]]), torch.zeros(1, 2, 4)).tolist()
        [[False, True]]
    """
    B, T, _ = hidden_states.shape
    if not isinstance(attention_mask, Tensor):
        raise ValueError(f"attention_mask needs a tensor, got {type(attention_mask).__name__}")
    if attention_mask.dim() != 2 or attention_mask.shape[0] != B or attention_mask.shape[1] < T:
        raise ValueError(f"attention_mask needs shape [{B}, {T} or longer], got {list(attention_mask.shape)}")
    if attention_mask.device != hidden_states.device:
        raise ValueError(
            f"attention_mask needs hidden_states' device {hidden_states.device}, got {attention_mask.device}"
        )
    return attention_mask[:, attention_mask.shape[1] - T :] != 0


class RightPadding:
    """The rotation that an attention mask asks for; nothing in it synchronises with a GPU.

    Args:
        attention_mask: ``[B, T or longer]`` any dtype, nonzero for real tokens, the last T columns count. The real
            tokens of a row are contiguous, or there is none; on the CPU this is checked.
        hidden_states: ``[B, T, C]``, for its shape and device.

    Attributes:
        lengths: ``[B]`` int64, real tokens of each row.

    Raises:
        ValueError: another shape or device, or real tokens with padding between them.

    Example:
        >>> x = torch.tensor([[[9.0], [1.0], [2.0]], [[3.0], [4.0], [5.0]]])
        >>> RightPadding(torch.tensor([[0, 1, 1], [1, 1, 1]]), x).align(x).flatten(1).tolist()
        [[1.0, 2.0, 0.0], [3.0, 4.0, 5.0]]
    """

    lengths: Tensor

    def __init__(self, attention_mask: Tensor, hidden_states: Tensor) -> None:
        real = real_tokens(attention_mask, hidden_states)
        T, device = real.shape[1], real.device
        self.lengths = real.sum(1)
        if device.type == "cpu":  # elsewhere reading the values would synchronise
            _check_not_additive(attention_mask)
            _check_contiguous(real)
        place = torch.arange(T, device=device)
        self._padding = (place >= self.lengths[:, None])[..., None]  # [B, T, 1] once aligned
        self._order: tuple[Tensor, Tensor] | None = None
        if T > 1:
            starts = real.to(torch.uint8).argmax(1, keepdim=True)  # the first real token
            self._order = (place + starts).remainder(T)[..., None], (place - starts).remainder(T)[..., None]

    def align(self, x: Tensor) -> Tensor:
        """Rotate each row's real tokens to the front.

        Args:
            x: ``[B, T, C]``.

        Returns:
            ``[B, T, C]`` with zeros, which pass no gradient, where padding is.
        """
        if self._order is not None:
            x = _PermuteTokens.apply(x, *self._order)
        return self.fill(x)

    def fill(self, x: Tensor) -> Tensor:
        """Zero the padding of an aligned tensor.

        Args:
            x: ``[B, T, C]``, aligned.

        Returns:
            ``[B, T, C]``; the zeros pass no gradient.
        """
        return x.masked_fill(self._padding, 0.0)

    def restore(self, x: Tensor) -> Tensor:
        """Undo :meth:`align`.

        Args:
            x: ``[B, T, C]``, aligned.

        Returns:
            ``[B, T, C]`` in the caller's order, zero where padding is.
        """
        x = self.fill(x)
        return x if self._order is None else _PermuteTokens.apply(x, *reversed(self._order))


class _PermuteTokens(torch.autograd.Function):
    """Gather tokens by a permutation; its gradient gathers by the inverse, where autograd's would scatter and add."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(order, inverse)
        return torch.take_along_dim(x, order, 1)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:
        order, inverse = ctx.saved_tensors  # type: ignore[attr-defined]
        return _PermuteTokens.apply(grad, inverse, order), None, None


def _check_not_additive(attention_mask: Tensor) -> None:
    if attention_mask.is_floating_point() and bool((attention_mask < 0).any()):
        raise ValueError(
            "attention_mask needs nonzero for real tokens and zero for padding, got negative values: this looks like an "
            "additive mask, of which this is (mask >= 0)"
        )


def _check_contiguous(real: Tensor) -> None:
    runs = real[:, :1].sum(1) + (real[:, 1:] & ~real[:, :-1]).sum(1)
    broken = (runs > 1).nonzero().flatten().tolist()
    if broken:
        raise ValueError(
            "attention_mask needs each row's real tokens side by side, got padding between them in row "
            f"{broken[0]}; drop those tokens, or pack the pieces with cu_seqlens"
        )
