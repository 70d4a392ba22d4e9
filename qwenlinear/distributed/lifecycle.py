"""What concerns all groups of a process: suspending and resuming them, and guarding the default group."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist

from . import registration
from .policy import CommMemoryPolicy
from .process_group import GuardedProcessGroup, owned_guards


def suspend_all() -> None:
    """Suspend every guarded group of this process that owns its communicators.

    The order is the reverse of `resume_all`'s, the same on every rank.
    """
    for guard in reversed(list(owned_guards())):
        guard.suspend()


def resume_all() -> None:
    """Resume every suspended group of this process; all ranks have to call it.

    Each rank takes its groups by their members and then by age. As all ranks sort alike, two that wait for each other
    always wait for the same group, and groups that overlap on different ranks can't deadlock.
    """
    for guard in list(owned_guards()):
        guard.resume()


@contextlib.contextmanager
def guard_default_group(policy: CommMemoryPolicy | None = None) -> Iterator[GuardedProcessGroup]:
    """Guard the default group, for code that passes no group.

    This sets PyTorch's default group for the duration, the one place where the package changes a global of PyTorch, and
    puts back exactly what it found. ``dist.get_backend()`` goes on to name the inner backend. Groups that are made inside
    are plain ones.

    Args:
        policy: the policy; None means ``CommMemoryPolicy()``.

    Yields:
        The guard.

    Raises:
        RuntimeError: if ``torch.distributed`` isn't initialised.
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
