"""Cases in several processes give what they give in turn; one that dies or is not reached is named."""

from __future__ import annotations

import os

import pytest

from qwenlinear import TorchKernel
from qwenlinear.testing import Case
from qwenlinear.testing.__main__ import main
from qwenlinear.testing.jobs import one, side_by_side

CASES = [Case("first", T=5), Case("second", T=3, form="step"), Case("third", T=9, grad="all")]


class Dies(TorchKernel):
    """Takes its process along."""

    def _step(self, inputs):
        os._exit(1)


def test_the_same_results_in_the_same_order() -> None:
    found = side_by_side("torch", "cpu", CASES, 2, 120.0)
    assert [[result.case for result in answers] for answers in found] == [[case] for case in CASES]
    assert [[result.errors for result in answers] for answers in found] == [
        [result.errors for result in one("torch", "cpu", case)] for case in CASES
    ]


def test_a_process_that_dies_fails_its_case() -> None:
    found = side_by_side(f"{__name__}:Dies", "cpu", CASES[:2], 1, 120.0)
    assert found[0][0].status == "passed"
    assert (found[1][0].status, found[1][0].text.split(":")[0]) == ("failed", "BrokenProcessPool")


def test_what_the_time_does_not_reach_is_none() -> None:
    assert side_by_side("torch", "cpu", CASES, 1, 0.01) == [None, None, None]


def test_a_lost_device_is_said_for_every_later_case(monkeypatch) -> None:
    monkeypatch.setattr("qwenlinear.testing.jobs._lost", ["CUDA error: an illegal memory access"])
    (result,) = one("torch", "cpu", CASES[0])
    assert result.status == "failed"
    assert "the device is lost to this process (CUDA error" in result.text


@pytest.mark.parametrize("words", [["--jobs", "0"], ["--dtypes", "int8"]])
def test_bad_words_are_usage_errors(words, capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert "usage:" in capsys.readouterr().err
