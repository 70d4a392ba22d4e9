"""AutoKernel: who gets which call, what it says about it; and kernels by name, as a command line gives them."""

from __future__ import annotations

import argparse
import copy
import logging
import pickle
import sys
import types
from dataclasses import replace

import pytest
import torch
from packaging.version import Version

import qwenlinear.kernels.auto as auto
from qwenlinear import (
    AutoKernel,
    FLAKernel,
    FlashQLAKernel,
    GatedDeltaKernel,
    PackedSequences,
    Refusal,
    TorchKernel,
    TritonKernel,
    UnsupportedCall,
    kernel_from_name,
)
from qwenlinear.kernels import KernelCapabilities, Tolerance, add_kernel_arguments, kernel_from_args
from tests.kernels.machines import arguments, machine


class Recording(GatedDeltaKernel):
    """Runs anything with TorchKernel and counts; refuses calls longer than `longest`."""

    capabilities = replace(TorchKernel.capabilities, step=True)
    tolerances = dict(TorchKernel.tolerances)

    def __init__(self, name, longest=10**9):
        super().__init__()
        self.name, self.longest, self.ran = name, longest, []

    def _refusals(self, inputs, form):
        if self.longest < inputs.T:
            yield Refusal("length", f"T <= {self.longest}", f"T={inputs.T}", "shorten it")

    def _chunk(self, inputs):
        self.ran.append("chunk")
        return TorchKernel()._chunk(inputs)

    def _step(self, inputs):
        self.ran.append("step")
        return TorchKernel()._step(inputs)

    def _options(self):
        return {"name": self.name}


class ChunkOnly(GatedDeltaKernel):
    """Float32 and K = 8 only, no recurrent form."""

    capabilities = KernelCapabilities(
        dtypes=frozenset({torch.float32}), devices=None, chunk=True, backward=True, key_head_sizes={8}, strided=True
    )
    tolerances = {torch.float32: Tolerance(1e-3, 1e-3, 1e-3)}

    def _chunk(self, inputs):
        return TorchKernel()._chunk(inputs)


@pytest.fixture(autouse=True)
def _nothing_told(monkeypatch):
    monkeypatch.setattr(auto, "_told", set())


def call(**more):
    return arguments(device="cpu", dtype=torch.float32, **more)


# ---- choosing ----------------------------------------------------------------------------------------------------------


def test_the_first_that_does_not_refuse_runs():
    first, second = Recording("first", longest=4), Recording("second")
    kernel = AutoKernel([first, second])
    for T in (4, 5, 5):
        inputs = call(T=T)
        assert torch.equal(kernel(**inputs)[0], TorchKernel()(**inputs)[0])
    assert (first.ran, second.ran) == (["chunk"], ["chunk", "chunk"])


def test_answers_and_gradients_are_those_of_the_chosen_kernel():
    inputs = call(T=70, grad=True, initial_state=torch.randn(2, 4, 8, 8).requires_grad_())
    packed = PackedSequences.from_lengths([30, 40])
    answers = []
    for kernel in (AutoKernel([FLAKernel(), TorchKernel()]), TorchKernel()):
        o, final = kernel(**inputs, output_final_state=True, use_qk_l2norm_in_kernel=True, cu_seqlens=packed)
        gradients = torch.autograd.grad(o.sum() + final.square().sum(), [inputs["q"], inputs["initial_state"]])
        answers.append((o, final, *gradients))
    for got, expected in zip(*answers, strict=True):
        assert torch.equal(got, expected)


def test_chunk_and_step_are_chosen_apart():
    second = Recording("second")
    kernel = AutoKernel([ChunkOnly(), second])
    kernel(**call())
    kernel.step(**call())
    assert second.ran == ["step"]


def test_lowerings_are_those_of_the_chosen_kernel():
    kernel = AutoKernel([ChunkOnly(), TorchKernel()])
    inputs = call(use_qk_l2norm_in_kernel=True)
    torch.testing.assert_close(kernel(**inputs)[0], TorchKernel()(**inputs)[0])
    assert "q and k are repeated 2 times" in kernel.explain(**inputs)


def test_a_composite_may_be_a_candidate():
    inner = Recording("inner")
    AutoKernel([AutoKernel([ChunkOnly(), inner]), TorchKernel()]).step(**call())
    assert inner.ran == ["step"]


