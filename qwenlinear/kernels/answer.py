"""What a kernel may return."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qwenlinear.kernels.capabilities import Form
from qwenlinear.kernels.inputs import DeltaRuleInputs

if TYPE_CHECKING:
    from qwenlinear.kernels.base import GatedDeltaKernel


def check_answer(kernel: GatedDeltaKernel, inputs: DeltaRuleInputs, answer: object, form: Form) -> None:
    """Catch a kernel author's mistake where it was made.

    Args:
        kernel: who answered.
        inputs: what it was given.
        answer: what it returned.
        form: ``"chunk"`` or ``"step"``.

    Raises:
        TypeError: no pair, or a tensor of another shape or dtype than asked for.
    """
    if not isinstance(answer, (tuple, list)) or len(answer) != 2:  # a tensor of two rows would unpack
        got = f"{len(answer)} values" if isinstance(answer, (tuple, list)) else type(answer).__name__
        raise TypeError(f"{kernel!r} needs to return a pair (o, final_state or None) from _{form}, got {got}")
    o, final = answer
    _check_returned(kernel, form, "o", o, inputs.v.shape, inputs.q.dtype)
    checked = final is not None and final is inputs.initial_state  # when it came
    if inputs.output_final_state and not checked:
        K, V = (inputs.K, inputs.V) if kernel.capabilities.state_layout == "kv" else (inputs.V, inputs.K)
        _check_returned(kernel, form, "final_state", final, (inputs.N, inputs.HV, K, V), inputs.g.dtype)
    if inputs.state_in_place and final is not inputs.initial_state:
        raise TypeError(
            f"{kernel!r} declares state_in_place and needs to return initial_state itself, got another tensor"
        )


def _check_returned(
    kernel: GatedDeltaKernel, form: Form, name: str, tensor: object, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    if not isinstance(tensor, Tensor) or tensor.shape != shape or tensor.dtype != dtype:
        got = f"{list(tensor.shape)} {tensor.dtype}" if isinstance(tensor, Tensor) else repr(tensor)
        raise TypeError(f"{kernel!r} needs to return {name} as {list(shape)} {dtype} from _{form}, got {got}")
