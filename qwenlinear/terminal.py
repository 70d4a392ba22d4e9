"""What commands print, laid out for the width of a terminal: lines folded between words, tables that are never cut.

A table that is too wide first folds its words, then it is split into several, each with the first column again, as pandas
does it. Piped output is laid out like that of a terminal of 80 columns, or of as many as the variable COLUMNS says.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator, Sequence

Row = Sequence[str]
_WORD = 28  # a cell up to this long, such as a number with its ratio, stays on one line


def width() -> int:
    """How many columns there are: the terminal's, else COLUMNS, else 80; at least 40."""
    return max(40, shutil.get_terminal_size((80, 24)).columns)


def fold(text: str, columns: int | None = None) -> str:
    """Fold lines between words; what belongs to a line is indented below it.

    Args:
        text: any lines. A word that is longer than a line, such as a path, is not cut.
        columns: how wide; default None for the terminal's width.

    Returns:
        The lines.

    Example:
        >>> print(fold("  - needs cuda; got cpu", 16))
          - needs cuda;
              got cpu
    """
    columns, lines = width() if columns is None else columns, []
    for line in text.split("\n"):
        indent = " " * (len(line) - len(line.lstrip()) + (4 if line.lstrip().startswith("- ") else 2))
        folded = textwrap.wrap(line, columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        lines += folded or [line]
    return "\n".join(lines)


def show_table(title: str, head: Row, body: Sequence[Row]) -> None:
    """Print a table, with rich where it is installed.

    Args:
        title: stands above it.
        head: names of the columns.
        body: rows of as many cells.
    """
    try:
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table
    except ImportError:
        print(fold(title) + "\n" if title else "", end="")
        print(plain(head, body))
        return
    console = Console(width=width())
    if title:
        console.print(f"[italic]{escape(fold(title))}[/italic]", highlight=False, soft_wrap=True)
    for some, rows, widths in _pieces(head, body, width(), between=3, around=1):
        table = Table()
        for name, columns in zip(some, widths, strict=True):
            table.add_column(escape(name), width=columns, overflow="fold")
        for row in rows:
            table.add_row(*map(escape, row))
        console.print(table)


def plain(head: Row, body: Sequence[Row], columns: int | None = None) -> str:
    """A table in plain text.

    Args:
        head: names of the columns.
        body: rows of as many cells.
        columns: how wide; default None for the terminal's width.

    Returns:
        Lines; pieces of a table that was split have an empty line between them.

    Example:
        >>> print(plain(["", "ms"], [["one", "1.5"], ["twelve", "22.5"]], 40))
                ms
        ------  ----
        one     1.5
        twelve  22.5
    """
    pieces = []
    for some, rows, widths in _pieces(head, body, width() if columns is None else columns, between=2, around=-2):
        lines = [*_lines(some, widths), "  ".join("-" * size for size in widths)]
        for row in rows:
            lines += _lines(row, widths)
        pieces.append("\n".join(lines))
    return "\n\n".join(pieces)


def show_markdown(text: str) -> None:
    """Print Markdown, its tables and long lines laid out; a line that is indented by four is a command and stays.

    Args:
        text: what also goes into a file.
    """
    lines = text.split("\n")
    at = 0
    while at < len(lines):
        if lines[at].startswith("|") and at + 1 < len(lines) and lines[at + 1].startswith("| ---"):
            end = next((n for n in range(at, len(lines)) if not lines[n].startswith("|")), len(lines))
            head, _, *body = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[at:end]]
            body = [[*row, *[""] * len(head)][: len(head)] for row in body]
            show_table("", head, body)
            at = end
        else:
            print(lines[at] if lines[at].startswith("    ") else fold(lines[at]))
            at += 1


# ---- how wide each column is ---------------------------------------------------------------------------------------


def _pieces(
    head: Row, body: Sequence[Row], columns: int, between: int, around: int
) -> Iterator[tuple[Row, list[Row], list[int]]]:
    """A table as one or several: head, body and the columns' widths of each. ``between`` columns and ``around`` the table
    stand lines and blanks."""
    least = [max(_least(name, 0), *(_least(row[n], _WORD) for row in body), 1) for n, name in enumerate(head)]
    whole = [max(len(name), *(len(row[n]) for row in body), 1) for n, name in enumerate(head)]
    room = columns - around
    start = 1
    while start < len(head) or len(head) == 1:
        end, taken = start, least[0] + between
        while end < len(head) and (end == start or taken + least[end] + between <= room):
            taken += least[end] + between
            end += 1
        chosen = [0, *range(start, end)]
        widths = _shrunk([whole[n] for n in chosen], [least[n] for n in chosen], room - between * len(chosen))
        yield [head[n] for n in chosen], [[row[n] for n in chosen] for row in body], widths
        if end == len(head):
            return
        start = end


def _least(text: str, whole: int) -> int:
    """How narrow a text may be: itself where it is that short, else its longest word."""
    return len(text) if len(text) <= whole else max(map(len, text.split()), default=0)


def _shrunk(widths: list[int], least: list[int], room: int) -> list[int]:
    """Widths that fit into the room: the widest that may give way does so first. At last words are cut."""
    widths = list(widths)
    while sum(widths) > room:
        spare = [n for n in range(len(widths)) if widths[n] > least[n]] or [n for n, w in enumerate(widths) if w > 8]
        if not spare:
            break
        widths[max(spare, key=lambda n: widths[n])] -= 1
    return widths


def _lines(cells: Row, widths: Sequence[int]) -> list[str]:
    """One row as as many lines as its fullest cell takes."""
    folded = [textwrap.wrap(cell, size) or [""] for cell, size in zip(cells, widths, strict=True)]
    height = max(map(len, folded))
    rows = [[cell[n] if n < len(cell) else "" for cell in folded] for n in range(height)]
    return ["  ".join(cell.ljust(size) for cell, size in zip(row, widths, strict=True)).rstrip() for row in rows]
