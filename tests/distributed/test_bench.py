"""``qwenlinear bench guard`` at a tiny size: a row per collective, both files, and a limit that holds."""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from qwenlinear.bench import guard, guard_report, guard_worker
from qwenlinear.cli import main


def test_bench_guard_writes_table_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "guard", "--backend", "gloo", "--mib", "1/1024", "0.01", "--live", "0", "3", "--rounds", "2"]
    words += ["--repeats", "2", "--only", "all_reduce", "barrier", "--out", str(tmp_path)]
    assert main(words) == 0
    results = json.loads((tmp_path / "guard-gloo.json").read_text())
    assert "--mib 1/1024 0.01" in results["command"]
    measured = [r for r in results["latency"] if r["collective"] != "counters"]
    rows = {(r["collective"], r["bytes"], r["live"]): r for r in measured}
    assert set(rows) == set(itertools.product(["all_reduce", "barrier"], [1024, 10485], [0, 3]))
    for row in rows.values():
        assert min(row["bare"], row["guarded"], row["forced"], row["baseline"]) > 0
    assert results["errors"] == {}
    text = (tmp_path / "guard-gloo.md").read_text()
    assert "| all_reduce | 1 KiB | 3 |" in text
    assert "| 1 KiB | 3 | fixed |" in text
    shown = capsys.readouterr().out
    assert all(row["collective"] in shown for row in results["latency"] if "bare" in row)


def test_the_names_to_choose_from_are_those_that_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard_worker.dist, "get_rank", lambda: 0)
    assert tuple(guard_worker.collectives(2, torch.device("cpu"), 4)) == guard.COLLECTIVES


def test_a_part_that_runs_past_the_limit_is_reported(tmp_path: Path) -> None:
    assert main(["bench", "guard", "--backend", "gloo", "--limit", "1", "--out", str(tmp_path)]) == 1
    assert "--limit 1 s is used up" in (tmp_path / "guard-gloo.md").read_text()


def test_a_full_device_is_told_rank_by_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bare, one rank fails and the other waits for it until it is killed: an outcome, and no further environment is tried."""
    answers = {
        False: [
            {"results": {"oom": {"guarded": False, "environment": {}, "outcome": "Error: no memory"}}, "errors": {}},
            {"results": {}, "errors": {"start": "no output", "limit": "killed after 40 s"}},
        ],
        True: [{"results": {"oom": {"guarded": True, "environment": {}, "outcome": "works, sum 2"}}, "errors": {}}] * 2,
    }
    sizes = []

    def launch(module: str, size: int, config: dict[str, Any], settings: dict[str, str], limit: float) -> list[Any]:
        sizes.append(size)
        return answers[config["guarded"]]

    monkeypatch.setattr(guard.ranks, "launch", launch)
    parser = argparse.ArgumentParser()
    guard.add_arguments(parser)
    bench = guard._Bench(parser.parse_args(["--backend", "nccl", "--world-size", "2", "--out", str(tmp_path)]))
    bench.out_of_memory()
    told = [(row["guarded"], row["rank"], row["outcome"]) for row in bench.results["oom"]]
    assert told == [
        (False, 0, "Error: no memory"),
        (False, 1, "no result: killed after 40 s"),
        (True, 0, "works, sum 2"),
        (True, 1, "works, sum 2"),
    ]
    assert (sizes, bench.results["errors"]) == ([2, 2], {})


def test_the_report_shows_every_part() -> None:
    figures = {"driver_free_MiB": 3.0, "reserved_MiB": 90.0}
    results = {
        "backend": "nccl",
        "world_size": 1,
        "machine": "a GPU",
        "torch": "2.0",
        "command": "bench",
        "latency": [{"collective": "gather", "bytes": 2**26, "live": 0, "expandable": True, "error": "no gather"}],
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
                "rank": 0,
                "environment": {"A": "1"},
                "outcome": "Error: no memory|\nmore",
                "before": figures,
            },
            {
                "guarded": True,
                "rank": 1,
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
        "| gather | 64 MiB | 0 | no gather |",
        "| reduce | 8.0 | 0.0 | 2.0 |",
        "| reduce | no reduce |",
        "| bare | 0 | A=1 | 3.0 | 90.0 |",
        "| guarded | 1 | NCCL's defaults | 3.0 | 90.0 | 3.0 | 90.0 | works, sum 1 |",
        "## Failed: latency",
    ):
        assert part in text, part
