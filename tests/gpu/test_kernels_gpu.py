"""FLAKernel, FlashQLAKernel and AutoKernel on a GPU, against TorchKernel in float64. Run with -rP to see the errors.

Head configurations are few, because each one costs a compilation: 30 to 150 s for FlashQLA where its cache is cold.
"""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
import torch

from qwenlinear import AutoKernel, FLAKernel, FlashQLAKernel, PackedSequences, TorchKernel, TritonKernel
from tests.kernels.reference import random_call, relative

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
HEADS = {"H": 16, "HV": 32, "K": 128, "V": 128}
LENGTHS = [0, 1, 64, 0, 2, 63, 65, 0, 125]
KERNELS = [
    pytest.param(FLAKernel(), torch.bfloat16, id="fla-bfloat16"),
    pytest.param(FLAKernel(), torch.float16, id="fla-float16"),
    pytest.param(FLAKernel(), torch.float32, id="fla-float32"),
    pytest.param(FlashQLAKernel(), torch.bfloat16, id="flashqla-bfloat16"),
    pytest.param(FlashQLAKernel(), torch.float16, id="flashqla-float16"),
]
BFLOAT16 = [KERNELS[0], KERNELS[3]]


def draw(dtype=torch.bfloat16, *, grad=False, **shape):
    tensors = random_call(**{**HEADS, **shape}, dtype=dtype)
    return {name: tensor.to(DEVICE).requires_grad_(grad) for name, tensor in tensors.items()}


def skip_where_refused(kernel, call, form="chunk", packed=None):
    if refusals := kernel.refusals(**call, cu_seqlens=packed, form=form):
        pytest.skip("; ".join(map(str, refusals)))


def with_gradients(run, call, **options):
    """{"o", "state", "dq", ...}: the answer and the gradients of every input, from fixed random cotangents."""
    o, state = run(**call, **options, output_final_state=True)
    draw = torch.Generator(DEVICE).manual_seed(1)
    answer = {"o": o, "state": state}
    wanted = {name: tensor for name, tensor in call.items() if tensor.requires_grad}
    if wanted:
        cotangents = [torch.randn(x.shape, generator=draw, device=DEVICE, dtype=torch.float64) for x in (o, state)]
        gradients = torch.autograd.grad(
            [o, state], list(wanted.values()), [c.to(x.dtype) for c, x in zip(cotangents, (o, state), strict=True)]
        )
        answer |= {f"d{name}": gradient for name, gradient in zip(wanted, gradients, strict=True)}
    return answer


def doubled(call):
    return {name: tensor.detach().double().requires_grad_(tensor.requires_grad) for name, tensor in call.items()}


def beyond_tolerance(kernel, call, form="chunk", label="", **options):
    """What is further from TorchKernel in float64 than the kernel promises; prints every error."""
    run, exact = (kernel, TorchKernel()) if form == "chunk" else (kernel.step, TorchKernel().step)
    answer, reference = with_gradients(run, call, **options), with_gradients(exact, doubled(call), **options)
    promised = kernel.tolerances[call["q"].dtype]
    limits = {"o": promised.output, "state": promised.state}
    errors = {name: relative(answer[name], reference[name]) for name in reference}
    print(f"{kernel!r} {call['q'].dtype} {form} {label}: " + ", ".join(f"{n} {e:.1e}" for n, e in errors.items()))
    too_far = {name: error for name, error in errors.items() if not error <= limits.get(name, promised.gradient)}
    return {f"{label} {name}": error for name, error in too_far.items()}


# ---- values and gradients ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kernel", "dtype"), KERNELS)
def test_dense(kernel, dtype):
    skip_where_refused(kernel, draw(dtype, B=2, T=2, N=2, grad=True))
    failures = {}
    for T in (1, 2, 63, 64, 65, 320):
        failures |= beyond_tolerance(kernel, draw(dtype, B=2, T=T, N=2, grad=True), label=f"T={T}")
    assert failures == {}


@pytest.mark.parametrize(("kernel", "dtype"), KERNELS)
def test_packed_with_empty_documents(kernel, dtype):
    call = draw(dtype, T=sum(LENGTHS), N=len(LENGTHS), grad=True)
    packed = PackedSequences.from_lengths(LENGTHS, device=DEVICE)
    skip_where_refused(kernel, call, packed=packed)
    assert beyond_tolerance(kernel, call, label="packed", cu_seqlens=packed) == {}


