"""The check before a collective: read the free memory, and give PyTorch's cache back where there is too
little.

Everything here is local to one rank and stays so: what is read can differ between ranks, so it may only lead
to work that no other rank has to match. A collective is never skipped, refused or delayed on a peer's behalf.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .policy import CommMemoryPolicy

logger = logging.getLogger(__name__)

# A shortage that can't be dealt with now (a point-to-point operation, work in flight) is looked at again
# after this many seconds, or after the policy's interval if that is shorter.
RETRY_SECONDS = 0.01
BACKOFF_FIRST_SECONDS = 1.0
BACKOFF_MAX_SECONDS = 64.0


def driver_free_bytes(device: torch.device) -> int:
    """Read how many bytes the driver has free on a device.

    Args:
        device: a CUDA device.

    Returns:
        Bytes. PyTorch's statistics are left alone: they build a dictionary of every counter at each call.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(torch.cuda.cudart().cudaMemGetInfo(index)[0])  # what mem_get_info calls, without its 3 us around it


def is_capturing(device: torch.device) -> bool:
    """Say whether the current stream is recording a CUDA graph, when neither the driver nor the cache may be
    touched.

    Args:
        device: any device.

    Returns:
        False for everything but CUDA.
    """
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def releasable_bytes(device: torch.device) -> int:
    """Read how much the caching allocator holds without needing it.

    Args:
        device: any device.

    Returns:
        Bytes reserved and not allocated, an upper bound of what ``empty_cache`` gives back; 0 for a CPU.
    """
    if device.type != "cuda":
        return 0
    stats = torch.cuda.memory_stats(device)
    return int(stats.get("reserved_bytes.all.current", 0) - stats.get("allocated_bytes.all.current", 0))


def release_cache(device: torch.device) -> None:
    """Give the caching allocator's unused memory back to the driver; waits for the device.

    Args:
        device: a CUDA device (the allocator empties the caches of all).
    """
    torch.cuda.empty_cache()


def add_note(error: Exception, note: str) -> None:
    """Attach a note to an exception; Python 3.10 doesn't show notes, so it is logged there.

    Args:
        error: the exception, which stays what it is.
        note: the text.
    """
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:
        vars(error)["__notes__"] = [*getattr(error, "__notes__", ()), note]
        logger.error(note)


@dataclass
class Check:
    """What one check did.

    Args:
        probed: whether the free memory was read (or its reading tried).
        reclaimed: whether a reclaim ran to its end.
        given_back: bytes by which the free memory grew in the reclaim.
        seconds: how long it all took.
    """

    probed: bool = False
    reclaimed: bool = False
    given_back: int = 0
    seconds: float = 0.0


class MemoryMonitor:
    """Checks the memory for one group: when the next check is due, and when a reclaim may be tried.

    A reclaim that leaves less free than wanted is followed by a pause, 1 s at first, doubled each time up to
    64 s. So is one that did help but has to be repeated at the very next check of a timed collective: a
    healthy job refills its cache, and emptying it every second would be the slowness that this guard exists
    to avoid. A check that finds enough memory ends both.

    Args:
        policy: the policy.
    """

    def __init__(self, policy: CommMemoryPolicy) -> None:
        self.policy = policy
        self.next_due = 0.0
        self.last_free: int | None = None
        self._streak = 0
        self._helped = True
        self._paused_until = 0.0
        self._logged: set[str] = set()

    def restart(self) -> None:
        """Forget the schedule: new communicators have to allocate again."""
        self.next_due = self._paused_until = 0.0
        self._streak = 0

    def check(self, device: torch.device, *, first: bool, timed: bool, blocked: Callable[[], bool]) -> Check:
        """Read the free memory and reclaim if there is too little.

        Args:
            device: the device that the collective works on.
            first: whether it is the collective's first call on the group; no pause holds then.
            timed: whether the check came by the interval.
            blocked: says whether a reclaim could wait for something that a peer has yet to start.

        Returns:
            What was done.
        """
        start = time.perf_counter()
        result = Check()
        free = self._probe(device)
        result.probed = True
        self.next_due = time.monotonic() + self.policy.interval
        if free is not None and free < self.policy.min_free_bytes:
            if is_capturing(device) or blocked():  # in this order: during capture no event may be queried
                self.next_due = time.monotonic() + min(self.policy.interval, RETRY_SECONDS)
            elif self._may_reclaim(first, timed):
                result.reclaimed = self._reclaim(device)
                after = self._probe(device) if result.reclaimed else None
                result.given_back = max(0, (after or 0) - free)
                self._back_off(after is not None and after >= self.policy.min_free_bytes)
        elif free is not None:
            self._streak, self._helped, self._paused_until = 0, True, 0.0
        result.seconds = time.perf_counter() - start
        return result

    def note(self, device: torch.device) -> str:
        """Describe the memory for the note on a failed collective; never raises.

        Args:
            device: the device that the collective worked on.

        Returns:
            One sentence with figures in GiB.
        """
        figures = [f"at least {_gib(self.policy.min_free_bytes)} wanted"]
        if self.last_free is not None:
            figures.append(f"{_gib(self.last_free)} free at the last check")
        try:
            if device.type == "cuda" and not is_capturing(device):
                free, total = torch.cuda.mem_get_info(device)
                figures.append(f"driver has {_gib(free)} of {_gib(total)} free")
                figures.append(f"PyTorch holds {_gib(torch.cuda.memory_reserved(device))}")
                figures.append(f"of which {_gib(torch.cuda.memory_allocated(device))} are allocated")
            elif self.last_free is None:
                figures.append("no figure was read")
        except Exception as error:  # after a device fault even the driver's figures may be out of reach
            figures.append(f"the device can't be asked ({error})")
        return f"memory of {device}: " + ", ".join(figures)

    def _probe(self, device: torch.device) -> int | None:
        probe = self.policy.probe or driver_free_bytes
        try:
            self.last_free = int(probe(device))
        except Exception:
            self._log_once("probe", "the memory probe raised; collectives go on without its figure")
            return None
        return self.last_free

    def _reclaim(self, device: torch.device) -> bool:
        try:
            if self.policy.reclaim is not None:
                self.policy.reclaim(device)
            elif releasable_bytes(device) > 0:
                release_cache(device)
            else:
                return False
        except Exception:
            self._log_once("reclaim", "the memory reclaim raised; collectives go on without it")
            return False
        return True

    def _log_once(self, what: str, message: str) -> None:
        if what not in self._logged:
            self._logged.add(what)
            logger.exception("%s (logged once)", message)

    def _may_reclaim(self, first: bool, timed: bool) -> bool:
        if first or (self._helped and not timed):
            return True
        return time.monotonic() >= self._paused_until

    def _back_off(self, helped: bool) -> None:
        # A pause in proportion to the interval for a reclaim that helped: interval=0 asks for every call.
        self._streak, self._helped = self._streak + 1, helped
        unit = self.policy.interval if helped else max(self.policy.interval, BACKOFF_FIRST_SECONDS)
        pause = min(unit * 2.0 ** min(self._streak - 1, 32), max(BACKOFF_MAX_SECONDS, self.policy.interval))
        self._paused_until = time.monotonic() + pause


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
