"""GatedDeltaNet: packing, kernel contract, dtypes, words and errors."""

from __future__ import annotations

import dataclasses
import itertools
import re
import sys

import pytest
import torch

from qwenlinear.errors import UnsupportedCall
from qwenlinear.kernels import AutoKernel, GatedDeltaKernel, KernelCapabilities, PackedSequences, Tolerance, TorchKernel
from qwenlinear.layers import (
    GatedDeltaNet,
    GatedDeltaNetCache,
    GatedDeltaNetConfig,
    Qwen3_5GatedDeltaNet,
    Qwen3NextGatedDeltaNet,
    explain,
    mixing,
    projection,
)
from qwenlinear.ops.available import why_not_these_sizes

CLOSE = {"rtol": 1e-9, "atol": 1e-11}


def rand(*shape: int, dtype: torch.dtype = torch.float64, grad: bool = False) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=grad)


def gradients(layer, outputs, inputs, seed=3):
    torch.manual_seed(seed)
    loss = sum((output * torch.randn_like(output)).sum() for output in outputs)
    return torch.autograd.grad(loss, [*inputs, *layer.parameters()])


# ---- packed documents ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [[5, 7], [1, 2, 9], [0, 5, 0, 7], [12], [4, 4, 4, 0], [0, 0, 12]], ids=str)
def test_packed_equals_each_document_alone(make_layer, lengths) -> None:
    layer = make_layer()
    x = rand(1, 12, 32, grad=True)
    packed = PackedSequences.from_lengths(lengths)
    got, cache = layer(x, cu_seqlens=packed), GatedDeltaNetCache()
    assert got.shape == x.shape
    want = torch.cat([layer(document) for document in x.split(lengths, 1)], 1)
    torch.testing.assert_close(got, want, **CLOSE)
    for a, b in zip(gradients(layer, [got], [x]), gradients(layer, [want], [x]), strict=True):
        torch.testing.assert_close(a, b, **CLOSE)
    torch.testing.assert_close(layer(x, packed.cu_seqlens(dtype=torch.int64), cache), want, **CLOSE)
    assert cache.num_sequences == len(lengths)


def test_nothing_of_one_document_reaches_another(make_layer) -> None:
    layer = make_layer()
    x = rand(1, 12, 32)
    cu_seqlens = torch.tensor([0, 5, 12])
    want = layer(x, cu_seqlens=cu_seqlens)
    poisoned = x.clone()
    poisoned[:, :5] = float("nan")
    assert torch.equal(layer(poisoned, cu_seqlens=cu_seqlens)[:, 5:], want[:, 5:])
    x.requires_grad_()
    (grad,) = torch.autograd.grad(layer(x, cu_seqlens=cu_seqlens)[:, 5:].square().sum(), x)
    assert (grad[:, :5] == 0).all()
    assert (grad[:, 5:] != 0).all()


def test_mask_and_boundaries_in_every_combination(make_layer) -> None:
    """cases.md 1."""
    layer = make_layer()
    x, cu_seqlens, ones = rand(1, 12, 32), torch.tensor([0, 5, 12]), torch.ones(1, 12)
    contradicts = torch.tensor([[0] * 6 + [1] * 6])
    for mask in (ones, contradicts, ones.bool(), ones.long()):
        for boundaries in (cu_seqlens, PackedSequences.from_cu_seqlens(cu_seqlens)):
            with pytest.raises(ValueError, match="attention_mask and cu_seqlens"):
                layer(x, cu_seqlens=boundaries, attention_mask=mask)
    with pytest.raises(ValueError, match="attention_mask and cu_seqlens"), torch.device("meta"):
        layer.to("meta")(x.to("meta"), cu_seqlens=cu_seqlens, attention_mask=ones.to("meta"))
    layer = make_layer()
    neither, masked, packed = layer(x), layer(x, attention_mask=ones), layer(x, cu_seqlens=cu_seqlens)
    assert neither.shape == masked.shape == packed.shape == (1, 12, 32)
    assert torch.equal(neither, masked)
    assert not torch.allclose(neither, packed)


