"""The command line: what is wrong with its words is said under the usage, with status 2 and before anything runs."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
import unittest.mock
from pathlib import Path

import pytest
import torch

import qwenlinear
from qwenlinear import cli, testing

KERNELS, MODEL, GUARD = ("bench", "kernels"), ("bench", "model"), ("bench", "guard", "--out", "somewhere")
DATA = Path(__file__).parents[1] / "docs/data/kernels-h200.json"
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with a GPU")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "required: command"),
        (("bench",), "required: bench"),
        (("guess",), "invalid choice: 'guess'"),
        (("doctor", "--device", "cudda"), "--device: needs a device such as cpu or cuda:0, got 'cudda'"),
        ((*KERNELS, "--contenders", "fast"), "--contenders: the kernel's name needs to be auto, torch"),
        ((*KERNELS, "--contenders", "torch", "no.module:Kernel"), "needs a module no.module that imports"),
        ((*KERNELS, "--dtype", "int8"), "--dtype: needs one of float64, float32, bfloat16, float16, got 'int8'"),
        ((*KERNELS, "--device", "meta"), "--device: device needs one that PyTorch can compute on here"),
        ((*KERNELS, "--heads", "4"), "--heads: needs H/HV, whole numbers of at least 1, got '4'"),
        ((*KERNELS, "--heads", "4/6"), "--heads: needs H/HV with HV a multiple of H, got '4/6'"),
        (("bench", "layer", "--render", __file__), "--render needs the JSON of an earlier run"),
        (("bench", "decode", "--render", str(DATA)), "needs the JSON of an earlier run of this benchmark"),
        (("bench", "layer", "--heads", "4/6"), "--heads: needs H/HV with HV a multiple of H"),
        (("bench", "decode", "--heads", "4/6"), "--heads: needs H/HV with HV a multiple of H"),
        ((*KERNELS, "--tokens", "0"), "--tokens: needs a whole number of at least 1, got '0'"),
        ((*KERNELS, "--packed", "4x"), "--packed: needs NxL"),
        ((*KERNELS, "--rounds", "many"), "--rounds: needs a whole number of at least 1, got 'many'"),
        ((*KERNELS, "--limit", "nan"), "--limit: needs a number above 0, got 'nan'"),
        ((*KERNELS, "--render", "no.json"), "--render: needs a file, got 'no.json'"),
        ((*KERNELS, "--render", __file__), "--render needs the JSON of an earlier run"),
        ((*MODEL, "--kernels", "fast"), "--kernels: the kernel's name needs to be"),
        ((*MODEL, "--dtype", "int8"), "--dtype: needs the name of a floating torch dtype"),
        ((*MODEL, "--layers", "0"), "--layers: needs a whole number"),
        ((*GUARD, "--only", "all_recude"), "--only: invalid choice: 'all_recude'"),
        ((*GUARD, "--mib", "-1"), "--mib: needs a number above 0"),
        (("bench", "guard"), "required: --out"),
        (
            ("run", "--model", "tiny", "--device", "nowhere"),
            "--device: device needs one that PyTorch can compute on here",
        ),
        pytest.param((*KERNELS, "--device", "cuda"), "got 'cuda'", marks=NO_GPU),
        pytest.param((*GUARD, "--backend", "nccl"), "nccl needs a GPU for each of 1 ranks, got 0 GPUs", marks=NO_GPU),
    ],
)
def test_a_usage_error(words: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    assert caught.value.code == 2
    shown = capsys.readouterr().err
    assert shown.startswith("usage: qwenlinear" + "".join(f" {word}" for word in words[:2] if words[0] == "bench"))
    assert told in shown.splitlines()[-1]


def test_documents_of_unequal_length_and_a_missing_transformers(monkeypatch, capsys) -> None:
    for found, told in ((object(), "multiple of --documents, got 10 and 3"), (None, "pip install 'transformers>=5.6'")):
        monkeypatch.setattr("importlib.util.find_spec", lambda name, found=found: found)
        with pytest.raises(SystemExit):
            cli.main([*MODEL, "--tokens", "10", "--documents", "3"])
        assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--kernels", "torch,fast"], "--kernels: the kernel's name needs to be"),
        (["--device", "nowhere"], "--device: device needs one"),
        (["--dtypes", "bfloat16,int8"], "--dtypes: needs one of float64"),
        (["--heads", "1,2,8"], "--heads: needs H,HV,K,V, whole numbers"),
    ],
)
def test_a_usage_error_of_the_conformance_command(words: list[str], told: str, capsys) -> None:
    from qwenlinear.testing.__main__ import main

    assert testing.check_kernel  # the command's package, imported as a user has it
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    assert told in capsys.readouterr().err


def test_the_version_is_the_distributions(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"qwenlinear {qwenlinear.__version__}\n"
    with pytest.raises(SystemExit), unittest.mock.patch("sys.argv", ["somewhere", "--version"]):
        runpy.run_module("qwenlinear", run_name="__main__")  # python -m qwenlinear
    assert capsys.readouterr().out == f"qwenlinear {qwenlinear.__version__}\n"
    setup = (Path(__file__).parents[1] / "setup.cfg").read_text()
    assert "version = attr: qwenlinear.__version__" in setup


_EXAMPLES = sorted((Path(__file__).parents[1] / "examples").rglob("*.py"))
_HIDDEN = ("fla", "flash_qla", "attn_gym", "flashinfer", "tqdm", "transformers")
_HELP = """
import contextlib, io, json, runpy, sys
names = json.loads(sys.argv[1])
sys.modules.update(dict.fromkeys(names))  # None: importing it is a ModuleNotFoundError
for path in json.loads(sys.argv[2]):
    sys.argv = [path, "--help"]
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            runpy.run_path(path, run_name="__main__")
        print(path, "ran")
    except SystemExit as error:
        print(path, error.code, "usage: " in out.getvalue())
"""


def test_every_example_says_what_it_is_without_its_libraries() -> None:
    words = [json.dumps(_HIDDEN), json.dumps(list(map(str, _EXAMPLES)))]
    quiet = ["-W", "ignore:Failed to initialize NumPy:UserWarning"]  # PyTorch's own, where NumPy is not installed
    done = subprocess.run([sys.executable, *quiet, "-c", _HELP, *words], capture_output=True, text=True, timeout=120)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [f"{path} 0 True" for path in _EXAMPLES]
