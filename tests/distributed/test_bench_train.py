"""``qwenlinear bench train`` at a tiny size: equal losses, the guard in the path, refusals and differences told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from qwenlinear.bench import train
from qwenlinear.cli import main

TINY = ["--hidden", "16", "--heads", "1/2", "--head-dim", "8", "--packed", "2x8", "--rounds", "2", "--steps", "1"]
GUARDS = ["bare", "bare again", "probe everything", "CommMemoryPolicy"]


def test_two_ranks_train_to_equal_losses_under_every_guard(tmp_path: Path) -> None:
    words = ["bench", "train", "--backend", "gloo", "--dtype", "bfloat16", "--kernels", "torch", "flashqla"]
    assert main([*words, *TINY, "--limit", "60", "--out", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "train-gloo.json").read_text())
    assert results["errors"] == {}
    assert (results["world_size"], results["blocks"]) == (2, 4)
    measured = [row for row in results["rows"] if "guard" in row]
    assert [(row["parallel"], row["guard"]) for row in measured] == [(p, g) for p in ("ddp", "fsdp2") for g in GUARDS]
    for row in measured:
        assert row["equal_losses"], row
        assert row["losses"] == next(r["losses"] for r in measured if r["parallel"] == row["parallel"])
        assert len(row["losses"]) == 3 + 2  # warm-up, then one step a round
        assert (row["rounds"], row["step_ms"] > 0, row["tokens_per_s"] > 0) == (2, True, True)
        seen = {"ddp": "all_reduce", "fsdp2": "reduce_scatter_tensor"}[row["parallel"]]
        assert (seen in row["calls"]) == (row["guard"] in GUARDS[2:]), row["calls"]
    forced = next(row for row in measured if row["guard"] == "probe everything")
    assert all(calls == checks for calls, checks in forced["calls"].values())
    refused = [row for row in results["rows"] if row["kernel"] == "flashqla"]
    assert [row["parallel"] for row in refused] == ["ddp", "fsdp2"]
    assert all("cuda" in row["refused"] for row in refused)
    text = (tmp_path / "train-gloo.md").read_text()
    assert "| FSDP2 | torch | CommMemoryPolicy |" in text
    assert "| DDP | flashqla | refused: " in text


def _told(bare: list[float], guarded: list[float]) -> dict[str, Any]:
    sides = {"bare": bare, "CommMemoryPolicy": guarded}
    guards = {name: {"seconds": [0.2, 0.4], "losses": losses, "calls": {}} for name, losses in sides.items()}
    return {"guards": guards, "peak_mib": None}


def test_a_loss_that_differs_on_one_rank_is_an_error() -> None:
    results: dict[str, Any] = {"errors": {}}
    told = [_told([1.0, 0.5], [1.0, 0.5]), _told([1.0, 0.5], [1.0, 0.25])]
    told[1]["guards"]["CommMemoryPolicy"]["seconds"] = [0.1, 0.8]  # the slowest rank of a round counts
    rows = train._rows({"parallel": "ddp", "kernel": "fla"}, told, 1200, results)
    assert [row["equal_losses"] for row in rows] == [True, False]
    assert results["errors"] == {"fla, ddp, CommMemoryPolicy": "losses differ from the bare ones by up to 0.25"}
    assert (rows[0]["tokens_per_s"], rows[0]["to_bare"]) == (pytest.approx(4000), 1.0)
    assert (rows[1]["seconds"], rows[1]["tokens_per_s"], rows[1]["to_bare"]) == ([0.2, 0.8], pytest.approx(2400), 1.5)


def test_kernels_are_compared_step_by_step() -> None:
    rows = [
        {"parallel": "ddp", "kernel": kernel, "guard": "bare", "losses": losses}
        for kernel, losses in (("fla", [2.0, 1.0]), ("flashqla", [2.002, 1.0, 0.5]), ("torch", [2.0, 1.1]))
    ]
    results: dict[str, Any] = {"rows": rows, "losses": [], "errors": {}}
    train._compare_kernels(results)
    found = [(row["kernel"], row["against"], row["relative"]) for row in results["losses"]]
    assert found == [("flashqla", "fla", pytest.approx(1e-3)), ("torch", "fla", pytest.approx(0.1))]
    assert list(results["errors"]) == ["ddp, torch against fla"]


def test_no_round_before_the_limit_is_an_error() -> None:
    told = [_told([1.0], [1.0])]
    for side in told[0]["guards"].values():
        side["seconds"] = []
    with pytest.raises(TimeoutError, match="fla, ddp: no round before the limit"):
        train._rows({"parallel": "ddp", "kernel": "fla"}, told, 1, {"errors": {}})
