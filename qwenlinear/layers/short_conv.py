"""ShortConvolution: the depthwise causal convolution before the recurrence, over dense, padded or packed sequences.

A sequence is its state (the W-1 columns before its first token, zeros when it starts here) followed by its tokens, so a
piece shorter than W-1, an empty document and a sequence that goes on from a cache are no special cases.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from qwenlinear.checks import needs_floating, needs_size, needs_tensor
from qwenlinear.kernels import PackedSequences
from qwenlinear.ops.activations import ACTIVATIONS
from qwenlinear.ops.convolution import check_lengths, final_state, short_convolution


class ShortConvolution(nn.Module):
    """Depthwise causal convolution without bias, then an activation; ``weight`` is ``nn.Conv1d``'s ``[C, 1, W]``.

    In PyTorch, accumulating in float32 at least and rounding once. A layer reads the weight and runs :mod:`qwenlinear.ops`,
    where the convolution is a part of the fused prologue; called by itself, or in a layer with hooks laid on it, it runs here.

    Args:
        channels: C.
        width: W, taps per channel.
        activation: silu, swish, relu, gelu, gelu_pytorch_tanh, sigmoid, tanh, or None for none.

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
        needs_size("channels", channels)
        needs_size("width", width)
        if activation is not None and not (isinstance(activation, str) and activation in ACTIVATIONS):
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
                right; 0 to T (checked on the CPU, clamped elsewhere); default None for all. Not together with
                ``cu_seqlens``.

        Returns:
            ``[B, T, C]`` in x's dtype, and ``[N, C, W-1]`` in x's dtype or None.

        Raises:
            ValueError: a wrong shape, dtype or device, or boundaries that do not fit.
        """
        self._check(x, initial_state, cu_seqlens, lengths)
        packed = cu_seqlens if cu_seqlens is not None and cu_seqlens.num_sequences > 1 else None  # one is dense
        state = None if initial_state is None else initial_state.to(x.dtype)
        y = short_convolution(x, self.weight, self.activation, state, packed)
        return y, final_state(x, self.width, state, packed, lengths) if output_final_state else None

    def extra_repr(self) -> str:
        return f"{self.channels}, width={self.width}, activation={self.activation}"

    def _check(self, x: Tensor, state: Tensor | None, packed: PackedSequences | None, lengths: Tensor | None) -> None:
        needs_floating("x", x)
        if x.dim() != 3 or x.shape[2] != self.channels:
            raise ValueError(f"x needs shape [B, T, {self.channels}], got {list(x.shape)}")
        if x.device != self.weight.device:
            raise ValueError(f"x needs the weight's device {self.weight.device}, got {x.device}")
        if packed is not None and not isinstance(packed, PackedSequences):
            raise ValueError(
                f"cu_seqlens needs a PackedSequences, got {type(packed).__name__}; from_cu_seqlens makes one"
            )
        if lengths is not None:
            needs_tensor("lengths", lengths)
            check_lengths(lengths, x)
        if packed is not None and (x.shape[0] != 1 or packed.total_tokens != x.shape[1] or lengths is not None):
            raise ValueError(
                "cu_seqlens needs a batch of one that ends where it ends, and no lengths; got x "
                f"{list(x.shape)}, {packed.total_tokens} tokens{'' if lengths is None else ', lengths'}"
            )
        wanted = (x.shape[0] if packed is None else packed.num_sequences, self.channels, self.width - 1)
        if state is not None:
            needs_floating("initial_state", state)
            if tuple(state.shape) != wanted:
                raise ValueError(f"initial_state needs shape {list(wanted)} ([N, C, W-1]), got {list(state.shape)}")
            if state.device != x.device:
                raise ValueError(f"initial_state needs x's device {x.device}, got {state.device}")
