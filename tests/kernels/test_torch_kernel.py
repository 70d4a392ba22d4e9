"""TorchKernel against the recurrence in float64: output, states and every gradient, both forms, dense and packed."""

from __future__ import annotations

import importlib.util
import re
from itertools import pairwise

import pytest
import torch

from qwenlinear import AutoKernel, PackedSequences, TorchKernel, UnsupportedCall
from qwenlinear.kernels.hardware import Hardware
from tests.kernels.reference import random_call, recurrence, relative

KERNEL = TorchKernel()
FORMS = {"chunk": KERNEL.__call__, "step": KERNEL.step}
# B, T, H, HV, K, V, bounds
SHAPES = {
    "two-rows": (2, 130, 2, 4, 8, 6, None),
    "one-token": (3, 1, 1, 3, 4, 4, None),
    "exact-chunk": (1, 64, 2, 2, 8, 6, None),
    "chunk-plus-one": (2, 65, 1, 3, 4, 8, None),
    "wide-values": (1, 127, 2, 6, 3, 16, None),
    "packed": (1, 200, 2, 4, 8, 6, (0, 1, 65, 130, 131, 200)),
    "packed-empty": (1, 200, 2, 4, 8, 6, (0, 0, 1, 65, 65, 130, 200, 200)),
    "single-tokens": (1, 40, 1, 2, 8, 6, tuple(range(41))),
    "three-lengths": (1, 300, 1, 2, 4, 4, (0, 3, 280, 300)),
}


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "l2norm"])
@pytest.mark.parametrize("from_state", [False, True], ids=["zeros", "state"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_recurrence_in_float64(shape: str, form: str, from_state: bool, norm: bool) -> None:
    *sizes, bounds = SHAPES[shape]
    N = sizes[0] if bounds is None else len(bounds) - 1
    call = random_call(*sizes, N=N if from_state else None, grad=True)
    cu_seqlens = None if bounds is None else torch.tensor(bounds)
    o, final = FORMS[form](
        **call, scale=0.3, output_final_state=True, use_qk_l2norm_in_kernel=norm, cu_seqlens=cu_seqlens
    )
    want_o, want_final = recurrence(**call, scale=0.3, norm=norm, bounds=bounds)
    assert relative(o, want_o) < 1e-11
    assert relative(final, want_final) < 1e-11
    weights = torch.randn_like(o), torch.randn_like(final)
    got = torch.autograd.grad((o * weights[0]).sum() + (final * weights[1]).sum(), list(call.values()))
    want = torch.autograd.grad((want_o * weights[0]).sum() + (want_final * weights[1]).sum(), list(call.values()))
    errors = {name: relative(a, b) for name, a, b in zip(call, got, want, strict=True)}
    assert max(errors.values()) < 1e-9, errors


@pytest.mark.parametrize("of", ["output", "state"])
@pytest.mark.parametrize("form", FORMS)
def test_gradient_of_one_result_alone(form: str, of: str) -> None:
    bounds = (0, 70, 75, 200)
    call = random_call(1, 200, N=3, grad=True)
    o, final = FORMS[form](**call, output_final_state=True, cu_seqlens=torch.tensor(bounds))
    want_o, want_final = recurrence(**call, bounds=bounds)
    got = torch.autograd.grad((o if of == "output" else final).square().sum(), list(call.values()), allow_unused=True)
    want = torch.autograd.grad(
        (want_o if of == "output" else want_final).square().sum(), list(call.values()), allow_unused=True
    )
    for name, a, b in zip(call, got, want, strict=True):
        b = torch.zeros_like(call[name]) if b is None else b
        a = torch.zeros_like(call[name]) if a is None else a
        assert relative(a, b) < 1e-9, name


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_stays_within_its_tolerances(dtype: torch.dtype, form: str) -> None:
    bounds = (0, 5, 133, 300)
    call = random_call(1, 300, 2, 4, 16, 16, dtype=dtype, strongest=0.2, N=3, grad=True)
    wide = {name: x.detach().double().requires_grad_() for name, x in call.items()}
    o, final = FORMS[form](**call, output_final_state=True, cu_seqlens=torch.tensor(bounds))
    want_o, want_final = recurrence(**wide, bounds=bounds)
    assert o.dtype == dtype
    assert final.dtype == torch.float32
    tolerance = KERNEL.tolerances[dtype]
    assert relative(o, want_o) < tolerance.output
    assert relative(final, want_final) < tolerance.state
    weight = torch.randn(o.shape)
    got = torch.autograd.grad((o.float() * weight).sum(), list(call.values()))
    want = torch.autograd.grad((want_o * weight.double()).sum(), list(wide.values()))
    for name, a, b in zip(call, got, want, strict=True):
        assert a.dtype == call[name].dtype
        assert relative(a, b) < tolerance.gradient, name


# Case 9: strong decay must not become 0 * inf, weak decay behind a strong one must not drown.
GATES = {
    "none": lambda T: torch.zeros(T),
    "-2": lambda T: torch.full((T,), -2.0),
    "-27.6": lambda T: torch.full((T,), -27.6),
    "-100": lambda T: torch.full((T,), -100.0),
    "-1e4": lambda T: torch.full((T,), -1e4),
    "one -90, then none": lambda T: torch.tensor([-90.0] + [0.0] * (T - 1)),
    "weak around a strong one": lambda T: torch.tensor([-0.01] * 20 + [-1e4] + [-0.01] * (T - 21)),
    "weak after each strong": lambda T: torch.tensor([-30.0, -1e-3] * (T // 2)),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_extreme_gates(dtype: torch.dtype, gate: str, form: str) -> None:
    call = random_call(1, 100, 2, 4, 8, 8, dtype=dtype, N=1)
    call["g"] = GATES[gate](100).to(dtype)[None, :, None].expand(1, 100, 4)
    call = {name: x.clone().requires_grad_() for name, x in call.items()}
    wide = {name: x.detach().double().requires_grad_() for name, x in call.items()}
    o, final = FORMS[form](**call, output_final_state=True)
    want_o, want_final = recurrence(**wide)
    exact = dtype == torch.float64
    assert relative(o, want_o) < (1e-11 if exact else 1e-5)
    assert relative(final, want_final) < (1e-11 if exact else 1e-5)
    got = torch.autograd.grad(o.sum() + final.sum(), list(call.values()))
    want = torch.autograd.grad(want_o.sum() + want_final.sum(), list(wide.values()))
    for name, a, b in zip(call, got, want, strict=True):
        assert a.isfinite().all(), name
        if b.norm() > 1e-30:  # below, a float32 gradient is rightly zero
            assert relative(a, b) < (1e-9 if exact else 2e-5), name


def test_a_reset_by_minus_infinity_is_a_fresh_start() -> None:
    call = random_call(1, 20)
    call["g"][:, 8] = -torch.inf
    for run in FORMS.values():
        o, final = run(**call, output_final_state=True)
        fresh_o, fresh_final = run(**{name: x[:, 8:] for name, x in call.items()}, output_final_state=True)
        assert relative(o[:, 8:], fresh_o) < 1e-12
        assert relative(final, fresh_final) < 1e-12


def test_no_decay_is_the_ungated_delta_rule() -> None:
    """Writing v with beta = 1 under a unit key makes exactly v come back for that key."""
    call = random_call(1, 70)
    call["g"] = torch.zeros_like(call["g"])
    call["beta"] = torch.ones_like(call["beta"])
    call["q"] = call["k"]
    o, _ = KERNEL(**call, scale=1.0)
    assert relative(o, call["v"]) < 1e-11


# Case 10: value head j reads key head j // (HV // H).
@pytest.mark.parametrize("form", FORMS)
def test_value_head_groups_repeat_and_do_not_tile(form: str) -> None:
    call = random_call(1, 70, 2, 6, 8, 4)
    o, final = FORMS[form](**call, output_final_state=True)
    repeated = {**call, "q": call["q"].repeat_interleave(3, 2), "k": call["k"].repeat_interleave(3, 2)}
    want_o, want_final = FORMS[form](**repeated, output_final_state=True)
    assert relative(o, want_o) < 1e-12
    assert relative(final, want_final) < 1e-12


@pytest.mark.parametrize(("H", "HV"), [(4, 2), (2, 3)])
@pytest.mark.parametrize("form", FORMS)
def test_heads_that_do_not_group_are_refused(form: str, H: int, HV: int) -> None:
    with pytest.raises(ValueError, match=rf"HV={HV} and H={H}"):
        FORMS[form](**random_call(1, 3, H, HV))


# Case 3: an empty document neither shifts the others nor loses its state.
@pytest.mark.parametrize("bounds", [(0, 0, 5, 5, 9), (0, 5, 9, 9), (0, 0, 0), (0, 4, 4, 4, 9)])
@pytest.mark.parametrize("from_state", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_empty_documents(form: str, from_state: bool, bounds: tuple[int, ...]) -> None:
    N, T = len(bounds) - 1, bounds[-1]
    call = random_call(1, T, N=N if from_state else None, grad=True)
    o, final = FORMS[form](**call, output_final_state=True, cu_seqlens=torch.tensor(bounds))
    want_o, want_final = recurrence(**call, bounds=bounds)
    assert torch.allclose(o, want_o, atol=1e-12)
    assert torch.allclose(final, want_final, atol=1e-12)
    weight = torch.randn_like(final)
    if from_state:
        (gradient,) = torch.autograd.grad((final * weight).sum(), call["initial_state"])
        for n, (start, end) in enumerate(pairwise(bounds)):
            if start == end:
                assert torch.equal(gradient[n], weight[n])  # passes straight through


# Case 11: the boundaries at the time of the call decide.
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_boundaries_rewritten_in_place(form: str, inference: bool) -> None:
    call = random_call(1, 10)
    with torch.inference_mode(inference):
        cu_seqlens = torch.tensor([0, 4, 10])
        first, _ = FORMS[form](**call, cu_seqlens=cu_seqlens)
        cu_seqlens.copy_(torch.tensor([0, 7, 10]))
        second, _ = FORMS[form](**call, cu_seqlens=cu_seqlens)
    assert relative(first, recurrence(**call, bounds=(0, 4, 10))[0]) < 1e-12
    assert relative(second, recurrence(**call, bounds=(0, 7, 10))[0]) < 1e-12


def test_boundaries_made_in_inference_mode_serve_training() -> None:
    with torch.inference_mode():
        packed = PackedSequences.from_lengths([4, 6])
        KERNEL(**random_call(1, 10), cu_seqlens=packed)
    call = random_call(1, 10, grad=True)
    KERNEL(**call, cu_seqlens=packed)[0].sum().backward()
    assert call["k"].grad is not None


@pytest.mark.parametrize("form", FORMS)
def test_repeats_bit_for_bit_and_leaves_its_inputs_alone(form: str) -> None:
    def run() -> list[torch.Tensor]:
        call = random_call(1, 200, dtype=torch.float32, N=3, grad=True)
        before = {name: x.detach().clone() for name, x in call.items()}
        o, final = FORMS[form](**call, output_final_state=True, cu_seqlens=torch.tensor([0, 3, 130, 200]))
        (o.sum() + final.sum()).backward()
        assert all(torch.equal(before[name], x) for name, x in call.items())
        return [o, final, *(x.grad for x in call.values() if x.grad is not None)]

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


@pytest.mark.parametrize("form", FORMS)
def test_scratch_memory_is_never_read_before_it_is_written(form: str) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills torch.empty with NaN
    try:
        call = random_call(1, 200, N=3, grad=True)
        o, final = FORMS[form](**call, output_final_state=True, cu_seqlens=torch.tensor([0, 3, 130, 200]))
        (o.sum() + final.sum()).backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(x.isfinite().all() for x in (o, final, *(x.grad for x in call.values())))


def test_a_document_of_nans_stays_alone() -> None:
    call = random_call(1, 150, dtype=torch.float32)
    for name in ("q", "k", "v", "beta"):
        call[name][:, :70] = torch.nan
    call = {name: x.requires_grad_() for name, x in call.items()}
    o, _ = KERNEL(**call, cu_seqlens=torch.tensor([0, 70, 150]))
    o[:, 70:].sum().backward()
    assert o[:, 70:].isfinite().all()
    assert all(x.grad[:, 70:].isfinite().all() for x in call.values())


@pytest.mark.parametrize("form", FORMS)
def test_autocast_changes_nothing(form: str) -> None:
    call = random_call(1, 70, dtype=torch.float32, grad=True)
    want = FORMS[form](**call)[0]
    plain = torch.autograd.grad(want.sum(), list(call.values()))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, _ = FORMS[form](**call)
    cast = torch.autograd.grad(o.sum(), list(call.values()))
    assert torch.equal(o, want)
    assert all(torch.equal(a, b) for a, b in zip(plain, cast, strict=True))


def test_the_chunked_backward_under_autocast_changes_nothing() -> None:
    call = random_call(1, 70, dtype=torch.float32, grad=True)
    o, _ = KERNEL(**call)
    plain = torch.autograd.grad(o.sum(), list(call.values()), retain_graph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = torch.autograd.grad(o.sum(), list(call.values()))
    assert all(torch.equal(a, b) for a, b in zip(plain, cast, strict=True))


@pytest.mark.parametrize("bounds", [None, (0, 300, 310, 700)], ids=["dense", "packed"])
@pytest.mark.parametrize("form", FORMS)
def test_a_second_backward_pass_gives_the_same_gradients(form: str, bounds: tuple[int, ...] | None) -> None:
    call = random_call(1, 700, K=32, V=32, N=1 if bounds is None else 3, grad=True)  # several blocks
    cu_seqlens = None if bounds is None else torch.tensor(bounds)
    o, final = FORMS[form](**call, output_final_state=True, cu_seqlens=cu_seqlens)
    loss = o.square().sum() + final.square().sum()
    first = torch.autograd.grad(loss, list(call.values()), retain_graph=True)
    second = torch.autograd.grad(loss, list(call.values()))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_shapes_on_the_meta_device() -> None:
    call = {name: x.to("meta") for name, x in random_call(2, 70, N=2).items()}
    for form in (KERNEL.__call__, KERNEL.step):
        o, final = form(**call, output_final_state=True)
        assert (o.shape, final.shape) == ((2, 70, 4, 8), (2, 4, 8, 8))


def test_strided_inputs() -> None:
    call = random_call(2, 70, N=2)
    strided = {name: x.transpose(0, -1).contiguous().transpose(0, -1) for name, x in call.items()}
    o, final = KERNEL(**strided, output_final_state=True)
    want_o, want_final = KERNEL(**call, output_final_state=True)
    assert torch.equal(o, want_o)
    assert torch.equal(final, want_final)


@pytest.mark.parametrize("scale", [0.0, -0.7, 2, 1e-200])
def test_any_scale(scale: float) -> None:
    call = random_call(1, 70, grad=True)
    got = torch.autograd.grad(KERNEL(**call, scale=scale, use_qk_l2norm_in_kernel=True)[0].sum(), list(call.values()))
    want = torch.autograd.grad(recurrence(**call, scale=scale, norm=True)[0].sum(), list(call.values()))
    for name, a, b in zip(call, got, want, strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-12), name


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("rule", ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"])
def test_equals_transformers(rule: str, seed: int) -> None:
    import inspect

    from transformers.models.qwen3_5 import modeling_qwen3_5

    theirs = inspect.unwrap(getattr(modeling_qwen3_5, rule))
    draw = torch.Generator().manual_seed(seed)
    B, T, H, G, K, V = (int(torch.randint(1, high, (), generator=draw)) for high in (4, 200, 4, 4, 33, 33))
    call = random_call(B, T, H, H * G, K, V, dtype=torch.float32, N=B, strongest=0.5, seed=seed)
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": seed % 2 == 0}
    want_o, want_final = theirs(call["q"], call["k"], call["v"], g=call["g"], beta=call["beta"],
                                initial_state=call["initial_state"], **options)  # fmt: skip
    for run in FORMS.values():
        o, final = run(**call, **options)
        assert relative(o, want_o) < 1e-5
        assert relative(final, want_final) < 1e-5


@pytest.mark.parametrize("form", FORMS)
def test_a_default_device_elsewhere_changes_nothing(form: str) -> None:
    call = random_call(1, 200, N=4, grad=True)
    lengths = [3, 0, 150, 47]
    want = FORMS[form](**call, cu_seqlens=PackedSequences.from_lengths(lengths))[0]
    with torch.device("meta"):  # as torch.set_default_device("cuda") would beside a kernel's tensors
        got = FORMS[form](**call, cu_seqlens=PackedSequences.from_lengths(lengths))[0]
    assert torch.equal(got, want)


def test_compiled_code_runs_it_outside_of_its_graphs() -> None:
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    def model(call):
        return KERNEL(**{**call, "q": 2 * call["q"]})[0] + 1

    torch.compiler.reset()
    for T in (5, 70, 131, 17, 200):
        call = random_call(1, T, grad=True)
        o = torch.compile(model, backend=backend)(call)
        want = model(call)
        assert torch.equal(o, want)
        gradients = [torch.autograd.grad(x.square().sum(), list(call.values())) for x in (o, want)]
        assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    operators = " ".join(str(node.target) for graph in graphs for node in graph.graph.nodes)
    assert not re.search("bmm|solve|cumsum|exp", operators), operators
    assert len(graphs) < 7  # a few for one length and for any other, not two a length
    torch.compiler.reset()
    with pytest.raises(Exception, match="a kernel that does not declare compile_safe"):
        torch.compile(model, backend=backend, fullgraph=True)(call)


# ---- machines --------------------------------------------------------------------------------------------------------


def test_a_cuda_device_without_a_gpu_is_refused_at_start_up() -> None:
    kernel = TorchKernel(hardware=lambda device: Hardware(device_type=device.type))
    assert [refusal.code for refusal in kernel.unavailable("cuda")] == ["device"]
    assert kernel.unavailable("cpu") == ()
    with pytest.raises(UnsupportedCall, match="needs a GPU"):
        kernel.require("cuda")
    with pytest.raises(UnsupportedCall, match="needs a GPU"):
        AutoKernel([kernel]).require("cuda")
