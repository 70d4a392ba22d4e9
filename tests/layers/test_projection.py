"""Fused projections equal the modules called, keep nothing but inputs and parameters, and know their limits."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from qwenlinear.kernels import PackedSequences, TorchKernel
from qwenlinear.layers import Qwen3NextGatedDeltaNet, projection
from qwenlinear.layers.projection import FEWEST_TOKENS, project, side_by_side, why_not_faster, why_not_plain_weights

CLOSE = {"rtol": 1e-12, "atol": 1e-12}
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def joined(monkeypatch) -> None:
    """On a CPU calling the modules is faster; here the fused form runs all the same."""
    monkeypatch.setattr(projection, "why_not_faster", lambda device, tokens: None)


def rand(*shape: int, grad: bool = False) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=grad)


def parts(layer, x: torch.Tensor) -> list[torch.Tensor]:
    projected = project(layer, layer.config, x)
    return [projected.qkv, projected.b, projected.a, projected.z()]


def input_weights(layer) -> dict[str, nn.Parameter]:
    return {name: p for name, p in layer.named_parameters() if name.startswith("in_proj")}


def reference(layer, x, upstream, leaves):
    """What the modules called give."""
    want = parts(layer, x)
    return want, torch.autograd.grad(want, leaves, upstream)


@pytest.mark.parametrize("shape", [(2, 7), (1, 5), (3, 1), (1, 1), (0, 4), (2, 0)])
def test_equals_the_modules_called(make_layer, monkeypatch, shape) -> None:
    layer, x = make_layer(), rand(*shape, 32, grad=True)
    leaves = [x, *input_weights(layer).values()]
    upstream = [torch.randn_like(part) for part in parts(layer, x)]
    want, gradients = reference(layer, x, upstream, leaves)
    monkeypatch.setattr(projection, "why_not_faster", lambda device, tokens: None)
    got = parts(layer, x)
    assert all("Mixing" in repr(part.grad_fn) for part in got[:3])
    assert "Gate" in repr(got[3].grad_fn.next_functions[0][0])
    for mine, reference_ in zip(got, want, strict=True):
        torch.testing.assert_close(mine, reference_, **CLOSE)
    for mine, reference_ in zip(torch.autograd.grad(got, leaves, upstream), gradients, strict=True):
        assert mine.is_contiguous()
        torch.testing.assert_close(mine, reference_, **CLOSE)


@pytest.mark.parametrize("frozen", range(5))
def test_what_is_frozen_gets_no_gradient(make_layer, monkeypatch, frozen) -> None:
    """Each weight in turn, then x: the others' gradients do not change."""
    layer = make_layer()
    names = list(input_weights(layer))
    x = rand(2, 6, 32, grad=frozen != 4)
    if frozen < len(names):
        input_weights(layer)[names[frozen]].requires_grad_(False)
    leaves = [t for t in (x, *input_weights(layer).values()) if t.requires_grad]
    upstream = [torch.randn_like(part) for part in parts(layer, x)]
    _, want = reference(layer, x, upstream, leaves)
    monkeypatch.setattr(projection, "why_not_faster", lambda device, tokens: None)
    got = parts(layer, x)
    torch.autograd.backward(got, upstream)
    for leaf, gradient in zip(leaves, want, strict=True):
        torch.testing.assert_close(leaf.grad, gradient, **CLOSE)
    assert all(t.grad is None for t in (x, *input_weights(layer).values()) if not t.requires_grad)


def test_an_input_changed_in_place_is_noticed(make_layer, joined) -> None:
    """In the words that PyTorch has for it, as where the modules are called."""
    layer, x = make_layer(), rand(2, 6, 32, grad=True)
    hidden_states = 2 * x
    output = layer(hidden_states)
    hidden_states.add_(1)
    with pytest.raises(RuntimeError, match="needed for gradient computation has been modified by an inplace operation"):
        output.sum().backward()


def test_parts_that_nobody_uses(make_layer, joined) -> None:
    layer, x = make_layer(), rand(1, 6, 32, grad=True)
    for used in range(4):
        part = parts(layer, x)[used]
        (dx,) = torch.autograd.grad(part.sum(), x, retain_graph=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(projection, "why_not_faster", why_not_faster)
            (want,) = torch.autograd.grad(parts(layer, x)[used].sum(), x)
        torch.testing.assert_close(dx, want, **CLOSE)


def test_used_twice_in_one_graph(make_layer, monkeypatch) -> None:
    layer, x = make_layer(), rand(2, 5, 32, grad=True)

    def loss() -> torch.Tensor:
        first = parts(layer, x)
        second = parts(layer, first[0][..., :32])
        return sum(part.square().sum() for part in (*first, *second, first[1] * second[2]))

    leaves = [x, *input_weights(layer).values()]
    want = torch.autograd.grad(loss(), leaves)
    monkeypatch.setattr(projection, "why_not_faster", lambda device, tokens: None)
    for mine, reference_ in zip(torch.autograd.grad(loss(), leaves), want, strict=True):
        torch.testing.assert_close(mine, reference_, rtol=1e-11, atol=1e-11)


def test_whole_layer_either_way(make_layer, monkeypatch) -> None:
    layer, x, packed = make_layer(), rand(1, 12, 32, grad=True), PackedSequences.from_lengths([5, 0, 7])
    mask = torch.tensor([[0] * 4 + [1] * 8])
    upstream = rand(1, 12, 32)
    for arguments in ({}, {"cu_seqlens": packed}, {"attention_mask": mask}):
        monkeypatch.undo()
        leaves = [x, *layer.parameters()]
        want = layer(x, **arguments)
        gradients = torch.autograd.grad(want, leaves, upstream)
        monkeypatch.setattr(projection, "why_not_faster", lambda device, tokens: None)
        assert "projections: fused" in layer.explain(x, **arguments)
        got = layer(x, **arguments)
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)
        for mine, reference_ in zip(torch.autograd.grad(got, leaves, upstream), gradients, strict=True):
            torch.testing.assert_close(mine, reference_, rtol=1e-10, atol=1e-11)


def test_nothing_is_kept_but_inputs_and_parameters(make_layer, joined) -> None:
    layer, x = make_layer(), rand(1, 9, 32, grad=True)
    known = {t.untyped_storage().data_ptr() for t in (x, *layer.parameters())}
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        parts(layer, x)
    assert len(saved) == 2 + len(input_weights(layer)) + isinstance(
        layer, Qwen3NextGatedDeltaNet
    )  # x twice, qkvz twice
    assert {t.untyped_storage().data_ptr() for t in saved} <= known


def test_frozen_projections_do_not_keep_their_input(make_layer, joined) -> None:
    """As in a model with adapters elsewhere: the gradient goes through, and the hidden states may go."""
    layer, x = make_layer(), rand(2, 9, 32, grad=True)
    upstream = [torch.randn_like(part) for part in parts(layer, x)]
    (want,) = torch.autograd.grad(parts(layer, x), x, upstream)
    for weight in input_weights(layer).values():
        weight.requires_grad_(False)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        got = parts(layer, x)
    assert x.untyped_storage().data_ptr() not in {t.untyped_storage().data_ptr() for t in saved}
    assert torch.equal(torch.autograd.grad(got, x, upstream)[0], want)


def test_a_layer_keeps_no_second_copy_of_a_weight(make_layer, joined) -> None:
    """Whatever one call saves: nothing outside its parameters has as many elements as their smallest matrix, twice."""
    layer, x = make_layer(), rand(1, 2, 32, grad=True)  # fewer tokens than weights' rows
    storages: dict[int, int] = {}

    def keep(t: torch.Tensor) -> torch.Tensor:
        storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        layer(x)
    for parameter in layer.parameters():
        storages.pop(parameter.untyped_storage().data_ptr(), None)
    assert max(storages.values()) < layer.out_proj.weight.untyped_storage().nbytes()
    before = set(layer.__dict__), set(layer.state_dict())
    layer(x).sum().backward()
    assert (set(layer.__dict__), set(layer.state_dict())) == before
    assert not [v for m in layer.modules() for v in m.__dict__.values() if isinstance(v, torch.Tensor)]


# ---- when not ------------------------------------------------------------------------------------------------------


def reason(layer) -> str | None:
    weight = layer.out_proj.weight
    return why_not_plain_weights(layer, layer.config, weight.dtype, weight.device)


def first_projection(layer) -> str:
    return "in_proj_qkvz" if isinstance(layer, Qwen3NextGatedDeltaNet) else "in_proj_qkv"


class Quantised(torch.Tensor):
    """Stands for a quantised weight: a subclass whose products are its own."""

    products: list[tuple[int, ...]] = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.nn.functional.linear:
            Quantised.products.append(tuple(args[1].shape))
        return super().__torch_function__(func, types, args, kwargs)


def lora(layer, name):
    class Lora(nn.Linear):
        pass

    setattr(layer, name, Lora(32, getattr(layer, name).out_features, bias=False).double())


def hooked(layer, name):
    getattr(layer, name).register_forward_hook(lambda module, args, output: None)


def pre_hooked(layer, name):
    getattr(layer, name).register_forward_pre_hook(lambda module, args: None)


def backward_hooked(layer, name):
    getattr(layer, name).register_full_backward_hook(lambda module, given, taken: None)


def replaced(layer, name):
    module = getattr(layer, name)
    module.forward = module.forward


def compiled(layer, name):
    getattr(layer, name).compile(backend="eager")


def parametrized(layer, name):
    parametrize.register_parametrization(getattr(layer, name), "weight", nn.Identity())


def biased(layer, name):
    module = getattr(layer, name)
    module.bias = nn.Parameter(rand(module.out_features))


def quantised(layer, name):
    module = getattr(layer, name)
    module.weight = nn.Parameter(module.weight.detach().as_subclass(Quantised), requires_grad=False)


def narrow(layer, name):
    getattr(layer, name).float()


NOT_PLAIN = [
    (lora, "is a Lora"),
    (hooked, "has hooks"),
    (pre_hooked, "has hooks"),
    (backward_hooked, "has hooks"),
    (replaced, "has a forward of its own"),
    (compiled, "has a forward of its own"),
    (parametrized, "is a ParametrizedLinear"),
    (biased, "has a bias"),
    (quantised, "has a weight that is a Quantised"),
    (narrow, "of several dtypes"),
]


@pytest.mark.parametrize(("change", "words"), NOT_PLAIN, ids=[change.__name__ for change, _ in NOT_PLAIN])
def test_a_module_that_is_more_than_its_weight_is_called(make_layer, joined, change, words) -> None:
    layer = make_layer()
    assert reason(layer) is None
    change(layer, first_projection(layer))
    assert words in reason(layer)
    assert f"modules called: {reason(layer)}" in layer.explain(rand(1, 4, 32))


def test_hooks_fire_and_adapters_train(make_layer, joined) -> None:
    layer, plain, x = make_layer(), make_layer(), rand(2, 6, 32)
    seen = []
    module = getattr(layer, first_projection(layer))
    handle = module.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    torch.testing.assert_close(layer(x), plain(x), rtol=1e-11, atol=1e-11)
    assert seen == [(2, 6, module.out_features)]
    handle.remove()
    assert reason(layer) is None
    layer(x)
    assert len(seen) == 1
    down = nn.Linear(32, 3, bias=False).double()
    up = nn.Linear(3, module.out_features, bias=False).double()
    setattr(layer, first_projection(layer), Adapter(module, down, up))
    layer(x).square().sum().backward()
    assert down.weight.grad.abs().sum() > 0


class Adapter(nn.Module):
    def __init__(self, base: nn.Module, down: nn.Module, up: nn.Module) -> None:
        super().__init__()
        self.base, self.down, self.up = base, down, up

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def test_global_hooks_see_every_module(make_layer, joined) -> None:
    layer, x, seen = make_layer(), rand(1, 4, 32), []
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: seen.append(module))
    try:
        assert "hooks on all modules" in reason(layer)
        layer(x)
    finally:
        handle.remove()
    assert {layer, layer.conv1d, layer.norm, layer.out_proj, getattr(layer, first_projection(layer))} <= set(seen)


def test_a_quantised_weight_computes_its_own_product(make_layer, joined) -> None:
    layer, x = make_layer(), rand(1, 4, 32)
    want = layer(x)
    quantised(layer, first_projection(layer))
    Quantised.products.clear()
    torch.testing.assert_close(layer(x).as_subclass(torch.Tensor), want, rtol=1e-11, atol=1e-11)
    assert tuple(getattr(layer, first_projection(layer)).weight.shape) in Quantised.products


