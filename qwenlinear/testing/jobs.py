"""Cases in several processes: most of a kernel's first calls on a GPU is compilation, which keeps one core busy."""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from functools import lru_cache

import torch

from qwenlinear.kernels.auto import kernel_from_name
from qwenlinear.testing.cases import Case
from qwenlinear.testing.kernel import run_case
from qwenlinear.testing.report import CaseResult

EVERY = 30.0  # seconds between two lines of progress
_kernel_named = lru_cache(maxsize=1)(kernel_from_name)
_lost: list[str] = []  # what took the device from this process


def one(name: str, device: str, case: Case) -> list[CaseResult]:
    """Run one case, in this process.

    Args:
        name: of the kernel, as ``kernel_from_name`` takes it.
        device: where.
        case: which.

    Returns:
        What :func:`run_case` gives; after a CUDA error, which nothing in a process survives, one failure for each case.
    """
    if _lost:
        return [CaseResult(case, "failed", f"not run: the device is lost to this process ({_lost[0]})")]
    results = list(run_case(_kernel_named(name), case, torch.device(device)))
    _lost.extend(result.text for result in results if result.status == "failed" and "CUDA error" in result.text)
    return results


def side_by_side(
    name: str, device: str, cases: Sequence[Case], jobs: int, seconds: float
) -> list[list[CaseResult] | None]:
    """Run cases in several processes, each taking the next one when it is free.

    Args:
        name: of the kernel.
        device: where.
        cases: which.
        jobs: processes.
        seconds: after which nothing more is waited for.

    Returns:
        For each case what :func:`one` gives, or None where the time did not reach it.
    """
    start = told = time.perf_counter()
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"))
    futures = [pool.submit(one, name, device, case) for case in cases]
    running = set(futures)
    while running and (left := seconds - (time.perf_counter() - start)) > 0:
        _, running = wait(running, min(left, EVERY), FIRST_COMPLETED)
        if time.perf_counter() - told > EVERY:
            told = time.perf_counter()
            done = len(cases) - len(running)
            print(f"{name}: {done} of {len(cases)} cases after {told - start:.0f} s", file=sys.stderr, flush=True)
    results = [
        _result(future, case) if future not in running else None for future, case in zip(futures, cases, strict=True)
    ]
    if running:  # a compiler does not listen: its process is stopped
        for process in list((pool._processes or {}).values()):
            process.kill()
    pool.shutdown(wait=not running, cancel_futures=True)
    return results


def _result(future: Future[list[CaseResult]], case: Case) -> list[CaseResult]:
    try:
        return future.result()
    except Exception as error:  # a process that died takes what was in its hands with it
        return [CaseResult(case, "failed", f"{type(error).__name__}: {error}")]
