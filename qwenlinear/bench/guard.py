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
import sys
import time
import traceback
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from qwenlinear import terminal, usage

from . import ranks
from .guard_report import markdown, plot

COLLECTIVES = (
    "all_reduce",
    "all_reduce_coalesced",
    "broadcast",
    "reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_into_tensor_coalesced",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced",
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
    parser.add_argument(
        "--mib",
        type=usage.fraction,
        nargs="+",
        default=[1.0],
        help="data of each rank in MiB, such as 1/1024 1 64 (default 1)",
    )
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
    terminal.show_markdown(markdown(bench.results))
    for name, text in bench.results["errors"].items():
        print(f"\n{name} failed:\n{text}", file=sys.stderr)
    return 1 if bench.results["errors"] else 0


class _Bench:
    """The results so far, and the steps that fill them."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.deadline: float = time.monotonic() + args.limit
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

    @property
    def left(self) -> float:
        return self.deadline - time.monotonic()

    def steps(self) -> list[tuple[str, Any]]:
        if self.args.backend == "gloo":
            return [("latency", lambda: self.measure(["latency"], expandable=False, share=1.0))]
        # Each has a share of what is left, so that none uses up the time of the others.
        return [
            ("out of memory", self.out_of_memory),
            ("fixed segments", lambda: self.measure(["latency", "driver"], expandable=False, share=0.55)),
            ("expandable segments", lambda: self.measure(["latency"], expandable=True, share=1.0)),
        ]

    def measure(self, parts: list[str], *, expandable: bool, share: float) -> None:
        settings = {"PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{expandable}"}
        answers = self.launch(self.size, parts, settings if self.args.backend == "nccl" else {}, share * self.left)
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
        """The first collective bare and guarded on every rank, in fresh processes; stop when it fails bare."""
        for environment in OOM_ENVIRONMENTS:
            failed = False
            for guarded in (False, True):
                rows, errors = self.exhausted(environment, guarded)
                self.results["oom"] += rows
                self.results["errors"].update(errors)
                failed |= not guarded and any(not row["outcome"].startswith("works") for row in rows)
            self.write()
            if failed:
                return

    def exhausted(self, environment: dict[str, str], guarded: bool) -> tuple[list[dict[str, Any]], dict[str, str]]:
        """A row per rank, and what kept one from telling.

        Bare, the first rank to fail ends, and the others may wait for it until they are killed: that is the outcome and no error.
        """
        limit = min(40.0, 0.2 * self.args.limit)
        answers = self.launch(self.size, ["oom"], environment, limit, guarded=guarded, environment=environment)
        told = [answer["results"].get("oom") for answer in answers]
        expected = not guarded and any(row is not None and not row["outcome"].startswith("works") for row in told)
        rows, errors = [], {}
        for rank, (answer, row) in enumerate(zip(answers, told, strict=True)):
            waited = "no result: " + answer["errors"].get("limit", "it ended without one")
            rows.append({"rank": rank, **(row or {"guarded": guarded, "environment": environment, "outcome": waited})})
            if not expected:
                for part, text in answer["errors"].items():
                    errors[f"{part}, guarded={guarded}, {environment}, rank {rank}"] = text
        return rows, errors

    def launch(
        self, size: int, parts: list[str], settings: dict[str, str], limit: float, **more: Any
    ) -> list[dict[str, Any]]:
        """Run the worker on every rank and collect what each wrote."""
        limit = min(limit, self.left)
        if limit < 5.0:
            raise TimeoutError(f"not started: --limit {self.args.limit:g} s is used up")
        config = {
            "backend": self.args.backend,
            "parts": parts,
            "bytes": [int(mib * 2**20) for mib in self.args.mib],
            "live": self.args.live,
            "rounds": self.args.rounds,
            "repeats": self.args.repeats,
            "only": self.args.only,
            "seconds": 0.8 * limit,  # then the rest is named as not measured, well before the kill
            **more,
        }
        return ranks.launch(f"{__package__}.guard_worker", size, config, settings, limit)

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
    words = ["--backend", args.backend, "--mib", *map(_mib, args.mib), "--live", *map(str, args.live)]
    words += ["--rounds", str(args.rounds), "--repeats", str(args.repeats), "--out", str(args.out)]
    if args.world_size:
        words += ["--world-size", str(args.world_size)]
    return words + (["--only", *args.only] if args.only else [])


def _mib(number: float) -> str:
    text = f"{number:g}"
    return text if float(text) == number else str(Fraction(number).limit_denominator(2**20))
