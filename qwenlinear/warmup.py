"""``qwenlinear warmup``: compile and tune what a model's Gated DeltaNet layers need, into the compilers' own caches.

One layer of the model runs every shape that is asked for, so that Triton, TileLang and Inductor fill their caches as they would
in the job; then the command says where those are, how large, and how to ship them to other nodes. Nothing is set or moved.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from qwenlinear import terminal, usage
from qwenlinear.caches import Cache, caches, shipping
from qwenlinear.errors import UnsupportedCall
from qwenlinear.kernels import PackedSequences
from qwenlinear.kernels.auto import _default_device, add_kernel_arguments, kernel_from_args
from qwenlinear.layers import (
    GatedDeltaNet,
    GatedDeltaNetCache,
    GatedDeltaNetConfig,
    Qwen3_5GatedDeltaNet,
    Qwen3NextGatedDeltaNet,
)

Work = Callable[[], None]
_WITHIN = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments.

    Args:
        parser: the command's own parser.
    """
    sizes = parser.add_mutually_exclusive_group(required=True)
    sizes.add_argument("--config", type=Path, metavar="FILE", help="config.json of a model, or its folder")
    sizes.add_argument("--heads", type=usage.heads, metavar="H/HV", help="key and value heads, for example 16/32")
    parser.add_argument(
        "--head-dim", type=usage.whole(1), default=128, help="K = V, with --heads (default: %(default)s)"
    )
    parser.add_argument(
        "--hidden", type=usage.whole(1), default=2048, help="hidden size, with --heads (default: %(default)s)"
    )
    parser.add_argument(
        "--tokens", type=usage.whole(1), nargs="*", default=[], metavar="T", help="lengths of one sequence"
    )
    parser.add_argument(
        "--packed",
        type=usage.numbers("NxL", "x"),
        nargs="*",
        default=[],
        metavar="NxL",
        help="documents x tokens of each",
    )
    parser.add_argument(
        "--decode", type=usage.whole(1), nargs="*", default=[], metavar="B", help="sequences that decode together"
    )
    parser.add_argument("--train", action="store_true", help="backward, too")
    parser.add_argument(
        "--dtype", type=usage.dtype(), default="bfloat16", help="of weights and activations (default: %(default)s)"
    )
    parser.add_argument(
        "--device", type=usage.device, default=None, help="default: the accelerator PyTorch finds, else the CPU"
    )
    add_kernel_arguments(parser)
    parser.add_argument(
        "--verify",
        type=usage.positive,
        nargs="?",
        const=_WITHIN,
        metavar="SECONDS",
        help=f"start a new process and measure its first step; exit 1 where it takes longer (default: {_WITHIN:g})",
    )
    parser.add_argument("--first-step", action="store_true", help=argparse.SUPPRESS)  # what the new process does


def run(args: argparse.Namespace) -> int:
    """Run every shape, then say where the caches are.

    Args:
        args: the parsed arguments.

    Returns:
        0; 1 where ``--verify`` took longer than allowed; 2 where something is missing or does not fit, said in words.
    """
    begin, environment = time.perf_counter(), dict(os.environ)  # Inductor sets variables while it runs
    device = torch.device(args.device) if args.device else _default_device()
    try:
        if not (args.tokens or args.packed or args.decode):
            raise ValueError("needs a shape: --tokens T, --packed NxL or --decode B")
        layer = _layer(args, device)
        if args.first_step:
            return _first_step(args, layer, begin)
        before = {cache.name: cache.files() for cache in caches(environment)}
        print(terminal.fold(repr(layer)))
        if device.type == "cpu" and args.qwen_gdn_backend in ("auto", "torch"):
            print("On a CPU PyTorch's own operators run: there is nothing to compile or tune.")
        rows = _run_all(dict(_works(args, layer)), device)
    except (UnsupportedCall, ValueError, RuntimeError) as error:
        print(f"qwenlinear warmup: {error}", file=sys.stderr)
        return 2
    body = [[name, f"{first:.2f}", f"{again * 1e3:.2f}"] for name, first, again in rows]
    terminal.show_table("", ["", "first call, s", "the next, ms"], body)
    _say_where(environment, before, device)
    return 0 if args.verify is None else _verify(args, environment)


# ---- the layer and its calls ---------------------------------------------------------------------------------------


