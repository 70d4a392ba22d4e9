"""FSDP2 over two real processes, laid before and after the injection: the losses of the untouched model."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", minversion="5.6")
from tests.distributed.dist_harness import run_world
from tests.hf import sharding


def test_fsdp2_before_and_after() -> None:
    for answers in run_world(2, sharding.all_losses):
        want, calls = answers["never"]
        assert calls == 0
        for when in ("before", "after", "joined"):
            got, calls = answers[when]
            assert got == pytest.approx(want, rel=1e-5)
            assert calls == 9
