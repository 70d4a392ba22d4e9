"""Suspending, resuming, the default group, destruction, forks and dead peers, on every rank of a world."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from guard_checks import counting_policy

from qwenlinear.distributed import (
    CommMemoryPolicy,
    GuardedProcessGroup,
    guard_default_group,
    resume_all,
    suspend_all,
)


def raises(kind: type[Exception], call: Any, *parts: str) -> None:
    try:
        call()
    except kind as error:
        caught = str(error)
    else:
        raise AssertionError(f"no {kind.__name__}")
    missing = [part for part in parts if part not in caught]
    assert not missing, f"{missing} not in: {caught}"


def _sum(group: Any, rank: int) -> float:
    x = torch.tensor([float(rank + 1)])
    dist.all_reduce(x, group=group)
    return x.item()


def _cpu_timeout(group: GuardedProcessGroup) -> timedelta:
    timeout: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    return timeout


def suspend_and_resume(rank: int, size: int) -> None:
    policy, asked = counting_policy(interval=3600.0)
    arguments: dict[str, Any] = {
        "backend": "cpu:gloo",
        "timeout": timedelta(seconds=7),
        "group_desc": "seven seconds",
    }
    group = GuardedProcessGroup.new_group(None, policy, **arguments)
    total = size * (size + 1) / 2
    assert _sum(group, rank) == total
    assert len(asked) == 1
    old = group.inner
    for _ in range(2):  # twice is harmless
        group.suspend()
    assert group.is_suspended
    assert "is suspended" in repr(group)
    raises(RuntimeError, lambda: _sum(group, rank), "is suspended", "resume()")
    raises(RuntimeError, lambda: dist.barrier(group=group), "is suspended")
    raises(RuntimeError, lambda: group.inner, "is suspended")
    assert (group.rank(), group.size(), dist.get_rank(group)) == (rank, size, rank)
    assert old not in dist.distributed_c10d._world.pg_map
    for _ in range(2):
        group.resume()
    assert not group.is_suspended
    assert group.inner is not old
    assert _sum(group, rank) == total
    assert len(asked) == 2, "a rebuilt communicator allocates again: its first call is checked"
    # Case 14: every original argument is replayed.
    assert _cpu_timeout(group) == timedelta(seconds=7)
    assert (group.group_desc, group.inner.group_desc) == ("seven seconds", "seven seconds")
    assert dist.get_backend(group.inner) == "cpu:gloo"
    assert group.inner._device_types == [torch.device("cpu")]
    # What was changed afterwards is kept as well.
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=9), group)
    assert _cpu_timeout(group) == timedelta(seconds=9)
    group.suspend()
    group.resume()
    assert _cpu_timeout(group) == timedelta(seconds=9)
    dist.destroy_process_group(group)
    raises(RuntimeError, lambda: group.allreduce([torch.ones(1)]), "was destroyed")
    raises(ValueError, lambda: _sum(group, rank), "was destroyed")  # torch.distributed refuses first, by what repr says
    raises(RuntimeError, group.resume, "was destroyed")
    raises(RuntimeError, group.suspend, "was destroyed")


def ownership(rank: int, size: int) -> None:
    inner = dist.new_group(list(range(size)))
    wrapped = GuardedProcessGroup.wrap(inner)
    for call in (wrapped.suspend, wrapped.resume):
        raises(RuntimeError, call, "GuardedProcessGroup.new_group", "wrapped")
    suspend_all()  # nothing that is owned
    assert _sum(wrapped, rank) == _sum(inner, rank)
    name = wrapped.group_name
    dist.destroy_process_group(wrapped)
    raises(RuntimeError, lambda: wrapped.allreduce([torch.ones(1)]), "was destroyed")
    assert _sum(inner, rank) == size * (size + 1) / 2
    again = GuardedProcessGroup.wrap(inner)
    assert again.group_name == name
    assert GuardedProcessGroup.wrap(inner).group_name != name
    nested = GuardedProcessGroup.wrap(again)
    _sum(nested, rank)
    assert again.stats()["all_reduce"].calls == nested.stats()["all_reduce"].calls == 1
    for bad in ([0, 0], [size], [-1], []):
        raises(
            ValueError,
            lambda bad=bad: GuardedProcessGroup.new_group(bad, backend="gloo"),
            "ranks needs",
            str(bad),
        )
    raises(ValueError, lambda: GuardedProcessGroup.wrap(dist.GroupMember.NON_GROUP_MEMBER), "ProcessGroup")
    raises(AttributeError, lambda: wrapped.new_group)
    raises(RuntimeError, lambda: again._set_default_backend(None), "inner")
    raises(RuntimeError, lambda: dist.new_group(backend="qwenlinear_guard"), "GuardedProcessGroup.wrap")
    # Wrapping on some ranks only leaves the naming of later groups in step.
    if rank == 0:
        lone = GuardedProcessGroup.new_group([0], backend="gloo")
        assert _sum(lone, rank) == 1.0
        GuardedProcessGroup.wrap(lone)
    else:
        assert GuardedProcessGroup.new_group([0], backend="gloo") is dist.GroupMember.NON_GROUP_MEMBER
    assert _sum(dist.new_group(list(range(size))), rank) == size * (size + 1) / 2
    # The world goes, owned groups with it.
    owned = GuardedProcessGroup.new_group(backend="gloo")
    sleeping = GuardedProcessGroup.new_group(backend="gloo")
    sleeping.suspend()
    dist.destroy_process_group()
    raises(RuntimeError, lambda: owned.allreduce([torch.ones(1)]), "was destroyed")
    raises(RuntimeError, GuardedProcessGroup.wrap, "call init_process_group first")


def overlapping_groups(rank: int, size: int) -> None:
    """Three groups of two among three ranks, made and suspended in orders that differ between the ranks."""
    pairs = [(0, 1), (1, 2), (0, 2)]
    groups = {}
    for pair in pairs:
        group = GuardedProcessGroup.new_group(pair, backend="gloo", timeout=timedelta(seconds=15))
        if rank in pair:
            groups[pair] = group
    for round_ in range(3):
        mine = list(groups.values())
        for group in mine[:: 1 if (rank + round_) % 2 else -1]:
            group.suspend()
        if round_ == 2:
            suspend_all()
        assert all(group.is_suspended for group in mine)
        time.sleep(0.02 * rank)
        resume_all()
        for pair in pairs:
            if rank in pair:
                assert _sum(groups[pair], rank) == sum(pair) + 2


def no_leak_in_200_cycles(rank: int, size: int) -> list[tuple[int, int]]:
    group = GuardedProcessGroup.new_group(backend="gloo", timeout=timedelta(seconds=20))

    def usage() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def settled() -> tuple[int, int]:
        gc.collect()
        seen = usage()
        for _ in range(20):  # gloo's threads and sockets end a moment after the group
            time.sleep(0.05)
            seen = min(seen, usage())
        return seen

    groups = len(dist.distributed_c10d._world.pg_map)
    for cycle in range(200):
        assert _sum(group, rank) == size * (size + 1) / 2
        group.suspend()
        if cycle == 20:
            start, memory = settled(), resident()
        group.resume()
    group.suspend()
    end = settled()
    assert end[0] <= start[0] + 2, f"descriptors: {start[0]} after 20 cycles, {end[0]} after 200"
    assert end[1] <= start[1], f"threads: {start[1]} after 20 cycles, {end[1]} after 200"
    assert resident() - memory < 32 * 2**20, f"{(resident() - memory) / 2**20:.1f} MiB more"
    assert len(dist.distributed_c10d._world.pg_map) == groups - 1
    return [start, end]


def default_group_is_guarded_and_restored(rank: int, size: int) -> None:
    c10d = dist.distributed_c10d
    policy, asked = counting_policy(interval=0)
    found, backend = dist.group.WORLD, dist.get_backend()
    maps = {
        name: dict(getattr(c10d._world, name)) for name in ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config")
    }
    count = dist.get_pg_count()
    with guard_default_group(policy) as guard:
        assert dist.group.WORLD is guard
        assert (dist.get_backend(), dist.get_rank(), dist.get_world_size()) == (backend, rank, size)
        assert _sum(None, rank) == size * (size + 1) / 2
        dist.barrier()
        plain = dist.new_group(list(range(size)))
        assert not isinstance(plain, GuardedProcessGroup)
        assert _sum(plain, rank) == size * (size + 1) / 2
        mesh = dist.init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))
        assert mesh.get_group() is guard
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
        model(torch.ones(2, 4)).sum().backward()
        dist.destroy_process_group(plain)
    assert dist.group.WORLD is found
    assert guard.stats()["all_reduce"].calls >= 2
    assert guard.stats()["barrier"].calls == 1
    assert len(asked) == sum(s.calls for s in guard.stats().values())
    for name, before in maps.items():
        assert dict(getattr(c10d._world, name)) == before, name
    assert dist.get_pg_count() == count + 1  # the plain group
    assert _sum(None, rank) == size * (size + 1) / 2
    try:
        with guard_default_group(policy):
            raise KeyError("body")
    except KeyError:
        assert dist.group.WORLD is found
    with guard_default_group(policy):
        dist.destroy_process_group()
    assert not dist.is_initialized()


def dead_rank(rank: int, size: int) -> str:
    """The last rank dies between two collectives: the others get an error with the note, in time."""
    guard = GuardedProcessGroup.wrap(
        policy=CommMemoryPolicy(probe=lambda device: 0, reclaim=lambda device: None, interval=0)
    )
    assert _sum(guard, rank) == size * (size + 1) / 2
    if rank == size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        while True:
            _sum(guard, rank)
    except RuntimeError as error:
        seconds = time.monotonic() - start
        assert seconds < 15, f"{seconds:.1f} s"
        (note,) = error.__notes__
        assert "3.00 GiB wanted" in note
        return note
    raise AssertionError("unreachable")


def fork_after_wrapping(rank: int, size: int) -> None:
    """A forked child can't use the group, gets a clear error, and the parent goes on."""
    policy, _ = counting_policy(interval=0)
    groups = [
        GuardedProcessGroup.wrap(policy=policy),
        GuardedProcessGroup.new_group(policy=policy, backend="gloo"),
    ]
    for group in groups:
        _sum(group, rank)
    held = threading.Event()
    release = threading.Event()

    def hold() -> None:
        with groups[0]._lock:  # another thread is in a check while we fork
            held.set()
            release.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(20)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            for group in groups:
                raises(RuntimeError, lambda group=group: _sum(group, rank), "forked process")
                assert (group.rank(), group.size(), group.stats()["all_reduce"].calls) == (rank, size, 1)
            status = 0
        finally:
            os._exit(status)
    release.set()
    thread.join()
    end = time.monotonic() + 20
    while (done := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            raise AssertionError("the child hung")
        time.sleep(0.01)
    assert done[1] == 0, "the child failed"
    for group in groups:
        assert _sum(group, rank) == size * (size + 1) / 2


def unguardable_paths_are_loud(rank: int, size: int) -> list[str]:
    """C++ paths that Python can't override raise instead of passing by the guard, or reach it."""
    policy, asked = counting_policy(interval=0)
    guard = GuardedProcessGroup.wrap(policy=policy)
    out = torch.zeros(2 * size)
    try:
        work = torch.ops._c10d_functional.all_gather_into_tensor_out(torch.ones(2), size, guard.group_name, out=out)
        torch.ops._c10d_functional.wait_tensor(work)
        told = "reached the guard"
        assert asked, "passed by the guard"
    except (RuntimeError, AttributeError) as error:
        told = str(error).splitlines()[0]
        assert not asked
    dist.barrier()
    return [told]


def broken_backward(rank: int, size: int) -> None:
    """An error in the group during DDP's backward surfaces in backward()."""
    guard = GuardedProcessGroup.new_group(backend="gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4), process_group=guard)
    loss = model(torch.ones(2, 4)).sum()
    guard.suspend()
    raises(RuntimeError, loss.backward, "is suspended")
    dist.barrier()
