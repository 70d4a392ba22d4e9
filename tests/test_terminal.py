"""What commands print fits into 80 columns, with rich and without, piped or not, and nothing of it is cut."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from qwenlinear import cli, terminal
from qwenlinear.testing.__main__ import main as conformance

DATA = Path(__file__).parents[1] / "docs/data/kernels-h200.json"
HEAD = ["", *(f"how many times as fast as contender {n}" for n in range(7)), "why"]
BODY = [[f"qwenlinear, kernel {row}", *(f"{row}.{n}5 (1.00x)" for n in range(7)), "a reason " * 9] for row in range(3)]


@pytest.fixture(params=[True, False], ids=["rich", "plain"])
def rich(request, monkeypatch) -> bool:
    if request.param:
        pytest.importorskip("rich")
    else:
        for name in ("rich.console", "rich.markup", "rich.table"):
            monkeypatch.setitem(sys.modules, name, None)  # importing it is an ImportError
    return request.param


def widest(shown: str) -> int:
    return max(map(len, shown.splitlines()))


@pytest.mark.parametrize("columns", [50, 80, 120, 400])
def test_a_wide_table_keeps_every_cell_whole(rich, columns, monkeypatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    terminal.show_table("a title " * 20, HEAD, BODY)
    shown = capsys.readouterr().out
    assert widest(shown) <= columns
    for row in BODY:
        assert all(cell in shown for cell in row[1:-1])  # numbers stay on one line
    words = re.findall(r"\w+", shown)
    assert words.count("reason") == 27
    pieces = words.count("kernel") // 3
    assert pieces == (1 if columns == 400 else pieces)
    assert all(shown.count(f"kernel {row}") == pieces for row in range(3))  # the first column stands in each piece


def test_a_table_that_fits_is_one(rich, monkeypatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    terminal.show_table("", ["", "ms"], [["a [b]", "1.5"]])
    shown = capsys.readouterr().out
    assert "a [b]" in shown
    assert shown.count("ms") == 1


def test_tables_of_one_column_and_without_rows() -> None:
    assert terminal.plain(["only"], [["x"]], 40) == "only\n----\nx"
    assert terminal.plain(["a", "b"], [], 40) == "a  b\n-  -"


def test_commands_and_paths_are_not_cut() -> None:
    path = "/a/" + "long/" * 30
    assert terminal.fold(f"  Triton: {path}", 80).splitlines() == ["  Triton:", f"    {path}"]
    assert terminal.fold("", 80) == ""


def test_markdown_is_laid_out_and_its_command_stays(monkeypatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    command = "    qwenlinear bench guard " + "--out somewhere " * 8
    table = [
        "| " + " | ".join(HEAD) + " |",
        "|" + " --- |" * len(HEAD),
        *("| " + " | ".join(row) + " |" for row in BODY),
    ]
    terminal.show_markdown("\n".join(["word " * 40, "", command, "", *table, "", "the end"]))
    shown = capsys.readouterr().out
    assert command in shown.splitlines()
    assert widest(shown.replace(command, "")) <= 80
    assert "| ---" not in shown
    assert all(cell in shown for row in BODY for cell in row[1:-1])
    assert shown.endswith("the end\n")


def test_bench_doctor_and_warmup_at_80_columns(rich, monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(["bench", "kernels", "--render", str(DATA), "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert widest(shown) <= 80
    for row in json.loads(DATA.read_text())["times"]:
        if "ms" in row:
            assert f"({row['speedup']:.2f}x)" in shown
    assert cli.main(["doctor", "--device", "cpu"]) == 0
    assert widest(capsys.readouterr().out) <= 80
    sizes = ["--heads", "1/2", "--hidden", "16", "--head-dim", "8", "--device", "cpu", "--dtype", "float32"]
    assert cli.main(["warmup", *sizes, "--tokens", "8", "--packed", "2x4", "--train"]) == 0
    shown = capsys.readouterr().out
    paths = [word for word in shown.split() if word.startswith("/")]
    assert all(len(line) <= 80 or any(path in line for path in paths) for line in shown.splitlines())
    assert "2 x 4 packed, forward and backward" in shown


def test_the_conformance_command_at_80_columns(rich, monkeypatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    words = ["--kernels", "torch", "--dtypes", "float32", "--heads", "1,2,8,8", "--packings", "0", "--seconds", "0.05"]
    conformance(words)
    shown = capsys.readouterr().out
    assert widest(shown) <= 80
    assert "form, dtype" in shown
    assert "| ---" not in shown
