"""GatedDeltaKernel: the strategy. Ask it (`refusals`, `explain`, `require`), then run it (the call itself, or `step`).

The base validates once, collects every refusal, applies exact lowerings and calls what a subclass wrote: `_chunk` and/or `_step`.

    S <- exp(g_t) S;   S <- S + k_t (beta_t (v_t - S^T k_t))^T;   o_t = S^T (scale q_t)        (per value head)
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import ClassVar, cast

import torch
from torch import Tensor

from qwenlinear.checks import as_device
from qwenlinear.errors import Refusal, UnsupportedCall
from qwenlinear.kernels.answer import check_answer
from qwenlinear.kernels.capabilities import SET_DEVICES, Form, KernelCapabilities, Tolerance, device_names
from qwenlinear.kernels.hardware import Hardware, HardwareProbe, probe
from qwenlinear.kernels.inputs import DeltaRuleInputs
from qwenlinear.kernels.lowering import Answer, plan, run_without_tokens
from qwenlinear.kernels.packing import PackedSequences
from qwenlinear.kernels.precision import autocast_enabled, without_autocast


class GatedDeltaKernel(ABC):
    """One way to compute the gated delta rule (Yang et al., "Gated Delta Networks", arXiv:2412.06464).

    A subclass declares `capabilities` and `tolerances` and writes `_chunk` and/or `_step`; both get a
    :class:`DeltaRuleInputs` already validated and lowered to what was declared, and return ``(o, final_state or None)``.
    It may add limits with `_refusals` (a call's metadata) and `_machine_refusals` (hardware and packages).
    Constructing a kernel never needs the hardware it runs on. No input is ever written to, but a state where `step` is
    called with ``state_in_place=True``.

    Args:
        hardware: reads what a device is; None reads this machine. Tests pass a fake.

    Example:
        >>> from qwenlinear import TorchKernel
        >>> q, k = torch.randn(2, 1, 6, 2, 8).unbind()
        >>> v, g, beta = torch.randn(1, 6, 4, 8), -torch.rand(1, 6, 4), torch.rand(1, 6, 4)
        >>> o, final_state = TorchKernel()(q, k, v, g, beta, output_final_state=True)
        >>> o.shape, final_state.shape
        (torch.Size([1, 6, 4, 8]), torch.Size([1, 4, 8, 8]))
    """

    capabilities: KernelCapabilities
    tolerances: ClassVar[Mapping[torch.dtype, Tolerance]]

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        declared = cls.__dict__.get("capabilities")
        if not isinstance(declared, KernelCapabilities):
            return  # an abstract intermediate, or a composite that answers per instance
        for form, method in (("chunk", "_chunk"), ("step", "_step")):
            if getattr(declared, form) != (getattr(cls, method) is not getattr(GatedDeltaKernel, method)):
                got = f"writes no {method}" if getattr(declared, form) else f"writes {method} without declaring it"
                raise TypeError(
                    f"{cls.__name__} needs capabilities.{form}=True exactly where it writes {method}; it {got}"
                )
        tolerances = getattr(cls, "tolerances", {})
        if not isinstance(tolerances, Mapping) or not all(isinstance(t, Tolerance) for t in tolerances.values()):
            raise TypeError(f"{cls.__name__} needs tolerances = {{dtype: Tolerance(...)}}, got {tolerances!r}")
        missing = [str(dtype) for dtype in declared.dtypes if dtype not in tolerances]
        if missing:
            raise TypeError(f"{cls.__name__} needs tolerances for each dtype it declares, got none for {missing}")

    def __init__(self, *, hardware: HardwareProbe | None = None) -> None:
        if not isinstance(getattr(self, "capabilities", None), KernelCapabilities):
            raise TypeError(f"{type(self).__name__} needs a class attribute capabilities = KernelCapabilities(...)")
        self._hardware = hardware if hardware is not None else probe
        self._unavailable: dict[torch.device, tuple[Refusal, ...]] = {}

    # ---- run -------------------------------------------------------------------------------------------------------

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        scale: float | None = None,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: Tensor | PackedSequences | None = None,
    ) -> Answer:
        """Run the chunked form: training and prefill. The signature is flash-linear-attention's `chunk_gated_delta_rule`.

        Args:
            q: ``[B, T, H, K]`` queries; float64, float32, bfloat16 or float16.
            k: ``[B, T, H, K]`` keys, q's dtype.
            v: ``[B, T, HV, V]`` values, q's dtype; HV a multiple of H, value head j uses key head ``j // (HV // H)``.
            g: ``[B, T, HV]`` log-decay (natural logarithm, usually <= 0), float32; float64 when q is float64.
            beta: ``[B, T, HV]`` write strength after the sigmoid, any floating dtype.
            scale: factor on q; default None for ``K**-0.5``.
            initial_state: ``[N, HV, K, V]`` of g's dtype; default None for zeros.
            output_final_state: whether to return the state after the last token; default False.
            use_qk_l2norm_in_kernel: normalise q and k first, ``x * rsqrt(sum(x**2) + 1e-6)``; default False.
            cu_seqlens: ``[N+1]`` int32 or int64 boundaries of packed documents (B must be 1) or a
                :class:`PackedSequences`; default None for dense input with N = B. A tensor on a GPU costs one
                synchronisation a call.

        Returns:
            ``o [B, T, HV, V]`` in q's dtype, and the final state ``[N, HV, K, V]`` in g's dtype or None.

        Raises:
            ValueError: an argument that no kernel could take.
            UnsupportedCall: a limit of this kernel, with every reason in ``.refusals``.
        """
        inputs = DeltaRuleInputs.validate(
            q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens
        )
        return self._run_or_leave_graph(inputs, "chunk")

    def step(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        scale: float | None = None,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: Tensor | PackedSequences | None = None,
        *,
        state_in_place: bool = False,
    ) -> Answer:
        """Run the recurrent form: decoding, any T. Arguments, results and errors are those of the call itself, and one more.

        Args:
            state_in_place: write the final state into ``initial_state`` and return that very tensor; default False. Needs
                ``initial_state`` and ``output_final_state=True``, and no gradient.
        """
        inputs = DeltaRuleInputs.validate(
            q,
            k,
            v,
            g,
            beta,
            scale,
            initial_state,
            output_final_state,
            use_qk_l2norm_in_kernel,
            cu_seqlens,
            state_in_place,
        )
        return self._run_or_leave_graph(inputs, "step")

    # ---- ask -------------------------------------------------------------------------------------------------------

    def refusals(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        scale: float | None = None,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: Tensor | PackedSequences | None = None,
        *,
        form: Form = "chunk",
        state_in_place: bool = False,
    ) -> tuple[Refusal, ...]:
        """Why this call would not run; never launches, never synchronises, never looks at values.

        A kernel's package is imported, once, where nothing else refuses: only that tells whether it imports.

        Args: those of the call itself, ``form``: ``"chunk"`` (default) or ``"step"``, and ``state_in_place`` of `step`.

        Returns:
            Every reason, machine first; ``()`` means that it runs.

        Raises:
            ValueError: an argument that no kernel could take.
        """
        inputs = DeltaRuleInputs.validate(
            q,
            k,
            v,
            g,
            beta,
            scale,
            initial_state,
            output_final_state,
            use_qk_l2norm_in_kernel,
            cu_seqlens,
            state_in_place,
        )
        if form not in ("chunk", "step"):
            raise ValueError(f"form needs 'chunk' or 'step', got {form!r}")
        if state_in_place and form == "chunk":
            raise ValueError("state_in_place needs form='step', got 'chunk', which never writes to a state")
        return self._all_refusals(inputs, form)

    def explain(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        scale: float | None = None,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: Tensor | PackedSequences | None = None,
        *,
        state_in_place: bool = False,
    ) -> str:
        """What would happen to this call, in words: for both forms, what runs, what is lowered, or why it is refused.

        Args: those of the call itself, and ``state_in_place`` of `step`.

        Returns:
            A few lines to print.

        Raises:
            ValueError: an argument that no kernel could take.
        """
        inputs = DeltaRuleInputs.validate(
            q,
            k,
            v,
            g,
            beta,
            scale,
            initial_state,
            output_final_state,
            use_qk_l2norm_in_kernel,
            cu_seqlens,
            state_in_place,
        )
        return "\n".join(
            [
                f"{self!r}: {inputs.describe()}",
                *self._explain(replace(inputs, state_in_place=False), "chunk"),
                *self._explain(inputs, "step"),
            ]
        )

    def unavailable(self, device: torch.device | str) -> tuple[Refusal, ...]:
        """What a machine lacks for this kernel, whatever the call.

        Args:
            device: the device the tensors would be on.

        Returns:
            Every reason; ``()`` means that the kernel is there. Nothing is imported or launched.

        Raises:
            ValueError: no device.
        """
        where = as_device("device", device)
        missing = self._unavailable.get(where)
        if missing is None:
            missing = self._unavailable[where] = tuple(self._machine_refusals(self._hardware(where)))
        return missing

    def require(self, device: torch.device | str) -> None:
        """Fail now if the machine lacks what this kernel needs, so that a job dies at start-up and not at its first step.

        Args:
            device: the device the tensors will be on.

        Raises:
            UnsupportedCall: listing what is missing and how to get it.
            ValueError: no device.
        """
        missing = self._missing(as_device("device", device))
        if missing:
            raise UnsupportedCall(repr(self), missing, f"on {device}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{key}={value!r}' for key, value in self._options().items())})"

    # ---- what a subclass writes ------------------------------------------------------------------------------------

    def _chunk(self, inputs: DeltaRuleInputs) -> Answer:
        """The chunked form. ``o [B, T, HV, V]`` in q's dtype, final state ``[N, HV, K, V]`` in g's dtype (or None)."""
        raise NotImplementedError

    def _step(self, inputs: DeltaRuleInputs) -> Answer:
        """The recurrent form; as `_chunk`. Where ``inputs.state_in_place`` (only if declared) the final state is
        ``inputs.initial_state`` itself, overwritten."""
        raise NotImplementedError

    def _refusals(self, inputs: DeltaRuleInputs, form: Form) -> Iterable[Refusal]:
        """Limits that `capabilities` cannot say, from metadata alone. An exception in here is a bug and propagates."""
        return ()

    def _machine_refusals(self, hardware: Hardware) -> Iterable[Refusal]:
        """What a machine lacks: hardware first, packages second, nothing imported."""
        return ()

    def _load(self) -> Iterable[Refusal]:
        """Import what the kernel runs on, once, and say why if that fails; asked last, where nothing else refuses."""
        return ()

    def _describe(self, form: Form) -> str:
        """What runs, in words, for `explain`."""
        return ""

    def _options(self) -> dict[str, object]:
        """Constructor options worth showing in `repr`."""
        return {}

    # ---- how it runs; composites override these --------------------------------------------------------------------

    def _missing(self, device: torch.device | str) -> tuple[Refusal, ...]:
        """Everything that keeps any call on a device from running: what `unavailable` says, the device, the import."""
        missing = self.unavailable(device)
        devices = self.capabilities.devices
        if devices is not None and torch.device(device).type not in devices:
            needs = device_names(devices)
            remedy = "use TorchKernel(), which runs anywhere" if devices else SET_DEVICES
            missing = (Refusal("device", needs, str(device), remedy), *missing)
        return missing or tuple(self._load())

    def _run_or_leave_graph(self, inputs: DeltaRuleInputs, form: Form) -> Answer:
        if not self.capabilities.compile_safe and torch.compiler.is_compiling():
            # One break here instead of tracing Python that differs with every length: minutes of compilation for nothing.
            return _run_eagerly(self, inputs, form)
        return self._run(inputs, form)

    def _run(self, inputs: DeltaRuleInputs, form: Form) -> Answer:
        refusals = self._all_refusals(inputs, form)
        if refusals:
            raise UnsupportedCall(repr(self), refusals, f"{form}: {inputs.describe()}")
        return self._execute(inputs, form)

    def _execute(self, inputs: DeltaRuleInputs, form: Form) -> Answer:
        undo = []
        for lowering in plan(inputs, self.capabilities):
            lowered = lowering.before(inputs)
            if lowering.after is not None:
                undo.append((lowering.after, inputs))
            inputs = lowered
        if inputs.g.numel() == 0:
            answer = run_without_tokens(inputs)
        else:
            run = self._chunk if form == "chunk" else self._step
            if autocast_enabled(inputs.q.device):
                with without_autocast(inputs.q.device):  # the call says its dtypes; a kernel's products keep to them
                    answer = run(inputs)
            else:
                answer = run(inputs)
            check_answer(self, inputs, answer, form)
        for after, before in reversed(undo):
            answer = after(before, answer)
        return answer if inputs.output_final_state else (answer[0], None)

    def _all_refusals(self, inputs: DeltaRuleInputs, form: Form) -> tuple[Refusal, ...]:
        refusals = (
            *self._asked_machine(inputs.q.device),
            *self.capabilities.refusals(inputs, form),
            *self._refusals(inputs, form),
        )
        return refusals or self._asked_load()

    def _asked_machine(self, device: torch.device) -> tuple[Refusal, ...]:
        return self.unavailable(device)

    def _asked_load(self) -> tuple[Refusal, ...]:
        return tuple(self._load())

    def _explain(self, inputs: DeltaRuleInputs, form: Form) -> list[str]:
        refusals = self._all_refusals(inputs, form)
        if refusals:
            return [f"  {form}: refused", *(f"    - {refusal}" for refusal in refusals)]
        lowerings = [f"    - {lowering.text}" for lowering in plan(inputs, self.capabilities)]
        how = self._describe(form)
        return [f"  {form}: runs" + (f" {how}" if how else "") + (", lowered:" if lowerings else ""), *lowerings]


def _run_eagerly(kernel: GatedDeltaKernel, inputs: DeltaRuleInputs, form: Form) -> Answer:
    return cast(Answer, torch.compiler.disable(kernel._run)(inputs, form))


# What torch.compiler.disable sets on its function; as a decorator it would import the compiler with this module.
_run_eagerly._torchdynamo_disable = True  # type: ignore[attr-defined]
_run_eagerly._torchdynamo_disable_msg = "a kernel that does not declare compile_safe"  # type: ignore[attr-defined]

# What torch.compiler.assume_constant_result sets, without importing the compiler: versions and imports are no part of a graph.
GatedDeltaKernel._asked_machine._dynamo_marked_constant = True  # type: ignore[attr-defined]
GatedDeltaKernel._asked_load._dynamo_marked_constant = True  # type: ignore[attr-defined]
