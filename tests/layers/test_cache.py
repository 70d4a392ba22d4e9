"""A cached call goes on where the last one stopped, however the sequence is cut."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch

from qwenlinear.kernels import PackedSequences, TorchKernel
from qwenlinear.layers import GatedDeltaNetCache, GatedDeltaNetConfig, Qwen3_5GatedDeltaNet

CLOSE = {"rtol": 1e-9, "atol": 1e-11}


def rand(*shape: int, grad: bool = False) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=grad)


def same(a: GatedDeltaNetCache, b: GatedDeltaNetCache) -> bool:
    return torch.equal(a.conv_state, b.conv_state) and torch.equal(a.recurrent_state, b.recurrent_state)


def test_every_split_of_ten_tokens(make_layer) -> None:
    """cases.md 4. Every piece i..j goes on from the state after i and leaves the state after j: so does any split."""
    layer, x = make_layer(), rand(2, 10, 32)
    with torch.no_grad():
        want = layer(x)
        after = [GatedDeltaNetCache() for _ in range(11)]
        for i in range(11):
            torch.testing.assert_close(layer(x[:, :i], cache=after[i]), want[:, :i], **CLOSE)
        for i, j in itertools.combinations(range(11), 2):
            cache = after[i].copy()
            torch.testing.assert_close(layer(x[:, i:j], cache=cache), want[:, i:j], **CLOSE)
            torch.testing.assert_close(cache.recurrent_state, after[j].recurrent_state, **CLOSE)
            torch.testing.assert_close(cache.conv_state, after[j].conv_state, **CLOSE)


@pytest.mark.parametrize("pieces", [(6, 3, 1), (6, 4), (9, 1), (1, 1, 2, 1, 5), (1,) * 10])
def test_pieces_in_a_row(make_layer, pieces) -> None:
    layer, x = make_layer(), rand(2, 10, 32)
    whole, cache = GatedDeltaNetCache(), GatedDeltaNetCache()
    with torch.no_grad():
        want = layer(x, cache=whole)
        got = torch.cat([layer(piece, cache=cache) for piece in x.split(pieces, 1)], 1)
    torch.testing.assert_close(got, want, **CLOSE)
    torch.testing.assert_close(cache.recurrent_state, whole.recurrent_state, **CLOSE)
    torch.testing.assert_close(cache.conv_state, whole.conv_state, **CLOSE)


def test_gradients_pass_through_the_cache(make_layer) -> None:
    layer, x = make_layer(), rand(2, 10, 32, grad=True)
    weights = rand(2, 10, 32)
    want = torch.autograd.grad((layer(x) * weights).sum(), [x, *layer.parameters()])
    for cuts in ((6, 9), (1, 2, 4, 5)):
        cache = GatedDeltaNetCache()
        got = torch.cat([layer(piece, cache=cache) for piece in torch.tensor_split(x, cuts, 1)], 1)
        assert cache.recurrent_state.requires_grad
        for a, b in zip(torch.autograd.grad((got * weights).sum(), [x, *layer.parameters()]), want, strict=True):
            torch.testing.assert_close(a, b, **CLOSE)


def test_packed_then_packed_then_batch(make_layer) -> None:
    layer, x = make_layer(), rand(3, 9, 32)
    want = layer(x)
    cache = GatedDeltaNetCache()
    first = torch.cat([x[0, :2], x[1, :5], x[2, :0]])[None]
    got = layer(first, cu_seqlens=torch.tensor([0, 2, 7, 7]), cache=cache)
    torch.testing.assert_close(got, torch.cat([want[0, :2], want[1, :5]])[None], **CLOSE)
    second = torch.cat([x[0, 2:6], x[1, 5:6], x[2, :6]])[None]
    got = layer(second, cu_seqlens=PackedSequences.from_lengths([4, 1, 6]), cache=cache)
    torch.testing.assert_close(got, torch.cat([want[0, 2:6], want[1, 5:6], want[2, :6]])[None], **CLOSE)
    torch.testing.assert_close(layer(x[:, 6:8], cache=cache), want[:, 6:8], **CLOSE)
    with torch.no_grad():
        torch.testing.assert_close(layer(x[:, 8:], cache=cache), want[:, 8:], **CLOSE)
    whole = GatedDeltaNetCache()
    layer(x, cache=whole)
    torch.testing.assert_close(cache.recurrent_state, whole.recurrent_state, **CLOSE)
    torch.testing.assert_close(cache.conv_state, whole.conv_state, **CLOSE)


def test_states_have_the_promised_form(make_layer) -> None:
    layer, cache = make_layer(dtype=torch.bfloat16), GatedDeltaNetCache()
    layer(torch.randn(3, 2, 32, dtype=torch.bfloat16), cache=cache)
    assert cache.conv_state.shape == (3, 64, 3)
    assert cache.conv_state.dtype == torch.bfloat16
    assert (cache.conv_state[..., 0] == 0).all()  # before the first token
    assert cache.recurrent_state.shape == (3, 4, 8, 8)
    assert cache.recurrent_state.dtype == torch.float32
    assert cache.num_sequences == 3


def test_reorder(make_layer) -> None:
    layer, x = make_layer(), rand(3, 6, 32)
    cache = GatedDeltaNetCache()
    cache.reorder(torch.tensor([2, 0]))  # nothing there yet
    layer(x[:, :4], cache=cache)
    index = torch.tensor([2, 0, 0, 1])
    cache.reorder(index)
    assert cache.num_sequences == 4
    torch.testing.assert_close(layer(x[index, 4:], cache=cache), layer(x)[index, 4:], **CLOSE)
    before = cache.copy()
    for bad in (
        [0, 1],
        torch.tensor(0),
        torch.tensor([0.0]),
        torch.tensor([True, False, True, True]),
        torch.tensor([0j]),
    ):
        with pytest.raises(ValueError, match="index needs a one-dimensional int32 or int64 tensor"):
            cache.reorder(bad)
    with pytest.raises(ValueError, match="index needs rows from 0 to N-1=3, got 9"):
        cache.reorder(torch.tensor([9]))
    assert same(cache, before)


def test_copy_is_independent(make_layer) -> None:
    layer, x, cache = make_layer(), rand(2, 6, 32), GatedDeltaNetCache()
    assert cache.copy().conv_state is None
    layer(x[:, :4], cache=cache)
    branch = cache.copy()
    one = layer(x[:, 4:], cache=branch)
    assert not same(branch, cache)
    torch.testing.assert_close(layer(x[:, 4:], cache=cache), one, **CLOSE)
    cache.recurrent_state.detach().zero_()
    assert branch.recurrent_state.any()


def test_reset_starts_over(make_layer) -> None:
    layer, x, cache = make_layer(), rand(2, 4, 32), GatedDeltaNetCache()
    want = layer(x, cache=cache)
    assert repr(cache) == "GatedDeltaNetCache(N=2, conv_state=[2, 64, 3], recurrent_state=[2, 4, 8, 8])"
    cache.reset()
    assert (cache.conv_state, cache.recurrent_state, cache.num_sequences) == (None, None, None)
    assert repr(cache) == "GatedDeltaNetCache(empty)"
    assert torch.equal(layer(x, cache=cache), want)


def test_detach_cuts_the_graph(make_layer) -> None:
    layer, cache = make_layer(), GatedDeltaNetCache()
    cache.detach()
    layer(rand(1, 3, 32), cache=cache)
    cache.detach()
    assert not cache.recurrent_state.requires_grad
    assert not cache.conv_state.requires_grad
    layer(rand(1, 3, 32), cache=cache).sum().backward()


@pytest.mark.parametrize("T", [1, 3])
def test_a_call_with_gradients_leaves_earlier_states_alone(make_layer, T) -> None:
    layer, cache = make_layer(), GatedDeltaNetCache()
    layer(rand(2, 3, 32), cache=cache)
    conv, recurrent = cache.conv_state, cache.recurrent_state
    held = conv.clone(), recurrent.clone()
    layer(rand(2, T, 32), cache=cache)
    assert torch.equal(conv, held[0])
    assert torch.equal(recurrent, held[1])


def broken(cache: GatedDeltaNetCache, **states: torch.Tensor | None) -> GatedDeltaNetCache:
    other = cache.copy()
    for name, state in states.items():
        setattr(other, name, state)
    return other


def test_misfits_are_refused_and_change_nothing(make_layer) -> None:
    layer, cache, x = make_layer(), GatedDeltaNetCache(), rand(2, 3, 32)
    layer(x, cache=cache)
    conv, recurrent = cache.conv_state, cache.recurrent_state
    flat = x.flatten(0, 1)[None]
    for arguments, message in (
        ((rand(3, 1, 32), None, cache), "cache needs the sequences it holds, 2, got a call with 3"),
        ((flat, torch.tensor([0, 2, 3, 6]), cache), "cache needs the sequences it holds, 2, got a call with 3"),
        ((flat, torch.tensor([0, 6]), cache), "cache needs the sequences it holds, 2, got a call with 1"),
        ((x, None, broken(cache, conv_state=None)), "both its states or neither"),
        ((x, None, broken(cache, conv_state=conv[..., 1:])), r"cache.conv_state needs shape \[2, 64, 3\]"),
        ((x, None, broken(cache, recurrent_state=recurrent[:, :2])), "cache.recurrent_state needs shape"),
        ((x, None, broken(cache, recurrent_state=recurrent.float())), "cache.recurrent_state needs torch.float64"),
        ((x, None, broken(cache, conv_state=conv.to("meta"))), "cache.conv_state needs hidden_states' device cpu"),
        ((x, torch.tensor([0, 6]), cache), "cu_seqlens needs a batch of one"),
        ((x, None, cache, torch.tensor([[1, 0, 1], [1, 1, 1]])), "side by side"),
    ):
        with pytest.raises(ValueError, match=message):
            layer(*arguments)
        assert cache.conv_state is conv
        assert cache.recurrent_state is recurrent


def test_a_failing_kernel_changes_nothing(make_layer, failing_kernel) -> None:
    layer, cache = make_layer(), GatedDeltaNetCache()
    layer(rand(2, 3, 32), cache=cache)
    conv, recurrent, held = cache.conv_state, cache.recurrent_state, cache.copy()
    working, layer.kernel = layer.kernel, failing_kernel
    for T in (1, 4):
        with pytest.raises(RuntimeError, match="the kernel failed"):
            layer(rand(2, T, 32), cache=cache)
    layer.kernel, layer.out_proj = working, torch.nn.Identity()
    layer.out_proj.forward = lambda x: 1 / 0
    with pytest.raises(ZeroDivisionError):
        layer(rand(2, 4, 32), cache=cache)
    assert cache.conv_state is conv
    assert cache.recurrent_state is recurrent
    assert same(cache, held)


def test_a_cache_that_another_layer_filled_is_refused() -> None:
    config = GatedDeltaNetConfig(hidden_size=16, linear_num_key_heads=1, linear_num_value_heads=2,
                                 linear_key_head_dim=4, linear_value_head_dim=4)  # fmt: skip
    first, second = Qwen3_5GatedDeltaNet(config, TorchKernel()), Qwen3_5GatedDeltaNet(config, TorchKernel())
    x, cache = torch.randn(1, 5, 16), GatedDeltaNetCache()
    first(x, cache=cache)
    held = cache.recurrent_state
    for shared in (cache, cache.copy()):
        with pytest.raises(ValueError, match="got one that another layer filled; make one GatedDeltaNetCache a layer"):
            second(x, cache=shared)
    assert cache.recurrent_state is held
    first(x, cache=cache)
    cache.reset()
    second(x, cache=cache)
    loaded = pickle.loads(pickle.dumps(GatedDeltaNetCache()))
    first(x, cache=loaded)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, GatedDeltaNetCache.copy])
def test_a_copy_of_any_kind_does_not_change_with_the_cache(make_layer, copied) -> None:
    """Decoding writes states in place: what shared them would go on with it."""
    layer, x, cache = make_layer(), rand(2, 6, 32), GatedDeltaNetCache()
    with torch.no_grad():
        want = layer(x)
        layer(x[:, :4], cache=cache)
        branch = copied(cache)
        kept = branch.recurrent_state.clone(), branch.conv_state.clone()
        torch.testing.assert_close(layer(x[:, 4:5], cache=cache), want[:, 4:5], **CLOSE)
        assert torch.equal(branch.recurrent_state, kept[0])
        assert torch.equal(branch.conv_state, kept[1])
        torch.testing.assert_close(layer(x[:, 4:5], cache=branch), want[:, 4:5], **CLOSE)
        torch.testing.assert_close(layer(x[:, 5:], cache=cache), want[:, 5:], **CLOSE)


def test_expanded_states_of_a_kernel_are_replaced_and_not_written(make_layer) -> None:
    class Expanding(TorchKernel):
        """Its final state's rows are one and the same memory, as a kernel may return them."""

        def _chunk(self, inputs):
            o, final = super()._chunk(inputs)
            return o, None if final is None else final[:1].expand_as(final)

    layer, x, cache = make_layer(Expanding()), rand(1, 5, 32).expand(2, 5, 32), GatedDeltaNetCache()
    with torch.no_grad():
        want = layer(x)
        layer(x[:, :3], cache=cache)
        assert "new states: writing to its states needs a recurrent_state with memory" in layer.explain(
            x[:, 3:4], cache=cache
        )
        for t in (3, 4):
            torch.testing.assert_close(layer(x[:, t : t + 1], cache=cache), want[:, t : t + 1], **CLOSE)
