"""What every launch of a Triton kernel needs beside its arguments: how it is called, on which device, and how wide that is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

_INTERPRETED_PROCESSORS = 2  # so that the interpreter's small cases take a persistent kernel round its loop
_NOTHING = contextlib.nullcontext()

# PyTorch says publicly whether it compiles, traces or runs under a torch-function mode, but not whether a dispatch mode
# (make_fx, FlopCounterMode) or a transform (vmap, functionalize) is active. Where these names are missing one day, every
# call goes through the dispatcher, which is slower and always right.
_dispatch_modes: Callable[[], int] | None = getattr(torch._C, "_len_torch_dispatch_stack", None)
_transforms: Callable[[], bool] | None = getattr(torch._C, "_are_functorch_transforms_active", None)


def eager(*tensors: Tensor | None) -> bool:
    """Whether a launch may be called as a function. PyTorch's dispatcher costs the host as much as the launch itself.

    Whoever watches or transforms operators (compilers, exporters, tracers, modes, ``torch.func``, tensor subclasses) needs
    the registered operator; plain tensors with memory in eager code do not. Gradients are the caller's to ask about.

    Args:
        *tensors: all that the operator would be called with; None is passed over.

    Returns:
        True for plain tensors that nobody but eager PyTorch sees.

    Example:
        >>> eager(torch.ones(1), None, nn.Parameter(torch.ones(1)))
        True
        >>> torch.vmap(lambda x: x + eager(x))(torch.zeros(2))
        tensor([0., 0.])
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return False
    if _dispatch_modes is None or _transforms is None or _dispatch_modes() or _transforms():
        return False
    try:
        for tensor in tensors:
            if tensor is None:
                continue
            kind = type(tensor)
            if (kind is not Tensor and kind is not nn.Parameter) or tensor.is_meta:
                return False
            tensor.data_ptr()
    except RuntimeError:  # no memory of its own: a wrapper, as a backward pass over several gradients at once has it
        return False
    return not torch.overrides.has_torch_function(tensors)  # of plain tensors it is the modes that this finds


def needs_grad(*tensors: Tensor | None) -> bool:
    """Whether autograd would want a backward pass.

    Args:
        *tensors: all that an operator is called with; None is passed over.

    Returns:
        True where gradients are on and a tensor requires one.
    """
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def written(tensor: Tensor) -> None:
    """Tell autograd that a launch wrote to a tensor, so that whoever saved it for a backward pass hears of it.

    Args:
        tensor: what was changed in place.
    """
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)


def on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """A context in which Triton launches on this device: it asks for the current one, whatever its tensors say.

    Args:
        device: of the tensors; a CPU only where Triton interprets.

    Returns:
        The context.
    """
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(device)


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n. Triton's own function looks for its constants in every argument.

    Args:
        n: 1 or more.

    Returns:
        1, 2, 4, 8, ...

    Example:
        >>> [power_of_two(n) for n in (1, 2, 3, 96, 128)]
        [1, 2, 4, 128, 128]
    """
    return 1 << (n - 1).bit_length()


@lru_cache(maxsize=64)
def processors(device: torch.device) -> int:
    """Multiprocessors of a device.

    Args:
        device: as in :func:`on`.

    Returns:
        How many programs of full width run at once.
    """
    if device.type != "cuda":
        return _INTERPRETED_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
