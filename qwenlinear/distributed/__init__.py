"""A memory guard for collectives: `CommMemoryPolicy` says when to look, `GuardedProcessGroup` looks."""

from __future__ import annotations

from .collectives import Collective
from .lifecycle import guard_default_group, resume_all, suspend_all
from .policy import CommMemoryPolicy, Rule
from .process_group import GuardedProcessGroup
from .stats import CollectiveStats

__all__ = [
    "Collective",
    "CollectiveStats",
    "CommMemoryPolicy",
    "GuardedProcessGroup",
    "Rule",
    "guard_default_group",
    "resume_all",
    "suspend_all",
]