@pytest.mark.parametrize(
    ("capability", "more", "chunk", "step"),
    [
        ((9, 0), {}, FlashQLAKernel, TritonKernel),
        ((9, 0), {"grad": True}, FlashQLAKernel, TorchKernel),
        ((9, 0), {"K": 64}, FLAKernel, TritonKernel),
        ((9, 0), {"dtype": torch.float32}, FLAKernel, TritonKernel),
        ((9, 0), {"dtype": torch.float64}, TorchKernel, TorchKernel),
        ((9, 0), {"K": 512}, TorchKernel, TorchKernel),
        ((8, 0), {"grad": True}, FLAKernel, TorchKernel),
        ((12, 0), {"dtype": torch.float16}, FLAKernel, TritonKernel),
        ((7, 5), {}, TorchKernel, TorchKernel),
    ],
)
def test_the_default_order_on_faked_machines(mocker, capability, more, chunk, step):
    mocker.patch.object(FLAKernel, "_load", return_value=())
    mocker.patch.object(FlashQLAKernel, "_load", return_value=())
    mocker.patch.object(TritonKernel, "_load", return_value=())
    probe = machine(capability)
    kernel = AutoKernel([kind(hardware=probe) for kind in (FlashQLAKernel, TritonKernel, FLAKernel, TorchKernel)])
    lines = kernel.explain(**arguments(**{"K": 128, "V": 128, **more})).splitlines()
    goes = [line.strip() for line in lines if "goes to" in line]
    assert goes == [f"chunk: goes to {_shown(chunk)}", f"step: goes to {_shown(step)}"]


def _shown(kind):
    return repr(kind())


def test_a_candidate_that_does_not_import_is_passed_over(mocker):
    mocker.patch.object(FLAKernel, "_load", return_value=(Refusal("import", "fla to import", "ImportError: x", "y"),))
    kernel = AutoKernel([FLAKernel(hardware=machine()), TorchKernel(hardware=machine())])
    assert kernel.refusals(**arguments()) == ()
    text = kernel.explain(**arguments())
    assert "chunk: goes to TorchKernel()" in text
    assert "ImportError: x" in text


def test_the_default_candidates_in_order():
    kernel = AutoKernel()
    assert [type(candidate) for candidate in kernel.candidates] == [
        FlashQLAKernel,
        TritonKernel,
        FLAKernel,
        TorchKernel,
    ]
    assert repr(kernel) == "AutoKernel([FlashQLAKernel(contiguity='copy'), TritonKernel(), FLAKernel(), TorchKernel()])"


@pytest.mark.parametrize(
    "candidates", [[], (), [TorchKernel], [TorchKernel(), "fla"], TorchKernel(), "torch", 3, {TorchKernel()}]
)
def test_candidates_are_validated(candidates):
    with pytest.raises(ValueError, match="candidates needs"):
        AutoKernel(candidates)


# ---- saying so -----------------------------------------------------------------------------------------------------


def test_a_refused_call_lists_every_candidate():
    kernel = AutoKernel([Recording("first", longest=2), ChunkOnly()])
    with pytest.raises(UnsupportedCall) as error:
        kernel(**call(T=3, K=4, initial_state=torch.zeros(1, 4, 4, 8)))
    assert [(r.kernel, r.code) for r in error.value.refusals] == [
        ("Recording(name='first')", "length"),
        ("ChunkOnly()", "key_head_size"),
        ("ChunkOnly()", "initial_state"),
    ]
    text = str(error.value)
    assert "Recording(name='first'): [length] needs T <= 2; got T=3" in text
    assert kernel.refusals(**call(T=3, K=4, initial_state=torch.zeros(1, 4, 4, 8))) == error.value.refusals


def test_a_malformed_call_is_a_value_error():
    with pytest.raises(ValueError, match="beta needs"):
        AutoKernel()(**{**call(), "beta": torch.rand(1, 3, 4)})


def test_explain_shows_accepted_and_rejected():
    text = AutoKernel([ChunkOnly(), Recording("x"), TorchKernel()]).explain(**call())
    assert text.splitlines()[1:] == [
        "  chunk: goes to ChunkOnly()",
        "    ChunkOnly(): runs, lowered:",
        "      - q and k are repeated 2 times to HV=4 heads",
        "    Recording(name='x'): runs, but comes later",
        "    TorchKernel(): runs, but comes later",
        "  step: goes to Recording(name='x')",
        "    ChunkOnly(): refused: [form] needs the recurrent form; got a kernel without it; "
        "call the kernel itself, which runs in chunks",
        "    Recording(name='x'): runs",
        "    TorchKernel(): runs, but comes later",
    ]


def test_explain_counts_what_a_line_leaves_out_and_says_where_it_is():
    inputs = call(T=3, K=4, initial_state=torch.zeros(1, 4, 4, 8))
    kernel = AutoKernel([Recording("first", longest=2), ChunkOnly(), TorchKernel()])
    assert kernel.explain(**inputs).splitlines()[2:4] == [
        "    Recording(name='first'): refused: [length] needs T <= 2; got T=3; shorten it",
        "    ChunkOnly(): refused: [key_head_size] needs K in [8]; got K=4; use another kernel for this model "
        "(+1 more: candidates[1].explain)",
    ]
    assert "- [initial_state] needs no initial_state" in kernel.candidates[1].explain(**inputs)


