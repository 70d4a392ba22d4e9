"""The two RMS norms of these models: gated (inside a layer) and zero-centred (around it)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qwenlinear.checks import needs_eps, needs_floating, needs_size
from qwenlinear.ops import epilogue, why_not_fused


class GatedRMSNorm(nn.Module):
    """``weight * rms_norm(x) * silu(gate)``, Transformers' ``Qwen3NextRMSNormGated``.

    :func:`qwenlinear.ops.epilogue`: a fused operator on a GPU, otherwise PyTorch with the same results; `repr` says which.

    Args:
        size: V, the last dimension.
        eps: added to the mean square.

    Raises:
        ValueError: a size or an eps that is none.

    Example:
        >>> norm = GatedRMSNorm(8)
        >>> norm
        GatedRMSNorm(8, eps=1e-06, runs in PyTorch: tensors on cpu)
        >>> norm(torch.randn(2, 3, 8), torch.randn(2, 3, 8)).shape
        torch.Size([2, 3, 8])
    """

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        needs_size("size", size)
        needs_eps("eps", eps)
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def reset_parameters(self) -> None:
        """Set the weight to one."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Normalise the last dimension, then gate.

        Args:
            x: ``[..., V]`` any floating dtype.
            gate: ``[..., V]`` before the activation.

        Returns:
            ``[..., V]`` in x's dtype; computed in float32 at least.
        """
        return epilogue(x, gate, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}, {self.implementation(self.weight.device, self.weight.dtype)}"

    def implementation(self, device: torch.device, dtype: torch.dtype) -> str:
        """What runs on such tensors, in words."""
        reason = why_not_fused(device, dtype, norm_size=self.weight.shape[0])
        return "runs fused" if reason is None else f"runs in PyTorch: {reason}"


class ZeroCenteredRMSNorm(nn.Module):
    """``(1 + weight) * rms_norm(x)`` in float32 at least, Transformers' ``Qwen3_5RMSNorm``; the weight starts at zero.

    Args:
        size: the last dimension.
        eps: added to the mean square.

    Raises:
        ValueError: a size or an eps that is none.

    Example:
        >>> ZeroCenteredRMSNorm(4)(torch.full((1, 4), 3.0))
        tensor([[1.0000, 1.0000, 1.0000, 1.0000]], grad_fn=...)
    """

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        needs_size("size", size)
        needs_eps("eps", eps)
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(size))

    def reset_parameters(self) -> None:
        """Set the weight to zero, which is a scale of one."""
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension.

        Args:
            x: ``[..., size]`` any floating dtype.

        Returns:
            The same shape and dtype.

        Raises:
            ValueError: another last dimension, dtype or device.
        """
        needs_floating("x", x)
        if x.dim() < 1 or x.shape[-1] != self.weight.shape[0]:
            raise ValueError(f"x needs {self.weight.shape[0]} as its last dimension, got {list(x.shape)}")
        if x.device != self.weight.device:
            raise ValueError(f"x needs the weight's device {self.weight.device}, got {x.device}")
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.rms_norm(x.to(wide), self.weight.shape, 1.0 + self.weight.to(wide), self.eps).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"
