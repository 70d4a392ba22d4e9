"""One measurement in a process of its own: peak memory on a CPU, first calls with caches that a parent chose.

    python -m qwenlinear.bench.worker '{"task": "memory", "contender": "torch", "case": {...}, ...}'

prints one line of JSON, last.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from qwenlinear.bench.cases import Case, Inputs, sample
from qwenlinear.bench.contenders import Contender, contender


def call(who: Contender, inputs: Inputs, train: bool) -> None:
    """One forward pass, or one forward and backward pass.

    Args:
        who: whose.
        inputs: the tensors; for ``train`` they want gradients.
        train: whether to run backward.
    """
    if not train:
        with torch.no_grad():
            who.run(inputs)
        return
    o = who.run(inputs)
    torch.autograd.grad(o, inputs.tensors, torch.ones_like(o))


def spawn(task: dict[str, Any], timeout: float, environment: dict[str, str] | None = None) -> dict[str, Any]:
    """Run a task in a fresh process.

    Args:
        task: what to do, see :func:`main`.
        timeout: seconds until it is stopped.
        environment: variables to set.

    Returns:
        Its answer, or ``{"error": ...}``.
    """
    command = [sys.executable, "-m", "qwenlinear.bench.worker", json.dumps(task)]
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            env={**os.environ, "PYTHONPATH": path, **(environment or {})},
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {timeout:.0f} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return {"error": (done.stderr or done.stdout)[-2000:]}
    answer: dict[str, Any] = json.loads(lines[-1])
    return answer


def main(text: str) -> dict[str, Any]:
    """Do a task: ``memory`` or ``first-call``.

    Args:
        text: JSON with task, contender, case, dtype, device, threads and, for memory, train.

    Returns:
        ``{"peak_mib"}``, or ``{"seconds": [first forward, first backward with its forward, second one]}``; ``{"error"}`` where
        the contender does not run.
    """
    task = json.loads(text)
    device, dtype = torch.device(task["device"]), getattr(torch, task["dtype"])
    if device.type == "cpu":
        torch.set_num_threads(task["threads"])
    who, case = contender(task["contender"]), Case(**task["case"])
    plain = sample(case, device, dtype)
    inputs = plain.leaves() if task.get("train", True) else plain
    if task["task"] == "first-call":
        return _first_calls(who, plain, inputs)
    reason = who.why_not(inputs)
    return {"error": reason} if reason else {"peak_mib": _peak_mib(who, case, inputs, task["train"])}


def _first_calls(who: Contender, plain: Inputs, inputs: Inputs) -> dict[str, Any]:
    """Seconds of the first forward pass (with the imports it needs), the first with backward, and the next such one."""
    seconds: list[float] = []
    for tensors, train in ((plain, False), (inputs, True), (inputs, True)):
        begin = time.perf_counter()
        reason = who.why_not(tensors)
        if reason:
            return {"seconds": seconds, "error": reason}
        call(who, tensors, train)
        if plain.q.is_cuda:
            torch.cuda.synchronize(plain.q.device)
        seconds.append(time.perf_counter() - begin)
    return {"seconds": seconds}


def _peak_mib(who: Contender, case: Case, inputs: Inputs, train: bool) -> float:
    """MiB that a call's peak lies above the resident memory before it (Linux)."""
    small = sample(Case(1, 64, case.H, case.HV, case.K, case.V), inputs.q.device, inputs.q.dtype)
    call(who, small.leaves() if train else small, train)  # whatever is loaded at a first call
    peak, before, stop = _resident(), _resident(), threading.Event()

    def watch() -> None:
        nonlocal peak
        while not stop.is_set():
            peak = max(peak, _resident())
            time.sleep(5e-4)

    watcher = threading.Thread(target=watch)
    watcher.start()
    call(who, inputs, train)
    stop.set()
    watcher.join()
    return (peak - before) / 2**20


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