def test_explain_has_every_reason_where_no_candidate_runs():
    inputs = call(T=3, K=4, initial_state=torch.zeros(1, 4, 4, 8))
    text = AutoKernel([Recording("first", longest=2), ChunkOnly()]).explain(**inputs)
    assert "chunk: no candidate runs it" in text
    assert all(str(refusal) in text for refusal in ChunkOnly().refusals(**inputs))


def test_a_choice_is_logged_once_at_info(caplog):
    caplog.set_level(logging.DEBUG, logger="qwenlinear")
    first = Recording("first", longest=4)
    for kernel in (AutoKernel([first, TorchKernel()]), AutoKernel([first, TorchKernel()])):
        for T in (3, 5, 4, 6, 3):
            kernel(**call(T=T))
        kernel.step(**call(T=1))
    assert [record.levelname for record in caplog.records] == ["INFO"] * 3
    heads = [line.strip() for record in caplog.records for line in record.message.splitlines() if "goes to" in line]
    assert heads == [
        "chunk: goes to Recording(name='first')",
        "chunk: goes to TorchKernel()",
        "step: goes to Recording(name='first')",
    ]
    assert "[length] needs T <= 4; got T=5" in caplog.records[1].message


def test_asking_logs_nothing(caplog):
    caplog.set_level(logging.DEBUG, logger="qwenlinear")
    kernel = AutoKernel()
    kernel.refusals(**call())
    kernel.explain(**call())
    kernel.require("cpu")
    assert caplog.records == []


# ---- what it declares ----------------------------------------------------------------------------------------------


def test_capabilities_are_what_some_can_and_all_promise():
    declared = AutoKernel([ChunkOnly(), TorchKernel()]).capabilities
    assert declared.dtypes == TorchKernel.capabilities.dtypes
    assert declared.devices is None
    assert declared.step
    assert declared.packed
    assert declared.key_head_sizes is None
    assert not declared.deterministic  # ChunkOnly does not promise it
    both = AutoKernel([FlashQLAKernel(), FLAKernel()]).capabilities
    assert both.devices == {"cuda", "xpu"}
    assert 96 in both.key_head_sizes
    assert 257 not in both.key_head_sizes
    assert both.value_head_sizes is None
    assert not both.step_backward
    only = AutoKernel([FlashQLAKernel(), ChunkOnly()]).capabilities
    assert [size in only.key_head_sizes for size in (8, 128, 64)] == [True, True, False]


def test_tolerances_are_the_widest():
    tolerances = AutoKernel([ChunkOnly(), TorchKernel()]).tolerances
    assert tolerances[torch.float32] == Tolerance(1e-3, 1e-3, 1e-3)
    assert tolerances[torch.float64] == TorchKernel.tolerances[torch.float64]


def test_require_passes_if_one_candidate_is_there():
    AutoKernel().require("cpu")
    assert AutoKernel().unavailable("cpu") == ()
    kernel = AutoKernel([FlashQLAKernel(hardware=machine((8, 0))), FLAKernel(hardware=machine(fla_core=None))])
    with pytest.raises(UnsupportedCall) as error:
        kernel.require("cuda")
    assert [(r.kernel.split("(")[0], r.code) for r in error.value.refusals] == [
        ("FlashQLAKernel", "compute_capability"),
        ("FLAKernel", "package"),
    ]
    assert kernel.unavailable("cuda") == error.value.refusals


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda kernel: pickle.loads(pickle.dumps(kernel))])
def test_it_can_be_saved_with_its_model(clone):
    kernel = AutoKernel()
    kernel(**call())
    inputs = call()
    assert torch.equal(clone(kernel)(**inputs)[0], kernel(**inputs)[0])


