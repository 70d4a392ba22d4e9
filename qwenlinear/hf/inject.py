"""inject and restore: the Gated DeltaNet layers of a Transformers model on a kernel of choice."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator

import torch
from torch import nn

from qwenlinear.hf.boundaries import DocumentsHook, HandOverHooks, positional_names
from qwenlinear.hf.layer import Injection, injected_class, injection_of
from qwenlinear.hf.report import InjectionReport, LayerReport
from qwenlinear.kernels import AutoKernel, GatedDeltaKernel
from qwenlinear.layers import GatedDeltaNet, GatedDeltaNetConfig

_LAYOUTS = {
    "Qwen3NextGatedDeltaNet": ("in_proj_qkvz", "in_proj_ba"),
    "Qwen3_5GatedDeltaNet": ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    "Qwen3_5MoeGatedDeltaNet": ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
}


def inject(model: nn.Module, kernel: GatedDeltaKernel | None = None) -> InjectionReport:
    """Let every Gated DeltaNet layer of a Transformers model compute with qwenlinear; nothing else of it changes.

    Modules, parameters, names, dtypes and what is saved stay the same ones, so optimizers, hooks, adapters, device maps
    and sharding hold, whether they came before or come later. A second injection replaces the kernel. Documents packed
    into a row are kept apart: ``cu_seq_lens_q``, ``seq_idx``, and ``position_ids`` that start again (without a cache and
    a 2-D mask, which is Transformers' own rule).

    Args:
        model: a Qwen3-Next, Qwen3.5 or Qwen3.5-MoE model of Transformers 5.6 or later, whole or in part: with any head,
            multimodal, wrapped by PEFT or Accelerate.
        kernel: what computes the recurrence of all layers; default None for one ``AutoKernel()``.

    Returns:
        Which layer computes with what, and what was left and why; to print.

    Raises:
        ValueError: no such layer in the model, none that can be injected (with each reason), or a kernel that is none.
            The model is unchanged then.

    Example:
        >>> from torch import nn
        >>> inject(nn.Linear(2, 2))
        Traceback (most recent call last):
        ValueError: model needs Gated DeltaNet layers of Qwen3-Next or Qwen3.5, got Linear without one
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model needs an nn.Module, got {type(model).__name__}")
    if kernel is not None and not isinstance(kernel, GatedDeltaKernel):
        raise ValueError(
            f"kernel needs a GatedDeltaKernel or None, got {kernel!r}; kernel_from_name makes one from a name"
        )
    kernel = kernel if kernel is not None else AutoKernel()
    found = [(name, module, _why_not(module)) for name, module in _candidates(model)]
    if not found:
        raise ValueError(
            f"model needs Gated DeltaNet layers of Qwen3-Next or Qwen3.5, got {type(model).__name__} without one"
        )
    able = [module for _, module, reason in found if reason is None]
    if not able:
        reasons = "\n".join(f"  {name}: {reason}" for name, _, reason in found)
        raise ValueError(f"model needs a Gated DeltaNet layer that can be injected, got none:\n{reasons}")
    for module in able:
        _inject_layer(module, kernel)
    unhooked = _lay_hooks(model)
    layers = tuple(
        LayerReport(name, type(module).__name__, None if reason is not None else repr(kernel), reason or "")
        for name, module, reason in found
    )
    return InjectionReport(layers, _notes(kernel, able, unhooked))


def restore(model: nn.Module) -> int:
    """Undo :func:`inject`: the layers compute as Transformers computes them, on the same modules and parameters.

    Args:
        model: an injected model, or a part of one.

    Returns:
        How many layers were given back; 0 where none was injected.

    Raises:
        ValueError: no module, or a layer whose class was changed once more after the injection. Nothing is changed then.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model needs an nn.Module, got {type(model).__name__}")
    layers = [(name, m, injection) for name, m in model.named_modules() if (injection := injection_of(m)) is not None]
    for name, module, injection in layers:
        if type(module) is not injected_class(injection.original):
            raise ValueError(
                f"{name} needs the class that inject gave it, got {type(module).__name__}: sharded or wrapped later?"
            )
    for _, module, injection in layers:
        del module._qwenlinear
        module.__class__ = injection.original
        _rebind(module, injection.original)
    for module in model.modules():
        for hook in list(module._forward_pre_hooks.values()):
            if isinstance(hook, DocumentsHook):
                hook.handle.remove()
            elif isinstance(owner := getattr(hook, "__self__", None), HandOverHooks):
                for handle in owner.handles:
                    handle.remove()
    return len(layers)


def _candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Whatever calls itself a Gated DeltaNet, so that what cannot be injected is reported."""
    for name, module in model.named_modules():
        if any(cls.__name__.endswith("GatedDeltaNet") for cls in type(module).__mro__):
            yield name, module


def _family(module: nn.Module) -> str | None:
    for cls in type(module).__mro__:
        if cls.__name__ in _LAYOUTS and cls.__module__.startswith("transformers."):
            return cls.__name__
    return None


def _why_not(module: nn.Module) -> str | None:
    if injection_of(module) is not None:
        return None
    if isinstance(module, GatedDeltaNet):
        return "it is a qwenlinear layer: set its kernel attribute"
    family = _family(module)
    if family is None:
        return f"its layout is not known: {', '.join(_LAYOUTS)} of Transformers are"
    if not type(module).forward.__module__.startswith("transformers."):
        return f"{type(module).__name__} has a forward of its own, which would be lost"
    if "forward" in module.__dict__ and not hasattr(module, "_old_forward"):
        return "its forward was replaced on the object, and the replacement would be lost"
    missing = [name for name in (*_LAYOUTS[family], "conv1d", "norm", "out_proj") if not hasattr(module, name)]
    if missing:
        return f"it lacks {', '.join(missing)}"
    if not isinstance(module.conv1d, nn.Conv1d) or module.conv1d.bias is not None:
        return "its conv1d is not a plain nn.Conv1d without bias, and what was added to it would be dropped"
    try:
        _config(module)
    except ValueError as error:
        return str(error)
    return None


def _config(module: nn.Module) -> GatedDeltaNetConfig:
    return GatedDeltaNetConfig(
        hidden_size=module.hidden_size,  # type: ignore[arg-type]  # what Transformers keeps on its modules
        linear_num_key_heads=module.num_k_heads,  # type: ignore[arg-type]
        linear_num_value_heads=module.num_v_heads,  # type: ignore[arg-type]
        linear_key_head_dim=module.head_k_dim,  # type: ignore[arg-type]
        linear_value_head_dim=module.head_v_dim,  # type: ignore[arg-type]
        linear_conv_kernel_dim=module.conv_kernel_size,  # type: ignore[arg-type]
        hidden_act=module.activation,  # type: ignore[arg-type]
        rms_norm_eps=module.layer_norm_epsilon,  # type: ignore[arg-type]
    )


def _inject_layer(module: nn.Module, kernel: GatedDeltaKernel) -> None:
    injected = injection_of(module)
    if injected is not None:
        injected.kernel = kernel
        return
    original = type(module)
    parameters = inspect.signature(original.forward).parameters.values()
    passed_on = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    module._qwenlinear = Injection(kernel, _config(module), original, passed_on)  # type: ignore[assignment]
    module.__class__ = injected_class(original)
    _rebind(module, type(module))


def _rebind(module: nn.Module, cls: type[nn.Module]) -> None:
    """Accelerate keeps the forward it wraps on the object."""
    if "_old_forward" in module.__dict__:
        module._old_forward = types.MethodType(cls.forward, module)  # type: ignore[assignment]


def _lay_hooks(model: nn.Module) -> list[str]:
    """Hooks on the text models above injected layers; the names of layers that have none above them."""
    modules = dict(model.named_modules())
    unhooked = []
    for name, module in modules.items():
        injection = injection_of(module)
        if injection is None:
            continue
        above = [modules[name[:end]] for end in range(len(name)) if name[end] == "."][::-1]
        above += [model] if name else []
        text_model = next((m for m in above if {"position_ids", "inputs_embeds"} <= set(positional_names(m))), None)
        if text_model is None:
            unhooked.append(name or type(module).__name__)
        elif not any(isinstance(hook, DocumentsHook) for hook in text_model._forward_pre_hooks.values()):
            hook = DocumentsHook(positional_names(text_model))
            hook.handle = text_model.register_forward_pre_hook(hook, with_kwargs=True)
        if above and not injection.passed_on:
            _lay_hand_over(above[0])
    return unhooked


def _lay_hand_over(decoder: nn.Module) -> None:
    if not any(isinstance(getattr(h, "__self__", None), HandOverHooks) for h in decoder._forward_pre_hooks.values()):
        hooks = HandOverHooks()
        hooks.handles = (
            decoder.register_forward_pre_hook(hooks.before, with_kwargs=True),
            decoder.register_forward_hook(hooks.after, always_call=True),
        )


def _notes(kernel: GatedDeltaKernel, layers: list[nn.Module], unhooked: list[str]) -> tuple[str, ...]:
    notes = []
    devices = {p.device for layer in layers for p in layer.parameters()} - {torch.device("meta")}
    for device in sorted(devices, key=str):
        notes += [f"cannot run on {device}: {refusal}" for refusal in kernel._missing(device)]
    if unhooked:
        notes.append(
            f"position_ids do not reach {', '.join(unhooked)}, which have no text model above them here: packed documents "
            "need cu_seq_lens_q"
        )
    return tuple(notes)
