"""Whether tensors carry forward-mode derivatives, which a launch that PyTorch does not see through would drop silently."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad


def carry_tangents(*tensors: Tensor | None) -> bool:
    """Ask tensors for tangents (:mod:`torch.autograd.forward_ad`, ``torch.func.jvp``).

    Args:
        *tensors: any; None is passed over.

    Returns:
        Whether one is a dual number. Never in a graph that is being captured, which carries none.

    Example:
        >>> carry_tangents(torch.ones(2), None)
        False
        >>> with forward_ad.dual_level():
        ...     carry_tangents(forward_ad.make_dual(torch.ones(2), torch.ones(2)))
        True
    """
    # Without a level nothing is dual: one look instead of one a tensor. A PyTorch without this name is asked each time.
    if torch.compiler.is_compiling() or getattr(forward_ad, "_current_level", 0) < 0:
        return False
    return any(tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)
