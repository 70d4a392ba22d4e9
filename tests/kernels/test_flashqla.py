"""FlashQLAKernel without a GPU: what it hands over, what it refuses, and that refusing imports nothing."""

from __future__ import annotations

import copy
import importlib
import pickle
import sys
import types
from dataclasses import replace

import pytest
import torch
from packaging.version import Version

from qwenlinear import FlashQLAKernel, PackedSequences, TorchKernel, UnsupportedCall
from qwenlinear.kernels.lowering import l2norm
from tests.kernels.machines import arguments, machine

SUPPORTED = [(9, 0), (10, 0), (10, 3), (12, 0), (12, 1)]


def call(K=128, V=128, **more):
    return arguments(K=K, V=V, **more)


def codes(kernel, form="chunk", **more):
    return [refusal.code for refusal in kernel.refusals(**call(**more), form=form)]


@pytest.fixture
def no_import(mocker):
    """Fails the test if FlashQLA or TileLang was imported."""
    names = ("flash_qla", "tilelang")
    before = {name for name in sys.modules if name.startswith(names)}
    spy = mocker.spy(importlib, "import_module")
    yield
    assert [c.args[0] for c in spy.call_args_list if c.args[0].startswith(names)] == []
    assert {name for name in sys.modules if name.startswith(names)} == before


class HostFlashQLAKernel(FlashQLAKernel):
    """FlashQLAKernel that may be called with small CPU tensors, for tests with a faked library."""

    capabilities = replace(FlashQLAKernel.capabilities, devices=None, key_head_sizes=None, value_head_sizes=None)


@pytest.fixture
def flash_qla(mocker):
    """A faked `flash_qla` that computes with TorchKernel and takes what 0.1.3's function takes."""

    def chunk(q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens, **more):
        calls.append({**locals(), **more})
        return TorchKernel()(
            q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens
        )

    def prepare(cu_seqlens, cu_seqlens_cpu):
        assert cu_seqlens_cpu.device.type == "cpu"
        assert torch.equal(cu_seqlens.cpu(), cu_seqlens_cpu)
        cu_seqlens.prepared = getattr(cu_seqlens, "prepared", 0) + 1
        return cu_seqlens

    calls = []
    package, utils, index = (types.ModuleType(f"flash_qla{tail}") for tail in ("", ".utils", ".utils.index"))
    package.chunk_gated_delta_rule, index.prepare_varlen_metadata = chunk, prepare
    names = {"flash_qla": package, "flash_qla.utils": utils, "flash_qla.utils.index": index}
    mocker.patch.dict(sys.modules, names)
    return calls


# ---- refusals: the machine ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_import")
@pytest.mark.parametrize(
    ("probe", "expected"),
    [
        (machine((8, 0)), ["compute_capability"]),
        (machine((8, 9)), ["compute_capability"]),
        (machine((11, 0)), ["compute_capability"]),
        (machine(None), ["device"]),
        (machine(hip=Version("6.4")), ["device"]),
        (machine(pytorch="2.7.1"), ["torch_version"]),
        (machine(pytorch="2.7.1+cu128"), ["torch_version"]),
        (machine(cuda="12.6"), ["cuda_version"]),
        (machine(cuda=None), ["cuda_version"]),
        (machine(flash_qla=None), ["package"]),
        (machine(flash_qla="0.1.1"), ["package_version"]),
        (machine((12, 1), flash_qla="0.1.3"), ["package_version"]),
        (machine(tilelang=None), ["package"]),
        (machine(tilelang="0.1.9"), ["package_version"]),
        (machine(nvcc=False), ["nvcc"]),
        (
            machine((8, 0), pytorch="2.7.1", cuda="12.4", flash_qla=None, tilelang=None, nvcc=False),
            ["compute_capability", "torch_version", "cuda_version", "package", "package", "nvcc"],
        ),
    ],
)
def test_every_lack_of_a_machine_is_listed(probe, expected):
    kernel = FlashQLAKernel(hardware=probe)
    assert codes(kernel) == expected
    with pytest.raises(UnsupportedCall) as error:
        kernel.require("cuda")
    assert [refusal.code for refusal in error.value.refusals] == expected


@pytest.mark.parametrize("capability", SUPPORTED)
@pytest.mark.parametrize(
    "pytorch", ["2.8.0a0+git", "2.8.0", "2.10.0+cu130", "2.9.0.dev20260101", "2.11.0+cu130", "2.15.0a0"]
)
def test_supported_machines_run(flash_qla, capability, pytorch):
    kernel = FlashQLAKernel(hardware=machine(capability, pytorch=pytorch, flash_qla="0.1.4", cuda="12.8"))
    assert codes(kernel) == []
    kernel.require("cuda")


def test_the_version_before_runs_with_the_tilelang_it_pins(flash_qla):
    assert codes(FlashQLAKernel(hardware=machine(flash_qla="0.1.2", tilelang="0.1.9"))) == []


