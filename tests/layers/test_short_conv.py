"""ShortConvolution against one document at a time, written as a loop over taps in float64."""

from __future__ import annotations

import itertools
import sys

import pytest
import torch
import torch.nn.functional as F

from qwenlinear.kernels import PackedSequences
from qwenlinear.layers import ShortConvolution
from qwenlinear.ops.activations import ACTIVATIONS


def reference(x, weight, activation, state):
    """One sequence ``[T, C]`` behind its state ``[C, W-1]``: the output and the new state."""
    C, _, W = weight.shape
    history = torch.cat([state.t() if state is not None else x.new_zeros(W - 1, C), x])
    rows = [sum(history[t + i] * weight[:, 0, i] for i in range(W)) for t in range(len(x))]
    y = torch.stack(rows) if rows else x * 1
    return (ACTIVATIONS[activation](y) if activation else y), history[len(history) - (W - 1) :].t()


def make(C=6, W=4, activation="silu"):
    return ShortConvolution(C, W, activation).double()


LENGTHS = [[3, 5], [1, 2, 6], [5], [0, 5, 0, 4], [1, 1, 1, 1], [0, 0, 3], [2, 0], [0, 0], [1] * 7 + [4]]


@pytest.mark.parametrize("W", [1, 2, 4, 5])
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_packed_documents_are_isolated(lengths, warm, activation, W) -> None:
    conv = make(W=W, activation=activation)
    packed = PackedSequences.from_lengths(lengths)
    T, N = packed.total_tokens, len(lengths)
    x = torch.randn(1, T, 6, dtype=torch.float64, requires_grad=True)
    state = torch.randn(N, 6, W - 1, dtype=torch.float64, requires_grad=True) if warm else None
    y, final = conv(x, state, True, packed)
    pieces = [
        reference(document, conv.weight, activation, None if state is None else state[n])
        for n, document in enumerate(x[0].split(lengths))
    ]
    want, want_final = torch.cat([p[0] for p in pieces])[None], torch.stack([p[1] for p in pieces])
    torch.testing.assert_close(y, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(final, want_final, rtol=0, atol=0)
    assert final.is_contiguous()
    leaves = [x, conv.weight] + ([state] if warm else [])
    dy, dfinal = torch.randn_like(y), torch.randn_like(final)
    got_grads = torch.autograd.grad((y * dy).sum() + (final * dfinal).sum(), leaves, allow_unused=True)
    want_grads = torch.autograd.grad((want * dy).sum() + (want_final * dfinal).sum(), leaves, allow_unused=True)
    for got, ref, leaf in zip(got_grads, want_grads, leaves, strict=True):
        zero = torch.zeros_like(leaf)
        torch.testing.assert_close(zero if got is None else got, zero if ref is None else ref, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("B", [0, 1, 3])
@pytest.mark.parametrize("T", [0, 1, 2, 3, 9])
def test_dense_rows(T, B, warm) -> None:
    conv = make()
    x = torch.randn(B, T, 6, dtype=torch.float64)
    state = torch.randn(B, 6, 3, dtype=torch.float64) if warm else None
    y, final = conv(x, state, True)
    assert y.shape == x.shape
    assert final.shape == (B, 6, 3)
    for b in range(B):
        want, want_final = reference(x[b], conv.weight, "silu", None if state is None else state[b])
        torch.testing.assert_close(y[b], want, rtol=1e-12, atol=1e-12)
        assert torch.equal(final[b], want_final)
    assert conv(x, state)[1] is None


def test_equals_transformers_function() -> None:
    modeling = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    conv = ShortConvolution(6, 4)
    x = torch.randn(2, 9, 6)
    with torch.no_grad():
        want = F.silu(F.conv1d(x.transpose(1, 2), conv.weight, padding=3, groups=6)[..., :9]).transpose(1, 2)
        torch.testing.assert_close(conv(x)[0], want, rtol=1e-6, atol=1e-6)
    assert modeling.Qwen3_5GatedDeltaNet is not None


@pytest.mark.parametrize("activation", [None, "silu"])
def test_no_tap_crosses_a_boundary(activation, monkeypatch) -> None:
    """cases.md 2: [0, 3, 8] with the optional packages unimportable; positions 3, 4 and 5 see nothing of document one."""
    conv = ShortConvolution(6, 4, activation)
    x = torch.randn(1, 8, 6)
    packed = PackedSequences.from_cu_seqlens(torch.tensor([0, 3, 8]))
    before, _ = conv(x, cu_seqlens=packed)
    for name in ("fla", "fla.modules", "causal_conv1d", "triton", "flash_qla"):
        monkeypatch.setitem(sys.modules, name, None)
    answer = conv(x, cu_seqlens=packed)
    assert isinstance(answer, tuple)
    assert answer[0].dtype == x.dtype
    assert torch.equal(answer[0], before)
    alone, _ = conv(x[:, 3:])
    torch.testing.assert_close(answer[0][:, 3:], alone, rtol=1e-6, atol=1e-7)
    poisoned = x.clone()
    poisoned[:, :3] = float("nan")
    assert torch.equal(conv(poisoned, cu_seqlens=packed)[0][:, 3:6], answer[0][:, 3:6])
    assert not conv(poisoned)[0][:, 3:6].isfinite().any()


def test_a_gradient_stays_in_its_document() -> None:
    conv = make()
    x = torch.randn(1, 8, 6, dtype=torch.float64, requires_grad=True)
    y, _ = conv(x, cu_seqlens=PackedSequences.from_lengths([3, 5]))
    (grad,) = torch.autograd.grad(y[:, 3:].square().sum(), x)
    assert (grad[:, :3] == 0).all()
    assert (grad[:, 3:] != 0).all()


@pytest.mark.parametrize(
    "cuts", list(itertools.chain.from_iterable(itertools.combinations(range(1, 5), n) for n in range(5)))
)
def test_pieces_shorter_than_the_width(cuts) -> None:
    """cases.md 5: pieces such as 1, 1, 2, 1 from cold give the one-pass output and state, and gradients to both."""
    conv = make()
    x = torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True)
    want, want_state = conv(x, None, True)
    state, outputs = None, []
    for piece in torch.tensor_split(x, list(cuts), 1):
        y, state = conv(piece, state, True)
        outputs.append(y)
    got = torch.cat(outputs, 1)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert torch.equal(state, want_state)
    dy, dstate = torch.randn_like(want), torch.randn_like(state)
    for a, b in zip(
        torch.autograd.grad((got, state), (x, conv.weight), (dy, dstate)),
        torch.autograd.grad((want, want_state), (x, conv.weight), (dy, dstate)),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_state_counts_real_tokens_only() -> None:
    conv = make()
    x = torch.randn(4, 6, 6, dtype=torch.float64, requires_grad=True)
    state = torch.randn(4, 6, 3, dtype=torch.float64, requires_grad=True)
    lengths = [6, 2, 0, 1]
    _, final = conv(x, state, True, lengths=torch.tensor(lengths))
    for b, length in enumerate(lengths):
        assert torch.equal(final[b], reference(x[b, :length], conv.weight, None, state[b])[1])
    dx, dstate = torch.autograd.grad(final.sum(), (x, state))
    assert dx.sum((1, 2)).tolist() == [18, 12, 0, 6]
    assert dstate.sum((1, 2)).tolist() == [0, 6, 18, 12]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_rounds_once(dtype) -> None:
    conv = ShortConvolution(64, 4).to(dtype)
    x = torch.randn(2, 50, 64, dtype=dtype)
    y, final = conv(x, None, True)
    assert y.dtype == final.dtype == dtype
    want, _ = conv.double()(x.double())
    assert ((y.double() - want).norm() / want.norm()) < torch.finfo(dtype).eps / 2
    assert torch.equal(final, x[:, -3:].transpose(1, 2))


def test_final_state_does_not_hold_the_sequence() -> None:
    _, final = make()(torch.randn(1, 500, 6, dtype=torch.float64), None, True)
    assert final.untyped_storage().nbytes() == final.numel() * final.element_size()


def test_bad_arguments() -> None:
    conv = make()
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"x needs shape \[B, T, 6\], got \[2, 5, 7\]"):
        conv(torch.randn(2, 5, 7))
    with pytest.raises(ValueError, match=r"initial_state needs shape \[2, 6, 3\]"):
        conv(x, torch.randn(2, 6, 4))
    with pytest.raises(ValueError, match="cu_seqlens needs a batch of one"):
        conv(x, cu_seqlens=PackedSequences.from_lengths([5]))
    with pytest.raises(ValueError, match="activation needs None or one of silu"):
        ShortConvolution(6, 4, "mish")


def test_names_and_repr() -> None:
    conv = ShortConvolution(6, 4)
    assert {name: tuple(p.shape) for name, p in conv.named_parameters()} == {"weight": (6, 1, 4)}
    assert repr(conv) == "ShortConvolution(6, width=4, activation=silu)"


def test_bad_arguments_are_named() -> None:
    for sizes, words in (((0, 4), "channels needs"), ((8, 0), "width needs a whole number >= 1, got 0")):
        with pytest.raises(ValueError, match=words):
            ShortConvolution(*sizes)
    conv, x = ShortConvolution(8, 4), torch.randn(2, 5, 8)
    with pytest.raises(ValueError, match="cu_seqlens needs a PackedSequences, got Tensor; from_cu_seqlens makes one"):
        conv(x[:1], cu_seqlens=torch.tensor([0, 5]))
    for lengths in (torch.tensor([1, 2, 3]), torch.tensor([1.0, 2.0])):
        with pytest.raises(ValueError, match=r"lengths needs shape \[2\] and int64"):
            conv(x, lengths=lengths, output_final_state=True)
    for lengths, got in ((torch.tensor([1, x.shape[1] + 1]), x.shape[1] + 1), (torch.tensor([-3, 1]), -3)):
        with pytest.raises(ValueError, match=f"lengths needs numbers from 0 to T={x.shape[1]}, got {got}"):
            conv(x, lengths=lengths, output_final_state=True)
