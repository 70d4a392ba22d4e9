"""TritonKernel: the recurrent form in one launch, states in place; decoding on a GPU."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from qwenlinear._launch import eager, written
from qwenlinear.errors import Refusal
from qwenlinear.kernels.base import GatedDeltaKernel
from qwenlinear.kernels.capabilities import Form, KernelCapabilities, Tolerance
from qwenlinear.kernels.hardware import TRITON, Hardware, HardwareProbe, at_least, import_function
from qwenlinear.kernels.inputs import DeltaRuleInputs
from qwenlinear.kernels.lowering import Answer
from qwenlinear.kernels.tangents import carry_tangents

_INSTALL = "pip install 'triton>=3.3'"


class TritonKernel(GatedDeltaKernel):
    """Decoding on a GPU: `step` in one Triton launch of our own, without gradients; it has no chunked form.

    The state is read once and written once, in float32, with ``state_in_place=True`` into the memory it came from. Products and
    sums are float32 multiply-adds (no TF32), and o is rounded once. For training and prefill put a kernel with a chunked form
    beside it: ``AutoKernel([FlashQLAKernel(), TritonKernel()])``.

    Args:
        hardware: reads what a device is; None reads this machine. Tests pass a fake.

    Raises:
        UnsupportedCall: when called; the chunked form is refused with code ``"form"``.

    Example:
        >>> TritonKernel()
        TritonKernel()
        >>> call = *torch.rand(3, 1, 4, 2, 8), *torch.rand(2, 1, 4, 2)
        >>> [refusal.code for refusal in TritonKernel().refusals(*call, form="step")]
        ['device']
    """

    capabilities = KernelCapabilities(
        dtypes=frozenset({torch.bfloat16, torch.float16, torch.float32}),
        devices=frozenset({"cuda"}),
        step=True,
        initial_state=True,
        final_state=True,
        state_in_place=True,
        packed=True,
        empty_sequences=True,
        key_head_sizes=range(1, 257),
        value_head_groups=True,
        qk_l2norm=True,
        deterministic=True,
        compile_safe=True,
    )
    tolerances = {
        torch.float32: Tolerance(output=1e-5, state=1e-5, gradient=1e-4),
        torch.bfloat16: Tolerance(output=5e-3, state=1e-5, gradient=5e-3),
        torch.float16: Tolerance(output=1e-3, state=1e-5, gradient=1e-3),
    }

    def __init__(self, *, hardware: HardwareProbe | None = None) -> None:
        super().__init__(hardware=hardware)
        self._broken: tuple[Refusal, ...] | None = None  # None before a first look

    def _machine_refusals(self, hardware: Hardware) -> Iterable[Refusal]:
        if hardware.device_type != "cuda":
            return  # the device itself is refused by `capabilities`
        if hardware.hip is None and hardware.capability is None:
            yield Refusal("device", "a GPU", f"{hardware} without one that PyTorch can use", "use TorchKernel()")
        elif hardware.capability is not None and hardware.capability < (8, 0):
            yield Refusal("compute_capability", "8.0 or newer (Triton's limit)", str(hardware), "use TorchKernel()")
        found = hardware.package(*TRITON)
        if found is None:
            yield Refusal("package", "Triton >= 3.3", "no triton", _INSTALL)
        elif not at_least(found, "3.3"):
            yield Refusal("package_version", "Triton >= 3.3", f"triton {found}", _INSTALL)

    def _refusals(self, inputs: DeltaRuleInputs, form: Form) -> Iterable[Refusal]:
        if carry_tangents(inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, inputs.initial_state):
            needs, got = "tensors without tangents", "forward-mode differentiation, which a launch would drop"
            return (Refusal("forward_mode", needs, got, "use TorchKernel(), or reverse mode"),)
        return ()

    def _load(self) -> Iterable[Refusal]:
        if self._broken is None:
            launch = import_function("qwenlinear.kernels._step_triton", "launch", "triton")
            self._broken = (launch,) if isinstance(launch, Refusal) else ()
        return self._broken

    def _describe(self, form: Form) -> str:
        return "in one Triton launch of our own"

    def __getstate__(self) -> dict[str, object]:  # a saved model looks for Triton afresh
        return {**self.__dict__, "_broken": None}

    def _step(self, inputs: DeltaRuleInputs) -> Answer:
        tensors = (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta)
        state, boundaries, normalise = inputs.initial_state, inputs.boundaries, inputs.use_qk_l2norm_in_kernel
        directly = eager(*tensors, state, boundaries)
        if inputs.state_in_place:
            assert state is not None, "validated"
            if not directly:
                return gated_delta_step_in_place(*tensors, inputs.scale, state, boundaries, normalise), state
            o = _step_in_place(*tensors, inputs.scale, state, boundaries, normalise)
            written(state)
            return o, state
        step = _step if directly else gated_delta_step
        states = inputs.N if inputs.output_final_state else 0
        answer: Answer = step(*tensors, inputs.scale, state, boundaries, normalise, states)
        return answer


# ---- the launches as operators, so that torch.compile sees one node --------------------------------------------------


def _step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    normalise: bool,
    states: int,
) -> tuple[Tensor, Tensor]:
    """o and the final states: ``[states, HV, K, V]``, N of them or none."""
    from qwenlinear.kernels import _step_triton

    final = g.new_empty(states, v.shape[2], q.shape[3], v.shape[3])
    kept = final if states else None
    return _step_triton.launch(q, k, v, g, beta, scale, initial_state, kept, cu_seqlens, normalise), final


gated_delta_step = torch.library.custom_op(
    "qwenlinear::gated_delta_step",
    _step,
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, float scale, Tensor? initial_state, Tensor? cu_seqlens, "
    "bool normalise, SymInt states) -> (Tensor, Tensor)",
)


@gated_delta_step.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    normalise: bool,
    states: int,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(v), g.new_empty(states, v.shape[2], q.shape[3], v.shape[3])


def _step_in_place(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    state: Tensor,
    cu_seqlens: Tensor | None,
    normalise: bool,
) -> Tensor:
    """o; the final state takes the initial state's place in memory."""
    from qwenlinear.kernels import _step_triton

    return _step_triton.launch(q, k, v, g, beta, scale, state, state, cu_seqlens, normalise)


gated_delta_step_in_place = torch.library.custom_op(
    "qwenlinear::gated_delta_step_in_place",
    _step_in_place,
    mutates_args=("state",),
    schema="(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, float scale, Tensor(a!) state, Tensor? cu_seqlens, "
    "bool normalise) -> Tensor",
)


@gated_delta_step_in_place.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    state: Tensor,
    cu_seqlens: Tensor | None,
    normalise: bool,
) -> Tensor:
    return torch.empty_like(v)
