"""Prove a kernel or a layer: :func:`check_kernel`, :func:`check_layer`, and :class:`KernelConformance` for pytest."""

from qwenlinear.testing.cases import Case
from qwenlinear.testing.kernel import KernelConformance, check_kernel, too_narrow
from qwenlinear.testing.layer import check_layer
from qwenlinear.testing.report import CaseResult, ConformanceError, ConformanceReport

__all__ = [
    "Case",
    "CaseResult",
    "ConformanceError",
    "ConformanceReport",
    "KernelConformance",
    "check_kernel",
    "check_layer",
    "too_narrow",
]
