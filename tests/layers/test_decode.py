"""One token without gradients: states are written in place, errors leave them whole, and what must not be written is not."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from qwenlinear.errors import Refusal, UnsupportedCall
from qwenlinear.kernels import AutoKernel, GatedDeltaKernel, KernelCapabilities, PackedSequences, Tolerance, TorchKernel
from qwenlinear.kernels.tangents import carry_tangents
from qwenlinear.layers import GatedDeltaNetBlock, GatedDeltaNetCache

CLOSE = {"rtol": 1e-9, "atol": 1e-11}
IN_PLACE = "form: step, states in place"


def rand(*shape: int, grad: bool = False) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=grad)


def memory(cache: GatedDeltaNetCache) -> tuple[int, int]:
    return id(cache.conv_state), id(cache.recurrent_state)


def values(cache: GatedDeltaNetCache) -> tuple[torch.Tensor, torch.Tensor]:
    return cache.conv_state.detach().clone(), cache.recurrent_state.detach().clone()


def same(a: tuple[torch.Tensor, torch.Tensor], b: tuple[torch.Tensor, torch.Tensor]) -> bool:
    return torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


@torch.no_grad()
def filled(layer, N: int = 2) -> GatedDeltaNetCache:
    cache = GatedDeltaNetCache()
    layer(rand(N, 3, 32), cache=cache)
    return cache


class Copying(GatedDeltaKernel):
    """A kernel with a step that knows nothing of states in place."""

    capabilities = KernelCapabilities(
        dtypes=frozenset({torch.float64}), devices=None, chunk=True, step=True, initial_state=True, final_state=True
    )
    tolerances = {torch.float64: Tolerance(1e-9, 1e-9, 1e-9)}

    def _chunk(self, inputs):
        return TorchKernel()._chunk(inputs)

    def _step(self, inputs):
        assert not inputs.state_in_place
        return TorchKernel()._step(inputs)


@pytest.mark.parametrize("kernel", [TorchKernel(), Copying(), AutoKernel()], ids=["torch", "copying", "auto"])
@pytest.mark.parametrize("T", [1, 5])
@torch.no_grad()
def test_the_states_stay_the_same_tensors(make_layer, kernel, T) -> None:
    layer, cache, x = make_layer(kernel), GatedDeltaNetCache(), rand(2, T + 6, 32)
    want, whole = make_layer()(x), GatedDeltaNetCache()
    got = [layer(x[:, :T], cache=cache)]
    places = memory(cache)
    for t in range(T, T + 6):
        assert IN_PLACE in layer.explain(x[:, t : t + 1], cache=cache)
        before = values(cache)
        got.append(layer(x[:, t : t + 1], cache=cache))
        assert memory(cache) == places
        assert not same(values(cache), before)
    torch.testing.assert_close(torch.cat(got, 1), want, **CLOSE)
    layer(x, cache=whole)
    torch.testing.assert_close(cache.conv_state, whole.conv_state, **CLOSE)
    torch.testing.assert_close(cache.recurrent_state, whole.recurrent_state, **CLOSE)


@torch.no_grad()
def test_decoding_then_more(make_layer) -> None:
    layer, x = make_layer(), rand(2, 12, 32)
    want = layer(x)
    cache = GatedDeltaNetCache()
    got = torch.cat([layer(piece, cache=cache) for piece in x.split([3, 1, 1, 4, 1, 2], 1)], 1)
    torch.testing.assert_close(got, want, **CLOSE)


def in_hand(layer, cache):
    cache.conv_state = cache.conv_state.clone()


def of_a_graph(layer, cache):
    with torch.enable_grad():
        layer(rand(2, 2, 32), cache=cache)


def detached(layer, cache):
    of_a_graph(layer, cache)
    cache.detach()


def converted(layer, cache):
    cache.conv_state = cache.conv_state.float()
    cache.store(layer, cache.conv_state, cache.recurrent_state)


def hooked_output(layer, cache):
    layer.out_proj.register_forward_hook(lambda *_: None)


def hooked_norm(layer, cache):
    layer.norm.register_forward_hook(lambda *_: None)


def hooked_convolution(layer, cache):
    layer.conv1d.register_forward_hook(lambda *_: None)


def emptied(layer, cache):
    cache.reset()


REASONS = [
    (in_hand, "put in by hand"),
    (of_a_graph, "carry a graph"),
    (detached, "detached"),
    (converted, "cache.conv_state is torch.float32"),
    (hooked_output, "out_proj has hooks"),
    (hooked_norm, "norm has hooks"),
    (hooked_convolution, "conv1d has hooks"),
    (emptied, "the cache is empty"),
]


@pytest.mark.parametrize(("change", "words"), REASONS, ids=[change.__name__ for change, _ in REASONS])
def test_what_is_not_written_in_place(make_layer, change, words) -> None:
    layer = make_layer()
    cache, token = filled(layer), rand(2, 1, 32)
    change(layer, cache)
    with torch.no_grad():
        text = layer.explain(token, cache=cache)
        assert "form: step, new states: " in text
        assert words in text
        conv, recurrent = cache.conv_state, cache.recurrent_state
        held = None if conv is None else values(cache)
        layer(token, cache=cache)
        assert cache.conv_state is not conv
        assert cache.recurrent_state is not recurrent
        if held is not None:
            assert torch.equal(conv, held[0])
            assert torch.equal(recurrent, held[1])
        hooks = "hooks" in words
        assert (IN_PLACE in layer.explain(token, cache=cache)) is not hooks  # new states are the layer's own


def test_masks_documents_and_longer_pieces_leave_new_states(make_layer) -> None:
    layer = make_layer()
    with torch.no_grad():
        for x, arguments in (
            (rand(2, 1, 32), {"attention_mask": torch.ones(2, 4)}),
            (rand(1, 2, 32), {"cu_seqlens": PackedSequences.from_lengths([1, 1])}),
            (rand(2, 2, 32), {}),
        ):
            cache = filled(layer)
            (conv, recurrent), held = (cache.conv_state, cache.recurrent_state), values(cache)
            assert IN_PLACE not in layer.explain(x, cache=cache, **arguments)
            layer(x, cache=cache, **arguments)
            assert torch.equal(conv, held[0])
            assert torch.equal(recurrent, held[1])
            assert cache.recurrent_state is not recurrent


def test_a_graph_over_the_states_survives_decoding(make_layer) -> None:
    layer, cache, x = make_layer(), GatedDeltaNetCache(), rand(2, 4, 32, grad=True)
    layer(x, cache=cache)
    state = cache.recurrent_state
    (want,) = torch.autograd.grad(state.square().sum(), x, retain_graph=True)
    cache.detach()
    with torch.no_grad():
        for _ in range(3):
            layer(rand(2, 1, 32), cache=cache)
    (got,) = torch.autograd.grad(state.square().sum(), x)
    assert torch.equal(got, want)


def test_gradients_decode_with_new_states(make_layer) -> None:
    layer = make_layer()
    cache, token = filled(layer), rand(2, 1, 32)
    assert "form: chunk" in layer.explain(token, cache=cache)
    for parameter in layer.parameters():
        parameter.requires_grad_(False)
    assert IN_PLACE in layer.explain(token, cache=cache)  # nothing needs a gradient, whatever the mode
    places = memory(cache)
    layer(token, cache=cache)
    assert memory(cache) == places
    layer.out_proj.weight.requires_grad_(True)
    output = layer(token, cache=cache)
    assert memory(cache) != places
    output.sum().backward()
    assert layer.out_proj.weight.grad.abs().sum() > 0


def test_inference_mode_and_back(make_layer) -> None:
    layer, x = make_layer(), rand(2, 8, 32)
    want = layer(x).detach()
    cache, got = GatedDeltaNetCache(), []
    for mode, piece in zip("iinnii", x.split([3, 1, 1, 1, 1, 1], 1), strict=True):
        with torch.inference_mode() if mode == "i" else torch.no_grad():
            got.append(layer(piece, cache=cache).clone())
    torch.testing.assert_close(torch.cat(got, 1), want, **CLOSE)


@torch.no_grad()
def test_copies_are_apart_and_keep_decoding_in_place(make_layer) -> None:
    layer = make_layer()
    cache, token = filled(layer), rand(2, 1, 32)
    for other in (cache.copy(), copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        held, places = values(cache), memory(other)
        layer(token, cache=other)
        assert memory(other) == places
        assert same(values(cache), held)
    cache.reorder(torch.tensor([1, 0]))
    places = memory(cache)
    layer(token, cache=cache)
    assert memory(cache) == places


@torch.no_grad()
def test_a_kernel_is_asked_about_tangents_when_they_come(make_layer) -> None:
    """Its answer of an earlier token does not hold for a dual number; where it takes one, the derivative is right."""

    class Primal(TorchKernel):
        def _refusals(self, inputs, form):
            if carry_tangents(inputs.q):
                yield Refusal("forward_mode", "tensors without tangents", "some", "use TorchKernel()")

    layer, x, h = make_layer(Primal()), rand(2, 6, 32), 1e-6
    cache, tangent = GatedDeltaNetCache(), rand(2, 1, 32)
    for piece in x.split([3, 1, 1, 1], 1)[:3]:
        layer(piece, cache=cache)
    held = cache.copy()
    ahead, behind = (layer(x[:, 5:] + step * tangent, cache=cache.copy()) for step in (h, -h))
    with forward_ad.dual_level():
        token = forward_ad.make_dual(x[:, 5:], tangent)
        with pytest.raises(UnsupportedCall, match="forward_mode"):
            layer(token, cache=cache)
        assert same(values(cache), values(held))
        layer.kernel = TorchKernel()
        assert IN_PLACE in layer.explain(token, cache=cache)
        got = forward_ad.unpack_dual(layer(token, cache=cache)).tangent
    torch.testing.assert_close(got, (ahead - behind) / (2 * h), rtol=1e-6, atol=1e-8)


@torch.no_grad()
def test_a_refusal_comes_before_the_first_write(make_layer) -> None:
    class Refusing(TorchKernel):
        def _refusals(self, inputs, form):
            if form == "step":
                yield Refusal("moon", "another phase", "this one", "wait")

    layer = make_layer()
    cache = filled(layer)
    held, places = values(cache), memory(cache)
    for kernel in (Refusing(), AutoKernel([Refusing()])):
        layer.kernel = kernel
        with pytest.raises(UnsupportedCall, match="moon"):
            layer(rand(2, 1, 32), cache=cache)
        assert same(values(cache), held)
        assert memory(cache) == places
    layer.kernel = TorchKernel()
    layer(rand(2, 1, 32), cache=cache)


@torch.no_grad()
def test_an_error_in_a_projection_comes_before_the_first_write(make_layer) -> None:
    layer = make_layer()
    cache = filled(layer)
    held = values(cache)

    def fail(*_):
        raise ZeroDivisionError

    for name, module in layer.named_children():
        handle = module.register_forward_pre_hook(fail)
        with pytest.raises(ZeroDivisionError):
            layer(rand(2, 1, 32), cache=cache)
        handle.remove()
        assert same(values(cache), held), name
    layer.out_proj = nn.Sequential(layer.out_proj, nn.Linear(5, 5).double())
    with pytest.raises(RuntimeError):
        layer(rand(2, 1, 32), cache=cache)
    assert same(values(cache), held)


@torch.no_grad()
def test_states_that_were_being_written_are_refused_afterwards(make_layer, failing_kernel) -> None:
    """What cannot be foreseen, such as running out of memory, must not be gone on from."""
    layer = make_layer()
    cache, token = filled(layer), rand(2, 1, 32)
    before = cache.copy()
    working, layer.kernel = layer.kernel, failing_kernel
    with pytest.raises(RuntimeError, match="the kernel failed"):
        layer(token, cache=cache)
    layer.kernel = working
    for torn in (cache, cache.copy(), copy.deepcopy(cache)):
        with pytest.raises(ValueError, match="got some that a failed call had begun to write; reset"):
            layer(token, cache=torn)
    layer(token, cache=before)
    cache.reset()
    layer(token, cache=cache)


@pytest.mark.parametrize("T", [1, 3])
@torch.no_grad()
def test_a_block_whose_mlp_fails(config, T) -> None:
    block = GatedDeltaNetBlock(config, TorchKernel(), intermediate_size=8).double()
    cache = GatedDeltaNetCache()
    block(rand(2, 3, 32), cache=cache)
    held, places = values(cache), memory(cache)
    working, block.mlp.down_proj = block.mlp.down_proj, nn.Linear(1, 1).double()
    with pytest.raises(RuntimeError):
        block(rand(2, T, 32), cache=cache)
    block.mlp.down_proj = working
    if T == 1:
        with pytest.raises(ValueError, match="failed call"):
            block(rand(2, T, 32), cache=cache)
    else:
        assert same(values(cache), held)
        assert memory(cache) == places
        block(rand(2, T, 32), cache=cache)


@torch.no_grad()
def test_other_sizes(layer_class, config) -> None:
    for change in (
        {"linear_conv_kernel_dim": 1},
        {"linear_conv_kernel_dim": 6, "hidden_act": "gelu"},
        {"linear_num_value_heads": 2, "linear_value_head_dim": 5, "linear_key_head_dim": 3},
        {"linear_num_key_heads": 1, "linear_num_value_heads": 5},
    ):
        layer = layer_class({**vars(config), **change}, TorchKernel()).double()
        x, cache = rand(2, 7, 32), GatedDeltaNetCache()
        want = layer(x)
        got = torch.cat([layer(piece, cache=cache) for piece in x.split(1, 1)], 1)
        torch.testing.assert_close(got, want, **CLOSE)
        assert IN_PLACE in layer.explain(x[:, :1], cache=cache)


@torch.no_grad()
def test_autocast(make_layer) -> None:
    layer, x = make_layer(dtype=torch.float32), torch.randn(2, 8, 32)
    want, cache = layer(x), GatedDeltaNetCache()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = [layer(piece, cache=cache) for piece in x.split([3, 1, 1, 1, 1, 1], 1)]
        places = memory(cache)
        assert IN_PLACE in layer.explain(x[:, :1], cache=cache)
        layer(x[:, :1], cache=cache)
    assert memory(cache) == places
    assert cache.recurrent_state.dtype == torch.float32
    assert (torch.cat(got, 1) - want).norm() < 1e-2 * want.norm()


@torch.no_grad()
def test_the_kernel_gets_one_token_in_place(make_layer, recording_kernel) -> None:
    layer = make_layer(recording_kernel)
    cache = filled(layer, 3)
    recording_kernel.calls.clear()
    layer(rand(3, 1, 32), cache=cache)
    ((form, inputs),) = recording_kernel.calls
    assert form == "step"
    assert inputs.state_in_place
    assert inputs.initial_state is cache.recurrent_state
    assert (inputs.q.shape, inputs.v.shape, inputs.g.shape) == ((3, 1, 2, 8), (3, 1, 4, 8), (3, 1, 4))
    assert inputs.use_qk_l2norm_in_kernel  # the operators run in PyTorch here, so the kernel normalises
    assert all(x.is_contiguous() for x in (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta))


@torch.no_grad()
def test_a_kernel_is_asked_once_and_again_when_it_is_another(make_layer) -> None:
    class Asked(TorchKernel):
        asked = 0

        def refusals(self, *arguments, **options):
            self.asked += 1
            return super().refusals(*arguments, **options)

    layer = make_layer(Asked())
    cache = filled(layer)
    for _ in range(3):
        layer(rand(2, 1, 32), cache=cache)
    assert layer.kernel.asked == 1
    layer.kernel = Asked()
    layer(rand(2, 1, 32), cache=cache)
    layer(rand(2, 2, 32), cache=cache)  # leaves new states
    layer(rand(2, 1, 32), cache=cache)
    assert layer.kernel.asked == 2
