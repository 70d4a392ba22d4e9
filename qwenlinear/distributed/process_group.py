"""`GuardedProcessGroup`: a process group that looks at the memory before it lets a collective through."""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from . import registration
from .collectives import Collective
from .memory import MemoryMonitor, add_note, is_capturing
from .methods import ClassOnly, Suspended, Unusable, install_methods
from .pending import PendingWorks
from .policy import CommMemoryPolicy, Rule, check_policy
from .registration import Recipe
from .stats import CollectiveStats, Tally, table

if TYPE_CHECKING or dist.is_available():
    from torch.distributed import ProcessGroup
else:

    class ProcessGroup:
        """Stands in where PyTorch was built without ``torch.distributed``."""

        def __init__(self, rank: int, size: int) -> None:
            registration.default_group()  # raises


# All guards of the process: a reclaim must not wait for any of them, a fork invalidates all.
live_guards: weakref.WeakSet[GuardedProcessGroup] = weakref.WeakSet()


class GuardedProcessGroup(ProcessGroup):
    """A process group that guards another one against running out of device memory in a collective.

    It is made by `wrap` or `new_group` and passed wherever a group, a ``process_group`` or a mesh is taken.
    Every collective, by whichever spelling and from Python or C++, passes the policy's check and then goes to
    the inner group unchanged; the inner group's ``Work`` is what comes back. Groups that PyTorch derives from
    a guard (``split_group``, a flattened mesh) are plain ones: guards don't spread. C++ paths that can't be
    overridden raise, for a guard has no backend of its own that they could use behind its back.

    On PyTorch 2.8 to 2.13, ``batch_isend_irecv`` groups operations only for what is exactly a
    ``ProcessGroup``, no subclass: give pipelines on NCCL the `inner` group there.

    Example:
        >>> import torch, torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> group = GuardedProcessGroup.wrap(policy=CommMemoryPolicy(probe=lambda device: 8 * 2**30))
        >>> dist.all_reduce(torch.ones(2), group=group)
        >>> group.stats()["all_reduce"].checks
        1
        >>> dist.destroy_process_group()
    """

    def __init__(self, inner: ProcessGroup, policy: CommMemoryPolicy | None, recipe: Recipe | None = None) -> None:
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]  # the stubs lack this form
        self._inner: Any = inner
        self._policy = policy if policy is not None else CommMemoryPolicy()
        self._rank, self._size = inner.rank(), inner.size()
        self._recipe, self._name, self._desc = recipe, "", ""
        self._order: tuple[object, ...] = ()
        self._generation = 0
        self._timeouts: dict[str, timedelta] = {}
        self._coalescing = False
        self._lock = threading.RLock()
        self._monitor = MemoryMonitor(self._policy)
        self._tallies = {c: Tally(self._policy.rule(c)) for c in Collective}
        self._devices: list[torch.device] = list(inner._device_types)
        types = [device.type for device in self._devices]
        self._pending = defaultdict(lambda: PendingWorks("cpu"), {kind: PendingWorks(kind) for kind in types})
        self._kind = types[0] if len(types) == 1 else ""  # else each call's tensors say
        self._probe_always = self._policy.probe is not None
        # On a CPU without a probe there's no reclaim that works in flight could hold off, only a suspend to
        # wait for them.
        self._watches = self._probe_always or recipe is not None
        live_guards.add(self)

    # --- making one

    @classmethod
    def wrap(cls, group: ProcessGroup | None = None, policy: CommMemoryPolicy | None = None) -> GuardedProcessGroup:
        """Guard a group that exists; no communication, only the members call it.

        The guard doesn't own the group: destroying the guard leaves it usable, and it can't be suspended.

        Args:
            group: the group; None means the default group.
            policy: the policy; None means ``CommMemoryPolicy()``.

        Returns:
            The guard.

        Raises:
            RuntimeError: if ``torch.distributed`` isn't initialised.
            ValueError: if this isn't a group, or this rank isn't in it, or this isn't a policy.
        """
        check_policy(policy)
        world = registration.default_group()
        inner = world if group is None else group
        if not isinstance(inner, ProcessGroup):
            raise ValueError(f"a ProcessGroup that this rank is a member of is needed, got {inner!r}")
        if not registration.is_registered(inner):
            raise ValueError("the group is unknown to torch.distributed (destroyed, or never registered there)")
        guard = cls(inner, policy)
        name = registration.free_name(f"guard/{inner.group_name}")
        registration.register_guard(guard, dist.get_process_group_ranks(inner), name)
        return guard

    @ClassOnly
    def new_group(
        cls: type[GuardedProcessGroup],
        ranks: Sequence[int] | None = None,
        policy: CommMemoryPolicy | None = None,
        backend: str = "nccl",
        timeout: timedelta | None = None,
        pg_options: Any = None,
        group_desc: str | None = None,
        device_id: torch.device | None = None,
    ) -> Any:
        """Make a group and guard it; the guard owns the group and can `suspend` it.

        Only the members have to call it, groups with the same members in the same order; others may.

        Args:
            ranks: global ranks of the members, in any order; None means all.
            policy: the policy; None means ``CommMemoryPolicy()``.
            backend: as for ``dist.new_group``: "nccl" (default), "gloo", "cpu:gloo,cuda:nccl", ...
            timeout: of the operations; None means PyTorch's default for the backend.
            pg_options: options of the backend; None means its defaults.
            group_desc: a description for logs.
            device_id: connect at once, on this device, without a check. None (default) connects at the first
                collective, after its check.

        Returns:
            The guard, or ``GroupMember.NON_GROUP_MEMBER`` on a rank that isn't in ``ranks``.

        Raises:
            RuntimeError: if ``torch.distributed`` isn't initialised.
            ValueError: for ranks that are doubled, out of range or none, a backend that PyTorch doesn't know, or
                an argument of another type. No group is made then.
        """
        check_policy(policy)
        registration.check_options(backend, timeout, group_desc, device_id)
        world = registration.default_group()
        members = registration.members(ranks, world.size())
        if world.rank() not in members:
            return dist.GroupMember.NON_GROUP_MEMBER
        limit = timeout if timeout is not None else registration.default_timeout(backend)
        recipe = Recipe(members, backend, limit, pg_options, group_desc, device_id)
        name, order = registration.fresh_name(members)
        inner = registration.build(recipe, f"{name}/inner/0")
        guard = cls(inner, policy, recipe)
        guard._order = order
        registration.register_guard(guard, members, name)
        if group_desc is not None:
            guard._set_group_desc(group_desc)
        return guard

    # --- what a user asks

    @property
    def policy(self) -> CommMemoryPolicy:
        """The policy."""
        return self._policy

    @property
    def inner(self) -> ProcessGroup:
        """The guarded group.

        Raises:
            RuntimeError: while there is none (suspended, destroyed, in a forked child).
        """
        if isinstance(self._inner, Unusable):
            raise RuntimeError(self._inner.reason)
        return self._inner  # type: ignore[no-any-return]

    def stats(self) -> dict[Collective, CollectiveStats]:
        """Count what the guard did so far.

        Returns:
            A snapshot per collective that was called; names are keys as well: ``stats()["all_reduce"]``.
        """
        return {c: tally.freeze() for c, tally in self._tallies.items() if tally.calls}

    def describe(self) -> str:
        """Show the group, its policy and its counters.

        Returns:
            A heading, the policy's lines and a table.
        """
        return f"{self!r}\n{self._policy.describe()}\n{table(self.stats())}"

    def __repr__(self) -> str:
        state = f", {self._inner.reason}" if isinstance(self._inner, Unusable) else ""
        return f"GuardedProcessGroup(name={self._name!r}, rank={self.rank()}, size={self.size()}{state})"

    # --- what the guarded methods (methods.py) need besides their own few lines

    def _check(self, tally: Tally, collective: Collective, kind: str, device: torch.device) -> None:
        if not self._probe_always and (self._coalescing or is_capturing(device)):
            return  # idle, and the first call is still to be checked
        with self._lock:
            result = self._monitor.check(
                device,
                first=kind not in tally.seen,
                timed=tally.rule is Rule.TIMED,
                blocked=lambda: collective.is_point_to_point or self._coalescing or self._in_flight(device),
            )
            tally.seen.add(kind)
            tally.checks += result.probed
            tally.reclaims += result.reclaimed
            tally.bytes_given_back += result.given_back
            tally.seconds += result.seconds

    def _in_flight(self, device: torch.device) -> bool:
        if any(pending.any() for pending in self._pending.values()):
            return True
        others = [guard for guard in list(live_guards) if guard is not self]
        return any(guard._pending[device.type].any() for guard in others if device.type in guard._pending)

    def _annotate(self, error: Exception, collective: Collective, device: torch.device) -> None:
        add_note(error, f"{collective} on {self!r}: {self._monitor.note(device)}")

    # --- coalescing: what is between the two belongs to one operation

    def _start_coalescing(self, device_type: torch.device) -> None:
        self._inner._start_coalescing(device_type)
        self._coalescing = True

    def _end_coalescing(self, device_type: torch.device) -> Any:
        self._coalescing = False
        work = self._inner._end_coalescing(device_type)
        if work is not None and device_type.type in self._pending:
            self._pending[device_type.type].add(work, hold=False)
        return work

    start_coalescing, end_coalescing = _start_coalescing, _end_coalescing  # what C++ looks up from 2.15 on

    # --- what torch.distributed asks

    def rank(self) -> int:
        """This process's rank in the group; asked by every collective, and slower by way of the C++ base."""
        return self._rank

    def size(self) -> int:
        """The number of members."""
        return self._size

    @property
    def group_name(self) -> str:  # type: ignore[override]  # a NewType of str
        """The guard's own name; the inner group keeps its."""
        return self._name

    @property
    def group_desc(self) -> str:
        """The guard's own description."""
        return self._desc

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    def getGroupName(self) -> str:
        """The name, for C++."""
        return self._name

    def getGroupDesc(self) -> str:
        """The description, for C++."""
        return self._desc

    def getBackendName(self) -> str:
        """Not the inner backend's name, for C++: DDP would then look for that backend in the guard itself."""
        return registration.BACKEND

    @property
    def _device_types(self) -> list[torch.device]:
        return list(self._devices)

    @property
    def bound_device_id(self) -> torch.device | None:
        """The device that the inner group is bound to."""
        return self._inner.bound_device_id  # type: ignore[no-any-return]

    @bound_device_id.setter
    def bound_device_id(self, device: torch.device | None) -> None:
        self._inner.bound_device_id = device

    def shutdown(self) -> None:
        """Called by ``destroy_process_group``: the guard ends, and with it a group that it owns."""
        if isinstance(self._inner, Unusable) and not self.is_suspended:
            return  # destroyed before, or in a forked child, where tearing down would hang
        inner, self._inner = self._inner, Unusable(f"the guarded group {self._name!r} was destroyed")
        for pending in self._pending.values():
            pending.clear()
        if self._recipe is not None and not isinstance(inner, Unusable):
            registration.destroy(inner)

    # --- suspending

    @property
    def is_suspended(self) -> bool:
        """Whether the group is suspended."""
        return isinstance(self._inner, Suspended)

    def suspend(self) -> None:
        """Destroy the inner group's communicators so that their memory goes back; twice is harmless.

        Waits for what is in flight, at most the group's timeout for each operation.

        Raises:
            RuntimeError: on a wrapped group, whose owner may be using it.
        """
        self._needs_ownership("suspend")
        if self.is_suspended:
            return
        inner = self.inner
        for pending in self._pending.values():
            pending.wait()
        if "cuda" in self._pending and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self._timeouts = registration.backend_timeouts(inner)
        self._inner = Suspended(f"the guarded group {self._name!r} is suspended; call resume() before using it")
        registration.destroy(inner)

    def resume(self) -> None:
        """Make the inner group again with every argument it had; twice is harmless.

        All members have to call it. gloo, and NCCL with a ``device_id``, connect at once and wait for each
        other: resume several groups by `resume_all`, which takes them in one order on all ranks.

        Raises:
            RuntimeError: on a wrapped group.
        """
        recipe = self._needs_ownership("resume")
        if not self.is_suspended:
            self.inner  # noqa: B018 - raises on a destroyed group
            return
        self._generation += 1  # a name that a failed attempt left in the store isn't used again
        inner = registration.build(recipe, f"{self._name}/inner/{self._generation}")
        registration.restore_timeouts(inner, self._timeouts)
        self._inner = inner
        self._monitor.restart()
        for tally in self._tallies.values():
            tally.seen.clear()

    def _needs_ownership(self, what: str) -> Recipe:
        if self._recipe is None:
            raise RuntimeError(
                f"{what} needs a group that its guard owns, got a wrapped one ({self._name!r}); "
                "make the group by GuardedProcessGroup.new_group"
            )
        return self._recipe


install_methods(GuardedProcessGroup, ProcessGroup)
