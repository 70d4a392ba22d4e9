"""bench kernels: fair turns, a gate that keeps wrong kernels out, and results that survive a failing contender."""

from __future__ import annotations

import importlib.util
import json

import pytest
import torch

from qwenlinear import TorchKernel, cli, usage
from qwenlinear.bench import kernels, kernels_report, session, worker
from qwenlinear.bench.cases import Case, sample
from qwenlinear.bench.contenders import NAMES, OfKernel, contender
from qwenlinear.bench.gate import check
from qwenlinear.bench.overhead import measure
from qwenlinear.bench.timing import Timing, interleave

CPU = torch.device("cpu")


class Wrong(TorchKernel):
    """Off by a thousandth; registered nowhere, named by its path."""

    def _chunk(self, inputs):
        o, state = super()._chunk(inputs)
        return o * 1.01, state


class Leaky(TorchKernel):
    """Right on one sequence, forgets boundaries."""

    def _chunk(self, inputs):
        from dataclasses import replace

        return super()._chunk(replace(inputs, cu_seqlens=None))


class Raises(TorchKernel):
    def _chunk(self, inputs):
        raise RuntimeError("out of luck")


def _run(tmp_path, *words: str) -> tuple[int, dict]:
    common = ["--heads", "1/2", "--sizes", "8", "8", "--rounds", "3", "--device", "cpu", "--out", str(tmp_path)]
    status = cli.main(["bench", "kernels", *common, *words])
    return status, json.loads((tmp_path / "kernels.json").read_text())


def test_contenders_take_turns() -> None:
    order = []
    interleave({name: lambda name=name: order.append(name) for name in "abc"}, CPU, rounds=3, least=0.0)
    assert "".join(order)[-9:] == "abcbcacab"  # behind the warm-up


def test_one_that_raises_leaves_its_words_and_the_others_go_on() -> None:
    def fails() -> None:
        raise RuntimeError("no such kernel")

    timings = interleave({"bad": fails, "good": lambda: None}, CPU, rounds=4)
    assert timings["bad"].error is not None
    assert "no such kernel" in timings["bad"].error
    assert timings["bad"].seconds == []
    assert len(timings["good"].seconds) == 4


def test_ratio_is_of_times_of_one_round() -> None:
    assert Timing([1.0, 2.0, 10.0]).ratio(Timing([2.0, 4.0, 20.0])) == 2.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_gate_lets_a_right_kernel_in(dtype) -> None:
    row = check(contender("torch"), (2, 4), (8, 6), CPU, dtype)
    assert row["passed"] == ["dense", "packed"]
    assert 0 < max(row["dense"], row["packed"]) <= row["limit"]


def test_the_gate_keeps_wrong_kernels_out() -> None:
    assert check(OfKernel(Wrong()), (2, 4), (8, 8), CPU, torch.float32)["passed"] == []
    leaky = check(OfKernel(Leaky()), (2, 4), (8, 8), CPU, torch.float32)
    assert leaky["passed"] == ["dense"]
    raises = check(OfKernel(Raises()), (2, 4), (8, 8), CPU, torch.float32)
    assert raises["passed"] == []
    assert "out of luck" in raises["dense"]
    refuses = check(contender("flashqla"), (2, 4), (8, 8), CPU, torch.float32)
    assert refuses["passed"] == []
    assert "[device]" in refuses["dense"]


def test_transformers_fallback_is_called_as_it_is() -> None:
    pytest.importorskip("transformers")
    row = check(contender("transformers"), (2, 4), (8, 6), CPU, torch.float32)
    assert row["passed"] == ["dense", "packed"]


def test_a_run_from_end_to_end(tmp_path, capsys) -> None:
    words = ["--tokens", "20", "40", "--packed", "4x10", "2x20", "--contenders", "torch", "flashqla"]
    status, results = _run(tmp_path, *words, "--parts", "times", "overhead")
    assert status == 0
    timed = [row for row in results["times"] if "ms" in row]
    assert len(timed) == 8  # four cases, two modes
    assert {row["contender"] for row in timed} == {"TorchKernel"}
    assert all(row["speedup"] == 1.0 and row["rounds"] == 3 for row in timed)
    assert "[device]" in next(row["error"] for row in results["times"] if row["contender"] == "FlashQLAKernel")
    assert results["errors"] == {}
    shown = capsys.readouterr().out
    assert "TorchKernel" in shown
    assert (tmp_path / "kernels.md").read_text().count("| T=20, 1/2 |") == 2
    if importlib.util.find_spec("matplotlib") is not None:
        for along in ("tokens", "documents"):
            assert (tmp_path / f"kernels-{along}.png").stat().st_size > 1000


