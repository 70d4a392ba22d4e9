"""The package is light to import: no CUDA, and no torch.distributed needed; what it may import is checked in test_base.py."""

from __future__ import annotations

import subprocess
import sys

import pytest


def _python(code: str) -> str:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_does_not_touch_the_device() -> None:
    assert _python("import torch, qwenlinear.distributed\nprint(torch.cuda.is_initialized())") == "False\n"


def test_import_without_torch_distributed_and_a_clear_error_on_use() -> None:
    out = _python(
        "import torch, torch.distributed as dist\n"
        "del dist.ProcessGroup, dist.Work\n"
        "dist.is_available = lambda: False\n"
        "from qwenlinear.distributed import CommMemoryPolicy, GuardedProcessGroup, resume_all\n"
        "print(CommMemoryPolicy.profiled().interval)\n"
        "resume_all()\n"
        "try:\n    GuardedProcessGroup.wrap()\nexcept RuntimeError as e:\n    print(e)"
    )
    assert out.split("\n")[:2] == [
        "1.0",
        "an initialised torch.distributed is needed; call init_process_group first",
    ]


@pytest.mark.parametrize("call", ["wrap()", "new_group([0])"])
def test_uninitialised_is_a_runtime_error(call: str) -> None:
    from qwenlinear.distributed import GuardedProcessGroup

    with pytest.raises(RuntimeError, match="call init_process_group first"):
        eval(f"GuardedProcessGroup.{call}", {"GuardedProcessGroup": GuardedProcessGroup})
