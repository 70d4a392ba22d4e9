"""What a kernel hands back, held against what the call asked for: metadata alone."""

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
        kernel: whose answer it is.
        inputs: the call as the kernel got it.
        answer: what its ``_chunk`` or ``_step`` returned.
        form: which of the two.

    Raises:
        TypeError: no pair, a wrong shape or dtype, another tensor than the state that was to be overwritten.
    """
    if not isinstance(answer, (tuple, list)) or len(answer) != 2:  # a tensor of two rows would unpack
        got = f"{len(answer)} values" if isinstance(answer, (tuple, list)) else type(answer).__name__
        raise TypeError(f"{kernel!r} needs to return a pair (o, final_state or None) from _{form}, got {got}")
    o, final = answer
    _check_returned(kernel, form, "o", o, inputs.v.shape, inputs.q.dtype)
    if inputs.output_final_state:
        K, V = (inputs.K, inputs.V) if kernel.capabilities.state_layout == "kv" else (inputs.V, inputs.K)
        _check_returned(kernel, form, "final_state", final, (inputs.N, inputs.HV, K, V), inputs.g.dtype)
    if inputs.state_in_place and final is not inputs.initial_state:
        raise TypeError(f"{kernel!r} declares state_in_place and needs to return initial_state itself, got another")


def _check_returned(
    kernel: GatedDeltaKernel, form: Form, name: str, tensor: object, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    if not isinstance(tensor, Tensor) or tensor.shape != shape or tensor.dtype != dtype:
        got = f"{list(tensor.shape)} {tensor.dtype}" if isinstance(tensor, Tensor) else repr(tensor)
        raise TypeError(f"{kernel!r} needs to return {name} as {list(shape)} {dtype} from _{form}, got {got}")
