"""How groups become known to ``torch.distributed``: the one module that touches the inside of c10d.

A guard is made by the backend that `register` adds through ``Backend.register_backend``, PyTorch's extension
point for foreign process groups. The groups themselves are then made by c10d's own helper and not by
``dist.new_group``, which names a group by a counter that all ranks have to advance together. Wrapping and
resuming concern the members only, and a counter that ran ahead on them (it does from 2.14 on, in
``use_local_synchronization`` too) would give the next group different names on different ranks: a hang. Here
the name follows from the members and is the same on all of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import operator
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

BACKEND = "qwenlinear_guard"

# How many groups of the same members this process has made, per default group: it starts anew with a new
# world.
_made: weakref.WeakKeyDictionary[ProcessGroup, dict[str, int]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Recipe:
    """Every argument that a group was made with, so that it can be made again.

    Args:
        ranks: global ranks of the members, sorted.
        backend: as for ``dist.new_group``, per device too ("cpu:gloo,cuda:nccl").
        timeout: of the group's operations.
        pg_options: backend options or None.
        group_desc: description or None.
        device_id: the device to connect at once, or None for a connection at the first collective.
    """

    ranks: tuple[int, ...]
    backend: str
    timeout: timedelta
    pg_options: Any
    group_desc: str | None
    device_id: torch.device | None


def default_group() -> ProcessGroup:
    """Get the default group.

    Returns:
        The group.

    Raises:
        RuntimeError: if there is none.
    """
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if world is None:
        raise RuntimeError("an initialised torch.distributed is needed; call init_process_group first")
    return world


def default_timeout(backend: str) -> timedelta:
    """Get PyTorch's default timeout of a backend."""
    timeout: timedelta = _c10d()._get_default_timeout(dist.Backend(backend))
    return timeout


def check_options(backend: object, timeout: object, group_desc: object, device_id: object) -> None:
    """Check what a new group is asked for, before any rank waits for another.

    Args:
        backend: meant as the name of a backend, or names by device type such as ``"cpu:gloo,cuda:nccl"``.
        timeout: meant as a timedelta or None.
        group_desc: meant as a string or None.
        device_id: meant as a device with an index or None.

    Raises:
        ValueError: for the first that isn't.
    """
    known = dist.Backend.backend_list
    parts = backend.lower().split(",") if isinstance(backend, str) else []
    if not parts or any(part.rpartition(":")[2] not in known for part in parts):
        raise ValueError(f"backend needs one of {', '.join(known)}, or such by device type, got {backend!r}")
    if timeout is not None and not isinstance(timeout, timedelta):
        raise ValueError(f"timeout needs a datetime.timedelta or None, got {timeout!r}")
    if group_desc is not None and not isinstance(group_desc, str):
        raise ValueError(f"group_desc needs a string or None, got {group_desc!r}")
    if device_id is not None and not isinstance(device_id, torch.device):
        raise ValueError(f"device_id needs a torch.device or None, got {device_id!r}")


def members(ranks: Sequence[int] | None, world_size: int) -> tuple[int, ...]:
    """Validate and sort the ranks of a new group; None means all.

    Raises:
        ValueError: for ranks that are doubled, out of range or none.
    """
    if ranks is None:
        return tuple(range(world_size))
    try:
        found = tuple(sorted(operator.index(rank) for rank in ranks))
    except TypeError:
        raise ValueError(f"ranks needs a sequence of whole numbers or None, got {ranks!r}") from None
    if not found or len(set(found)) != len(found) or found[0] < 0 or found[-1] >= world_size:
        raise ValueError(f"ranks needs distinct ranks from 0 to {world_size - 1}, at least one; got {ranks!r}")
    return found


def register_guard(guard: ProcessGroup, ranks: Sequence[int], name: str) -> None:
    """Make a guard known to ``torch.distributed``, without any communication.

    Args:
        guard: the guard; it must answer for its own name.
        ranks: global ranks of the members, in the group's order.
        name: a name that is the same on all members and not in use.
    """
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _hand_over, extended_api=True, devices=["cpu", "cuda"])
    _make(name, ranks, guard.rank(), BACKEND, default_timeout("gloo"), options=guard)


