"""The checks: each runs one case through public calls and returns the relative errors, or raises what went wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from qwenlinear.kernels.base import GatedDeltaKernel
from qwenlinear.kernels.packing import PackedSequences
from qwenlinear.kernels.torch_kernel import TorchKernel
from qwenlinear.testing.cases import Case, Drawn, draw
from qwenlinear.testing.in_place import run_in_place
from qwenlinear.testing.limits import malformed, refused
from qwenlinear.testing.reference import Call, token_by_token
from qwenlinear.testing.running import (
    Answers,
    Arguments,
    Execution,
    Fault,
    compare,
    execution_of,
    form_of,
    in_words,
    run,
    same_bits,
    suspect,
)

Errors = Mapping[str, tuple[float, float]]
Check = Callable[[GatedDeltaKernel, Case, "torch.device | str"], Errors]


class WrongValues(Fault):
    """An answer outside the kernel's own tolerances.

    Args:
        errors: ``{quantity: (relative error, allowed)}``.
        said: words that replace a relative error, by quantity.
        remark: what is behind it.
    """

    def __init__(self, errors: Errors, said: Mapping[str, str], remark: str = "") -> None:
        self.errors = errors
        wrong = [
            f"{name}: {said.get(name.partition(' in ')[0], f'relative error {error:.2g}, allowed {allowed:.2g}')}"
            for name, (error, allowed) in errors.items()
            if error > allowed
        ]
        super().__init__("; ".join(wrong) + (f"; {remark}" if remark else ""))


def values(kernel: GatedDeltaKernel, case: Case, device: torch.device | str) -> Errors:
    """One call gives the output, the final state and every gradient of the float64 reference."""
    return _judged(kernel, form_of(kernel, case.form), draw(case, device))


def separate(kernel: GatedDeltaKernel, case: Case, device: torch.device | str) -> Errors:
    """One call a document gives the reference of the packed call, so that packed and separate agree."""
    return _judged(kernel, _separately(form_of(kernel, case.form)), draw(case, device))


def resume(kernel: GatedDeltaKernel, case: Case, device: torch.device | str) -> Errors:
    """Calls that hand their state on give the reference of the one call."""
    call = form_of(kernel, case.form)
    return _judged(kernel, _in_pieces(call, call, case), draw(case, device))


def handover(kernel: GatedDeltaKernel, case: Case, device: torch.device | str) -> Errors:
    """The chunked form's state, continued by the recurrent form, gives the reference of the one call."""
    return _judged(kernel, _in_pieces(form_of(kernel, "chunk"), form_of(kernel, "step"), case), draw(case, device))


def in_place(kernel: GatedDeltaKernel, case: Case, device: torch.device | str) -> Errors:
    """Steps that overwrite the state they start from give the reference of those that do not, and write to nothing else."""
    drawn, step = draw(case, device), form_of(kernel, "step")
    answers = run_in_place(_in_pieces(step, step, case) if case.pieces else step, drawn)
    truth = _truth(kernel, drawn)
    return _within(compare(answers, truth, drawn.double(), kernel.tolerances[case.torch_dtype]), answers, truth)


def repeat(kernel: GatedDeltaKernel, case: Case, device: torch.device | str) -> Errors:
    """The same call again, after another call, gives the same bits where the kernel says so, and leaves old answers alone."""
    drawn, other = draw(case, device), draw(case.but(seed=case.seed + 1), device)
    execution = form_of(kernel, case.form)
    first = run(execution, drawn)
    kept = {name: answer.clone() for name, answer in first.items()}
    run(execution, other)
    if changed := same_bits(first, kept):
        raise Fault(f"a later call overwrote the {changed[0]} of an earlier one")
    for _ in range(3 if kernel.capabilities.deterministic else 0):
        if changed := same_bits(first, run(execution, drawn)):
            raise Fault(f"repeated calls differ in the {changed[0]}, declared deterministic")
    return _judged(kernel, _two_in_flight(execution, other) if case.grad else execution, drawn)


def isolation(kernel: GatedDeltaKernel, case: Case, device: torch.device | str) -> Errors:
    """Not-a-number in one sequence reaches no other."""
    drawn = draw(case, device)
    victim = case.N // 2
    spoiled = Drawn(case, {}, drawn.d_output.clone(), drawn.d_state.clone(), drawn.cu_seqlens)
    for name, base in drawn.bases.items():
        spoiled.bases[name] = base.clone()
        _sequence(spoiled.bases[name], name, case, victim).fill_(torch.nan)
    _sequence(spoiled.d_output, "output", case, victim).zero_()
    spoiled.d_state[victim].zero_()
    answers, truth, wide = run(form_of(kernel, case.form), spoiled), _truth(kernel, drawn, spoiled), drawn.double()
    for name, answer in answers.items():
        _sequence(answer, name, case, victim).zero_()
        _sequence(truth[name], name, case, victim).zero_()
    return _within(compare(answers, truth, wide, kernel.tolerances[case.torch_dtype]), answers, truth)


