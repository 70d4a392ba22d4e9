"""``python -m qwenlinear.testing``: the whole report for some kernels, as a table, Markdown and JSON."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path

import torch

from qwenlinear.errors import UnsupportedCall
from qwenlinear.kernels.auto import kernel_from_name
from qwenlinear.testing.cases import Case
from qwenlinear.testing.generate import generate
from qwenlinear.testing.kernel import check_kernel
from qwenlinear.testing.report import ConformanceError, ConformanceReport

_PACKAGES = ("torch", "triton", "flash-linear-attention", "fla-core", "flash-qla", "tilelang")


def main(argv: Sequence[str] | None = None) -> int:
    """Check kernels and write what came out.

    Args:
        argv: the words after ``python -m qwenlinear.testing``; None means ``sys.argv[1:]``.

    Returns:
        0 where every kernel passed, 1 where one failed or could not run here.
    """
    parser = argparse.ArgumentParser(prog="python -m qwenlinear.testing", description=__doc__)
    parser.add_argument(
        "--kernels", default="torch", help="names, separated by commas, as --qwen-gdn-backend takes them"
    )
    parser.add_argument("--device", default="cpu", help="where the tensors lie (default: cpu)")
    parser.add_argument("--dtypes", help="only these, separated by commas (default: all that a kernel declares)")
    parser.add_argument("--packings", type=int, default=1000, help="random packings a form (default: 1000)")
    parser.add_argument(
        "--heads", type=_heads, action="append", help="H,HV,K,V to try instead of the default; repeatable"
    )
    parser.add_argument("--json", type=Path, help="write every case there")
    parser.add_argument("--markdown", type=Path, help="write the tables there")
    args = parser.parse_args(argv)
    sections, loaded, passed = [_environment(args.device)], [], True
    for name in args.kernels.split(","):
        text, report, seconds = _check(name, args)
        passed = passed and report is not None and report.passed
        sections.append(f"## {name}\n\n{text}\n\n{seconds:.0f} s of wall time.")
        loaded += [json.loads(report.to_json())] if report is not None else []
        print(f"\n{sections[-1]}", flush=True)
        if args.markdown is not None:  # after each kernel, so that a crash of the next leaves this one's results
            command = f"    python -m qwenlinear.testing {' '.join(sys.argv[1:] if argv is None else argv)}"
            args.markdown.write_text("\n\n".join(["# Conformance", command, *sections]) + "\n")
        if args.json is not None:
            args.json.write_text(json.dumps({"packages": _packages(), "reports": loaded}, indent=1))
    return 0 if passed else 1


def _check(name: str, args: argparse.Namespace) -> tuple[str, ConformanceReport | None, float]:
    start = time.perf_counter()
    kernel = kernel_from_name(name)
    try:
        kernel.require(args.device)
    except UnsupportedCall as error:
        return f"not run here: {error}", None, time.perf_counter() - start
    try:
        heads = None if args.heads is None else tuple(args.heads)
        cases: list[Case] | None = None
        if args.dtypes is not None:
            wanted = args.dtypes.split(",")
            every = generate(kernel, torch.device(args.device).type, heads, args.packings)
            cases = [case for case in every if case.dtype in wanted]
        report = check_kernel(
            kernel, args.device, first_failure=False, cases=cases, heads=heads, packings=args.packings
        )
    except ConformanceError as error:
        report = error.report
    return report.table(), report, time.perf_counter() - start


def _heads(text: str) -> tuple[int, int, int, int]:
    H, HV, K, V = (int(word) for word in text.split(","))
    return H, HV, K, V


def _packages() -> dict[str, str]:
    installed = {found.metadata["Name"]: found.version for found in distributions()}
    return {name: installed[name] for name in _PACKAGES if name in installed}


def _environment(device: str) -> str:
    where = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else device
    packages = ", ".join(f"{name} {found}" for name, found in _packages().items())
    return (
        f"On {where}, with {packages}. Each cell is the worst relative error against float64, and in brackets what the "
        "kernel promises."
    )


if __name__ == "__main__":
    raise SystemExit(main())
