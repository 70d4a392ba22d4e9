"""Whether tensors carry forward-mode derivatives, which a launch that PyTorch does not see through would drop silently."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

_LEVEL = "_current_level"  # of forward_ad, below 0 where there is no dual level; private, so it may be missing one day


def forward_mode() -> bool:
    """Whether a dual level is open, so that any tensor may carry a tangent.

    Returns:
        Never in a graph that is being captured.

    Example:
        >>> with forward_ad.dual_level():
        ...     forward_mode()
        True
    """
    return not torch.compiler.is_compiling() and getattr(forward_ad, _LEVEL, -1) >= 0


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
    if torch.compiler.is_compiling() or getattr(forward_ad, _LEVEL, 0) < 0:
        return False
    return any(tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)