def stale(kernel: GatedDeltaKernel, case: Case, device: torch.device | str) -> Errors:
    """Boundaries rewritten in place, before the next call and before the backward pass: the values at call time decide."""
    drawn = draw(case, device)
    assert isinstance(drawn.cu_seqlens, Tensor), "a stale case has boundaries in a tensor"
    boundaries, call = drawn.cu_seqlens, form_of(kernel, case.form)
    current = boundaries.clone()
    others = current.clone()
    others[1:-1] += 1

    def execution(arguments: Arguments) -> tuple[Tensor, Tensor | None]:
        boundaries.copy_(others)
        call(arguments)
        boundaries.copy_(current)
        answer = call(arguments)
        boundaries.copy_(others)  # the backward pass is still to come
        return answer

    handed = Drawn(case, drawn.bases, drawn.d_output, drawn.d_state, current)
    return _judged(kernel, lambda arguments: execution({**arguments, "cu_seqlens": boundaries}), handed)


def compiled(kernel: GatedDeltaKernel, case: Case, device: torch.device | str) -> Errors:
    """``torch.compile(fullgraph=True)`` captures the call whole and changes nothing."""
    call = form_of(kernel, case.form)
    torch._dynamo.reset()
    try:
        whole: Any = torch.compile(call, fullgraph=True, backend="aot_eager")
        return _judged(kernel, whole, draw(case, device))
    finally:
        torch._dynamo.reset()


def packings(kernel: GatedDeltaKernel, case: Case, device: torch.device | str) -> Errors:
    """Random packings of a pool of documents (``lengths``) give every document what it gets alone; ``T`` packings are drawn.

    Every eighth packing is checked with its gradients.
    """
    assert case.lengths is not None, "the lengths of a packings case are those of its pool"
    drawn, call = draw(case, device), form_of(kernel, case.form)
    bounds = list(pairwise([0, *accumulate(case.lengths)]))
    alone = run(_separately(call), drawn)
    tolerance = kernel.tolerances[case.torch_dtype]
    generator = torch.Generator("cpu").manual_seed(case.seed)
    worst: dict[str, tuple[float, float]] = {}
    for number in range(case.T):
        count = int(torch.randint(1, 6, (), generator=generator))
        chosen = torch.randint(len(bounds), (count,), generator=generator)
        spans = [torch.arange(*bounds[n]) for n in chosen.tolist()]
        tokens, documents = torch.cat(spans).to(device), chosen.to(device)
        lengths = tuple(len(span) for span in spans)
        smaller = case.but(lengths=lengths, grad=case.grad if number % 8 == 0 else "")

        def pick(x: Tensor, name: str, tokens: Tensor = tokens, documents: Tensor = documents) -> Tensor:
            return x.index_select(0, documents) if "state" in name else x.index_select(1, tokens)

        bases = {name: pick(base, name) for name, base in drawn.bases.items()}
        d_output, d_state = pick(drawn.d_output, "output"), pick(drawn.d_state, "state")
        packed = Drawn(smaller, bases, d_output, d_state, PackedSequences.from_lengths(lengths))
        answers = run(call, packed)
        expected = {name: pick(alone[name], name).double() for name in answers}
        errors = compare(answers, expected, packed.double(), tolerance)
        for name, (error, allowed) in errors.items():
            pair = (error, 2 * allowed)  # two runs of the kernel, each within its tolerance of the truth
            if error > pair[1]:
                where = f"in packing {number}, of lengths {list(lengths)}, against separate calls"
                raise WrongValues({name: pair}, in_words(answers, expected), where)
            worst[name] = max(worst.get(name, pair), pair)
    return worst


_CEILINGS = {torch.float64: 1e-6, torch.float32: 1e-2, torch.float16: 2e-2, torch.bfloat16: 5e-2}


def tolerances(kernel: GatedDeltaKernel, case: Case, device: torch.device | str) -> Errors:
    """The kernel promises something: its tolerances are no larger than its dtype's digits can excuse."""
    promised, ceiling = kernel.tolerances[case.torch_dtype], _CEILINGS[case.torch_dtype]
    if not 0 < max(promised.output, promised.state, promised.gradient) <= ceiling:
        raise Fault(f"tolerances of {case.dtype} need to be at most {ceiling:g}, got {promised}")
    return {}


CHECKS: dict[str, Check] = {
    check.__name__: check
    for check in (
        values,
        separate,
        resume,
        handover,
        in_place,
        repeat,
        isolation,
        stale,
        compiled,
        packings,
        tolerances,
        refused,
        malformed,
    )
}


def reference_of(kernel: GatedDeltaKernel) -> Call:
    """TorchKernel in float64, and for TorchKernel itself the recurrence token by token."""
    return token_by_token if isinstance(kernel, TorchKernel) else TorchKernel()


