"""AutoKernel, the first candidate that does not refuse; and kernels by name, for a command line."""

from __future__ import annotations

import argparse
import importlib
import logging
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from qwenlinear.errors import Refusal, UnsupportedCall
from qwenlinear.kernels.base import GatedDeltaKernel
from qwenlinear.kernels.capabilities import Form, KernelCapabilities, Tolerance
from qwenlinear.kernels.fla import FLAKernel
from qwenlinear.kernels.flashqla import FlashQLAKernel
from qwenlinear.kernels.inputs import DeltaRuleInputs
from qwenlinear.kernels.lowering import Answer
from qwenlinear.kernels.torch_kernel import TorchKernel
from qwenlinear.kernels.triton_kernel import TritonKernel

_log = logging.getLogger("qwenlinear")
_told: set[tuple[Form, str, str]] = set()  # choices already logged in this process; chooses nothing itself


class AutoKernel(GatedDeltaKernel):
    """Each call goes to the first candidate that does not refuse it; chunked and recurrent form are chosen apart.

    The choice rests on device, dtype, head sizes, gradients, packing and length, never on values. It is logged once a
    process for each form and chosen kernel (logger ``qwenlinear``, level INFO); `explain` shows who runs, and in one line
    each why the others do not (``kernel.candidates[0].explain(...)`` has every reason and remedy). `capabilities` says what
    some candidate can do and what every candidate promises (determinism, compilation); `tolerances` are the widest of the
    candidates'.

    Args:
        candidates: kernels in order of preference; default None for ``[FlashQLAKernel(),
            TritonKernel(), FLAKernel(), TorchKernel()]``.

    Raises:
        ValueError: no candidate, or one that is not a GatedDeltaKernel.
        UnsupportedCall: when called, if every candidate refuses; its refusals name their kernels.

    Example:
        >>> kernel = AutoKernel()
        >>> o, _ = kernel(*torch.rand(3, 1, 4, 2, 8), -torch.rand(1, 4, 2), torch.rand(1, 4, 2))
        >>> o.shape
        torch.Size([1, 4, 2, 8])
        >>> AutoKernel([TorchKernel()])
        AutoKernel([TorchKernel()])
    """

    def __init__(self, candidates: Sequence[GatedDeltaKernel] | None = None) -> None:
        if candidates is None:
            candidates = (FlashQLAKernel(), TritonKernel(), FLAKernel(), TorchKernel())
        if not isinstance(candidates, Sequence) or not all(isinstance(c, GatedDeltaKernel) for c in candidates):
            raise ValueError(f"candidates needs a sequence of GatedDeltaKernel objects, got {candidates!r}")
        if not candidates:
            raise ValueError("candidates needs at least one kernel, got none")
        self.candidates = tuple(candidates)
        self.capabilities = _union([candidate.capabilities for candidate in self.candidates])
        self.tolerances = _widest(self.candidates)  # type: ignore[misc]  # a composite answers per instance
        self._said: set[tuple[Form, int]] = set()
        super().__init__()

    def unavailable(self, device: torch.device | str) -> tuple[Refusal, ...]:
        """What a machine lacks for every candidate.

        Args:
            device: the device the tensors would be on.

        Returns:
            ``()`` if one candidate is there, else every candidate's reasons.
        """
        return self._first_without(lambda candidate: candidate.unavailable(device))[1]

    def __repr__(self) -> str:
        return f"AutoKernel([{', '.join(map(repr, self.candidates))}])"

    # ---- how it runs -----------------------------------------------------------------------------------------------

    def _first_without(
        self, ask: Callable[[GatedDeltaKernel], tuple[Refusal, ...]]
    ) -> tuple[GatedDeltaKernel | None, tuple[Refusal, ...]]:
        """The first candidate with nothing to refuse, or None and what all of them say."""
        refused: list[tuple[GatedDeltaKernel, tuple[Refusal, ...]]] = []
        for candidate in self.candidates:
            refusals = ask(candidate)
            if not refusals:
                return candidate, ()
            refused.append((candidate, refusals))
        return None, tuple(r if r.kernel else replace(r, kernel=repr(kernel)) for kernel, rs in refused for r in rs)

    def _missing(self, device: torch.device | str) -> tuple[Refusal, ...]:
        return self._first_without(lambda candidate: candidate._missing(device))[1]

    def _run(self, inputs: DeltaRuleInputs, form: Form) -> Answer:
        return self._execute(inputs, form)

    def _execute(self, inputs: DeltaRuleInputs, form: Form) -> Answer:
        for chosen in self.candidates:  # one without the form needs no words here on why it refuses
            if getattr(chosen.capabilities, form) and not chosen._all_refusals(inputs, form):
                break
        else:
            raise UnsupportedCall(repr(self), self._all_refusals(inputs, form), f"{form}: {inputs.describe()}")
        if (form, id(chosen)) not in self._said:
            self._said.add((form, id(chosen)))
            self._tell(chosen, inputs, form)
        return chosen._execute(inputs, form)

    def _all_refusals(self, inputs: DeltaRuleInputs, form: Form) -> tuple[Refusal, ...]:
        return self._first_without(lambda candidate: candidate._all_refusals(inputs, form))[1]

    def _explain(self, inputs: DeltaRuleInputs, form: Form) -> list[str]:
        chosen, _ = self._first_without(lambda candidate: candidate._all_refusals(inputs, form))
        lines = [f"  {form}: {'no candidate runs it' if chosen is None else f'goes to {chosen!r}'}"]
        for number, candidate in enumerate(self.candidates):
            refusals = candidate._all_refusals(inputs, form)
            if refusals and chosen is not None:  # one line: what matters is who runs
                more = f" (+{len(refusals) - 1} more: candidates[{number}].explain)" if len(refusals) > 1 else ""
                lines.append(f"    {candidate!r}: refused: {refusals[0]}{more}")
                continue
            first, *rest = candidate._explain(inputs, form)
            note = ", but comes later" if not refusals and candidate is not chosen else ""
            lines += [f"    {candidate!r}{first.strip().removeprefix(form)}{note}", *(f"  {line}" for line in rest)]
        return lines

    def _tell(self, chosen: GatedDeltaKernel, inputs: DeltaRuleInputs, form: Form) -> None:
        """Log a choice, once a process: a model has as many AutoKernels as layers."""
        key = (form, repr(chosen), repr(self))
        if key not in _told:
            _told.add(key)
            _log.info("AutoKernel chose for %s\n%s", inputs.describe(), "\n".join(self._explain(inputs, form)))


