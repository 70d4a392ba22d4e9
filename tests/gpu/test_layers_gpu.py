"""On a GPU: both layers against float64, FLA's modules against their twins, and no synchronisation."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch

from qwenlinear import AutoKernel, FLAKernel, FlashQLAKernel, PackedSequences, TorchKernel
from qwenlinear.layers import (
    GatedDeltaNet,
    GatedDeltaNetCache,
    GatedDeltaNetConfig,
    GatedRMSNorm,
    Qwen3_5GatedDeltaNet,
    Qwen3NextGatedDeltaNet,
    ShortConvolution,
)
from qwenlinear.layers.fused import why_not_fla
from qwenlinear.layers.gated_norm import gated_rms_norm
from qwenlinear.layers.short_conv import short_convolution

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
CONFIG = GatedDeltaNetConfig(hidden_size=256)  # heads 16/32 x 128
LENGTHS = [100, 0, 37, 1, 182]
LAYERS = pytest.mark.parametrize("layer_class", [Qwen3NextGatedDeltaNet, Qwen3_5GatedDeltaNet], ids=["next", "3.5"])
KERNELS = pytest.mark.parametrize("kernel", [FLAKernel(), FlashQLAKernel()], ids=["fla", "flashqla"])


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
    return {"dense": None, "packed": packed, "tensor": packed.cu_seqlens(DEVICE)}[kind]


@LAYERS
@KERNELS
@pytest.mark.parametrize("kind", ["dense", "packed", "tensor", "padded"])
def test_training_equals_float64(layer_class, kernel, kind) -> None:
    fast, exact = pair(layer_class, kernel)
    mask = None
    if kind == "padded":
        mask = torch.ones(2, 320, device=DEVICE, dtype=torch.int64)
        mask[0, :50] = mask[1, 300:] = 0
    cu_seqlens = None if mask is not None else boundaries(kind)
    x = tokens(1 if cu_seqlens is not None else 2, 320)
    fast_x, exact_x = x.clone().requires_grad_(), x.double().requires_grad_()
    want = exact(exact_x, cu_seqlens, attention_mask=mask)
    weights = torch.randn_like(want)
    want.backward(weights)
    got = fast(fast_x, cu_seqlens, attention_mask=mask)
    got.backward(weights.to(got.dtype))
    assert got.dtype == torch.bfloat16
    errors = {"output": relative(got, want), "hidden_states": relative(fast_x.grad, exact_x.grad)}
    for (name, mine), reference in zip(fast.named_parameters(), exact.parameters(), strict=True):
        errors[name] = relative(mine.grad, reference.grad)
    print({name: f"{error:.1e}" for name, error in errors.items()})
    assert max(errors.values()) < 2e-2, errors


@LAYERS
@KERNELS
@pytest.mark.parametrize("kind", ["dense", "packed"])
@torch.no_grad()
def test_decoding_equals_float64(layer_class, kernel, kind) -> None:
    fast, exact = pair(layer_class, kernel)
    cu_seqlens, cache, exact_cache = boundaries(kind), GatedDeltaNetCache(), GatedDeltaNetCache()
    x = tokens(1 if kind == "packed" else 2, 320)
    N = len(LENGTHS) if kind == "packed" else 2
    errors = [relative(fast(x, cu_seqlens, cache), exact(x.double(), cu_seqlens, exact_cache))]
    for _ in range(8):
        token = tokens(N, 1)
        errors.append(relative(fast(token, cache=cache), exact(token.double(), cache=exact_cache)))
    errors.append(relative(cache.recurrent_state, exact_cache.recurrent_state))
    errors.append(relative(cache.conv_state, exact_cache.conv_state))
    assert cache.recurrent_state.dtype == torch.float32
    assert cache.conv_state.dtype == torch.bfloat16
    assert max(errors) < 2e-2, errors


@LAYERS
def test_splits_of_a_cached_sequence(layer_class) -> None:
    fast, exact = pair(layer_class, AutoKernel())
    x = tokens(2, 20)
    want = exact(x.double())
    for sizes in ((12, 7, 1), (19, 1), (2, 1, 17)):
        cache = GatedDeltaNetCache()
        with torch.no_grad():
            got = torch.cat([fast(piece, cache=cache) for piece in x.split(sizes, 1)], 1)
        assert relative(got, want) < 2e-2


@pytest.fixture
def no_synchronisation() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


@LAYERS
@pytest.mark.parametrize("kernel", [FLAKernel(), FlashQLAKernel(), AutoKernel()], ids=["fla", "flashqla", "auto"])
@pytest.mark.parametrize("kind", ["dense", "packed", "padded", "decode"])
def test_nothing_synchronises(layer_class, kernel, kind, no_synchronisation) -> None:
    fast, _ = pair(layer_class, kernel)
    mask = torch.ones(2, 320, device=DEVICE) if kind == "padded" else None
    packed = boundaries("packed") if kind == "packed" else None
    x = tokens(1 if packed is not None else 2, 1 if kind == "decode" else 320).requires_grad_(kind != "decode")
    upstream, cache = torch.randn_like(x), GatedDeltaNetCache() if kind == "decode" else None

    def call() -> None:
        with torch.set_grad_enabled(kind != "decode"):
            output = fast(x, packed, cache, mask)
        if kind != "decode":
            output.backward(upstream)

    for _ in range(2):
        call()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    call()


def skip_without_fla(dtype: torch.dtype) -> None:
    reason = why_not_fla(DEVICE, dtype)
    if reason is not None:
        pytest.skip(reason)


BOUND = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 1e-3}


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("lengths", [None, LENGTHS, [0, 0, 200], [1, 2, 3, 2, 1]], ids=str)
def test_convolution_equals_its_twin(dtype, activation, warm, lengths) -> None:
    skip_without_fla(dtype)
    conv = ShortConvolution(512, 4, activation).to(DEVICE, dtype)
    assert "runs on flash-linear-attention" in repr(conv)
    packed = None if lengths is None else PackedSequences.from_lengths(lengths, device=DEVICE)
    B, T, N = (2, 150, 2) if packed is None else (1, packed.total_tokens, packed.num_sequences)
    x = torch.randn(B, T, 512, device=DEVICE, dtype=dtype)
    state = torch.randn(N, 512, 3, device=DEVICE, dtype=dtype) if warm else None
    answers = []
    for twin in (False, True):
        leaves = [t.double() if twin else t.clone() for t in (x, conv.weight.detach(), *([state] if warm else []))]
        leaves = [leaf.requires_grad_() for leaf in leaves]
        past = leaves[2] if warm else None
        if twin:
            y = short_convolution(leaves[0], leaves[1], activation, past, packed)
        else:
            (y, final) = torch.func.functional_call(conv, {"weight": leaves[1]}, (leaves[0], past, True, packed))
            assert final.shape == (N, 512, 3)
            assert y.dtype == final.dtype == dtype
        torch.manual_seed(1)
        upstream = torch.randn(y.shape, device=DEVICE)
        answers.append((y, *torch.autograd.grad(y, leaves, upstream.to(y.dtype))))
    errors = [relative(got, want) for got, want in zip(*answers, strict=True)]
    assert max(errors) < BOUND[dtype], errors
    rounded = short_convolution(x, conv.weight, activation, state, packed)
    assert rounded.dtype == dtype
    assert relative(rounded, answers[1][0]) < BOUND[dtype]


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("size", [64, 128])
def test_norm_equals_its_twin(dtype, size) -> None:
    skip_without_fla(dtype)
    norm = GatedRMSNorm(size).to(DEVICE, dtype)
    assert "runs on flash-linear-attention" in repr(norm)
    torch.nn.init.normal_(norm.weight, mean=1.0)
    x, gate = torch.randn(2, 2, 70, 32, size, device=DEVICE, dtype=dtype).unbind()
    upstream, answers = torch.randn_like(x), []
    for twin in (False, True):
        leaves = [(t.double() if twin else t.clone()).requires_grad_() for t in (x, gate, norm.weight.detach())]
        if twin:
            y = gated_rms_norm(*leaves, norm.eps)
        else:
            y = torch.func.functional_call(norm, {"weight": leaves[2]}, tuple(leaves[:2]))
            assert y.dtype == dtype
        answers.append((y, *torch.autograd.grad(y, leaves, upstream.to(y.dtype))))
    errors = [relative(got, want) for got, want in zip(*answers, strict=True)]
    assert max(errors) < BOUND[dtype], errors


def test_autocast() -> None:
    fast, exact = pair(Qwen3_5GatedDeltaNet, AutoKernel())
    layer, x = fast.float(), tokens(2, 320).float().requires_grad_()
    exact_x = x.detach().double().requires_grad_()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        got = layer(x)
    want = exact(exact_x)
    weights = torch.randn_like(want)
    got.backward(weights.to(got.dtype))
    want.backward(weights)
    assert got.dtype == torch.bfloat16
    assert relative(got, want) < 2e-2
    assert relative(x.grad, exact_x.grad) < 2e-2
    for (name, mine), reference in zip(layer.named_parameters(), exact.parameters(), strict=True):
        assert relative(mine.grad, reference.grad) < 2e-2, name
