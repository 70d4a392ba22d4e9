"""``qwenlinear bench kernels``: every kernel of this machine and what people run without them, on the same tensors.

Contenders first meet the float64 recurrence; one that is wrong is not timed. Then they take turns within rounds. A contender that
fails leaves its traceback in the results, the others go on. The results are written after every part, so a run that is cut off
keeps what it had.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from qwenlinear import usage
from qwenlinear.bench import kernels_report, overhead
from qwenlinear.bench.cases import Case, Inputs, sample
from qwenlinear.bench.contenders import NAMES, Contender, contender
from qwenlinear.bench.gate import check
from qwenlinear.bench.session import Session
from qwenlinear.bench.timing import Call, Timing, captured, interleave
from qwenlinear.bench.worker import call, spawn

_DTYPES = ("float64", "float32", "bfloat16", "float16")
PARTS = ("times", "graphs", "memory", "overhead", "first-calls")
_CPU: dict[str, Any] = {
    "dtype": "float32",
    "heads": [(4, 8)],
    "tokens": [256, 1024, 2048, 4096, 16384],
    "packed": [(64, 32), (8, 256), (3000, 1)],
    "contenders": ["transformers", "fla-naive", "torch", "fla", "flashqla"],
    "parts": ["times", "memory", "overhead"],
}
_GPU: dict[str, Any] = {
    "dtype": "bfloat16",
    "heads": [(16, 32)],
    "tokens": [64, 256, 1024, 4096, 16384, 32768, 65536],
    "packed": [(8, 4096), (32, 1024), (256, 128)],
    "contenders": ["torch", "fla", "flashqla"],
    "parts": list(PARTS),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options to a parser."""
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=usage.device, default=default, help="default here: %(default)s")
    parser.add_argument(
        "--dtype", type=usage.dtype(*_DTYPES), help="of q, k and v; default: float32 on a CPU, bfloat16 on a GPU"
    )
    parser.add_argument("--heads", type=usage.heads, nargs="+", metavar="H/HV", help="default: 4/8 (CPU), 16/32 (GPU)")
    parser.add_argument(
        "--sizes", type=usage.whole(1), nargs=2, default=(128, 128), metavar=("K", "V"), help="head sizes"
    )
    parser.add_argument("--tokens", type=usage.whole(1), nargs="*", help="lengths of one sequence")
    parser.add_argument(
        "--packed", type=usage.numbers("NxL", "x"), nargs="*", metavar="NxL", help="documents x tokens of each"
    )
    known = f"of {', '.join(NAMES)} or package.module:Class"
    parser.add_argument("--contenders", type=usage.kernel(*NAMES), nargs="+", metavar="NAME", help=known)
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="what to measure")
    parser.add_argument(
        "--rounds", type=usage.whole(1), default=9, help="rounds of turns (default 9; at least 3 are kept)"
    )
    parser.add_argument(
        "--case-seconds", type=usage.positive, default=12.0, help="time for the rounds of one row (default 12)"
    )
    parser.add_argument("--limit", type=usage.positive, default=1e9, help="seconds after which no further row is begun")
    parser.add_argument("--graph-tokens", type=usage.whole(0), default=4096, help="longest TorchKernel call to capture")
    parser.add_argument("--out", type=Path, default=Path("bench-kernels"), help="folder for JSON, Markdown and plots")
    parser.add_argument(
        "--render", type=usage.file, metavar="JSON", help="measure nothing: lay out these results again"
    )


def run(args: argparse.Namespace) -> int:
    """Measure, print the tables and write them.

    Args:
        args: the parsed options.

    Returns:
        0 when every contender that ran was right, 1 otherwise.

    Raises:
        UsageError: a file to lay out that holds no results.
    """
    results = Bench(args).run() if args.render is None else usage.results(args.render, "gate", "first_calls")
    kernels_report.show(results)
    kernels_report.write(results, args.out)
    return 0 if all(_right(row) for row in results["gate"]) else 1


def _right(row: dict[str, Any]) -> bool:
    """Whether every figure of a gate row is within its limit (a reason not to run is no figure)."""
    passed: list[str] = row["passed"]
    return all(kind in passed for kind in ("dense", "packed") if not _is_refusal(row[kind]))


