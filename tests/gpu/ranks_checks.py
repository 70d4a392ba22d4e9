"""Checks of the guard over several ranks that run on NCCL with one GPU a rank, and but for the driver's figures on gloo too."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import torch
import torch.distributed as dist
from packaging.version import Version

from qwenlinear.bench import guard_worker
from qwenlinear.distributed import Collective, CommMemoryPolicy, GuardedProcessGroup

MIB = 2**20
# From here on batch_isend_irecv groups the operations of a guard as it does those of a plain group.
GROUPS_FOR_GUARDS = Version("2.14.0a0")


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _always_short(device: torch.device) -> CommMemoryPolicy:
    """Checked on every call, always too little; on a GPU the default reclaim gives the cache back."""
    reclaim = None if device.type == "cuda" else lambda d: None
    return CommMemoryPolicy(deny=list(Collective), probe=lambda d: 0, reclaim=reclaim)


def _ready_to_reclaim(guard: GuardedProcessGroup, device: torch.device) -> int:
    """End the guard's pause and give it a cache that it could give back; says how often it reclaimed before."""
    guard._monitor.restart()
    if device.type == "cuda":
        held = torch.empty(64 * MIB, dtype=torch.uint8, device=device)
        torch.cuda.synchronize(device)
        del held
    return sum(stats.reclaims for stats in guard.stats().values())


def _reclaims(guard: GuardedProcessGroup) -> int:
    return sum(stats.reclaims for stats in guard.stats().values())


