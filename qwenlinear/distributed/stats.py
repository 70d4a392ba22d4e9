"""Counters of a guard, and the table that shows them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .collectives import Collective
from .policy import Rule


@dataclass(frozen=True)
class CollectiveStats:
    """What a guard did for one collective.

    Args:
        calls: how often it was called.
        checks: how often the free memory was read before it.
        reclaims: how often memory was reclaimed before it.
        bytes_given_back: by how many bytes those reclaims raised the free memory.
        seconds: time spent in checks and reclaims.
    """

    calls: int = 0
    checks: int = 0
    reclaims: int = 0
    bytes_given_back: int = 0
    seconds: float = 0.0


@dataclass
class Tally:
    """Mutable counters of one collective; CPython doesn't switch threads inside `+=` on an attribute."""

    rule: Rule
    seen: set[str] = field(default_factory=set)  # device types whose first call was checked
    calls: int = 0
    checks: int = 0
    reclaims: int = 0
    bytes_given_back: int = 0
    seconds: float = 0.0

    def freeze(self) -> CollectiveStats:
        return CollectiveStats(self.calls, self.checks, self.reclaims, self.bytes_given_back, self.seconds)


def table(stats: Mapping[Collective, CollectiveStats]) -> str:
    """Lay counters out in columns.

    Args:
        stats: counters by collective.

    Returns:
        A heading and one line per collective.
    """
    rows = [("collective", "calls", "checks", "reclaims", "MiB back", "ms spent")]
    for collective, s in stats.items():
        back, spent = f"{s.bytes_given_back / 2**20:.1f}", f"{s.seconds * 1e3:.3f}"
        rows.append((str(collective), str(s.calls), str(s.checks), str(s.reclaims), back, spent))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
