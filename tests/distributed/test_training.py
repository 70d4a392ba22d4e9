"""DDP, FSDP2, HSDP, DTensor, tensor parallelism, functional collectives, compilation: equal losses."""

from __future__ import annotations

import pytest
import training_checks
from dist_harness import run_world


@pytest.mark.parametrize(
    ("size", "recipe", "seen"),
    [
        (2, "ddp", {"all_reduce", "broadcast"}),
        (2, "ddp_compiled", {"all_reduce"}),
        (2, "fsdp2", {"all_gather_into_tensor", "reduce_scatter_tensor"}),
        (4, "fsdp2", {"all_gather_into_tensor", "reduce_scatter_tensor"}),
        (4, "fsdp2_2d", {"all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"}),
        (2, "fsdp2_compiled", {"all_gather_into_tensor", "reduce_scatter_tensor"}),
        (2, "tensor_parallel", {"all_reduce"}),
        (4, "dtensor", {"all_gather_into_tensor_coalesced", "all_reduce"}),
        (4, "functional", {"all_reduce"}),
        (2, "functional_compiled", {"all_reduce"}),
        (2, "functional_inductor", {"all_reduce"}),
        (2, "plain_compiled", {"all_reduce"}),
    ],
)
def test_three_steps_have_equal_losses(size: int, recipe: str, seen: set[str]) -> None:
    reports = run_world(size, training_checks.train, size, [recipe])
    losses, calls = reports[0][recipe]
    assert len(losses) >= 3
    assert seen <= set(calls), calls