def _truth(kernel: GatedDeltaKernel, drawn: Drawn, cotangents: Drawn | None = None) -> Answers:
    """The float64 answers to ``drawn``, with the cotangents of another where given."""
    wide, given = drawn.double(), (cotangents or drawn).double()
    case = drawn.case.but(scratch=False, mode="no_grad" if drawn.case.mode == "inference" else drawn.case.mode)
    plain = Drawn(case, wide.bases, given.d_output, given.d_state, wide.cu_seqlens)
    return run(execution_of(reference_of(kernel)), plain)


def _judged(kernel: GatedDeltaKernel, execution: Execution, drawn: Drawn) -> Errors:
    answers, truth, wide = run(execution, drawn), _truth(kernel, drawn), drawn.double()
    tolerance = kernel.tolerances[drawn.case.torch_dtype]
    errors = compare(answers, truth, wide, tolerance)
    return _within(errors, answers, truth, lambda: suspect(answers, truth, wide, tolerance))


def _within(errors: Errors, answers: Answers, truth: Answers, explain: Callable[[], str] = lambda: "") -> Errors:
    if any(not error <= allowed for error, allowed in errors.values()):
        raise WrongValues(errors, in_words(answers, truth), explain())
    return errors


def _sequence(x: Tensor, name: str, case: Case, n: int) -> Tensor:
    """The n-th sequence's part of an input or an answer, a view."""
    if case.lengths is None or "state" in name:
        return x[n : n + 1]
    start = sum(case.lengths[:n])
    return x[:, start : start + case.lengths[n]]


def _separately(call: Execution) -> Execution:
    """A packed call as one dense call a document."""

    def execution(arguments: Arguments) -> tuple[Tensor, Tensor | None]:
        packed, state = arguments["cu_seqlens"], arguments.get("initial_state")
        assert isinstance(packed, PackedSequences), "separate calls are made of a PackedSequences"
        outputs, finals = [], []
        for n, (start, end) in enumerate(pairwise(packed.bounds)):
            alone = {name: arguments[name][:, start:end] for name in _BY_TOKEN} | {"cu_seqlens": None}
            o, final = call({**arguments, **alone, **({} if state is None else {"initial_state": state[n : n + 1]})})
            outputs.append(o)
            finals.append(final)
        return torch.cat(outputs, 1), _joined(finals)

    return execution


def _in_pieces(first: Execution, later: Execution, case: Case) -> Execution:
    """A call as several, each from the state of the one before."""
    pieces = _pieces(case)

    def execution(arguments: Arguments) -> tuple[Tensor, Tensor | None]:
        state, outputs = arguments.get("initial_state"), []
        for number, (tokens, packed) in enumerate(pieces):
            index = tokens.to(arguments["q"].device)
            part: Arguments = {name: arguments[name].index_select(1, index) for name in _BY_TOKEN}
            part |= {"output_final_state": True, "cu_seqlens": packed, "initial_state": state}
            o, state = (later if number else first)({**arguments, **part})
            outputs.append(o)
        order = torch.cat([tokens for tokens, _ in pieces]).argsort().to(o.device)
        return torch.cat(outputs, 1).index_select(1, order), state if arguments["output_final_state"] else None

    return execution


def _pieces(case: Case) -> list[tuple[Tensor, PackedSequences | None]]:
    """The tokens of each piece and its boundaries; packed documents are all cut alike, into as many parts as ``pieces`` has."""
    if case.lengths is None:
        assert sum(case.pieces) == case.T, f"pieces {case.pieces} of T={case.T}"
        return [(tokens, None) for tokens in torch.arange(case.T).split(case.pieces)]
    parts = len(case.pieces)
    pieces: list[tuple[Tensor, PackedSequences | None]] = []
    for part in range(parts):
        spans = [
            torch.arange(start + length * part // parts, start + length * (part + 1) // parts)
            for start, length in zip(accumulate(case.lengths, initial=0), case.lengths)  # noqa: B905 -- one bound more
        ]
        pieces.append((torch.cat(spans), PackedSequences.from_lengths([len(span) for span in spans])))
    return pieces


_BY_TOKEN = ("q", "k", "v", "g", "beta")


def _joined(finals: list[Tensor | None]) -> Tensor | None:
    states = [final for final in finals if final is not None]
    return torch.cat(states) if states else None


def _two_in_flight(execution: Execution, other: Drawn) -> Execution:
    """Another forward pass between a call's forward and its backward pass."""

    def both(arguments: Arguments) -> tuple[Tensor, Tensor | None]:
        answer = execution(arguments)
        bases = {name: base.clone().requires_grad_(name in other.case.wanted) for name, base in other.bases.items()}
        execution({**other.view(bases), **other.options})
        return answer

    return both
