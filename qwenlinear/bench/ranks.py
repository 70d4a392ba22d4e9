"""One process a rank for a benchmark: started with a configuration, killed past a limit, answers read back from files.

A rank is a process of its own, because the allocator's settings, NCCL's and an exhausted device can't be undone in one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

Part = Callable[[dict[str, Any], torch.device], Any]


def launch(
    module: str, size: int, config: Mapping[str, Any], settings: Mapping[str, str], limit: float
) -> list[dict[str, Any]]:
    """Run a worker on every rank and collect what each wrote.

    Args:
        module: what ``python -m`` runs; it calls :func:`serve`.
        size: ranks.
        config: the worker's settings, JSON; needs ``backend`` and ``parts``.
        settings: environment variables besides this process's own.
        limit: seconds after which all of them are killed.

    Returns:
        By rank: ``results`` and ``errors`` by part, ``torch`` and ``device``. A rank that wrote nothing has the error
        ``start``, one that was killed the error ``limit``.
    """
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH", "")) if p)
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **settings}
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory() as folder:
        outs = [Path(folder, f"{rank}.json") for rank in range(size)]
        try:
            for rank, out in enumerate(outs):
                own = {**config, "rank": rank, "world_size": size, "store": f"{folder}/store", "out": str(out)}
                written = Path(folder, f"{rank}.config.json")
                written.write_text(json.dumps(own))
                command = [sys.executable, "-W", "ignore", "-m", module, str(written)]
                processes.append(subprocess.Popen(command, env=environment))
            end = time.monotonic() + limit
            late = {rank for rank, process in enumerate(processes) if not _ends(process, end)}
        finally:
            for process in processes:
                process.kill()
                process.wait()
        answers = []
        for rank, out in enumerate(outs):
            answer = {"results": {}, "errors": {"start": "no output"}}
            if out.exists():
                answer = json.loads(out.read_text())
            if rank in late:
                answer["errors"]["limit"] = f"killed after {limit:.0f} s"
            answers.append(answer)
    return answers


def serve(path: str, parts: Mapping[str, Part], timeout: float = 30.0) -> None:
    """Be one rank: run the parts that a configuration names and write what they found, also when one of them fails.

    Ends the process without tearing down: a device without memory, or a dead peer, may not be able to.

    Args:
        path: the configuration that :func:`launch` wrote.
        parts: name -> function of configuration and device; what it returns is JSON.
        timeout: seconds that a collective may take.
    """
    config = json.loads(Path(path).read_text())
    rank, size, out = config["rank"], config["world_size"], Path(config["out"])
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if config["backend"] == "nccl" else torch.device("cpu")
    answer: dict[str, Any] = {"results": {}, "errors": {}, "torch": torch.__version__}
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
            answer["device"] = torch.cuda.get_device_name(device)
        store = torch._C._distributed_c10d.FileStore(config["store"], size)
        limit = timedelta(seconds=timeout)
        dist.init_process_group(config["backend"], store=store, rank=rank, world_size=size, timeout=limit)
        for part in config["parts"]:
            try:
                answer["results"][part] = parts[part](config, device)
            except Exception:
                answer["errors"][part] = traceback.format_exc()
            _replace(out, answer)
    except Exception:
        answer["errors"]["setup"] = traceback.format_exc()
    _replace(out, answer)
    sys.stdout.flush()
    os._exit(0)


def agree(ok: bool, device: torch.device) -> bool:
    """Whether something holds on every rank of the default group, which all have to ask."""
    flag = torch.tensor([0.0 if ok else 1.0], device=device)
    dist.all_reduce(flag)
    return flag.item() == 0.0


def finish(device: torch.device) -> None:
    """Wait for a GPU's work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _ends(process: subprocess.Popen[bytes], end: float) -> bool:
    try:
        process.wait(max(0.1, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        return False
    return True


def _replace(path: Path, answer: dict[str, Any]) -> None:
    """Write a file so that a kill leaves the old one or the new one."""
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(answer))
    fresh.replace(path)
