"""Whether a module is nothing but its class and its parameters, so that reading its weight equals calling it."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.modules import module as _torch_module


def why_not_plain(module: nn.Module, kind: type[nn.Module]) -> str | None:
    """Why reading a module's weight would lose something that calling it does.

    Args:
        module: any module.
        kind: the class that it has to be, exactly: adapters, quantisation, parametrisation and sharding change it.

    Returns:
        One reason in words that follows the module's name, or None for a plain one.

    Example:
        >>> why_not_plain(nn.Linear(2, 2), nn.Linear) is None
        True
        >>> why_not_plain(nn.Sequential(), nn.Linear)
        'is a Sequential'
    """
    if type(module) is not kind:
        return f"is a {type(module).__name__}"
    hooks = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    if any(hooks):
        return "has hooks"
    if _torch_module._has_any_global_hook():
        return "is called for the sake of hooks on all modules"
    if "forward" in module.__dict__ or module._compiled_call_impl is not None:
        return "has a forward of its own"
    for name, parameter in module._parameters.items():
        if (reason := _why_no_plain_tensor(name, parameter)) is not None:
            return reason
    if "weight" in module._parameters and "weight" not in module.__dict__:
        return None  # seen above: looking a module's attribute up is slow
    return _why_no_plain_tensor("weight", getattr(module, "weight", None))


def _why_no_plain_tensor(name: str, found: object) -> str | None:
    plain = found is None or type(found) in (nn.Parameter, Tensor)
    return None if plain else f"has a {name} that is a {type(found).__name__}"