@dataclass(frozen=True)
class _AnyOf:
    """Sizes that some container holds."""

    containers: tuple[Container[int], ...]

    def __contains__(self, size: object) -> bool:
        return any(size in container for container in self.containers)

    def __repr__(self) -> str:
        return " or ".join(map(repr, self.containers))


def _sizes(containers: list[Container[int] | None]) -> Container[int] | None:
    finite = tuple(container for container in containers if container is not None)
    return _AnyOf(finite) if len(finite) == len(containers) else None


def _union(declared: list[KernelCapabilities]) -> KernelCapabilities:
    """What some candidate can, and what all promise."""
    devices = [capabilities.devices for capabilities in declared]
    finite = [names for names in devices if names is not None]
    return KernelCapabilities(
        dtypes=frozenset().union(*(capabilities.dtypes for capabilities in declared)),
        devices=frozenset().union(*finite) if len(finite) == len(devices) else None,
        key_head_sizes=_sizes([capabilities.key_head_sizes for capabilities in declared]),
        value_head_sizes=_sizes([capabilities.value_head_sizes for capabilities in declared]),
        state_layout="kv",  # a candidate that wants another is lowered by itself
        deterministic=all(capabilities.deterministic for capabilities in declared),
        isolated_gradients=all(capabilities.isolated_gradients for capabilities in declared if capabilities.backward),
        compile_safe=all(capabilities.compile_safe for capabilities in declared),
        **{name: any(getattr(capabilities, name) for capabilities in declared) for name in _ABILITIES},
    )


_ABILITIES = (
    "chunk",
    "step",
    "backward",
    "step_backward",
    "state_backward",
    "initial_state",
    "final_state",
    "state_in_place",
    "packed",
    "dense",
    "empty_sequences",
    "value_head_groups",
    "qk_l2norm",
    "strided",
)


def _widest(kernels: Sequence[GatedDeltaKernel]) -> dict[torch.dtype, Tolerance]:
    widest: dict[torch.dtype, Tolerance] = {}
    for kernel in kernels:
        for dtype, new in kernel.tolerances.items():
            old = widest.get(dtype, new)
            widest[dtype] = Tolerance(
                max(old.output, new.output), max(old.state, new.state), max(old.gradient, new.gradient)
            )
    return widest


# ---- kernels by name -----------------------------------------------------------------------------------------------

