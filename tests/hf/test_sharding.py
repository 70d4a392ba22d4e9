"""FSDP2 over two real processes, laid before and after the injection: the losses of the untouched model."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", minversion="5.6")
from tests.distributed.dist_harness import run_world
from tests.hf import sharding


def test_fsdp2_before_and_after() -> None:
    answers = {when: run_world(2, sharding.losses, when) for when in ("never", "before", "after")}
    for rank in range(2):
        want, calls = answers["never"][rank]
        assert calls == 0
        for when in ("before", "after"):
            got, calls = answers[when][rank]
            assert got == pytest.approx(want, rel=1e-5)
            assert calls == 9
