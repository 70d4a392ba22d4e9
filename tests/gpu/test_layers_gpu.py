"""On a GPU: layers on the fused path against float64 and against the common composition; no synchronisation, the same bits
from checkpointing, CUDA graphs, compilation, decoding in place. Run with -rP to see the errors."""

from __future__ import annotations

import copy
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from qwenlinear import AutoKernel, FLAKernel, FlashQLAKernel, PackedSequences, TorchKernel, TritonKernel
from qwenlinear.bench.layer_gate import root_mean_square, worse
from qwenlinear.layers import (
    GatedDeltaNet,
    GatedDeltaNetCache,
    GatedDeltaNetConfig,
    Qwen3_5GatedDeltaNet,
    Qwen3NextGatedDeltaNet,
    projection,
)
from qwenlinear.layers import token as token_products
from qwenlinear.ops.skinny import MAX_ROWS

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parents[2]
DEVICE = torch.device("cuda")
CONFIG = GatedDeltaNetConfig(hidden_size=256)  # heads 16/32 x 128
LENGTHS = [1000, 0, 37, 1, 1062]
T = sum(LENGTHS)
DRAWS = 12  # one alone decides by luck who is a few per cent better
LAYERS = pytest.mark.parametrize("layer_class", [Qwen3NextGatedDeltaNet, Qwen3_5GatedDeltaNet], ids=["next", "3.5"])
KERNELS = pytest.mark.parametrize("kernel", [FLAKernel(), FlashQLAKernel()], ids=["fla", "flashqla"])


@pytest.fixture(autouse=True)
def fused_from_here_on(monkeypatch) -> None:
    """Fused projections at a length whose float64 reference is still cheap."""
    monkeypatch.setattr(projection, "FEWEST_TOKENS", T)


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def pair(layer_class: type[GatedDeltaNet], kernel) -> tuple[GatedDeltaNet, GatedDeltaNet]:
    """A bfloat16 layer on the kernel, and the float64 one on TorchKernel with the same weights."""
    missing = kernel.unavailable(DEVICE)
    if missing:
        pytest.skip("; ".join(map(str, missing)))
    torch.manual_seed(0)
    fast = layer_class(CONFIG, kernel).to(DEVICE, torch.bfloat16)
    with torch.no_grad():
        fast.dt_bias.normal_()
        fast.norm.weight.uniform_(0.5, 1.5)
    exact = copy.deepcopy(fast).double()
    exact.kernel = TorchKernel()
    return fast, exact


def tokens(B: int, T: int) -> torch.Tensor:
    return torch.randn(B, T, CONFIG.hidden_size, device=DEVICE, dtype=torch.bfloat16)


def boundaries(kind: str) -> PackedSequences | torch.Tensor | None:
    packed = PackedSequences.from_lengths(LENGTHS, device=DEVICE)
    return {"packed": packed, "tensor": packed.cu_seqlens(DEVICE)}.get(kind)


def mask(kind: str) -> torch.Tensor | None:
    if kind != "padded":
        return None
    ones = torch.ones(2, T, device=DEVICE, dtype=torch.int64)
    ones[0, :50] = ones[1, 300:] = 0
    return ones


def answers(layer, x: torch.Tensor, *arguments, run=None) -> dict[str, torch.Tensor]:
    """The output and every gradient, from fixed cotangents."""
    leaf = x.clone().requires_grad_()
    output = (layer if run is None else run)(leaf, *arguments)
    generator = torch.Generator(DEVICE).manual_seed(3)
    upstream = torch.randn(output.shape, device=DEVICE, generator=generator, dtype=torch.float64).to(output.dtype)
    named = {"hidden_states": leaf, **dict(layer.named_parameters())}
    return {
        "output": output,
        **dict(zip(named, torch.autograd.grad(output, list(named.values()), upstream), strict=True)),
    }


# ---- training ------------------------------------------------------------------------------------------------------


