"""FLAKernel without a GPU: what it hands over, what it refuses, and that refusing imports nothing."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import pickle
import sys
import types
from dataclasses import replace

import pytest
import torch
from packaging.version import Version

from qwenlinear import FLAKernel, PackedSequences, TorchKernel, UnsupportedCall
from qwenlinear.kernels.fla import _chunk_indices
from tests.kernels.machines import arguments, machine


def codes(kernel, form="chunk", **call):
    return [refusal.code for refusal in kernel.refusals(**arguments(**call), form=form)]


@pytest.fixture
def no_import(mocker):
    """Fails the test if FLA was imported."""
    spy = mocker.spy(importlib, "import_module")
    before = "fla" in sys.modules
    yield
    assert [call.args[0] for call in spy.call_args_list if call.args[0].startswith("fla")] == []
    assert ("fla" in sys.modules) == before


class HostFLAKernel(FLAKernel):
    """FLAKernel that may be called with CPU tensors, for tests with a faked library."""

    capabilities = replace(FLAKernel.capabilities, devices=None)


@pytest.fixture
def fla(mocker):
    """A faked `fla`: both functions compute with TorchKernel, behind two layers of wrappers as in fla 0.6.0."""

    def chunk(q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens, **more):
        calls["chunk"].append({**locals(), **locals()["more"]})
        return TorchKernel()(
            q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens
        )

    def step(q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens):
        calls["step"].append(locals())
        return TorchKernel().step(
            q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens
        )

    calls = {"chunk": [], "step": []}

    @functools.wraps(chunk)
    def dispatcher(*args, **kwargs):
        raise AssertionError("FLA's dispatcher ran: it may hand the call to FlashQLA")

    @functools.wraps(dispatcher)
    def disabled(*args, **kwargs):
        return dispatcher(*args, **kwargs)

    ops = types.ModuleType("fla.ops.gated_delta_rule")
    ops.chunk_gated_delta_rule, ops.fused_recurrent_gated_delta_rule = disabled, step
    mocker.patch.dict(sys.modules, {"fla.ops.gated_delta_rule": ops})
    return calls


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_import")
@pytest.mark.parametrize("form", ["chunk", "step"])
def test_a_cpu_tensor_is_refused(form):
    assert codes(FLAKernel(hardware=machine()), form, device="cpu") == ["device"]


@pytest.mark.usefixtures("no_import")
@pytest.mark.parametrize(
    ("probe", "expected"),
    [
        (machine((7, 5)), ["compute_capability"]),
        (machine(None), ["device"]),
        (machine(fla_core=None), ["package"]),
        (machine(fla_core="0.5.2"), ["package_version"]),
        (machine(triton=None), ["package"]),
        (machine(triton="3.2.0"), ["package_version"]),
        (machine((7, 0), fla_core=None, triton=None), ["compute_capability", "package", "package"]),
        (machine(hip=Version("6.4"), fla_core="0.4.0"), ["package_version"]),
    ],
)
def test_every_lack_of_a_machine_is_listed(probe, expected):
    kernel = FLAKernel(hardware=probe)
    assert codes(kernel) == expected
    assert [refusal.code for refusal in kernel.unavailable("cuda")] == expected
    with pytest.raises(UnsupportedCall) as error:
        kernel.require("cuda")
    assert [refusal.code for refusal in error.value.refusals] == expected


@pytest.mark.usefixtures("no_import")
def test_the_remedy_of_a_missing_package_is_the_pip_line():
    (refusal,) = FLAKernel(hardware=machine(fla_core=None)).unavailable("cuda")
    assert refusal.remedy.startswith("pip install 'flash-linear-attention>=")


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0), (10, 3), (12, 0)])
@pytest.mark.parametrize("version", ["0.6.0", "0.6.1.dev0+gabc", "0.6.0a0+git", "0.10.0", "1.0"])
def test_newer_and_development_versions_run(fla, capability, version):
    assert codes(FLAKernel(hardware=machine(capability, fla_core=version, triton="3.7.1"))) == []


def test_rocm_runs(fla):
    kernel = FLAKernel(hardware=machine(hip=Version("6.4"), triton=None, pytorch_triton_rocm="3.5.1"))
    assert codes(kernel, grad=True) == []


@pytest.mark.usefixtures("no_import")
@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ({"K": 257}, ["key_head_size"]),
        ({"dtype": torch.float64}, ["dtype"]),
    ],
)
def test_limits_of_a_call(call, expected):
    assert codes(FLAKernel(hardware=machine()), **call) == expected


def test_the_recurrent_form_has_no_gradients(fla):
    kernel = FLAKernel(hardware=machine(triton="3.7.1"))
    assert codes(kernel, "step", grad=True) == ["backward"]
    assert codes(kernel, "step") == []
    with torch.no_grad():
        assert codes(kernel, "step", grad=True) == []


# ---- case 15: the backward pass that is wrong on Hopper ---------------------------------------------------------------


@pytest.mark.usefixtures("no_import")
@pytest.mark.parametrize("triton", ["3.4.0", "3.5.1", "3.6.0", "3.6.0+git1234", "3.7.0", "3.7.1a0"])
@pytest.mark.parametrize(("tilelang", "nvcc"), [(None, True), (None, False), ("0.1.12", False)])
def test_training_is_refused_with_the_bad_combination(triton, tilelang, nvcc):
    kernel = FLAKernel(hardware=machine((9, 0), triton=triton, tilelang=tilelang, nvcc=nvcc))
    (refusal,) = kernel.refusals(**arguments(grad=True))
    assert refusal.code == "fla_backward"
    assert str(Version(triton)) in refusal.got
    assert "0.6.0" in refusal.got
    with pytest.raises(UnsupportedCall, match=r"flash-linear-attention #640"):
        kernel(**arguments(grad=True))


@pytest.mark.parametrize("form", ["chunk", "step"])
def test_inference_is_allowed_with_the_bad_combination(fla, form):
    kernel = FLAKernel(hardware=machine((9, 0), triton="3.6.0", tilelang=None))
    assert codes(kernel, form) == []
    with torch.no_grad():
        assert codes(kernel, form, grad=True) == []


@pytest.mark.parametrize(
    "probe",
    [
        machine((9, 0), triton="3.6.0"),  # FLA takes its TileLang backward
        machine((9, 0), triton="3.3.1", tilelang=None),
        machine((9, 0), triton="3.7.1", tilelang=None),
        machine((9, 0), triton="3.8.0+git", tilelang=None),
        machine((8, 0), triton="3.6.0", tilelang=None),
        machine((10, 0), triton="3.6.0", tilelang=None),
        machine((12, 0), triton="3.6.0", tilelang=None, nvcc=False),
    ],
)
def test_training_runs_elsewhere(fla, probe):
    assert codes(FLAKernel(hardware=probe), grad=True) == []


# ---- what is handed over -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["chunk", "step"])
def test_dense_arguments_arrive_as_they_are(fla, form):
    kernel = HostFLAKernel(hardware=machine())
    call = arguments(device="cpu", initial_state=torch.randn(1, 4, 8, 8), scale=0.5, use_qk_l2norm_in_kernel=True)
    call["k"] = call["k"].transpose(1, 2).contiguous().transpose(1, 2)  # strided: FLA copies it itself
    o, final_state = (kernel if form == "chunk" else kernel.step)(**call, output_final_state=True)
    (given,) = fla[form]
    for name in ("q", "k", "v", "g", "beta", "initial_state"):
        assert given[name] is call[name]
    assert (given["scale"], given["output_final_state"], given["use_qk_l2norm_in_kernel"]) == (0.5, True, True)
    assert given["cu_seqlens"] is None
    assert "chunk_indices" not in given
    expected, expected_state = (TorchKernel() if form == "chunk" else TorchKernel().step)(
        **call, output_final_state=True
    )
    torch.testing.assert_close(o, expected, rtol=0, atol=0)
    torch.testing.assert_close(final_state, expected_state, rtol=0, atol=0)


def test_the_default_scale_arrives_as_a_number(fla):
    HostFLAKernel(hardware=machine())(**arguments(device="cpu"))
    assert fla["chunk"][0]["scale"] == 8**-0.5


def test_a_float64_beta_arrives_in_float32(fla):
    call = arguments(device="cpu")
    call["beta"] = call["beta"].double()
    HostFLAKernel(hardware=machine())(**call)
    assert fla["chunk"][0]["beta"].dtype == torch.float32


@pytest.mark.parametrize("form", ["chunk", "step"])
def test_boundaries_arrive_private_and_without_empty_documents(fla, form):  # case 3
    kernel = HostFLAKernel(hardware=machine())
    packed = PackedSequences.from_lengths([0, 65, 0, 64, 3, 0])
    state = torch.randn(6, 4, 8, 8)
    call = arguments(T=132, device="cpu", initial_state=state, output_final_state=True)
    run = kernel if form == "chunk" else kernel.step
    o, final_state = run(**call, cu_seqlens=packed)
    run(**call, cu_seqlens=packed)
    first, second = fla[form]
    assert first["cu_seqlens"].tolist() == [0, 65, 129, 132]
    assert first["cu_seqlens"].dtype == torch.int32
    assert first["cu_seqlens"] is second["cu_seqlens"]  # what the library caches by identity stays valid
    if form == "chunk":
        assert first["cu_seqlens_cpu"].tolist() == [0, 65, 129, 132]
        assert first["chunk_indices"].tolist() == [[0, 0], [0, 1], [1, 0], [2, 0]]
        assert first["chunk_indices"] is second["chunk_indices"]
    for empty in (0, 2, 5):
        assert torch.equal(final_state[empty], state[empty])
    expected = (TorchKernel() if form == "chunk" else TorchKernel().step)(**call, cu_seqlens=packed)
    torch.testing.assert_close((o, final_state), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("inference", [False, True])
def test_a_rewritten_tensor_gives_its_values_at_call_time(fla, inference):  # case 11
    kernel = HostFLAKernel(hardware=machine())
    cu_seqlens = torch.tensor([0, 4, 10])
    call = arguments(T=10, device="cpu")
    with torch.inference_mode(inference):
        kernel(**call, cu_seqlens=cu_seqlens)
        cu_seqlens.copy_(torch.tensor([0, 7, 10]))
        o, _ = kernel(**call, cu_seqlens=cu_seqlens)
        expected, _ = TorchKernel()(**call, cu_seqlens=PackedSequences.from_lengths([7, 3]))
    first, second = fla["chunk"]
    assert first["cu_seqlens"].tolist() == [0, 4, 10]
    assert second["cu_seqlens"].tolist() == [0, 7, 10]
    assert first["cu_seqlens"] is not second["cu_seqlens"]
    assert torch.equal(o, expected)


def test_derived_tensors_of_an_inference_call_serve_training_later(fla):
    kernel, packed = HostFLAKernel(hardware=machine()), PackedSequences.from_lengths([4, 6])
    with torch.inference_mode():
        kernel(**arguments(T=10, device="cpu"), cu_seqlens=packed)
    given = fla["chunk"][0]
    assert not given["cu_seqlens"].is_inference()
    assert not given["chunk_indices"].is_inference()


@pytest.mark.parametrize("lengths", [[1], [64], [65], [63, 64, 65, 1, 200], [128] * 3])
def test_chunk_indices_count_the_chunks_of_each_document(lengths):
    expected = [[n, chunk] for n, length in enumerate(lengths) for chunk in range(-(-length // 64))]
    assert _chunk_indices(PackedSequences.from_lengths(lengths), torch.device("cpu")).tolist() == expected


# ---- loading -------------------------------------------------------------------------------------------------------


def test_construction_and_unavailable_import_nothing(no_import):
    FLAKernel(hardware=machine()).unavailable("cuda")


def test_an_installed_package_that_does_not_import_is_a_refusal_with_its_words(mocker):
    kernel, call = FLAKernel(hardware=machine()), arguments()
    mocker.patch.object(importlib, "import_module", side_effect=ImportError("libcuda.so.1: no such file"))
    (refusal,) = kernel.refusals(**call)
    assert refusal.code == "import"
    assert "libcuda.so.1: no such file" in refusal.got
    with pytest.raises(UnsupportedCall, match="libcuda"):
        kernel.require("cuda")
    with pytest.raises(UnsupportedCall, match="libcuda"):
        kernel(**call)


def test_explain_says_that_the_dispatcher_is_bypassed(fla):
    text = FLAKernel(hardware=machine()).explain(**arguments())
    assert "FLA's own chunk_gated_delta_rule" in text
    assert "hand-over to FlashQLA are bypassed" in text
    assert repr(FLAKernel()) == "FLAKernel()"


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda kernel: pickle.loads(pickle.dumps(kernel))])
def test_a_used_kernel_can_be_saved_with_its_model(fla, clone):
    kernel = FLAKernel()
    kernel._load()
    assert clone(kernel)._functions == {}


def test_the_real_function_takes_what_is_handed_over():
    ops = pytest.importorskip("fla.ops.gated_delta_rule", exc_type=ImportError)
    kernel = FLAKernel()
    assert tuple(kernel._load()) == ()
    own = inspect.unwrap(kernel._functions["chunk"])
    assert own.__module__ == "fla.ops.gated_delta_rule.chunk"
    assert not hasattr(own, "__wrapped__")
    names = {"q", "k", "v", "g", "beta", "scale", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel"}
    assert {*names, "cu_seqlens", "cu_seqlens_cpu", "chunk_indices"} <= set(inspect.signature(own).parameters)
    step = inspect.signature(ops.fused_recurrent_gated_delta_rule)
    assert {*names, "cu_seqlens"} <= set(step.parameters)
