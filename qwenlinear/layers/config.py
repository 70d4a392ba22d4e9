"""GatedDeltaNetConfig: what a layer needs to know, under Transformers' names and with Transformers' defaults."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields

from qwenlinear.ops.activations import ACTIVATIONS


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNetConfig:
    """Sizes of a Gated DeltaNet layer. Names and defaults are those of Transformers' ``Qwen3_5TextConfig``.

    ``Qwen3NextConfig`` has the same fields; only its default ``hidden_size`` differs (2048).

    Args:
        hidden_size: width of the residual stream.
        linear_num_key_heads: H, query/key heads.
        linear_num_value_heads: HV, value heads, a multiple of H; value head j uses key head ``j // (HV // H)``.
        linear_key_head_dim: K, size of a query/key head.
        linear_value_head_dim: V, size of a value head.
        linear_conv_kernel_dim: W, width of the short convolution, in tokens.
        hidden_act: activation after the convolution (and in a block's MLP): silu, swish, relu, gelu, gelu_pytorch_tanh, sigmoid
            or tanh.
        rms_norm_eps: added to the mean square by every norm.

    Raises:
        ValueError: a size that is not a whole number >= 1, HV not a multiple of H, an unknown activation, eps not > 0.

    Example:
        >>> config = GatedDeltaNetConfig(hidden_size=32, linear_num_key_heads=2, linear_num_value_heads=4)
        >>> config.key_dim, config.value_dim, config.conv_dim
        (256, 512, 1024)
    """

    hidden_size: int = 4096
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_conv_kernel_dim: int = 4
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        for name in _SIZES:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} needs a whole number >= 1, got {value!r}")
        if self.linear_num_value_heads % self.linear_num_key_heads:
            raise ValueError(
                "linear_num_value_heads needs a multiple of linear_num_key_heads, got "
                f"{self.linear_num_value_heads} and {self.linear_num_key_heads}"
            )
        if not isinstance(self.hidden_act, str) or self.hidden_act not in ACTIVATIONS:
            raise ValueError(f"hidden_act needs one of {', '.join(ACTIVATIONS)}, got {self.hidden_act!r}")
        eps = self.rms_norm_eps
        if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not math.isfinite(eps) or eps <= 0:
            raise ValueError(f"rms_norm_eps needs a number > 0, got {eps!r}")

    @classmethod
    def from_config(cls, config: object) -> GatedDeltaNetConfig:
        """Read the fields from whatever holds them; Transformers is not imported.

        Args:
            config: a GatedDeltaNetConfig (returned as it is), a Transformers config object (``Qwen3NextConfig``,
                ``Qwen3_5TextConfig``, or one that holds such a ``text_config``), or a mapping such as ``config.json``.
                Further fields are left alone.

        Returns:
            The validated config.

        Raises:
            ValueError: a size is missing (all of them are listed), or has a wrong value.

        Example:
            >>> sizes = dict(hidden_size=32, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
            ...              linear_value_head_dim=8, linear_conv_kernel_dim=4)
            >>> GatedDeltaNetConfig.from_config({"model_type": "qwen3_5", "text_config": sizes}).conv_dim
            64
        """
        if isinstance(config, cls):
            return config
        nested = read_field(config, "text_config")
        if nested is not MISSING and nested is not None:
            return cls.from_config(nested)
        found = {field.name: read_field(config, field.name) for field in fields(cls)}
        missing = [name for name in _SIZES if found[name] is MISSING]
        if missing:
            raise ValueError(
                f"config needs the fields of a Gated DeltaNet model, got {type(config).__name__} without "
                f"{', '.join(missing)}; pass a GatedDeltaNetConfig, a Qwen3-Next or Qwen3.5 config, or a mapping"
            )
        return cls(**{name: value for name, value in found.items() if value is not MISSING})  # type: ignore[arg-type]

    @property
    def key_dim(self) -> int:
        """H * K, channels of all queries (and of all keys)."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_dim(self) -> int:
        """HV * V, channels of all values."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels that the short convolution sees: queries, keys, values."""
        return 2 * self.key_dim + self.value_dim


_SIZES = (
    "hidden_size",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)


def read_field(config: object, name: str) -> object:
    """A field of a config object or mapping.

    Args:
        config: the holder.
        name: the field.

    Returns:
        Its value, or ``dataclasses.MISSING``.
    """
    if isinstance(config, Mapping):
        return config.get(name, MISSING)
    return getattr(config, name, MISSING)