@LAYERS
@KERNELS
@pytest.mark.parametrize("kind", ["dense", "packed", "tensor", "padded"])
def test_training_equals_float64(layer_class, kernel, kind) -> None:
    fast, exact = pair(layer_class, kernel)
    arguments = boundaries(kind), None, mask(kind)
    x = tokens(2 if arguments[0] is None else 1, T)
    text = fast.explain(x.clone().requires_grad_(), *arguments)
    for words in ("projections: fused", "prologue: fused", "epilogue: fused"):
        assert words in text, text
    want, got = answers(exact, x.double(), *arguments), answers(fast, x, *arguments)
    assert got["output"].dtype == torch.bfloat16
    errors = {name: relative(got[name], want[name]) for name in want}
    print({name: f"{error:.1e}" for name, error in errors.items()})
    assert max(errors.values()) < 2e-2, errors


def composition(layer: Qwen3_5GatedDeltaNet, x: torch.Tensor, packed: PackedSequences | None) -> torch.Tensor:
    """The layer as trainers write it: four projections, FLA's convolution and norm, q and k repeated, the same kernel."""
    convolution = importlib.import_module("fla.modules.causal_conv1d").causal_conv1d
    norm = importlib.import_module("fla.modules.norm.fused_norm_gate").rms_norm_gated
    c, cu = layer.config, None if packed is None else packed.cu_seqlens(x.device)
    z, b, a = layer.in_proj_z(x).unflatten(-1, (-1, 128)), layer.in_proj_b(x), layer.in_proj_a(x)
    mixed, _ = convolution(layer.in_proj_qkv(x), layer.conv1d.weight.squeeze(1), activation="silu", cu_seqlens=cu)
    q, k, v = (part.unflatten(-1, (-1, 128)) for part in mixed.split([c.key_dim, c.key_dim, c.value_dim], -1))
    q, k = (part.repeat_interleave(2, 2) for part in (q, k))
    g = -layer.A_log.float().exp() * F.softplus(a.float() + layer.dt_bias)
    o, _ = layer.kernel(q, k, v, g, b.sigmoid(), use_qk_l2norm_in_kernel=True, cu_seqlens=packed)
    o = norm(o, z, layer.norm.weight, None, activation="swish", eps=layer.norm.eps)
    return layer.out_proj(o.flatten(2))


@KERNELS
@pytest.mark.parametrize("kind", ["dense", "packed"])
def test_gradients_are_no_worse_than_the_common_compositions(kernel, kind) -> None:
    pytest.importorskip("fla.modules")
    fast, exact = pair(Qwen3_5GatedDeltaNet, kernel)
    packed, errors = boundaries(kind), {}
    for _ in range(DRAWS):
        x = tokens(1, T)
        want, mine = answers(exact, x.double(), packed), answers(fast, x, packed)
        theirs = answers(fast, x, packed, run=lambda *arguments: composition(fast, *arguments))
        for name, right in want.items():
            errors.setdefault(name, []).append((relative(mine[name], right), relative(theirs[name], right)))
    print(f"\n{kernel!r}, {kind}: relative errors against float64, of this layer and of the common composition")
    for name, draws in errors.items():
        ours, others = zip(*draws, strict=True)
        print(f"  {name:20} {root_mean_square(ours):.2e} {root_mean_square(others):.2e}")
    clearly = [name for name, draws in errors.items() if worse(*zip(*draws, strict=True))]
    assert not clearly


@LAYERS
@KERNELS
def test_one_product_and_separate_ones(layer_class, kernel, monkeypatch) -> None:
    fast, exact = pair(layer_class, kernel)
    x = tokens(1, T)
    want, joined = answers(exact, x.double()), answers(fast, x)
    monkeypatch.setattr(projection, "FEWEST_TOKENS", T + 1)
    assert "projections: modules called" in fast.explain(x)
    apart = answers(fast, x)
    for name in want:
        assert relative(joined[name], want[name]) <= 1.1 * relative(apart[name], want[name]) + 1e-4, name


@LAYERS
@KERNELS
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_gives_the_same_bits(layer_class, kernel, use_reentrant) -> None:
    fast, _ = pair(layer_class, kernel)
    packed, x, kept = boundaries("packed"), tokens(1, T), []
    for run in (fast, lambda *arguments: checkpoint(fast, *arguments, use_reentrant=use_reentrant)):
        fast.zero_grad()
        leaf = x.clone().requires_grad_()
        output = run(leaf, packed)
        output.float().square().sum().backward()
        kept.append({"output": output, "hidden_states": leaf.grad, **{n: p.grad for n, p in fast.named_parameters()}})
    for name in kept[0]:
        assert torch.equal(kept[0][name], kept[1][name]), name


