"""Tables of a benchmark: printed for the terminal's width, written as Markdown, under the machine they belong to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from qwenlinear import terminal
from qwenlinear.bench.machine import header

Results = dict[str, Any]
Table = tuple[str, list[str], list[list[str]]]  # title, head, body


def show(results: Results, tables: list[Table]) -> None:
    """Print tables for the width of the terminal, with rich where it is installed.

    Args:
        results: what a run gathered: ``machine``, ``command`` and ``errors`` are read.
        tables: title, head, body each.
    """
    print(terminal.fold(header(results["machine"])))
    for title, head, body in tables:
        terminal.show_table(title, head, body)
    for part, text in results["errors"].items():
        print(terminal.fold(f"{part}: {text}"))


def markdown(results: Results, tables: list[Table]) -> str:
    """The tables as Markdown, under a line that says where they were measured and the command that did.

    Args:
        results: what a run gathered.
        tables: title, head, body each.

    Returns:
        Markdown.
    """
    lines = [f"{header(results['machine'])}.", "", f"    {results['command']}"]
    for title, head, body in tables:
        lines += ["", f"**{title}**", "", f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
        lines += [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in body]
    return "\n".join(lines)


def reason(text: str | None) -> str:
    """Of a traceback the exception's words; of one with a list of reasons, such as a kernel's refusal, the reasons.

    Args:
        text: a formatted traceback.

    Returns:
        One line of at most 160 characters.

    Example:
        >>> reason("Traceback\\n  File\\nUnsupportedCall: cannot run:\\n  - one\\n  - two\\n")
        'one; two'
    """
    lines = str(text).strip().splitlines()
    last = next(n for n in reversed(range(len(lines))) if lines[n][:1].strip())
    reasons = [line.strip().removeprefix("- ") for line in lines[last + 1 :]]
    return "; ".join(reasons or [lines[last]])[:160]


def save(results: Results, path: Path) -> None:
    """Write results as JSON, so that tables can be laid out again any time.

    Args:
        results: what a run gathered.
        path: the file; its folder is made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")


def can_draw() -> bool:
    """Whether matplotlib is installed; readies it for files, and says so where it is not."""
    try:
        import matplotlib
    except ImportError:
        print("no plots: pip install matplotlib")
        return False
    matplotlib.use("Agg")
    return True


def last_line(text: str) -> str:
    """What a traceback says in the end; any other text as it is, on one line."""
    text = text.strip()
    return text.splitlines()[-1] if "Traceback" in text else " ".join(text.split())


# Blue, orange, green, vermilion, purple, sky, black, yellow: Okabe and Ito's colours, told apart by everyone.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000", "#F0E442")

BELOW: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.14), "ncol": 2, "frameon": False}
"""Where a legend covers no line."""
