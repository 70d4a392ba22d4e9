"""Without Triton the modules that hold its kernels are not collected for their doctests: operators import them when they run."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path


def _needs_triton(module: Path) -> bool:
    return re.search(r"^(import triton|from \S+_triton import)", module.read_text(), re.MULTILINE) is not None


modules = () if importlib.util.find_spec("triton") else Path(__file__).parent.joinpath("qwenlinear").rglob("*.py")
collect_ignore = [str(module) for module in modules if _needs_triton(module)]