def test_nothing_is_kept_but_what_is_needed() -> None:
    """Bytes saved for the backward pass outside parameters and input: the projections' buffer, what the kernel takes, its own."""
    fast, _ = pair(Qwen3_5GatedDeltaNet, FlashQLAKernel())
    x, c, kept = tokens(1, T).requires_grad_(), CONFIG, {}
    known = {t.untyped_storage().data_ptr() for t in (x, *fast.parameters())}

    def keep(t: torch.Tensor) -> torch.Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        fast(x)
    total = sum(nbytes for place, nbytes in kept.items() if place not in known)
    projected = c.conv_dim + 2 * c.linear_num_value_heads + c.value_dim
    print(f"{total / T:.0f} bytes a token, of which the projections {2 * projected}")
    assert total < 2.6 * 2 * projected * T


@pytest.fixture
def no_synchronisation() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


@LAYERS
@pytest.mark.parametrize("kernel", [FLAKernel(), FlashQLAKernel(), AutoKernel()], ids=["fla", "flashqla", "auto"])
@pytest.mark.parametrize("kind", ["dense", "packed", "padded", "decode"])
def test_nothing_synchronises(layer_class, kernel, kind, no_synchronisation) -> None:
    fast, _ = pair(layer_class, kernel)
    packed = boundaries(kind)
    x = tokens(1 if packed is not None else 2, 1 if kind == "decode" else T).requires_grad_(kind != "decode")
    upstream, cache = torch.randn_like(x), GatedDeltaNetCache() if kind == "decode" else None

    def call() -> None:
        with torch.set_grad_enabled(kind != "decode"):
            output = fast(x, packed, cache, mask(kind))
        if kind != "decode":
            output.backward(upstream)

    for _ in range(3):
        call()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    call()


def test_autocast() -> None:
    fast, exact = pair(Qwen3_5GatedDeltaNet, AutoKernel())
    layer, x = fast.float(), tokens(1, T).float()

    def run(*arguments):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            assert "projections: fused" in layer.explain(*arguments)
            return layer(*arguments)

    got, want = answers(layer, x, run=run), answers(exact, x.double())
    assert got["output"].dtype == torch.bfloat16
    for name in want:
        assert relative(got[name], want[name]) < 2e-2, name


# ---- decoding ------------------------------------------------------------------------------------------------------


@LAYERS
@pytest.mark.parametrize("kernel", [FLAKernel(), FlashQLAKernel(), AutoKernel()], ids=["fla", "flashqla", "auto"])
@pytest.mark.parametrize("kind", ["dense", "packed"])
@torch.no_grad()
def test_decoding_equals_float64(layer_class, kernel, kind) -> None:
    fast, exact = pair(layer_class, kernel)
    cu_seqlens, cache, exact_cache = boundaries(kind), GatedDeltaNetCache(), GatedDeltaNetCache()
    x = tokens(1 if kind == "packed" else 2, T)
    N = len(LENGTHS) if kind == "packed" else 2
    errors = [relative(fast(x, cu_seqlens, cache), exact(x.double(), cu_seqlens, exact_cache))]
    places = id(cache.conv_state), id(cache.recurrent_state)
    for _ in range(8):
        token = tokens(N, 1)
        errors.append(relative(fast(token, cache=cache), exact(token.double(), cache=exact_cache)))
    if kernel.capabilities.step:
        assert "form: step, states in place" in fast.explain(token, cache=cache)
        assert (id(cache.conv_state), id(cache.recurrent_state)) == places
    errors.append(relative(cache.recurrent_state, exact_cache.recurrent_state))
    errors.append(relative(cache.conv_state, exact_cache.conv_state))
    assert cache.recurrent_state.dtype == torch.float32
    assert cache.conv_state.dtype == torch.bfloat16
    assert max(errors) < 2e-2, errors


