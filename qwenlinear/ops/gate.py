"""The decay gate, ``g = -exp(A_log) * softplus(a + dt_bias)``, as a function that stays finite."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

STRONGEST_LOG_DECAY = -1e4
"""Where g is clamped: exp(-1e4) is zero in every dtype, and 0 * inf cannot arise further on."""

_LINEAR = 40.0  # beyond this |x|, softplus(x) is x or exp(x) to within float64


def log_decay(a: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
    """Log-decay of a token: the product is formed in log space, so neither factor overflows or underflows by itself.

    Args:
        a: ``[..., HV]`` the projection's output, any floating dtype.
        A_log: ``[HV]``.
        dt_bias: ``[HV]``.

    Returns:
        ``[..., HV]`` in [-1e4, 0], float32, or float64 where an argument is; finite gradients for finite arguments
        (zero where the clamp holds). Source: Gated DeltaNet, arXiv:2412.06464, with Mamba-2's parametrisation.

    Example:
        >>> log_decay(torch.tensor([100.0, -200.0]), torch.full((2,), 100.0), torch.zeros(2)).tolist()
        [-10000.0, -3.783505853677006e-44]
    """
    wide = torch.promote_types(torch.promote_types(a.dtype, A_log.dtype), torch.float32)
    x = a.to(wide) + dt_bias.to(wide)
    small = x < -_LINEAR
    log_softplus = torch.where(small, x, F.softplus(x.masked_fill(small, 0.0), threshold=_LINEAR).log())
    decay = (A_log.to(wide) + log_softplus).clamp(max=math.log(-STRONGEST_LOG_DECAY)).exp()
    return decay.neg().clamp(min=STRONGEST_LOG_DECAY)  # exp(log(1e4)) may round to a little more
