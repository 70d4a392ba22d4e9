"""Puts the helpers of tests/distributed on the path, for the tests and for the processes that they start."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "distributed")]