@pytest.mark.usefixtures("no_import")
def test_refusals_say_need_find_and_remedy():
    (refusal,) = FlashQLAKernel(hardware=machine((8, 0))).unavailable("cuda")
    assert str(refusal) == (
        "[compute_capability] needs compute capability 9.0, 10.0, 10.3, 12.0, 12.1; got cuda sm_80; "
        "use FLAKernel() or TorchKernel()"
    )
    (refusal,) = FlashQLAKernel(hardware=machine(flash_qla=None)).unavailable("cuda")
    assert refusal.remedy == "pip install 'flash-qla>=0.1.3'"
    (refusal,) = FlashQLAKernel(hardware=machine(hip=Version("6.4"))).unavailable("cuda")
    assert refusal.got == "cuda ROCm 6.4"


@pytest.mark.usefixtures("no_import")
def test_a_cpu_tensor_is_refused_before_anything_else_is_asked():
    assert codes(FlashQLAKernel(hardware=machine()), device="cpu") == ["device"]
    with pytest.raises(UnsupportedCall, match="needs cuda; got cpu"):
        FlashQLAKernel().require("cpu")


# ---- refusals: the call (case 16) --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_import")
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("capability", [(9, 0), (12, 0)])
@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"K": 64}, ["key_head_size"]),
        ({"K": 96}, ["key_head_size"]),
        ({"K": 256}, ["key_head_size"]),
        ({"V": 64}, ["value_head_size"]),
        ({"V": 256}, ["value_head_size"]),
        ({"dtype": torch.float32}, ["dtype"]),
        ({"scale": 0.0}, ["scale"]),
        ({"K": 64, "V": 64, "dtype": torch.float32}, ["dtype", "key_head_size", "value_head_size"]),
    ],
)
def test_limits_of_a_call(more, expected, grad, capability):
    kernel = FlashQLAKernel(hardware=machine(capability))
    assert codes(kernel, grad=grad, **more) == expected
    with pytest.raises(UnsupportedCall):
        kernel(**call(grad=grad, **more))


@pytest.mark.parametrize(
    ("capability", "version", "dtype", "grad", "expected"),
    [
        ((8, 0), "0.1.3", torch.bfloat16, False, ["compute_capability"]),
        ((9, 0), "0.1.2", torch.float16, True, []),
        ((10, 3), "0.1.2", torch.float16, True, []),
        ((12, 0), "0.1.2", torch.bfloat16, False, []),
        ((12, 0), "0.1.2", torch.bfloat16, True, ["backward"]),
        ((12, 1), "0.1.2", torch.bfloat16, True, ["backward"]),
        ((12, 0), "0.1.2", torch.float16, False, ["dtype"]),
        ((12, 0), "0.1.2", torch.float16, True, ["dtype", "backward"]),
        ((12, 0), "0.1.3", torch.bfloat16, True, []),
        ((12, 0), "0.1.3", torch.float16, False, ["dtype"]),
    ],
)
def test_forward_only_devices_say_so_before_the_forward(flash_qla, capability, version, dtype, grad, expected):
    kernel = FlashQLAKernel(hardware=machine(capability, flash_qla=version))
    assert codes(kernel, dtype=dtype, grad=grad) == expected
    assert flash_qla == []


@pytest.mark.usefixtures("no_import")
def test_there_is_no_recurrent_form():
    assert codes(FlashQLAKernel(hardware=machine()), "step") == ["form"]


def test_refusing_strided_tensors(flash_qla):
    inputs = {**call(), "k": call(T=8)["k"][:, ::2]}
    (refusal,) = FlashQLAKernel("refuse", hardware=machine()).refusals(**inputs)
    assert (refusal.code, refusal.got) == ("contiguity", "strided k")
    assert FlashQLAKernel("copy", hardware=machine()).refusals(**inputs) == ()
    assert "strided k copied" in FlashQLAKernel(hardware=machine()).explain(**inputs)


def test_contiguity_is_one_of_two_words():
    with pytest.raises(ValueError, match="contiguity needs 'copy' or 'refuse', got 'maybe'"):
        FlashQLAKernel("maybe")
    assert repr(FlashQLAKernel()) == "FlashQLAKernel(contiguity='copy')"


# ---- what is handed over -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("contiguity", ["copy", "refuse"])
def test_contiguous_arguments_arrive_as_they_are(flash_qla, contiguity):
    kernel = HostFlashQLAKernel(contiguity, hardware=machine())
    inputs = arguments(device="cpu", initial_state=torch.randn(1, 4, 8, 8), scale=0.5)
    o, final_state = kernel(**inputs, output_final_state=True)
    (given,) = flash_qla
    for name in ("q", "k", "v", "g", "beta", "initial_state"):
        assert given[name] is inputs[name]
    assert (given["scale"], given["output_final_state"], given["cu_seqlens"]) == (0.5, True, None)
    expected = TorchKernel()(**inputs, output_final_state=True)
    torch.testing.assert_close((o, final_state), expected, rtol=0, atol=0)