@pytest.mark.parametrize(("kernel", "dtype"), BFLOAT16)
@pytest.mark.parametrize("strongest", [1e-3, 30.0])
def test_weak_and_strong_decay_normalised_in_the_call(kernel, dtype, strongest):
    call = draw(dtype, B=1, T=320, grad=True, strongest=strongest)
    skip_where_refused(kernel, call)
    label = f"decay {strongest}, no initial state"
    assert beyond_tolerance(kernel, call, label=label, use_qk_l2norm_in_kernel=True) == {}


def test_other_head_sizes_with_fla():
    call = draw(H=2, HV=6, K=96, V=80, B=1, T=130, N=1, grad=True)
    kernel = FLAKernel()
    skip_where_refused(kernel, call)
    assert beyond_tolerance(kernel, call, label="K=96 V=80") == {}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("in_place", [False, True])
def test_triton_steps(dtype, in_place):
    kernel, failures = TritonKernel(), {}
    skip_where_refused(kernel, draw(dtype, T=1), "step")
    packed = PackedSequences.from_lengths([0, 1, 3, 0, 1], device=DEVICE)
    cases = [(draw(dtype, B=B, T=T, N=B), None) for B, T in ((1, 1), (64, 1), (2, 5))]
    cases += [(draw(dtype, T=5, N=5), packed), (draw(dtype, B=2, T=3, H=2, HV=6, K=96, V=80, N=2), None)]
    with torch.no_grad():
        for call, boundaries in cases:
            options = {"use_qk_l2norm_in_kernel": True, "cu_seqlens": boundaries, "output_final_state": True}
            exact = dict(zip(("o", "state"), TorchKernel().step(**doubled(call), **options), strict=True))
            kept = call["initial_state"].clone()
            o, state = kernel.step(**call, **options, state_in_place=in_place)
            assert (state is call["initial_state"]) is in_place
            assert in_place or torch.equal(call["initial_state"], kept)
            promised = kernel.tolerances[dtype]
            for name, x, limit in (("o", o, promised.output), ("state", state, promised.state)):
                if not relative(x, exact[name]) <= limit:
                    failures[f"{list(call['v'].shape)} {name}"] = relative(x, exact[name])
    assert failures == {}


