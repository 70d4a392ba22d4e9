"""The tables and plots of ``qwenlinear bench kernels``, from its results alone, so that they can be laid out again any time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qwenlinear.bench import tables as shared
from qwenlinear.bench.tables import COLOURS, Results, Table, can_draw


def show(results: Results) -> None:
    """Print the tables for the width of the terminal."""
    shared.show(results, tables(results))


def markdown(results: Results) -> str:
    """The tables as Markdown, under a line that says where they were measured."""
    return shared.markdown(results, tables(results))


def write(results: Results, folder: Path) -> None:
    """Write JSON, Markdown and, where matplotlib is installed, plots."""
    shared.save(results, folder / "kernels.json")
    title = f"# Kernels on {results['machine']['device']}"
    (folder / "kernels.md").write_text(f"{title}\n\n{markdown(results)}\n")
    if can_draw():
        plot(results, folder / "kernels-tokens.png", "tokens")
        plot(results, folder / "kernels-documents.png", "documents")


# ---- tables --------------------------------------------------------------------------------------------------------


def tables(results: Results) -> list[Table]:
    """Every table that the results have rows for."""
    found = [_gate(results["gate"])]
    names = list(results["contenders"])
    for mode in ("forward", "forward+backward"):
        for graph in (False, True):
            rows = [row for row in results["times"] if row["mode"] == mode and row["graph"] is graph]
            if rows:
                how = "CUDA graph" if graph else "eager"
                title = f"{mode}, {results['dtype']}, {how}: median ms (times as fast as the first that ran)"
                found.append(_grid(title, rows, names, _time_cell))
    for mode in ("forward", "forward+backward"):
        rows = [row for row in results["memory"] if row["mode"] == mode]
        if rows:
            found.append(_grid(f"{mode}: peak memory over the inputs, MiB", rows, names, _memory_cell))
    if results["first_calls"]:
        found.append(_first_calls(results["first_calls"]))
    if results["overhead"]:
        found.append(_overhead(results["overhead"]))
    reasons = _reasons(results["times"])
    return [*found, reasons] if reasons[2] else found


def _gate(rows: list[dict[str, Any]]) -> Table:
    body = [
        [row["contender"], row["heads"], _figure(row["dense"]), _figure(row["packed"]), f"{row['limit']:g}"]
        for row in rows
    ]
    return "Largest relative error against float64, gradients included", ["", "heads", "dense", "packed", "limit"], body


def _figure(entry: Any) -> str:
    if isinstance(entry, str):
        return "failed" if "Traceback" in entry else "does not run"
    return f"{entry:.1e}"


def _grid(title: str, rows: list[dict[str, Any]], names: list[str], cell: Any) -> Table:
    """Cases down, contenders across."""
    cells: dict[str, dict[str, str]] = {}
    for row in rows:
        cells.setdefault(_case(row), {})[row["contender"]] = cell(row)
    used = [name for name in names if any(found.get(name, "-") != "-" for found in cells.values())]
    return title, ["", *used], [[case, *(found.get(name, "-") for name in used)] for case, found in cells.items()]


def _case(row: dict[str, Any]) -> str:
    shape = f"T={row['length']}" if row["documents"] == 1 else f"{row['documents']} x {row['length']}"
    return f"{shape}, {row['heads']}"


def _time_cell(row: dict[str, Any]) -> str:
    if "ms" not in row:
        return "-"
    digits = 3 if row["ms"] < 10 else 1
    return f"{row['ms']:.{digits}f} ({row['speedup']:.2f}x)"


def _memory_cell(row: dict[str, Any]) -> str:
    return f"{row['peak_mib']:.0f}" if "peak_mib" in row else "failed"


def _first_calls(rows: list[dict[str, Any]]) -> Table:
    body = []
    for row in rows:
        seconds = [f"{value:.2f}" for value in row.get("seconds", [])]
        body.append(
            [row["contender"], row["caches"], *seconds, *["-"] * (3 - len(seconds)), row.get("error", "")[-200:]]
        )
    head = ["", "compile caches", "first forward s", "first forward+backward s", "second s", "failure"]
    return f"First calls of a process, T={rows[0]['length']}, heads {rows[0]['heads']}", head, body


def _overhead(rows: list[dict[str, Any]]) -> Table:
    body = []
    for row in rows:
        detail = ""
        if "call_microseconds" in row:
            detail = f"{row['call_microseconds']:.0f} - {row['function_microseconds']:.0f}"
        figure = f"{row['microseconds']:.1f}" if "microseconds" in row else row["error"][-200:]
        body.append([row["of"], figure, detail])
    return "qwenlinear's own Python", ["", "us a call", "of"], body


def _reasons(rows: list[dict[str, Any]]) -> Table:
    """Why something was not timed, each reason once."""
    body: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if "error" in row:
            reason = row["error"].strip().splitlines()[-1] if "Traceback" in row["error"] else row["error"]
            where = _case(row) + (" graph" if row["graph"] else "")
            body.setdefault((row["contender"], reason), []).append(f"{where} {row['mode']}")
    flat = [[name, _short(cases), reason] for (name, reason), cases in body.items()]
    return "Not timed", ["", "cases", "why"], flat


def _short(cases: list[str]) -> str:
    return "; ".join(cases) if len(cases) <= 4 else f"{cases[0]} and {len(cases) - 1} more"


# ---- plots ---------------------------------------------------------------------------------------------------------


def plot(results: Results, path: Path, along: str) -> None:
    """Time against tokens of one sequence, or against documents of one batch.

    Args:
        results: what the benchmark found.
        path: the picture; not written where there are fewer than two points.
        along: ``"tokens"`` or ``"documents"``.
    """
    from matplotlib import pyplot

    rows = [row for row in results["times"] if "ms" in row and _belongs(row, along, results["times"])]
    if len({row[along] for row in rows}) < 2:
        return
    heads = rows[0]["heads"]
    modes = [mode for mode in ("forward", "forward+backward") if any(row["mode"] == mode for row in rows)]
    figure, axes = pyplot.subplots(1, len(modes), figsize=(5.2 * len(modes), 4.0), squeeze=False)
    for axis, mode in zip(axes[0], modes, strict=True):
        for name, colour in zip(results["contenders"], COLOURS, strict=False):
            for graph, style in ((False, "o-"), (True, "s:")):
                points = sorted(
                    (row[along], row["ms"])
                    for row in rows
                    if (row["contender"], row["mode"], row["graph"], row["heads"]) == (name, mode, graph, heads)
                )
                if points:
                    label = f"{name}, CUDA graph" if graph else name
                    axis.plot(*zip(*points, strict=True), style, color=colour, label=label, markersize=4)
        times = [row["ms"] for row in rows if row["mode"] == mode]
        axis.set(xscale="log", xlabel=along, ylabel="ms", title=mode)
        if max(times) > 30 * min(times):
            axis.set_yscale("log")
        else:
            axis.set_ylim(bottom=0)
        axis.set_xticks(ticks := sorted({row[along] for row in rows}), [str(tick) for tick in ticks], fontsize=7)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=8)
    figure.suptitle(f"{results['machine']['device']}, {results['dtype']}, heads {heads}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _belongs(row: dict[str, Any], along: str, rows: list[dict[str, Any]]) -> bool:
    """One sequence for tokens; for documents, rows of the commonest number of tokens."""
    if along == "tokens":
        return bool(row["documents"] == 1)
    packed = [other["tokens"] for other in rows if other["documents"] > 1]
    return bool(packed) and row["tokens"] == max(sorted(set(packed)), key=packed.count)
