"""TritonKernel's launches against float64 in the interpreter: the conformance suite on what is short enough, and its edges."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.autograd import forward_ad

from qwenlinear import AutoKernel, PackedSequences, TorchKernel, TritonKernel, UnsupportedCall
from qwenlinear.kernels import _step_triton
from qwenlinear.kernels.triton_kernel import gated_delta_step, gated_delta_step_in_place
from qwenlinear.testing import check_kernel
from qwenlinear.testing.generate import generate
from tests.kernels.reference import random_call, relative


class InterpretedTritonKernel(TritonKernel):
    """TritonKernel that may be called with CPU tensors; the interpreter cuts bfloat16 off where a GPU rounds it."""

    capabilities = replace(TritonKernel.capabilities, devices=None)


def few_tokens(case):
    return (sum(case.lengths) if case.lengths is not None else case.B * case.T) <= 12


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_conformance_suite_on_few_tokens(dtype):
    kernel = InterpretedTritonKernel()
    cases = [case for case in generate(kernel, "cpu", packings=0) if case.dtype == dtype and few_tokens(case)]
    assert check_kernel(kernel, cases=cases).counts["passed"] == len(cases) > 12
    assert "in_place" in {case.check for case in cases}


def test_the_conformance_suite_cut_short():
    """What the suite asks of some hundred tokens, asked of four: strides, gates, repetition, isolation."""
    kernel = InterpretedTritonKernel()
    longer = [case for case in generate(kernel, "cpu", packings=0) if case.dtype == "float32" and not few_tokens(case)]
    plain = [case for case in longer if case.lengths is None and not case.pieces]
    cases = [case.but(T=4) for case in plain if not case.topic.startswith(("length", "final state"))]
    assert check_kernel(kernel, cases=cases).counts["passed"] == len(cases) > 20
    assert {"isolation", "repeat", "values"} <= {case.check for case in cases}


@pytest.mark.parametrize("packed", [None, PackedSequences.from_lengths([2, 0, 3])])
@pytest.mark.parametrize("cut", [(16, 16, 1), (16, 32, 2), (32, 16, 1), (16, 64, 4)])
def test_any_cut_of_a_head_gives_the_same(cut, packed):
    call = random_call(1, 5, H=2, HV=4, K=13, V=40, dtype=torch.float32, N=1 if packed is None else 3)
    want, want_state = TorchKernel().step(
        **{name: x.double() for name, x in call.items()}, output_final_state=True, cu_seqlens=packed
    )
    state = call.pop("initial_state").clone()
    boundaries = None if packed is None else packed.cu_seqlens()
    o = _step_triton.launch(*call.values(), 13**-0.5, state, state, boundaries, False, cut)
    assert relative(o, want) < 1e-6
    assert relative(state, want_state) < 1e-6


def test_a_token_that_is_exactly_repeated_is_not_lost_to_cancellation():
    """o is put together from the state before the write and what is written; here the one nearly cancels the other."""
    k = torch.nn.functional.normalize(torch.randn(1, 1, 1, 16), dim=-1)
    state = 1e3 * torch.randn(1, 1, 16, 16)
    v, g, beta = torch.randn(1, 1, 1, 16), torch.zeros(1, 1, 1), torch.ones(1, 1, 1)
    o, _ = InterpretedTritonKernel().step(k, k, v, g, beta, 1.0, state)
    want, _ = TorchKernel().step(*(x.double() for x in (k, k, v, g, beta)), 1.0, state.double())
    plain, _ = TorchKernel().step(k, k, v, g, beta, 1.0, state)
    assert relative(o, want) < max(3 * relative(plain, want), 1e-6)


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "initial_state"])
@pytest.mark.parametrize("in_place", [False, True])
def test_forward_mode_is_refused_and_goes_to_a_kernel_that_has_it(name, in_place):
    """An operator of torch.library hands on no tangent where nothing requires gradients, and says nothing."""
    call = random_call(1, 3, H=1, HV=2, K=8, V=8, dtype=torch.float32, N=1)
    tangent, kept = torch.randn_like(call[name]), call["initial_state"].clone()

    def differentiated(kernel):
        with forward_ad.dual_level():
            given = {key: x.clone() for key, x in call.items()}
            given[name] = forward_ad.make_dual(call[name].clone(), tangent.clone())
            state = given["initial_state"]
            try:
                o, _ = kernel.step(**given, output_final_state=True, state_in_place=in_place)
            except UnsupportedCall:
                assert torch.equal(forward_ad.unpack_dual(state).primal, kept)
                raise
            return forward_ad.unpack_dual(o).tangent

    with pytest.raises(UnsupportedCall, match=r"\[forward_mode\] needs tensors without tangents"):
        differentiated(InterpretedTritonKernel())
    got = differentiated(AutoKernel([InterpretedTritonKernel(), TorchKernel()]))
    assert torch.equal(got, differentiated(TorchKernel()))
    assert got.abs().max() > 0


def test_the_operators_are_well_formed():
    call = random_call(2, 3, H=1, HV=2, K=8, V=8, dtype=torch.float32, N=2)
    state = call.pop("initial_state")
    arguments = (*call.values(), 0.5)
    torch.library.opcheck(gated_delta_step, (*arguments, state, None, True, 2))
    torch.library.opcheck(gated_delta_step, (*arguments, None, None, False, 0))
    torch.library.opcheck(gated_delta_step_in_place, (*arguments, state, None, True))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_step_in_place_is_captured_whole(mode):
    torch._dynamo.reset()
    kernel = InterpretedTritonKernel()  # asked for the first time while it is captured
    call = random_call(1, 1, H=1, HV=2, K=8, V=8, dtype=torch.float32, N=1)

    def step(call):
        return kernel.step(**call, output_final_state=True, use_qk_l2norm_in_kernel=True, state_in_place=True)

    with mode():
        call = {name: x.clone() for name, x in call.items()}
        again = {name: x.clone() for name, x in call.items()}
        o, final = torch.compile(step, fullgraph=True, backend="aot_eager")(call)
        want, want_final = step(again)
    assert final is call["initial_state"]
    assert torch.equal(o, want)
    assert torch.equal(final, want_final)


def test_autograd_sees_that_a_state_was_overwritten():
    call = random_call(1, 1, H=1, HV=1, K=8, V=8, dtype=torch.float32, N=1)
    weight = torch.ones(8, requires_grad=True)
    kept = (call["initial_state"] * weight).sum()  # its backward pass needs the state as it was
    with torch.no_grad():
        InterpretedTritonKernel().step(**call, output_final_state=True, state_in_place=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.backward()
