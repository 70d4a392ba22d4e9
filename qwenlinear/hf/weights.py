"""load_layers: Gated DeltaNet layers from a folder of safetensors, without building the model and without pickle."""

from __future__ import annotations

import json
import operator
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from qwenlinear.checks import as_device
from qwenlinear.kernels import GatedDeltaKernel
from qwenlinear.kernels.hardware import present
from qwenlinear.layers import GatedDeltaNet, GatedDeltaNetConfig, Qwen3_5GatedDeltaNet, Qwen3NextGatedDeltaNet

# model.layers.3.linear_attn.A_log, model.language_model.layers.3.linear_attn.conv1d.weight; not mtp.layers.0...
_NAME = re.compile(r"^(?P<prefix>(?:[^.]+\.)*?)layers\.(?P<layer>\d+)\.linear_attn\.(?P<rest>.+)$")


def load_layers(
    path: str | Path,
    layers: Iterable[int] | None = None,
    kernel: GatedDeltaKernel | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> dict[int, GatedDeltaNet]:
    """Read the Gated DeltaNet layers of a Transformers folder, and only those, into qwenlinear layers.

    Args:
        path: a local folder with ``config.json`` and ``model.safetensors`` or its shards with their index, as
            ``save_pretrained`` writes it.
        layers: numbers of the layers to read; default None for all linear-attention layers.
        kernel: what computes their recurrence; default None for an ``AutoKernel()`` each.
        dtype: to cast to (``A_log`` and ``dt_bias`` not below float32); default None for the dtype that is stored.
        device: where to put them; default the CPU.

    Returns:
        Layer number to layer, in order: ``Qwen3NextGatedDeltaNet`` or ``Qwen3_5GatedDeltaNet``, as the folder's names say.

    Raises:
        ValueError: no such folder, no weights, a pickle only, a layer that is no linear-attention layer; or missing,
            surplus and misshapen tensors, all of them in one message; a file that cannot be read; a dtype that is not
            floating; a device that is not here.
        ImportError: safetensors is not installed.

    Example:
        >>> load_layers("no/such/folder")
        Traceback (most recent call last):
        ValueError: path needs a folder with config.json, got no/such/folder
    """
    where, wanted = _check_arguments(path, layers, dtype, device)
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise ValueError(f"path needs a folder with config.json, got {folder}")
    config = GatedDeltaNetConfig.from_config(_json(folder / "config.json"))
    tensors = _tensors_by_layer(_files_of_tensors(folder))
    if not tensors:
        raise ValueError(f"path needs weights named layers.N.linear_attn.*, got none in {folder}")
    asked = sorted(tensors) if wanted is None else wanted
    unknown = [number for number in asked if number not in tensors]
    if unknown:
        raise ValueError(f"layers needs numbers of linear-attention layers {sorted(tensors)}, got {unknown}")
    plan = {number: _empty_layer(tensors[number], config, kernel) for number in asked}
    _check(plan, tensors)
    for number, layer in plan.items():
        state = {}
        for name, (file, stored) in tensors[number].items():
            with _open(file, where) as opened:
                state[name] = opened.get_tensor(stored)
        layer.load_state_dict(state, assign=True)
        if dtype is not None:
            layer.to(dtype)
    return plan


def _check_arguments(
    path: object, layers: Iterable[int] | None, dtype: object, device: object
) -> tuple[torch.device, list[int] | None]:
    """Everything that can be said before a file is read; gives the device, and the layers' numbers once each."""
    if not isinstance(path, (str, os.PathLike)):
        raise ValueError(f"path needs the path of a folder, got {path!r}")
    try:
        wanted = None if layers is None else list(dict.fromkeys(operator.index(number) for number in layers))
    except TypeError:
        raise ValueError(f"layers needs a collection of whole numbers or None, got {layers!r}") from None
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"dtype needs a floating torch dtype or None, got {dtype!r}")
    return present(as_device("device", device)), wanted


def _json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"path needs a readable {file.name}, got {file}: {error}") from error


def _empty_layer(
    names: dict[str, tuple[Path, str]], config: GatedDeltaNetConfig, kernel: GatedDeltaKernel | None
) -> GatedDeltaNet:
    cls = Qwen3NextGatedDeltaNet if any(name.startswith("in_proj_qkvz.") for name in names) else Qwen3_5GatedDeltaNet
    with torch.device("meta"):
        return cls(config, kernel)


def _check(plan: dict[int, GatedDeltaNet], tensors: dict[int, dict[str, tuple[Path, str]]]) -> None:
    """Names and shapes, from the files' headers; nothing is read before all of them fit."""
    faults = []
    for number, layer in plan.items():
        needed, found = {name: list(t.shape) for name, t in layer.state_dict().items()}, tensors[number]
        where = f"layers.{number}.linear_attn."
        faults += [f"missing {where}{name} {shape}" for name, shape in needed.items() if name not in found]
        faults += [f"surplus {stored}" for name, (_, stored) in found.items() if name not in needed]
        for name in sorted(needed.keys() & found.keys()):
            file, stored = found[name]
            with _open(file, "cpu") as opened:
                shape = list(opened.get_slice(stored).get_shape())
            if shape != needed[name]:
                faults.append(f"misshapen {stored}: needs {needed[name]}, got {shape}")
    if faults:
        raise ValueError("the weights need to fit config.json, got:\n" + "\n".join(f"  {f}" for f in sorted(faults)))


def _tensors_by_layer(files: dict[str, Path]) -> dict[int, dict[str, tuple[Path, str]]]:
    """Layer number -> parameter name -> file and stored name."""
    layers: dict[int, dict[str, tuple[Path, str]]] = {}
    for stored, file in files.items():
        match = _NAME.match(stored)
        if match is not None and "mtp" not in match["prefix"].split("."):
            layers.setdefault(int(match["layer"]), {})[match["rest"]] = (file, stored)
    return dict(sorted(layers.items()))


def _files_of_tensors(folder: Path) -> dict[str, Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = {name: folder / file for name, file in _weight_map(index).items()}
        absent = sorted({file.name for file in files.values() if not file.is_file()})
        if absent:
            raise ValueError(f"path needs every shard of its index, got none of {', '.join(absent)} in {folder}")
        return files
    single = folder / "model.safetensors"
    if not single.is_file():
        raise ValueError(f"path needs model.safetensors or its index (a pickle is never read), got neither in {folder}")
    with _open(single, "cpu") as opened:
        return dict.fromkeys(opened.keys(), single)


def _weight_map(index: Path) -> dict[str, str]:
    found = _json(index)
    names = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(names, dict):
        raise ValueError(f"path needs an index with a weight_map, got {index} without one")
    return names


def _open(file: Path, device: torch.device | str) -> Any:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ImportError("load_layers needs the safetensors package; pip install safetensors") from error
    try:
        return safe_open(file, framework="pt", device=str(device))
    except SafetensorError as error:
        raise ValueError(f"path needs files of safetensors, got {file}: {error}") from error
