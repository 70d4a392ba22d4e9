"""Where a benchmark ran: the header without which a number means nothing."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path

import torch

from qwenlinear.kernels.hardware import probe

PACKAGES = ("triton", "tilelang", "fla-core", "flash-linear-attention", "flash-qla", "transformers", "einops")


def describe(device: torch.device) -> dict[str, object]:
    """This machine and its software.

    Args:
        device: the one measured on.

    Returns:
        A row for JSON: device name, driver, versions, threads, time of day.
    """
    hardware = probe(device)
    return {
        "device": hardware.name or _cpu_name(),
        "hardware": str(hardware),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "driver": driver_version(),
        "packages": {name: str(found) for name in PACKAGES if (found := hardware.package(name)) is not None},
        "date": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
    }


def header(machine: dict[str, object]) -> str:
    """The machine in one line."""
    packages = machine["packages"]
    assert isinstance(packages, dict)
    on_cpu = str(machine["hardware"]).startswith("cpu")
    where = f"{machine['device']}" + (f", {machine['threads']} of {machine['cores']} cores" if on_cpu else "")
    parts = [where, f"PyTorch {machine['torch']}", *(f"{name} {version}" for name, version in packages.items())]
    if machine["driver"]:
        parts.append(f"driver {machine['driver']}")
    return ", ".join([*parts, str(machine["date"])])


def driver_version() -> str | None:
    """The NVIDIA driver's version as the kernel module tells it, None without one."""
    path = Path("/proc/driver/nvidia/version")
    if path.exists():
        words = path.read_text().split()
        for word in words:
            if word[:1].isdigit() and word.count(".") >= 1:
                return word
    return None


def _cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    if path.exists():
        for line in path.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