# ---- kernels by name -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("auto", AutoKernel),
        ("torch", TorchKernel),
        ("triton", TritonKernel),
        ("fla", FLAKernel),
        ("flashqla", FlashQLAKernel),
        ("flash_qla", FlashQLAKernel),
        ("qwenlinear.kernels.torch_kernel:TorchKernel", TorchKernel),
        (f"{__name__}:ChunkOnly", ChunkOnly),
    ],
)
def test_kernels_by_name(name, kind):
    assert type(kernel_from_name(name)) is kind


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("cuda", r"needs to be auto, torch, triton, fla, flashqla, flash_qla or package.module:Class, got 'cuda'"),
        ("", "got ''"),
        (None, "flash_qla or package.module:Class, got None"),
        (TorchKernel(), r"got TorchKernel\(\)"),
        ("FLA", "auto, torch, triton, fla"),
        (":TorchKernel", "package.module:Class"),
        ("qwenlinear.kernels:", "package.module:Class"),
        ("no_such_package.kernels:Fast", r"no_such_package.kernels that imports, got ModuleNotFoundError"),
        ("qwenlinear.kernels:Missing", r"class Missing in qwenlinear.kernels"),
        ("qwenlinear.kernels:PackedSequences", "subclass of GatedDeltaKernel, got <class"),
        ("qwenlinear.kernels:kernel_from_name", "subclass of GatedDeltaKernel, got <function"),
        ("qwenlinear.kernels:GatedDeltaKernel", "built without arguments"),
        (f"{__name__}:Recording", "built without arguments.*name"),
    ],
)
def test_a_wrong_name_says_what_is_wrong(name, words):
    with pytest.raises(ValueError, match=words):
        kernel_from_name(name)


def test_a_module_that_fails_to_import_says_how(mocker):
    def broken(name):
        raise OSError("libcudart.so.13: cannot open")

    mocker.patch.dict(sys.modules, {"broken_kernels": types.ModuleType("broken_kernels")})
    mocker.patch.object(auto.importlib, "import_module", side_effect=broken)
    with pytest.raises(ValueError, match="broken_kernels that imports, got OSError: libcudart"):
        kernel_from_name("broken_kernels:Fast")


def test_a_module_of_the_current_folder_is_pointed_at(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"; put its folder on Python's path \(PYTHONPATH=. for the current one\)"):
        kernel_from_name("kernel_made_here:Fast")
    (tmp_path / "kernel_made_here.py").write_text("import a_library_that_is_missing\n")
    with pytest.raises(ValueError, match=r"is here, but not on Python's path: run with PYTHONPATH=.$"):
        kernel_from_name("kernel_made_here:Fast")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"No module named 'a_library_that_is_missing'$"):
        kernel_from_name("kernel_made_here:Fast")


def parse(*words):
    parser = argparse.ArgumentParser()
    add_kernel_arguments(parser)
    return parser.parse_args(words)


def test_the_option_defaults_to_auto():
    assert parse().qwen_gdn_backend == "auto"
    assert isinstance(kernel_from_args(parse()), AutoKernel)
    assert isinstance(kernel_from_args(parse("--qwen-gdn-backend", "torch"), "cpu"), TorchKernel)


def test_the_help_lists_the_names(capsys):
    with pytest.raises(SystemExit):
        parse("--help")
    shown = " ".join(capsys.readouterr().out.split())
    assert "auto, torch, triton, fla, flashqla, flash_qla or package.module:Class (default: auto)" in shown


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("nonsense", "the kernel's name needs to be auto, torch"),
        ("no_such_module:Kernel", "needs a module no_such_module that imports"),
        ("pathlib:Path", "needs a subclass of GatedDeltaKernel"),
    ],
)
def test_a_name_that_is_none_is_a_usage_error(name, told, capsys):
    with pytest.raises(SystemExit, match="2"):
        parse("--qwen-gdn-backend", name)
    shown = capsys.readouterr().err
    assert "usage: " in shown
    assert told in shown


@pytest.mark.parametrize("name", ["triton", "fla", "flashqla", "flash_qla"])
def test_an_explicit_kernel_dies_at_start_up(name):
    with pytest.raises(UnsupportedCall, match="needs cuda"):
        kernel_from_args(parse("--qwen-gdn-backend", name), "cpu")


def test_auto_is_not_required_of_anything(mocker):
    asked = mocker.spy(GatedDeltaKernel, "require")
    kernel_from_args(parse())
    asked.assert_not_called()
    kernel_from_args(parse("--qwen-gdn-backend", "torch"))
    asked.assert_called_once()


@pytest.mark.parametrize(("present", "expected"), [(True, "cuda"), (False, "cpu")])
def test_the_default_device_is_the_accelerator_pytorch_finds(mocker, present, expected):
    mocker.patch.object(torch.accelerator, "is_available", return_value=present)
    mocker.patch.object(torch.accelerator, "current_accelerator", return_value=torch.device("cuda"))
    asked = mocker.patch.object(TorchKernel, "require")
    kernel_from_args(parse("--qwen-gdn-backend", "torch"))
    asked.assert_called_once_with(torch.device(expected))


def test_rocm_goes_to_fla(mocker):
    mocker.patch.object(FLAKernel, "_load", return_value=())
    probe = machine(hip=Version("6.4"), triton="3.5.1")
    kernel = AutoKernel([FlashQLAKernel(hardware=probe), FLAKernel(hardware=probe), TorchKernel()])
    assert "chunk: goes to FLAKernel()" in kernel.explain(**arguments(K=128, V=128, grad=True))
