"""Every option of every example with words that it cannot take: one usage error, status 2, and nothing has run."""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path

import pytest
import torch

from qwenlinear import Refusal, TorchKernel, UnsupportedCall, usage

EXAMPLES = Path(__file__).parents[2] / "examples"
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with a GPU")

SIZE = (("0", "-3", "2.5", "many", ""), "needs a whole number of at least 1, got ")
HEADS = (("2x4", "4", "0/2", "-2/-4", "2/4/8", "a/b"), "needs H/HV, whole numbers of at least 1, got ")
DEVICE = (("cudda", "cuda:x", "meta"), "device needs one that PyTorch can compute on here, got ")
DTYPE = (("int8", "float"), "invalid choice: ")
KERNEL = (("nonsense",), "the kernel's name needs to be auto, torch")
LAYER = {"--hidden": SIZE, "--heads": HEADS, "--head-dim": SIZE, "--qwen-gdn-backend": KERNEL}
PLACE = {"--device": DEVICE, "--dtype": DTYPE}
OPTIONS = {
    "cached_decoding.py": {**LAYER, **PLACE, "--batch": SIZE, "--prompt": SIZE, "--generate": SIZE},
    "cuda_graphs.py": {
        **{name: LAYER[name] for name in ("--hidden", "--heads", "--qwen-gdn-backend")},
        **dict.fromkeys(("--lengths", "--batch", "--tokens"), SIZE),
    },
    "custom_kernel.py": {"--tokens": SIZE, "--device": DEVICE, "--qwen-gdn-backend": KERNEL},
    "guarded_training.py": {"--rounds": SIZE, "--steps": SIZE},
    "megatron_attention.py": {},
    "packed_sequences.py": {**LAYER, **PLACE, "--scale": SIZE},
    "run_block.py": {**LAYER, **PLACE, "--tokens": (("8", "0", "x"), "needs a whole number of at least 9, got ")},
    "train_byte_lm.py": {
        **LAYER,
        **PLACE,
        "--steps": SIZE,
        "--tokens": SIZE,
        "--text": (("nowhere.txt", str(EXAMPLES)), "needs a file, got "),
    },
    "kernels/attention_gym.py": {},
    "kernels/fla_naive.py": {},
    "kernels/flashinfer_gdn.py": {},
}
CASES = [
    (name, option, word, told)
    for name, options in OPTIONS.items()
    for option, (words, told) in options.items()
    for word in words
]


