"""``qwenlinear bench decode``: one token of one Gated DeltaNet layer, eager and as a CUDA graph, beside the bytes it must move.

Every contender first prefills and decodes a few tokens against a float64 layer. A measurement steps through several layers of
the same sizes with their own weights and states, as a model does, so that no weight is still in the cache when its turn comes
again; times are of one layer. The floor is bytes over the bandwidth of a copy of 1 GiB in the same rounds: recurrent state read
and written, weights and convolution state read.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qwenlinear import usage
from qwenlinear.bench import decode_report, layer_gate
from qwenlinear.bench.decode_contenders import KINDS, Decoder, decoders
from qwenlinear.bench.floor import Sizes, copying
from qwenlinear.bench.layer_options import add_size_arguments, fill_defaults, setup_of
from qwenlinear.bench.session import Session, say
from qwenlinear.bench.timing import Call, Timing, captured, interleave

_CPU: dict[str, Any] = {
    "dtype": "float32",
    "hidden": 256,
    "heads": (2, 4),
    "head_dim": 64,
    "batch": [1, 8],
    "kernels": ["torch"],
    "layers": 1,
}
_GPU: dict[str, Any] = {
    "dtype": "bfloat16",
    "hidden": 2048,
    "heads": (16, 32),
    "head_dim": 128,
    "batch": [1, 8, 64, 256],
    "kernels": ["auto", "fla"],
    "layers": 4,
}
_PREFILL, _STEPS = 5, 4
_COPIED = {"cuda": 2**30, "cpu": 2**26}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options to a parser."""
    add_size_arguments(parser)
    parser.add_argument(
        "--batch", type=usage.whole(1), nargs="+", help="sequences; default: 1 8 (CPU), 1 8 64 256 (GPU)"
    )
    parser.add_argument(
        "--kernels",
        type=usage.kernel(),
        nargs="+",
        metavar="NAME",
        help="of our layer; default: torch (CPU), auto fla (GPU)",
    )
    parser.add_argument(
        "--contenders", nargs="+", choices=KINDS, default=list(KINDS), help="who takes part (default: all)"
    )
    parser.add_argument(
        "--layers", type=usage.whole(1), help="layers stepped through in a measurement; default: 4 (GPU), 1 (CPU)"
    )
    parser.add_argument("--out", type=Path, default=Path("bench-decode"), help="folder for JSON, Markdown and plots")


def run(args: argparse.Namespace) -> int:
    """Measure, print the tables and write them.

    Args:
        args: the parsed options.

    Returns:
        0 when every contender that ran was right and no part failed, 1 otherwise.

    Raises:
        UsageError: a file to lay out that holds no results.
    """
    results = Bench(args).run() if args.render is None else usage.results(args.render, "gate", "explain")
    decode_report.show(results)
    decode_report.write(results, args.out)
    wrong = [row for row in results["gate"] if "error" in row and not row["passed"]]
    return 1 if wrong or results["errors"].keys() - {"limit"} else 0


