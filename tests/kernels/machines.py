"""Faked machines, and calls whose CUDA tensors exist without a GPU."""

from __future__ import annotations

import torch
from packaging.version import Version
from torch._subclasses.fake_tensor import FakeTensorMode

from qwenlinear.kernels.hardware import Hardware, parse_version

PACKAGES = {"fla-core": "0.6.0", "triton": "3.6.0", "flash-qla": "0.1.3", "tilelang": "0.1.12"}


def machine(
    capability=(9, 0), *, nvcc=True, device_type="cuda", hip=None, cuda="13.0", pytorch="2.11.0+cu130", **packages
):
    """A probe of one faked machine; a package given as None is not installed."""
    versions = {name.replace("_", "-"): version for name, version in packages.items()}
    installed = {name: text for name, text in {**PACKAGES, **versions}.items() if text is not None}
    hardware = Hardware(
        device_type=device_type,
        capability=None if hip else capability,
        cuda=None if hip or cuda is None else Version(cuda),
        hip=hip,
        torch=parse_version(pytorch),
        nvcc=nvcc,
        packages=installed,
    )
    return lambda device: hardware


def arguments(T=4, H=2, HV=4, K=8, V=8, dtype=torch.bfloat16, device="cuda", grad=False, **more):
    """A call; on "cuda" its tensors are fake ones, which exist without a GPU."""

    def make():
        q, k = (torch.randn(1, T, H, K, dtype=dtype, device=device) for _ in range(2))
        v = torch.randn(1, T, HV, V, dtype=dtype, device=device)
        g = -torch.rand(1, T, HV, device=device, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
        beta = torch.rand(1, T, HV, device=device)
        return {"q": q.requires_grad_(grad), "k": k, "v": v, "g": g, "beta": beta, **more}

    if device == "cpu":
        return make()
    with FakeTensorMode():
        return make()