class _Ring:
    """Sends to the next rank and receives from the one before."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.to, self.of, self.device = rank, (rank + 1) % size, (rank - 1) % size, device
        self.sent = torch.full((1000,), float(rank), device=device)
        self.got = torch.full((1000,), -1.0, device=device)

    def operations(self, group: Any, *, receive_first: bool) -> list[Any]:
        receive = dist.P2POp(dist.irecv, self.got, self.of, group=group)
        send = dist.P2POp(dist.isend, self.sent, self.to, group=group)
        return [receive, send] if receive_first else [send, receive]

    def batched(self, group: Any, *, receive_first: bool = True) -> None:
        for work in dist.batch_isend_irecv(self.operations(group, receive_first=receive_first)):
            work.wait()

    def grouped(self, group: Any) -> None:
        """What batch_isend_irecv does for plain groups, on any PyTorch."""
        if self.device.type != "cuda":
            self.batched(group)
            return
        with dist.distributed_c10d._coalescing_manager(group, self.device, async_ops=True) as manager:
            for one in self.operations(group, receive_first=True):
                one.op(one.tensor, one.peer, group=group)
        for work in manager.works:
            work.wait()

    def check(self, what: str) -> None:
        _finish(self.device)
        assert self.got.unique().tolist() == [self.of], what
        self.got.fill_(-1.0)

    def microseconds(self, call: Any) -> float:
        for _ in range(5):
            call()
        _finish(self.device)
        begin = time.perf_counter()
        for _ in range(50):
            call()
        _finish(self.device)
        return (time.perf_counter() - begin) / 50 * 1e6


def batched_point_to_point(rank: int, size: int) -> dict[str, Any]:
    """A batch is right by every way; says whether PyTorch groups it for a guard, and what it costs one by one."""
    device = _device()
    ring = _Ring(rank, size, device)
    guard = GuardedProcessGroup.wrap(dist.new_group(list(range(size))), _always_short(device))
    ring.batched(guard.inner)
    ring.check("bare")
    ring.grouped(guard)
    ring.check("grouped by hand")
    started: list[torch.device] = []
    start = guard._start_coalescing

    def spy(kind: torch.device) -> None:
        started.append(kind)
        start(kind)

    guard._start_coalescing = spy  # type: ignore[method-assign]
    # One by one NCCL needs one side to send while the other receives.
    in_turn = rank % 2 == 1
    ring.batched(guard, receive_first=in_turn)
    ring.check("batched through the guard")
    able = device.type == "cuda"
    assert bool(started) == (able and Version(torch.__version__) >= GROUPS_FOR_GUARDS), (torch.__version__, started)
    if started:
        ring.batched(guard)
        ring.check("received first, through the guard")
    del guard._start_coalescing  # type: ignore[method-assign]
    assert _reclaims(guard) == 0, "memory is short, and nothing may be given back before point-to-point operations"
    us = {
        "bare": ring.microseconds(lambda: ring.batched(guard.inner)),
        "guarded, grouped by hand": ring.microseconds(lambda: ring.grouped(guard)),
        "guarded, batch_isend_irecv": ring.microseconds(lambda: ring.batched(guard, receive_first=in_turn)),
    }
    return {"grouped for a guard": bool(started), "us": {name: round(value, 1) for name, value in us.items()}}


def coalesced_collectives(rank: int, size: int) -> dict[str, int]:
    """Coalesced collectives are one operation to the guard, right with memory short, and nothing is given back inside of one."""
    device = _device()
    guard = GuardedProcessGroup.wrap(dist.new_group(list(range(size))), _always_short(device))
    manager = dist.distributed_c10d._coalescing_manager
    xs = [torch.full((100 * (i + 1),), float(rank + i), device=device) for i in range(4)]
    with manager(group=guard):
        for x in xs:
            dist.all_reduce(x, group=guard)
    _finish(device)
    total = size * (size - 1) / 2
    assert [x.unique().tolist() for x in xs] == [[total + size * i] for i in range(4)]
    calls = {str(name): stats.calls for name, stats in guard.stats().items()}
    assert calls == {"all_reduce_coalesced": 1}
    if device.type == "cuda":  # gloo has these neither bare nor guarded
        outs = [torch.zeros(size * 8, device=device) for _ in range(2)]
        parts = [torch.zeros(8, device=device) for _ in range(2)]
        with manager(group=guard, async_ops=True) as works:
            for out in outs:
                dist.all_gather_into_tensor(out, torch.full((8,), float(rank), device=device), group=guard)
        works.wait()
        with manager(group=guard):
            for part, out in zip(parts, outs, strict=True):
                dist.reduce_scatter_tensor(part, out, group=guard)
        _finish(device)
        assert all(out.reshape(size, 8)[:, 0].tolist() == list(range(size)) for out in outs)
        assert all(part.unique().tolist() == [rank * size] for part in parts)
        before = _ready_to_reclaim(guard, device)
        with manager(group=guard, device=device):  # each on its own, between the backend's start and end
            for x in xs:
                dist.broadcast(x, src=0, group=guard)
        _finish(device)
        assert _reclaims(guard) == before
    return {str(name): stats.calls for name, stats in guard.stats().items()}


def two_streams(rank: int, size: int) -> dict[str, int]:
    """Two guarded groups on two streams, with memory short all the time: right sums, no hang."""
    device = _device()
    cuda = device.type == "cuda"
    guards = [GuardedProcessGroup.wrap(dist.new_group(list(range(size))), _always_short(device)) for _ in range(2)]
    xs = [torch.full((2**20,), float(rank + 1 + i), device=device) for i in range(2)]
    streams = [torch.cuda.Stream(device) for _ in guards] if cuda else []
    expected = [size * (size + 1) / 2 + size * i for i in range(2)]
    for guard, x in zip(guards, xs, strict=True):
        dist.all_reduce(x, group=guard)
    _finish(device)
    for turn in range(20):
        for i, guard in enumerate(guards):
            with torch.cuda.stream(streams[i]) if cuda else contextlib.nullcontext():
                y = xs[i] / size
                work = dist.all_reduce(y, group=guard, async_op=turn % 2 == 1)
                if work is not None:
                    work.wait()
                xs[i].copy_(y)
        guards[turn % 2]._monitor.restart()
    _finish(device)
    assert [x.unique().tolist() for x in xs] == [[value] for value in expected]
    assert all(guard.stats()["all_reduce"].checks == 21 for guard in guards)
    return {f"reclaims of group {i}": _reclaims(guard) for i, guard in enumerate(guards)}


def receive_before_send(rank: int, size: int) -> None:
    """Rank 0 waits for what rank 1 only sends after a collective of both: whoever waited for the device here would hang."""
    device = _device()
    guard, other = (
        GuardedProcessGroup.wrap(dist.new_group(list(range(size))), _always_short(device)) for _ in range(2)
    )
    x, out = torch.ones(1000, device=device), torch.zeros(1000, device=device)
    dist.all_reduce(x, group=other)
    if rank == 0:  # connect, in an order that one stream takes
        dist.send(x, dst=1, group=guard)
        dist.recv(out, src=1, group=guard)
    elif rank == 1:
        dist.recv(out, src=0, group=guard)
        dist.send(x, dst=0, group=guard)
    _finish(device)
    dist.barrier()
    for step in range(5):
        before = _ready_to_reclaim(other, device)
        if rank == 0:
            work = dist.irecv(out, src=1, group=guard)
            dist.all_reduce(x, group=other)
            assert _reclaims(other) == before, "it would have waited for the receive"
            work.wait()
            _finish(device)
            assert out.unique().tolist() == [float(step)]
        else:
            dist.all_reduce(x, group=other)
            _finish(device)  # a program that reads the sum before it sends
            if rank == 1:
                dist.isend(torch.full_like(out, float(step)), dst=0, group=guard).wait()
                _finish(device)
        dist.barrier()
    before = _ready_to_reclaim(other, device)
    dist.all_reduce(x, group=other)
    assert _reclaims(other) == before + 1, "and with nothing in flight it is free to"
    assert _reclaims(guard) == 0


def one_rank_short(rank: int, size: int) -> dict[str, int]:
    """One rank is short of memory all the time, the others never: all go on together, with right results."""
    device = _device()
    plenty = CommMemoryPolicy(deny=list(Collective), probe=lambda d: 1000 * 2**30)
    guard = GuardedProcessGroup.wrap(dist.new_group(list(range(size))), _always_short(device) if rank == 0 else plenty)
    for step in range(50):
        if step % 10 == 0:
            _ready_to_reclaim(guard, device)
        x = torch.full((2**18,), float(rank + step), device=device)
        whole, part = torch.empty(size * 8, device=device), torch.empty(8, device=device)
        dist.all_reduce(x, group=guard)
        dist.all_gather_into_tensor(whole, torch.full((8,), float(rank), device=device), group=guard)
        dist.reduce_scatter_tensor(part, whole, group=guard)
        _finish(device)
        assert x[0].item() == size * step + size * (size - 1) / 2
        assert whole.reshape(size, 8)[:, 0].tolist() == list(range(size))
        assert part.unique().tolist() == [float(rank * size)]
    assert (_reclaims(guard) > 0) == (rank == 0)
    return {str(name): stats.reclaims for name, stats in guard.stats().items()}


def full_cache_works_guarded(rank: int, size: int) -> dict[str, Any]:
    """PyTorch's cache holds the device on every rank; a new communicator's first collective works all the same.

    That it fails bare is shown by ``qwenlinear bench guard``, in processes that may end over it.
    """
    found = guard_worker.out_of_memory({"guarded": True, "environment": {}}, _device())
    assert found["outcome"] == f"works, sum {size}", found
    assert found["before"]["driver_free_MiB"] < 300 < found["after"]["driver_free_MiB"], found
    return {key: found[key] for key in ("before", "after")}


def suspend_and_resume_50_times(rank: int, size: int) -> dict[str, Any]:
    """What a communicator takes comes back at every suspend, and nothing is lost over 50 cycles."""
    device = _device()
    begin = time.monotonic()

    def free() -> float:
        _finish(device)
        return torch.cuda.mem_get_info(device)[0] / MIB if device.type == "cuda" else 0.0

    before = free()
    group = GuardedProcessGroup.new_group(backend=dist.get_backend(), group_desc="suspended")
    x = torch.ones(2**18, device=device)
    taken: list[float] = []
    given: list[float] = []
    for _ in range(50):
        # The second element: whether a rank is late. All know it, so all stop together and none hangs.
        x.fill_(1.0)
        x[1] = float(time.monotonic() - begin > 40.0)
        dist.all_reduce(x, group=group)
        assert x[0].item() == size
        taken.append(free())
        if x[1].item() > 0:
            break
        group.suspend()
        given.append(free())
        group.resume()
    seconds = time.monotonic() - begin
    dist.destroy_process_group(group)
    assert len(given) == 50, f"{len(given)} cycles in {seconds:.0f} s"
    # The driver rounds, and PyTorch's own small buffers come once: allow 64 MiB, less than any communicator takes.
    assert max(given) - min(given[1:]) <= 64, given
    assert max(taken) - min(taken[1:]) <= 64, taken
    if device.type == "cuda":
        assert min(after - during for during, after in zip(taken, given, strict=True)) > 0, (taken, given)
    figures = {"before": before, "connected": taken[0], "suspended": given[0]}
    last = {"connected, cycle 50": taken[-1], "suspended, cycle 50": given[-1], "seconds": seconds}
    return {name: round(value, 1) for name, value in (figures | last).items()}


EVERYWHERE = (
    batched_point_to_point,
    coalesced_collectives,
    two_streams,
    receive_before_send,
    one_rank_short,
    suspend_and_resume_50_times,
)