class Bench:
    """One run.

    Args:
        args: the parsed options.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        fill_defaults(args, _CPU, _GPU)
        self.args, self.setup = args, setup_of(args)
        self.device, self.sizes = self.setup.device, Sizes(self.setup.config, self.setup.dtype)
        self.decoders = decoders(args.contenders, args.kernels)
        self.layers: dict[str, list[nn.Module]] = {}
        H, HV = args.heads
        self.session = Session(
            self.device,
            args.out / "decode.json",
            args.limit,
            dtype=args.dtype,
            size={"hidden": args.hidden, "heads": f"{H}/{HV}", "head_dim": args.head_dim},
            layers=args.layers,
            contenders={one.name: one.note for one in self.decoders},
            explain={},
            gate=[],
            times=[],
        )
        self.results = self.session.results

    def run(self) -> dict[str, Any]:
        """The gate, then each batch size."""
        self.session.part("gate", self.gate)
        for batch in self.args.batch:
            if self.session.late(f"batch {batch}"):
                break
            self.session.part(f"batch {batch}", lambda batch=batch: self.times(batch))  # type: ignore[misc]
        return self.results

    def gate(self) -> None:
        """Prefill and decode against the float64 layer."""
        x = torch.cat([layer_gate.draw(self.setup, _PREFILL + _STEPS, seed) for seed in (20, 21, 22)])
        truth = torch.cat([layer_gate.plain_truth(self.setup, row[None], (row.shape[0],))["output"] for row in x])
        values, _ = layer_gate.LIMITS[self.setup.dtype]
        for one in self.decoders:
            row: dict[str, Any] = {"contender": one.name, "passed": False}
            try:
                self.layers[one.name] = [one.build(self.setup) for _ in range(self.args.layers)]
            except Exception as missing:
                row["reason"] = f"{type(missing).__name__}: {missing}"
                self.results["gate"].append(row)
                continue
            try:
                row["error"] = error = self._error(one, x, truth[:, _PREFILL:])
                row["passed"] = error <= values
                row["share"] = error / values
            except Exception as failure:
                row["error"] = f"{type(failure).__name__}: {failure}"[:1000]
            self.results["gate"].append(row)
            told = f"{row['share']:.3g} of what is allowed" if "share" in row else row["error"]
            say(f"gate {one.name}: {told:.150}")

    @torch.no_grad()
    def _error(self, one: Decoder, x: Tensor, wanted: Tensor) -> float:
        layer = self.layers[one.name][0]
        state = one.start(layer, x[:, :_PREFILL])
        found = torch.cat([one.step(layer, x[:, t : t + 1], state) for t in range(_PREFILL, x.shape[1])], 1)
        return _relative(found, wanted)

    def times(self, batch: int) -> None:
        """Everybody's step, eager and captured, and the copy that the floor is reckoned from, in turns."""
        copied = _COPIED.get(self.device.type, 2**26)
        calls: dict[str, Call] = {"copy": copying(copied, self.device)}
        failed: dict[str, str] = {}
        facts: dict[str, dict[str, Any]] = {}
        x = torch.cat([layer_gate.draw(self.setup, 1, 30 + n % 4) for n in range(batch)])
        for one in self.decoders:
            eager, graph = f"{one.name}|eager", f"{one.name}|graph"
            reason = self._why_not(one)
            if reason is not None:
                failed[eager] = reason
                continue
            try:
                calls[eager] = self._call(one, x)
                if self.device.type == "cuda":
                    facts[graph] = {}
                    calls[graph] = self._graph(one, x, facts[graph])
            except Exception as error:
                failed[graph if eager in calls else eager] = f"{type(error).__name__}: {error}"[:500]
        timings = interleave(calls, self.device, self.args.rounds, self.args.case_seconds)
        timings |= {name: Timing(error=text) for name, text in failed.items()}
        bandwidth = copied / timings["copy"].median
        floor = Timing([self.sizes.decode(batch) / (copied / s) for s in timings["copy"].seconds])
        for name, timing in timings.items():
            if name != "copy":
                self._row(batch, name, timing, floor, bandwidth, facts.get(name, {}), timings)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _row(
        self,
        batch: int,
        name: str,
        timing: Timing,
        floor: Timing,
        bandwidth: float,
        facts: dict[str, Any],
        timings: dict[str, Timing],
    ) -> None:
        contender, _, how = name.partition("|")
        row: dict[str, Any] = {"batch": batch, "contender": contender, "graph": how == "graph", **facts}
        if timing.seconds:
            one_layer = Timing([seconds / self.args.layers for seconds in timing.seconds])
            row |= {"us": one_layer.median * 1e6, "floor_us": floor.median * 1e6, "over_floor": floor.ratio(one_layer)}
            row |= {
                "floor_mb": self.sizes.decode(batch) / 1e6,
                "copy_gb_s": bandwidth / 1e9,
                "rounds": len(timing.seconds),
            }
            peers = {n.partition("|")[0]: t for n, t in timings.items() if n.endswith(f"|{how}") and t.seconds}
            row["against"] = {peer: timing.ratio(other) for peer, other in peers.items()}
        else:
            row["error"] = timing.error
        self.results["times"].append(row)
        shown = f"{row['us']:.1f} us, {row['over_floor']:.2f} of the floor" if "us" in row else f"{row['error']!s:.90}"
        say(f"batch {batch} {contender} {how}: {shown}")

    def _why_not(self, one: Decoder) -> str | None:
        row = next(row for row in self.results["gate"] if row["contender"] == one.name)
        if row["passed"]:
            return None
        return str(row["reason"]) if "reason" in row else f"wrong against float64: {row['error']}"

    def _call(self, one: Decoder, x: Tensor, out: list[Tensor] | None = None, graph: bool = False) -> Call:
        """One token through each layer, eagerly or as a graph needs it; ``out`` takes the last answer."""
        layers, step = self.layers[one.name], one.step_in_graph if graph else one.step
        with torch.no_grad():
            prompt = x.expand(-1, 2, -1)
            states = [one.start(layer, prompt) for layer in layers]

        @torch.no_grad()
        def call() -> None:
            for layer, state in zip(layers, states, strict=True):
                y = step(layer, x, state)
            if out is not None:
                out[:] = [y]

        if one.name not in self.results["explain"]:
            self.results["explain"][one.name] = one.describe(layers[0], x)
        return call

    def _graph(self, one: Decoder, x: Tensor, facts: dict[str, Any]) -> Call:
        """The captured step, held against the eager one; whether a replay goes on from the state that the last one left."""
        out: list[Tensor] = []
        step, calls = self._call(one, x, out, graph=True), 0

        def counted() -> None:
            nonlocal calls
            calls += 1
            step()

        replay = captured(counted)
        wanted: list[Tensor] = []
        facts.update(self.replayed(replay, out, self._call(one, x, wanted), wanted, calls - 1))
        return replay

    def replayed(self, replay: Call, out: list[Tensor], eager: Call, wanted: list[Tensor], done: int) -> dict[str, Any]:
        """Compare a replay with the eager step.

        Args:
            replay: replays the step into ``out``.
            out: the replay's answer.
            eager: the step from the start, into ``wanted``.
            wanted: the eager answer.
            done: steps that were already taken before the first replay.

        Returns:
            ``replay_error``, and ``goes_on``: whether a second replay is the step after the first.

        Raises:
            RuntimeError: another answer than the eager step's.
        """
        values, _ = layer_gate.LIMITS[self.setup.dtype]
        for _ in range(done + 1):
            eager()
        replay()
        first = out[0].clone()
        if (error := _relative(first, wanted[0])) > values:
            raise RuntimeError(f"wrong in a CUDA graph: a replay is {error:.3g} away from the eager step")
        eager()
        replay()
        moved = _relative(out[0], wanted[0]) <= min(values, 0.5 * _relative(first, wanted[0]))
        return {"replay_error": error, "goes_on": moved}


def _relative(x: Tensor, right: Tensor) -> float:
    error = float((x.double() - right.double()).norm() / right.double().norm())
    return error if error == error else float("inf")
