"""FlashQLAKernel: Qwen's fused TileLang kernels for Hopper and Blackwell, chunked form only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Literal, cast

import torch
from packaging.version import Version
from torch import Tensor

from qwenlinear.errors import Refusal
from qwenlinear.kernels.base import GatedDeltaKernel
from qwenlinear.kernels.capabilities import Form, KernelCapabilities, Tolerance
from qwenlinear.kernels.hardware import Hardware, HardwareProbe, at_least, import_function
from qwenlinear.kernels.inputs import DeltaRuleInputs
from qwenlinear.kernels.lowering import Answer, strided_names
from qwenlinear.kernels.packing import PackedSequences

_INSTALL = "pip install 'flash-qla>=0.1.3'"
_CAPABILITIES = ((9, 0), (10, 0), (10, 3), (12, 0), (12, 1))
_ELSEWHERE = "use FLAKernel() or TorchKernel()"


class FlashQLAKernel(GatedDeltaKernel):
    """FlashQLA (`flash_qla.chunk_gated_delta_rule`, https://github.com/QwenLM/FlashQLA).

    K = V = 128, float16 or bfloat16, compute capability 9.0, 10.0, 10.3, 12.0 or 12.1, chunked form only: as the only
    kernel of a layer it decodes through chunks, slowly; ``AutoKernel([FlashQLAKernel(), TritonKernel()])`` decodes well.
    Hardware and versions are checked before the package is imported, which itself raises without such a GPU. Before a
    CUDA graph is captured, run the call once with the same :class:`PackedSequences` (the library asserts it).

    Its own q/k normalisation is not used: it goes through torch.compile, a compiler run at the first call. Where
    ``use_qk_l2norm_in_kernel`` is asked for, q and k are normalised before the kernel.

    Args:
        contiguity: ``"copy"`` (default) copies strided tensors; ``"refuse"`` refuses them: no copy goes unseen.
        hardware: reads what a device is; None reads this machine. Tests pass a fake.

    Raises:
        ValueError: another word for ``contiguity``.
        UnsupportedCall: when called, with every reason.

    Example:
        >>> FlashQLAKernel(contiguity="refuse")
        FlashQLAKernel(contiguity='refuse')
    """

    capabilities = KernelCapabilities(
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        devices=frozenset({"cuda"}),
        chunk=True,
        backward=True,
        state_backward=True,
        initial_state=True,
        final_state=True,
        packed=True,
        key_head_sizes=frozenset({128}),
        value_head_sizes=frozenset({128}),
        value_head_groups=True,
    )
    tolerances: ClassVar[Mapping[torch.dtype, Tolerance]] = {
        torch.bfloat16: Tolerance(1e-2, 1e-2, 1.5e-2),
        torch.float16: Tolerance(2e-3, 2e-3, 4e-3),
    }

    def __init__(
        self, contiguity: Literal["copy", "refuse"] = "copy", *, hardware: HardwareProbe | None = None
    ) -> None:
        if contiguity not in ("copy", "refuse"):
            raise ValueError(f"contiguity needs 'copy' or 'refuse', got {contiguity!r}")
        super().__init__(hardware=hardware)
        self.contiguity = contiguity
        self._function: Callable[..., Any] | None = None
        self._prepare: Callable[[Tensor, Tensor], Tensor] | None = None
        self._broken: tuple[Refusal, ...] | None = None
        self._sm120: dict[torch.device, Version | None] = {}  # flash-qla's version on devices with capability 12.x

    # ---- ask -------------------------------------------------------------------------------------------------------

    def _machine_refusals(self, hardware: Hardware) -> Iterable[Refusal]:
        if hardware.device_type != "cuda":
            return  # the device itself is refused by `capabilities`
        supported = "compute capability " + ", ".join(f"{major}.{minor}" for major, minor in _CAPABILITIES)
        if hardware.hip is not None:
            yield Refusal("device", f"an NVIDIA GPU of {supported}", str(hardware), _ELSEWHERE)
            return
        if hardware.capability is None:
            yield Refusal("device", f"a GPU of {supported}", f"{hardware} without one PyTorch can use", _ELSEWHERE)
        elif hardware.capability not in _CAPABILITIES:
            yield Refusal("compute_capability", supported, str(hardware), _ELSEWHERE)
        if not at_least(hardware.torch, "2.8"):
            yield Refusal("torch_version", "PyTorch >= 2.8", str(hardware.torch), "pip install 'torch>=2.8'")
        if not at_least(hardware.cuda, "12.8"):
            remedy = "install a PyTorch built with CUDA 12.8 or newer"
            yield Refusal("cuda_version", "CUDA >= 12.8", str(hardware.cuda or "none"), remedy)
        yield from _package_refusals(hardware)

    def _refusals(self, inputs: DeltaRuleInputs, form: Form) -> Iterable[Refusal]:
        if inputs.scale == 0:  # FlashQLA computes with `scale or K ** -0.5`
            yield Refusal("scale", "a scale other than 0", "0, which FlashQLA takes for the default", _ELSEWHERE)
        if self.contiguity == "refuse" and (names := strided_names(inputs)):
            remedy = "call contiguous() on them, or use FlashQLAKernel(contiguity='copy')"
            yield Refusal("contiguity", "contiguous tensors", f"strided {', '.join(names)}", remedy)
        version = self._sm120_version(inputs.q.device)
        if version is None:
            return
        if inputs.q.dtype == torch.float16:
            got = "float16, for which FlashQLA's kernel does not compile there"
            yield Refusal("dtype", "bfloat16 on compute capability 12.x", got, "cast q, k and v to bfloat16")
        if inputs.needs_grad and not at_least(version, "0.1.3"):
            remedy = f"{_INSTALL}, or use FLAKernel() for training"
            yield Refusal("backward", "flash-qla >= 0.1.3 for gradients on capability 12.x", f"{version}", remedy)

    def _sm120_version(self, device: torch.device) -> Version | None:
        if device not in self._sm120:
            hardware = self._hardware(device)
            is_sm120 = hardware.capability is not None and hardware.capability[0] == 12
            self._sm120[device] = hardware.package("flash-qla") if is_sm120 else None
        return self._sm120[device]

    def _load(self) -> Iterable[Refusal]:
        if self._broken is None:
            function = import_function("flash_qla", "chunk_gated_delta_rule", "flash-qla")
            if not isinstance(function, Refusal):
                self._function = function
                prepare = import_function("flash_qla.utils.index", "prepare_varlen_metadata", "flash-qla")
                if not isinstance(prepare, Refusal):  # 0.1.3; before it, the library reads boundaries back once a batch
                    self._prepare = cast(Callable[[Tensor, Tensor], Tensor], prepare)
            # last: another thread that finds it set goes on to the functions
            self._broken = (function,) if isinstance(function, Refusal) else ()
        return self._broken

    def _describe(self, form: Form) -> str:
        return "on FlashQLA's chunk_gated_delta_rule (TileLang)"

    def _options(self) -> dict[str, object]:
        return {"contiguity": self.contiguity}

    def __getstate__(self) -> dict[str, object]:  # a saved model imports FlashQLA afresh: its functions do not pickle
        return {**self.__dict__, "_function": None, "_prepare": None, "_broken": None}

    # ---- run -------------------------------------------------------------------------------------------------------

    def _chunk(self, inputs: DeltaRuleInputs) -> Answer:
        assert self._function is not None, "loaded before it runs"
        answer = self._function(
            q=inputs.q,
            k=inputs.k,
            v=inputs.v,
            g=inputs.g,
            beta=inputs.beta.float(),  # one compilation for every dtype of beta, and gradients summed in float32
            scale=inputs.scale,
            initial_state=inputs.initial_state,
            output_final_state=inputs.output_final_state,
            use_qk_l2norm_in_kernel=False,
            cu_seqlens=None if inputs.packed is None else self._boundaries(inputs.packed, inputs.q.device),
        )
        return cast(Answer, answer)

    def _boundaries(self, packed: PackedSequences, device: torch.device) -> Tensor:
        """``[N+1]`` int32 for FlashQLA alone: it hangs what it derives on the tensor, from the host's copy.

        Its plan for splitting long sequences still reads them back once a batch, cached by this tensor's identity.
        """

        def make() -> Tensor:
            cu_seqlens = packed.cu_seqlens(device)
            return cu_seqlens if self._prepare is None else self._prepare(cu_seqlens, packed.cu_seqlens("cpu"))

        return packed.derive(("FlashQLAKernel.cu_seqlens", device), make)


def _package_refusals(hardware: Hardware) -> Iterable[Refusal]:
    version, tilelang = hardware.package("flash-qla"), hardware.package("tilelang")
    if version is None:
        yield Refusal("package", "flash-qla >= 0.1.2", "none", _INSTALL)
    elif not at_least(version, "0.1.2"):
        yield Refusal("package_version", "flash-qla >= 0.1.2", str(version), _INSTALL)
    elif hardware.capability == (12, 1) and version == Version("0.1.3"):  # flash_qla...cp.autocp.launch knows no 12.1
        yield Refusal("package_version", "a flash-qla that imports on sm_121", "0.1.3, which does not", _ELSEWHERE)
    wanted = "0.1.12" if at_least(version, "0.1.3") else "0.1.9"
    if tilelang is None:
        yield Refusal("package", f"tilelang >= {wanted}", "none", f"pip install 'tilelang>={wanted}'")
    elif not at_least(tilelang, wanted):
        yield Refusal("package_version", f"tilelang >= {wanted}", str(tilelang), f"pip install 'tilelang>={wanted}'")
    if not hardware.nvcc:
        yield Refusal(
            "nvcc",
            "nvcc, with which TileLang compiles",
            "none found",
            "install a CUDA toolkit, or pip install nvidia-cuda-nvcc",
        )
