"""``qwenlinear bench layer``: one Gated DeltaNet layer, as everybody runs it, in one process and against its floor.

Every contender has the same weights and first meets a float64 layer, output and every gradient; one that is wrong is not timed.
Then they take turns within rounds, and so do the parts of the floor (see :mod:`qwenlinear.bench.floor`): matrix products, kernel
alone, and a copy of as many bytes as prologue and epilogue must move. Results are written after every part.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qwenlinear import usage
from qwenlinear.bench import layer_gate, layer_report, ops
from qwenlinear.bench.cases import Case
from qwenlinear.bench.floor import FORMULAS, Sizes, copying, given_to_the_kernel, kernel_alone, products
from qwenlinear.bench.layer_contenders import KINDS, LayerContender, Named, Ours, contenders
from qwenlinear.bench.layer_options import add_size_arguments, fill_defaults, setup_of
from qwenlinear.bench.peak import peak_bytes
from qwenlinear.bench.session import Session, say
from qwenlinear.bench.timing import Call, Timing, interleave
from qwenlinear.kernels import TorchKernel
from qwenlinear.kernels.auto import kernel_from_name
from qwenlinear.kernels.packing import PackedSequences

PARTS = ("times", "memory", "gradients", "flat", "ops")
_CPU: dict[str, Any] = {
    "dtype": "float32",
    "hidden": 256,
    "heads": (2, 4),
    "head_dim": 64,
    "tokens": [1024],
    "packed": [(8, 128)],
    "kernels": ["torch"],
    "gradient_tokens": 256,
    "draws": 3,
    "flat_tokens": [1024, 2048, 4096],
}
_GPU: dict[str, Any] = {
    "dtype": "bfloat16",
    "hidden": 2048,
    "heads": (16, 32),
    "head_dim": 128,
    "tokens": [32768],
    "packed": [(8, 4096)],
    "kernels": ["flashqla", "fla"],
    "gradient_tokens": 2048,
    "draws": 16,
    "flat_tokens": [8192, 16384, 32768, 65536, 131072],
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options to a parser."""
    add_size_arguments(parser)
    parser.add_argument(
        "--tokens", type=usage.whole(1), nargs="*", help="lengths of one sequence; default: 1024 (CPU), 32768 (GPU)"
    )
    parser.add_argument(
        "--packed",
        type=usage.numbers("NxL", "x"),
        nargs="*",
        metavar="NxL",
        help="documents x tokens; default: 8x128 (CPU), 8x4096 (GPU)",
    )
    parser.add_argument(
        "--kernels",
        type=usage.kernel(),
        nargs="+",
        metavar="NAME",
        help="auto, torch, fla, flashqla or package.module:Class; default: torch (CPU), flashqla fla (GPU)",
    )
    parser.add_argument(
        "--contenders", nargs="+", choices=KINDS, default=list(KINDS), help="who takes part (default: all)"
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure (default: all)")
    parser.add_argument(
        "--gradient-tokens", type=usage.whole(1), help="T of the part gradients; default: 256 (CPU), 2048 (GPU)"
    )
    draws = (
        "of hidden states for the part gradients; default: 3 (CPU), 16 (GPU)"  # one alone decides by luck who is better
    )
    parser.add_argument("--draws", type=usage.whole(1), help=draws)
    parser.add_argument(
        "--flat-tokens",
        type=usage.whole(1),
        nargs="+",
        help="T of the part flat; default: 1024 to 4096 (CPU), 8192 to 131072 (GPU)",
    )
    parser.add_argument("--out", type=Path, default=Path("bench-layer"), help="folder for JSON, Markdown and plots")


def run(args: argparse.Namespace) -> int:
    """Measure, print the tables and write them.

    Args:
        args: the parsed options.

    Returns:
        0 when every contender that ran was right and no part failed, 1 otherwise.

    Raises:
        UsageError: a file to lay out that holds no results.
    """
    results = Bench(args).run() if args.render is None else usage.results(args.render, "flat", "ops")
    layer_report.show(results)
    layer_report.write(results, args.out)
    wrong = [
        row
        for row in results["gate"]
        if any(row[kind] is not None and _wrong(row, kind) for kind in ("dense", "packed"))
    ]
    return 1 if wrong or results["errors"].keys() - {"limit"} else 0


def _wrong(row: dict[str, Any], kind: str) -> bool:
    """A figure beyond its limit or a traceback; a reason not to run is neither."""
    entry = row[kind]
    return kind not in row["passed"] and (not isinstance(entry, str) or "Traceback" in entry)


class Bench:
    """One run.

    Args:
        args: the parsed options.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        fill_defaults(args, _CPU, _GPU)
        self.args, self.setup = args, setup_of(args)
        self.device, self.sizes = self.setup.device, Sizes(self.setup.config, self.setup.dtype)
        self.contenders = contenders(args.contenders, args.kernels)
        self.layers: dict[str, nn.Module] = {}
        self.missing: dict[str, str] = {}
        H, HV = args.heads
        self.session = Session(
            self.device,
            args.out / "layer.json",
            args.limit,
            dtype=args.dtype,
            size={"hidden": args.hidden, "heads": f"{H}/{HV}", "head_dim": args.head_dim},
            contenders={one.name: one.note for one in self.contenders},
            kernels={one.name: one.kernel for one in self.contenders},
            formulas=FORMULAS,
            explain={},
            gate=[],
            **{part: [] for part in PARTS},
        )
        self.results = self.session.results

    def run(self) -> dict[str, Any]:
        """Run the parts that were asked for, one after another, whatever happens to each."""
        parts: dict[str, Callable[[], None]] = {
            "times": self.times,
            "memory": self.memory,
            "gradients": self.gradients,
            "flat": self.flat,
            "ops": lambda: ops.measure(
                self.session, self.setup, self.cases(), self.args.rounds, self.args.case_seconds
            ),
        }
        self.session.part("gate", self.gate)
        for name, part in parts.items():
            if name in self.args.parts:
                self.session.part(name, part)
        return self.results

    def cases(self) -> list[Case]:
        """Every shape, dense ones first."""
        shapes: list[tuple[int, int]] = [(1, T) for T in self.args.tokens] + list(self.args.packed)
        return [self._case(N, T) for N, T in shapes]

    def _case(self, documents: int, length: int) -> Case:
        H, HV = self.args.heads
        return Case(documents, length, H, HV, self.args.head_dim, self.args.head_dim)

    # ---- parts -----------------------------------------------------------------------------------------------------

    def gate(self) -> None:
        """Build everybody; who is right may be timed."""
        known: dict[str, Named] = {}
        for one in self.contenders:
            try:
                self.layers[one.name] = one.build(self.setup)
            except Exception as error:
                self.missing[one.name] = f"{type(error).__name__}: {error}"
                say(f"gate {one.name}: {self.missing[one.name]:.150}")
                continue
            row = layer_gate.check(one, self.layers[one.name], self.setup, known)
            self.results["gate"].append(row)
            told = [f"{kind} {_allowed(row[kind])}" for kind in ("dense", "packed") if row[kind] is not None]
            say(f"gate {one.name}: {', '.join(told)}")

    def times(self) -> None:
        """Forward, and forward with backward, of every case, and the parts of the floor in the same rounds."""
        for case in self.cases():
            for train in (False, True):
                if self.session.late(f"{case}, {_mode(train)}"):
                    return
                self._time(case, train)

    def _time(self, case: Case, train: bool) -> None:
        calls, reasons = self._calls(case, train, self.contenders)
        names = list(calls)
        calls["floor: products"] = products(self.sizes, case.tokens, self.device, train)
        calls["floor: bytes"] = copying(self.sizes.glue(case.tokens, train), self.device)
        x, packed = self._drawn(case)
        given = given_to_the_kernel(self.setup.layer(TorchKernel()), x, packed)
        for name in self.args.kernels:
            kernel = kernel_from_name(name)
            if not kernel.refusals(*given.tensors, cu_seqlens=packed):  # its rows say why
                calls[f"floor: {name}"] = kernel_alone(kernel, given, train)
        timings = self._interleaved(calls)
        floors = self._floors(timings)
        for one in self.contenders:
            row: dict[str, Any] = {**case.as_row(), "contender": one.name, "mode": _mode(train)}
            timing = timings.get(one.name, Timing(error=reasons.get(one.name)))
            if timing.seconds:
                row |= {
                    "ms": timing.median * 1e3,
                    "fastest_ms": min(timing.seconds) * 1e3,
                    "rounds": len(timing.seconds),
                }
                row["against"] = {peer: timing.ratio(timings[peer]) for peer in names if timings[peer].seconds}
                row |= _above(timing, floors, one.kernel)
            else:
                row["error"] = timing.error
            self.results["times"].append(row)
            shown = f"{row['ms']:.3f} ms" if "ms" in row else f"{row['error']!s:.90}"
            above = f", {row['over_floor']:.3f} of the floor" if "over_floor" in row else ""
            say(f"{case} {_mode(train)} {one.name}: {shown}{above}")
        self._forget()

    def _floors(self, timings: dict[str, Timing]) -> dict[str, dict[str, Timing]]:
        """By kernel: the three parts of the floor and their sum, a number a round."""
        floors = {}
        for name in self.args.kernels:
            if f"floor: {name}" not in timings:
                continue
            parts = {part: timings[f"floor: {part}"] for part in ("products", name, "bytes")}
            if all(timing.seconds for timing in parts.values()):
                total = [sum(round_) for round_ in zip(*(timing.seconds for timing in parts.values()), strict=False)]
                floors[name] = {
                    "products": parts["products"],
                    "kernel": parts[name],
                    "bytes": parts["bytes"],
                    "total": Timing(total),
                }
            else:
                text = next(timing.error for timing in parts.values() if not timing.seconds)
                self.results["errors"].setdefault(f"floor of {name}", text)
        return floors

    def memory(self) -> None:
        """Peak memory of a call over weights and hidden states."""
        for case in self.cases():
            for train in (False, True):
                calls, _ = self._calls(case, train, self.contenders)
                for name, call in calls.items():
                    if self.session.late(f"the memory of {case}, {_mode(train)}"):
                        return
                    row = {**case.as_row(), "contender": name, "mode": _mode(train), **self._peak(call)}
                    self.results["memory"].append(row)
                self._forget()

    def gradients(self) -> None:
        """Relative errors of output and gradients, by parameter, against our layer in float64; root mean square of some draws."""
        T = self.args.gradient_tokens
        lengths = [n for n in (1, T // 4, 3, T // 2, T - T // 4 - T // 2 - 4) if n > 0]
        kinds = {"dense": None, "packed": PackedSequences.from_lengths(lengths, device=self.device)}
        for kind, packed in kinds.items():
            found: dict[tuple[str, str], list[float]] = {}
            for seed in range(self.args.draws):
                if self.session.late(f"gradients, {kind}, draw {seed}"):
                    return
                x = layer_gate.draw(self.setup, T, seed=10 + seed)
                truth = layer_gate.layer_truth(self.setup, x, packed)
                for one in self.contenders:
                    if self._why_not(one, x.requires_grad_(), packed) is None:
                        for of, error in layer_gate.errors(one, self.layers[one.name], x, packed, truth).items():
                            found.setdefault((one.name, of), []).append(error)
            for (name, of), errors in found.items():
                row = {"kind": kind, "tokens": T, "contender": name, "of": of, "each": errors}
                self.results["gradients"].append({**row, "error": layer_gate.root_mean_square(errors)})
            self._forget()

    def flat(self) -> None:
        """Time and memory a token of our layer, over T."""
        gradients = sum(p.numel() * p.element_size() for p in self.setup.weights.values())
        ours = [one for one in self.contenders if isinstance(one, Ours) and not one.called]
        for T in self.args.flat_tokens:
            for train in (False, True):
                if self.session.late(f"flat T={T}, {_mode(train)}"):
                    return
                case = self._case(1, T)
                calls, reasons = self._calls(case, train, ours)
                timings = self._interleaved(calls)
                for one in ours:
                    row: dict[str, Any] = {"tokens": T, "contender": one.name, "mode": _mode(train)}
                    timing = timings.get(one.name, Timing(error=reasons.get(one.name)))
                    if timing.seconds:
                        peak = self._peak(calls[one.name])
                        row |= {"ns_a_token": timing.median / T * 1e9, **peak}
                        if "peak_mib" in peak:  # the weights' gradients are there once, however many tokens
                            row["bytes_a_token"] = (peak["peak_mib"] * 2**20 - (gradients if train else 0)) / T
                    else:
                        row["error"] = timing.error
                    self.results["flat"].append(row)
                    say(
                        f"flat T={T} {_mode(train)} {one.name}: {row.get('ns_a_token', row.get('error'))!s:.90} ns a token"
                    )
                self._forget()

    # ---- calls -----------------------------------------------------------------------------------------------------

    def _calls(self, case: Case, train: bool, who: Sequence[LayerContender]) -> tuple[dict[str, Call], dict[str, str]]:
        """A call each, and why some have none."""
        x, packed = self._drawn(case)
        x.requires_grad_(train)
        calls: dict[str, Call] = {}
        reasons: dict[str, str] = {}
        for one in who:
            reason = self._why_not(one, x, packed)
            if reason is None:
                calls[one.name] = _call(one, self.layers[one.name], x, packed, train)
                text = one.describe(self.layers[one.name], x, packed)
                self.results["explain"].setdefault(f"{one.name}, {'dense' if packed is None else 'packed'}", text)
            else:
                reasons[one.name] = reason
        return calls, reasons

    def _drawn(self, case: Case) -> tuple[Tensor, PackedSequences | None]:
        """Hidden states, and the documents with their boundaries on the device."""
        lengths = None if case.packed is None else case.packed.lengths
        packed = None if lengths is None else PackedSequences.from_lengths(lengths, device=self.device)
        return layer_gate.draw(self.setup, case.tokens), packed

    def _why_not(self, one: LayerContender, x: Tensor, packed: PackedSequences | None) -> str | None:
        if one.name in self.missing:
            return self.missing[one.name]
        kind = "dense" if packed is None else "packed"
        row = next(row for row in self.results["gate"] if row["contender"] == one.name)
        if kind not in row["passed"]:
            return row[kind] if isinstance(row[kind], str) else f"wrong against float64: {_allowed(row[kind])}"
        return one.why_not(self.layers[one.name], x, packed)

    def _interleaved(self, calls: dict[str, Call]) -> dict[str, Timing]:
        return interleave(calls, self.device, self.args.rounds, self.args.case_seconds)

    def _peak(self, call: Call) -> dict[str, Any]:
        try:
            call()
            return {"peak_mib": peak_bytes(call, self.device) / 2**20}
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"[:500]}

    def _forget(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _call(one: LayerContender, layer: nn.Module, x: Tensor, packed: PackedSequences | None, train: bool) -> Call:
    """Forward without gradients, or forward and the gradients of hidden states and every parameter."""
    if not train:

        @torch.no_grad()
        def forward() -> object:
            return one.run(layer, x, packed)

        return forward
    wanted = [x, *layer.parameters()]
    dy = layer_gate.cotangent(x)
    return lambda: torch.autograd.grad(one.run(layer, x, packed), wanted, dy)


def _allowed(share: float | str) -> str:
    """A share of the gate's limit in words, or why there is none."""
    return f"{share:.150}" if isinstance(share, str) else f"{share:.3g} of what is allowed"


def _above(timing: Timing, floors: dict[str, dict[str, Timing]], kernel: str | None) -> dict[str, Any]:
    """The floor of a row, in its parts, and how far above it the row is: the median over rounds."""
    if not floors:
        return {}
    found = floors.get(kernel or "") or min(floors.values(), key=lambda floor: floor["total"].median)
    medians = {f"floor_{part}_ms": part_timing.median * 1e3 for part, part_timing in found.items()}
    return {**medians, "over_floor": found["total"].ratio(timing)}


def _mode(train: bool) -> str:
    return "forward+backward" if train else "forward"
