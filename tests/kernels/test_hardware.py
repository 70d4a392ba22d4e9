"""What a machine is: versions as they occur, packages by distribution, nvcc, and imports that refuse in words."""

from __future__ import annotations

import importlib.metadata
import math
import shutil
from pathlib import PurePosixPath

import pytest
import torch
from packaging.version import Version

from qwenlinear.errors import Refusal
from qwenlinear.kernels import hardware as module
from qwenlinear.kernels.hardware import Hardware, at_least, import_function, parse_version, probe


@pytest.mark.parametrize(
    ("text", "minimum", "expected"),
    [
        ("2.8.0a0+git", "2.8", True),
        ("2.8.0a0+git1234abc", "2.8.0", True),
        ("2.8.0", "2.8", True),
        ("2.10.0+cu130", "2.8", True),
        ("2.10.0+cu130", "2.9", True),
        ("2.9.0.dev20260101", "2.9", True),
        ("2.9.0.dev20260101", "2.10", False),
        ("2.7.1", "2.8", False),
        ("2.7.1+cu128", "2.8", False),
        ("13.0", "12.8", True),
        ("12.6", "12.8", False),
        ("0.1.12", "0.1.9", True),
        ("0.10.0", "0.6.0", True),
        ("unknown", "0.1", False),
    ],
)
def test_versions_as_they_occur(text, minimum, expected):
    assert at_least(parse_version(text), minimum) is expected


def test_no_version_is_not_enough():
    assert not at_least(None, "0.0.1")


def test_packages_come_from_the_given_mapping_alone():
    machine = Hardware(device_type="cuda", packages={"flash-linear-attention": "0.6.0"})
    assert machine.package("fla-core", "flash-linear-attention") == Version("0.6.0")
    assert machine.package("torch") is None


def test_packages_of_this_environment():
    assert Hardware(device_type="cpu").package("no-such-distribution", "packaging") is not None
    assert Hardware(device_type="cpu").package("no-such-distribution") is None


def test_probing_a_cpu():
    machine = probe(torch.device("cpu"))
    assert (machine.device_type, machine.capability, machine.nvcc) == ("cpu", None, False)
    assert machine.torch == Version(torch.__version__)
    assert str(machine) == "cpu"


def test_probing_cuda_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert probe.__wrapped__(torch.device("cuda")).capability is None


def test_probing_a_gpu_and_rocm(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(module, "_has_nvcc", lambda: True)
    found = probe.__wrapped__(torch.device("cuda", 1))
    assert (found.capability, found.cuda, found.hip, found.nvcc) == ((9, 0), Version("13.0"), None, True)
    assert str(found) == "cuda sm_90 (NVIDIA H200)"
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", "6.4.43482-0f2d60242")
    rocm = probe.__wrapped__(torch.device("cuda"))
    assert (rocm.capability, rocm.cuda, rocm.nvcc) == (None, None, False)
    assert rocm.hip is not None


@pytest.mark.parametrize("place", ["CUDA_HOME", "CUDA_PATH", "PATH", "wheel", None])
def test_nvcc_is_found_where_tilelang_looks(monkeypatch, tmp_path, place):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    if place in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.setenv(place, str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda name: "/x/nvcc" if place == "PATH" else None)
    real = module.Path
    monkeypatch.setattr(module, "Path", lambda home: tmp_path / "none" if home == "/usr/local/cuda" else real(home))

    def files(distribution):
        assert distribution == "nvidia-cuda-nvcc"
        if place != "wheel":
            raise importlib.metadata.PackageNotFoundError(distribution)
        return [PurePosixPath("nvidia/cu13/bin/nvcc")]

    monkeypatch.setattr(importlib.metadata, "files", files)
    assert module._has_nvcc() is (place is not None)


def test_importing_a_function():
    assert import_function("math", "sqrt", "python") is math.sqrt


@pytest.mark.parametrize(
    ("name", "function", "words"),
    [
        ("no_such_module", "f", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("math", "no_such_function", "AttributeError: module 'math' has no attribute 'no_such_function'"),
    ],
)
def test_an_import_that_fails_is_a_refusal_with_its_words(name, function, words):
    refusal = import_function(name, function, "some-dist")
    assert isinstance(refusal, Refusal)
    assert (refusal.code, refusal.got) == ("import", words)
    assert "pip install --force-reinstall some-dist" in refusal.remedy
