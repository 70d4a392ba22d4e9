"""``qwenlinear doctor``: what this machine can run, why not more, and what to do about it.

Nothing is launched. A package is imported only where hardware and versions are right, because an import that fails is then the
news. Everything is asked of the kernels themselves, so what the doctor says is what a call would do.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from torch._subclasses.fake_tensor import FakeTensorMode

from qwenlinear import terminal, usage
from qwenlinear.bench.machine import driver_version
from qwenlinear.errors import Refusal
from qwenlinear.kernels import FLAKernel, FlashQLAKernel, PackedSequences, TorchKernel, TritonKernel
from qwenlinear.kernels.capabilities import Form
from qwenlinear.kernels.hardware import Hardware, HardwareProbe, at_least, probe
from qwenlinear.layers.config import GatedDeltaNetConfig

PACKAGES = (
    "triton",
    "tilelang",
    "apache-tvm-ffi",
    "fla-core",
    "flash-linear-attention",
    "flash-qla",
    "causal-conv1d",
    "transformers",
)


class _Use(NamedTuple):
    """A kind of call that layers make."""

    form: Form
    tokens: int
    gradients: bool = False
    packed: bool = False
    from_state: bool = False


_CANDIDATES = (FlashQLAKernel, TritonKernel, FLAKernel, TorchKernel)  # AutoKernel's, in its order
_USES = {
    "training": _Use("chunk", 4096, gradients=True),
    "prefill": _Use("chunk", 4096),
    "packed": _Use("chunk", 4096, gradients=True, packed=True),
    "decode": _Use("step", 1, from_state=True),
}
Report = dict[str, Any]
_Refusals = dict[str, dict[str, tuple[Refusal, ...]]]  # kernel -> use -> reasons


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the doctor's options to a parser."""
    parser.add_argument("--config", type=Path, help="a model's config.json; default: Qwen3.5's sizes, bfloat16")
    parser.add_argument(
        "--device", type=usage.device_name, help="default: the accelerator that PyTorch finds, else the CPU"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(args: argparse.Namespace) -> int:
    """Examine this machine and print what was found.

    Args:
        args: the parsed options.

    Returns:
        0; 2 where the config cannot be read.
    """
    try:
        config = {} if args.config is None else json.loads(args.config.read_text())
        report = examine(config, device=args.device or _default_device())
    except (OSError, ValueError) as error:
        print(f"qwenlinear doctor: --config {args.config}: {error}", file=sys.stderr)
        return 2
    print(json.dumps(report, indent=1) if args.json else terminal.fold(text(report)))
    return 0


def examine(
    config: Mapping[str, Any] | None = None,
    device: torch.device | str = "cpu",
    hardware: HardwareProbe | None = None,
    *,
    driver: str | None = None,
    requirements: Mapping[str, Sequence[str]] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Report:
    """Everything the doctor knows, as plain data.

    Args:
        config: a Transformers config as a mapping; default None (or empty) for Qwen3.5's sizes. Its ``dtype`` (or
            ``torch_dtype``) is the activations', bfloat16 where it has none.
        device: where the model will be.
        hardware: reads what a device is; None reads this machine. Tests pass a fake.
        driver: the GPU driver's version; None reads this machine's.
        requirements: ``Requires-Dist`` lines by distribution; None reads the installed ones.
        environment: environment variables that other packages look at; None means this process's.

    Returns:
        ``machine``, ``model``, ``kernels``, ``picks``, ``conflicts`` and ``fla_dispatcher``, ready for JSON.

    Raises:
        ValueError: a config without the sizes of a Gated DeltaNet layer.

    Example:
        >>> report = examine(device="cpu")
        >>> report["picks"]["training"]["kernel"]
        'TorchKernel()'
    """
    where = torch.device(device)
    machine = (hardware or probe)(where)
    sizes = GatedDeltaNetConfig.from_config(config) if config else GatedDeltaNetConfig()
    dtype = _dtype(config or {})
    kernels = tuple(kind(hardware=hardware) for kind in _CANDIDATES)
    calls = {name: _call(sizes, dtype, where, use) for name, use in _USES.items()}
    refusals: _Refusals = {
        repr(kernel): {name: kernel.refusals(**call, form=_USES[name].form) for name, call in calls.items()}
        for kernel in kernels
    }
    return {
        "machine": _machine(machine, driver),
        "model": {
            "heads": [sizes.linear_num_key_heads, sizes.linear_num_value_heads],
            "head_sizes": [sizes.linear_key_head_dim, sizes.linear_value_head_dim],
            "dtype": _name(dtype),
            "device": str(where),
        },
        "kernels": [{"name": name, "uses": _plain(uses)} for name, uses in refusals.items()],
        "picks": {use: _pick(refusals, use) for use in _USES},
        "conflicts": [*_conflicts(machine, requirements), *_traps(machine)],
        "fla_dispatcher": _fla_dispatcher(machine, sizes, dtype, os.environ if environment is None else environment),
    }


def text(report: Report) -> str:
    """The report in words, to print.

    Args:
        report: what :func:`examine` found.

    Returns:
        Some thirty lines.
    """
    machine, model = report["machine"], report["model"]
    versions = [f"{name} {version}" for name, version in machine["packages"].items()]
    absent = [name for name in PACKAGES if name not in machine["packages"]]
    lines = [
        "This machine",
        f"  device    {machine['device']}" + (f", driver {machine['driver']}" if machine["driver"] else ""),
        f"  PyTorch   {machine['torch']}" + _built_with(machine),
        f"  packages  {', '.join(versions) or 'none of those below'}",
        f"  absent    {', '.join(absent) or 'nothing'}",
        f"  nvcc      {'found' if machine['nvcc'] else 'not found'}",
        "",
        f"Kernels for {model['dtype']}, heads {model['heads'][0]}/{model['heads'][1]} of "
        f"{model['head_sizes'][0]} and {model['head_sizes'][1]}, on {model['device']}",
    ]
    for kernel in report["kernels"]:
        usable = [use for use, why in kernel["uses"].items() if not why]
        lines.append(f"  {kernel['name']}: {'runs ' + ', '.join(usable) if usable else 'does not run'}")
        for reason, uses in _shared(kernel["uses"]).items():
            only = "" if len(uses) == len(kernel["uses"]) else f" ({', '.join(uses)})"
            lines.append(f"    - {reason}{only}")
    lines += ["", "AutoKernel([FlashQLAKernel(), TritonKernel(), FLAKernel(), TorchKernel()]) picks"]
    lines += [f"  {use:9} {pick['kernel']}" for use, pick in report["picks"].items()]
    lines += ["", "Conflicts", *(f"  - {line}" for line in report["conflicts"] or ["none"])]
    dispatcher = report["fla_dispatcher"]
    return "\n".join([*lines, "", "FLA's own dispatcher (FLAKernel goes round it)", f"  {dispatcher['text']}"])


# ---- what is asked -------------------------------------------------------------------------------------------------


def _call(sizes: GatedDeltaNetConfig, dtype: torch.dtype, device: torch.device, use: _Use) -> dict[str, Any]:
    """A call as a layer would make it, of tensors that take no memory and need no GPU."""
    T, gradients = use.tokens, use.gradients
    H, HV = sizes.linear_num_key_heads, sizes.linear_num_value_heads
    K, V = sizes.linear_key_head_dim, sizes.linear_value_head_dim
    with FakeTensorMode():
        q, k = (torch.empty(1, T, H, K, dtype=dtype, device=device, requires_grad=gradients) for _ in range(2))
        v = torch.empty(1, T, HV, V, dtype=dtype, device=device)
        g, beta = (torch.empty(1, T, HV, device=device) for _ in range(2))
        state = torch.empty(1, HV, K, V, device=device) if use.from_state else None
    return {
        "q": q,
        "k": k,
        "v": v,
        "g": g.double() if dtype == torch.float64 else g,
        "beta": beta,
        "initial_state": state,
        "output_final_state": not gradients,
        "use_qk_l2norm_in_kernel": True,
        "cu_seqlens": PackedSequences.from_lengths([T // 4] * 4) if use.packed else None,
    }


def _plain(uses: Mapping[str, Sequence[Refusal]]) -> dict[str, list[dict[str, str]]]:
    """Refusals as data."""

    def fields(refusal: Refusal) -> dict[str, str]:
        return {"code": refusal.code, "needs": refusal.needs, "got": refusal.got, "remedy": refusal.remedy}

    return {use: [fields(refusal) for refusal in why] for use, why in uses.items()}


def _pick(refusals: _Refusals, use: str) -> dict[str, str | None]:
    """AutoKernel's rule: the first that does not refuse."""
    return {"kernel": next((name for name, uses in refusals.items() if not uses[use]), None)}


def _shared(uses: Mapping[str, Sequence[Mapping[str, str]]]) -> dict[str, list[str]]:
    """Every reason once, with the uses that it keeps a kernel from."""
    reasons: dict[str, list[str]] = {}
    for use, why in uses.items():
        for refusal in why:
            words = str(Refusal(**refusal))
            reasons.setdefault(words, []).append(use)
    return reasons


# ---- the machine ---------------------------------------------------------------------------------------------------


def _machine(machine: Hardware, driver: str | None) -> dict[str, Any]:
    return {
        "device": str(machine),
        "capability": machine.capability,
        "driver": driver if driver is not None else driver_version(),
        "torch": str(machine.torch),
        "cuda": None if machine.cuda is None else str(machine.cuda),
        "hip": None if machine.hip is None else str(machine.hip),
        "nvcc": machine.nvcc,
        "packages": {name: str(version) for name in PACKAGES if (version := machine.package(name)) is not None},
    }


def _built_with(machine: Mapping[str, Any]) -> str:
    if machine["hip"]:
        return f", built with ROCm {machine['hip']}"
    return f", built with CUDA {machine['cuda']}" if machine["cuda"] else ", built without CUDA"


def _conflicts(machine: Hardware, requirements: Mapping[str, Sequence[str]] | None) -> Iterator[str]:
    """Requirements of installed packages on those that kernels need, which what is installed does not meet."""
    wanted = {canonicalize_name(name) for name in (*PACKAGES, "torch")}
    for owner, lines in sorted((_installed_requirements() if requirements is None else requirements).items()):
        for line in lines:
            try:
                requirement = Requirement(line)
            except InvalidRequirement:
                continue
            name = canonicalize_name(requirement.name)
            if name not in wanted or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
                continue
            found = machine.torch if name == "torch" else machine.package(name)
            if found is None:
                yield f"{owner} needs {requirement.name}{requirement.specifier}, which is not installed"
            elif not requirement.specifier.contains(found.public, prereleases=True):
                yield (
                    f"{owner} needs {requirement.name}{requirement.specifier}, got {found}: whichever is installed last wins; "
                    "give one of them an environment of its own, or ask for a version that both take"
                )


def _traps(machine: Hardware) -> Iterator[str]:
    """Combinations that are known to fail outside qwenlinear."""
    if machine.package("fla-core", "flash-linear-attention") is not None and machine.device_type == "cpu":
        yield (
            "flash-linear-attention is installed and there is no GPU: Transformers' own Gated DeltaNet layers call it here and "
            "fail; a layer with TorchKernel() runs"
        )


def _installed_requirements() -> dict[str, list[str]]:
    found = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        if name and distribution.requires:
            found[f"{name} {distribution.version}"] = list(distribution.requires)
    return found


def _fla_dispatcher(
    machine: Hardware, sizes: GatedDeltaNetConfig, dtype: torch.dtype, environment: Mapping[str, str]
) -> dict[str, Any]:
    """Whether `fla.ops.gated_delta_rule.chunk_gated_delta_rule` would run FlashQLA instead (fla-core 0.6.0's conditions)."""
    fla, capability = machine.package("fla-core", "flash-linear-attention"), machine.capability
    reason = None
    if fla is None:
        reason = "flash-linear-attention is not installed"
    elif not at_least(fla, "0.5.2"):
        reason = f"fla {fla} has none (from 0.5.2 on)"
    elif machine.package("flash-qla") is None:
        reason = "flash-qla is not installed"
    elif environment.get("FLA_DISABLE_BACKEND_DISPATCH") == "1" or environment.get("FLA_FLASH_QLA", "1") == "0":
        reason = "an environment variable (FLA_FLASH_QLA=0 or FLA_DISABLE_BACKEND_DISPATCH=1) turns it off"
    elif capability is None or not (capability[0] in (9, 10) or capability == (12, 0)):
        reason = f"it wants SM90, SM100, SM103 or SM120, got {machine}"
    elif dtype not in (torch.float16, torch.bfloat16) or (capability == (12, 0) and dtype != torch.bfloat16):
        reason = f"it takes 16-bit q, k and v (on SM120 bfloat16), got {_name(dtype)}"
    elif (sizes.linear_key_head_dim, sizes.linear_value_head_dim) != (128, 128):
        reason = f"it takes K = V = 128, got {sizes.linear_key_head_dim} and {sizes.linear_value_head_dim}"
    if reason is not None:
        return {"uses": [], "text": f"runs FLA's own kernels: {reason}"}
    uses = ["prefill"] if capability == (12, 0) else ["training", "prefill", "packed"]
    return {
        "uses": uses,
        "text": f"hands {', '.join(uses)} to FlashQLA, also where a model calls FLA; FLA_FLASH_QLA=0 turns that off",
    }


def _dtype(config: Mapping[str, Any]) -> torch.dtype:
    """The model's activations: ``dtype`` or ``torch_dtype``, of the config or its ``text_config``."""
    for part in (config, config.get("text_config") or {}):
        for key in ("dtype", "torch_dtype"):
            word = part.get(key)
            if word is not None:
                found = getattr(torch, str(word).removeprefix("torch."), None)
                if not isinstance(found, torch.dtype) or not found.is_floating_point:
                    raise ValueError(f"{key} needs a floating dtype such as bfloat16, got {word!r}")
                return found
    return torch.bfloat16


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _default_device() -> torch.device:
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device("cpu") if found is None else found
