"""`step(state_in_place=True)` with any kernel: what it needs, what a kernel gets to see, and how it is lowered."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from qwenlinear import AutoKernel, PackedSequences, TorchKernel
from tests.kernels.reference import random_call, relative


class OutOfPlace(TorchKernel):
    """TorchKernel without its own way of writing to the state."""

    capabilities = replace(TorchKernel.capabilities, state_in_place=False)


class InPlace(TorchKernel):
    """TorchKernel that keeps what it was asked."""

    def __init__(self, **declared):
        super().__init__()
        self.capabilities = replace(self.capabilities, **declared)
        self.asked = []

    def _step(self, inputs):
        self.asked.append(inputs.state_in_place)
        return super()._step(inputs)


class ValueFirst(InPlace):
    """Takes states as ``[N, HV, V, K]``."""

    capabilities = replace(InPlace.capabilities, state_layout="vk")

    def _step(self, inputs):
        assert not inputs.state_in_place
        self.asked.append(inputs.state_in_place)
        state = inputs.initial_state
        o, final = TorchKernel()._step(replace(inputs, initial_state=None if state is None else state.mT))
        return o, None if final is None else final.mT.contiguous()


def call(T=1, N=1, B=1, **more):
    return {**random_call(B, T, H=1, HV=2, K=8, V=4, dtype=torch.float32, N=N), "output_final_state": True, **more}


LOWERED = "the final state is copied into initial_state"


@pytest.mark.parametrize(
    ("kernel", "more", "copies"),
    [
        (TorchKernel(), {}, False),
        (TorchKernel(), {"strided": True}, False),
        (TorchKernel(), {"packed": [2, 1]}, False),
        (OutOfPlace(), {}, True),
        (InPlace(), {}, False),
        (InPlace(strided=False), {}, False),
        (InPlace(strided=False), {"strided": True}, True),
        (InPlace(), {"strided": True}, False),
        (ValueFirst(), {}, True),
        (InPlace(), {"packed": [2, 1]}, False),
        (InPlace(), {"packed": [2, 0, 1]}, True),  # states of empty documents are taken out before the kernel
        (InPlace(dense=False), {}, False),
        (AutoKernel([InPlace()]), {}, False),
        (AutoKernel([OutOfPlace()]), {}, True),
    ],
)
def test_the_state_is_overwritten_by_the_kernel_or_by_copying_and_explain_says_which(kernel, more, copies):
    lengths = more.get("packed")
    inputs = call(T=1 if lengths is None else sum(lengths), N=1 if lengths is None else len(lengths))
    inputs["cu_seqlens"] = None if lengths is None else PackedSequences.from_lengths(lengths)
    if more.get("strided"):
        inputs["initial_state"] = inputs["initial_state"].transpose(-1, -2).contiguous().transpose(-1, -2)
    o, final = TorchKernel().step(**inputs)
    handed = {name: x.clone() for name, x in inputs.items() if isinstance(x, torch.Tensor)}
    assert (LOWERED in kernel.explain(**inputs, state_in_place=True)) is copies
    assert LOWERED not in kernel.explain(**inputs)
    assert kernel.refusals(**inputs, form="step", state_in_place=True) == ()
    got, state = kernel.step(**inputs, state_in_place=True)
    assert state is inputs["initial_state"]
    assert relative(got, o) < 1e-6
    assert relative(state, final) < 1e-6
    for name in ("q", "k", "v", "g", "beta"):
        assert torch.equal(inputs[name], handed[name]), name
    if isinstance(kernel, InPlace):
        assert kernel.asked == [not copies]


def test_explain_names_it_in_the_call_and_only_for_the_recurrent_form():
    text = OutOfPlace().explain(**call(), state_in_place=True)
    assert "from a state, in place" in text.splitlines()[0]
    assert text.splitlines()[1:] == ["  chunk: runs", "  step: runs, lowered:", f"    - {LOWERED}"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"initial_state": None}, "initial_state to write to and output_final_state=True, got no initial_state"),
        ({"output_final_state": False}, "got output_final_state=False"),
        ({"v": torch.zeros(1, 1, 2, 4, requires_grad=True)}, "a call without gradients"),
        ({"initial_state": torch.zeros(1, 2, 8, 1).expand(1, 2, 8, 4)}, "an expanded one .*clone"),
        ({"state_in_place": 1}, "state_in_place needs True or False, got 1"),
    ],
)
@pytest.mark.parametrize(
    "ask", [lambda k: k.step, lambda k: lambda **x: k.refusals(**x, form="step"), lambda k: k.explain]
)
def test_what_it_needs(change, words, ask):
    kernel = InPlace()
    inputs = {**call(), "state_in_place": True, **change}
    with pytest.raises(ValueError, match=f"state_in_place needs .*{words}" if "True or" not in words else words):
        ask(kernel)(**inputs)
    assert kernel.asked == []


def test_a_state_of_inference_mode_is_not_overwritten_outside_of_it():
    with torch.inference_mode():
        state = torch.zeros(1, 2, 8, 4)
        TorchKernel().step(**{**call(), "initial_state": state}, state_in_place=True)
    kept = state.clone()
    with pytest.raises(ValueError, match="inference mode"):
        TorchKernel().step(**{**call(), "initial_state": state}, state_in_place=True)
    assert torch.equal(state, kept)


def test_the_chunked_form_never_writes_to_a_state():
    with pytest.raises(ValueError, match="state_in_place needs form='step'"):
        TorchKernel().refusals(**call(), state_in_place=True)
    with pytest.raises(TypeError, match="state_in_place"):
        TorchKernel()(**call(), state_in_place=True)


def test_a_state_that_requires_gradients_is_overwritten_where_none_are_recorded():
    inputs = call()
    inputs["initial_state"].requires_grad_()
    with torch.no_grad():
        want = TorchKernel().step(**inputs)[1]
        _, state = TorchKernel().step(**inputs, state_in_place=True)
    assert state is inputs["initial_state"]
    assert torch.equal(state, want)
    assert state.requires_grad
    assert state.is_leaf


@pytest.mark.parametrize("kernel", [OutOfPlace(), InPlace()])
@pytest.mark.parametrize("lengths", [None, [0, 0]])
def test_no_token_leaves_the_state(kernel, lengths):
    inputs = call(T=0, N=1 if lengths is None else 2)
    packed = None if lengths is None else PackedSequences.from_lengths(lengths)
    kept = inputs["initial_state"].clone()
    _, state = kernel.step(**inputs, cu_seqlens=packed, state_in_place=True)
    assert state is inputs["initial_state"]
    assert torch.equal(state, kept)


def test_a_kernel_that_hands_back_another_tensor_is_told_so():
    class Copies(TorchKernel):
        def _step(self, inputs):
            o, final = super()._step(inputs)
            return o, final.clone()

    with pytest.raises(TypeError, match="declares state_in_place and needs to return initial_state itself"):
        Copies().step(**call(), state_in_place=True)
    assert Copies().step(**call())[1].shape == (1, 2, 8, 4)
