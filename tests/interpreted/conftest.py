"""Tests of Triton kernels on the CPU, in Triton's interpreter, which has to be chosen before Triton is imported.

``tests/test_interpreted.py`` runs them in a process of their own;
by hand: ``TRITON_INTERPRET=1 python -m pytest tests/interpreted``.
"""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
