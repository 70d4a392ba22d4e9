"""The methods that a guard has because ``ProcessGroup`` has them: guarded, delegated or refused, each by its
name.

They are made for whatever the installed PyTorch calls them, both spellings where it has two.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Any

import torch

from .collectives import METHODS, Collective
from .policy import Rule


class Unusable:
    """Takes the inner group's place while there is none, so that the hot path needs no test."""

    def __init__(self, reason: str, kept: object = None) -> None:
        self.reason, self.kept = reason, kept

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(self.reason)


class Suspended(Unusable):
    """As `Unusable`, until the group is resumed."""


class ClassOnly:
    """A class method that instances lack: c10d takes a default group's ``new_group`` for its own hook."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.__doc__ = function, function.__doc__

    def __get__(self, instance: object, owner: type) -> Callable[..., Any]:
        if instance is not None:
            raise AttributeError("new_group is called on the class GuardedProcessGroup")
        return self.function.__get__(owner, type(owner))  # type: ignore[no-any-return]


ALWAYS, TIMED = Rule.ALWAYS, Rule.TIMED
cuda_is_initialized: Callable[[], bool] = torch.cuda.is_initialized
_CPU = torch.device("cpu")


def device_of(args: tuple[Any, ...], kwargs: dict[str, Any], default: str = "cpu") -> torch.device:
    """Find the device of a collective's first tensor, or the one that a barrier names.

    Args:
        args: of the call.
        kwargs: of the call.
        default: the type of device if there is none.

    Returns:
        The device.
    """
    for value in (*args, *kwargs.values()) if kwargs else args:
        while isinstance(value, (list, tuple)) and value:
            value = value[0]
        if isinstance(value, torch.Tensor):
            return _CPU if value.is_cpu else value.device
        device = getattr(value, "device", None)
        if isinstance(device, torch.device):
            return device
    return torch.device(default)


def _hide_from_compiler(function: Callable[..., Any]) -> None:
    """Keep TorchDynamo from compiling a frame and what it calls; DDP's C++ calls us while its hook is active.

    ``torch.compiler.disable`` does it too, but imports the compiler and costs more per call than all of the
    guard.
    """
    from torch._C._dynamo import eval_frame

    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # and don't inline it


def _guarded(method: str, collective: Collective) -> Callable[..., Any]:
    point_to_point = collective.is_point_to_point

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Check, pass on, watch. Every user pays for every line here: between collectives the code is cold in
        # the processor's caches, and costs some ten times what a loop over it shows.
        target = getattr(self._inner, method)
        tally = self._tallies[collective]
        tally.calls += 1
        kind = self._kind or (device_of(args, kwargs).type if cuda_is_initialized() else "cpu")
        if kind == "cuda" or self._probe_always:
            rule = tally.rule
            due = rule is ALWAYS or (rule is TIMED and monotonic() >= self._monitor.next_due)
            if due or kind not in tally.seen:
                self._check(tally, collective, kind, device_of(args, kwargs, kind))
        try:
            work = target(*args, **kwargs)
            if work is None:  # of a synchronous one on NCCL, from PyTorch 2.11 on: it is on the current stream
                if kind == "cuda":
                    self._pending[kind].add_stream()
            elif kind == "cuda" or self._watches:
                options = kwargs.get("opts") if kwargs else args[-1] if args else None
                if getattr(options, "asyncOp", True):
                    self._pending[kind].add(work, hold=not point_to_point)
                elif kind == "cuda":
                    self._pending[kind].add_stream()
                elif self._probe_always:
                    # Its caller waits next, and finds it complete: a failure gets the probe's figures as its
                    # note by being waited for here. Without a probe a CPU has no figures.
                    work.wait()
        except Exception as error:
            self._annotate(error, collective, device_of(args, kwargs, kind))
            raise
        return work

    _hide_from_compiler(call)
    return call


def _delegated(method: str) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._inner, method)(*args, **kwargs)

    return call


def _refused(method: str) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"{method} would pass by the guard {self._name!r}; call it on the guard's `inner` group")

    return call


# Queries and settings that the inner group answers. abort, too, on a group that isn't owned: whoever aborts
# through the guard wants its collectives to end.
DELEGATED = frozenset(
    {
        "_add_ephemeral_timeout",
        "_backend_id",
        "_enable_collectives_timing",
        "_get_backend",
        "_get_backend_name",
        "_get_sequence_number_for_group",
        "_has_hooks",
        "_register_on_completion_hook",
        "_set_sequence_number_for_group",
        "_wait_for_pending_works",
        "abort",
        "get_backend",
        "get_group_store",
        "merge_remote_group",
        "name",
        "register_abort_hook",
        "register_post_hook",
        "register_pre_hook",
        "set_timeout",
        "split_group",
        "supports_reconfigure",
        "supports_window",
        "unregister_abort_hook",
        "unregister_post_hook",
        "unregister_pre_hook",
        "use_pg_for_symm_mem_rendezvous",
    }
)
# What would give C++ a backend behind the guard's back, change its membership, or communicate outside
# collectives.
REFUSED = frozenset(
    {"_register_backend", "_set_default_backend", "get_reconfigure_handle", "new_window", "reconfigure"}
)


def install_methods(guard: type, base: type) -> None:
    """Give a guard class the methods that its base has in this PyTorch.

    Args:
        guard: the class, `GuardedProcessGroup`.
        base: ``ProcessGroup``.
    """
    for name in dir(base):
        if name in METHODS:
            setattr(guard, name, _guarded(name, METHODS[name]))
        elif name in DELEGATED:
            setattr(guard, name, _delegated(name))
        elif name in REFUSED:
            setattr(guard, name, _refused(name))