def test_triton_steps_at_batch_256_in_a_cuda_graph():
    kernel, call = TritonKernel(), draw(B=256, T=1, N=256)
    skip_where_refused(kernel, call, "step")
    state, other = call["initial_state"], call["initial_state"].clone()

    def step(state):
        return kernel.step(**{**call, "initial_state": state}, output_final_state=True, state_in_place=True)

    with torch.no_grad():
        step(state.clone())
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            o, final = step(state)
        assert final is state
        for _ in range(3):
            graph.replay()
            want, _ = step(other)
            assert torch.equal(o, want)
            assert torch.equal(state, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_fla_steps(dtype):
    kernel, failures = FLAKernel(), {}
    skip_where_refused(kernel, draw(dtype, T=1), "step")
    packed = PackedSequences.from_lengths([0, 1, 3, 0, 1], device=DEVICE)
    with torch.no_grad():
        for T in (1, 5):
            call = draw(dtype, B=2, T=T, N=2)
            failures |= beyond_tolerance(kernel, call, "step", f"T={T}", use_qk_l2norm_in_kernel=True)
        failures |= beyond_tolerance(kernel, draw(dtype, T=5, N=5), "step", "packed", cu_seqlens=packed)
    assert failures == {}


@pytest.mark.parametrize(("kernel", "dtype"), BFLOAT16)
def test_empty_segments_keep_their_state(kernel, dtype):  # case 3
    packed = PackedSequences.from_lengths([0, 5, 0, 4], device=DEVICE)
    call = draw(dtype, T=9, N=4, grad=True)
    skip_where_refused(kernel, call, packed=packed)
    assert beyond_tolerance(kernel, call, label="[0,0,5,5,9]", cu_seqlens=packed) == {}
    _, state = kernel(**call, output_final_state=True, cu_seqlens=packed)
    assert torch.equal(state[[0, 2]], call["initial_state"][[0, 2]])
    (gradient,) = torch.autograd.grad(state[0].sum(), call["initial_state"])
    assert torch.equal(gradient[0], torch.ones_like(gradient[0]))
    assert gradient[1:].abs().max() == 0


@pytest.mark.parametrize(("kernel", "dtype"), BFLOAT16)
def test_slices_of_one_projection_give_what_copies_give(kernel, dtype):
    call = draw(dtype, B=2, T=65)
    skip_where_refused(kernel, call)
    together = torch.cat([call["q"].flatten(2), call["k"].flatten(2), call["v"].flatten(2)], -1).requires_grad_()
    q, k, v = together.split([16 * 128, 16 * 128, 32 * 128], -1)
    strided = {
        **call,
        "q": q.unflatten(-1, (16, 128)),
        "k": k.unflatten(-1, (16, 128)),
        "v": v.unflatten(-1, (32, 128)),
    }
    assert not strided["q"].is_contiguous()
    o, _ = kernel(**strided)
    assert torch.equal(o, kernel(**{name: tensor.contiguous() for name, tensor in strided.items()})[0])
    o.float().square().sum().backward()
    assert together.grad.isfinite().all()
    if isinstance(kernel, FlashQLAKernel):
        assert [r.code for r in FlashQLAKernel("refuse").refusals(**strided)] == ["contiguity"]


@pytest.mark.parametrize(("kernel", "dtype"), BFLOAT16)
def test_inputs_are_not_written_to(kernel, dtype):
    call = draw(dtype, T=70, N=1, grad=True)
    skip_where_refused(kernel, call)
    before = {name: tensor.detach().clone() for name, tensor in call.items()}
    with_gradients(kernel, call)
    assert all(torch.equal(call[name], before[name]) for name in call)


@pytest.mark.parametrize(("kernel", "dtype"), BFLOAT16)
def test_autocast_changes_neither_dtypes_nor_more_than_a_rounding(kernel, dtype):
    call = draw(dtype, T=70, N=1, grad=True)
    skip_where_refused(kernel, call)
    plain = with_gradients(kernel, call)
    with torch.autocast("cuda", torch.float16):
        cast = with_gradients(kernel, call)
    assert {n: x.dtype for n, x in cast.items()} == {n: x.dtype for n, x in plain.items()}
    assert {n: e for n in plain if (e := relative(cast[n], plain[n])) > 4e-3} == {}


# ---- boundaries, synchronisation, graphs -------------------------------------------------------------------------------


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize(("kernel", "dtype"), BFLOAT16)
def test_a_rewritten_tensor_gives_its_values_at_call_time(kernel, dtype, inference):  # case 11
    call = draw(dtype, T=100)
    skip_where_refused(kernel, call)
    cu_seqlens = torch.tensor([0, 40, 100], device=DEVICE, dtype=torch.int32)
    runs = [kernel] if isinstance(kernel, FlashQLAKernel) else [kernel, kernel.step]
    with torch.inference_mode(inference):
        for run in runs:
            for bounds in ([0, 40, 100], [0, 70, 100], [0, 0, 100]):
                cu_seqlens.copy_(torch.tensor(bounds))
                o, state = run(**call, output_final_state=True, cu_seqlens=cu_seqlens)
                fresh = PackedSequences.from_cu_seqlens(bounds)
                expected, expected_state = run(**call, output_final_state=True, cu_seqlens=fresh)
                exact, _ = TorchKernel()(**doubled(call), cu_seqlens=fresh)
                assert torch.equal(o, expected)
                assert torch.equal(state, expected_state)
                assert relative(o, exact) <= kernel.tolerances[dtype].output


@pytest.mark.parametrize(("kernel", "dtype"), BFLOAT16)
def test_a_batch_seen_in_inference_mode_trains_later(kernel, dtype):
    call = draw(dtype, T=sum(LENGTHS), N=len(LENGTHS), grad=True)
    packed = PackedSequences.from_lengths(LENGTHS)
    skip_where_refused(kernel, call, packed=packed)
    with torch.inference_mode():
        kernel(**call, cu_seqlens=packed)
    first = with_gradients(kernel, call, cu_seqlens=packed)
    fresh = with_gradients(kernel, call, cu_seqlens=PackedSequences.from_lengths(LENGTHS))
    assert {name for name in first if not torch.equal(first[name], fresh[name])} == set()


@pytest.mark.parametrize(("kernel", "dtype"), BFLOAT16)
@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["dense", "packed"])
def test_nothing_synchronises_once_a_batch_is_known(kernel, dtype, lengths):
    call = draw(dtype, T=320, N=1 if lengths is None else len(lengths), grad=True)
    packed = None if lengths is None else PackedSequences.from_lengths(lengths, device=DEVICE)
    skip_where_refused(kernel, call, packed=packed)
    cotangent = torch.ones_like(call["v"])

    def train():
        o, state = kernel(**call, output_final_state=True, cu_seqlens=packed)
        torch.autograd.grad([o, state], list(call.values()), [cotangent, torch.zeros_like(state)])

    def decode():
        with torch.no_grad():
            kernel.step(**call, output_final_state=True, cu_seqlens=packed)

    passes = [train] if isinstance(kernel, FlashQLAKernel) else [train, decode]
    for run in passes * 2:
        run()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for run in passes:
            run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["dense", "packed"])
