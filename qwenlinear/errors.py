"""How qwenlinear says no: a limit of a kernel is a :class:`Refusal`, a call that meets one is an :class:`UnsupportedCall`.

A malformed call (wrong shape, wrong dtype, contradictory arguments) is a plain ``ValueError`` instead: no kernel could run it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Refusal:
    """One reason why a kernel does not run a call: what is needed, what there is, what to do.

    Args:
        code: a stable word for programs and tests, for example ``"dtype"`` or ``"compute_capability"``.
        needs: what the kernel needs, in words.
        got: what the call or the machine has, in words.
        remedy: what to do about it, as an instruction.
        kernel: which kernel refuses, as its ``repr``, where several were asked; default empty.

    Example:
        >>> print(Refusal("dtype", "bfloat16 or float16", "float32", "cast q, k and v"))
        [dtype] needs bfloat16 or float16; got float32; cast q, k and v
    """

    code: str
    needs: str
    got: str
    remedy: str
    kernel: str = ""

    def __str__(self) -> str:
        whose = f"{self.kernel}: " if self.kernel else ""
        return f"{whose}[{self.code}] needs {self.needs}; got {self.got}; {self.remedy}"


class UnsupportedCall(RuntimeError):
    """A kernel refuses a well-formed call, or a machine lacks what the kernel needs.

    Args:
        kernel: the kernel that refuses, as its ``repr``.
        refusals: every reason, not only the first.
        subject: what was refused, in words (a call's shapes, or a device).

    Attributes:
        refusals: the reasons, a tuple of :class:`Refusal`.

    Example:
        >>> error = UnsupportedCall("MyKernel()", [Refusal("packed", "dense input", "cu_seqlens", "unpack it")], "step")
        >>> [refusal.code for refusal in error.refusals]
        ['packed']
    """

    def __init__(self, kernel: str, refusals: Sequence[Refusal], subject: str = "") -> None:
        self.kernel = kernel
        self.refusals = tuple(refusals)
        self.subject = subject
        lines = [f"{kernel} cannot run" + (f" {subject}" if subject else "") + ":"]
        super().__init__("\n".join([*lines, *(f"  - {refusal}" for refusal in self.refusals)]))

    def __reduce__(self) -> tuple[object, ...]:  # exceptions cross process boundaries by their arguments
        return type(self), (self.kernel, self.refusals, self.subject)
