"""Peak memory of a call over what was there before it."""

from __future__ import annotations

import torch

from qwenlinear.bench.timing import Call


def peak_bytes(call: Call, device: torch.device) -> int:
    """What PyTorch's allocator held at most during a call, beyond what it held before.

    Args:
        call: what to watch; run it once before where a first call allocates more.
        device: where it runs. On a GPU the allocator's own statistics, on a CPU the profiler's record of every allocation.

    Returns:
        Bytes.

    Example:
        >>> peak_bytes(lambda: torch.zeros(1 << 20, dtype=torch.uint8), torch.device("cpu")) >= 1 << 20
        True
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        return int(torch.cuda.max_memory_allocated(device) - before)
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        call()
    assert record.profiler is not None
    held = peak = 0
    for event in record.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak
