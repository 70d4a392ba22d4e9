"""Whole layers on the fused path, as on a GPU, in Triton's interpreter: fused projections, prologue and epilogue, in place."""

from __future__ import annotations

import dataclasses
import sys

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from qwenlinear import GatedDeltaNetCache, GatedDeltaNetConfig, PackedSequences, TorchKernel, ops
from qwenlinear.layers import GatedDeltaNet, Qwen3_5GatedDeltaNet, Qwen3NextGatedDeltaNet, projection
from qwenlinear.ops import available, skinny
from tests.ops.decode_cases import one_token

CONFIG = GatedDeltaNetConfig(
    hidden_size=32,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
)
CALLS = {
    "dense": {},
    "packed": {"cu_seqlens": PackedSequences.from_lengths([5, 0, 7])},
    "padded": {"attention_mask": torch.tensor([[0] * 3 + [1] * 9])},
}


class CompileSafe(TorchKernel):
    """TorchKernel as a kernel that torch.compile can trace: token by token."""

    capabilities = dataclasses.replace(TorchKernel.capabilities, compile_safe=True)

    def _chunk(self, inputs):
        return self._step(inputs)


@pytest.fixture(params=[Qwen3NextGatedDeltaNet, Qwen3_5GatedDeltaNet], ids=["next", "3.5"])
def layer(request) -> GatedDeltaNet:
    torch.manual_seed(1)
    made = request.param(CONFIG, TorchKernel())
    with torch.no_grad():
        made.A_log.uniform_(-3.0, 0.0)
        made.dt_bias.normal_()
        made.norm.weight.uniform_(0.5, 1.5)
    return made


@pytest.fixture
def fused(monkeypatch):
    """From here on a CPU counts as what the Triton forms run on."""

    def switch(on: bool) -> None:
        monkeypatch.undo()
        if on:
            asked = available.why_not_fused
            for module in list(sys.modules.values()):
                if module.__name__.startswith("qwenlinear.") and getattr(module, "why_not_fused", None) is asked:
                    monkeypatch.setattr(module, "why_not_fused", lambda *args, **sizes: None)
            monkeypatch.setattr(projection, "why_not_faster", lambda device, tokens: None)
            monkeypatch.setattr(skinny, "DTYPES", (*skinny.DTYPES, torch.float32))  # what these layers are in

    return switch


def run(layer, x: torch.Tensor, **arguments) -> list[torch.Tensor]:
    """The output and every gradient."""
    leaf = x.clone().requires_grad_()
    output = layer(leaf, **arguments)
    torch.manual_seed(3)
    return [output, *torch.autograd.grad(output, [leaf, *layer.parameters()], torch.randn_like(output))]


@pytest.mark.parametrize("kind", CALLS)
def test_equals_the_plain_path(layer, fused, kind) -> None:
    x = torch.randn(1, 12, 32)
    fused(False)
    want = run(layer, x, **CALLS[kind])
    fused(True)
    text = layer.explain(x, **CALLS[kind])
    assert "projections: fused" in text
    assert "prologue: fused" in text
    assert "epilogue: fused" in text
    assert "projections=" in repr(layer)
    for got, reference in zip(run(layer, x, **CALLS[kind]), want, strict=True):
        assert (got - reference).norm() < 5e-6 * reference.norm()


def test_the_kernel_gets_normalised_contiguous_arguments(layer, fused) -> None:
    calls = []
    layer.kernel._run, inner = (lambda inputs, form: (calls.append(inputs), inner(inputs, form))[1]), layer.kernel._run
    fused(True)
    layer(torch.randn(2, 6, 32))
    (inputs,) = calls
    assert not inputs.use_qk_l2norm_in_kernel
    torch.testing.assert_close(inputs.q.norm(dim=-1), torch.ones(2, 6, 2), rtol=1e-4, atol=1e-4)
    assert all(x.is_contiguous() for x in (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta))


def test_gradients_are_read_as_they_lie(layer, fused, monkeypatch) -> None:
    """The prologue leaves the gradients of qkv, b and a in one buffer, which the projection multiplies without a copy."""
    fused(True)
    output = layer(torch.randn(1, 6, 32, requires_grad=True))
    seen, original = [], projection.side_by_side
    monkeypatch.setattr(
        projection, "side_by_side", lambda parts: seen.append((parts[0].data_ptr(), original(parts))) or seen[-1][1]
    )
    output.sum().backward()
    ((pointer, whole),) = seen
    assert whole.data_ptr() == pointer