def _layer(args: argparse.Namespace, device: torch.device) -> GatedDeltaNet:
    """One layer of the model, with drawn weights."""
    cls: type[GatedDeltaNet] = Qwen3_5GatedDeltaNet
    if args.config is None:
        H, HV = args.heads
        heads = {"linear_num_key_heads": H, "linear_num_value_heads": HV}
        dims = {"linear_key_head_dim": args.head_dim, "linear_value_head_dim": args.head_dim}
        config = GatedDeltaNetConfig(hidden_size=args.hidden, **heads, **dims)
    else:
        path = args.config / "config.json" if args.config.is_dir() else args.config
        if not path.exists():
            raise ValueError(f"--config needs a config.json or a folder with one, got {args.config}")
        found = json.loads(path.read_text())
        config = GatedDeltaNetConfig.from_config(found)
        if "qwen3_next" in str(found.get("model_type", "")):
            cls = Qwen3NextGatedDeltaNet
    dtype = getattr(torch, args.dtype, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"--dtype needs a floating dtype of PyTorch, got {args.dtype!r}")
    with torch.device(device):
        return cls(config, kernel_from_args(args, device)).to(dtype)


def _works(args: argparse.Namespace, layer: GatedDeltaNet) -> Iterator[tuple[str, Work]]:
    """What is asked for, by name."""
    for documents, length in [*((1, T) for T in args.tokens), *args.packed]:
        name = f"T={length}" if documents == 1 else f"{documents} x {length} packed"
        yield f"{name}, forward", _forward(layer, documents, length)
        if args.train:
            yield f"{name}, forward and backward", _train(layer, documents, length)
    for rows in args.decode:
        yield f"decode {rows}", _decode(layer, rows)


def _input(layer: GatedDeltaNet, rows: int, length: int) -> torch.Tensor:
    weight = layer.out_proj.weight
    return torch.randn(rows, length, layer.config.hidden_size, device=weight.device).to(weight.dtype)


def _boundaries(layer: GatedDeltaNet, documents: int, length: int) -> PackedSequences | None:
    return None if documents == 1 else PackedSequences.from_lengths([length] * documents, device=layer.A_log.device)


def _forward(layer: GatedDeltaNet, documents: int, length: int) -> Work:
    @torch.no_grad()
    def work() -> None:
        layer(_input(layer, 1, documents * length), cu_seqlens=_boundaries(layer, documents, length))

    return work


def _train(layer: GatedDeltaNet, documents: int, length: int) -> Work:
    def work() -> None:
        _differentiate(layer, documents, length)
        layer.zero_grad(set_to_none=True)

    return work


def _differentiate(layer: GatedDeltaNet, documents: int, length: int) -> None:
    """Forward and backward, the hidden states' gradient too, as behind another layer."""
    x = _input(layer, 1, documents * length).requires_grad_()
    y = layer(x, cu_seqlens=_boundaries(layer, documents, length))
    y.backward(torch.ones_like(y))


def _decode(layer: GatedDeltaNet, rows: int) -> Work:
    @torch.no_grad()
    def work() -> None:
        cache = GatedDeltaNetCache()
        layer(_input(layer, rows, 2 if layer.kernel.capabilities.chunk else 1), cache=cache)
        for _ in range(2):  # the second token goes on from what a step left
            layer(_input(layer, rows, 1), cache=cache)

    return work


def _run_all(works: Mapping[str, Work], device: torch.device) -> list[tuple[str, float, float]]:
    """Run each twice; name, seconds of the first call and of the next one."""
    rows = []
    with _progress(len(works)) as advance:
        for name, work in works.items():
            advance(name, 0)
            rows.append((name, _seconds(work, device), _seconds(work, device)))
            advance(name, 1)
    return rows