@pytest.mark.parametrize(
    ("kernel", "form"),
    [(FLAKernel(), "chunk"), (FLAKernel(), "step"), (FlashQLAKernel(), "chunk"), (AutoKernel(), "chunk")],
    ids=["fla-chunk", "fla-step", "flashqla-chunk", "auto-chunk"],
)
@torch.no_grad()
def test_a_forward_pass_in_a_cuda_graph(kernel, form, lengths):
    shape = {"T": sum(LENGTHS), "N": 1 if lengths is None else len(lengths)}
    call, other = draw(**shape), draw(**shape, seed=5)
    packed = None if lengths is None else PackedSequences.from_lengths(lengths, device=DEVICE)
    skip_where_refused(kernel, call, form, packed)
    run = kernel if form == "chunk" else kernel.step
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run(**call, output_final_state=True, cu_seqlens=packed)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        answer = run(**call, output_final_state=True, cu_seqlens=packed)
    for inputs in (call, other):
        for name, tensor in inputs.items():
            call[name].copy_(tensor)
        graph.replay()
        expected = run(**call, output_final_state=True, cu_seqlens=packed)
        assert torch.equal(answer[0], expected[0])
        assert torch.equal(answer[1], expected[1])


# ---- who runs ----------------------------------------------------------------------------------------------------------


def test_fla_runs_its_own_kernel_although_flash_qla_is_installed(monkeypatch):
    call = draw(T=70)
    skip_where_refused(FlashQLAKernel(), call)
    skip_where_refused(FLAKernel(), call)
    flash_qla = importlib.import_module("flash_qla")

    def reached(*args, **kwargs):
        raise AssertionError("flash_qla ran")

    monkeypatch.setattr(flash_qla, "chunk_gated_delta_rule", reached)
    FLAKernel()(**call)
    dispatched = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    with pytest.raises(AssertionError, match="flash_qla ran"):  # the hand-over that is bypassed does exist
        dispatched(**call)


def test_auto_gives_chunks_to_flashqla_and_steps_to_fla(mocker):
    call = draw(T=3, N=1)
    skip_where_refused(FlashQLAKernel(), call)
    skip_where_refused(FLAKernel(), call, "step")
    chunk, step = mocker.spy(FlashQLAKernel, "_chunk"), mocker.spy(FLAKernel, "_step")
    other = mocker.spy(FLAKernel, "_chunk")
    kernel = AutoKernel()
    kernel(**call)
    kernel.step(**call)
    assert (chunk.call_count, step.call_count, other.call_count) == (1, 1, 0)
    wide = draw(torch.float32, T=3)
    kernel(**wide)
    assert other.call_count == 1
    text = kernel.explain(**call)
    assert "chunk: goes to FlashQLAKernel(contiguity='copy')" in text
    assert "step: goes to FLAKernel()" in text


def test_a_machine_that_lacks_the_backward_refuses_training_before_the_forward():  # case 15, on the real device
    probed = FLAKernel()._hardware(torch.device(DEVICE))
    if probed.capability is None or probed.capability[0] != 9:
        pytest.skip("needs a Hopper GPU")
    bare = replace(probed, packages={"fla-core": "0.6.0", "triton": "3.6.0"})
    kernel = FLAKernel(hardware=lambda device: bare)
    assert [r.code for r in kernel.refusals(**draw(T=3, grad=True))] == ["fla_backward"]
    assert kernel.refusals(**draw(T=3)) == ()
