"""Checks of the guard that run on every rank of a gloo world: collectives, queries, policies, memory."""

from __future__ import annotations

import logging
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from group_ops import OPS, outcome, plain

from qwenlinear.distributed import Collective, CommMemoryPolicy, GuardedProcessGroup
from qwenlinear.distributed.collectives import METHODS

GIB = 2**30


def counting_policy(**settings: Any) -> tuple[CommMemoryPolicy, list[torch.device]]:
    """Make a policy whose probe always finds enough and keeps the devices that it was asked about."""
    asked: list[torch.device] = []

    def probe(device: torch.device) -> int:
        asked.append(device)
        return 1000 * GIB

    return CommMemoryPolicy(probe=probe, **settings), asked


def equal_bare_and_guarded(rank: int, size: int) -> dict[str, list[Any]]:
    """Run every collective bare and guarded, sync and async; report what gloo supports of them."""
    policy, asked = counting_policy(interval=0)
    bare = dist.new_group(list(range(size)))
    guard = GuardedProcessGroup.wrap(dist.new_group(list(range(size))), policy)
    report = {}
    for name, (op, carrier) in OPS.items():
        for async_op in (False, True):
            expected = outcome(op, bare, rank, size, async_op)
            calls = sum(s.calls for s in guard.stats().values())
            del asked[:]
            got = outcome(op, guard, rank, size, async_op)
            assert plain(got) == plain(expected), f"{name} async={async_op}: {got} is not {expected}"
            calls = sum(s.calls for s in guard.stats().values()) - calls
            assert len(asked) == calls, f"{name}: {len(asked)} probes in {calls} calls"
            report[name] = [expected[0], carrier in guard.stats()]
    return report


def queries_never_probe(rank: int, size: int) -> int:
    """Case 12: no probe for queries; at most one a collective, by function and by method."""
    policy, asked = counting_policy(interval=0)
    guard = GuardedProcessGroup.wrap(policy=policy)
    assert (guard.rank(), guard.size()) == (rank, size)
    assert (dist.get_rank(guard), dist.get_world_size(guard)) == (rank, size)
    assert dist.get_backend(guard) == "qwenlinear_guard"
    assert guard.name() == dist.group.WORLD.name()
    assert dist.get_process_group_ranks(guard) == list(range(size))
    assert dist.get_global_rank(guard, rank) == dist.get_group_rank(guard, rank) == rank
    assert guard.group_name != dist.group.WORLD.group_name
    assert guard._get_backend(torch.device("cpu")) is not None
    assert "guard/" in repr(guard)
    guard.describe()
    assert asked == []
    x, out = torch.ones(2), torch.zeros(2 * size)
    by_method: dict[str, tuple[Any, ...]] = {
        "allreduce": ([x],),
        "allreduce_coalesced": ([x],),
        "broadcast": (x, 0),
        "reduce": (x, 0),
        "allgather": (list(out.chunk(size)), x),
        "_allgather_base": (out, x),
        "all_gather_single": (out, x),
        "allgather_into_tensor_coalesced": ([out], [x]),
        "all_gather_single_coalesced": ([out], [x]),
        "_reduce_scatter_base": (x, out),
        "reduce_scatter_single": (x, out),
        "reduce_scatter_tensor_coalesced": ([x], [out]),
        "reduce_scatter_single_coalesced": ([x], [out]),
        "alltoall_base": (out, torch.ones_like(out), [], []),
        "all_to_all_single": (out, torch.ones_like(out), [], []),
        "barrier": (),
        "monitored_barrier": (timedelta(seconds=10),),
    }
    tried = 0
    for method, args in by_method.items():
        if not hasattr(dist.ProcessGroup, method):
            continue
        before = guard.stats().get(METHODS[method])
        del asked[:]
        work = getattr(guard, method)(*args)
        if work is not None:
            work.wait()
        assert asked == [torch.device("cpu")], f"{method}: {asked}"
        assert guard.stats()[METHODS[method]].calls == (before.calls if before else 0) + 1, method
        tried += 1
    return tried