def _seconds(work: Work, device: torch.device) -> float:
    begin = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str, int], None]]:
    """A bar where rich is installed, else a line for each."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    except ImportError:
        yield lambda name, done: None if done else print(f"{name} ...", file=sys.stderr, flush=True)
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("warm up", total=total)
        yield lambda name, done: bar.update(task, description=name, advance=done)


# ---- the caches ----------------------------------------------------------------------------------------------------


def _say_where(environment: Mapping[str, str], before: Mapping[str, tuple[int, int]], device: torch.device) -> None:
    found, compiled = caches(environment), False
    print("\nCaches:")
    for cache in found:
        count, size = cache.files()
        new = count - before[cache.name][0]
        compiled = compiled or new > 0
        how = f"{cache.variable} is set" if cache.given else f"the default: {cache.variable} is not set"
        print(terminal.fold(f"  {cache.name}: {cache.folder}\n    {how}"))
        print(f"    {count} files ({new} new), {size / 2**20:.1f} MiB")
    moved = os.environ.get("TRITON_CACHE_DIR")
    if moved and moved != environment.get("TRITON_CACHE_DIR"):
        told = (
            f"  Inductor moved Triton's cache to {moved} while it ran, so what Triton compiled afterwards is there, and another "
            "order of calls would not find it: set TRITON_CACHE_DIR in the job and for warmup"
        )
        print(terminal.fold(told))
    print("\n".join(["", *_what_to_ship(found, compiled, device)]))


def _what_to_ship(found: tuple[Cache, ...], compiled: bool, device: torch.device) -> list[str]:
    """How the caches get to other nodes; where this run put nothing into them, that first."""
    if compiled:
        return shipping(found)
    if device.type == "cpu":
        told = "Nothing was compiled, so there is nothing to ship. Files in the caches are from other runs."
        return [terminal.fold(told)]
    known = "Nothing new was compiled: these calls found what they need in the caches, or need no compiler."
    return [terminal.fold(known), *shipping(found)]


# ---- a new process -------------------------------------------------------------------------------------------------


def _first_step(args: argparse.Namespace, layer: GatedDeltaNet, begin: float) -> int:
    """In the new process: one training step (or forward pass, or decode) of the first shape; a line of JSON.

    What comes before it in a job too, starting CUDA and importing the kernel's packages, is timed by itself.
    """
    device = layer.A_log.device
    layer.explain(torch.empty(1, 1, layer.config.hidden_size, dtype=layer.out_proj.weight.dtype, device=device))
    ready = time.perf_counter()
    shapes = [*((1, T) for T in args.tokens), *args.packed]
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.0) if args.train and shapes else None

    def step() -> None:
        if optimizer is None:
            next(work for _, work in _works(args, layer))()
            return
        documents, length = shapes[0]
        _differentiate(layer, documents, length)
        optimizer.step()

    first = _seconds(step, device)
    print(json.dumps({"ready": ready - begin, "first_step": first, "second_step": _seconds(step, device)}))
    return 0


def _verify(args: argparse.Namespace, environment: dict[str, str]) -> int:
    """Start a process with this one's first environment and say what its first step took."""
    words = [word for word in _words(args) if word]
    root = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH")]))
    begin = time.perf_counter()
    command = [sys.executable, "-m", "qwenlinear.cli", "warmup", *words, "--first-step"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**environment, "PYTHONPATH": path})
    whole = time.perf_counter() - begin
    if done.returncode:
        print(f"qwenlinear warmup: the new process failed:\n{(done.stderr or done.stdout)[-2000:]}", file=sys.stderr)
        return 2
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    what = "training step" if args.train and (args.tokens or args.packed) else "call"
    slow = found["first_step"] > args.verify
    told = (
        f"\nA new process: first {what} {found['first_step']:.2f} s (the second {found['second_step'] * 1e3:.1f} ms), "
        f"{found['ready']:.2f} s before it to build the layer and import the kernel, {whole:.1f} s from start to end; "
        f"{'more than' if slow else 'within'} {args.verify:g} s"
    )
    print(terminal.fold(told))
    return int(slow)


def _words(args: argparse.Namespace) -> Iterator[str]:
    """The command line that these arguments came from."""
    if args.config is not None:
        yield f"--config={args.config}"
    else:
        yield from (
            f"--heads={args.heads[0]}/{args.heads[1]}",
            f"--head-dim={args.head_dim}",
            f"--hidden={args.hidden}",
        )
    for name, values in (
        ("--tokens", args.tokens),
        ("--packed", [f"{documents}x{length}" for documents, length in args.packed]),
        ("--decode", args.decode),
    ):
        if values:
            yield from (name, *map(str, values))
    yield from (f"--dtype={args.dtype}", f"--qwen-gdn-backend={args.qwen_gdn_backend}")
    yield f"--device={args.device}" if args.device else ""
    yield "--train" if args.train else ""