def test_empty_documents_keep_their_states(make_layer) -> None:
    """cases.md 3: as if they were absent; the final state is the initial one, gradient included."""
    layer = make_layer()
    for bounds in ([0, 0, 5, 5, 9], [0, 5, 5, 9, 9], [0, 0, 0, 4, 9], [0, 0, 0, 0, 0]):
        lengths = [b - a for a, b in itertools.pairwise(bounds)]
        x, cache = rand(1, bounds[-1], 32, grad=True), GatedDeltaNetCache()
        cache.conv_state = conv = rand(4, 64, 3, grad=True)
        cache.recurrent_state = state = rand(4, 4, 8, 8, grad=True)
        got = layer(x, cu_seqlens=torch.tensor(bounds), cache=cache)
        alone = []
        for n, document in enumerate(x.split(lengths, 1)):
            one = GatedDeltaNetCache()
            one.conv_state, one.recurrent_state = conv[n : n + 1], state[n : n + 1]
            if lengths[n]:
                alone.append(layer(document, cache=one))
            else:
                assert torch.equal(cache.conv_state[n], conv[n])
                assert torch.equal(cache.recurrent_state[n], state[n])
                (d,) = torch.autograd.grad(cache.recurrent_state[n].sum(), state, retain_graph=True)
                assert torch.equal(d[n], torch.ones_like(d[n]))
                assert d.sum() == d[n].sum()
            torch.testing.assert_close(cache.recurrent_state[n : n + 1], one.recurrent_state, **CLOSE)
            torch.testing.assert_close(cache.conv_state[n : n + 1], one.conv_state, **CLOSE)
        if alone:
            torch.testing.assert_close(got, torch.cat(alone, 1), **CLOSE)


@pytest.mark.parametrize("shape", [(2, 0, 32), (0, 4, 32), (1, 0, 32)])
def test_no_tokens(make_layer, shape) -> None:
    layer = make_layer()
    x, cache = rand(*shape, grad=True), GatedDeltaNetCache()
    output = layer(x, cache=cache)
    assert output.shape == shape
    output.sum().backward()
    assert x.grad.shape == shape
    assert cache.conv_state.shape == (shape[0], 64, 3)
    assert not cache.recurrent_state.any()
    mask = torch.ones(shape[:2])
    assert layer(x, attention_mask=mask).shape == shape
    if shape[0] == 1:
        assert layer(x, cu_seqlens=torch.tensor([0, 0])).shape == shape
        assert layer(x, cu_seqlens=torch.tensor([0, 0, 0])).shape == shape


def test_no_tokens_in_a_warm_cache_change_nothing(make_layer) -> None:
    layer, cache = make_layer(), GatedDeltaNetCache()
    layer(rand(2, 3, 32), cache=cache)
    before = cache.copy()
    layer(rand(2, 0, 32), cache=cache)
    assert torch.equal(cache.conv_state, before.conv_state)
    assert torch.equal(cache.recurrent_state, before.recurrent_state)


def test_boundaries_rewritten_in_place_are_read_anew(make_layer) -> None:
    """cases.md 11, seen from a layer."""
    layer, x, cu = make_layer(), rand(1, 10, 32), torch.tensor([0, 4, 10])
    for context in (torch.enable_grad(), torch.inference_mode()):
        with context:
            cu.copy_(torch.tensor([0, 4, 10]))
            layer(x, cu_seqlens=cu)
            cu.copy_(torch.tensor([0, 7, 10]))
            got = layer(x, cu_seqlens=cu)
        want = torch.cat([layer(x[:, :7]), layer(x[:, 7:])], 1)
        torch.testing.assert_close(got, want, **CLOSE)


# ---- what the kernel gets ------------------------------------------------------------------------------------------


