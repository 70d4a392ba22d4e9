"""One rank of ``qwenlinear bench guard``: run as ``python -m qwenlinear.bench.guard_worker CONFIG.json``."""

from __future__ import annotations

import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from qwenlinear.bench import ranks
from qwenlinear.distributed import Collective, CommMemoryPolicy, GuardedProcessGroup

Call = Callable[[Any], object]
MIB = 2**20
# What is interleaved with what, each against its own bare calls: after a probe the caches are cold and the
# ranks apart, which a neighbour would pay for. "control" is bare once more: what two equal sides differ by.
SETS = (("bare", "guarded", "control"), ("bare", "forced", "baseline"))


def host_free_bytes() -> int:
    """Read the host's free memory, by psutil where it is installed."""
    try:
        import psutil
    except ImportError:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(psutil.virtual_memory().available)


def probe_everything(device: torch.device) -> int:
    """The baseline to measure against: every figure that a log line could want, before every call."""
    figures = [host_free_bytes()]
    if device.type == "cuda":
        figures += [torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[0]]
    return figures[-1]


def collectives(size: int, device: torch.device, count: int) -> dict[str, Call]:
    """Make one call per collective, on preallocated tensors.

    Args:
        size: ranks.
        device: of the tensors.
        count: float32 elements that each rank gives.

    Returns:
        Functions of a group, by canonical name.
    """
    x = torch.ones(count, device=device)
    part = torch.ones(max(1, count // size), device=device)
    parts = [torch.empty_like(part) for _ in range(size)]
    whole, other = (torch.ones(part.numel() * size, device=device) for _ in range(2))
    outs = [torch.empty_like(part) for _ in range(size)]
    first = dist.get_rank() == 0
    gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    def coalesced(call: Call) -> Call:
        def twice(group: Any) -> None:
            with dist.distributed_c10d._coalescing_manager(group=group):
                call(group)
                call(group)

        return twice

    calls: dict[str, Call] = {
        "all_reduce": lambda g: dist.all_reduce(x, group=g),
        "all_reduce_coalesced": coalesced(lambda g: dist.all_reduce(outs[0], group=g)),
        "broadcast": lambda g: dist.broadcast(x, src=0, group=g),
        "reduce": lambda g: dist.reduce(x, dst=0, group=g),
        "all_gather": lambda g: dist.all_gather(outs, part, group=g),
        "all_gather_into_tensor": lambda g: gather_single(whole, part, group=g),
        "all_gather_into_tensor_coalesced": coalesced(lambda g: gather_single(whole, part, group=g)),
        "gather": lambda g: dist.gather(part, outs if first else None, dst=0, group=g),
        "scatter": lambda g: dist.scatter(part, parts if first else None, src=0, group=g),
        "reduce_scatter": lambda g: dist.reduce_scatter(part, parts, group=g),
        "reduce_scatter_tensor": lambda g: scatter_single(part, whole, group=g),
        "reduce_scatter_tensor_coalesced": coalesced(lambda g: scatter_single(part, whole, group=g)),
        "all_to_all": lambda g: dist.all_to_all(outs, parts, group=g),
        "all_to_all_single": lambda g: dist.all_to_all_single(whole, other, group=g),
        "barrier": lambda g: dist.barrier(group=g),
    }
    if size > 1:
        to, of = (dist.get_rank() + 1) % size, (dist.get_rank() - 1) % size

        def exchange(group: Any) -> None:
            ops = [
                dist.P2POp(dist.irecv, outs[0], of, group=group),
                dist.P2POp(dist.isend, part, to, group=group),
            ]
            if device.type != "cuda":
                works = dist.batch_isend_irecv(ops)
            else:  # what batch_isend_irecv does, which groups for guards from PyTorch 2.14 only: one by one it would hang
                with dist.distributed_c10d._coalescing_manager(group, device, async_ops=True) as manager:
                    for one in ops:
                        one.op(one.tensor, one.peer, group=group)
                works = manager.works
            for work in works:
                work.wait()

        calls["send"] = exchange
    return calls


def latency(config: dict[str, Any], device: torch.device) -> list[dict[str, Any]]:
    """Time every collective bare, guarded, guarded with a check each time, and under the baseline,
    interleaved.

    Args:
        config: the worker's settings.
        device: of the tensors.

    Returns:
        A row per collective, size and number of live tensors; times in microseconds, the median batch of each
        side.
    """
    size = dist.get_world_size()
    inner: Any = dist.new_group(list(range(size)))
    probe = None if device.type == "cuda" else (lambda d: host_free_bytes())
    plain = CommMemoryPolicy()
    groups: dict[str, Any] = {
        "bare": inner,
        "guarded": GuardedProcessGroup.wrap(inner, plain),
        "forced": GuardedProcessGroup.wrap(inner, plain.replace(deny=list(Collective), probe=probe, min_free_bytes=0)),
        "baseline": inner,
        "control": inner,
    }
    rows: list[dict[str, Any]] = []
    live: list[torch.Tensor] = []
    end = time.monotonic() + config["seconds"]
    for wanted in config["live"]:
        sizes = [2**18, 2**19, 2**20, 2**21] if device.type == "cuda" else [2**14]
        while len(live) < wanted:
            live.append(torch.empty(sizes[len(live) % len(sizes)], dtype=torch.uint8, device=device))
        for data in config["bytes"]:
            for name, call in collectives(size, device, max(1, data // 4)).items():
                if not config["only"] or name in config["only"]:
                    in_time = ranks.agree(time.monotonic() < end, device)
                    row = _one(name, call, groups, device, config) if in_time else {"error": "not measured: --limit"}
                    rows.append({"collective": name, "live": wanted, "bytes": data, **row})
    rows.append({"collective": "counters", "table": groups["guarded"].describe().splitlines()})
    return rows


def _one(name: str, call: Call, groups: dict[str, Any], device: torch.device, config: dict[str, Any]) -> dict[str, Any]:
    def once(variant: str) -> None:
        if variant == "baseline":
            probe_everything(device)
        call(groups[variant])

    error = ""
    try:
        for variant in groups:
            for _ in range(3):
                once(variant)
        ranks.finish(device)
    except Exception as caught:  # this backend lacks the collective
        error = f"{type(caught).__name__}: {str(caught).splitlines()[0]}"
    if not ranks.agree(not error, device):
        return {"error": error or "another rank failed"}
    result: dict[str, Any] = {}
    for sides in SETS:
        times = _interleave(sides, once, device, config)
        middle = {side: statistics.median(values) for side, values in times.items()}
        for side in sides:
            result.setdefault(side, round(middle[side], 3))
            if side != "bare":
                result[f"{side}_added"] = round(middle[side] - middle["bare"], 3)
                result[f"{side}_ratio"] = round(middle[side] / middle["bare"], 4)
    return result


def _interleave(
    sides: tuple[str, ...], once: Callable[[str], None], device: torch.device, config: dict[str, Any]
) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {side: [] for side in sides}
    order, shuffle = list(sides), random.Random(0).shuffle
    for _ in range(config["rounds"]):
        shuffle(order)  # alike on all ranks; no side always follows the same other one
        for side in order:
            repeats = max(1, config["repeats"] // 4) if side == "baseline" else config["repeats"]
            ranks.finish(device)
            start = time.perf_counter()
            for _ in range(repeats):
                once(side)
            ranks.finish(device)
            times[side].append((time.perf_counter() - start) / repeats * 1e6)
    return times


def driver_memory(config: dict[str, Any], device: torch.device) -> list[dict[str, Any]]:
    """Read the driver's memory around the first and the later calls of each collective.

    "fresh" rows give each collective a new communicator, "shared" rows take one communicator for all in turn,
    so that what a collective adds to a communicator that exists already is seen. Growth on later calls speaks
    against an allow list.

    Args:
        config: the worker's settings.
        device: a CUDA device.

    Returns:
        A row per collective: MiB taken from the driver by the first call, 20 more, and 5 with eight times the
        data.
    """

    def used() -> int:
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return total - free - torch.cuda.memory_reserved()

    size, rows, data = dist.get_world_size(), [], max(config["bytes"])
    shared = dist.new_group(list(range(size)))
    small, large = (collectives(size, device, data // 4 * factor) for factor in (1, 8))
    for kind in ("fresh", "shared"):
        for name, call in small.items():
            group = dist.new_group(list(range(size))) if kind == "fresh" else shared
            row: dict[str, Any] = {"communicator": kind, "collective": name}
            try:
                marks = [used()]
                for calls, repeats in ((call, 1), (call, 20), (large[name], 5)):
                    for _ in range(repeats):
                        calls(group)
                    marks.append(used())
                deltas = [round((b - a) / MIB, 2) for a, b in pairwise(marks)]
                row.update(zip(("first_MiB", "later_MiB", "larger_MiB"), deltas, strict=True))
            except Exception as caught:
                row["error"] = f"{type(caught).__name__}: {str(caught).splitlines()[0]}"
            rows.append(row)
            if kind == "fresh":
                dist.destroy_process_group(group)
    return rows


def out_of_memory(config: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Let PyTorch's cache hold nearly all of the device, then call a new communicator's first collective.

    Args:
        config: the worker's settings; "guarded" chooses the side.
        device: a CUDA device.

    Returns:
        The driver's and the allocator's figures before and after, and what the collective did.
    """
    x = torch.ones(2**18, device=device)
    group = GuardedProcessGroup.wrap() if config["guarded"] else None
    held: list[torch.Tensor] = []
    for block in (
        2**30,
        128 * MIB,
        20 * MIB,
        2**20,
    ):  # the last fills 2 MiB segments of the pool for small tensors
        try:
            while True:
                held.append(torch.empty(block, dtype=torch.uint8, device=device))
        except torch.cuda.OutOfMemoryError:  # noqa: PERF203
            continue
    del held
    result: dict[str, Any] = {"guarded": config["guarded"], "environment": config["environment"]}
    result["before"] = _figures()
    try:
        dist.all_reduce(x, group=group)
        torch.cuda.synchronize()
        result["outcome"] = f"works, sum {x[0].item():g}"
    except Exception as error:
        result["outcome"] = f"{type(error).__name__}: {error}"[:2000]
        result["notes"] = list(getattr(error, "__notes__", []))
    result["after"] = _figures()
    if group is not None:
        result["stats"] = group.describe().splitlines()
    return result


def _figures() -> dict[str, float]:
    free, total = torch.cuda.mem_get_info()
    figures = {"driver_free": free, "total": total, "reserved": torch.cuda.memory_reserved()}
    return {f"{key}_MiB": round(value / MIB, 2) for key, value in figures.items()}


PARTS: dict[str, Callable[[dict[str, Any], torch.device], Any]] = {
    "latency": latency,
    "driver": driver_memory,
    "oom": out_of_memory,
}


if __name__ == "__main__":
    ranks.serve(sys.argv[1], PARTS)
