"""The package as a whole: its public names, and that every module imports with nothing but the core installed."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import subprocess
import sys

import qwenlinear

PUBLIC = [
    "AutoKernel",
    "CommMemoryPolicy",
    "FLAKernel",
    "FlashQLAKernel",
    "GatedDeltaKernel",
    "GatedDeltaNet",
    "GatedDeltaNetBlock",
    "GatedDeltaNetCache",
    "GatedDeltaNetConfig",
    "GuardedProcessGroup",
    "PackedSequences",
    "Qwen3NextGatedDeltaNet",
    "Qwen3_5GatedDeltaNet",
    "Refusal",
    "TorchKernel",
    "TritonKernel",
    "UnsupportedCall",
    "kernel_from_name",
]


def test_public_names() -> None:
    assert sorted(qwenlinear.__all__) == sorted(PUBLIC)
    assert all(hasattr(qwenlinear, name) for name in PUBLIC)


def test_every_module_imports() -> None:
    without_triton = importlib.util.find_spec("triton") is None
    for module in pkgutil.walk_packages(qwenlinear.__path__, "qwenlinear."):
        if not module.name.endswith("__main__"):
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as error:  # kernels, which their operators import when they run
                if not (without_triton and error.name == "triton" and module.name.split(".")[-1].startswith("_")):
                    raise


def test_importing_loads_no_optional_package_and_no_driver() -> None:
    code = """
import sys, qwenlinear, torch
loaded = {"fla", "flash_qla", "tilelang", "transformers", "rich", "matplotlib", "psutil"} & set(sys.modules)
assert not loaded, loaded
assert not torch.cuda.is_initialized()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_every_public_callable_says_what_it_is() -> None:
    assert [name for name in PUBLIC if not (getattr(qwenlinear, name).__doc__ or "").strip()] == []
