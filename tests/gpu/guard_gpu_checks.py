"""Checks of the guard on NCCL, one GPU a rank."""

from __future__ import annotations

import gc
from typing import Any

import torch
import torch.distributed as dist
from group_ops import OPS, outcome, plain

from qwenlinear.distributed import Collective, CommMemoryPolicy, GuardedProcessGroup

GIB = 2**30
GLOO_ONLY = {"monitored_barrier", "all_gather_coalesced"}
# Older PyTorch starts a guard's batched operations one by one, which may block on NCCL.
POINT_TO_POINT = {"batch_isend_irecv", "send and recv", "recv from anyone", "objects"}


def _fill_cache(gib: float) -> int:
    """Let PyTorch's cache hold some memory that nobody uses."""
    gc.collect()
    torch.cuda.empty_cache()
    held = torch.empty(int(gib * GIB), dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    del held
    return torch.cuda.memory_reserved()


def _want_all() -> int:
    return int(torch.cuda.mem_get_info()[1])


def first_call_gives_the_cache_back(rank: int, size: int) -> dict[str, Any]:
    x = torch.ones(2**18, device="cuda")
    guard = GuardedProcessGroup.wrap(policy=CommMemoryPolicy(min_free_bytes=_want_all()))
    reserved = _fill_cache(2.0)
    free = torch.cuda.mem_get_info()[0]
    dist.all_reduce(x, group=guard)
    torch.cuda.synchronize()
    stats = guard.stats()["all_reduce"]
    assert (stats.calls, stats.checks, stats.reclaims) == (1, 1, 1), stats
    assert stats.bytes_given_back >= 2 * GIB - 64 * 2**20, stats
    assert torch.cuda.memory_reserved() <= reserved - 2 * GIB + 64 * 2**20
    # It did not help (all memory is wanted): a pause.
    guard_denied = GuardedProcessGroup.wrap(policy=CommMemoryPolicy(min_free_bytes=_want_all(), deny=["all_reduce"]))
    for _ in range(20):
        dist.all_reduce(x, group=guard_denied)
    stats_denied = guard_denied.stats()["all_reduce"]
    assert (stats_denied.checks, stats_denied.reclaims <= 1) == (20, True), stats_denied
    return {
        "free_before": free,
        "free_after": torch.cuda.mem_get_info()[0],
        "given_back": stats.bytes_given_back,
    }


def idle_in_graph_capture(rank: int, size: int) -> None:
    x = torch.ones(1024, device="cuda")
    guards = {
        "default": GuardedProcessGroup.wrap(policy=CommMemoryPolicy(deny=list(Collective), min_free_bytes=_want_all())),
        "custom": GuardedProcessGroup.wrap(policy=CommMemoryPolicy(deny=list(Collective), probe=lambda device: 0)),
    }
    for name, guard in guards.items():
        for _ in range(3):
            dist.all_reduce(x, group=guard)
        torch.cuda.synchronize()
        before = guard.stats()["all_reduce"]
        _fill_cache(1.0)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x * 2
            dist.all_reduce(y, group=guard)
        after = guard.stats()["all_reduce"]
        assert after.calls == before.calls + 1
        assert after.checks == before.checks + (0 if name == "default" else 1), name
        assert after.reclaims == before.reclaims, name
        graph.replay()
        torch.cuda.synchronize()
        assert y[0].item() == x[0].item() * 2 * size


def other_streams_hold_a_reclaim_off(rank: int, size: int) -> None:
    x = torch.ones(1024, device="cuda")
    guard = GuardedProcessGroup.wrap(policy=CommMemoryPolicy(deny=list(Collective), min_free_bytes=_want_all()))
    dist.all_reduce(x, group=guard)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        dist.all_reduce(x, group=guard)  # checked, and free to reclaim: nothing is pending yet
        torch.cuda._sleep(2_000_000_000)  # now the stream of that collective is busy
    guard._monitor.restart()
    reserved = _reserve_without_wait()
    reclaims = guard.stats()["all_reduce"].reclaims
    dist.all_reduce(torch.ones_like(x), group=guard)
    assert guard.stats()["all_reduce"].reclaims == reclaims, "it would have waited for the other stream"
    torch.cuda.synchronize()
    guard._monitor.restart()
    assert torch.cuda.memory_reserved() >= reserved
    dist.all_reduce(x, group=guard)
    assert guard.stats()["all_reduce"].reclaims == reclaims + 1


def _reserve_without_wait() -> int:
    held = torch.empty(64 * 2**20, dtype=torch.uint8, device="cuda")
    del held
    return torch.cuda.memory_reserved()


def suspend_gives_memory_back(rank: int, size: int) -> dict[str, int]:
    x = torch.ones(2**18, device="cuda")
    free = [int(torch.cuda.mem_get_info()[0])]
    group = GuardedProcessGroup.new_group(backend="nccl", group_desc="suspended")
    dist.all_reduce(x, group=group)
    torch.cuda.synchronize()
    free.append(int(torch.cuda.mem_get_info()[0]))
    for _ in range(3):
        group.suspend()
        free.append(int(torch.cuda.mem_get_info()[0]))
        group.resume()
        x.fill_(1.0)
        dist.all_reduce(x, group=group)
        assert x[0].item() == size
        free.append(int(torch.cuda.mem_get_info()[0]))
    assert free[2] >= free[1], free
    assert free[-1] >= free[1] - 64 * 2**20, free
    dist.destroy_process_group(group)
    return dict(zip(("before", "connected", "suspended", "resumed"), free[:4], strict=True))


def equal_bare_and_guarded(rank: int, size: int) -> dict[str, str]:
    """Every collective that NCCL has, bare and guarded, sync and async."""
    torch.set_default_device("cuda")
    bare = dist.new_group(list(range(size)))
    guard = GuardedProcessGroup.wrap(dist.new_group(list(range(size))), CommMemoryPolicy(interval=0))
    report = {}
    for name, (op, _) in OPS.items():
        if name in GLOO_ONLY or name in POINT_TO_POINT:
            continue
        for async_op in (False, True):
            expected = outcome(op, bare, rank, size, async_op)
            got = outcome(op, guard, rank, size, async_op)
            torch.cuda.synchronize()
            same = plain(got) == plain(expected)
            assert same or got[0] == expected[0] != "value", f"{name} async={async_op}: {got} is not {expected}"
            report[name] = expected[0]
    assert sum(s.checks for s in guard.stats().values()) == sum(s.calls for s in guard.stats().values())
    return report
