"""GatedDeltaNetBlock: a decoder layer around a GDN layer, as Qwen3.5 has it."""

from __future__ import annotations

from dataclasses import MISSING

from torch import Tensor, nn

from qwenlinear.checks import needs_size
from qwenlinear.kernels import GatedDeltaKernel, PackedSequences
from qwenlinear.layers.cache import GatedDeltaNetCache
from qwenlinear.layers.call import check_input
from qwenlinear.layers.config import GatedDeltaNetConfig, read_field
from qwenlinear.layers.gated_delta_net import Qwen3_5GatedDeltaNet
from qwenlinear.layers.gated_norm import ZeroCenteredRMSNorm
from qwenlinear.layers.padding import real_tokens
from qwenlinear.ops.activations import ACTIVATIONS


class GatedDeltaNetBlock(nn.Module):
    """Zero-centred RMS norm, GDN layer, residual; zero-centred RMS norm, SwiGLU, residual.

    Parameters carry the names of Transformers' ``Qwen3_5DecoderLayer`` with linear attention.

    Args:
        config: as :class:`GatedDeltaNet` takes it.
        kernel: what computes the recurrence; default None for ``AutoKernel()``.
        intermediate_size: width of the MLP; default None for the config's own where it has one, else three times
            ``hidden_size``, Qwen3.5's ratio.

    Raises:
        ValueError: a config, kernel or size that is none.

    Example:
        >>> import torch
        >>> heads = dict(linear_num_key_heads=2, linear_num_value_heads=4)
        >>> block = GatedDeltaNetBlock(GatedDeltaNetConfig(hidden_size=32, **heads), intermediate_size=64)
        >>> block(torch.randn(2, 6, 32)).shape
        torch.Size([2, 6, 32])
    """

    def __init__(
        self, config: object, kernel: GatedDeltaKernel | None = None, *, intermediate_size: int | None = None
    ) -> None:
        super().__init__()
        sizes = GatedDeltaNetConfig.from_config(config)
        width = intermediate_size if intermediate_size is not None else _intermediate_size(config, sizes)
        needs_size("intermediate_size", width)
        assert isinstance(width, int)
        self.linear_attn = Qwen3_5GatedDeltaNet(sizes, kernel)
        self.mlp = SwiGLU(sizes.hidden_size, width, sizes.hidden_act)
        self.input_layernorm = ZeroCenteredRMSNorm(sizes.hidden_size, sizes.rms_norm_eps)
        self.post_attention_layernorm = ZeroCenteredRMSNorm(sizes.hidden_size, sizes.rms_norm_eps)

    def reset_parameters(self) -> None:
        """Redraw every parameter."""
        for module in self.children():
            module.reset_parameters()  # type: ignore[operator]

    def forward(
        self,
        hidden_states: Tensor,
        cu_seqlens: Tensor | PackedSequences | None = None,
        cache: GatedDeltaNetCache | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """One decoder layer.

        Args: those of :meth:`GatedDeltaNet.forward`.

        Returns:
            ``[B, T, hidden_size]``, zero where ``attention_mask`` is.

        Raises:
            ValueError: an argument that does not fit.
            UnsupportedCall: the kernel refuses the call. After any error the cache is unchanged, or refuses further calls
                where its states had been written in place (:class:`GatedDeltaNetCache`).
        """
        check_input(self.linear_attn.config, hidden_states, cache)
        padding = None if attention_mask is None else ~real_tokens(attention_mask, hidden_states)[..., None]
        if padding is not None:  # norms and MLP go row by row, but their weights' gradients sum over the padding
            hidden_states = hidden_states.masked_fill(padding, 0.0)
        held = None if cache is None else dict(vars(cache))
        mixed = self.linear_attn(self.input_layernorm(hidden_states), cu_seqlens, cache, attention_mask)
        try:
            hidden_states = hidden_states + mixed
            hidden_states = hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
        except BaseException:
            if cache is not None and held is not None:  # the layer is through when the MLP fails
                cache.take_back(held)
            raise
        return hidden_states if padding is None else hidden_states.masked_fill(padding, 0.0)


class SwiGLU(nn.Module):
    """``down_proj(act(gate_proj(x)) * up_proj(x))``, Transformers' ``Qwen3_5MLP``.

    Args:
        size: width in and out.
        intermediate_size: width between.
        hidden_act: silu, swish, relu, gelu, gelu_pytorch_tanh, sigmoid or tanh.

    Raises:
        ValueError: a size that is none, an unknown activation.

    Example:
        >>> import torch
        >>> SwiGLU(8, 16)(torch.randn(2, 3, 8)).shape
        torch.Size([2, 3, 8])
    """

    def __init__(self, size: int, intermediate_size: int, hidden_act: str = "silu") -> None:
        needs_size("size", size)
        needs_size("intermediate_size", intermediate_size)
        if not isinstance(hidden_act, str) or hidden_act not in ACTIVATIONS:
            raise ValueError(f"hidden_act needs one of {', '.join(ACTIVATIONS)}, got {hidden_act!r}")
        super().__init__()
        self.hidden_act = hidden_act
        self.gate_proj = nn.Linear(size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, size, bias=False)

    def reset_parameters(self) -> None:
        """Redraw the weights as ``nn.Linear`` does."""
        for module in self.children():
            module.reset_parameters()  # type: ignore[operator]

    def forward(self, x: Tensor) -> Tensor:
        """Apply it to each token: ``[..., size]`` to ``[..., size]``."""
        y: Tensor = self.down_proj(ACTIVATIONS[self.hidden_act](self.gate_proj(x)) * self.up_proj(x))
        return y

    def extra_repr(self) -> str:
        return f"hidden_act={self.hidden_act!r}"


def _intermediate_size(config: object, sizes: GatedDeltaNetConfig) -> object:
    nested = read_field(config, "text_config")
    width = read_field(config if nested in (MISSING, None) else nested, "intermediate_size")
    return 3 * sizes.hidden_size if width is MISSING else width
