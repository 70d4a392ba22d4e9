"""Whether a tensor may be written to where it lies."""

from __future__ import annotations

import torch
from torch import Tensor


def why_not_writable(name: str, tensor: Tensor) -> str | None:
    """Why a state may not be updated in place; what is asked is its metadata.

    Args:
        name: what the caller's user knows it as, with its article.
        tensor: any.

    Returns:
        What is needed, what came and what to do, in words that follow "needs"; None where it may be written to.

    Example:
        >>> why_not_writable("a state", torch.zeros(1, 2).expand(3, 2))
        'a state with memory of its own for each element, got an expanded one (strides [0, 1]): clone() it'
        >>> why_not_writable("a state", torch.zeros(3, 2)) is None
        True
    """
    if not tensor.is_contiguous() and any(  # an expanded tensor is not: nearly every call ends here
        size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ):
        return (
            f"{name} with memory of its own for each element, got an expanded one (strides {list(tensor.stride())}): "
            "clone() it"
        )
    # A graph that is being captured cannot ask; there PyTorch itself refuses to write to such a tensor.
    if not torch.compiler.is_compiling() and tensor.is_inference() and not torch.is_inference_mode_enabled():
        return (
            f"inference mode around a call that writes to {name} made in inference mode, got none: use "
            "torch.inference_mode(), or clone() it"
        )
    return None
