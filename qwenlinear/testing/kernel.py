"""check_kernel: run a kernel against the suite; KernelConformance: the same as one pytest test a case."""

from __future__ import annotations

import copy
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from qwenlinear.errors import UnsupportedCall
from qwenlinear.kernels.base import GatedDeltaKernel
from qwenlinear.kernels.hardware import present
from qwenlinear.kernels.torch_kernel import TorchKernel
from qwenlinear.testing.cases import Case, checked_cases
from qwenlinear.testing.checks import CHECKS, WrongValues
from qwenlinear.testing.generate import Heads, generate
from qwenlinear.testing.limits import widened
from qwenlinear.testing.report import CaseResult, ConformanceError, ConformanceReport
from qwenlinear.testing.running import Fault

_NARROW_CASES = 8  # cases that must pass before an undeclared capability is called too narrow


def check_kernel(
    kernel: GatedDeltaKernel,
    device: torch.device | str = "cpu",
    *,
    first_failure: bool = True,
    cases: Iterable[Case] | None = None,
    heads: Sequence[Heads] | None = None,
    packings: int = 1000,
) -> ConformanceReport:
    """Prove a kernel against the float64 reference, by its public calls, in everything that it declares.

    Args:
        kernel: the kernel.
        device: where its tensors lie; default ``"cpu"``.
        first_failure: stop at the first failure (default), or run everything and then raise.
        cases: run these instead, for example the one that an error message names.
        heads: head configurations ``(H, HV, K, V)`` to try; default None chooses from the declared sizes, off the CPU
            only ``(16, 32, 128, 128)`` where that is declared, since each may cost a compilation.
        packings: how many random packings of documents of 0 to 300 tokens; default 1000.

    Returns:
        The report; ``report.passed`` is True.

    Raises:
        ValueError: no kernel object, a device that is not there, cases that are none, a number below 0.
        ConformanceError: something failed, or every case was refused; the report is its ``.report``.

    Example:
        >>> report = check_kernel(TorchKernel(), cases=[Case("scale", T=5, scale=0.5)])
        >>> report.passed, report.counts
        (True, {'passed': 1, 'failed': 0, 'refused': 0})
    """
    if not isinstance(kernel, GatedDeltaKernel):
        raise ValueError(f"kernel needs an instance of a GatedDeltaKernel, such as MyKernel(); got {kernel!r}")
    if isinstance(packings, bool) or not isinstance(packings, int) or packings < 0:
        raise ValueError(f"packings needs a whole number >= 0, got {packings!r}")
    where, cases = present(device), checked_cases(cases)
    if cases is None:
        cases = generate(kernel, where.type, None if heads is None else tuple(heads), packings)
        look_wider = where.type == "cpu"  # elsewhere an undeclared call may break the device for the whole process
    else:
        look_wider = False
    results: list[CaseResult] = []
    for case in cases:
        results += run_case(kernel, case, where)
        if first_failure and results[-1].status == "failed":
            break
    stopped = first_failure and results and results[-1].status == "failed"
    remarks = too_narrow(kernel, where) if look_wider and not stopped else ()
    report = ConformanceReport(repr(kernel), str(device), tuple(results), remarks, versions())
    if not report.passed:
        raise ConformanceError(report)
    return report


def run_case(kernel: GatedDeltaKernel, case: Case, device: torch.device | str) -> list[CaseResult]:
    """Run one case; never raises for what a kernel does.

    Args:
        kernel: the kernel.
        case: what to ask of it.
        device: where.

    Returns:
        Its result; where only a case's gradients were refused, also that of the case without them.
    """
    start = time.perf_counter()

    def result(status: str, text: str = "", errors: Any = None) -> CaseResult:
        return CaseResult(case, status, text, errors or {}, time.perf_counter() - start)

    try:
        return [result("passed", errors=CHECKS[case.check](kernel, case, device))]
    except WrongValues as error:
        return [result("failed", str(error), error.errors)]
    except Fault as error:
        return [result("failed", str(error))]
    except UnsupportedCall as error:
        refused = result("refused", "; ".join(map(str, error.refusals)))
        if not _beyond_declared(kernel, error, torch.device(device)):
            return [result("failed", f"refused although it is declared: {refused.text}")]
        return [refused, *run_case(kernel, case.but(grad="", loss="both"), device)] if case.grad else [refused]
    except Exception as error:
        return [result("failed", f"{type(error).__name__}: {error}{_line(kernel, error)}")]


def _line(kernel: GatedDeltaKernel, error: Exception) -> str:
    """The line of the kernel's own module that an exception went through last, to go and look at it."""
    module = sys.modules.get(type(kernel).__module__)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == getattr(module, "__file__", None)]
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""


def _beyond_declared(kernel: GatedDeltaKernel, error: UnsupportedCall, device: torch.device) -> bool:
    """Whether a refusal says more than the capabilities, which the suite has respected, could have said."""
    devices = kernel.capabilities.devices
    if devices is not None and device.type not in devices:
        return True
    return any(refusal.code not in _DECLARED_CODES for refusal in error.refusals)


