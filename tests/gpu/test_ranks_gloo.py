"""The checks for several GPUs, as far as they need none: two processes, and three."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import ranks_checks as checks
from dist_harness import run_world


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("check", checks.EVERYWHERE, ids=lambda check: check.__name__)
def test_on_gloo(check: Callable[..., Any], size: int) -> None:
    run_world(size, check, size, limit=60.0)