_NAMES: dict[str, Callable[[], GatedDeltaKernel]] = {
    "auto": AutoKernel,
    "torch": TorchKernel,
    "triton": TritonKernel,
    "fla": FLAKernel,
    "flashqla": FlashQLAKernel,
    "flash_qla": FlashQLAKernel,
}
_KNOWN = f"{', '.join(_NAMES)} or package.module:Class"


def kernel_from_name(name: str) -> GatedDeltaKernel:
    """Build a kernel from a word of a command line or a configuration file.

    Args:
        name: ``"auto"``, ``"torch"``, ``"triton"``, ``"fla"``, ``"flashqla"`` (or ``"flash_qla"``), or
            ``"package.module:Class"`` for a GatedDeltaKernel subclass of your own that is built without arguments.

    Returns:
        The kernel; whether the machine can run it is asked with `require`.

    Raises:
        ValueError: an unknown name, a module that does not import, a missing attribute, a class that is no kernel.

    Example:
        >>> kernel_from_name("torch")
        TorchKernel()
        >>> kernel_from_name("qwenlinear.kernels:TorchKernel")
        TorchKernel()
    """
    if not isinstance(name, str):
        raise ValueError(f"the kernel's name needs to be {_KNOWN}, got {name!r}")
    if name in _NAMES:
        return _NAMES[name]()
    module, colon, attribute = name.partition(":")
    if not (colon and module and attribute):
        raise ValueError(f"the kernel's name needs to be {_KNOWN}, got {name!r}")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except AttributeError as error:
        raise ValueError(f"{name!r} needs a class {attribute} in {module}: {error}") from error
    except Exception as error:
        told = f"{name!r} needs a module {module} that imports, got {type(error).__name__}: {error}"
        raise ValueError(told + _where_to_look(module, error)) from error
    if not (isinstance(found, type) and issubclass(found, GatedDeltaKernel)):
        raise ValueError(f"{name!r} needs a subclass of GatedDeltaKernel, got {found!r}")
    try:
        return found()
    except TypeError as error:
        raise ValueError(f"{name!r} needs a class that is built without arguments: {error}") from error


def _where_to_look(module: str, error: Exception) -> str:
    """What to do about a module that Python does not find; nothing where it is an import inside of it that fails."""
    if not isinstance(error, ModuleNotFoundError) or error.name not in (module, module.partition(".")[0]):
        return ""
    path = Path(*module.split("."))
    if path.with_suffix(".py").is_file() or path.is_dir():
        return f"; {module} is here, but not on Python's path: run with PYTHONPATH=."
    return "; put its folder on Python's path (PYTHONPATH=. for the current one), or install its package"


def kernel_name(word: str) -> str:
    """A word of a command line that names a kernel: the ``type`` of an argparse option.

    Args:
        word: as it was typed.

    Returns:
        The word.

    Raises:
        argparse.ArgumentTypeError: one that :func:`kernel_from_name` does not take.

    Example:
        >>> kernel_name("torch")
        'torch'
    """
    try:
        kernel_from_name(word)
    except ValueError as error:  # argparse shows the words of its own exception alone
        raise argparse.ArgumentTypeError(str(error)) from error
    return word


def add_kernel_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--qwen-gdn-backend`` to a parser; a name that :func:`kernel_from_name` does not take is a usage error.

    Args:
        parser: the parser; the value is read by :func:`kernel_from_args`.

    Example:
        >>> parser = argparse.ArgumentParser()
        >>> add_kernel_arguments(parser)
        >>> parser.parse_args(["--qwen-gdn-backend", "torch"]).qwen_gdn_backend
        'torch'
    """
    parser.add_argument(
        "--qwen-gdn-backend",
        type=kernel_name,
        default="auto",
        metavar="KERNEL",
        help=f"kernel of the Gated DeltaNet layers: {_KNOWN} (default: auto)",
    )


def kernel_from_args(args: argparse.Namespace, device: torch.device | str | None = None) -> GatedDeltaKernel:
    """Build the kernel that ``--qwen-gdn-backend`` names; one named explicitly must be able to run here.

    Args:
        args: parsed by a parser that :func:`add_kernel_arguments` has seen.
        device: where the model will be; default None for the accelerator PyTorch finds, else the CPU.

    Returns:
        The kernel.

    Raises:
        ValueError: a name that :func:`kernel_from_name` does not take.
        UnsupportedCall: the machine lacks what the named kernel needs, so that a job dies at start-up.
    """
    name: str = args.qwen_gdn_backend
    kernel = kernel_from_name(name)
    if name != "auto":
        kernel.require(_default_device() if device is None else device)
    return kernel


def _default_device() -> torch.device:
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device("cpu") if found is None else found
