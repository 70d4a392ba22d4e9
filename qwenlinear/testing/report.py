"""ConformanceReport: what a run of the suite found, as a table, as JSON, or as the error that it raises."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from qwenlinear.testing.cases import Case

QUANTITIES = (
    "output",
    "final state",
    *(f"gradient of {name}" for name in ("q", "k", "v", "g", "beta", "initial_state")),
)


@dataclass(frozen=True)
class CaseResult:
    """What became of one case.

    Args:
        case: which.
        status: ``"passed"``, ``"failed"`` or ``"refused"`` (by a limit beyond the declared capabilities, with its reason).
        text: what went wrong, or the refusal; empty where the case passed.
        errors: ``{quantity: (relative error, allowed)}``.
        seconds: wall time.
    """

    case: Case
    status: str
    text: str = ""
    errors: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True)
class ConformanceReport:
    """Every result of a run of the suite.

    Args:
        subject: what was checked, as its ``repr``.
        device: where.
        results: in the order they ran.
        too_narrow: remarks on capabilities that are not declared and yet work here.
        versions: of what took part.
        call: the function that made the report, for the line that reproduces a failure.
    """

    subject: str
    device: str
    results: tuple[CaseResult, ...]
    too_narrow: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    call: str = "check_kernel"

    @property
    def passed(self) -> bool:
        """Whether something ran and nothing failed; refusing every call that the suite measures is no way to pass."""
        measured = any(result.status == "passed" and result.errors for result in self.results)
        refused = any(result.status == "refused" for result in self.results)
        return bool(self.results) and not self.failures and (measured or not refused)

    @property
    def failures(self) -> tuple[CaseResult, ...]:
        """The failed results."""
        return tuple(result for result in self.results if result.status == "failed")

    @property
    def counts(self) -> dict[str, int]:
        """How many cases passed, failed and were refused."""
        found = Counter(result.status for result in self.results)
        return {status: found[status] for status in ("passed", "failed", "refused")}

    def worst(self) -> dict[tuple[str, str, str], tuple[float, float]]:
        """The largest relative error of each quantity.

        Returns:
            A pair ``(error, allowed)`` for each ``(form, dtype, quantity)``.
        """
        worst: dict[tuple[str, str, str], tuple[float, float]] = {}
        for result in self.results:
            for name, (error, allowed) in result.errors.items():
                key = (result.case.form, result.case.dtype, name)
                if key not in worst or error > worst[key][0]:
                    worst[key] = (error, allowed)
        return worst

    def table(self) -> str:
        """The worst errors as a Markdown table with a line of counts above and refusals and remarks below."""
        return "\n".join([*self._head(), "", *self._rows(), *self._refused(), *self._narrow()])

    def to_json(self) -> str:
        """Everything, as JSON (infinite errors as null)."""

        def number(x: float) -> float | None:
            return x if math.isfinite(x) else None

        results = [
            {
                "case": repr(result.case),
                "status": result.status,
                "text": result.text,
                "errors": {name: [number(error), allowed] for name, (error, allowed) in result.errors.items()},
                "seconds": round(result.seconds, 4),
            }
            for result in self.results
        ]
        head = {"subject": self.subject, "device": self.device, "passed": self.passed, "counts": self.counts}
        rest = {"versions": dict(self.versions), "too_narrow": list(self.too_narrow), "results": results}
        return json.dumps({**head, **rest}, indent=1)

    def reproduce(self, case: Case) -> str:
        """A line of Python that runs one case again (a layer is where it is: its device is no argument)."""
        where = f"device={self.device!r}, " if self.call == "check_kernel" else ""
        return f"{self.call}({self.subject}, {where}cases=[{case!r}])"

    def __str__(self) -> str:
        return self.table()

    def _head(self) -> Iterator[str]:
        counts = ", ".join(f"{number} {status}" for status, number in self.counts.items())
        seconds = sum(result.seconds for result in self.results)
        yield f"{self.subject} on {self.device}: {'passed' if self.passed else 'FAILED'} ({counts}; {seconds:.1f} s)"
        for result in self.failures:
            yield f"- FAILED {self.reproduce(result.case)}: {result.text.splitlines()[0]}"

    def _rows(self) -> Iterator[str]:
        worst = self.worst()
        found = {key[2] for key in worst}
        quantities = [name for name in QUANTITIES if name in found]
        quantities += sorted(found.difference(QUANTITIES), key=lambda name: (name.startswith("gradient"), name))
        yield "| form, dtype | " + " | ".join(quantities) + " |"
        yield "| --- |" + " --- |" * len(quantities)
        for form, dtype in sorted({key[:2] for key in worst}):
            cells = [worst.get((form, dtype, name)) for name in quantities]
            shown = (f"{cell[0]:.1e} ({cell[1]:.0e})" if cell else "" for cell in cells)
            yield f"| {form}, {dtype} | " + " | ".join(shown) + " |"

    def _refused(self) -> Iterator[str]:
        for text, number in Counter(r.text for r in self.results if r.status == "refused").items():
            yield f"- refused {number} cases: {text}"

    def _narrow(self) -> Iterator[str]:
        for remark in self.too_narrow:
            yield f"- declared too narrow: {remark}"


class ConformanceError(AssertionError):
    """A kernel or a layer failed the suite; the message starts with a line that reproduces the first failed case.

    Args:
        report: what was found up to then.

    Attributes:
        report: the same, a :class:`ConformanceReport`.
    """

    def __init__(self, report: ConformanceReport) -> None:
        self.report = report
        failures = report.failures
        if failures:
            first = failures[0]
            lines = [report.reproduce(first.case), f"{first.case.topic}: {first.text}"]
            lines += [f"and {len(failures) - 1} more:"] if len(failures) > 1 else []
            lines += [f"  {failure.case!r}: {failure.text.splitlines()[0]}" for failure in failures[1:]]
        else:
            lines = [f"{report.call}({report.subject}) on {report.device}", "no case ran: every one was refused"]
            lines += sorted({f"  {result.text}" for result in report.results if result.status == "refused"})
        super().__init__("\n".join([*lines, *(f"declared too narrow: {remark}" for remark in report.too_narrow)]))