def test_the_kernel_gets_what_it_is_promised(make_layer, recording_kernel) -> None:
    layer = make_layer(recording_kernel, torch.float32)
    packed = PackedSequences.from_lengths([5, 7])
    x = rand(1, 12, 32, dtype=torch.float32)
    layer(x, cu_seqlens=packed)
    form, inputs = recording_kernel.calls.pop()
    assert form == "chunk"
    assert (inputs.q.shape, inputs.k.shape, inputs.v.shape) == ((1, 12, 2, 8), (1, 12, 2, 8), (1, 12, 4, 8))
    assert inputs.g.shape == inputs.beta.shape == (1, 12, 4)
    assert inputs.use_qk_l2norm_in_kernel
    assert not inputs.output_final_state
    assert inputs.initial_state is None
    assert inputs.cu_seqlens is packed
    assert inputs.scale == 8**-0.5
    assert ((inputs.beta > 0) & (inputs.beta < 1)).all()
    assert (inputs.g < 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_gate_is_wide_and_qkv_share_a_dtype(make_layer, recording_kernel, dtype) -> None:
    """cases.md 8: T = 4096 with a decay near 1; the kernel receives float32 g that bfloat16 could not hold."""
    layer = make_layer(recording_kernel).to(dtype)
    with torch.no_grad():
        layer.A_log.fill_(-9.0)
    x = rand(1, 4096 if dtype == torch.bfloat16 else 64, 32, dtype=dtype)
    with torch.no_grad():
        output = layer(x)
    (_, inputs) = recording_kernel.calls.pop()
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert inputs.q.dtype == inputs.k.dtype == inputs.v.dtype == output.dtype == dtype
    assert inputs.g.dtype == wide
    assert output.isfinite().all()
    assert (inputs.g < 0).all()
    if dtype == torch.bfloat16:
        kept = inputs.g.exp()
        assert ((kept < 1) & (kept > 0.999)).all()
        assert (kept.to(dtype) == 1).all()  # why the gate may not follow the layer's dtype


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("T", [0, 1, 2])
@pytest.mark.parametrize("grad", [False, True])
def test_step_is_for_one_cached_token_without_gradients(make_layer, recording_kernel, cached, T, grad) -> None:
    layer, cache = make_layer(recording_kernel), GatedDeltaNetCache() if cached else None
    with torch.set_grad_enabled(grad):
        layer(rand(2, T, 32), cache=cache)
    form, inputs = recording_kernel.calls.pop()
    assert form == ("step" if cached and T == 1 and not grad else "chunk")
    assert inputs.output_final_state is cached


def test_packed_single_tokens_step_too(make_layer, recording_kernel) -> None:
    layer, cache = make_layer(recording_kernel), GatedDeltaNetCache()
    with torch.no_grad():
        layer(rand(1, 6, 32), cu_seqlens=torch.tensor([0, 2, 6]), cache=cache)
        layer(rand(1, 2, 32), cu_seqlens=torch.tensor([0, 1, 2]), cache=cache)
        layer(rand(1, 2, 32), cu_seqlens=torch.tensor([0, 0, 2]), cache=cache)
    assert [form for form, _ in recording_kernel.calls] == ["chunk", "step", "chunk"]


class ChunkOnly(GatedDeltaKernel):
    capabilities = KernelCapabilities(
        dtypes=frozenset({torch.float64}), devices=None, chunk=True, initial_state=True, final_state=True
    )
    tolerances = {torch.float64: Tolerance(1e-9, 1e-9, 1e-9)}

    def _chunk(self, inputs):
        return TorchKernel()._chunk(inputs)


def test_a_kernel_without_step_decodes_in_chunks(make_layer) -> None:
    x, outputs = rand(2, 3, 32), []
    for kernel in (ChunkOnly(), TorchKernel()):
        layer, cache = make_layer(kernel), GatedDeltaNetCache()
        with torch.no_grad():
            outputs.append(torch.cat([layer(t, cache=cache) for t in x.split(1, 1)], 1))
    torch.testing.assert_close(*outputs, **CLOSE)


def test_a_refusal_reaches_the_user(make_layer) -> None:
    layer, cache = make_layer(ChunkOnly()), GatedDeltaNetCache()
    with pytest.raises(UnsupportedCall) as caught:
        layer(rand(1, 4, 32), cu_seqlens=torch.tensor([0, 2, 4]), cache=cache)
    assert {refusal.code for refusal in caught.value.refusals} == {"packed", "backward"}
    assert cache.conv_state is None


def test_value_heads_are_grouped_by_key_head(layer_class) -> None:
    """cases.md 10 through a layer: H=2, HV=6, K=8, V=4; value head j uses key head j // 3."""
    config = GatedDeltaNetConfig(
        hidden_size=32,
        linear_num_key_heads=2,
        linear_num_value_heads=6,
        linear_key_head_dim=8,
        linear_value_head_dim=4,
    )
    layer = layer_class(config, TorchKernel()).double()
    x = rand(2, 7, 32)
    parts = layer._project(x)
    q, v, z = parts.qkv[..., :16].unflatten(-1, (2, 8)), parts.qkv[..., 32:].unflatten(-1, (6, 4)), parts.z()
    assert (parts.qkv.shape, z.shape, parts.b.shape, parts.a.shape) == ((2, 7, 56), (2, 7, 6, 4), (2, 7, 6), (2, 7, 6))
    if layer_class is Qwen3NextGatedDeltaNet:
        rows = layer.in_proj_qkvz.weight.view(2, 2 * 8 + 2 * 3 * 4, 32)
        for j in range(6):
            h, i = divmod(j, 3)
            torch.testing.assert_close(v[:, :, j], x @ rows[h, 16 + 4 * i : 20 + 4 * i].t())
            torch.testing.assert_close(z[:, :, j], x @ rows[h, 28 + 4 * i : 32 + 4 * i].t())
        torch.testing.assert_close(q[:, :, 1], x @ rows[1, :8].t())
    want, cache = layer(x), GatedDeltaNetCache()
    with torch.no_grad():
        torch.testing.assert_close(torch.cat([layer(t, cache=cache) for t in x.split(1, 1)], 1), want, **CLOSE)
    for heads in ({"linear_num_key_heads": 4, "linear_num_value_heads": 2}, {"linear_num_value_heads": 3}):
        with pytest.raises(ValueError, match="multiple of linear_num_key_heads"):
            layer_class({**vars(config), **heads})


def test_the_layouts_compute_the_same_layer(config) -> None:
    """A Qwen3-Next layer whose grouped rows are a Qwen3.5 layer's rows in another order."""
    flat, grouped = Qwen3_5GatedDeltaNet(config, TorchKernel()), Qwen3NextGatedDeltaNet(config, TorchKernel())
    q, k, v = flat.in_proj_qkv.weight.data.split([16, 16, 32])
    z = flat.in_proj_z.weight.data
    qkvz = torch.cat([x.view(2, -1, 32) for x in (q, k, v, z)], 1).flatten(0, 1)
    ba = torch.cat([x.weight.data.view(2, -1, 32) for x in (flat.in_proj_b, flat.in_proj_a)], 1).flatten(0, 1)
    shared = {name: value for name, value in flat.state_dict().items() if not name.startswith("in_proj")}
    grouped.load_state_dict({**shared, "in_proj_qkvz.weight": qkvz, "in_proj_ba.weight": ba})
    x = torch.randn(2, 9, 32)
    torch.testing.assert_close(grouped(x), flat(x), rtol=1e-5, atol=1e-6)


# ---- words and errors ----------------------------------------------------------------------------------------------


def test_repr_shows_kernel_and_implementations(make_layer) -> None:
    text = repr(make_layer())
    assert "hidden_size=32, heads=2/4 x 8/8, kernel=TorchKernel()" in text
    assert (
        "projections=called (tensors on cpu), prologue=PyTorch (tensors on cpu), epilogue=PyTorch (tensors on cpu)"
    ) in text
    assert "GatedRMSNorm(8, eps=1e-06, runs in PyTorch: tensors on cpu)" in text


def test_a_norm_that_was_replaced_is_what_runs(make_layer) -> None:
    layer = make_layer()
    layer.norm = torch.nn.Identity()
    assert "epilogue: norm is a Identity" in layer.explain(rand(1, 12, 32))
    assert "epilogue=norm is a Identity" in repr(layer)


@pytest.mark.parametrize(
    ("V", "runs"), [(8, "fused"), (12, "fused"), (300, "PyTorch (a norm over 300, more than 256)")]
)
def test_the_epilogue_depends_on_the_size_of_a_head(layer_class, config, monkeypatch, V, runs) -> None:
    def sizes_alone(device, dtype, norm_size):
        return why_not_these_sizes("silu", 1, (), norm_size)

    monkeypatch.setattr(explain, "why_not_fused", sizes_alone)
    layer = layer_class(dataclasses.replace(config, linear_value_head_dim=V), TorchKernel())
    assert f"epilogue: {runs}" in layer.explain(torch.empty(1, 12, 32))
    assert f"epilogue={runs}" in repr(layer)


class Quantised(torch.nn.Module):
    """Stands for a projection whose weight is no floating tensor."""

    weight = torch.zeros(8, 32, dtype=torch.int8)


def test_repr_is_of_a_call_in_the_projections_dtype(make_layer, monkeypatch) -> None:
    """Others keep norms in float32, and some quantise projections."""

    def in_bfloat16(device, dtype, **sizes):
        return None if dtype == torch.bfloat16 else str(dtype)

    for module in (explain, mixing):
        monkeypatch.setattr(module, "why_not_fused", in_bfloat16)
    layer = make_layer(dtype=torch.float32).to("meta").bfloat16()
    layer.norm.float()
    assert "projections=fused, prologue=fused, epilogue=fused" in repr(layer)
    first, *others = projection.projection_names(layer)
    getattr(layer, first).float()
    assert "projections=called (weights and input are of several dtypes)" in repr(layer)
    setattr(layer, first, Quantised())
    assert f"projections=called ({first} is a Quantised), prologue=fused, epilogue=fused" in repr(layer)
    for name in others:
        setattr(layer, name, Quantised())
    assert "prologue=fused, epilogue=fused" in repr(layer)  # what the output projection takes
    layer.out_proj.float()
    assert "prologue=PyTorch (torch.float32), epilogue=PyTorch (torch.float32)" in repr(layer)


def test_explain(make_layer, recording_kernel) -> None:
    layer = make_layer(recording_kernel)
    x = rand(1, 12, 32)
    text = layer.explain(x, cu_seqlens=torch.tensor([0, 5, 12]))
    for words in (
        "projections: modules called: on a cpu that is faster",
        "prologue: PyTorch (tensors on cpu)",
        "epilogue: PyTorch (tensors on cpu)",
        "padding: none",
        "form: chunk",
        "RecordingKernel(): B=1 T=12 H=2 HV=4 K=8 V=8, float64 on cpu, packed N=2, with gradients",
    ):
        assert words in text, text
    cache = GatedDeltaNetCache()
    with torch.no_grad():
        assert "form: step, new states: the cache is empty" in layer.explain(x[:, :1], cache=cache)
        assert "rotated" in layer.explain(x, attention_mask=torch.ones(1, 12))
    assert not recording_kernel.calls
    assert cache.conv_state is None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert "bfloat16 on cpu" in make_layer(dtype=torch.float32).explain(x.float()).splitlines()[6]


def test_the_default_kernel_is_automatic(layer_class, config) -> None:
    layer = layer_class(config)
    assert isinstance(layer.kernel, AutoKernel)
    assert layer(rand(1, 3, 32, dtype=torch.float32)).shape == (1, 3, 32)
    assert "kernel=AutoKernel([FlashQLAKernel(" in repr(layer)
    text = layer.explain(rand(1, 3, 32, dtype=torch.float32))
    assert "goes to TorchKernel()" in text
    assert "FLAKernel()" in text


def test_the_shared_layer_is_abstract(config) -> None:
    with pytest.raises(TypeError, match="abstract"):
        GatedDeltaNet(config)


BAD_CALLS = [
    (lambda x: (x[0],), r"hidden_states needs shape \[B, T, 32\], got \[4, 32\]"),
    (lambda x: (x[..., :31],), r"hidden_states needs shape \[B, T, 32\], got \[2, 4, 31\]"),
    (lambda x: (x.long(),), "hidden_states needs a floating dtype, got torch.int64"),
    (lambda x: (x.float(),), "hidden_states needs the weights' dtype torch.float64, or autocast; got torch.float32"),
    (lambda x: (x.tolist(),), "hidden_states needs a tensor, got list"),
    (lambda x: (x.to("meta"),), "hidden_states needs the layer's device cpu, got meta"),
    (lambda x: (x, torch.tensor([0, 4])), "cu_seqlens needs a batch of one, got B=2"),
    (lambda x: (x[:1], torch.tensor([0, 5])), "cu_seqlens needs to end at T=4, got 5"),
    (lambda x: (x[:1], torch.tensor([0, 3, 2, 4])), "cu_seqlens needs to rise or stay"),
    (lambda x: (x[:1], torch.tensor([0.0, 4.0])), "cu_seqlens needs a one-dimensional int32 or int64 tensor"),
    (lambda x: (x[:1], [0, 4]), "cu_seqlens needs a tensor or a PackedSequences, got list"),
    (lambda x: (x[:1], PackedSequences.from_lengths([3])), "cu_seqlens needs to end at T=4, got 3"),
    (lambda x: (x, None, {}), "cache needs a GatedDeltaNetCache, got dict"),
    (lambda x: (x, None, None, torch.ones(2, 3)), r"attention_mask needs shape \[2, 4 or longer\], got \[2, 3\]"),
    (lambda x: (x, None, None, torch.ones(3, 4)), r"attention_mask needs shape \[2, 4 or longer\], got \[3, 4\]"),
    (lambda x: (x, None, None, torch.ones(2, 1, 4, 4)), "attention_mask needs shape"),
    (lambda x: (x, None, None, [[1] * 4] * 2), "attention_mask needs a tensor, got list"),
    (lambda x: (x, None, None, torch.ones(2, 4, device="meta")), "attention_mask needs hidden_states' device cpu"),
    (lambda x: (x, None, None, torch.tensor([[1, 1, 1, 1], [1, 0, 1, 1]])), "side by side, got padding .* in row 1"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_CALLS, ids=[m[:40] for _, m in BAD_CALLS])
def test_bad_calls_stop_before_anything_runs(make_layer, recording_kernel, arguments, message) -> None:
    layer = make_layer(recording_kernel)
    layer._project = None  # would fail if it were reached
    call = arguments(rand(2, 4, 32))
    for run in (layer, layer.explain):
        with pytest.raises(ValueError, match=message):
            run(*call)


@pytest.mark.parametrize("kernel", ["fla", TorchKernel, object()])
def test_a_kernel_that_is_none(layer_class, config, kernel) -> None:
    with pytest.raises(ValueError, match=r"kernel needs a GatedDeltaKernel or None, got .*kernel_from_name"):
        layer_class(config, kernel)


def test_optional_packages_may_be_unimportable(make_layer, monkeypatch) -> None:
    """cases.md 2 through a layer."""
    layer, x, cu = make_layer(dtype=torch.float32), rand(1, 8, 32, dtype=torch.float32), torch.tensor([0, 3, 8])
    before = layer(x, cu)
    for name in ("fla", "fla.modules", "fla.ops", "flash_qla", "causal_conv1d", "triton", "transformers"):
        monkeypatch.setitem(sys.modules, name, None)
    after = layer(x, cu)
    assert after.dtype == before.dtype
    assert torch.equal(before, after)


def test_transformers_is_never_imported() -> None:
    import subprocess

    code = (
        "import sys, torch, qwenlinear.layers as l; x = torch.randn(1, 3, 8);"
        "c = dict(hidden_size=8, linear_num_key_heads=1, linear_num_value_heads=1, linear_key_head_dim=4,"
        "linear_value_head_dim=4, linear_conv_kernel_dim=4); l.Qwen3NextGatedDeltaNet(c)(x);"
        "print([m for m in sys.modules if m.split('.')[0] in ('transformers', 'fla', 'flash_qla')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert re.fullmatch(r"\[\]\s*", done.stdout), done.stdout