def test_a_wrong_kernel_is_not_timed(tmp_path) -> None:
    words = ["--tokens", "20", "--packed", "--parts", "times", "--contenders", "torch", f"{__name__}:Wrong"]
    status, results = _run(tmp_path, *words)
    assert status == 1
    (row, _) = [row for row in results["times"] if row["contender"] == "Wrong"]
    assert "ms" not in row
    assert row["error"].startswith("wrong against float64")


def test_a_run_stops_at_its_limit(tmp_path) -> None:
    _, results = _run(
        tmp_path, "--tokens", "20", "--packed", "--parts", "times", "--contenders", "torch", "--limit", "1e-9"
    )
    assert results["times"] == []
    assert results["errors"]["limit"].startswith("stopped before T=20")


def test_results_can_be_laid_out_again(tmp_path) -> None:
    _run(tmp_path, "--tokens", "20", "40", "--packed", "--parts", "times", "--contenders", "torch")
    page = (tmp_path / "kernels.md").read_text()
    again = tmp_path / "again"
    assert cli.main(["bench", "kernels", "--render", str(tmp_path / "kernels.json"), "--out", str(again)]) == 0
    assert (again / "kernels.md").read_text() == page


def test_memory_and_first_calls_of_a_process_of_their_own() -> None:
    case = {"documents": 1, "length": 2048, "H": 2, "HV": 4, "K": 64, "V": 64}
    task = {"contender": "torch", "case": case, "device": "cpu", "dtype": "float32", "threads": 1}
    memory = worker.spawn({**task, "task": "memory", "train": True}, timeout=60)
    outputs = 2048 * (2 * 2 * 64 + 2 * 4 * 64) * 4 / 2**20  # gradients of q, k and v, and o
    assert outputs * 0.5 < memory["peak_mib"] < outputs * 12
    first = worker.spawn({**task, "task": "first-call"}, timeout=60)
    assert len(first["seconds"]) == 3
    assert all(value > 0 for value in first["seconds"])
    refused = worker.spawn({**task, "contender": "flashqla", "task": "first-call"}, timeout=60)
    assert refused["seconds"] == []
    assert "[device]" in refused["error"]


def test_a_worker_that_dies_is_an_error_in_words() -> None:
    assert "KeyError" in worker.spawn({"task": "memory"}, timeout=60)["error"]


def test_own_python_is_measured_with_a_kernel_that_returns_at_once() -> None:
    rows = measure(CPU, torch.float32, (1, 2))
    assert [row for row in rows if "error" in row] == []
    assert all(0 < row["microseconds"] < 1000 for row in rows)


def test_shapes_and_names() -> None:
    assert usage.heads("16/32") == (16, 32)
    assert usage.numbers("NxL", "x")("64x32") == (64, 32)
    inputs = sample(Case(3, 5, 1, 2, 4, 6), CPU, torch.bfloat16)
    assert inputs.v.shape == (1, 15, 2, 6)
    assert inputs.g.dtype == torch.float32
    assert inputs.packed is not None
    assert inputs.packed.lengths == (5, 5, 5)
    assert {"transformers", "fla-naive", "torch", "fla", "flashqla"} <= set(NAMES)
    with pytest.raises(ValueError, match="nosuch"):
        contender("nosuch")


def test_tables_without_rich_are_plain(tmp_path, monkeypatch, capsys) -> None:
    _run(tmp_path, "--tokens", "20", "--packed", "--parts", "times", "--contenders", "torch")
    capsys.readouterr()
    monkeypatch.setitem(__import__("sys").modules, "rich.console", None)
    kernels_report.show(json.loads((tmp_path / "kernels.json").read_text()))
    assert "\nT=20, 1/2  " in capsys.readouterr().out


def test_the_command_is_kept_without_this_machines_folder() -> None:
    words = ["bench", "kernels", "--out", "/somewhere/here", "--rounds", "3"]
    assert session.command(words) == "qwenlinear bench kernels --rounds 3"


def test_every_part_has_a_name() -> None:
    assert set(kernels._CPU["parts"]) <= set(kernels.PARTS)
    assert set(kernels._GPU["parts"]) == set(kernels.PARTS)
