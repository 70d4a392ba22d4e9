"""What a kernel declares about itself. Every default is the safe answer: not declared means refused or lowered, never tried."""

from __future__ import annotations

from collections.abc import Container, Iterator, Set
from dataclasses import dataclass, fields
from typing import Literal

import torch

from qwenlinear.errors import Refusal
from qwenlinear.kernels.inputs import DeltaRuleInputs

Form = Literal["chunk", "step"]
SET_DEVICES = "set devices in its capabilities, None for any"  # what an author forgot


@dataclass(frozen=True, kw_only=True)
class KernelCapabilities:
    """The limits of a kernel: what is missing here is refused with a reason, or lowered where an exact equivalent exists.

    Args:
        dtypes: dtypes of q, k and v that run.
        devices: device types that run, such as ``{"cuda"}``; None means any.
        chunk: the chunked form exists (``_chunk``): training and prefill.
        step: the recurrent form exists (``_step``): decoding.
        backward: the chunked form has gradients.
        step_backward: the recurrent form has gradients.
        state_backward: gradients reach ``initial_state`` and come from the final state, in the forms that have gradients.
        initial_state: an initial state is taken.
        final_state: the final state is returned when asked for.
        state_in_place: ``_step`` writes the final state into ``initial_state`` and returns that very tensor where
            ``inputs.state_in_place`` asks for it; otherwise lowered by copying.
        packed: ``cu_seqlens`` is understood.
        dense: input without ``cu_seqlens`` runs as it is (default); otherwise lowered by packing the rows of the batch.
        key_head_sizes: sizes K that run; None means any.
        value_head_sizes: sizes V that run; None means any.
        empty_sequences: packed documents of zero tokens run as they are; otherwise lowered by leaving them out.
        value_head_groups: HV > H runs as it is; otherwise lowered by repeating q and k.
        qk_l2norm: ``use_qk_l2norm_in_kernel`` runs inside; otherwise lowered by normalising before.
        strided: strided tensors run as they are; otherwise lowered by copying.
        state_layout: ``"kv"`` for states ``[N, HV, K, V]``; ``"vk"`` for ``[N, HV, V, K]``, lowered by transposing.
        deterministic: repeated calls are bitwise equal, gradients too.
        isolated_gradients: not-a-number in one packed document reaches no other one's gradients; outputs and states it never may.
        compile_safe: ``torch.compile(fullgraph=True)`` goes through; otherwise compiled code leaves its graph for a call.

    Raises:
        TypeError: a field of another type, by name.
        ValueError: neither ``packed`` nor ``dense``, or another ``state_layout``.

    Example:
        >>> KernelCapabilities(dtypes=frozenset({torch.float32}), chunk=True).packed
        False
    """

    dtypes: frozenset[torch.dtype]
    devices: frozenset[str] | None = frozenset()
    chunk: bool = False
    step: bool = False
    backward: bool = False
    step_backward: bool = False
    state_backward: bool = False
    initial_state: bool = False
    final_state: bool = False
    state_in_place: bool = False
    packed: bool = False
    dense: bool = True
    key_head_sizes: Container[int] | None = None
    value_head_sizes: Container[int] | None = None
    empty_sequences: bool = False
    value_head_groups: bool = False
    qk_l2norm: bool = False
    strided: bool = False
    state_layout: Literal["kv", "vk"] = "kv"
    deterministic: bool = False
    isolated_gradients: bool = False
    compile_safe: bool = False

    def __post_init__(self) -> None:
        _require_set("dtypes", self.dtypes, torch.dtype, "frozenset({torch.bfloat16})")
        if self.devices is not None:
            _require_set("devices", self.devices, str, "frozenset({'cuda'})")
        for name in ("key_head_sizes", "value_head_sizes"):
            sizes = getattr(self, name)
            if sizes is not None and (isinstance(sizes, (str, bytes)) or not isinstance(sizes, Container)):
                needs = "None for any size or a container of ints, such as frozenset({64, 128}) or range(1, 257)"
                raise TypeError(f"{name} needs {needs}; got {sizes!r}")
        for name in (field.name for field in fields(self) if field.type == "bool"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} needs True or False, got {getattr(self, name)!r}")
        if self.state_layout not in ("kv", "vk"):
            raise ValueError(f"state_layout needs 'kv' or 'vk', got {self.state_layout!r}")
        if not (self.dense or self.packed):
            raise ValueError("capabilities need packed=True where dense=False: some input has to run")

    def refusals(self, inputs: DeltaRuleInputs, form: Form) -> Iterator[Refusal]:
        """Why a call is outside these limits.

        Args:
            inputs: the validated call; only its metadata is looked at.
            form: ``"chunk"`` or ``"step"``.

        Yields:
            One :class:`Refusal` a limit.
        """
        exists = self.chunk if form == "chunk" else self.step
        if not exists:
            other = "call step(...)" if form == "chunk" else "call the kernel itself, which runs in chunks"
            yield Refusal(
                "form",
                f"the {'chunked' if form == 'chunk' else 'recurrent'} form",
                "a kernel without it",
                other,
            )
        if self.devices is not None and inputs.q.device.type not in self.devices:
            yield Refusal(
                "device",
                device_names(self.devices),
                inputs.q.device.type,
                "move the layer there, or use TorchKernel()" if self.devices else SET_DEVICES,
            )
        if inputs.q.dtype not in self.dtypes:
            known = " or ".join(sorted(str(dtype).removeprefix("torch.") for dtype in self.dtypes))
            yield Refusal("dtype", f"q, k and v in {known}", str(inputs.q.dtype).removeprefix("torch."), "cast them")
        if self.key_head_sizes is not None and inputs.K not in self.key_head_sizes:
            yield _other_size("key_head_size", self.key_head_sizes, inputs.K)
        if self.value_head_sizes is not None and inputs.V not in self.value_head_sizes:
            yield _other_size("value_head_size", self.value_head_sizes, inputs.V)
        if inputs.needs_grad and exists:  # a form that is not there needs no word on its gradients
            if not (self.backward if form == "chunk" else self.step_backward):
                yield Refusal(
                    "backward",
                    "a call without gradients",
                    "an input that requires them",
                    "use torch.no_grad(), or a kernel with a backward pass",
                )
            elif not self.state_backward and inputs.initial_state is not None and inputs.initial_state.requires_grad:
                yield Refusal(
                    "state_backward",
                    "an initial_state without gradients",
                    "one that requires them",
                    "detach() it",
                )
        if inputs.initial_state is not None and not self.initial_state:
            yield Refusal("initial_state", "no initial_state", "one", "start the sequence here, or use another kernel")
        if inputs.output_final_state and not self.final_state:
            yield Refusal("final_state", "output_final_state=False", "True", "use another kernel for cached calls")
        if inputs.cu_seqlens is not None and not self.packed:
            yield Refusal("packed", "dense input", "cu_seqlens", "unpack the documents, or use a kernel that packs")


