"""Words of a command line, checked while it is parsed: a bad one is a usage error and nothing has run."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from qwenlinear import terminal
from qwenlinear.errors import UnsupportedCall
from qwenlinear.kernels import GatedDeltaKernel
from qwenlinear.kernels.auto import kernel_name
from qwenlinear.kernels.hardware import present


class UsageError(ValueError):
    """Options that do not go together, or not with this machine; the command line shows it under the usage and exits with 2."""


def run(program: Callable[[argparse.Namespace], object], parser: argparse.ArgumentParser) -> None:
    """Run a program on its command line; options that do not go together, and a call that its kernel refuses, are usage errors.

    Args:
        program: what takes the parsed arguments. It raises `UsageError` or `UnsupportedCall`; anything else is a fault.
        parser: of its arguments.
    """
    args = parser.parse_args()
    try:
        program(args)
    except (UsageError, UnsupportedCall) as error:
        parser.error(str(error))


def check(kernel: GatedDeltaKernel, device: str, description: str | None) -> None:
    """Run the conformance suite on a kernel and print what it found: the program of a module that holds one.

    The process ends with 1 where a case failed, and with a usage error where the machine lacks what the kernel needs.

    Args:
        kernel: what to check.
        device: where.
        description: what ``--help`` says, as it is.
    """
    from qwenlinear.testing import ConformanceError, check_kernel

    def program(_: argparse.Namespace) -> None:
        kernel.require(device)
        try:
            terminal.show_markdown(check_kernel(kernel, device, first_failure=False).table())
        except ConformanceError as error:
            terminal.show_markdown(error.report.table())
            raise SystemExit(1) from error

    run(program, argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter))


def device(word: str) -> str:
    """A device that PyTorch can compute on here."""
    return _told(lambda: str(present(word)))


def device_name(word: str) -> str:
    """A device that PyTorch knows, here or elsewhere."""
    try:
        return str(torch.device(word))
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(f"needs a device such as cpu or cuda:0, got {word!r}") from error


def dtype(*names: str) -> Callable[[str], str]:
    """The name of a floating dtype, one of ``names`` where some are given."""

    def parse(word: str) -> str:
        found = getattr(torch, word, None)
        if (names and word not in names) or not (isinstance(found, torch.dtype) and found.is_floating_point):
            needs = f"one of {', '.join(names)}" if names else "the name of a floating torch dtype"
            raise argparse.ArgumentTypeError(f"needs {needs}, got {word!r}")
        return word

    return parse


def whole(least: int) -> Callable[[str], int]:
    """A whole number, no smaller than ``least``."""

    def parse(word: str) -> int:
        try:
            number = int(word)
        except ValueError:
            number = least - 1
        if number < least:
            raise argparse.ArgumentTypeError(f"needs a whole number of at least {least}, got {word!r}")
        return number

    return parse


def positive(word: str) -> float:
    """A number above zero."""
    try:
        number = float(word)
    except ValueError:
        number = 0.0
    if not number > 0:
        raise argparse.ArgumentTypeError(f"needs a number above 0, got {word!r}")
    return number


def fraction(word: str) -> float:
    """A number above zero, a fraction such as ``"1/1024"`` too."""
    try:
        number = float(Fraction(word))
    except (ValueError, ZeroDivisionError, OverflowError):
        number = 0.0
    if not number > 0:
        raise argparse.ArgumentTypeError(f"needs a number above 0, or a fraction such as 1/1024, got {word!r}")
    return number


def numbers(form: str, separator: str, least: int = 1) -> Callable[[str], tuple[int, ...]]:
    """As many whole numbers as ``form`` has, such as ``"H/HV"``, as a tuple."""

    def parse(word: str) -> tuple[int, ...]:
        try:
            found = tuple(map(int, word.split(separator)))
        except ValueError:
            found = ()
        if len(found) != len(form.split(separator)) or min(found) < least:
            raise argparse.ArgumentTypeError(f"needs {form}, whole numbers of at least {least}, got {word!r}")
        return found

    return parse


def heads(word: str) -> tuple[int, ...]:
    """Key and value heads that a layer can have, ``"16/32"`` as (16, 32)."""
    H, HV = numbers("H/HV", "/")(word)
    if HV % H:
        raise argparse.ArgumentTypeError(f"needs H/HV with HV a multiple of H, got {word!r}")
    return H, HV


def kernel(*others: str) -> Callable[[str], str]:
    """The name of a kernel, as ``kernel_from_name`` takes it, or one of ``others``."""

    return lambda word: word if word in others else kernel_name(word)


def file(word: str) -> Path:
    """A file that is there and can be read."""
    if not Path(word).is_file():
        raise argparse.ArgumentTypeError(f"needs a file, got {word!r}")
    if not os.access(word, os.R_OK):
        raise argparse.ArgumentTypeError(f"needs a file that this user may read, got {word!r}")
    return Path(word)


def results(path: Path, *parts: str) -> dict[str, Any]:
    """The results of an earlier run of a benchmark, to lay out again.

    Args:
        path: its JSON.
        parts: keys that it has.

    Returns:
        What the file holds.

    Raises:
        UsageError: it holds no JSON, or another benchmark's.
    """
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        missing = [part for part in parts if part not in found]
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"--render needs the JSON of an earlier run, got {path}: {error}") from error
    if missing:
        raise UsageError(
            f"--render needs the JSON of an earlier run of this benchmark, got {path} without {missing[0]}"
        )
    return found


def split(parse: Callable[[str], str]) -> Callable[[str], Sequence[str]]:
    """Words separated by commas."""
    return lambda words: [parse(word) for word in words.split(",")]


def _told(call: Callable[[], object]) -> str:
    """A ValueError's own words instead of argparse's "invalid value"."""
    try:
        return str(call())
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