_DECLARED_CODES = frozenset({"form", "initial_state", "final_state", "packed", "state_backward"})


def versions() -> dict[str, str]:
    """Versions of Python, PyTorch and the device's software, for a report."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    if torch.cuda.is_available():
        found |= {"device": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda or torch.version.hip)}
    return found


def too_narrow(kernel: GatedDeltaKernel, device: torch.device | str = "cpu") -> tuple[str, ...]:
    """Capabilities that are not declared and yet work: each is declared on a copy of the kernel, and cases are run on that.

    Args:
        kernel: the kernel.
        device: where; default ``"cpu"``. On a GPU an undeclared call may break the process.

    Returns:
        One remark a capability, for example ``"packed (8 cases pass)"``.

    Example:
        >>> too_narrow(TorchKernel())
        ()
    """
    return tuple(_narrow(kernel, torch.device(device)))


def _narrow(kernel: GatedDeltaKernel, device: torch.device) -> Iterator[str]:
    if "capabilities" in vars(kernel):
        return  # a composite, which answers from its candidates
    declared = list(generate(kernel, device.type, packings=0))
    for text, fields in widened(kernel.capabilities, device.type):
        twin: Any = copy.copy(kernel)
        twin.capabilities = replace(kernel.capabilities, **fields)
        twin.tolerances = {**TorchKernel.tolerances, **kernel.tolerances}
        cases = _cases_of(next(iter(fields)), declared, list(generate(twin, device.type, packings=0)))
        chosen = cases[:: max(1, len(cases) // _NARROW_CASES)][:_NARROW_CASES]
        if chosen and all(run_case(twin, case, device)[-1].status == "passed" for case in chosen):
            yield f"{text} ({len(chosen)} cases pass)"


def _cases_of(name: str, declared: list[Case], wider: list[Case]) -> list[Case]:
    """The cases that a capability decides about."""
    lowered: dict[str, Callable[[Case], bool]] = {
        "dense": lambda case: case.lengths is None,
        "qk_l2norm": lambda case: bool(case.l2norm),
        "strided": lambda case: case.layout != "contiguous",
        "value_head_groups": lambda case: case.heads[1] > case.heads[0],
        "empty_sequences": lambda case: case.lengths is not None and 0 in case.lengths and sum(case.lengths) > 0,
        "deterministic": lambda case: case.check == "repeat",
        "isolated_gradients": lambda case: case.check == "isolation" and case.lengths is not None and bool(case.grad),
        "devices": lambda case: True,
        "state_in_place": lambda case: case.check == "in_place",
    }
    judged = [case for case in wider if case.check not in ("refused", "malformed", "tolerances")]
    if name in lowered:
        return [case for case in judged if lowered[name](case)]
    before = set(declared)
    return [case for case in judged if case not in before]


class KernelConformance:
    """A pytest class with one test a case: inherit, say which kernel, and it runs.

    Attributes:
        kernel: the kernel under test.
        device: where; default ``"cpu"``.
        heads: as in :func:`check_kernel`.
        packings: as in :func:`check_kernel`.
        examples: how many cases Hypothesis draws besides; default 100. Skipped where it is not installed.

    Example:
        >>> class TestMyKernel(KernelConformance):
        ...     kernel = TorchKernel()
    """

    kernel: ClassVar[GatedDeltaKernel]
    device: ClassVar[str] = "cpu"
    heads: ClassVar[Sequence[Heads] | None] = None
    packings: ClassVar[int] = 1000
    examples: ClassVar[int] = 100

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """One test a case."""
        if "conformance_case" in metafunc.fixturenames:
            heads = None if self.heads is None else tuple(self.heads)
            cases = list(generate(self.kernel, present(self.device).type, heads, self.packings))
            ids = [f"{case.form}-{case.dtype}-{case.topic}" for case in cases]
            metafunc.parametrize("conformance_case", cases, ids=ids)

    def test_conformance(self, conformance_case: Case) -> None:
        """The kernel passes the case; a refusal beyond its declared capabilities skips it, with the reason."""
        import pytest

        refused = self._refusal(conformance_case)
        if refused:
            pytest.skip(refused)

    def test_drawn_cases(self) -> None:
        """The kernel passes what Hypothesis draws, which shrinks a failure to a small case."""
        import pytest

        pytest.importorskip("hypothesis")
        from hypothesis import given, settings

        from qwenlinear.testing.strategies import kernel_cases

        cases = kernel_cases(self.kernel, torch.device(self.device).type, self.heads)

        @settings(max_examples=self.examples, deadline=None, database=None, derandomize=True)
        @given(cases)
        def passes(case: Case) -> None:
            self._refusal(case)

        passes()

    def _refusal(self, case: Case) -> str:
        """Run a case; why it was refused, or nothing."""
        results = tuple(run_case(self.kernel, case, self.device))
        if any(result.status == "failed" for result in results):
            raise ConformanceError(ConformanceReport(repr(self.kernel), self.device, results, (), versions()))
        return results[-1].text
