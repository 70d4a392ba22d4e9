"""The guard on gloo worlds: equal results, the policy's schedule, memory work that stays on its rank."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import guard_checks as checks
import pytest
from dist_harness import run_world


@pytest.mark.parametrize("size", [2, 4])
def test_every_collective_gives_what_it_gives_bare(size: int) -> None:
    reports = run_world(size, checks.equal_bare_and_guarded, size)
    # What gloo has can't be skipped unseen; where it lacks a collective, the guard raised the same error.
    lacking = {name for name, (kind, _) in reports[0].items() if kind != "value"}
    needs_numpy = {"objects"} if importlib.util.find_spec("numpy") is None else set()
    assert lacking <= {"all_to_all", "gather_into_tensor", "reduce_scatter", "coalesced gather"} | needs_numpy
    not_counted = {name for name, (kind, counted) in reports[0].items() if kind == "value" and not counted}
    assert not_counted <= {"gather_into_tensor"}


def test_queries_never_probe_and_methods_probe_once() -> None:
    assert min(run_world(2, checks.queries_never_probe, 2)) >= 10


@pytest.mark.parametrize(
    "check",
    [
        checks.rules,
        checks.reclaims_and_backs_off,
        checks.raising_probe_and_reclaim,
        checks.failing_collective_keeps_its_type_and_gains_a_note,
        checks.no_reclaim_while_something_is_in_flight,
        checks.synchronous_gpu_collectives_mark_their_stream,
        checks.receive_before_send_with_memory_short,
        checks.no_reclaim_inside_a_coalescing_block,
    ],
    ids=lambda check: check.__name__,
)
def test_two_ranks(check: Callable[..., Any]) -> None:
    run_world(2, check, 2)