def rules(rank: int, size: int) -> None:
    """Allowed: first call only. Denied: every call. The rest: first calls, then once an interval."""
    policy, asked = counting_policy(allow=["all_gather_into_tensor"], deny=["broadcast"], interval=3600.0)
    guard = GuardedProcessGroup.wrap(policy=policy)
    x, out = torch.ones(2), torch.zeros(2 * size)
    for _ in range(5):
        dist.all_gather_into_tensor(out, x, group=guard)
        dist.broadcast(x, src=0, group=guard)
        dist.all_reduce(x, group=guard)
        dist.barrier(group=guard)
    checks = {str(c): (s.calls, s.checks) for c, s in guard.stats().items()}
    assert checks == {
        "all_gather_into_tensor": (5, 1),
        "broadcast": (5, 5),
        "all_reduce": (5, 1),
        "barrier": (5, 1),
    }
    assert len(asked) == 8
    short, _ = counting_policy(interval=0.05)
    guard = GuardedProcessGroup.wrap(policy=short)
    for _ in range(3):
        dist.all_reduce(x, group=guard)
        dist.barrier(group=guard)
        time.sleep(0.06)
    # Two first calls, then one check for each of the two further intervals.
    assert sum(s.checks for s in guard.stats().values()) == 4
    both = GuardedProcessGroup.wrap(policy=policy.replace(allow=["broadcast"], deny=["broadcast_object_list"]))
    for _ in range(3):
        dist.broadcast(x, src=0, group=both)
    assert both.stats()["broadcast"].checks == 3


class Memory:
    """A device of 8 GiB whose free part the test sets."""

    def __init__(self, free: int, cached: int) -> None:
        self.free, self.cached, self.reclaims = free, cached, 0

    def probe(self, device: torch.device) -> int:
        return self.free

    def reclaim(self, device: torch.device) -> None:
        self.reclaims += 1
        self.free, self.cached = self.free + self.cached, 0

    def policy(self, **settings: Any) -> CommMemoryPolicy:
        return CommMemoryPolicy(probe=self.probe, reclaim=self.reclaim, **settings)


def reclaims_and_backs_off(rank: int, size: int) -> None:
    x = torch.ones(2)
    memory = Memory(free=GIB, cached=6 * GIB)
    guard = GuardedProcessGroup.wrap(policy=memory.policy(deny=["all_reduce"]))
    dist.all_reduce(x, group=guard)
    stats = guard.stats()["all_reduce"]
    assert (memory.reclaims, stats.reclaims, stats.bytes_given_back) == (1, 1, 6 * GIB)
    assert stats.seconds > 0
    for _ in range(3):
        dist.all_reduce(x, group=guard)
    assert memory.reclaims == 1
    memory.free = GIB  # a denied collective whose reclaim helped is helped again
    memory.cached = 6 * GIB
    dist.all_reduce(x, group=guard)
    assert memory.reclaims == 2

    # One rank always short, nothing to gain: it pauses for a second, then for two, and all ranks go on
    # together.
    poor = Memory(free=GIB, cached=0) if rank == 0 else Memory(free=8 * GIB, cached=0)
    guard = GuardedProcessGroup.wrap(policy=poor.policy(deny=["all_reduce"]))
    for _ in range(50):
        y = torch.ones(2)
        dist.all_reduce(y, group=guard)
        assert y.tolist() == [size, size]
    assert poor.reclaims == (1 if rank == 0 else 0)
    assert guard.stats()["all_reduce"].checks == 50

    # The cache of a healthy job is full again at each check: the pauses grow although every reclaim helps.
    greedy = Memory(free=GIB, cached=6 * GIB)
    guard = GuardedProcessGroup.wrap(policy=greedy.policy(interval=0.02))
    for _ in range(25):
        greedy.free, greedy.cached = GIB, 6 * GIB
        guard.allreduce([x]).wait()
        time.sleep(0.021)
    assert 2 <= greedy.reclaims <= 8, greedy.reclaims  # of 25 checks, all short
    # Without a custom reclaim there's nothing that a CPU could give back.
    guard = GuardedProcessGroup.wrap(policy=CommMemoryPolicy(probe=lambda device: 0, interval=0))
    dist.barrier()
    for _ in range(3):
        dist.all_reduce(x, group=guard)
    assert guard.stats()["all_reduce"].reclaims == 0
    # The default probe is idle on a CPU.
    guard = GuardedProcessGroup.wrap(policy=CommMemoryPolicy(deny=["all_reduce"]))
    dist.all_reduce(x, group=guard)
    assert (guard.stats()["all_reduce"].calls, guard.stats()["all_reduce"].checks) == (1, 0)