@dataclass(frozen=True)
class Tolerance:
    """Largest relative errors ``norm(x - reference) / norm(reference)`` against float64 that a kernel promises.

    Args:
        output: of o.
        state: of the final state.
        gradient: of each gradient.

    Raises:
        TypeError: no number.
    """

    output: float
    state: float
    gradient: float

    def __post_init__(self) -> None:
        for name in ("output", "state", "gradient"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"{name} needs a relative error such as 1e-5, got {value!r}")


def _require_set(name: str, found: object, kind: type, example: str) -> None:
    """A set of one kind of thing: a string would do as a container of its letters, a list as nothing that is frozen."""
    if not isinstance(found, Set) or not all(isinstance(one, kind) for one in found):
        raise TypeError(f"{name} needs a set of {kind.__name__}s, such as {example}; got {found!r}")


def _other_size(code: str, sizes: Container[int], size: int) -> Refusal:
    letter = code[0].upper()
    return Refusal(code, f"{letter} in {_sizes(sizes)}", f"{letter}={size}", "use another kernel for this model")


def device_names(devices: Set[str]) -> str:
    """Device types in words."""
    return " or ".join(sorted(devices)) or "a device that the kernel declares, and it declares none"


def _sizes(sizes: Container[int]) -> str:
    if isinstance(sizes, range):
        return f"{sizes.start}..{sizes.stop - 1}"
    return str(sorted(sizes)) if isinstance(sizes, (set, frozenset)) else repr(sizes)
