"""Suspend and resume, the default group, and faults: no hang, no lost error, no leak."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import lifecycle_checks as checks
import pytest
from dist_harness import run_world


@pytest.mark.parametrize(
    "check",
    [
        checks.suspend_and_resume,
        checks.ownership,
        checks.default_group_is_guarded_and_restored,
        checks.fork_after_wrapping,
        checks.broken_backward,
        checks.unguardable_paths_are_loud,
    ],
    ids=lambda check: check.__name__,
)
def test_two_ranks(check: Callable[..., Any]) -> None:
    run_world(2, check, 2)


def test_overlapping_groups_on_different_ranks_dont_deadlock() -> None:
    run_world(3, checks.overlapping_groups, 3)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_200_cycles_dont_leak() -> None:
    run_world(2, checks.no_leak_in_200_cycles, 2)


def test_a_rank_that_dies_gives_the_others_an_error() -> None:
    notes = run_world(3, checks.dead_rank, 3, timeout=10.0, expect_dead={2})
    assert all("all_reduce on GuardedProcessGroup" in note for note in notes[:2])


def test_the_harness_kills_what_hangs() -> None:
    with pytest.raises(AssertionError, match="no result within 2 s"):
        run_world(2, _hang, limit=2.0)


def test_the_harness_reports_a_failure_with_its_traceback() -> None:
    with pytest.raises(AssertionError, match=r"rank 1: Traceback(.|\n)*the fault"):
        run_world(2, _fail)


def _hang(rank: int) -> None:
    import time

    if rank:
        time.sleep(100)


def _fail(rank: int) -> None:
    if rank:
        raise ValueError("the fault")