def _is_refusal(entry: object) -> bool:
    return isinstance(entry, str) and "Traceback" not in entry


class Bench:
    """One run.

    Args:
        args: the parsed options.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = torch.device(args.device)
        defaults = _GPU if self.device.type == "cuda" else _CPU
        for name, value in defaults.items():
            if getattr(args, name) is None:
                setattr(args, name, value)
        self.dtype: torch.dtype = getattr(torch, args.dtype)
        self.contenders = {name: contender(name) for name in args.contenders}
        self.session = Session(
            self.device,
            args.out / "kernels.json",
            args.limit,
            dtype=args.dtype,
            contenders={one.name: one.note for one in self.contenders.values()},
            gate=[],
            times=[],
            memory=[],
            overhead=[],
            first_calls=[],
        )
        self.results = self.session.results

    def run(self) -> dict[str, Any]:
        """Run the parts that were asked for, one after another, whatever happens to each."""
        parts: dict[str, Callable[[], None]] = {
            "overhead": self.overhead,
            "times": lambda: self.times(graphs=False),
            "memory": self.memory,
            "graphs": lambda: self.times(graphs=True),
            "first-calls": self.first_calls,
        }
        self.session.part("gate", self.gate)
        for name, part in parts.items():
            if name in self.args.parts:
                self.session.part(name, part)
        return self.results

    def cases(self) -> list[Case]:
        """Every shape, the first heads first, short ones first."""
        shapes: list[tuple[int, int]] = [(1, T) for T in self.args.tokens] + list(self.args.packed)
        K, V = self.args.sizes
        return [Case(N, T, H, HV, K, V) for H, HV in self.args.heads for N, T in shapes]

    # ---- parts -----------------------------------------------------------------------------------------------------

    def gate(self) -> None:
        """Who is right, and so may be timed."""
        for heads in self.args.heads:
            for one in self.contenders.values():
                row = check(one, heads, tuple(self.args.sizes), self.device, self.dtype)
                self.results["gate"].append(row)
                print(
                    f"# gate {one.name} {row['heads']}: {row['dense']!s:.100} | {row['packed']!s:.100}", file=sys.stderr
                )

    def times(self, graphs: bool) -> None:
        """Forward, and forward with backward, of every case."""
        if graphs and self.device.type != "cuda":
            return
        for case in self.cases():
            for train in (False, True):
                if self.session.late(f"{case}, graphs={graphs}"):
                    return
                self._time(case, train, graphs)
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def _time(self, case: Case, train: bool, graphs: bool) -> None:
        plain = sample(case, self.device, self.dtype)
        inputs = plain.leaves() if train else plain
        calls: dict[str, Call] = {}
        timings: dict[str, Timing] = {}
        reasons: dict[str, str] = {}
        for name, one in self.contenders.items():
            reason = self._why_not(name, one, case, inputs, graphs)
            if reason is not None:
                reasons[one.name] = reason
                continue
            own = self._call(one, inputs, train)
            if graphs:
                try:
                    own = captured(own)
                except Exception as error:
                    timings[one.name] = Timing(error=f"not captured: {type(error).__name__}: {error}"[:500])
                    continue
            calls[one.name] = own
        timings.update(interleave(calls, self.device, self.args.rounds, self.args.case_seconds))
        mode = "forward+backward" if train else "forward"
        base = next((timing for timing in timings.values() if timing.seconds), None)
        for name in (*timings, *reasons):
            row: dict[str, Any] = {**case.as_row(), "contender": name, "mode": mode, "graph": graphs}
            timing = timings.get(name, Timing(error=reasons.get(name)))
            if timing.error is not None:
                row["error"] = timing.error
            elif base is not None:
                row |= {
                    "ms": timing.median * 1e3,
                    "fastest_ms": min(timing.seconds) * 1e3,
                    "rounds": len(timing.seconds),
                    "speedup": timing.ratio(base),
                }
            self.results["times"].append(row)
            shown = f"{row['ms']:.3f} ms" if "ms" in row else f"{row.get('error')!s:.90}"
            print(f"# {case} {mode}{' graph' if graphs else ''} {name}: {shown}", file=sys.stderr, flush=True)

    def _why_not(self, name: str, one: Contender, case: Case, inputs: Inputs, graphs: bool) -> str | None:
        reason = one.why_not(inputs)
        if reason is not None:
            return reason
        kind = "dense" if inputs.packed is None else "packed"
        rows = [row for row in self.results["gate"] if row["contender"] == one.name and row["heads"] == case.heads]
        if not any(kind in row["passed"] for row in rows):
            return f"wrong against float64: {rows[0][kind] if rows else 'not checked'}"
        if graphs and name == "torch" and case.tokens > self.args.graph_tokens:
            return f"not captured beyond {self.args.graph_tokens} tokens: a launch for every chunk"
        return None

    def _call(self, one: Contender, inputs: Inputs, train: bool) -> Call:
        if not train:
            return lambda: call(one, inputs, train=False)
        with torch.no_grad():
            o = one.run(inputs)
        weights = torch.ones_like(o)
        return lambda: torch.autograd.grad(one.run(inputs), inputs.tensors, weights)

    def memory(self) -> None:
        """Peak memory of a call over what its inputs take: of one process each on a CPU, PyTorch's own count on a GPU."""
        for case in self.cases():
            for name, one in self.contenders.items():
                for train in (False, True):
                    plain = sample(case, self.device, self.dtype)
                    inputs = plain.leaves() if train else plain
                    if self._why_not(name, one, case, inputs, graphs=False) is not None:
                        continue
                    if self.session.late(f"the memory of {case}"):
                        continue
                    if self.device.type == "cuda":
                        answer = self._gpu_memory(one, inputs, train)
                    else:
                        answer = spawn(self._task("memory", name, case, train=train), timeout=120)
                    mode = "forward+backward" if train else "forward"
                    self.results["memory"].append({**case.as_row(), "contender": one.name, "mode": mode, **answer})

    def _gpu_memory(self, one: Contender, inputs: Inputs, train: bool) -> dict[str, Any]:
        try:
            call(one, inputs, train)
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_allocated(self.device)
            call(one, inputs, train)
            return {"peak_mib": (torch.cuda.max_memory_allocated(self.device) - before) / 2**20}
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"[:500]}

    def overhead(self) -> None:
        """qwenlinear's own Python."""
        self.results["overhead"] = overhead.measure(self.device, self.dtype, self.args.heads[0])

    def first_calls(self) -> None:
        """A process's first calls, with empty compile caches and then with those the first process filled."""
        T = 4096 if self.device.type == "cuda" else 1024
        case = Case(1, T, *self.args.heads[0], *self.args.sizes)
        for name, one in self.contenders.items():
            if one.why_not(sample(case, self.device, self.dtype)) is not None:
                continue
            with tempfile.TemporaryDirectory() as folder:
                caches = {
                    variable: f"{folder}/{variable.lower()}"
                    for variable in (
                        "TRITON_CACHE_DIR",
                        "TILELANG_CACHE_DIR",
                        "TORCHINDUCTOR_CACHE_DIR",
                        "CUDA_CACHE_PATH",
                    )
                }
                for state in ("cold", "warm"):
                    if self.session.late(f"first calls of {one.name}"):
                        return
                    answer = spawn(
                        self._task("first-call", name, case), timeout=min(240.0, self.session.left), environment=caches
                    )
                    row = {**case.as_row(), "contender": one.name, "caches": state, **answer}
                    self.results["first_calls"].append(row)
                    print(f"# first call {one.name} {state}: {answer!s:.200}", file=sys.stderr, flush=True)

    def _task(self, task: str, name: str, case: Case, **more: Any) -> dict[str, Any]:
        shape = {field: getattr(case, field) for field in ("documents", "length", "H", "HV", "K", "V")}
        return {
            "task": task,
            "contender": name,
            "case": shape,
            "device": str(self.device),
            "dtype": self.args.dtype,
            "threads": torch.get_num_threads(),
            **more,
        }
