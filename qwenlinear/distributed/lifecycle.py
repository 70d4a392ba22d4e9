"""What concerns all groups of a process: suspending and resuming them, and guarding the default group."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

import torch.distributed as dist

from . import registration
from .methods import Unusable
from .policy import CommMemoryPolicy
from .process_group import GuardedProcessGroup, live_guards


def suspend_all() -> None:
    """Suspend every guarded group of this process that owns its communicators.

    The order is the reverse of `resume_all`'s, the same on every rank.
    """
    for guard in reversed(_owned_guards()):
        guard.suspend()


def resume_all() -> None:
    """Resume every suspended group of this process; all ranks have to call it.

    Each rank takes its groups by their members and then by age. As all ranks sort alike, two that wait for
    each other always wait for the same group, and groups that overlap on different ranks can't deadlock.
    """
    for guard in _owned_guards():
        guard.resume()


@contextlib.contextmanager
def guard_default_group(policy: CommMemoryPolicy | None = None) -> Iterator[GuardedProcessGroup]:
    """Guard the default group, for code that passes no group.

    This sets PyTorch's default group for the duration, the one place where the package changes a global of
    PyTorch, and puts back exactly what it found. ``dist.get_backend()`` goes on to name the inner backend.
    Groups that are made inside are plain ones.

    Args:
        policy: the policy; None means ``CommMemoryPolicy()``.

    Yields:
        The guard.

    Raises:
        RuntimeError: if ``torch.distributed`` isn't initialised.
        ValueError: if this isn't a policy.
    """
    found = registration.default_group()
    guard = GuardedProcessGroup.wrap(found, policy)
    registration.set_reported_backend(guard, found)
    dist.group.WORLD = guard
    try:
        yield guard
    finally:
        if dist.group.WORLD is guard:  # else the body destroyed or replaced the default group itself
            dist.group.WORLD = found
        registration.destroy(guard)


def _owned_guards() -> list[GuardedProcessGroup]:
    """Find the guards that own their group and aren't destroyed, in the same order on every rank."""
    owned = [g for g in live_guards if g._recipe is not None and (g.is_suspended or not isinstance(g._inner, Unusable))]
    return sorted(owned, key=lambda g: g._order)


def _invalidate_after_fork() -> None:
    """The threads behind a group don't exist in a forked child; say so instead of hanging there."""
    for guard in list(live_guards):
        guard._lock = threading.RLock()
        # Kept: tearing the group down would wait for the threads that are gone.
        guard._inner = Unusable(f"the guarded group {guard._name!r} can't be used in a forked process", guard._inner)


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_invalidate_after_fork)
