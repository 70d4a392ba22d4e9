"""The table and the plot of ``qwenlinear bench guard``."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def _setting(results: dict[str, Any]) -> str:
    name, size = {"nccl": "NCCL"}.get(results["backend"], results["backend"]), results["world_size"]
    return f"{name}, {size} rank{'s' if size > 1 else ''}"


def markdown(results: dict[str, Any]) -> str:
    """Lay the results out as a page.

    Args:
        results: what the benchmark found.

    Returns:
        Markdown.
    """
    lines = [
        f"# Memory guard, {_setting(results)}",
        "",
        f"Machine: {results['machine']}; torch {results['torch']}. Times in microseconds a call, the"
        " median of each side's batches, which take turns.",
        "",
        _WORDS,
        "",
        f"    {results['command']}",
    ]
    if results["backend"] == "gloo":
        text = "On a CPU the guard has nothing to check; the forced check reads the host's free memory here."
        lines += ["", text]
    measured = [r for r in results["latency"] if "bare" in r]
    if measured:
        text = "Ratios, as medians over all collectives, and the collective whose ratio is worst; each collective is below."
        lines += ["", "## In short", "", text, "", *_summary(measured)]
    for expandable in (False, True):
        rows = [r for r in results["latency"] if r["expandable"] is expandable and r["collective"] != "counters"]
        if rows:
            lines += [
                "",
                f"## Cost of a call{', expandable segments' if expandable else ''}",
                "",
                *_latency(rows),
            ]
    for kind in ("fresh", "shared"):
        rows = [r for r in results["driver"] if r.get("communicator") == kind]
        if rows:
            head = ["collective", "first call MiB", "20 more MiB", "5 of eight times the data MiB"]
            body = [
                [
                    r["collective"],
                    *(r.get(k, r.get("error", "")) for k in ("first_MiB", "later_MiB", "larger_MiB")),
                ]
                for r in rows
            ]
            lines += [
                "",
                f"## Taken from the driver, outside PyTorch's cache: {kind} communicator",
                "",
                *_table(head, body),
            ]
    if results["oom"]:
        lines += ["", "## PyTorch's cache holds the device", "", *_oom(results["oom"])]
    for name, text in results["errors"].items():
        lines += ["", f"## Failed: {name}", "", "```", text.rstrip(), "```"]
    return "\n".join(lines)


_WORDS = """\
*bare*: a collective of the group as it is. *guarded*: the same under `CommMemoryPolicy()`, which checks once a second here.
*control*: bare once more, to show what two equal sides differ by; its ratio and that of *guarded* are to bare. *forced
check*: guarded, with a check of the free memory at every call. *probe everything*: bare, with the driver's, the allocator's
and the host's memory read before every call. *live tensors*: how many tensors the process holds meanwhile, which makes the
allocator's figures dearer to read."""


def _latency(rows: list[Row]) -> list[str]:
    head = [
        "collective",
        "data",
        "live tensors",
        "bare",
        "guarded",
        "added",
        "ratio",
        "control",
        "forced check adds",
        "probe everything adds",
    ]
    body = []
    for r in rows:
        who = [r["collective"], _data(r["bytes"]), r["live"]]
        if "error" in r:
            body.append([*who, r["error"], "", "", "", "", "", ""])
        else:
            body.append(
                [*who, *(f"{r[key]:.1f}" for key in ("bare", "guarded", "guarded_added"))]
                + [f"{r[key]:.3f}" for key in ("guarded_ratio", "control_ratio")]
                + [f"{r[key]:.1f}" for key in ("forced_added", "baseline_added")]
            )
    return _table(head, body)


def _summary(rows: list[Row]) -> list[str]:
    """The middle and the worst of all collectives, by size and number of live tensors."""
    head = ["data", "live tensors", "segments", "guarded to bare", "worst", "bare to bare", "probe everything to bare"]
    body = []
    for data, live, expandable in sorted({(r["bytes"], r["live"], r["expandable"]) for r in rows}):
        group = [r for r in rows if (r["bytes"], r["live"], r["expandable"]) == (data, live, expandable)]
        worst = max(group, key=lambda r: float(r["guarded_ratio"]))
        ratios = {side: [r[f"{side}_ratio"] for r in group] for side in ("guarded", "control", "baseline")}
        middle = {side: f"{statistics.median(values):.3f}" for side, values in ratios.items()}
        who = [_data(data), live, "expandable" if expandable else "fixed"]
        last = f"{middle['baseline']} ({min(ratios['baseline']):.1f} to {max(ratios['baseline']):.1f})"
        worst_text = f"{worst['guarded_ratio']:.3f} ({worst['collective']})"
        body.append([*who, middle["guarded"], worst_text, middle["control"], last])
    return _table(head, body)


def _data(count: int) -> str:
    unit, size = ("MiB", 2**20) if count >= 2**20 else ("KiB", 2**10) if count >= 2**10 else ("bytes", 1)
    return f"{count / size:g} {unit}"


def _oom(rows: list[Row]) -> list[str]:
    head = [
        "side",
        "rank",
        "environment",
        "driver free before MiB",
        "cached before",
        "driver free after",
        "cached after",
        "first collective",
    ]
    body = []
    for r in rows:
        before, after = r.get("before", {}), r.get("after", {})
        figures = [m.get(k, "") for m in (before, after) for k in ("driver_free_MiB", "reserved_MiB")]
        environment = " ".join(f"{k}={v}" for k, v in r.get("environment", {}).items()) or "NCCL's defaults"
        outcome = r["outcome"].splitlines()[0][:160].replace("|", "/")
        body.append(["guarded" if r["guarded"] else "bare", r["rank"], environment, *figures, outcome])
    return _table(head, body)


def _table(head: list[str], body: list[list[Any]]) -> list[str]:
    lines = [head, ["---"] * len(head), *body]
    return ["| " + " | ".join(str(cell) for cell in line) + " |" for line in lines]


def plot(results: dict[str, Any], path: Path) -> None:
    """Draw what each side adds to a bare call, if matplotlib is installed.

    Args:
        results: what the benchmark found.
        path: where the picture goes.
    """
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [r for r in results["latency"] if "bare" in r]
    if not rows:
        return
    most = max(r["live"] for r in rows)
    data = min((r["bytes"] for r in rows), key=lambda count: abs(count - 2**20))
    kind = (most, data, rows[0]["expandable"])
    rows = [r for r in rows if (r["live"], r["bytes"], r["expandable"]) == kind]
    figure, axes = pyplot.subplots(figsize=(9, 4.5))
    sides = {
        "bare": "bare",
        "guarded": "guarded",
        "forced": "guarded, check forced",
        "baseline": "probe everything",
    }
    for i, (key, label) in enumerate(sides.items()):
        axes.bar([x + 0.2 * i for x in range(len(rows))], [r[key] for r in rows], width=0.2, label=label)
    axes.set_xticks([x + 0.3 for x in range(len(rows))], [r["collective"] for r in rows], rotation=30, ha="right")
    axes.set_ylabel("microseconds a call")
    axes.set_yscale("log")
    for axis in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        axis(lambda us, _: f"{us:g}" if f"{us:g}"[0] in "125" else "")
    axes.set_title(f"{_setting(results)}, {_data(data)}, {most} live tensors, {results['machine']}", pad=28)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncol=len(sides), frameon=False, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
