"""The tables and the picture of ``qwenlinear bench decode``, from its results alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qwenlinear.bench import tables as shared
from qwenlinear.bench.tables import BELOW, COLOURS, Results, Table, can_draw, last_line


def show(results: Results) -> None:
    """Print the tables for the width of the terminal."""
    shared.show(results, tables(results))


def markdown(results: Results) -> str:
    """The tables as Markdown, under a line that says where they were measured."""
    return shared.markdown(results, tables(results))


def write(results: Results, folder: Path) -> None:
    """Write JSON, Markdown and, where matplotlib is installed, the picture."""
    shared.save(results, folder / "decode.json")
    (folder / "decode.md").write_text(markdown(results) + "\n")
    if can_draw():
        plot(results, folder / "decode-batch.png")


def tables(results: Results) -> list[Table]:
    """Every table that the results have rows for."""
    size = results["size"]
    sizes = f"hidden {size['hidden']}, heads {size['heads']} of {size['head_dim']}, {results['dtype']}"
    found = [_gate(results["gate"])] if results["gate"] else []
    for graph in (True, False):
        rows = [row for row in results["times"] if row["graph"] is graph]
        if any("us" in row for row in rows):
            how = "CUDA graph" if graph else "eager"
            found.append(_times(f"One token of one layer, {how}, {sizes}, {results['layers']} layers in turn", rows))
    reasons = _reasons(results["times"])
    return [*found, reasons] if reasons[2] else found


def _gate(rows: list[dict[str, Any]]) -> Table:
    body = []
    for row in rows:
        found = f"{row['share']:.2f}" + ("" if row["passed"] else " REFUSED") if "share" in row else "does not run"
        body.append([row["contender"], found])
    return "Gate: error of decoded tokens against float64, as a share of what is allowed", ["", "share"], body


def _times(title: str, rows: list[dict[str, Any]]) -> Table:
    """Batch down, contenders across: microseconds, and how far above the floor."""
    names = list(dict.fromkeys(row["contender"] for row in rows if "us" in row))
    body = []
    for batch in sorted({row["batch"] for row in rows}):
        own = {row["contender"]: row for row in rows if row["batch"] == batch and "us" in row}
        if not own:
            continue
        one = next(iter(own.values()))
        cells = [str(batch), f"{one['floor_us']:.1f} ({one['floor_mb']:.1f} MB)"]
        cells += [_cell(own[name]) if name in own else "-" for name in names]
        body.append(cells)
    stale = any(row.get("goes_on") is False for row in rows)
    note = "; *: a replay starts from the same state again" if stale else ""
    return f"{title}: us (of the floor){note}", ["batch", "byte floor, us", *names], body


def _cell(row: dict[str, Any]) -> str:
    return f"{row['us']:.1f} ({row['over_floor']:.2f}){'*' if row.get('goes_on') is False else ''}"


def _reasons(rows: list[dict[str, Any]]) -> Table:
    body: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if "error" in row:
            how = f"batch {row['batch']}{' graph' if row['graph'] else ''}"
            body.setdefault((row["contender"], last_line(str(row["error"]))), []).append(how)
    return "Not timed", ["", "cases", "why"], [[name, "; ".join(cases), why] for (name, why), cases in body.items()]


def plot(results: Results, path: Path) -> bool:
    """Time of a step against batch, with the byte floor.

    Args:
        results: what the benchmark found.
        path: the picture.

    Returns:
        Whether there were two batch sizes to draw.
    """
    from matplotlib import pyplot

    rows = [row for row in results["times"] if "us" in row]
    if len({row["batch"] for row in rows}) < 2:
        return False
    figure, axis = pyplot.subplots(figsize=(7, 5.2))
    floor = sorted({row["batch"]: row["floor_us"] for row in rows}.items())
    axis.plot(*zip(*floor, strict=True), "--", color="#000000", label="byte floor")
    names = list(dict.fromkeys(row["contender"] for row in rows))
    for name, colour in zip(names, COLOURS, strict=False):
        for graph, style in ((True, "s-"), (False, "o:")):
            own = [row for row in rows if (row["contender"], row["graph"]) == (name, graph)]
            points = sorted((row["batch"], row["us"]) for row in own)
            if points:
                label = f"{name}, CUDA graph" if graph else name
                axis.plot(*zip(*points, strict=True), style, color=colour, label=label, markersize=4)
    axis.set(xscale="log", yscale="log", xlabel="batch", ylabel="us a token of one layer")
    axis.set_xticks(ticks := sorted({row["batch"] for row in rows}), [str(batch) for batch in ticks])
    axis.minorticks_off()
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7, **BELOW)
    size = results["size"]
    title = f"{results['machine']['device']}, hidden {size['hidden']}, heads {size['heads']}, {results['dtype']}"
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True
