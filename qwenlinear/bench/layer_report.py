"""The tables and pictures of ``qwenlinear bench layer``, from its results alone, so that they can be laid out again any time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qwenlinear.bench import tables as shared
from qwenlinear.bench.layer_gate import worse
from qwenlinear.bench.tables import BELOW, COLOURS, Results, Table, can_draw, last_line

MODES = ("forward", "forward+backward")
PICTURES = ("floor", "flat")
_PEERS = ("Transformers", "FLA's GatedDeltaNet", "common composition, FLA")


def show(results: Results) -> None:
    """Print the tables for the width of the terminal."""
    shared.show(results, tables(results))


def markdown(results: Results) -> str:
    """The tables as Markdown, under a line that says where they were measured."""
    return shared.markdown(results, tables(results))


def write(results: Results, folder: Path) -> None:
    """Write JSON, Markdown and, where matplotlib is installed, pictures."""
    shared.save(results, folder / "layer.json")
    (folder / "layer.md").write_text(markdown(results) + "\n")
    if can_draw():
        for kind in PICTURES:
            plot(results, folder / f"layer-{kind}.png", kind)


# ---- tables --------------------------------------------------------------------------------------------------------


def tables(results: Results) -> list[Table]:
    """Every table that the results have rows for."""
    found = [_gate(results["gate"])] if results["gate"] else []
    groups = {(_case(row), row["mode"]) for row in results["times"]}
    for case, mode in sorted(groups, key=lambda group: _first(results["times"], *group)):
        rows = [row for row in results["times"] if (_case(row), row["mode"]) == (case, mode)]
        memory = {r["contender"]: r for r in results["memory"] if (_case(r), r["mode"]) == (case, mode)}
        found.append(_times(f"{case}, {mode}, {_size(results)}", rows, memory, results))
    found += _floors(results)
    for kind in ("dense", "packed"):
        rows = [row for row in results["gradients"] if row["kind"] == kind]
        if rows:
            found.append(_gradients(kind, rows, results))
    if results["flat"]:
        found.append(_flat(results["flat"]))
    if results["ops"]:
        found.append(_ops(results["ops"]))
    reasons = _reasons(results["times"])
    return [*found, reasons] if reasons[2] else found


def _size(results: Results) -> str:
    size = results["size"]
    return f"hidden {size['hidden']}, heads {size['heads']} of {size['head_dim']}, {results['dtype']}"


def _case(row: dict[str, Any]) -> str:
    return f"T={row['length']}" if row["documents"] == 1 else f"{row['documents']} x {row['length']} packed"


def _first(rows: list[dict[str, Any]], case: str, mode: str) -> int:
    return next(n for n, row in enumerate(rows) if (_case(row), row["mode"]) == (case, mode))


def _gate(rows: list[dict[str, Any]]) -> Table:
    body = [[row["contender"], _share(row, "dense"), _share(row, "packed")] for row in rows]
    title = "Gate: the largest error of output or a gradient against float64, as a share of what is allowed (where)"
    return title, ["", "dense", "packed"], body


def _share(row: dict[str, Any], kind: str) -> str:
    entry = row[kind]
    if isinstance(entry, str):
        return "failed" if "Traceback" in entry else "does not run"
    return f"{entry:.2f} ({row['worst'][kind]})" + ("" if kind in row["passed"] else " REFUSED")


def _times(title: str, rows: list[dict[str, Any]], memory: dict[str, Any], results: Results) -> Table:
    """A contender a line: time, how far above its floor, and how many times as fast as its peers."""
    peers = [peer for peer in _PEERS if any(peer in row.get("against", {}) for row in rows)]
    head = [
        "",
        "ms",
        "of its floor",
        *(f"times as fast as {peer}" for peer in peers),
        "as the composition with its kernel",
    ]
    if memory:
        head += ["peak MiB", "of the composition's"]
    body = []
    for row in rows:
        name, twin = row["contender"], _composition(row["contender"], results)
        if "ms" not in row:
            body.append([name, "-", *["-"] * (len(head) - 2)])
            continue
        against = row["against"]
        cells = [name, f"{row['ms']:.3f}", f"{row['over_floor']:.2f}" if "over_floor" in row else "-"]
        cells += [f"{against[peer]:.2f}" if peer in against else "-" for peer in peers]
        cells.append(f"{against[twin]:.2f}" if twin in against else "-")
        if memory:
            own, theirs = (memory.get(who or "", {}).get("peak_mib") for who in (name, twin))
            cells += ["-" if own is None else f"{own:.0f}", f"{own / theirs:.2f}" if own and theirs else "-"]
        body.append(cells)
    return title, head, body


def _composition(contender: str, results: Results) -> str | None:
    """The composition with the same kernel, for our own rows."""
    if not contender.startswith("qwenlinear"):
        return None
    kernel = results["kernels"][contender]
    return next((n for n, k in results["kernels"].items() if k == kernel and n.startswith("common composition")), None)


def _floors(results: Results) -> list[Table]:
    """What the floor is made of, once a case, mode and kernel."""
    body = []
    for row in results["times"]:
        if "floor_total_ms" in row and row["contender"].startswith("qwenlinear") and "called" not in row["contender"]:
            parts = [f"{row[f'floor_{part}_ms']:.3f}" for part in ("products", "kernel", "bytes", "total")]
            body.append([f"{_case(row)}, {row['mode']}", results["kernels"][row["contender"]], *parts])
    if not body:
        return []
    formulas = "; ".join(f"{op}: {formula}" for op, formula in results["formulas"].items())
    title = f"The floor, ms, measured in the same rounds (bytes a token: {formulas})"
    return [(title, ["", "kernel", "matrix products", "kernel alone", "bytes over copy bandwidth", "sum"], body)]


def _gradients(kind: str, rows: list[dict[str, Any]], results: Results) -> Table:
    """Parameters down, contenders across; ours in bold where they are clearly worse than the composition with the same kernel."""
    names = list(dict.fromkeys(row["contender"] for row in rows))
    errors = {(row["contender"], row["of"]): row for row in rows}
    body = []
    for of in dict.fromkeys(row["of"] for row in rows):
        cells = [of if of == "output" else f"gradient of {of}"]
        for name in names:
            own, twin = errors[name, of], errors.get((_composition(name, results) or "", of))
            text = f"{own['error']:.2e}"
            cells.append(f"**{text}**" if twin is not None and worse(own["each"], twin["each"]) else text)
        body.append(cells)
    how = f"{rows[0]['tokens']} tokens, root mean square of {len(rows[0]['each'])} draws"
    title = f"Relative error against float64, {kind}, {how} (bold: clearly over 1.05 x the composition's)"
    return title, ["", *names], body


def _flat(rows: list[dict[str, Any]]) -> Table:
    """Tokens across, and the largest over the smallest."""
    tokens = sorted({row["tokens"] for row in rows})
    body = []
    for name in dict.fromkeys(row["contender"] for row in rows):
        for mode in MODES:
            own = {row["tokens"]: row for row in rows if (row["contender"], row["mode"]) == (name, mode)}
            for key, what, scale in (("ns_a_token", "ns a token", 1.0), ("bytes_a_token", "KiB a token", 1024.0)):
                values = [own[T][key] / scale for T in tokens if key in own.get(T, {})]
                if values:
                    cells = [f"{own[T][key] / scale:.1f}" if key in own.get(T, {}) else "-" for T in tokens]
                    body.append([f"{name}, {mode}: {what}", *cells, f"{max(values) / min(values):.2f}"])
    title = "Time and peak memory a token (memory without the weights' gradients)"
    return title, ["", *(f"T={T}" for T in tokens), "largest / smallest"], body


def _ops(rows: list[dict[str, Any]]) -> Table:
    body = []
    for row in rows:
        cells = ["-"] * 4
        if "ms" in row:
            cells = [f"{row['ms']:.3f}", f"{row['gb_s']:.0f}", f"{row['copy_gb_s']:.0f}", f"{100 * row['share']:.0f} %"]
        body.append([f"{row['op']}, {_case(row)}", row["form"], f"{row['bytes'] / 1e6:.1f}", *cells])
    head = ["", "form", "MB that must move", "ms", "GB/s", "a copy of as many, GB/s", "of the copy"]
    return "Prologue and epilogue alone", head, body


def _reasons(rows: list[dict[str, Any]]) -> Table:
    """Why something was not timed, each reason once."""
    body: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if "error" in row:
            body.setdefault((row["contender"], last_line(str(row["error"]))), []).append(f"{_case(row)} {row['mode']}")
    return "Not timed", ["", "cases", "why"], [[name, "; ".join(cases), why] for (name, why), cases in body.items()]


# ---- pictures ------------------------------------------------------------------------------------------------------


def plot(results: Results, path: Path, kind: str) -> bool:
    """Draw one picture.

    Args:
        results: what the benchmark found.
        path: the file.
        kind: ``"floor"``, everybody beside the floor; ``"flat"``, time and memory a token over T.

    Returns:
        Whether there was anything to draw.
    """
    return _plot_floor(results, path) if kind == "floor" else _plot_flat(results, path)


def _plot_floor(results: Results, path: Path) -> bool:
    from matplotlib import pyplot

    rows = [row for row in results["times"] if "ms" in row]
    panels = list(dict.fromkeys((_case(row), row["mode"]) for row in rows))
    if not panels:
        return False
    figure, axes = pyplot.subplots(len(panels), 1, figsize=(9, 0.6 + 2.6 * len(panels)), squeeze=False)
    for axis, (case, mode) in zip(axes[:, 0], panels, strict=True):
        own = [row for row in rows if (_case(row), row["mode"]) == (case, mode)]
        bars: list[tuple[str, list[tuple[float, str]]]] = []
        for row in own:
            bars.append(
                (row["contender"], [(row["ms"], COLOURS[3 if row["contender"].startswith("qwenlinear") else 5])])
            )
            if (
                row["contender"].startswith("qwenlinear")
                and "called" not in row["contender"]
                and "floor_total_ms" in row
            ):
                parts = [(row[f"floor_{p}_ms"], COLOURS[n]) for n, p in enumerate(("products", "kernel", "bytes"))]
                bars.append((f"its floor ({results['kernels'][row['contender']]})", parts))
        for y, (_, parts) in enumerate(bars):
            left = 0.0
            for width, colour in parts:
                axis.barh(y, width, left=left, color=colour, height=0.7)
                left += width
            axis.text(left, y, f" {left:.2f}", va="center", fontsize=7)
        axis.set_yticks(range(len(bars)), [name for name, _ in bars], fontsize=7)
        axis.invert_yaxis()
        axis.set(xlabel="ms", title=f"{case}, {mode}", xlim=(0.0, 1.08 * axis.get_xlim()[1]))
        axis.grid(alpha=0.3, axis="x")
    legend = [(COLOURS[0], "matrix products"), (COLOURS[1], "kernel alone"), (COLOURS[2], "bytes over copy bandwidth")]
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=colour, label=label) for colour, label in legend]
    above = {"loc": "lower left", "bbox_to_anchor": (0.0, 1.12), "ncol": 3, "frameon": False}
    axes[0][0].legend(handles=handles, fontsize=8, title="the floor's parts", title_fontsize=8, **above)
    return _finish(figure, path, results)


def _plot_flat(results: Results, path: Path) -> bool:
    from matplotlib import pyplot

    rows = results["flat"]
    if len({row["tokens"] for row in rows if "ns_a_token" in row}) < 2:
        return False
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4.4), squeeze=False)
    names = list(dict.fromkeys(row["contender"] for row in rows))
    for axis, (key, label, scale) in zip(
        axes[0], (("ns_a_token", "ns a token", 1.0), ("bytes_a_token", "KiB a token at the peak", 1024.0)), strict=True
    ):
        for name, colour in zip(names, COLOURS, strict=False):
            for mode, style in zip(MODES, ("o:", "o-"), strict=True):
                found = [r for r in rows if (r["contender"], r["mode"]) == (name, mode) and key in r]
                points = sorted((r["tokens"], r[key] / scale) for r in found)
                if points:
                    axis.plot(*zip(*points, strict=True), style, color=colour, label=f"{name}, {mode}", markersize=4)
        axis.set(xscale="log", xlabel="tokens", ylabel=label)
        axis.set_ylim(bottom=0)
        axis.set_xticks(ticks := sorted({row["tokens"] for row in rows}), [str(T) for T in ticks], fontsize=7)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=7, **BELOW)
    return _finish(figure, path, results)


def _finish(figure: Any, path: Path, results: Results) -> bool:
    from matplotlib import pyplot

    figure.suptitle(f"{results['machine']['device']}, {_size(results)}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True
