"""Runs a check in several real processes that form a gloo world, with a hard limit that kills them.

The processes are forked from a server that has imported PyTorch once, so a world starts in a fraction of a
second.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

LIMIT_SECONDS = 60.0
PRELOAD = [
    "torch",
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed._functional_collectives",
    "torch._dynamo",
    "qwenlinear.distributed",
]


def run_world(
    size: int,
    check: Callable[..., Any],
    *args: Any,
    timeout: float = 20.0,
    expect_dead: frozenset[int] | set[int] = frozenset(),
    limit: float = LIMIT_SECONDS,
    backend: str = "gloo",
) -> list[Any]:
    """Run `check(rank, *args)` on every rank of a new world.

    Args:
        size: number of processes.
        check: a function of an importable module.
        args: picklable arguments.
        timeout: seconds that a gloo operation may take.
        expect_dead: ranks that end without a result.
        limit: seconds after which all processes are killed.
        backend: "gloo", or "nccl" with one GPU a rank.

    Returns:
        What the check returned, by rank; None for ranks that were expected to die.

    Raises:
        AssertionError: with the tracebacks, if a rank raised, died or ran past the limit.
    """
    # CUDA doesn't survive a fork, not even of a server that merely looked for it.
    context = multiprocessing.get_context("forkserver" if backend == "gloo" else "spawn")
    if backend == "gloo":
        context.set_forkserver_preload(PRELOAD)
    store = dist.TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
    pipes, processes = [], []
    for rank in range(size):
        ours, theirs = context.Pipe(duplex=False)
        settings = (rank, size, store.port, timeout, backend, theirs, check, args)
        process = context.Process(target=_entry, args=settings, daemon=False)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        outcomes = _collect(pipes, limit)
    finally:
        for process in processes:
            if process.is_alive() and process.pid is not None:
                process.join(2.0)
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, signal.SIGKILL)
            process.join()
    failures = [
        f"--- rank {rank}: {outcomes.get(rank, ('', f'no result within {limit:g} s'))[1]}"
        for rank in range(size)
        if rank not in expect_dead and outcomes.get(rank, ("missing",))[0] != "ok"
    ]
    assert not failures, "\n".join(failures)
    return [outcomes[rank][1] if rank in outcomes and rank not in expect_dead else None for rank in range(size)]


def _collect(pipes: list[Connection], limit: float) -> dict[int, tuple[str, Any]]:
    outcomes: dict[int, tuple[str, Any]] = {}
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    deadline = time.monotonic() + limit
    while waiting and time.monotonic() < deadline:
        for pipe in wait(list(waiting), timeout=max(0.0, deadline - time.monotonic())):
            rank = waiting.pop(pipe)
            try:
                outcomes[rank] = pipe.recv()
            except EOFError:
                outcomes[rank] = ("dead", "the process ended without a result")
            if outcomes[rank][0] == "error":  # the others wait for it in vain: give them a moment to say where
                deadline = min(deadline, time.monotonic() + 5.0)
    return outcomes


def _entry(
    rank: int,
    size: int,
    port: int,
    timeout: float,
    backend: str,
    pipe: Connection,
    check: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        limit = timedelta(seconds=timeout)
        store = dist.TCPStore("127.0.0.1", port, size, False, timeout=limit)
        if backend == "nccl":
            torch.cuda.set_device(rank)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
        pipe.send(("ok", check(rank, *args)))
    except BaseException:
        pipe.send(("error", traceback.format_exc()))
    finally:
        pipe.close()
    # Without tearing down: a peer may have died, and interpreter shutdown isn't what is tested.
    os._exit(0)
