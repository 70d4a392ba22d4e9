"""The examples as a user runs them, at tiny size: exit status, and what they print."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *arguments],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_byte_model_learns_and_decodes(tmp_path: Path) -> None:
    pytest.importorskip("tqdm")
    text = tmp_path / "text.txt"
    text.write_bytes(b"the quick brown fox jumps over the lazy dog. " * 400)
    printed = run("train_byte_lm.py", "--text", str(text), "--steps", "60", "--tokens", "256", "--hidden", "32",
                  "--head-dim", "8", "--qwen-gdn-backend", "torch")  # fmt: skip
    before, after = map(float, re.findall(r"(\d\.\d\d) before, (\d\.\d\d) after", printed)[0])
    assert 5.0 < before < 6.0
    assert after < 3.0
    assert "kernel: TorchKernel()" in printed
    difference = float(re.findall(r"relative difference (\S+)", printed)[0])
    assert difference < 1e-5


def test_one_block() -> None:
    printed = run("run_block.py", "--tokens", "40", "--hidden", "32", "--head-dim", "8")
    assert "step: goes to TorchKernel()" in printed
    packed, cached = (float(re.findall(rf"{words}: (\S+)", printed)[0]) for words in ("each alone", "against one pass"))
    assert packed < 1e-5
    assert cached < 1e-5


def test_a_kernel_of_ones_own() -> None:
    printed = run("custom_kernel.py", "--tokens", "20", "--qwen-gdn-backend", "torch")
    assert "q and k are repeated 2 times to HV=4 heads" in printed
    assert float(re.findall(r"to TorchKernel\(\): (\S+)", printed)[0]) < 1e-5
