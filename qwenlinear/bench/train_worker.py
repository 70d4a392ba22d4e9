"""One rank of ``qwenlinear bench train``: run as ``python -m qwenlinear.bench.train_worker CONFIG.json``.

For one kernel and one way of data parallelism it makes as many models as there are guards, from one seed, each over
communicators of its own, and lets them take turns within rounds. All take the same steps on the same data, so every loss of
one has to be the loss of the others, bit for bit.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from qwenlinear.bench import ranks
from qwenlinear.bench.guard_worker import probe_everything
from qwenlinear.distributed import Collective, CommMemoryPolicy, GuardedProcessGroup
from qwenlinear.errors import UnsupportedCall
from qwenlinear.kernels import PackedSequences
from qwenlinear.kernels.auto import kernel_from_name
from qwenlinear.layers import GatedDeltaNetBlock, GatedDeltaNetConfig

# "bare again" is what two equal sides differ by, in time and, where a kernel isn't deterministic, in loss.
GUARDS: dict[str, Callable[[], CommMemoryPolicy] | None] = {
    "bare": None,
    "bare again": None,
    "probe everything": lambda: CommMemoryPolicy(probe=probe_everything, deny=list(Collective), min_free_bytes=0),
    "CommMemoryPolicy": CommMemoryPolicy,
}
_BATCHES = 4  # different ones, in turns


class Stack(nn.Module):
    """Blocks one after another, over the same packed documents."""

    def __init__(self, config: dict[str, Any], device: torch.device) -> None:
        super().__init__()
        size = GatedDeltaNetConfig(
            hidden_size=config["hidden"],
            linear_num_key_heads=config["heads"][0],
            linear_num_value_heads=config["heads"][1],
            linear_key_head_dim=config["head_dim"],
            linear_value_head_dim=config["head_dim"],
        )
        torch.manual_seed(0)
        with device:
            made = [GatedDeltaNetBlock(size, kernel_from_name(config["kernel"])) for _ in range(config["blocks"])]
        self.blocks = nn.ModuleList(made)

    def forward(self, x: Tensor, documents: PackedSequences) -> Tensor:
        for block in self.blocks:
            x = block(x, documents)
        return x


class Side:
    """A model under one guard, its optimiser and the losses so far; a loss stays on its device."""

    def __init__(self, guard: str, config: dict[str, Any], device: torch.device, parallel: str) -> None:
        inner: Any = dist.new_group(list(range(dist.get_world_size())))
        policy = GUARDS[guard]
        self.group = inner if policy is None else GuardedProcessGroup.wrap(inner, policy())
        self.device, self.dtype = device, getattr(torch, config["dtype"])
        model = Stack(config, device)
        if parallel == "ddp":
            self.model: nn.Module = DistributedDataParallel(model, process_group=self.group)
        else:
            self.model = _sharded(model, self.group, device, guard)
        self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=device.type == "cuda")
        self.losses: list[Tensor] = []

    def step(self, batches: list[tuple[Tensor, Tensor]], documents: PackedSequences) -> None:
        x, wanted = batches[len(self.losses) % len(batches)]
        low = self.dtype != torch.float32
        with torch.autocast(self.device.type, self.dtype) if low else contextlib.nullcontext():
            y = self.model(x, documents)
        loss = (y.float() - wanted).square().mean()
        loss.backward()
        self.optimiser.step()
        self.optimiser.zero_grad()
        self.losses.append(loss.detach())

    def counters(self) -> dict[str, list[int]]:
        """Calls and checks by collective: that the guard was in the path."""
        if not isinstance(self.group, GuardedProcessGroup):
            return {}
        return {str(c): [s.calls, s.checks] for c, s in self.group.stats().items()}


def _sharded(model: Stack, group: Any, device: torch.device, guard: str) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    # Two meshes over the same ranks must differ in their names, or DTensor takes them for one.
    mesh = DeviceMesh.from_group(group, device.type, mesh_dim_names=(guard.replace(" ", "_"),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def train(config: dict[str, Any], device: torch.device, parallel: str) -> dict[str, Any]:
    """Train under every guard, in turns.

    Args:
        config: the worker's settings.
        device: of this rank.
        parallel: ``"ddp"`` or ``"fsdp2"``.

    Returns:
        ``refused`` alone where the kernel doesn't run here; else by guard the seconds of a step (one number a round),
        losses of this rank and counters, and the peak of memory of all together.
    """
    documents = PackedSequences.from_lengths([config["length"]] * config["documents"], device=device)
    batches = _batches(config, device)
    refused = _refusal(config, device, batches[0][0], documents)
    if not ranks.agree(not refused, device):
        return {"refused": refused or "on another rank"}
    _forget(device)
    sides = {guard: Side(guard, config, device, parallel) for guard in GUARDS}
    for side in sides.values():  # compiles, allocates, rebuilds DDP's buckets
        for _ in range(3):
            side.step(batches, documents)
    ranks.finish(device)
    seconds: dict[str, list[float]] = {guard: [] for guard in sides}
    end = time.monotonic() + config["seconds"]
    names = list(sides)
    for turn in range(config["rounds"]):
        if not ranks.agree(time.monotonic() < end, device):
            break
        first = turn % len(names)
        for guard in names[first:] + names[:first]:
            seconds[guard].append(_seconds(sides[guard], config["steps"], batches, documents))
    found = {}
    for guard, side in sides.items():
        losses = torch.stack(side.losses).tolist()
        found[guard] = {"seconds": seconds[guard], "losses": losses, "calls": side.counters()}
    peak = torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else None
    return {"guards": found, "peak_mib": peak}


def _forget(device: torch.device) -> None:
    """Give back what an earlier part left."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _seconds(side: Side, steps: int, batches: list[tuple[Tensor, Tensor]], documents: PackedSequences) -> float:
    ranks.finish(side.device)
    ranks.agree(True, side.device)  # all ranks start together
    begin = time.perf_counter()
    for _ in range(steps):
        side.step(batches, documents)
    ranks.finish(side.device)
    return (time.perf_counter() - begin) / steps


def _batches(config: dict[str, Any], device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Hidden states and what the model shall make of them, other ones on every rank."""
    shape = (1, config["documents"] * config["length"], config["hidden"])
    generator = torch.Generator(device).manual_seed(1 + dist.get_rank())
    drawn = [torch.randn(2, *shape, generator=generator, device=device).unbind() for _ in range(_BATCHES)]
    return [(x, wanted) for x, wanted in drawn]


def _refusal(config: dict[str, Any], device: torch.device, x: Tensor, documents: PackedSequences) -> str:
    """What the kernel has against this machine or this call, found without a step."""
    try:
        kernel = kernel_from_name(config["kernel"])
        kernel.require(device)
        H, HV = config["heads"]
        shapes = [(H, config["head_dim"])] * 2 + [(HV, config["head_dim"])]
        dtype = getattr(torch, config["dtype"])
        q, k, v = (torch.empty(1, x.shape[1], *s, dtype=dtype, device=device, requires_grad=True) for s in shapes)
        g, beta = (torch.empty(1, x.shape[1], HV, device=device, requires_grad=True) for _ in range(2))
        return "; ".join(map(str, kernel.refusals(q, k, v, g, beta, cu_seqlens=documents)))
    except UnsupportedCall as refused:
        return " ".join(str(refused).split())


if __name__ == "__main__":
    # A first call may compile for minutes on one rank while another waits in a collective.
    ranks.serve(sys.argv[1], {name: partial(train, parallel=name) for name in ("ddp", "fsdp2")}, timeout=300.0)
