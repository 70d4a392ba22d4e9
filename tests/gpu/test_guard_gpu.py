"""The memory guard on NCCL: the driver's figures, CUDA graphs, streams, communicators that come and go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import guard_gpu_checks as checks
import pytest
import ranks_checks as several
import torch
from dist_harness import run_world

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "check",
    [
        checks.first_call_gives_the_cache_back,
        checks.idle_in_graph_capture,
        checks.other_streams_hold_a_reclaim_off,
        checks.suspend_gives_memory_back,
        checks.equal_bare_and_guarded,
    ],
    ids=lambda check: check.__name__,
)
def test_one_gpu(check: Callable[..., Any]) -> None:
    print(run_world(1, check, 1, backend="nccl"))


@pytest.mark.parametrize(
    "check",
    [
        checks.equal_bare_and_guarded,
        checks.idle_in_graph_capture,
        checks.other_streams_hold_a_reclaim_off,
        *several.EVERYWHERE,
        several.full_cache_works_guarded,
    ],
    ids=lambda c: c.__name__,
)
def test_two_gpus(check: Callable[..., Any]) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    for rank, told in enumerate(run_world(2, check, 2, backend="nccl", limit=60.0)):
        print(f"{check.__name__}, rank {rank}: {told}")
