"""The two kernel examples at tiny size: they run, and what they print is right."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TINY = ["--hidden", "16", "--heads", "1/2", "--head-dim", "8"]


def _run(name: str, *words: str, status: int = 0) -> str:
    command = [sys.executable, str(ROOT / "examples" / name), *TINY, *words]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT, env=_environment()
    )
    assert done.returncode == status, done.stderr
    return done.stdout + done.stderr


def _environment() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def test_packed_sequences() -> None:
    out = _run("packed_sequences.py")
    assert "12 documents, 1160 tokens, the longest of 400" in out
    errors = re.search(r"outputs (\S+), gradients of the input (\S+)", out)
    assert errors is not None
    assert all(float(error) < 1e-5 for error in errors.groups())
    leak = re.search(r"off by (\S+):", out)
    assert leak is not None
    assert float(leak[1]) > 1e-2
    assert "the other outputs change by 0.0e+00" in out


def test_cached_decoding() -> None:
    out = _run("cached_decoding.py", "--prompt", "20", "--generate", "8")
    error = re.search(r"against one pass: (\S+)", out)
    assert error is not None
    assert float(error[1]) < 1e-5
    assert "run twice: 0e+00; the first cache is untouched" in out
    sizes = re.findall(r"^ +\d+ +(\d+\.\d+) ", out, re.MULTILINE)
    assert len(sizes) == 3
    assert len(set(sizes)) == 1  # constant memory


@pytest.mark.parametrize("name", ["packed_sequences.py", "cached_decoding.py"])
def test_a_named_kernel_that_cannot_run_here_dies_at_start(name) -> None:
    out = _run(name, "--qwen-gdn-backend", "flashqla", status=2)
    assert "Traceback" not in out
    assert "error: FlashQLAKernel(contiguity='copy') cannot run on cpu:\n  - [device] needs cuda; got cpu" in out


@pytest.mark.parametrize("name", ["packed_sequences.py", "cached_decoding.py", "cuda_graphs.py"])
def test_they_stay_short(name) -> None:
    assert len((ROOT / "examples" / name).read_text().splitlines()) < 120


def test_cuda_graphs_say_so_without_a_gpu() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("tests/gpu runs it")
    command = [sys.executable, str(ROOT / "examples" / "cuda_graphs.py")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=True, cwd=ROOT, env=_environment()
    )
    assert done.stdout == "no CUDA device here: CUDA graphs need one, nothing was run\n"