def build(recipe: Recipe, name: str) -> ProcessGroup:
    """Make a plain group from a recipe; all members have to call it.

    Args:
        recipe: what to make.
        name: a name that is the same on all members and was never used before in this world: the backends
            leave their addresses in the store under it.

    Returns:
        The group.
    """
    world = default_group()
    rank = recipe.ranks.index(world.rank())
    bound = world.bound_device_id
    # c10d splits the communicator of a bound default group, in which ranks that aren't members have to join
    # in.
    with _unbound(world):
        inner = _make(
            name,
            recipe.ranks,
            rank,
            recipe.backend,
            recipe.timeout,
            options=recipe.pg_options,
            desc=recipe.group_desc,
            device_id=recipe.device_id,
        )
    if recipe.device_id is None and bound is not None:
        inner.bound_device_id = bound
    return inner


def destroy(group: ProcessGroup) -> None:
    """Destroy a group if it is still known."""
    if is_registered(group):
        dist.destroy_process_group(group)


def is_registered(group: ProcessGroup) -> bool:
    """Say whether ``torch.distributed`` knows a group."""
    return group in _c10d()._world.pg_map


def set_reported_backend(guard: ProcessGroup, inner: ProcessGroup) -> None:
    """Let ``dist.get_backend(guard)`` answer what it answers for the inner group."""
    world = _c10d()._world
    world.pg_map[guard] = (world.pg_map[inner][0], world.pg_map[guard][1])
    world.pg_backend_config[guard] = world.pg_backend_config[inner]


def fresh_name(ranks: Sequence[int]) -> tuple[str, tuple[object, ...]]:
    """Name a new group so that its members agree without asking each other.

    Args:
        ranks: the members.

    Returns:
        The name, and a key that puts groups in the same order on every rank.
    """
    digest = hashlib.sha1(repr(tuple(ranks)).encode(), usedforsecurity=False).hexdigest()[:16]
    counts = _made.setdefault(default_group(), {})
    number = counts[digest] = counts.get(digest, 0) + 1
    return f"guarded/{digest}/{number}", (tuple(ranks), number)


def free_name(stem: str) -> str:
    """Number a name so that no group has it."""
    taken = set(_c10d()._world.pg_names.values())
    return next(name for name in (f"{stem}/{i}" for i in range(len(taken) + 1)) if name not in taken)


def backend_timeouts(group: ProcessGroup) -> dict[str, timedelta]:
    """Read the timeout of each device's backend, which may have been changed since the group was made."""
    found = {}
    for device in group._device_types:
        with contextlib.suppress(AttributeError, RuntimeError):  # a backend without options
            found[device.type] = group._get_backend(device).options._timeout
    return found


def restore_timeouts(group: ProcessGroup, timeouts: dict[str, timedelta]) -> None:
    """Give the backends of a rebuilt group the timeouts that the old ones had last."""
    for device, timeout in timeouts.items():
        backend: Any = group._get_backend(torch.device(device))
        if backend.options._timeout != timeout:
            backend._set_default_timeout(timeout)


def _make(
    name: str,
    ranks: Sequence[int],
    rank: int,
    backend: str,
    timeout: timedelta,
    *,
    options: Any = None,
    desc: str | None = None,
    device_id: torch.device | None = None,
) -> ProcessGroup:
    c10d = _c10d()
    group: ProcessGroup = c10d._new_process_group_helper(
        len(ranks),
        rank,
        list(ranks),
        dist.Backend(backend),
        c10d._get_default_store(),
        name,
        backend_options=options,
        timeout=timeout,
        device_id=device_id,
        group_desc=desc,
    )[0]
    c10d._world.pg_group_ranks[group] = {global_rank: i for i, global_rank in enumerate(ranks)}
    return group


def _hand_over(options: Any, guard: ProcessGroup | None) -> ProcessGroup:
    """Create the group of our backend: the guard was made already and comes as the backend's options."""
    if guard is None:
        raise RuntimeError(
            f"the backend {BACKEND!r} is made by GuardedProcessGroup.wrap or .new_group, not by name; "
            "pass backend='nccl' or 'gloo' to dist.new_group"
        )
    return guard


@contextlib.contextmanager
def _unbound(world: ProcessGroup) -> Iterator[None]:
    bound = world.bound_device_id
    if bound is None:
        yield
        return
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = bound


def _c10d() -> Any:
    from torch.distributed import distributed_c10d

    return distributed_c10d
