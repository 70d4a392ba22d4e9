"""The command line: ``qwenlinear doctor | run | warmup | bench``, each command in a module of its own."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence

import qwenlinear
from qwenlinear.usage import UsageError

# name -> (module, one line of help); a module has `add_arguments(parser)` and `run(args) -> int`.
COMMANDS: dict[str, tuple[str, str]] = {
    "doctor": ("qwenlinear.doctor", "what this machine can run, why not more, and what to do about it"),
    "run": ("qwenlinear.hf.run", "generate from a Transformers folder with injected kernels"),
    "warmup": ("qwenlinear.warmup", "compile and tune what a model needs, and say where the caches are"),
}
BENCHES: dict[str, tuple[str, str]] = {
    "kernels": ("qwenlinear.bench.kernels", "every kernel of this machine against what people run without them"),
    "layer": ("qwenlinear.bench.layer", "one layer as people run it, beside the least time that it could take"),
    "decode": ("qwenlinear.bench.decode", "one decoded token of a layer, eager and as a CUDA graph"),
    "model": ("qwenlinear.bench.model", "a whole Transformers model, as installed and injected"),
    "guard": ("qwenlinear.bench.guard", "the memory guard of collectives: its cost and what it prevents"),
    "train": ("qwenlinear.bench.train", "data-parallel training of blocks: kernels by guards of collectives"),
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="qwenlinear", description="Gated DeltaNet layers: what runs here, warming up, generating, measuring."
    )
    parser.add_argument("--version", action="version", version=f"qwenlinear {qwenlinear.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (module, text) in COMMANDS.items():
        _add(commands.add_parser(name, help=text, description=_sentence(text)), module)
    bench = commands.add_parser("bench", help="measure, with both sides in one run", description="Measure.")
    names = bench.add_subparsers(dest="bench", required=True)
    for name, (module, text) in BENCHES.items():
        _add(names.add_parser(name, help=text, description=_sentence(text)), module)
    return parser


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _add(parser: argparse.ArgumentParser, module: str) -> None:
    loaded = importlib.import_module(module)
    loaded.add_arguments(parser)

    def run(args: argparse.Namespace) -> int:
        try:
            return int(loaded.run(args))
        except UsageError as error:
            parser.error(str(error))

    parser.set_defaults(run=run)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the words after ``qwenlinear``; None means ``sys.argv[1:]``.

    Returns:
        The exit status, 0 for success. Bad arguments end the process with 2 instead, as argparse does it.
    """
    args = _parser().parse_args(argv)
    status: int = args.run(args)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