def test_parametrized_weights_get_their_gradient(make_layer, joined) -> None:
    class Double(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return 2 * weight

    layer, other, x = make_layer(), make_layer(), rand(1, 5, 32)
    name = first_projection(layer)
    parametrize.register_parametrization(getattr(layer, name), "weight", Double())
    getattr(other, name).weight.data.mul_(2)
    torch.testing.assert_close(layer(x), other(x), rtol=1e-11, atol=1e-11)
    layer(x).sum().backward()
    assert getattr(layer, name).parametrizations.weight.original.grad.abs().sum() > 0


def test_where_fusing_is_not_faster() -> None:
    assert "on a cpu" in why_not_faster(CPU, 10**6)
    assert why_not_faster(CUDA, FEWEST_TOKENS) is None
    assert f"for {FEWEST_TOKENS - 1} tokens" in why_not_faster(CUDA, FEWEST_TOKENS - 1)


# ---- under what surrounds a layer ----------------------------------------------------------------------------------


def test_autocast(make_layer, monkeypatch) -> None:
    layer, x = make_layer(dtype=torch.float32), torch.randn(2, 9, 32, requires_grad=True)
    leaves = [x, *layer.parameters()]

    def run():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = layer(x)
        return output, torch.autograd.grad(output.float().square().sum(), leaves)

    exact = copy.deepcopy(layer).double()
    exact_x = x.detach().double().requires_grad_()
    truth = torch.autograd.grad(exact(exact_x).square().sum(), [exact_x, *exact.parameters()])
    want, separate = run()
    monkeypatch.setattr(projection, "why_not_faster", lambda device, tokens: None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert "projections: fused" in layer.explain(x)
    got, gradients = run()
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    for mine, theirs, leaf, reference_ in zip(gradients, separate, leaves, truth, strict=True):
        assert mine.dtype == leaf.dtype
        error, other = ((grad - reference_).norm() / reference_.norm() for grad in (mine, theirs))
        assert error < max(3e-2, 2 * other)  # the gate's few sums of both signs have the error of 16-bit activations


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_gives_the_same_bits(make_layer, joined, use_reentrant) -> None:
    layer, x, packed = make_layer(dtype=torch.float32), torch.randn(1, 12, 32), PackedSequences.from_lengths([5, 7])
    answers = []
    for run in (layer, lambda *args: checkpoint(layer, *args, use_reentrant=use_reentrant)):
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        output = run(leaf, packed)
        output.square().sum().backward()
        answers.append([output, leaf.grad, *(p.grad for p in layer.parameters())])
    for a, b in zip(*answers, strict=True):
        assert torch.equal(a, b)


def test_copies_and_pickles(make_layer, joined) -> None:
    layer, x = make_layer(TorchKernel()), rand(1, 6, 32)
    want = layer(x)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x), want)
        getattr(other, first_projection(other)).weight.data.zero_()
        assert not torch.equal(other(x), want)
    assert torch.equal(layer(x), want)


def test_steps_of_an_optimizer_are_seen(make_layer, joined) -> None:
    layer, twin, x = make_layer(), make_layer(), rand(2, 6, 32)
    for one in (layer, twin):
        optimizer = torch.optim.AdamW(one.parameters(), lr=1e-2)
        for _ in range(3):
            with pytest.MonkeyPatch.context() as patch:
                if one is twin:
                    patch.setattr(projection, "why_not_faster", why_not_faster)
                optimizer.zero_grad()
                one(x).square().mean().backward()
                optimizer.step()
    for a, b in zip(layer.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def test_accumulated_gradients_stay_apart(make_layer, joined) -> None:
    """Gradients are written to one by one: by clipping, by accumulation, by an optimizer."""
    layer, x = make_layer(), rand(1, 6, 32)
    layer(x).sum().backward()
    weights = list(input_weights(layer).values())
    held = [w.grad.clone() for w in weights]
    weights[0].grad.zero_()
    for weight, before in zip(weights[1:], held[1:], strict=True):
        assert torch.equal(weight.grad, before)
    weights[0].grad.copy_(held[0])
    layer(x).sum().backward()
    for weight, before in zip(weights, held, strict=True):
        torch.testing.assert_close(weight.grad, 2 * before, rtol=1e-11, atol=1e-11)


def test_on_meta(layer_class, config, joined) -> None:
    with torch.device("meta"):
        layer = layer_class(config, TorchKernel())
    x = torch.empty(2, 5, 32, device="meta")
    assert [part.shape for part in parts(layer, x)] == [(2, 5, 64), (2, 5, 4), (2, 5, 4), (2, 5, 4, 8)]


# ---- gradients that lie side by side -------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 3), (1, 4), (3, 1), (1, 1)])
def test_side_by_side(shape) -> None:
    whole = rand(*shape, 10)
    sizes = [5, 3, 2]
    assert side_by_side(whole.split(sizes, -1)).data_ptr() == whole.data_ptr()
    wider = rand(*shape, 13)[..., 1:11].split(sizes, -1)  # rows further apart, as in a buffer that goes on
    assert side_by_side(wider).data_ptr() == wider[0].data_ptr()
    q, k, v = whole.split(sizes, -1)
    others = [
        (q, v, k),
        (q.clone(), k, v),
        (q, k, v.contiguous()),
        (q, k[..., :2], v),
        (q.flip(-1), k, v),
        (whole[..., :5].transpose(0, 1).contiguous().transpose(0, 1), k, v),
    ]
    for parts_ in (whole.split(sizes, -1), wider, *others):
        want = torch.cat(list(parts_), -1).flatten(0, 1)
        assert torch.equal(side_by_side(parts_), want)


@pytest.mark.parametrize("shape", [(0, 4), (2, 0)])
def test_side_by_side_without_tokens(shape) -> None:
    assert side_by_side(rand(*shape, 10).split([5, 3, 2], -1)).shape == (0, 10)
