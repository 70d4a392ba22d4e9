"""``qwenlinear bench guard`` at a tiny size: a row per collective, both files, and a limit that holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from qwenlinear.bench import guard, guard_report, guard_worker
from qwenlinear.cli import main


def test_bench_guard_writes_table_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "guard", "--backend", "gloo", "--mib", "0.01", "--live", "0", "3", "--rounds", "2"]
    words += ["--repeats", "2", "--only", "all_reduce", "barrier", "--out", str(tmp_path)]
    assert main(words) == 0
    results = json.loads((tmp_path / "guard-gloo.json").read_text())
    rows = {(r["collective"], r["live"]): r for r in results["latency"] if r["collective"] != "counters"}
    assert set(rows) == {("all_reduce", 0), ("all_reduce", 3), ("barrier", 0), ("barrier", 3)}
    for row in rows.values():
        assert min(row["bare"], row["guarded"], row["forced"], row["baseline"]) > 0
    assert results["errors"] == {}
    text = (tmp_path / "guard-gloo.md").read_text()
    assert "| all_reduce | 3 |" in text
    assert text.strip() in capsys.readouterr().out


def test_the_names_to_choose_from_are_those_that_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard_worker.dist, "get_rank", lambda: 0)
    assert tuple(guard_worker.collectives(2, torch.device("cpu"), 4)) == guard.COLLECTIVES


def test_a_part_that_runs_past_the_limit_is_reported(tmp_path: Path) -> None:
    assert main(["bench", "guard", "--backend", "gloo", "--limit", "1", "--out", str(tmp_path)]) == 1
    assert "--limit 1 s is used up" in (tmp_path / "guard-gloo.md").read_text()


def test_the_report_shows_every_part() -> None:
    figures = {"driver_free_MiB": 3.0, "reserved_MiB": 90.0}
    results = {
        "backend": "nccl",
        "world_size": 1,
        "machine": "a GPU",
        "torch": "2.0",
        "command": "bench",
        "latency": [{"collective": "gather", "live": 0, "expandable": True, "error": "no gather"}],
        "driver": [
            {
                "communicator": "fresh",
                "collective": "reduce",
                "first_MiB": 8.0,
                "later_MiB": 0.0,
                "larger_MiB": 2.0,
            },
            {"communicator": "shared", "collective": "reduce", "error": "no reduce"},
        ],
        "oom": [
            {
                "guarded": False,
                "environment": {"A": "1"},
                "outcome": "Error: no memory|\nmore",
                "before": figures,
            },
            {
                "guarded": True,
                "environment": {},
                "outcome": "works, sum 1",
                "before": figures,
                "after": figures,
            },
        ],
        "errors": {"latency": "Traceback"},
    }
    text = guard_report.markdown(results)
    for part in (
        "| gather | 0 | no gather |",
        "| reduce | 8.0 | 0.0 | 2.0 |",
        "| reduce | no reduce |",
        "| bare | A=1 | 3.0 | 90.0 |",
        "| guarded | NCCL's defaults | 3.0 | 90.0 | 3.0 | 90.0 | works, sum 1 |",
        "## Failed: latency",
    ):
        assert part in text, part
