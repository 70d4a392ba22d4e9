"""``python -m qwenlinear.testing``: the whole report for some kernels, and for both layers on them, as Markdown and JSON."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import distributions
from pathlib import Path

import torch

from qwenlinear import terminal, usage
from qwenlinear.errors import UnsupportedCall
from qwenlinear.kernels import GatedDeltaKernel
from qwenlinear.kernels.auto import kernel_from_name
from qwenlinear.layers import GatedDeltaNetConfig, Qwen3_5GatedDeltaNet, Qwen3NextGatedDeltaNet
from qwenlinear.testing.cases import Case
from qwenlinear.testing.generate import generate
from qwenlinear.testing.jobs import EVERY, one, side_by_side
from qwenlinear.testing.kernel import too_narrow, versions
from qwenlinear.testing.layer import check_layer
from qwenlinear.testing.report import CaseResult, ConformanceError, ConformanceReport

_PACKAGES = ("torch", "triton", "flash-linear-attention", "fla-core", "flash-qla", "tilelang")


def main(argv: Sequence[str] | None = None) -> int:
    """Check kernels and write what came out.

    Args:
        argv: the words after ``python -m qwenlinear.testing``; None means ``sys.argv[1:]``.

    Returns:
        0 where every kernel passed, 1 where one failed, could not run here, or ran out of time.
    """
    args = _parser().parse_args(argv)
    words = " ".join(sys.argv[1:] if argv is None else argv)
    written = [
        f"# Conformance on {_place(args.device)}",
        f"    python -m qwenlinear.testing {words}",
        _environment(args.device),
    ]
    loaded: list[object] = []
    passed = True
    for name in args.kernels:
        for title, text, report in _sections(name, args):
            passed = passed and report is not None and report.passed
            written.append(f"## {title}\n\n{text}")
            loaded += [json.loads(report.to_json())] if report is not None else []
            print()
            terminal.show_markdown(written[-1])
            sys.stdout.flush()
            if args.markdown is not None:  # after each, so that a crash of the next leaves what there is
                args.markdown.write_text("\n\n".join(written) + "\n", encoding="utf-8")
            if args.json is not None:
                found = {"command": words, "packages": _packages(), "reports": loaded}
                args.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return 0 if passed else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m qwenlinear.testing", description=__doc__)
    names = "names, separated by commas, as --qwen-gdn-backend takes them"
    parser.add_argument("--kernels", type=usage.split(usage.kernel()), default="torch", help=names)
    parser.add_argument("--device", type=usage.device, default="cpu", help="where the tensors lie (default: cpu)")
    parser.add_argument("--packings", type=usage.whole(0), default=1000, help="random packings a form (default: 1000)")
    parser.add_argument(
        "--heads",
        type=usage.numbers("H,HV,K,V", ","),
        action="append",
        help="H,HV,K,V instead of the default; repeatable",
    )
    dtypes = usage.split(usage.dtype("float64", "float32", "bfloat16", "float16"))
    parser.add_argument(
        "--dtypes", type=dtypes, help="only these, separated by commas (default: all that are declared)"
    )
    parser.add_argument(
        "--jobs",
        type=usage.whole(1),
        default=1,
        help="processes that run cases, and compile, side by side (default: 1)",
    )
    parser.add_argument("--layers", action="store_true", help="also check both layers on each kernel, in bfloat16")
    parser.add_argument("--seconds", type=usage.positive, default=float("inf"), help="stop a kernel after this long")
    parser.add_argument("--json", type=Path, help="write every case there")
    parser.add_argument("--markdown", type=Path, help="write the tables there")
    return parser


def _sections(name: str, args: argparse.Namespace) -> Iterator[tuple[str, str, ConformanceReport | None]]:
    kernel = kernel_from_name(name)
    try:
        kernel.require(args.device)
    except UnsupportedCall as error:
        yield name, f"Not run here. {error}", None
        return
    yield _kernel(name, kernel, args)
    for layer_class in (Qwen3NextGatedDeltaNet, Qwen3_5GatedDeltaNet) if args.layers else ():
        torch.manual_seed(0)
        layer = layer_class(GatedDeltaNetConfig(hidden_size=256), kernel).to(args.device, torch.bfloat16)
        try:
            report = check_layer(layer, first_failure=False)
        except ConformanceError as error:
            report = error.report
        yield f"{layer_class.__name__} on {name}", report.table(), report


def _kernel(name: str, kernel: GatedDeltaKernel, args: argparse.Namespace) -> tuple[str, str, ConformanceReport]:
    device, start, remark = torch.device(args.device), time.perf_counter(), ""
    heads = None if args.heads is None else tuple(args.heads)
    cases = list(generate(kernel, device.type, heads, args.packings, args.dtypes))
    results = (
        _in_turn(name, cases, args)
        if args.jobs == 1
        else side_by_side(name, args.device, cases, args.jobs, args.seconds)
    )
    found = [result for answers in results for result in answers or ()]
    if missing := [case for case, answers in zip(cases, results, strict=True) if answers is None]:
        remark = f"{len(missing)} cases were not run: the limit of {args.seconds:g} s"
        found.append(CaseResult(missing[0], "failed", remark))
    remarks = too_narrow(kernel, device) if device.type == "cpu" else ()
    report = ConformanceReport(repr(kernel), args.device, tuple(found), remarks, versions())
    took = f"{time.perf_counter() - start:.0f} s of wall time, {args.jobs} process(es)."
    return name, "\n\n".join([report.table(), *([f"**{remark}.**"] if remark else []), took]), report


def _in_turn(name: str, cases: Sequence[Case], args: argparse.Namespace) -> list[list[CaseResult] | None]:
    """What each case gave, in order; None for one that the time did not reach."""
    start = told = time.perf_counter()
    results: list[list[CaseResult] | None] = [None] * len(cases)
    for number, case in enumerate(cases):
        now = time.perf_counter()
        if now - start > args.seconds:
            break
        if now - told > EVERY:
            told = now
            print(f"{name}: case {number} of {len(cases)} after {now - start:.0f} s", file=sys.stderr, flush=True)
        results[number] = one(name, args.device, case)
    return results


def _packages() -> dict[str, str]:
    installed = {found.metadata["Name"]: found.version for found in distributions()}
    return {name: installed[name] for name in _PACKAGES if name in installed}


def _place(device: str) -> str:
    return torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else device


def _environment(device: str) -> str:
    packages = ", ".join(f"{name} {found}" for name, found in _packages().items())
    return (
        f"On {_place(device)}, with {packages}. Each cell is the worst relative error against float64, and in brackets what is "
        "promised."
    )


if __name__ == "__main__":
    raise SystemExit(main())
