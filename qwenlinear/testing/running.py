"""Running a case: one or more public calls, made into a dictionary of named tensors that is compared with the float64 truth."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from qwenlinear.errors import UnsupportedCall
from qwenlinear.kernels.base import GatedDeltaKernel
from qwenlinear.kernels.capabilities import Form, Tolerance
from qwenlinear.testing.cases import Drawn
from qwenlinear.testing.reference import KNOWN_FAULTS, Call

Answers = dict[str, Tensor]  # "output", "final state", "gradient of q", ...
Arguments = dict[str, Any]
Execution = Callable[[Arguments], tuple[Tensor, "Tensor | None"]]


class Fault(Exception):
    """What a kernel did wrong, in one line (never leaves the suite: it becomes a failed result)."""


def execution_of(call: Call) -> Execution:
    """One call with all the arguments."""
    return lambda arguments: call(**arguments)


def form_of(kernel: GatedDeltaKernel, form: Form) -> Execution:
    """One call of the public method of a form."""

    def execution(arguments: Arguments) -> tuple[Tensor, Tensor | None]:
        try:
            return (kernel if form == "chunk" else kernel.step)(**arguments)
        except UnsupportedCall as error:
            asked = kernel.refusals(**arguments, form=form)
            if error.refusals != asked:
                raise Fault(f"refusals() says {list(asked)}, the call {list(error.refusals)}") from error
            raise

    return execution


def run(execution: Execution, drawn: Drawn) -> Answers:
    """Run a case forward and, where it wants gradients, backward.

    Args:
        execution: takes the arguments of a kernel call and returns its answer, by whatever calls.
        drawn: the tensors.

    Returns:
        Every tensor that the case asks for, by name.

    Raises:
        Fault: the call changed an input, gave memory of an input back, or left out what was asked for.
    """
    case = drawn.case
    leaves = {name: base.clone().requires_grad_(name in case.wanted) for name, base in drawn.bases.items()}
    handed = {name: leaf.detach().clone() for name, leaf in leaves.items()}
    boundaries = drawn.cu_seqlens.clone() if isinstance(drawn.cu_seqlens, Tensor) else None
    modes = {"grad": nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode}
    with scratch_filled_with_nan() if case.scratch else nullcontext():
        with modes[case.mode]():
            o, final = execution({**drawn.view(leaves), **drawn.options})
        _no_alias(leaves, {"output": o, "final state": final})
        if (final is not None) != case.final_state:
            raise Fault(f"the final state is {'missing' if final is None else 'there although it was not asked for'}")
        answers = {"output": o} if final is None else {"output": o, "final state": final}
        answers |= _gradients(answers, leaves, drawn)
    for name, leaf in leaves.items():
        if not unchanged(leaf, handed[name]):
            raise Fault(f"{name} was written to")
    if boundaries is not None and not torch.equal(boundaries, drawn.cu_seqlens):  # type: ignore[arg-type]
        raise Fault("cu_seqlens was written to")
    return {name: answer.detach() for name, answer in answers.items()}


def _gradients(answers: Answers, leaves: Mapping[str, Tensor], drawn: Drawn) -> Answers:
    case = drawn.case
    if not case.wanted:
        return {}
    losses = [("output", drawn.d_output)] if case.loss != "state" else []
    losses += [("final state", drawn.d_state)] if case.loss != "output" and case.final_state else []
    losses = [(name, cotangent) for name, cotangent in losses if answers[name].requires_grad]
    if not losses:
        raise Fault(f"no gradient comes back to {', '.join(case.wanted)}")
    wanted = [leaves[name] for name in case.wanted]
    gradients = torch.autograd.grad(
        [answers[name] for name, _ in losses], wanted, [cotangent for _, cotangent in losses], allow_unused=True
    )
    named = {}
    for name, leaf, gradient in zip(case.wanted, wanted, gradients, strict=True):
        if gradient is not None and (gradient.dtype != leaf.dtype or gradient.shape != leaf.shape):
            raise Fault(f"the gradient of {name} is {list(gradient.shape)} {gradient.dtype}")
        named[f"gradient of {name}"] = torch.zeros_like(leaf) if gradient is None else gradient
    return named


def compare(answers: Answers, truth: Answers, drawn: Drawn, tolerance: Tolerance) -> dict[str, tuple[float, float]]:
    """The relative error of each tensor and what is allowed.

    ``norm(x - truth) / norm(truth)``, the norm of the truth taken as no smaller than float32's smallest normal number: what
    underflows everywhere counts as zero. The gradient of g is a difference of terms that cancel (exactly, for a first token);
    it is judged by no less than a hundredth of what flows through its tokens.

    Args:
        answers: of the kernel.
        truth: in float64.
        drawn: the float64 tensors.
        tolerance: the kernel's own.

    Returns:
        ``{name: (error, allowed)}``; not-a-number anywhere is an infinite error (`in_words` says where).
    """
    smallest = torch.finfo(torch.float64 if drawn.case.dtype == "float64" else torch.float32).tiny
    errors = {}
    for name, right in truth.items():
        floor = smallest * math.sqrt(right.numel() + 1)
        if name == "gradient of g":
            floor = max(floor, 0.01 * _flow(truth, drawn))
        allowed = {"output": tolerance.output, "final state": tolerance.state}.get(name, tolerance.gradient)
        label = name
        if name == "gradient of beta" and drawn.case.beta_dtype:  # may have fewer digits than the rest
            label = f"{name} in {drawn.case.beta_dtype}"
            allowed = max(allowed, torch.finfo(answers[name].dtype).eps / 2)
        errors[label] = (relative_error(answers[name], right, floor), allowed)
    return errors


def relative_error(x: Tensor, truth: Tensor, floor: float) -> float:
    """``norm(x - truth) / max(norm(truth), floor)``; infinite where x is not finite or has another shape.

    Args:
        x: any tensor.
        truth: the float64 truth.
        floor: the smallest norm to divide by, > 0.

    Returns:
        The error, on the host (this is where a case synchronises).
    """
    if x.shape != truth.shape:
        return math.inf
    error = float((x.to(torch.float64) - truth).norm() / truth.norm().clamp_min(floor))
    return error if math.isfinite(error) else math.inf


def _flow(truth: Answers, drawn: Drawn) -> float:
    flow = (truth["output"] * drawn.d_output).abs().sum(-1).norm()
    if "final state" in truth:
        flow = flow + (truth["final state"] * drawn.d_state).abs().sum((-1, -2)).norm()
    return float(flow)


def suspect(answers: Answers, truth: Answers, drawn: Drawn, tolerance: Tolerance) -> str:
    """The known fault that explains a wrong output or final state, or nothing.

    Args:
        answers: of the kernel.
        truth: in float64.
        drawn: the float64 tensors.
        tolerance: the kernel's own, within which an explanation must hold.

    Returns:
        A few words, or ``""``.
    """
    if not all(answer.isfinite().all() for answer in answers.values()):
        return _OVERFLOW if drawn.case.gates in ("strong", "mixed", "reset") else ""
    outputs = {name: answer for name, answer in answers.items() if not name.startswith("gradient")}
    plain = Drawn(drawn.case.but(grad=""), drawn.bases, drawn.d_output, drawn.d_state, drawn.cu_seqlens)

    def explained(by: Answers) -> bool:
        found = compare(outputs, {name: by[name] for name in outputs}, plain, tolerance)
        return all(error <= allowed for error, allowed in found.values())

    if drawn.case.shape[1] > 1000 or explained(truth):  # token by token that would take minutes; nothing to explain
        return ""
    for fault in KNOWN_FAULTS:
        if explained(run(execution_of(fault), plain)):
            return f"this is what a kernel gives with {fault.text}"
    return _CANCELLED if drawn.case.gates == "mixed" else ""


# What is mostly behind a failure with such decays, where nothing more certain is known.
_OVERFLOW = "mostly exp of a positive sum of decays overflows: mask what is above the diagonal before exp, not after"
_CANCELLED = (
    "mostly differences of cumulative sums lose small decays that stand beside one of -1e4: "
    "sum in float64, or each span by itself"
)


def in_words(answers: Answers, truth: Answers) -> dict[str, str]:
    """What a relative error can't say: where an answer holds NaN or infinities, or which shape it has instead of the right one.

    Args:
        answers: of the kernel.
        truth: what they should be.

    Returns:
        A few words for each answer of that kind, by name.
    """
    said = {}
    for name, right in truth.items():
        answer = answers[name]
        if answer.shape != right.shape:
            said[name] = f"shape {list(answer.shape)} instead of {list(right.shape)}"
        elif not answer.isfinite().all():
            kinds = {"NaN": answer.isnan(), "infinite": answer.isinf()}
            counts = " and ".join(f"{int(found.sum())} {kind}" for kind, found in kinds.items() if found.any())
            first = (~answer.isfinite()).nonzero()[0].tolist()
            said[name] = f"{counts} among {answer.numel()} values, the first at {first} of {list(answer.shape)}"
    return said


@contextmanager
def scratch_filled_with_nan() -> Iterator[None]:
    """PyTorch fills memory that nobody has written with NaN, and everything is as before afterwards."""
    on, warn_only = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # operators without a deterministic form say so; only the fill matters here
            yield
    finally:
        torch.use_deterministic_algorithms(on, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


def _no_alias(leaves: Mapping[str, Tensor], answers: Mapping[str, Tensor | None]) -> None:
    owners = {leaf.untyped_storage().data_ptr(): name for name, leaf in leaves.items() if leaf.numel()}
    for name, answer in answers.items():
        if answer is None or not answer.numel():
            continue
        owner = owners.setdefault(answer.untyped_storage().data_ptr(), name)
        if owner != name:
            raise Fault(f"the {name} shares memory with {owner}")


def unchanged(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors agree in every bit, not-a-number included."""
    plain = (t.detach().clone(memory_format=torch.contiguous_format).reshape(-1) for t in (x, y))
    bits = [t.view(torch.uint8) if t.numel() else t for t in plain]
    return x.shape == y.shape and torch.equal(*bits)


def same_bits(answers: Answers, others: Answers) -> list[str]:
    """The names whose tensors differ in any bit."""
    return [name for name, answer in answers.items() if not unchanged(answer, others[name])]
