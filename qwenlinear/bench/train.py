"""``qwenlinear bench train``: data-parallel training of Gated DeltaNet blocks, kernels by guards of collectives.

DDP and FSDP2 train a stack of blocks on every kernel: bare, with a probe of everything before each collective, and under
:class:`CommMemoryPolicy`, so that what a kernel gains and what a guard costs are seen apart. Models of one kernel take turns
within rounds, one process a rank; their losses have to be equal at every step. Results are written after each kernel.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import torch

from qwenlinear import usage
from qwenlinear.bench import ranks, tables
from qwenlinear.bench.session import Session
from qwenlinear.bench.tables import Results, Table

PARALLEL = {"ddp": "DDP", "fsdp2": "FSDP2"}
_CPU: dict[str, Any] = {
    "kernels": ["torch"],
    "dtype": "float32",
    "hidden": 128,
    "heads": (2, 4),
    "head_dim": 32,
    "packed": (2, 128),
}
_GPU: dict[str, Any] = {
    "kernels": ["fla", "flashqla", "torch"],
    "dtype": "bfloat16",
    "hidden": 2048,
    "heads": (16, 32),
    "head_dim": 128,
    "packed": (4, 4096),
}
_KERNELS_WITHIN = (
    1e-2  # relative, of two kernels' losses: they round differently. Losses of one kernel are compared bit for bit
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options to a parser."""
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="nccl" if torch.cuda.is_available() else "gloo")
    parser.add_argument(
        "--world-size", type=usage.whole(1), help="ranks; default: 2 for gloo, every GPU for nccl (which may be one)"
    )
    parser.add_argument(
        "--kernels", type=usage.kernel(), nargs="+", help="default: torch (gloo), fla flashqla torch (nccl)"
    )
    parser.add_argument("--parallel", choices=tuple(PARALLEL), nargs="+", default=list(PARALLEL), help="default: both")
    parser.add_argument(
        "--dtype",
        type=usage.dtype(),
        help="of activations, by autocast; weights are float32; default: float32, bfloat16",
    )
    parser.add_argument("--blocks", type=usage.whole(1), default=4, help="blocks in the stack (default 4)")
    parser.add_argument("--hidden", type=usage.whole(1), help="hidden size; default: 128 (gloo), 2048 (nccl)")
    parser.add_argument("--heads", type=usage.heads, metavar="H/HV", help="default: 2/4 (gloo), 16/32 (nccl)")
    parser.add_argument("--head-dim", type=usage.whole(1), help="K = V; default: 32 (gloo), 128 (nccl)")
    parser.add_argument(
        "--packed", type=usage.numbers("NxL", "x"), metavar="NxL", help="documents of a rank; default: 2x128, 4x4096"
    )
    parser.add_argument("--rounds", type=usage.whole(1), default=10, help="rounds of turns (default 10)")
    parser.add_argument("--steps", type=usage.whole(1), default=4, help="steps of a turn (default 4)")
    parser.add_argument(
        "--limit", type=usage.positive, default=300.0, help="seconds that all of it may take (default 300)"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for train-BACKEND.json and .md")


def run(args: argparse.Namespace) -> int:
    """Train, print the table and write it.

    Args:
        args: the parsed options.

    Returns:
        0, or 1 if a part failed or losses differ; the results say which.

    Raises:
        UsageError: NCCL with fewer GPUs than ranks.
    """
    nccl = args.backend == "nccl"
    gpus = torch.cuda.device_count()
    size = args.world_size or (max(1, gpus) if nccl else 2)
    if nccl and gpus < size:
        raise usage.UsageError(f"--backend nccl needs a GPU for each of {size} ranks, got {gpus} GPUs")
    for name, value in (_GPU if nccl else _CPU).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    session = Session(
        torch.device("cuda" if nccl else "cpu"),
        args.out / f"train-{args.backend}.json",
        args.limit,
        backend=args.backend,
        world_size=size,
        **{name: getattr(args, name) for name in ("dtype", "blocks", "hidden", "heads", "head_dim", "packed", "steps")},
        rows=[],
        losses=[],
    )
    for number, kernel in enumerate(args.kernels):
        if not session.late(f"kernel {kernel}"):
            share = session.left / (len(args.kernels) - number)
            session.part(f"kernel {kernel}", partial(_kernel, session, args, size, kernel, share))
    _compare_kernels(session.results)
    tables.save(session.results, session.path)
    text = markdown(session.results)
    session.path.with_suffix(".md").write_text(text + "\n")
    tables.show(session.results, layout(session.results))
    return 1 if session.results["errors"] else 0


def _kernel(session: Session, args: argparse.Namespace, size: int, kernel: str, limit: float) -> None:
    """Train one kernel both ways and file what every rank told."""
    documents, length = args.packed
    config = {
        "backend": args.backend,
        "parts": args.parallel,
        "kernel": kernel,
        **{name: getattr(args, name) for name in ("dtype", "blocks", "hidden", "heads", "head_dim", "rounds", "steps")},
        "documents": documents,
        "length": length,
        "seconds": 0.35 * limit / len(args.parallel),  # the rest is for starting and compiling
    }
    answers = ranks.launch(f"{__package__}.train_worker", size, config, {}, limit)
    results = session.results
    for rank, answer in enumerate(answers):
        for part, text in answer["errors"].items():
            results["errors"][f"{kernel}, {part}, rank {rank}"] = text
    for parallel in args.parallel:
        told = [answer["results"].get(parallel) for answer in answers]
        row = {"parallel": parallel, "kernel": kernel}
        refused = [one["refused"] for one in told if one is not None and "refused" in one]
        if refused:
            results["rows"].append({**row, "refused": refused[0]})
        elif None not in told:
            results["rows"] += _rows(row, told, size * documents * length, results)


def _rows(row: dict[str, Any], told: list[dict[str, Any]], tokens: int, results: Results) -> list[dict[str, Any]]:
    """A row per guard, its losses compared with the bare ones on every rank."""
    found = []
    slowest = {  # of the ranks, round by round
        guard: [max(times) for times in zip(*(one["guards"][guard]["seconds"] for one in told), strict=True)]
        for guard in told[0]["guards"]
    }
    bare = slowest["bare"]
    for guard, first in told[0]["guards"].items():
        seconds = slowest[guard]
        if not seconds:
            raise TimeoutError(f"{row['kernel']}, {row['parallel']}: no round before the limit")
        pairs = [(one["guards"][guard]["losses"], one["guards"]["bare"]["losses"]) for one in told]
        worst = max(abs(a - b) for losses, others in pairs for a, b in zip(losses, others, strict=True))
        same = all(losses == others for losses, others in pairs)
        if not same:
            text = f"losses differ from the bare ones by up to {worst:.3g}"
            results["errors"][f"{row['kernel']}, {row['parallel']}, {guard}"] = text
        found.append(
            {
                **row,
                "guard": guard,
                "step_ms": statistics.median(seconds) * 1e3,
                "to_bare": statistics.median(own / other for own, other in zip(seconds, bare, strict=True)),
                "tokens_per_s": tokens / statistics.median(seconds),
                "rounds": len(seconds),
                "seconds": seconds,
                "losses": first["losses"],
                "equal_losses": same,
                "calls": first["calls"],
                "peak_mib": told[0]["peak_mib"],
            }
        )
    return found


def _compare_kernels(results: Results) -> None:
    """The bare losses of each kernel beside those of the first that ran, step by step."""
    for parallel in PARALLEL:
        bare = [row for row in results["rows"] if row["parallel"] == parallel and row.get("guard") == "bare"]
        for row in bare[1:]:
            pairs = zip(row["losses"], bare[0]["losses"], strict=False)  # one may have had fewer rounds
            worst = max(abs(own - other) / abs(other) for own, other in pairs)
            names = {"parallel": parallel, "kernel": row["kernel"], "against": bare[0]["kernel"]}
            results["losses"].append({**names, "relative": worst})
            if not worst <= _KERNELS_WITHIN:
                text = f"losses differ by up to {worst:.3g} of their size, {_KERNELS_WITHIN:g} is allowed"
                results["errors"][f"{parallel}, {row['kernel']} against {bare[0]['kernel']}"] = text


def markdown(results: Results) -> str:
    """The tables as Markdown, under a line that says where they were measured."""
    lines = [f"## Failed: {name}\n\n```\n{text.rstrip()}\n```" for name, text in results["errors"].items()]
    return "\n\n".join([tables.markdown(results, layout(results)), *lines])


def layout(results: Results) -> list[Table]:
    """The table of step times, and the one of losses where there are several kernels."""
    documents, length = results["packed"]
    heads = "/".join(map(str, results["heads"]))
    title = (
        f"{results['blocks']} blocks, hidden {results['hidden']}, heads {heads} of {results['head_dim']}, {results['dtype']}; "
        f"{results['world_size']} ranks ({results['backend']}), {documents} x {length} packed tokens each; "
        "a step of the slowest rank, median; ratios are medians over rounds"
    )
    head = [
        "parallel",
        "kernel",
        "guard",
        "step ms",
        "to bare",
        "tokens/s",
        "last loss",
        "losses",
        "calls a step",
        "rounds",
    ]
    body = []
    for row in results["rows"]:
        who = [PARALLEL[row["parallel"]], row["kernel"]]
        if "refused" in row:
            body.append([*who, f"refused: {row['refused']}"[:200], *[""] * 7])
            continue
        calls = sum(count for count, _ in row["calls"].values()) / len(row["losses"])
        figures = [
            f"{row['step_ms']:.2f}",
            f"{row['to_bare']:.4f}",
            f"{row['tokens_per_s']:.0f}",
            f"{row['losses'][-1]:.5f}",
        ]
        equal = "equal" if row["equal_losses"] else "differ"
        body.append([*who, row["guard"], *figures, equal, f"{calls:.1f}" if calls else "", str(row["rounds"])])
    found: list[Table] = [(title, head, body)]
    if results["losses"]:
        rows = [
            [PARALLEL[row["parallel"]], row["kernel"], row["against"], f"{row['relative']:.2g}"]
            for row in results["losses"]
        ]
        found.append(
            (
                "Losses of kernels, largest relative difference of a step",
                ["parallel", "kernel", "against", "differ"],
                rows,
            )
        )
    return found