def test_what_is_kept_for_the_backward_pass(layer, fused) -> None:
    """The input, the projections' buffer, what the kernel takes and keeps, and the parameters; nothing twice."""
    kept: dict[int, torch.Tensor] = {}
    fused(True)
    T = 64
    x = torch.randn(1, T, 32, requires_grad=True)
    known = {t.untyped_storage().data_ptr() for t in (x, *layer.parameters())}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.setdefault(t.untyped_storage().data_ptr(), t) is None or t, lambda t: t
    ):
        layer(x)
    floats = sum(t.untyped_storage().nbytes() // 4 for place, t in kept.items() if place not in known)
    c = CONFIG
    projected = c.conv_dim + 2 * c.linear_num_value_heads + c.value_dim
    arguments = c.conv_dim + 2 * c.linear_num_value_heads  # q, k, v, g, beta
    outputs = 2 * c.value_dim  # the kernel's and the epilogue's
    state = c.linear_num_value_heads * c.linear_key_head_dim * c.linear_value_head_dim
    assert floats <= T * (projected + arguments + outputs) + 2 * state


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_gives_the_same_bits(layer, fused, use_reentrant) -> None:
    fused(True)
    x, packed = torch.randn(1, 5, 32), PackedSequences.from_lengths([2, 3])
    answers = []
    for call in (layer, lambda *args: checkpoint(layer, *args, use_reentrant=use_reentrant)):
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        output = call(leaf, packed)
        output.square().sum().backward()
        answers.append([output, leaf.grad, *(p.grad for p in layer.parameters())])
    for a, b in zip(*answers, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("lengths", [None, (1, 0, 3)], ids=["dense", "packed"])
def test_compiles_as_one_graph(layer, fused, lengths) -> None:
    layer.kernel = CompileSafe()
    x, packed = torch.randn(1, 4, 32), None if lengths is None else PackedSequences.from_lengths(lengths)
    fused(True)
    want = run(layer, x, cu_seqlens=packed)
    torch._dynamo.reset()
    for got, reference in zip(run_compiled(layer, x, cu_seqlens=packed), want, strict=True):
        torch.testing.assert_close(got, reference, rtol=1e-5, atol=1e-6)


def run_compiled(layer, x: torch.Tensor, **arguments) -> list[torch.Tensor]:
    compiled, leaf = torch.compile(layer, fullgraph=True, backend="aot_eager"), x.clone().requires_grad_()
    output = compiled(leaf, **arguments)
    torch.manual_seed(3)
    return [output, *torch.autograd.grad(output, [leaf, *layer.parameters()], torch.randn_like(output))]


@torch.no_grad()
def test_decoding(layer, fused) -> None:
    x, answers = torch.randn(2, 9, 32), []
    for on in (False, True):
        fused(on)
        cache, outputs = GatedDeltaNetCache(), []
        for piece in x.split([4, 1, 1, 1, 2], 1):
            outputs.append(layer(piece, cache=cache))
            places = id(cache.conv_state), id(cache.recurrent_state)
        cache_before = cache.recurrent_state
        text = layer.explain(x[:, :1], cache=cache)
        assert "states in place" in text
        assert ("one launch for all input weights, and one for out_proj" in text) is on
        outputs.append(layer(x[:, :1], cache=cache))
        assert (id(cache.conv_state), id(cache.recurrent_state)) == places
        assert cache.recurrent_state is cache_before
        answers.append([torch.cat(outputs, 1), cache.conv_state, cache.recurrent_state])
    for got, want in zip(answers[1], answers[0], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_decoding_compiles_as_one_graph(layer, fused) -> None:
    layer.kernel, x = CompileSafe(), torch.randn(2, 5, 32)
    fused(True)
    cache = GatedDeltaNetCache()
    layer(x[:, :3], cache=cache)
    without, called = cache.copy(), []
    torch._dynamo.reset()

    def backend(graph, given):
        called.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for t in (3, 4):
        token = x[:, t : t + 1]
        torch.testing.assert_close(compiled(token, cache=cache), layer(token, cache=without), rtol=1e-5, atol=1e-6)
    assert [str(target) for target in called].count("qwenlinear.skinny_linear.default") == 2
    torch.testing.assert_close(cache.recurrent_state, without.recurrent_state, rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_a_token_of_called_modules(layer, fused) -> None:
    """Hooks and adapters on a projection are called, and a bias is added."""
    name, x, seen = projection.projection_names(layer)[-1], torch.randn(2, 3, 32), []
    module, plain = getattr(layer, name), layer(x)
    fused(True)

    def decode(x: torch.Tensor) -> tuple[torch.Tensor, str]:
        cache = GatedDeltaNetCache()
        outputs = [layer(piece, cache=cache) for piece in x.split(1, 1)]
        return torch.cat(outputs, 1), layer.explain(x[:, :1], cache=cache)

    handle = module.register_forward_hook(lambda *_: seen.append(name))
    got, text = decode(x)
    handle.remove()
    assert len(seen) == 3
    assert f"modules called: {name} has hooks" in text
    torch.testing.assert_close(got, plain, rtol=1e-4, atol=1e-5)
    layer.out_proj.bias = torch.nn.Parameter(torch.ones(32))
    torch.testing.assert_close(decode(x)[0], plain + 1, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_written_state_is_no_longer_what_was_saved(layer, fused) -> None:
    """A launch without the dispatcher tells autograd all the same."""
    fused(True)
    cache, x = GatedDeltaNetCache(), torch.randn(2, 3, 32)
    for piece in x.split(1, 1):
        versions = [None if s is None else s._version for s in (cache.conv_state, cache.recurrent_state)]
        layer(piece, cache=cache)
    assert cache.conv_state._version > versions[0]
    token = one_token(torch.float32)
    before = token["conv_state"]._version
    ops.decode_prologue(**token)
    assert token["conv_state"]._version > before


@torch.no_grad()
def test_decoding_refuses_forward_mode_before_it_writes(layer, fused) -> None:
    cache, x = GatedDeltaNetCache(), torch.randn(2, 6, 32)
    for piece in x.split([3, 1, 1, 1], 1)[:3]:
        layer(piece, cache=cache)  # the second and third in place, after the kernel was asked
    fused(True)
    held = cache.copy()
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="decode_prologue in Triton needs"):
        layer(forward_ad.make_dual(x[:, 5:], torch.ones_like(x[:, 5:])), cache=cache)
    for name in ("conv_state", "recurrent_state"):
        assert torch.equal(getattr(cache, name), getattr(held, name))
    torch.testing.assert_close(layer(x[:, 5:], cache=cache), layer(x)[:, 5:], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", ["dual numbers", "torch.func"])
def test_forward_mode_is_refused_and_not_dropped(layer, fused, way) -> None:
    """Where nothing requires gradients an operator of torch.library hands on no tangent, and says nothing."""
    layer.requires_grad_(False)
    fused(True)
    projected = [torch.randn(1, 3, size) for size in (CONFIG.conv_dim, 4, 4)]
    o, token = torch.randn(1, 3, 4, 16), one_token(torch.float32)
    calls = {
        "prologue": lambda t: ops.prologue(
            projected[0] * t,
            *projected[1:],
            layer.conv1d.weight,
            layer.A_log,
            layer.dt_bias,
            heads=(2, 4),
            head_dims=(16, 16),
        )[0],
        "epilogue": lambda t: ops.epilogue(o, t * o, layer.norm.weight, 1e-6),
        "skinny_linear": lambda t: ops.skinny_linear(t * o[0, 0], [o[0, 1]]),
        "decode_prologue": lambda t: ops.decode_prologue(**{**token, "k": token["k"] * t})[1],
    }
    one = torch.ones(())

    def with_dual_numbers(call) -> None:
        with forward_ad.dual_level():
            call(forward_ad.make_dual(one, one))

    def with_functions(call) -> None:
        torch.func.jvp(call, (one,), (one,))

    differentiate = with_functions if way == "torch.func" else with_dual_numbers
    for name, call in calls.items():
        call(one)
        before = token["conv_state"].clone()
        with pytest.raises(NotImplementedError, match=f"{name} in Triton needs tensors without tangents"):
            differentiate(call)
        assert torch.equal(token["conv_state"], before)