@LAYERS
@pytest.mark.parametrize("B", [1, 3, 16, 17])
@torch.no_grad()
def test_decoding_with_and_without_skinny_products(layer_class, B, monkeypatch) -> None:
    """Neither way is further from float64 than the other by more than rounding; which runs is said."""
    fast, exact = pair(layer_class, AutoKernel())
    x, errors = tokens(B, 12), {}
    want = exact(x.double())[:, 4:]
    for way in ("launches", "modules"):
        if way == "modules":
            monkeypatch.setattr(token_products, "why_not_skinny", lambda *_: "modules are wanted")
        cache = GatedDeltaNetCache()
        fast(x[:, :4], cache=cache)
        text = fast.explain(x[:, 4:5], cache=cache)
        launched = "projections: one launch for all input weights, and one for out_proj" in text
        assert launched is (way == "launches" and B <= MAX_ROWS), text
        got = torch.cat([fast(x[:, t : t + 1], cache=cache) for t in range(4, 12)], 1)
        errors[way] = relative(got, want)
    assert max(errors.values()) < 2e-2, errors
    assert errors["launches"] <= 1.1 * errors["modules"] + 1e-4, errors


@LAYERS
def test_splits_of_a_cached_sequence(layer_class) -> None:
    fast, exact = pair(layer_class, AutoKernel())
    x = tokens(2, 20)
    want = exact(x.double())
    for sizes in ((12, 7, 1), (19, 1), (2, 1, 17), (1,) * 20):
        cache = GatedDeltaNetCache()
        with torch.no_grad():
            got = torch.cat([fast(piece, cache=cache) for piece in x.split(sizes, 1)], 1)
        assert relative(got, want) < 2e-2


# ---- graphs and compilation ----------------------------------------------------------------------------------------


def captured(call):
    """A graph of a call that was warmed up on a stream of its own, and what a replay fills."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    return graph, results


@LAYERS
@KERNELS
@pytest.mark.parametrize("kind", ["dense", "packed"])
def test_forward_and_backward_in_a_cuda_graph(layer_class, kernel, kind) -> None:
    fast, _ = pair(layer_class, kernel)
    packed, x = boundaries(kind), tokens(1, T).requires_grad_()
    upstream, inputs = torch.randn_like(x), [x, *fast.parameters()]

    def call() -> list[torch.Tensor]:
        output = fast(x, packed)
        return [output, *torch.autograd.grad(output, inputs, upstream)]

    graph, results = captured(call)
    for _ in range(2):
        with torch.no_grad():
            x.normal_()
        graph.replay()
        for got, want in zip(results, call(), strict=True):
            assert relative(got, want) < 1e-6


@LAYERS
@pytest.mark.parametrize("kernel", [FLAKernel(), AutoKernel()], ids=["fla", "auto"])
@torch.no_grad()
def test_decoding_in_a_cuda_graph(layer_class, kernel) -> None:
    fast, _ = pair(layer_class, kernel)
    cache, token = GatedDeltaNetCache(), tokens(3, 1)
    fast(tokens(3, 17), cache=cache)
    graph, output = captured(lambda: fast(token, cache=cache))
    without = cache.copy()
    for _ in range(10):
        token.normal_()
        graph.replay()
        assert relative(output, fast(token, cache=without)) < 1e-6
    assert relative(cache.recurrent_state, without.recurrent_state) < 1e-6
    assert torch.equal(cache.conv_state, without.conv_state)


def test_the_example() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "cuda_graphs.py")],
        capture_output=True, text=True, timeout=300, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    print(done.stdout)
    assert "form: step, states in place" in done.stdout
    assert done.stdout.count(" in a graph, ") == 3


@LAYERS
def test_compiled_around_a_kernel_that_is_not_compile_safe(layer_class) -> None:
    fast, _ = pair(layer_class, AutoKernel())
    torch._dynamo.reset()
    x, packed = tokens(1, T), boundaries("packed")
    want, got = answers(fast, x, packed), answers(fast, x, packed, run=torch.compile(fast))
    for name in want:
        assert relative(got[name], want[name]) < 1e-2, name


@LAYERS
@torch.no_grad()
def test_decoding_compiled_as_one_graph(layer_class) -> None:
    fast, _ = pair(layer_class, AutoKernel())
    cache = GatedDeltaNetCache()
    fast(tokens(2, 17), cache=cache)
    without, fast.kernel = cache.copy(), TritonKernel()
    torch._dynamo.reset()
    compiled = torch.compile(fast, fullgraph=True)
    for _ in range(3):
        token = tokens(2, 1)
        assert relative(compiled(token, cache=cache), fast(token, cache=without)) < 1e-2
    assert relative(cache.recurrent_state, without.recurrent_state) < 1e-2
