"""``qwenlinear bench guard``: what the memory guard costs, and what collectives take from the driver.

Every row has bare, guarded, guarded with a check on each call, and a probe of everything before each call,
interleaved in one process. With NCCL it also shows the driver's memory around first and later calls, and a
communicator that meets a device whose memory is in PyTorch's cache. Every process has a time limit and is
killed past it; a part that fails leaves its traceback in the results and the others go on.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from qwenlinear import usage

from .guard_report import markdown, plot

COLLECTIVES = (
    "all_reduce",
    "all_reduce_coalesced",
    "broadcast",
    "reduce",
    "all_gather",
    "all_gather_into_tensor",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "send",
)
# Enough for a bare communicator of one rank to need more than a full device has left; the first is NCCL as it
# is.
OOM_ENVIRONMENTS: tuple[dict[str, str], ...] = (
    {},
    {"NCCL_BUFFSIZE": str(256 * 2**20), "NCCL_MIN_NCHANNELS": "32", "NCCL_MAX_NCHANNELS": "32"},
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options to a parser."""
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="nccl" if torch.cuda.is_available() else "gloo")
    parser.add_argument(
        "--world-size", type=usage.whole(1), default=None, help="ranks; default: 2 for gloo, every GPU for nccl"
    )
    parser.add_argument("--mib", type=usage.positive, default=1.0, help="data of each rank in MiB (default 1)")
    live = "live tensors (default 0 500 4000)"
    parser.add_argument("--live", type=usage.whole(0), nargs="+", default=[0, 500, 4000], help=live)
    parser.add_argument("--rounds", type=usage.whole(1), default=16, help="rounds of interleaved batches (default 16)")
    parser.add_argument("--repeats", type=usage.whole(1), default=40, help="calls in a batch (default 40)")
    parser.add_argument("--only", choices=COLLECTIVES, nargs="+", default=[], help="to time; default: all")
    parser.add_argument(
        "--limit", type=usage.positive, default=110.0, help="seconds that all of it may take (default 110)"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for guard-BACKEND.json, .md and .png")


def run(args: argparse.Namespace) -> int:
    """Measure, print the tables and write them.

    Args:
        args: the parsed options.

    Returns:
        0, or 1 if a part failed (its traceback is in the results).

    Raises:
        UsageError: NCCL with fewer GPUs than ranks.
    """
    gpus = torch.cuda.device_count()
    if args.backend == "nccl" and gpus < (args.world_size or 1):
        raise usage.UsageError(f"--backend nccl needs a GPU for each of {args.world_size or 1} ranks, got {gpus} GPUs")
    bench = _Bench(args)
    for name, step in bench.steps():
        try:
            step()
        except Exception:
            bench.results["errors"][name] = traceback.format_exc()
        bench.write()
    print(markdown(bench.results))
    for name, text in bench.results["errors"].items():
        print(f"\n{name} failed:\n{text}", file=sys.stderr)
    return 1 if bench.results["errors"] else 0


class _Bench:
    """The results so far, and the steps that fill them."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.deadline = time.monotonic() + args.limit
        self.size = args.world_size or (2 if args.backend == "gloo" else max(1, torch.cuda.device_count()))
        self.results: dict[str, Any] = {
            "command": "qwenlinear bench guard " + " ".join(_spell(args)),
            "backend": args.backend,
            "world_size": self.size,
            "machine": f"{os.cpu_count()}-core CPU machine",
            "torch": torch.__version__,
            "latency": [],
            "driver": [],
            "oom": [],
            "errors": {},
        }

    def steps(self) -> list[tuple[str, Any]]:
        if self.args.backend == "gloo":
            return [("latency", lambda: self.measure(["latency"], expandable=False))]
        return [
            ("out of memory", self.out_of_memory),
            ("fixed segments", lambda: self.measure(["latency", "driver"], expandable=False)),
            ("expandable segments", lambda: self.measure(["latency"], expandable=True)),
        ]

    def measure(self, parts: list[str], *, expandable: bool) -> None:
        settings = {"PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{expandable}"}
        nccl = self.args.backend == "nccl"
        # One of several steps must not use up the time of the others.
        answers = self.launch(self.size, parts, settings if nccl else {}, 50.0 if nccl else self.args.limit)
        first = answers[0]
        self.results["torch"] = first.get("torch", self.results["torch"])
        self.results["machine"] = first.get("device", self.results["machine"])
        for part in parts:
            for row in first["results"].get(part, []):
                self.results[part].append({**row, "expandable": expandable})
        for rank, answer in enumerate(answers):
            for part, text in answer["errors"].items():
                self.results["errors"][f"{part}, expandable={expandable}, rank {rank}"] = text

    def out_of_memory(self) -> None:
        """The first collective bare and guarded, each in a fresh process; stop when it fails bare."""
        for environment in OOM_ENVIRONMENTS:
            outcomes = []
            for guarded in (False, True):
                (answer,) = self.launch(1, ["oom"], environment, guarded=guarded, environment=environment, limit=40.0)
                outcomes.append(answer["results"].get("oom", {"guarded": guarded, "outcome": "no result"}))
                for part, text in answer["errors"].items():
                    self.results["errors"][f"{part}, guarded={guarded}, {environment}"] = text
            self.results["oom"] += outcomes
            self.write()
            if not outcomes[0]["outcome"].startswith("works"):
                return

    def launch(
        self, size: int, parts: list[str], settings: dict[str, str], limit: float, **more: Any
    ) -> list[dict[str, Any]]:
        """Run the worker on every rank and collect what each wrote."""
        limit = min(limit, self.deadline - time.monotonic())
        if limit < 5.0:
            raise TimeoutError(f"not started: --limit {self.args.limit:g} s is used up")
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH", "")) if p)
        processes = []
        with tempfile.TemporaryDirectory() as folder:
            for rank in range(size):
                config = {
                    "rank": rank,
                    "world_size": size,
                    "backend": self.args.backend,
                    "parts": parts,
                    "store": f"{folder}/store",
                    "out": f"{folder}/{rank}.json",
                    "bytes": int(self.args.mib * 2**20),
                    "live": self.args.live,
                    "rounds": self.args.rounds,
                    "repeats": self.args.repeats,
                    "only": self.args.only,
                    **more,
                }
                Path(f"{folder}/{rank}.config.json").write_text(json.dumps(config))
                processes.append(
                    subprocess.Popen(
                        [
                            sys.executable,
                            "-W",
                            "ignore",
                            "-m",
                            __package__ + ".guard_worker",
                            f"{folder}/{rank}.config.json",
                        ],
                        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **settings},
                    )
                )
            try:
                end = time.monotonic() + limit
                for process in processes:
                    process.wait(max(0.1, end - time.monotonic()))
                late = ""
            except subprocess.TimeoutExpired:
                late = f"killed after {limit:.0f} s"
            finally:
                for process in processes:
                    process.kill()
                    process.wait()
            answers = []
            for rank in range(size):
                out = Path(f"{folder}/{rank}.json")
                answer = (
                    json.loads(out.read_text()) if out.exists() else {"results": {}, "errors": {"start": "no output"}}
                )
                if late:
                    answer["errors"]["limit"] = late
                answers.append(answer)
        return answers

    def write(self) -> None:
        """Write everything that is known by now."""
        self.args.out.mkdir(parents=True, exist_ok=True)
        stem = self.args.out / f"guard-{self.args.backend}"
        stem.with_suffix(".json").write_text(json.dumps(self.results, indent=1) + "\n")
        stem.with_suffix(".md").write_text(markdown(self.results) + "\n")
        try:
            plot(self.results, stem.with_suffix(".png"))
        except Exception:
            self.results["errors"]["plot"] = traceback.format_exc()


def _spell(args: argparse.Namespace) -> list[str]:
    words = ["--backend", args.backend, "--mib", f"{args.mib:g}", "--live", *map(str, args.live)]
    words += ["--rounds", str(args.rounds), "--repeats", str(args.repeats), "--out", str(args.out)]
    if args.world_size:
        words += ["--world-size", str(args.world_size)]
    return words + (["--only", *args.only] if args.only else [])
