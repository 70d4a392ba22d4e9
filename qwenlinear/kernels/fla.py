"""FLAKernel: flash-linear-attention's own Triton kernels, chunked for training and prefill, recurrent for decoding."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, cast

import torch
from packaging.version import Version
from torch import Tensor

from qwenlinear.errors import Refusal
from qwenlinear.kernels.base import GatedDeltaKernel
from qwenlinear.kernels.capabilities import Form, KernelCapabilities, Tolerance
from qwenlinear.kernels.hardware import TRITON, Hardware, HardwareProbe, at_least, import_function
from qwenlinear.kernels.inputs import DeltaRuleInputs
from qwenlinear.kernels.lowering import Answer
from qwenlinear.kernels.packing import PackedSequences

_FLA = ("fla-core", "flash-linear-attention")
_INSTALL = "pip install 'flash-linear-attention>=0.6.0' 'triton>=3.3'"
_CHUNK = 64  # FLA's chunk, which chunk_indices must match


class FLAKernel(GatedDeltaKernel):
    """flash-linear-attention (`fla.ops.gated_delta_rule`, https://github.com/fla-org/flash-linear-attention).

    The call runs `chunk_gated_delta_rule`; `step` runs `fused_recurrent_gated_delta_rule`, which has no gradients. FLA's
    dispatcher hands the chunked form to FlashQLA where that is installed; its own function is taken from behind the
    dispatcher, so this kernel is FLA's code everywhere. FLA is imported at the first call that nothing else refuses.
    Before a CUDA graph is captured, run the call once with the same :class:`PackedSequences`.

    Not-a-number in one packed document may reach the gradients of another (seen on an H200 with FLA 0.6.0 and its TileLang
    backward, which multiplies a neighbour's rows by zero): `isolated_gradients` is not declared. Outputs stay apart.

    Args:
        hardware: reads what a device is; None reads this machine. Tests pass a fake.

    Raises:
        UnsupportedCall: when called, for example with code ``"fla_backward"``: on Hopper with Triton >= 3.4 and
            < 3.7.1 FLA's backward kernel is wrong (flash-linear-attention #640); with tilelang FLA avoids it.

    Example:
        >>> FLAKernel()
        FLAKernel()
        >>> [refusal.code for refusal in FLAKernel().refusals(*torch.rand(3, 1, 4, 2, 8), *torch.rand(2, 1, 4, 2))]
        ['device']
    """

    capabilities = KernelCapabilities(
        dtypes=frozenset({torch.bfloat16, torch.float16, torch.float32}),
        devices=frozenset({"cuda", "xpu"}),  # FLA's own claim; measured here on NVIDIA only
        chunk=True,
        step=True,
        backward=True,
        state_backward=True,
        initial_state=True,
        final_state=True,
        packed=True,
        key_head_sizes=range(1, 257),
        value_head_groups=True,
        qk_l2norm=True,
        strided=True,  # FLA copies what it needs contiguous
    )
    tolerances: ClassVar[Mapping[torch.dtype, Tolerance]] = {
        torch.bfloat16: Tolerance(1e-2, 1e-2, 1.5e-2),
        torch.float16: Tolerance(2e-3, 2e-3, 4e-3),
        torch.float32: Tolerance(2e-3, 2e-3, 4e-3),  # Triton multiplies float32 as TF32
    }

    def __init__(self, *, hardware: HardwareProbe | None = None) -> None:
        super().__init__(hardware=hardware)
        self._functions: dict[Form, Callable[..., Any]] = {}  # after a first look
        self._broken: tuple[Refusal, ...] | None = None  # None before it
        self._backward: dict[torch.device, tuple[Refusal, ...]] = {}

    # ---- ask -------------------------------------------------------------------------------------------------------

    def _machine_refusals(self, hardware: Hardware) -> Iterable[Refusal]:
        if hardware.device_type not in ("cuda", "xpu"):
            return  # the device itself is refused by `capabilities`
        if hardware.device_type == "cuda" and hardware.hip is None:
            if hardware.capability is None:
                yield Refusal("device", "a GPU", f"{hardware} without one that PyTorch can use", "use TorchKernel()")
            elif hardware.capability < (8, 0):
                yield Refusal("compute_capability", "8.0 or newer (Triton's limit)", str(hardware), "use TorchKernel()")
        for name, distributions, minimum in (("FLA", _FLA, "0.6.0"), ("Triton", TRITON, "3.3")):
            found = hardware.package(*distributions)
            if found is None:
                yield Refusal("package", f"{name} >= {minimum}", f"no {distributions[0]}", _INSTALL)
            elif not at_least(found, minimum):
                yield Refusal("package_version", f"{name} >= {minimum}", f"{distributions[0]} {found}", _INSTALL)

    def _refusals(self, inputs: DeltaRuleInputs, form: Form) -> Iterable[Refusal]:
        if form != "chunk" or not inputs.needs_grad:
            return ()
        device = inputs.q.device
        if device not in self._backward:
            self._backward[device] = tuple(_known_bad_backward(self._hardware(device)))
        return self._backward[device]

    def _load(self) -> Iterable[Refusal]:
        if self._broken is None:
            module = "fla.ops.gated_delta_rule"
            chunk = import_function(module, "chunk_gated_delta_rule", "fla-core")
            step = import_function(module, "fused_recurrent_gated_delta_rule", "fla-core")
            broken = tuple(found for found in (chunk, step) if isinstance(found, Refusal))[:1]
            if not broken:
                # FLA's own function lies behind its dispatcher. torch.compiler.disable, which unwrap takes off too,
                # goes on again: FLA keeps this code out of graphs, which would break at its inner dispatchers anyway.
                own = inspect.unwrap(cast(Callable[..., Any], chunk))
                disabled = torch.compiler.disable(own)
                self._functions = {"chunk": disabled, "step": cast(Callable[..., Any], step)}
            self._broken = broken  # last: another thread that finds it set goes on to the functions
        return self._broken

    def _describe(self, form: Form) -> str:
        if form == "step":
            return "on FLA's fused_recurrent_gated_delta_rule (Triton)"
        return (
            "on FLA's own chunk_gated_delta_rule (Triton; FLA's dispatcher and its hand-over to FlashQLA are bypassed)"
        )

    def __getstate__(self) -> dict[str, object]:  # a saved model imports FLA afresh: its functions do not pickle
        return {**self.__dict__, "_functions": {}, "_broken": None}

    # ---- run -------------------------------------------------------------------------------------------------------

    def _chunk(self, inputs: DeltaRuleInputs) -> Answer:
        packed = inputs.packed
        arguments = _arguments(inputs)
        if packed is not None:  # all from the host's boundaries, once a batch: FLA then reads nothing back
            arguments["cu_seqlens_cpu"] = packed._boundaries(torch.device("cpu"))
            arguments["chunk_indices"] = _chunk_indices(packed, inputs.q.device)
        return cast(Answer, self._functions["chunk"](**arguments))

    def _step(self, inputs: DeltaRuleInputs) -> Answer:
        return cast(Answer, self._functions["step"](**_arguments(inputs)))


def _arguments(inputs: DeltaRuleInputs) -> dict[str, Any]:
    return {
        "q": inputs.q,
        "k": inputs.k,
        "v": inputs.v,
        "g": inputs.g,
        "beta": inputs.beta.float() if inputs.beta.dtype == torch.float64 else inputs.beta,
        "scale": inputs.scale,
        "initial_state": inputs.initial_state,
        "output_final_state": inputs.output_final_state,
        "use_qk_l2norm_in_kernel": inputs.use_qk_l2norm_in_kernel,
        "cu_seqlens": inputs.boundaries,
    }


def _chunk_indices(packed: PackedSequences, device: torch.device) -> Tensor:
    """``[chunks, 2]`` int32, shared: of each chunk the document and the place in it (FLA's `prepare_chunk_indices`)."""

    def make() -> Tensor:
        counts = torch.tensor([-(-length // _CHUNK) for length in packed.lengths], device="cpu")
        document = torch.repeat_interleave(counts)
        place = torch.arange(len(document), device="cpu") - (counts.cumsum(0) - counts)[document]
        return torch.stack([document, place], 1).to(device=device, dtype=torch.int32)

    return packed.derive(("FLAKernel.chunk_indices", device), make)


def _known_bad_backward(hardware: Hardware) -> Iterable[Refusal]:
    """flash-linear-attention #640, by the conditions of fla 0.6.0 (`fla.ops.common.chunk_o`, `backends.tilelang`).

    There FLA prefers its TileLang backward to the wrong Triton one where `tilelang` is installed and finds nvcc.
    """
    triton = hardware.package(*TRITON)
    hopper = hardware.capability is not None and hardware.capability[0] == 9
    if not hopper or triton is None or not Version("3.4.0") <= triton < Version("3.7.1"):
        return
    tilelang = hardware.package("tilelang")
    if tilelang is None or not hardware.nvcc:
        have = "no tilelang" if tilelang is None else f"tilelang {tilelang} without nvcc"
        yield Refusal(
            "fla_backward",
            "Triton < 3.4.0 or >= 3.7.1, or tilelang with nvcc, for gradients on Hopper (flash-linear-attention #640)",
            f"Triton {triton} with FLA {hardware.package(*_FLA)} and {have}",
            "pip install tilelang (and nvidia-cuda-nvcc), or pip install 'triton>=3.7.1'; torch.no_grad() runs",
        )
