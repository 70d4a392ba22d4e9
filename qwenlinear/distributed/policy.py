"""`CommMemoryPolicy`: which collectives are checked for memory, how often, and what a shortage leads to."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

import torch

from .collectives import Collective, parse_names

Probe: TypeAlias = Callable[[torch.device], int]
Reclaim: TypeAlias = Callable[[torch.device], None]


class Rule(Enum):
    """When a collective is checked after its first call on a group."""

    NEVER = "first call only"
    TIMED = "first call, then at most once per interval"
    ALWAYS = "every call"


@dataclass(frozen=True)
class CommMemoryPolicy:
    """When to check for memory before a collective, and how to get some; immutable, and shared by any number
    of groups.

    NCCL allocates outside PyTorch's caching allocator, at the first use of a communicator and of some
    algorithms. Where PyTorch's cache holds the device's memory, that allocation fails although most of the
    cache is free. A check reads the driver's free memory and, if there is less than ``min_free_bytes``, gives
    the cache back to the driver.

    Args:
        allow: names of collectives that are let through without a check after their first call on a group.
        deny: names of collectives that are checked on every call; a name in both is denied. All other
            collectives are checked on their first call, then at most once per ``interval`` and group. Any
            spelling of ``torch.distributed`` or of ``ProcessGroup`` will do.
        min_free_bytes: bytes that the driver should have free before a collective; default 3 GiB.
        interval: seconds between two checks of one group; default 1.0. 0 checks every call that isn't
            allowed.
        probe: gives the free bytes of a device. The default asks the driver and nothing else, and is idle on
            a CPU, during CUDA graph capture and inside a coalescing block. A probe that was passed is always
            asked.
        reclaim: makes memory free on a device. The default is the caching allocator's ``empty_cache``, where
            it has something to give back.

    Raises:
        ValueError: for an unknown name, or a value out of range.

    Example:
        >>> policy = CommMemoryPolicy(allow=["all_gather_into_tensor"], deny=["all_to_all"])
        >>> policy.rule(Collective.parse("all_gather_single"))
        <Rule.NEVER: 'first call only'>
        >>> policy.replace(interval=5.0).interval
        5.0
    """

    allow: Collection[str | Collective] = ()
    deny: Collection[str | Collective] = ()
    min_free_bytes: int = 3 * 2**30
    interval: float = 1.0
    probe: Probe | None = None
    reclaim: Reclaim | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "allow", parse_names(self.allow, "allow"))
        object.__setattr__(self, "deny", parse_names(self.deny, "deny"))
        if isinstance(self.min_free_bytes, bool) or not isinstance(self.min_free_bytes, int) or self.min_free_bytes < 0:
            raise ValueError(f"min_free_bytes needs a whole number of bytes >= 0, got {self.min_free_bytes!r}")
        number = isinstance(self.interval, (int, float)) and not isinstance(self.interval, bool)
        if not number or not math.isfinite(self.interval) or self.interval < 0:
            raise ValueError(f"interval needs a finite number of seconds >= 0, got {self.interval!r}")
        for name in ("probe", "reclaim"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise ValueError(f"{name} needs a function of a device or None, got {value!r}")

    @classmethod
    def profiled(cls) -> CommMemoryPolicy:
        """Allow the operations that profiling of training runs found not to grow memory in the steady state.

        They are all_gather_into_tensor, allgather_into_tensor_coalesced, barrier, broadcast_object_list,
        reduce_scatter_tensor, all_to_all_single, isend and irecv. A group only sees what carries them, so
        three let more through than they say: broadcast_object_list is a ``broadcast``, thus every broadcast
        is allowed; isend and irecv are ``send`` and ``recv``, thus all point-to-point operations are, batched
        ones and object lists included. First calls are checked all the same. What stays on the interval:
        all_reduce, all_gather, reduce, gather, scatter, reduce_scatter, all_to_all and the other coalesced
        operations.

        Returns:
            The policy, with the defaults for all else.
        """
        return cls(
            allow=(
                "all_gather_into_tensor",
                "allgather_into_tensor_coalesced",
                "barrier",
                "broadcast_object_list",
                "reduce_scatter_tensor",
                "all_to_all_single",
                "isend",
                "irecv",
            )
        )

    def rule(self, collective: Collective) -> Rule:
        """Say when a collective is checked after its first call on a group.

        Args:
            collective: the collective.

        Returns:
            The rule; deny wins over allow.

        Raises:
            ValueError: if this is no `Collective`; `Collective.parse` makes one from a name.
        """
        if not isinstance(collective, Collective):
            raise ValueError(
                f"collective needs a Collective, got {collective!r}; Collective.parse makes one from a name"
            )
        if collective in self.deny:
            return Rule.ALWAYS
        return Rule.NEVER if collective in self.allow else Rule.TIMED

    def replace(self, **changes: Any) -> CommMemoryPolicy:
        """Copy the policy with some fields changed.

        Args:
            changes: fields and their new values; an unknown field is a TypeError.

        Returns:
            The new policy, validated like any other.
        """
        return dataclasses.replace(self, **changes)

    def describe(self) -> str:
        """Say in words what the policy does.

        Returns:
            Four lines of settings, then one line per rule with the collectives under it.
        """
        by_rule = {rule: [str(c) for c in Collective if self.rule(c) is rule] for rule in Rule}
        lines = [
            f"at least {self.min_free_bytes / 2**30:.2f} GiB free before a checked collective",
            f"interval: {self.interval:g} s per group",
            f"probe: {_name(self.probe, 'the driver (idle on CPU, in graph capture and in coalescing)')}",
            f"reclaim: {_name(self.reclaim, 'empty_cache, where the cache holds something')}",
        ]
        lines += [f"{rule.value}: {', '.join(names) or 'none'}" for rule, names in by_rule.items()]
        return "\n".join(lines)


def _name(function: Callable[..., object] | None, default: str) -> str:
    return default if function is None else getattr(function, "__qualname__", repr(function))


def check_policy(policy: object) -> None:
    """Require a policy or None.

    Raises:
        ValueError: if it is neither.
    """
    if policy is not None and not isinstance(policy, CommMemoryPolicy):
        raise ValueError(f"policy needs a CommMemoryPolicy or None, got {policy!r}")
