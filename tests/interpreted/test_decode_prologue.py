"""The one-token prologue's Triton form against float64: values, the state in place, and rows read where they lie."""

from __future__ import annotations

import pytest
import torch

from qwenlinear.ops import _decode_triton
from qwenlinear.ops.decode import decode_prologue_op, decode_prologue_twin
from tests.kernels.reference import relative
from tests.ops.decode_cases import one_token

ROUNDING = {torch.float32: 1e-6, torch.float16: 5e-4}


@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
@pytest.mark.parametrize("W", [1, 2, 3, 4])
@pytest.mark.parametrize("grouped", [False, True])
def test_against_float64(dtype, W, grouped):
    call = one_token(dtype, W=W, grouped=grouped)
    exact = {name: x.double() for name, x in call.items()}  # its own state, updated by the twin
    memory = torch.full((3, *call["conv_state"].shape[1:-1], W + 3), 7.25, dtype=dtype)
    state = memory[..., 2 : W + 1].copy_(call["conv_state"])
    got = decode_prologue_op(**{**call, "conv_state": state}, l2norm=True)
    want = decode_prologue_twin(**exact, l2norm=True)
    for name, x, right in zip(("q", "k", "v", "g", "beta"), got, want, strict=True):
        assert x.is_contiguous(), name
        assert x.dtype == (torch.float32 if name == "g" else dtype), name
        assert relative(x, right) < (1e-6 if name == "g" else ROUNDING[dtype]), name
    assert torch.equal(state.double(), exact["conv_state"])
    assert (memory[..., :2] == 7.25).all()
    assert (memory[..., W + 1 :] == 7.25).all()


def test_small_tensors_may_be_strided():
    call = one_token(torch.float32)
    exact = {name: x.double() for name, x in call.items()}
    for name in ("weight", "A_log", "dt_bias"):
        call[name] = torch.stack([call[name], torch.full_like(call[name], 9.0)], -1)[..., 0]
        assert not call[name].is_contiguous()
    got, want = decode_prologue_op(**call, l2norm=True), decode_prologue_twin(**exact, l2norm=True)
    assert max(relative(x, right) for x, right in zip(got, want, strict=True)) < 1e-6


def test_without_normalisation():
    call = one_token(torch.float32)
    exact = {name: x.double() for name, x in call.items()}
    got, want = decode_prologue_op(**call, l2norm=False), decode_prologue_twin(**exact, l2norm=False)
    assert max(relative(x, right) for x, right in zip(got, want, strict=True)) < 1e-6


@pytest.mark.parametrize("a", [-200.0, -60.0, -39.0, -20.0, -10.0, -3.0, -0.5, 0.0, 1.0, 10.0, 50.0, 300.0])
@pytest.mark.parametrize("A_log", [-100.0, -4.6, 2.77, 9.0, 100.0])
def test_the_gate_everywhere(a, A_log):
    call = one_token(torch.float32)
    call |= {"a": torch.full_like(call["a"], a), "A_log": torch.full_like(call["A_log"], A_log)}
    exact = {name: x.double() for name, x in call.items()}
    g, want = decode_prologue_op(**call, l2norm=True)[3], decode_prologue_twin(**exact, l2norm=True)[3]
    smallest = torch.finfo(torch.float32).tiny
    torch.testing.assert_close(g.double(), want, rtol=2e-5, atol=smallest)  # exp of |log g| <= 200 in float32


@pytest.mark.parametrize("broken", ["a", "A_log", "dt_bias"])
def test_not_a_number_in_the_gate_is_not_hidden(broken):
    call = one_token(torch.float32)
    call[broken] = call[broken].clone()
    call[broken].flatten()[0] = float("nan")
    twin = {name: x.clone() for name, x in call.items()}
    g, want = decode_prologue_op(**call, l2norm=True)[3], decode_prologue_twin(**twin, l2norm=True)[3]
    assert g.isnan().any()
    assert torch.equal(g.isnan(), want.isnan())


def test_no_sequence():
    call = one_token(torch.float32, B=0)
    assert [x.shape[0] for x in decode_prologue_op(**call, l2norm=True)] == [0] * 5


def test_the_operator_is_well_formed():
    call = one_token(torch.float32)
    torch.library.opcheck(decode_prologue_op, (*call.values(), True))


def test_it_is_captured_whole_with_its_state():
    call, again = one_token(torch.float32), one_token(torch.float32)
    whole = torch.compile(lambda call: decode_prologue_op(**call, l2norm=True), fullgraph=True, backend="aot_eager")
    for x, y in zip(whole(call), decode_prologue_op(**again, l2norm=True), strict=True):
        assert torch.equal(x, y)
    assert torch.equal(call["conv_state"], again["conv_state"])


def test_rows_are_not_copied(monkeypatch):
    handed = []
    monkeypatch.setattr(_decode_triton, "decode_prologue_kernel", _Spy(handed))
    call = one_token(torch.float32, grouped=True)
    _decode_triton.launch(*call.values(), True)
    assert [x.data_ptr() for x in handed[:6]] == [
        call[name].data_ptr() for name in ("q", "k", "v", "b", "a", "conv_state")
    ]


class _Spy:
    def __init__(self, handed):
        self.handed = handed

    def __getitem__(self, grid):
        return lambda *args, **options: self.handed.extend(args)