def test_strided_arguments_arrive_contiguous(flash_qla):
    inputs = arguments(T=8, device="cpu", initial_state=torch.randn(1, 4, 8, 8).mT)
    strided = {name: tensor.transpose(1, 2).contiguous().transpose(1, 2) for name, tensor in inputs.items()}
    strided["initial_state"] = inputs["initial_state"]
    o, _ = HostFlashQLAKernel(hardware=machine())(**strided)
    given = flash_qla[0]
    assert all(given[name].is_contiguous() for name in inputs)
    assert all(torch.equal(given[name], inputs[name]) for name in inputs)
    assert torch.equal(o, TorchKernel()(**inputs)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_beta_arrives_in_float32_and_its_gradient_in_its_own_dtype(flash_qla, dtype):
    inputs = arguments(device="cpu")
    beta = inputs["beta"].to(dtype).requires_grad_()
    o, _ = HostFlashQLAKernel(hardware=machine())(**{**inputs, "beta": beta})
    o.sum().backward()
    assert flash_qla[0]["beta"].dtype == torch.float32
    assert beta.grad.dtype == dtype


def test_normalisation_happens_before_the_kernel(flash_qla):
    inputs = arguments(device="cpu")
    HostFlashQLAKernel(hardware=machine())(**inputs, use_qk_l2norm_in_kernel=True)
    given = flash_qla[0]
    assert given["use_qk_l2norm_in_kernel"] is False
    assert torch.equal(given["q"], l2norm(inputs["q"]))
    assert torch.equal(given["k"], l2norm(inputs["k"]))


def test_boundaries_arrive_private_prepared_and_without_empty_documents(flash_qla):  # case 3
    kernel = HostFlashQLAKernel(hardware=machine())
    packed = PackedSequences.from_lengths([0, 5, 0, 4, 0])
    inputs = arguments(T=9, device="cpu", initial_state=torch.randn(5, 4, 8, 8), output_final_state=True)
    o, final_state = kernel(**inputs, cu_seqlens=packed)
    kernel(**inputs, cu_seqlens=packed)
    first, second = (given["cu_seqlens"] for given in flash_qla)
    assert first is second
    assert first.prepared == 1
    assert first.tolist() == [0, 5, 9]
    assert first.dtype == torch.int32
    assert first is not packed.nonempty._boundaries(torch.device("cpu"))  # nobody else sees what FlashQLA hangs on it
    for empty in (0, 2, 4):
        assert torch.equal(final_state[empty], inputs["initial_state"][empty])
    torch.testing.assert_close((o, final_state), TorchKernel()(**inputs, cu_seqlens=packed), rtol=1e-5, atol=1e-5)


def test_older_libraries_are_called_without_preparation(flash_qla, mocker):
    mocker.patch.dict(sys.modules, {"flash_qla.utils.index": types.ModuleType("flash_qla.utils.index")})
    kernel = HostFlashQLAKernel(hardware=machine(flash_qla="0.1.2"))
    kernel(**arguments(T=9, device="cpu"), cu_seqlens=PackedSequences.from_lengths([5, 4]))
    assert flash_qla[0]["cu_seqlens"].tolist() == [0, 5, 9]


@pytest.mark.parametrize("inference", [False, True])
def test_a_rewritten_tensor_gives_its_values_at_call_time(flash_qla, inference):  # case 11
    kernel, cu_seqlens = HostFlashQLAKernel(hardware=machine()), torch.tensor([0, 4, 10], dtype=torch.int32)
    inputs = arguments(T=10, device="cpu")
    with torch.inference_mode(inference):
        kernel(**inputs, cu_seqlens=cu_seqlens)
        cu_seqlens.copy_(torch.tensor([0, 7, 10]))
        kernel(**inputs, cu_seqlens=cu_seqlens)
    first, second = (given["cu_seqlens"] for given in flash_qla)
    assert (first.tolist(), second.tolist()) == ([0, 4, 10], [0, 7, 10])
    assert first is not second
    assert not first.is_inference()


# ---- loading -----------------------------------------------------------------------------------------------------------


def test_construction_and_unavailable_import_nothing(no_import):
    FlashQLAKernel(hardware=machine()).unavailable("cuda")


def test_an_installed_package_that_does_not_import_is_a_refusal_with_its_words(mocker):
    words = "FlashQLA now support sm90 only. Found compute version: 8.0"
    kernel, inputs = FlashQLAKernel(hardware=machine()), call()
    mocker.patch.object(importlib, "import_module", side_effect=ValueError(words))
    (refusal,) = kernel.refusals(**inputs)
    assert (refusal.code, refusal.got) == ("import", f"ValueError: {words}")
    for failing in (lambda: kernel.require("cuda"), lambda: kernel(**inputs)):
        with pytest.raises(UnsupportedCall, match="Found compute version"):
            failing()


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda kernel: pickle.loads(pickle.dumps(kernel))])
def test_a_used_kernel_can_be_saved_with_its_model(flash_qla, clone):
    kernel = FlashQLAKernel("refuse")
    kernel._load()
    assert clone(kernel).contiguity == "refuse"
    assert clone(kernel)._function is None