class _Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []
        logging.getLogger("qwenlinear.distributed").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


def raising_probe_and_reclaim(rank: int, size: int) -> None:
    log = _Log()

    def broken(device: torch.device) -> Any:
        raise OSError("no such sensor")

    guard = GuardedProcessGroup.wrap(policy=CommMemoryPolicy(probe=broken, interval=0))
    for _ in range(3):
        x = torch.ones(2)
        dist.all_reduce(x, group=guard)
        assert x.tolist() == [size, size]
    assert [r.getMessage() for r in log.records] == [
        "the memory probe raised; collectives go on without its figure (logged once)"
    ]
    assert "no such sensor" in str(log.records[0].exc_info[1])  # type: ignore[index]
    del log.records[:]

    guard = GuardedProcessGroup.wrap(policy=CommMemoryPolicy(probe=lambda d: 0, reclaim=broken, deny=["all_reduce"]))
    for _ in range(3):
        dist.all_reduce(torch.ones(2), group=guard)
    assert [r.getMessage() for r in log.records] == [
        "the memory reclaim raised; collectives go on without it (logged once)"
    ]
    assert guard.stats()["all_reduce"].reclaims == 0
    # A probe that gives nonsense is a probe that raises.
    guard = GuardedProcessGroup.wrap(policy=CommMemoryPolicy(probe=lambda d: None, interval=0))  # type: ignore
    dist.all_reduce(torch.ones(2), group=guard)

    # An interrupt is nobody's failure: it goes through.
    def interrupted(device: torch.device) -> int:
        raise KeyboardInterrupt

    guard = GuardedProcessGroup.wrap(policy=CommMemoryPolicy(probe=interrupted))
    try:
        dist.all_reduce(torch.ones(2), group=guard)
    except KeyboardInterrupt:
        dist.barrier()
        return
    raise AssertionError("KeyboardInterrupt was swallowed")


def failing_collective_keeps_its_type_and_gains_a_note(rank: int, size: int) -> list[str]:
    memory = Memory(free=2 * GIB, cached=0)
    guard = GuardedProcessGroup.wrap(policy=memory.policy())
    bad = torch.zeros(3), torch.zeros(3)
    errors = []
    for group in (dist.group.WORLD, guard):
        try:
            group.allgather([[bad[0]]], [torch.zeros(3, dtype=torch.int64)])  # wrong number, wrong type
        except Exception as error:  # noqa: PERF203
            errors.append(error)
    assert len(errors) == 2
    assert type(errors[0]) is type(errors[1])
    assert str(errors[0]) == str(errors[1])
    assert not getattr(errors[0], "__notes__", [])
    (note,) = errors[1].__notes__
    for part in ("all_gather on GuardedProcessGroup", "3.00 GiB wanted", "2.00 GiB free at the last check"):
        assert part in note, note
    dist.barrier()
    return [note]


def no_reclaim_while_something_is_in_flight(rank: int, size: int) -> None:
    """Rank 0 starts an all_reduce that rank 1 joins late; until then rank 0 reclaims nothing."""
    memory = Memory(free=GIB, cached=6 * GIB)
    busy = GuardedProcessGroup.wrap(dist.new_group([0, 1]), memory.policy(deny=list(Collective), min_free_bytes=0))
    other = GuardedProcessGroup.wrap(dist.new_group([0, 1]), memory.policy(deny=list(Collective)))
    for held in (True, False):  # whether the caller keeps the work
        memory.free, memory.cached, memory.reclaims = GIB, 6 * GIB, 0
        if rank == 1:
            dist.all_reduce(torch.ones(2), group=other)
            dist.all_reduce(torch.ones(2), group=busy)
        else:
            work = dist.all_reduce(torch.ones(2), group=busy, async_op=True)
            if not held:
                del work
            dist.all_reduce(torch.ones(2), group=other)  # of another guard, too
            assert memory.reclaims == 0 or other._in_flight(torch.device("cpu")) is False
        dist.barrier()

    # The same with certainty: rank 1 joins only when rank 0 says so.
    memory.free, memory.cached, memory.reclaims = GIB, 6 * GIB, 0
    gate = dist.group.WORLD
    if rank == 0:
        work = dist.all_reduce(torch.ones(2), group=busy, async_op=True)
        lone = GuardedProcessGroup.wrap(dist.new_group([0]), memory.policy(deny=list(Collective)))
        dist.all_reduce(torch.ones(2), group=lone)
        assert (lone.stats()["all_reduce"].checks, memory.reclaims) == (1, 0)
        dist.barrier(group=gate)
        work.wait()
        dist.all_reduce(torch.ones(2), group=lone)
        assert memory.reclaims == 1
    else:
        dist.new_group([0])
        dist.barrier(group=gate)
        dist.all_reduce(torch.ones(2), group=busy)


