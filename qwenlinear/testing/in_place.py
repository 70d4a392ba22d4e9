"""Running `step` with ``state_in_place=True``: the answer is in the very tensor that was handed over, all else is unchanged."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext

import torch
from torch import Tensor

from qwenlinear.testing.cases import Drawn
from qwenlinear.testing.running import Answers, Arguments, Execution, Fault, scratch_filled_with_nan, unchanged

_GUARD = 7.25  # before and after the state in memory; no state holds it


def run_in_place(execution: Execution, drawn: Drawn) -> Answers:
    """Run a case without gradients, its initial state being overwritten.

    Args:
        execution: takes the arguments of a `step` and returns its answer, by whatever calls.
        drawn: the tensors; the initial state is laid between two others of its batch.

    Returns:
        The output and the final state.

    Raises:
        Fault: the final state is another tensor, the output shares its memory, or something else was written to.
    """
    case = drawn.case
    handed = {name: base.clone() for name, base in drawn.bases.items()}
    kept = {name: base.clone() for name, base in handed.items()}
    state = handed["initial_state"]
    memory = state.new_full((len(state) + 2, *state.shape[1:]), _GUARD)
    handed["initial_state"] = memory[1:-1].copy_(state)
    views = drawn.view(handed)
    modes = {"grad": nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode}
    with scratch_filled_with_nan() if case.scratch else nullcontext(), modes[case.mode]():
        arguments: Arguments = {**views, **drawn.options, "state_in_place": True}
        o, final = execution(arguments)
    if final is not views["initial_state"]:
        raise Fault("the final state is not initial_state itself, which was to be overwritten")
    if o.numel() and o.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr():
        raise Fault("the output shares memory with initial_state")
    _nothing_else(memory, handed, kept)
    return {"output": o, "final state": final}


def _nothing_else(memory: Tensor, handed: Mapping[str, Tensor], kept: Mapping[str, Tensor]) -> None:
    if not (memory[0] == _GUARD).all() or not (memory[-1] == _GUARD).all():
        raise Fault("memory beside initial_state was written to")
    for name, before in kept.items():
        if name != "initial_state" and not unchanged(handed[name], before):
            raise Fault(f"{name} was written to")
