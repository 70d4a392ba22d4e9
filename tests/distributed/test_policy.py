"""`CommMemoryPolicy`: construction refuses what can't be meant, deny wins, nothing changes afterwards."""

from __future__ import annotations

import dataclasses
import math

import pytest

from qwenlinear.distributed import Collective, CommMemoryPolicy, Rule


def test_defaults() -> None:
    policy = CommMemoryPolicy()
    assert (policy.min_free_bytes, policy.interval, policy.probe, policy.reclaim) == (
        3 * 2**30,
        1.0,
        None,
        None,
    )
    assert {policy.rule(c) for c in Collective} == {Rule.TIMED}


def test_one_name_covers_every_spelling_and_deny_wins() -> None:
    policy = CommMemoryPolicy(allow=["all_gather_into_tensor", "barrier"], deny=["barrier"])
    for spelling in ("_allgather_base", "all_gather_single", "_all_gather_base"):
        assert policy.rule(Collective.parse(spelling)) is Rule.NEVER
    assert policy.rule(Collective.BARRIER) is Rule.ALWAYS
    assert policy.rule(Collective.ALL_REDUCE) is Rule.TIMED


def test_a_name_with_two_carriers_allows_both() -> None:
    policy = CommMemoryPolicy(allow=["batch_isend_irecv"])
    assert policy.allow == {Collective.SEND, Collective.RECV}


@pytest.mark.parametrize("argument", ["allow", "deny"])
def test_unknown_names_raise_at_construction(argument: str) -> None:
    with pytest.raises(ValueError, match=f"{argument}: .*'all_gather_into_tensr'"):
        CommMemoryPolicy(**{argument: ["all_reduce", "all_gather_into_tensr"]})
    with pytest.raises(ValueError, match=f"{argument} needs a collection of names, got the string 'all_reduce'"):
        CommMemoryPolicy(**{argument: "all_reduce"})


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("min_free_bytes", -1),
        ("min_free_bytes", 3.5),
        ("min_free_bytes", True),
        ("min_free_bytes", "3GiB"),
        ("interval", -0.1),
        ("interval", math.nan),
        ("interval", math.inf),
        ("interval", None),
        ("interval", True),
        ("probe", 3),
        ("reclaim", "empty_cache"),
    ],
)
def test_values_out_of_range_raise(argument: str, value: object) -> None:
    with pytest.raises(ValueError, match=argument):
        CommMemoryPolicy(**{argument: value})


def test_immutable_and_replace() -> None:
    policy = CommMemoryPolicy(deny=["all_reduce"])
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.interval = 2.0  # type: ignore[misc]
    other = policy.replace(interval=0, allow=["isend"])
    assert (other.interval, other.allow, other.deny) == (0, {Collective.SEND}, {Collective.ALL_REDUCE})
    assert policy.interval == 1.0
    assert policy.allow == frozenset()
    with pytest.raises(TypeError, match="unknown_field"):
        policy.replace(unknown_field=1)
    with pytest.raises(ValueError, match="interval"):
        policy.replace(interval=-1)
    assert hash(policy) == hash(CommMemoryPolicy(deny=["allreduce"]))
    assert policy == CommMemoryPolicy(deny=["allreduce"])


def test_profiled_allows_the_carriers_of_eight_operations() -> None:
    assert {str(c) for c in CommMemoryPolicy.profiled().allow} == {
        "all_gather_into_tensor",
        "all_gather_into_tensor_coalesced",
        "barrier",
        "broadcast",
        "reduce_scatter_tensor",
        "all_to_all_single",
        "send",
        "recv",
    }


def test_describe_names_every_setting() -> None:
    def count_free(device: object) -> int:
        return 0

    text = CommMemoryPolicy(deny=["reduce"], min_free_bytes=2**30, interval=0.5, probe=count_free).describe()
    assert "at least 1.00 GiB free" in text
    assert "0.5 s" in text
    assert "count_free" in text
    assert "every call: reduce" in text
    assert "empty_cache" in text
