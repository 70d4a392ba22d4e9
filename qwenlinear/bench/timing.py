"""Fair timing: contenders take turns within a round, so that what disturbs the machine disturbs all; medians are reported."""

from __future__ import annotations

import statistics
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

Call = Callable[[], object]


@dataclass
class Timing:
    """What was measured of one contender.

    Args:
        seconds: of a call, one number a round.
        error: the traceback that ended it, or None.
    """

    seconds: list[float] = field(default_factory=list)
    error: str | None = None

    @property
    def median(self) -> float:
        """Median seconds of a call."""
        return statistics.median(self.seconds)

    def ratio(self, other: Timing) -> float:
        """How many times longer the other takes: the median over rounds of the two times of one round."""
        pairs = zip(other.seconds, self.seconds, strict=False)
        return statistics.median(theirs / own for theirs, own in pairs)

    def minus(self, other: Timing) -> Timing:
        """How much longer than the other: the differences of the two times of one round, below zero where it was shorter."""
        return Timing([own - theirs for own, theirs in zip(self.seconds, other.seconds, strict=False)])


def interleave(
    calls: Mapping[str, Call],
    device: torch.device,
    rounds: int,
    seconds: float = 20.0,
    least: float = 2e-3,
) -> dict[str, Timing]:
    """Time calls in rounds; each round starts with another one. A call that raises is left out from there on.

    Args:
        calls: name -> call, each the same work.
        device: where they run; on a GPU time is read from CUDA events.
        rounds: rounds wanted; fewer (at least 3) where they would take longer than ``seconds``. A contender whose single call
            takes more than a sixth of that has one round.
        seconds: time for all rounds together.
        least: seconds that one measurement should last; shorter calls are repeated within it (at most 50 times).

    Returns:
        name -> timing.

    Example:
        >>> timing = interleave({"sum": lambda: torch.ones(9).sum()}, torch.device("cpu"), rounds=3)["sum"]
        >>> len(timing.seconds)
        3
    """
    timings = {name: Timing() for name in calls}
    repeats: dict[str, int] = {}
    estimate: dict[str, float] = {}
    for name, call in calls.items():
        with _keep_error(timings[name]):
            first = once(call, device)  # compiles, tunes, allocates
            if first > seconds / 6 and device.type == "cuda":
                first = once(call, device)  # the compiler's time says nothing about the call's
            estimate[name] = first if first > seconds / 6 else min(once(call, device) for _ in range(2))
            repeats[name] = max(1, min(50, int(least / max(estimate[name], 1e-9))))
    slow = {name for name, time_ in estimate.items() if time_ > seconds / 6}
    whole = sum(estimate[name] * count for name, count in repeats.items() if name not in slow)
    rounds = max(3, min(rounds, int(seconds / max(whole, 1e-9))))
    names = list(repeats)
    for turn in range(rounds):
        start = turn % max(1, len(names))
        for name in names[start:] + names[:start]:
            if timings[name].error is None and not (turn and name in slow):
                with _keep_error(timings[name]):
                    timings[name].seconds.append(once(calls[name], device, repeats[name]))
    return timings


def once(call: Call, device: torch.device, repeats: int = 1) -> float:
    """Seconds of one call.

    Args:
        call: what to time.
        device: where it runs.
        repeats: calls within the measurement.

    Returns:
        Mean seconds of a call, the host's where it is the slower one.
    """
    if device.type != "cuda":
        begin = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - begin) / repeats
    torch.cuda.synchronize(device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    milliseconds: float = start.elapsed_time(end)
    return milliseconds / 1e3 / repeats


def captured(call: Call) -> Call:
    """The call as a CUDA graph.

    Args:
        call: what to capture; must not synchronise.

    Returns:
        What replays it.

    Raises:
        RuntimeError: what CUDA says when the call cannot be captured.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):  # where a backward pass runs whose forward pass ran in the first call
        call()

    def replay() -> None:
        graph.replay()

    replay.__dict__["captured"] = (
        call  # a graph does not own what it reads and writes: with the call, its tensors would go
    )
    return replay


class _keep_error:
    """Write an exception into a timing and go on."""

    def __init__(self, timing: Timing) -> None:
        self.timing = timing

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception):
            return False
        self.timing.error = "".join(traceback.format_exception(error)[-6:])
        return True