def error_of(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What an example says where it ends with a usage error; it runs in this process."""
    monkeypatch.setattr(sys, "argv", [name, *words])
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    shown = capsys.readouterr()
    assert caught.value.code == 2
    assert shown.out == ""
    assert "usage: " in shown.err  # PyTorch's own warning of a missing NumPy may stand before it
    assert "Traceback" not in shown.err
    return shown.err[shown.err.index("error: ") :]


def test_the_table_has_every_option_of_every_example(monkeypatch) -> None:
    found: dict[str, set[str]] = {}

    def keep(program: object, parser: argparse.ArgumentParser) -> None:
        found[name] = {option for action in parser._actions for option in action.option_strings} - {"-h", "--help"}

    monkeypatch.setattr(usage, "run", keep)
    for path in sorted(EXAMPLES.rglob("*.py")):
        name = str(path.relative_to(EXAMPLES))
        if name == "megatron_attention.py":  # without options, it needs no more than argparse
            found[name] = set()
            continue
        runpy.run_path(str(path), run_name="__main__")
    assert found == {name: set(options) for name, options in OPTIONS.items()}


@pytest.mark.parametrize(("name", "option", "word", "told"), CASES)
def test_a_bad_word_is_one_usage_error(name, option, word, told, monkeypatch, capsys) -> None:
    error = error_of(name, monkeypatch, capsys, f"{option}={word}")
    assert error.startswith(f"error: argument {option}: {told}")
    assert repr(word) in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("name", [name for name, options in OPTIONS.items() if "--heads" in options])
def test_heads_that_do_not_divide(name, monkeypatch, capsys) -> None:
    error = error_of(name, monkeypatch, capsys, "--heads", "4/6")
    assert error == "error: argument --heads: needs H/HV with HV a multiple of H, got '4/6'\n"


@NO_GPU
@pytest.mark.parametrize("name", [name for name, options in OPTIONS.items() if "--device" in options])
def test_a_gpu_that_is_not_there(name, monkeypatch, capsys) -> None:
    error = error_of(name, monkeypatch, capsys, "--device", "cuda")
    assert error.startswith("error: argument --device: device needs one that PyTorch can compute on here, got 'cuda': ")


@pytest.mark.parametrize("name", ["run_block.py", "custom_kernel.py", "train_byte_lm.py"])
def test_a_named_kernel_that_cannot_run_here(name, monkeypatch, capsys) -> None:
    if name == "train_byte_lm.py":
        pytest.importorskip("tqdm")
    error = error_of(name, monkeypatch, capsys, "--qwen-gdn-backend", "flashqla")
    assert error.startswith(
        "error: FlashQLAKernel(contiguity='copy') cannot run on cpu:\n  - [device] needs cuda; got cpu"
    )


def test_what_a_program_lacks(monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert error_of("guarded_training.py", monkeypatch, capsys).startswith("error: needs torchrun: torchrun ")
    for name, package in (("attn_gym", "attn-gym"), ("fla", "fla-core"), ("flashinfer", "flashinfer-python")):
        monkeypatch.setitem(sys.modules, name, None)  # importing it is an ImportError
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        example = {"attn_gym": "attention_gym", "fla": "fla_naive", "flashinfer": "flashinfer_gdn"}[name]
        assert f"[package] needs {package}; got " in error_of(f"kernels/{example}.py", monkeypatch, capsys)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert error_of("train_byte_lm.py", monkeypatch, capsys) == "error: needs tqdm: pip install tqdm\n"


def test_a_text_of_one_document(monkeypatch, capsys, tmp_path) -> None:
    pytest.importorskip("tqdm")
    text = tmp_path / "short.txt"
    text.write_bytes(b"x" * 4097)
    error = error_of("train_byte_lm.py", monkeypatch, capsys, "--text", str(text))
    needs = "--text needs at least two documents, which is a file of more than 4097 bytes"
    assert error == f"error: {needs}, got {text}\n"


def test_a_refusal_in_the_middle_is_a_usage_error_and_a_fault_is_not(monkeypatch, capsys) -> None:
    def refuses(_: argparse.Namespace) -> None:
        raise UnsupportedCall("Kernel()", (Refusal("dtype", "float32", "int8", "cast"),), "chunk")

    def breaks(_: argparse.Namespace) -> None:
        raise ValueError("a fault of the program")

    monkeypatch.setattr(sys, "argv", ["program"])
    with pytest.raises(SystemExit) as caught:
        usage.run(refuses, argparse.ArgumentParser())
    assert caught.value.code == 2
    assert "error: Kernel() cannot run chunk:\n  - [dtype] needs float32; got int8; cast" in capsys.readouterr().err
    with pytest.raises(ValueError, match="a fault of the program"):
        usage.run(breaks, argparse.ArgumentParser())


def test_check_ends_with_one_where_a_case_failed(monkeypatch, capsys) -> None:
    from qwenlinear.testing import CaseResult, ConformanceError, ConformanceReport
    from qwenlinear.testing.cases import Case

    report = ConformanceReport("TorchKernel()", "cpu", (CaseResult(Case("a case"), "failed", "it is wrong"),))

    def fails(*_: object, **__: object) -> None:
        raise ConformanceError(report)

    monkeypatch.setattr("qwenlinear.testing.check_kernel", fails)
    monkeypatch.setattr(sys, "argv", ["program"])
    with pytest.raises(SystemExit) as caught:
        usage.check(TorchKernel(), "cpu", None)
    assert caught.value.code == 1
    assert "TorchKernel() on cpu: FAILED (0 passed, 1 failed" in capsys.readouterr().out
