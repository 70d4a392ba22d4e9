"""The input projections of a layer in the three layouts that frameworks use, for weights and for LoRA adapters.

- ``"grouped"``: Qwen3-Next's ``in_proj_qkvz`` (for each key head: q, k, its value heads' v, their z) and ``in_proj_ba``
  (for each key head: b, a).
- ``"flat"``: Qwen3.5's ``in_proj_qkv`` (q | k | v), ``in_proj_z``, ``in_proj_b``, ``in_proj_a``, heads in order.
- ``"fused"``: one ``in_proj`` (q | k | v | z | b | a), heads in order: Megatron-Core's, and vLLM's merged matrices
  ``in_proj_qkvz`` and ``in_proj_ba`` of Qwen3.5 stacked.

They differ by a permutation of rows, so nothing is rounded and nothing is lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from qwenlinear.checks import needs_floating, needs_tensor, needs_values
from qwenlinear.layers import GatedDeltaNetConfig

Layout = Literal["grouped", "flat", "fused"]

_MODULES: dict[str, tuple[str, ...]] = {
    "grouped": ("in_proj_qkvz", "in_proj_ba"),
    "flat": ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    "fused": ("in_proj",),
}
_ALL = tuple(name for names in _MODULES.values() for name in names)


def convert_weights(weights: Mapping[str, Tensor], config: object, target: Layout) -> dict[str, Tensor]:
    """Lay the input projections of one layer out anew.

    Args:
        weights: the layer's state dict; the names that end in a projection's (``in_proj_qkv.weight``, with any prefix in
            front) say in which layout it is, everything else is passed on as it is. Rows are the first dimension, so
            biases and per-row scales convert too.
        config: a :class:`GatedDeltaNetConfig`, a Transformers config, or a mapping of one.
        target: ``"grouped"``, ``"flat"`` or ``"fused"``.

    Returns:
        A new state dict with new tensors for the projections, same dtypes, the rest shared.

    Raises:
        ValueError: no or several layouts, several layers, a missing projection, or a wrong number of rows, all of them
            listed; what is no tensor; projections of different columns, dtypes or devices.

    Example:
        >>> config = GatedDeltaNetConfig(hidden_size=6, linear_num_key_heads=2, linear_num_value_heads=4,
        ...                              linear_key_head_dim=3, linear_value_head_dim=2)
        >>> grouped = {"in_proj_qkvz.weight": torch.randn(28, 6), "in_proj_ba.weight": torch.randn(8, 6)}
        >>> flat = convert_weights(grouped, config, "flat")
        >>> {name: tuple(weight.shape) for name, weight in flat.items()}
        {'in_proj_qkv.weight': (20, 6), 'in_proj_z.weight': (8, 6), 'in_proj_b.weight': (4, 6), 'in_proj_a.weight': (4, 6)}
        >>> all(torch.equal(weight, grouped[name]) for name, weight in convert_weights(flat, config, "grouped").items())
        True
    """
    sizes = GatedDeltaNetConfig.from_config(config)
    _check_layout(target)
    _check_names("weights", weights)
    found: dict[str, dict[str, Tensor]] = {}  # what follows the projection's name -> projection -> tensor
    prefixes, rest = set(), {}
    for name, tensor in weights.items():
        prefix, module, suffix = _split(name)
        if module is None:
            rest[name] = tensor
        else:
            needs_tensor(name, tensor)
            prefixes.add(prefix)
            found.setdefault(suffix, {})[module] = tensor
    if len(prefixes) != 1:
        raise ValueError(f"weights need the input projections of one layer, got those of {sorted(prefixes) or 'none'}")
    (prefix,) = prefixes
    converted = dict(rest)
    for suffix, tensors in found.items():
        source = _layout_of(tensors)
        _check_rows({name + suffix: (tensor, name) for name, tensor in tensors.items()}, sizes)
        missing = [name for name in _MODULES[source] if name not in tensors]
        if missing:
            raise ValueError(f"weights need every projection of the {source} layout, got none for {', '.join(missing)}")
        named = {name + suffix: tensor for name, tensor in tensors.items()}
        _check_one("number of columns", {name: tuple(tensor.shape[1:]) for name, tensor in named.items()})
        _check_one("dtype", {name: tensor.dtype for name, tensor in named.items()})
        _check_one("device", {name: tensor.device for name, tensor in named.items()})
        stacked = torch.cat([tensors[name] for name in _MODULES[source]])
        order = _rows(sizes, target, invert=_rows(sizes, source)).to(stacked.device)
        parts = stacked.index_select(0, order).split([_count(sizes, name) for name in _MODULES[target]])
        converted |= {prefix + name + suffix: p.clone() for name, p in zip(_MODULES[target], parts, strict=True)}
    return converted


def convert_lora(
    adapters: Mapping[str, tuple[Tensor, Tensor]], config: object, target: Layout
) -> dict[str, tuple[Tensor, Tensor]]:
    """Lay LoRA adapters of the input projections out anew; each product ``B @ A`` is exactly that of before.

    Where one projection of the target takes rows from several of the source, their ranks add up (equal ``A`` are shared),
    and projections without an adapter add none. The scaling (``lora_alpha / r``) is to be kept: where a rank grows from r
    to r', set ``lora_alpha`` to ``lora_alpha * r' / r``.

    Args:
        adapters: projection name (``"in_proj_qkv"``) to ``(A [r, hidden_size], B [rows, r])``, of one layout; any of its
            projections may be absent.
        config: a :class:`GatedDeltaNetConfig`, a Transformers config, or a mapping of one.
        target: ``"grouped"``, ``"flat"`` or ``"fused"``.

    Returns:
        The target's projections that an adapter reaches, with ``(A, B)`` each.

    Raises:
        ValueError: names of no or several layouts, or shapes that do not fit, all of them listed; what is no pair of
            tensors with values of a floating dtype; different devices.

    Example:
        >>> config = GatedDeltaNetConfig(hidden_size=6, linear_num_key_heads=2, linear_num_value_heads=4,
        ...                              linear_key_head_dim=3, linear_value_head_dim=2)
        >>> flat = convert_lora({"in_proj_qkvz": (torch.randn(2, 6), torch.randn(28, 2))}, config, "flat")
        >>> {name: (tuple(A.shape), tuple(B.shape)) for name, (A, B) in flat.items()}
        {'in_proj_qkv': ((2, 6), (20, 2)), 'in_proj_z': ((2, 6), (8, 2))}
    """
    sizes = GatedDeltaNetConfig.from_config(config)
    _check_layout(target)
    _check_names("adapters", adapters)
    source = _layout_of(adapters)
    for name, given in adapters.items():
        if not isinstance(given, (tuple, list)) or len(given) != 2:
            raise ValueError(f"the adapter of {name} needs a pair (A, B), got {given!r:.80}")
        for letter, matrix in zip("AB", given, strict=True):
            needs_floating(f"{letter} of {name}", matrix)
    _check_rows({f"B of {name}": (B, name) for name, (_, B) in adapters.items()}, sizes)
    for name, (A, B) in adapters.items():
        if A.dim() != 2 or B.dim() != 2 or tuple(A.shape) != (B.shape[1], sizes.hidden_size):
            raise ValueError(
                f"the adapter of {name} needs A [r, {sizes.hidden_size}] and B [rows, r], got {list(A.shape)} and "
                f"{list(B.shape)}"
            )
    matrices = {
        f"{letter} of {name}": m for name, both in adapters.items() for letter, m in zip("AB", both, strict=True)
    }
    for name, matrix in matrices.items():
        needs_values(name, matrix)
    _check_one("device", {name: matrix.device for name, matrix in matrices.items()})
    order = _rows(sizes, target, invert=_rows(sizes, source))  # row of the target's stack -> row of the source's
    starts, at = {}, 0
    for name in _MODULES[source]:
        starts[name], at = at, at + _count(sizes, name)
    converted, at = {}, 0
    for name in _MODULES[target]:
        rows, at = order[at : at + _count(sizes, name)], at + _count(sizes, name)
        pair = _gather(rows, {other: (starts[other], *adapters[other]) for other in starts if other in adapters})
        if pair is not None:
            converted[name] = pair
    return converted


def _gather(rows: Tensor, sources: Mapping[str, tuple[int, Tensor, Tensor]]) -> tuple[Tensor, Tensor] | None:
    """A and B of one target projection, whose row i is row ``rows[i]`` of the source's stack."""
    shared: list[tuple[Tensor, Tensor]] = []
    for start, A, B in sources.values():
        where = rows.to(B.device)
        inside = (where >= start) & (where < start + B.shape[0])
        if not bool(inside.any()):
            continue
        taken = B.index_select(0, (where - start).clamp(0, B.shape[0] - 1)) * inside[:, None].to(B.dtype)
        if not bool(inside.all()) or B.shape[0] > len(rows):  # columns that only other projections use
            used = (taken != 0).any(0) | ~(B != 0).any(0)
            A, taken = A[used], taken[:, used]
        for index, (other, columns) in enumerate(shared):
            if other.shape == A.shape and torch.equal(other, A):
                shared[index] = (other, columns + taken)
                break
        else:
            shared.append((A, taken))
    if not shared:
        return None
    return torch.cat([A for A, _ in shared]), torch.cat([B for _, B in shared], 1)


