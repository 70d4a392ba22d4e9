"""One run of a benchmark: parts one after another, whatever happens to each, a time limit, results written after every part."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from qwenlinear.bench import machine, tables


class Session:
    """What a run has gathered so far.

    Args:
        device: the one measured on.
        path: the JSON file; written after every part.
        limit: seconds after which :attr:`late` holds; parts ask it before each row.
        **facts: first entries of the results.
    """

    def __init__(self, device: torch.device, path: Path, limit: float, **facts: Any) -> None:
        self.device, self.path, self.limit = device, path, limit
        self.begin = time.monotonic()
        self.results: dict[str, Any] = {
            "machine": machine.describe(device),
            "command": command(sys.argv[1:]),
            **facts,
            "errors": {},
        }

    @property
    def left(self) -> float:
        """Seconds left for this run."""
        return self.limit - (time.monotonic() - self.begin)

    def late(self, row: object) -> bool:
        """Whether the time is over; then the results say before which row it was. Writes what there is: the next row may not end.

        Args:
            row: what would come next, in words.

        Returns:
            True when it must not be begun.
        """
        over = self.left <= 0
        if over:
            self.results["errors"].setdefault("limit", f"stopped before {row}")
        tables.save(self.results, self.path)
        return over

    def part(self, name: str, part: Callable[[], None]) -> None:
        """Run one part; an exception goes into the results, which are written in any case.

        Args:
            name: of the part.
            part: what it does.
        """
        begin = time.monotonic()
        try:
            part()
        except Exception:
            self.results["errors"][name] = traceback.format_exc()
            print(self.results["errors"][name], file=sys.stderr)
        say(f"{name}: {time.monotonic() - begin:.1f} s")
        self.results["seconds"] = time.monotonic() - self.begin
        tables.save(self.results, self.path)


def say(text: str) -> None:
    """A line of progress, on the error stream."""
    print(f"# {text}", file=sys.stderr, flush=True)


def command(words: list[str]) -> str:
    """The command as another machine would run it: without the folder for its results."""
    kept = [word for before, word in zip(["", *words], words, strict=False) if "--out" not in (before, word)]
    return " ".join(["qwenlinear", *kept])
