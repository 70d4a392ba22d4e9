"""TritonKernel without a GPU: what it refuses, what it hands over. Its launches run in tests/interpreted and tests/gpu."""

from __future__ import annotations

import copy
import importlib
import pickle
from dataclasses import replace

import pytest
import torch
from packaging.version import Version

from qwenlinear import AutoKernel, FlashQLAKernel, PackedSequences, TorchKernel, TritonKernel, UnsupportedCall
from qwenlinear.kernels import triton_kernel
from tests.kernels.machines import arguments, machine


def codes(kernel, form="step", **call):
    return [refusal.code for refusal in kernel.refusals(**arguments(**call), form=form)]


@pytest.fixture
def loads(mocker):
    """Triton imports."""
    mocker.patch.object(triton_kernel, "import_function", return_value=lambda: None)


class HostTritonKernel(TritonKernel):
    """TritonKernel that may be called with CPU tensors, for tests with a faked launch."""

    capabilities = replace(TritonKernel.capabilities, devices=None)


@pytest.fixture
def launched(mocker, loads):
    """What is launched; it computes with TorchKernel."""
    step_triton = pytest.importorskip("qwenlinear.kernels._step_triton", exc_type=ImportError)
    calls = []

    def launch(q, k, v, g, beta, scale, state, kept, cu_seqlens, normalise):
        calls.append({"state": state, "kept": kept, "cu_seqlens": cu_seqlens, "normalise": normalise})
        packed = None if cu_seqlens is None else PackedSequences.from_cu_seqlens(cu_seqlens)
        o, final = TorchKernel().step(q, k, v, g, beta, scale, state, True, normalise, packed)
        if kept is not None:
            kept.data.copy_(final)  # unknown to autograd, as a launch is
        return o

    mocker.patch.object(step_triton, "launch", side_effect=launch)
    return calls


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("loads")
@pytest.mark.parametrize(
    ("probe", "expected"),
    [
        (machine((7, 5)), ["compute_capability"]),
        (machine(None), ["device"]),
        (machine(triton=None), ["package"]),
        (machine(triton="3.2.0"), ["package_version"]),
        (machine((7, 0), triton=None), ["compute_capability", "package"]),
        (machine((8, 0)), []),
        (machine((12, 0), fla_core=None, flash_qla=None), []),
        (machine(hip=Version("6.4"), triton=None, pytorch_triton_rocm="3.5.1"), []),
    ],
)
def test_what_a_machine_lacks(probe, expected):
    kernel = TritonKernel(hardware=probe)
    assert codes(kernel) == expected
    assert [refusal.code for refusal in kernel.unavailable("cuda")] == expected


@pytest.mark.usefixtures("loads")
@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ({"K": 257}, ["key_head_size"]),
        ({"K": 256, "V": 300}, []),
        ({"dtype": torch.float64}, ["dtype"]),
        ({"dtype": torch.float32}, []),
        ({"grad": True}, ["backward"]),
        ({"device": "cpu"}, ["device"]),
    ],
)
def test_limits_of_a_call(call, expected):
    assert codes(TritonKernel(hardware=machine()), **call) == expected


@pytest.mark.usefixtures("loads")
@pytest.mark.parametrize("grad", [False, True])
def test_there_is_no_chunked_form(grad):
    assert codes(TritonKernel(hardware=machine()), "chunk", grad=grad) == ["form"]


def test_a_triton_that_does_not_import_is_a_refusal_with_its_words(mocker):
    mocker.patch.object(importlib, "import_module", side_effect=ImportError("libcuda.so.1: no such file"))
    kernel = TritonKernel(hardware=machine())
    (refusal,) = kernel.refusals(**arguments(), form="step")
    assert refusal.code == "import"
    with pytest.raises(UnsupportedCall, match="libcuda"):
        kernel.require("cuda")


@pytest.mark.usefixtures("loads")
def test_it_decodes_beside_a_kernel_that_has_chunks(mocker):
    mocker.patch.object(FlashQLAKernel, "_load", return_value=())
    kernel = AutoKernel([FlashQLAKernel(hardware=machine()), TritonKernel(hardware=machine())])
    text = kernel.explain(**arguments(K=128, V=128))
    assert "chunk: goes to FlashQLAKernel" in text
    assert "step: goes to TritonKernel()" in text
    assert kernel.capabilities.state_in_place


# ---- what is handed over -----------------------------------------------------------------------------------------------


def test_the_state_is_handed_over_itself(launched):
    call = arguments(device="cpu", initial_state=torch.randn(1, 4, 8, 8), output_final_state=True, scale=0.5)
    expected = TorchKernel().step(**call)
    kernel = HostTritonKernel(hardware=machine())
    torch.testing.assert_close(kernel.step(**call), expected, rtol=0, atol=0)
    o, final = kernel.step(**call, state_in_place=True)
    assert final is call["initial_state"]
    torch.testing.assert_close((o, final), expected, rtol=0, atol=0)
    assert [given["state"] is final for given in launched] == [True, True]
    assert [given["kept"] is final for given in launched] == [False, True]
    assert final._version == 1  # autograd knows of it


def test_a_state_that_is_not_wanted_is_not_written(launched):
    _, final = HostTritonKernel(hardware=machine()).step(**arguments(device="cpu"))
    assert final is None
    assert launched[0]["kept"] is None


def test_empty_documents_are_handed_over_in_place(launched):
    packed = PackedSequences.from_lengths([0, 3, 0, 1])
    call = arguments(device="cpu", T=4, initial_state=torch.randn(4, 4, 8, 8), output_final_state=True)
    kept = call["initial_state"].clone()
    kernel = HostTritonKernel(hardware=machine())
    assert "lowered" not in kernel.explain(**call, cu_seqlens=packed, state_in_place=True).split("step:")[1]
    _, final = kernel.step(**call, cu_seqlens=packed, state_in_place=True)
    assert launched[0]["cu_seqlens"].tolist() == [0, 0, 3, 3, 4]
    assert launched[0]["cu_seqlens"].dtype == torch.int32
    assert torch.equal(final[[0, 2]], kept[[0, 2]])
    assert not torch.equal(final[1], kept[1])


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda kernel: pickle.loads(pickle.dumps(kernel))])
def test_a_used_kernel_can_be_saved_with_its_model(clone, loads):
    kernel = TritonKernel(hardware=None)
    kernel._load()
    assert clone(kernel)._broken is None


# ---- how a head is cut -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "K", "V", "expected"),
    [
        (32, 128, 128, (128, 16, 1)),  # one sequence: 256 programs on 132 multiprocessors
        (8192, 128, 128, (128, 64, 4)),
        (8192, 100, 20, (128, 32, 2)),
        (1, 1, 1, (16, 16, 1)),
        (8192, 256, 256, (256, 64, 8)),
    ],
)
def test_how_a_head_is_cut(heads, K, V, expected):
    step = pytest.importorskip("qwenlinear.kernels._step_triton", exc_type=ImportError)
    assert step.tile(heads, K, V, 132) == expected