def _rows(config: GatedDeltaNetConfig, layout: str, invert: Tensor | None = None) -> Tensor:
    """``[rows]``: which row of the fused layout each row of a layout's stack is; with ``invert``, which of that one's."""
    H, HV, K, V = (
        config.linear_num_key_heads,
        config.linear_num_value_heads,
        config.linear_key_head_dim,
        config.linear_value_head_dim,
    )
    total = 2 * config.key_dim + 2 * config.value_dim + 2 * HV
    fused = torch.arange(total)
    if layout == "grouped":
        parts = fused.split([H * K, H * K, HV * V, HV * V, HV, HV])
        q, k, v, z, b, a = (part.view(H, -1) for part in parts)
        fused = torch.cat([torch.cat([q, k, v, z], 1).flatten(), torch.cat([b, a], 1).flatten()])
    if invert is None:
        return fused
    place = torch.empty_like(invert)
    place[invert] = torch.arange(total)
    return place[fused]


def _count(config: GatedDeltaNetConfig, name: str) -> int:
    value_dim, HV = config.value_dim, config.linear_num_value_heads
    return {
        "in_proj_qkvz": config.conv_dim + value_dim,
        "in_proj_ba": 2 * HV,
        "in_proj_qkv": config.conv_dim,
        "in_proj_z": value_dim,
        "in_proj_b": HV,
        "in_proj_a": HV,
        "in_proj": config.conv_dim + value_dim + 2 * HV,
    }[name]