def synchronous_gpu_collectives_mark_their_stream(rank: int, size: int) -> None:
    """On a GPU a synchronous collective is remembered by its stream, whether PyTorch returns a work for it or not.

    A contract, without a GPU; `other_streams_hold_a_reclaim_off` in tests/gpu is its twin on one.
    """

    class Streams:
        marked = 0
        works = 0

        def add_stream(self) -> None:
            self.marked += 1

        def add(self, work: Any, *, hold: bool) -> None:
            self.works += 1

        def any(self) -> bool:
            return False

        def clear(self) -> None:
            pass

    class Inner:
        answer: Any = None

        def allreduce(self, tensors: Any, opts: Any) -> Any:
            return self.answer

    guard = GuardedProcessGroup.wrap(policy=Memory(free=GIB, cached=0).policy(min_free_bytes=0))
    inner, kind, pending = guard._inner, guard._kind, guard._pending
    try:
        streams = Streams()
        guard._inner, guard._kind, guard._pending = Inner(), "cuda", {"cuda": streams}
        options = dist.AllreduceOptions()
        for answer in (None, object()):  # PyTorch 2.11 and newer, and older
            guard._inner.answer = answer
            options.asyncOp = False
            guard.allreduce([torch.ones(2)], options)
        assert (streams.marked, streams.works) == (2, 0)
        options.asyncOp = True
        guard.allreduce([torch.ones(2)], options)
        assert (streams.marked, streams.works) == (2, 1)
    finally:
        guard._inner, guard._kind, guard._pending = inner, kind, pending


def receive_before_send_with_memory_short(rank: int, size: int) -> None:
    """Both ranks receive, then send, always short, with a reclaim that waits for what is in flight."""
    guard: GuardedProcessGroup
    waited: list[Any] = []

    def reclaim_like_a_device(device: torch.device) -> None:
        for work in waited:
            if not work.is_completed():
                work.wait()

    policy = CommMemoryPolicy(probe=lambda device: 0, reclaim=reclaim_like_a_device, deny=list(Collective))
    guard = GuardedProcessGroup.wrap(policy=policy)
    for step in range(5):
        out = torch.zeros(1000)
        receive = dist.irecv(out, src=1 - rank, group=guard)
        waited[:] = [receive]
        send = dist.isend(torch.full((1000,), float(rank + step)), dst=1 - rank, group=guard)
        receive.wait()
        send.wait()
        assert out.unique().tolist() == [1 - rank + step]
    stats = guard.stats()
    assert (stats["recv"].checks, stats["send"].checks) == (5, 5)
    assert (stats["recv"].reclaims, stats["send"].reclaims) == (0, 0)
    dist.all_reduce(torch.ones(1), group=guard)
    assert guard.stats()["all_reduce"].reclaims == 1


def no_reclaim_inside_a_coalescing_block(rank: int, size: int) -> None:
    """What is inside a coalescing block is one operation: asked about, but nothing is reclaimed."""
    memory = Memory(free=GIB, cached=6 * GIB)
    guard = GuardedProcessGroup.wrap(policy=memory.policy(deny=list(Collective)))
    calls: list[str] = []

    class Coalescing:
        def __getattr__(self, name: str) -> Any:
            return lambda *args, **kwargs: calls.append(name)

    guard._inner, inner = Coalescing(), guard._inner
    guard._start_coalescing(torch.device("cpu"))
    guard.allreduce([torch.ones(1)])
    assert (guard.stats()["all_reduce"].checks, memory.reclaims) == (1, 0)
    guard._end_coalescing(torch.device("cpu"))
    guard.allreduce([torch.ones(1)])
    assert (guard.stats()["all_reduce"].checks, memory.reclaims) == (2, 1)
    assert calls == ["_start_coalescing", "allreduce", "_end_coalescing", "allreduce"]
    guard._inner = inner
