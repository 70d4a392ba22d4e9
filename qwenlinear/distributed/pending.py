"""Which collectives may still wait for a peer: while there are any, nothing may wait for the device."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.distributed import Work


TRIM = 64  # so many entries may be of works that are gone


class PendingWorks:
    """The works of one group on one type of device that may be incomplete.

    A reclaim waits for the device. If it waited for a collective that needs a peer, and that peer needs
    something that this rank starts afterwards, both would hang. What can't do harm are operations that
    precede the next one on its own stream anyway: synchronous ones on the current stream, and asynchronous
    ones that were waited for. So there remain works that somebody still holds and that aren't complete, and
    other streams.

    On a CPU a work is held until it is complete: gloo keeps the tensors as long. On a GPU it is only watched,
    for a held work would keep its output tensors from being reused. The price: a GPU work whose handle was
    dropped without waiting is no longer seen. DDP's reducer does that; its buckets are started in one order
    on all ranks.

    Args:
        device_type: "cpu", "cuda", ...
    """

    def __init__(self, device_type: str) -> None:
        self._cuda = device_type == "cuda"
        self._lock = threading.Lock()  # DDP starts works from autograd's threads
        self._works: deque[Work | weakref.ref[Work]] = deque()
        self._streams: dict[tuple[int, int], None] = {}  # (device index, CUDA's handle)

    def add(self, work: Work, *, hold: bool) -> None:
        """Watch a work that was just started.

        Args:
            work: what the inner group returned.
            hold: whether to keep it alive until it is complete; only done on a CPU. False for what its caller
                waits for at once and for point-to-point operations, which a dropped handle cancels.
        """
        if self._cuda or not hold:
            self._works.append(weakref.ref(work))
            if len(self._works) < TRIM:
                return
        else:
            self._works.append(work)
        with self._lock:  # oldest first, and no queries of a GPU's events on this path
            works = self._works
            while works:
                oldest = works[0]
                if isinstance(oldest, weakref.ref):
                    if oldest() is not None:
                        break
                elif not oldest.is_completed():
                    break
                works.popleft()

    def add_stream(self) -> None:
        """Remember the current stream of the current GPU, on which a synchronous collective was just put."""
        self._streams[_current_stream()] = None

    def any(self) -> bool:
        """Say whether something is incomplete; it asks every work, for the rare moment before a reclaim."""
        with self._lock:
            for _ in range(len(self._works)):  # in place: others append meanwhile
                entry = self._works.popleft()
                if _incomplete(entry):
                    self._works.append(entry)
            if self._works:
                return True
        for stream in list(self._streams):
            if stream != _current_stream():
                index, handle = stream
                device = torch.device("cuda", index)
                if not torch.cuda.ExternalStream(handle, device).query():
                    return True
                self._streams.pop(stream, None)
        return False

    def wait(self) -> None:
        """Wait for every work that is still there, for at most the group's own timeout each.

        Raises:
            RuntimeError: whatever a failed work raises.
        """
        for entry in list(self._works):
            work = entry() if isinstance(entry, weakref.ref) else entry
            if work is not None and not work.is_completed():
                work.wait()
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._works.clear()
        self._streams.clear()


def _current_stream() -> tuple[int, int]:
    # torch.cuda's own functions would take as long as the rest of the guard.
    index = torch._C._cuda_getDevice()
    return index, torch._C._cuda_getCurrentRawStream(index)


def _incomplete(entry: Work | weakref.ref[Work]) -> bool:
    work = entry() if isinstance(entry, weakref.ref) else entry
    if work is None:
        return False
    with contextlib.suppress(Exception):  # a work that can't say so has failed: nothing will ever wait for it
        return not work.is_completed()
    return False