def _split(name: str) -> tuple[str, str | None, str]:
    """What stands before a projection's name, the projection or None, and what stands behind it."""
    words = name.split(".")
    for index, word in enumerate(words):
        if word in _ALL:
            suffix = "." + ".".join(words[index + 1 :]) if words[index + 1 :] else ""
            return "".join(f"{w}." for w in words[:index]), word, suffix
    return name, None, ""


def _layout_of(names: Mapping[str, object]) -> str:
    layouts = [layout for layout, modules in _MODULES.items() if any(name in modules for name in names)]
    unknown = [name for name in names if name not in _ALL]
    if len(layouts) != 1 or unknown:
        raise ValueError(
            f"the projections need to be of one layout ({', '.join(f'{k}: {v}' for k, v in _MODULES.items())}), got "
            f"{sorted(names)}"
        )
    return layouts[0]


def _check_layout(layout: str) -> None:
    if not isinstance(layout, str) or layout not in _MODULES:
        raise ValueError(f"target needs one of {', '.join(_MODULES)}, got {layout!r}")


def _check_names(argument: str, given: object) -> None:
    if not isinstance(given, Mapping):
        raise ValueError(f"{argument} needs a mapping of names, got {type(given).__name__}")
    for name in given:
        if not isinstance(name, str):
            raise ValueError(f"{argument} needs names as its keys, got {name!r}")


def _check_one(what: str, found: Mapping[str, object]) -> None:
    """What is joined has to agree in one thing."""
    if len(set(found.values())) > 1:
        told = ", ".join(f"{name} {value}" for name, value in found.items())
        raise ValueError(f"the projections need one {what}, got {told}")


def _check_rows(tensors: Mapping[str, tuple[Tensor, str]], config: GatedDeltaNetConfig) -> None:
    wrong = [
        f"{shown} needs {_count(config, name)} rows, got {list(tensor.shape)}"
        for shown, (tensor, name) in tensors.items()
        if tensor.dim() == 0 or tensor.shape[0] != _count(config, name)
    ]
    if wrong:
        raise ValueError("; ".join(wrong))
