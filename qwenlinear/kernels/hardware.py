"""What a machine is: device, compute capability, runtime and package versions. Tests hand kernels a fake one."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import cast

import torch
from packaging.version import InvalidVersion, Version

from qwenlinear.errors import Refusal

TRITON = (  # the distributions that bring Triton along, whichever device they are for
    "triton",
    "pytorch-triton",
    "triton-windows",
    "triton-rocm",
    "pytorch-triton-rocm",
    "triton-xpu",
    "pytorch-triton-xpu",
)


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One device and the software around it.

    Args:
        device_type: ``"cuda"`` (also for ROCm, as PyTorch says), ``"cpu"``, ``"xpu"``, ...
        name: the device's own name.
        capability: CUDA compute capability such as ``(9, 0)``; None where there is none (also ROCm).
        cuda: version of CUDA that PyTorch was built with; None without CUDA.
        hip: version of ROCm that PyTorch was built with; None without ROCm.
        torch: version of PyTorch.
        nvcc: whether a CUDA compiler is found where TileLang looks for one.
        packages: installed versions by distribution name; None asks the running environment.

    Example:
        >>> h200 = Hardware(device_type="cuda", capability=(9, 0), cuda=Version("13.0"), packages={"triton": "3.6.0"})
        >>> h200.package("triton")
        <Version('3.6.0')>
        >>> print(h200)
        cuda sm_90
    """

    device_type: str
    name: str = ""
    capability: tuple[int, int] | None = None
    cuda: Version | None = None
    hip: Version | None = None
    torch: Version = field(default_factory=lambda: Version(torch.__version__))
    nvcc: bool = False
    packages: Mapping[str, str] | None = None

    def package(self, *distributions: str) -> Version | None:
        """The version of the first of these distributions that is installed.

        Args:
            distributions: names on PyPI, for example ``"fla-core", "flash-linear-attention"``.

        Returns:
            The version, or None where none is installed. Reads metadata only; nothing is imported.
        """
        for distribution in distributions:
            text = self.packages.get(distribution) if self.packages is not None else _installed(distribution)
            if text is not None:
                return parse_version(text)
        return None

    def __str__(self) -> str:
        parts = [self.device_type]
        if self.capability is not None:
            parts.append(f"sm_{self.capability[0]}{self.capability[1]}")
        if self.hip is not None:
            parts.append(f"ROCm {self.hip}")
        return " ".join([*parts, f"({self.name})"] if self.name else parts)


HardwareProbe = Callable[[torch.device], Hardware]


def parse_version(text: str) -> Version:
    """A version as PEP 440 reads it; what it cannot read counts as version 0, so that a check fails instead of passing.

    Args:
        text: for example ``"2.8.0a0+git1234"``, ``"2.10.0+cu130"`` or ``"2.9.0.dev20260101"``.

    Returns:
        The version.

    Example:
        >>> parse_version("2.10.0+cu130") > parse_version("2.9.0.dev20260101")
        True
    """
    try:
        return Version(text)
    except InvalidVersion:
        return Version("0")


def at_least(version: Version | None, minimum: str) -> bool:
    """Whether a version has what release ``minimum`` has; builds on the way to it (``2.8.0a0+git``) count.

    Args:
        version: the version there is, or None.
        minimum: a release such as ``"2.8"``.

    Returns:
        False for None. Pre-releases and local builds of ``minimum`` itself are taken for it: ``2.8.0a0+git`` is what
        containers ship as 2.8.

    Example:
        >>> at_least(Version("2.8.0a0+git"), "2.8"), at_least(Version("2.7.1+cu128"), "2.8"), at_least(None, "2.8")
        (True, False, False)
    """
    return version is not None and Version(version.base_version) >= Version(minimum)


@lru_cache(maxsize=64)
def probe(device: torch.device) -> Hardware:
    """Read what a device is; asked once a device, without launching anything on it.

    Args:
        device: the device, with or without an index.

    Returns:
        Its description. A CUDA device on a machine without one gives ``capability=None``.
    """
    cuda = parse_version(torch.version.cuda) if torch.version.cuda else None
    hip = parse_version(torch.version.hip) if torch.version.hip else None
    name, capability = "", None
    if device.type == "cuda" and torch.cuda.is_available():
        name = torch.cuda.get_device_name(device)
        capability = None if hip else torch.cuda.get_device_capability(device)
    nvcc = capability is not None and _has_nvcc()
    return Hardware(device_type=device.type, name=name, capability=capability, cuda=cuda, hip=hip, nvcc=nvcc)


def present(device: torch.device | str) -> torch.device:
    """Require a device that this machine has, by a computation on it (a GPU's context is made by that).

    Args:
        device: which.

    Returns:
        The same, as an object.

    Raises:
        ValueError: it has not, or tensors there have no values.
    """
    try:
        where = torch.device(device)
        torch.zeros(1, device=where).sum().item()
    except (AssertionError, NotImplementedError, RuntimeError, TypeError) as error:
        why = str(error).splitlines()[0]
        raise ValueError(f"device needs one that PyTorch can compute on here, got {str(device)!r}: {why}") from error
    return where


def import_function(module: str, name: str, distribution: str) -> Callable[..., object] | Refusal:
    """Import a function of an installed package; a package that fails to import refuses with its own words.

    Args:
        module: to import.
        name: of the function in it.
        distribution: what to reinstall, for the remedy.

    Returns:
        The function, or the refusal (code ``"import"``).
    """
    try:
        return cast(Callable[..., object], getattr(importlib.import_module(module), name))
    except Exception as error:  # flash_qla raises ValueError, a broken driver RuntimeError or OSError
        remedy = f"mend the installation, for example pip install --force-reinstall {distribution}"
        return Refusal("import", f"{module}.{name} to import", f"{type(error).__name__}: {error}", remedy)


def _has_nvcc() -> bool:
    """Whether nvcc is where TileLang (`tilelang.env`) and FLA (`fla.utils.env`) look for it."""
    homes = [os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    if shutil.which("nvcc") or any(home and (Path(home) / "bin" / "nvcc").exists() for home in homes):
        return True
    try:
        files = importlib.metadata.files("nvidia-cuda-nvcc") or []
    except importlib.metadata.PackageNotFoundError:
        return False
    return any(file.name in ("nvcc", "nvcc.exe") for file in files)


@lru_cache(maxsize=64)
def _installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
