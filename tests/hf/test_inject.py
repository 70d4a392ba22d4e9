"""inject and restore as operations on a model: what stays, what is told, what is refused."""

from __future__ import annotations

import copy
import io
import os
import pathlib
import subprocess
import sys

import pytest
import torch
from packaging.version import Version
from torch import nn

from qwenlinear import FLAKernel, TorchKernel
from qwenlinear.hf import inject, restore

pytest.importorskip("transformers", minversion="5.6")
import transformers

from tests.hf.models import FAMILIES, CountingKernel, make, pair, tokens

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
LAYERS = [f"model.layers.{n}.linear_attn" for n in (0, 1, 3)]


@pytest.mark.parametrize("family", FAMILIES)
def test_everything_stays_the_same_object(family) -> None:
    model = make(family)
    before = {name: (id(p), p.data_ptr(), p.dtype) for name, p in model.named_parameters()}
    modules = {name: (id(m), type(m).__name__) for name, m in model.named_modules()}
    state, text = list(model.state_dict()), {name: type(m) for name, m in model.named_modules()}
    report = inject(model, TorchKernel())
    assert {name: (id(p), p.data_ptr(), p.dtype) for name, p in model.named_parameters()} == before
    assert {name: (id(m), type(m).__name__) for name, m in model.named_modules()} == modules
    assert all(isinstance(m, text[name]) for name, m in model.named_modules())
    assert list(model.state_dict()) == state
    assert not any(isinstance(value, torch.Tensor) for m in model.modules() for value in vars(m).values())
    assert [layer.name for layer in report.injected] == LAYERS
    assert not report.left
    assert restore(model) == 3
    assert {name: type(m) for name, m in model.named_modules()} == text
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    assert restore(model) == 0


def test_no_second_copy_of_a_weight() -> None:
    """No tensor is there after an injection that was not there before."""
    import gc

    model = make("3.5")
    gc.collect()
    before = [
        o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)
    ]  # held, so that no identity is used again
    known = set(map(id, before))
    inject(model, TorchKernel())
    gc.collect()
    assert not [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor) and id(o) not in known]


def test_restored_models_are_untouched() -> None:
    theirs, ours, kernel = pair("3.5")
    restore(ours)
    ids = tokens(2, 7)
    assert torch.equal(ours(ids).logits, theirs(ids).logits)
    assert kernel.chunks == 0


def test_injecting_twice_replaces_the_kernel() -> None:
    _, ours, first = pair("next")
    second = CountingKernel()
    assert len(inject(ours, second).injected) == 3
    ours(tokens(1, 4))
    assert (first.chunks, second.chunks) == (0, 3)
    assert len(ours.model._forward_pre_hooks) == 1
    restore(ours)
    assert not ours.model._forward_pre_hooks


def test_the_report_and_the_model_say_what_runs() -> None:
    model = make("3.5")
    report = inject(model, TorchKernel())
    assert str(report).splitlines() == [
        "3 of 3 Gated DeltaNet layers compute with an injected kernel",
        *(f"  {name}  Qwen3_5GatedDeltaNet  TorchKernel()" for name in LAYERS),
    ]
    assert "kernel=TorchKernel()" in repr(model)
    told = str(inject(model, FLAKernel()))
    assert "note: cannot run on cpu: [" in told
    assert "AutoKernel" in str(inject(model))


def test_what_cannot_be_injected_is_told() -> None:
    model = make("3.5")
    model.model.layers[0].linear_attn.conv1d = nn.Sequential(model.model.layers[0].linear_attn.conv1d)
    model.model.layers[1].linear_attn.forward = lambda *args, **kwargs: None
    report = inject(model, TorchKernel())
    assert [layer.name for layer in report.injected] == LAYERS[2:]
    told = str(report)
    assert "not injected: its conv1d is not a plain nn.Conv1d" in told
    assert "not injected: its forward was replaced on the object" in told
    restore(model)
    model.model.layers[3].linear_attn.activation = "mish"
    with pytest.raises(ValueError, match=r"got none:\n(.*\n)*.*hidden_act needs one of"):
        inject(model, TorchKernel())
    assert not model.model._forward_pre_hooks


def test_a_subclass_with_a_forward_of_its_own_is_left() -> None:
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

    class Own(Qwen3_5GatedDeltaNet):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    model = make("3.5")
    model.model.layers[0].linear_attn = Own(model.config, 0)
    (left,) = inject(model, TorchKernel()).left
    assert "a forward of its own" in left.reason


def test_errors() -> None:
    config = transformers.Qwen3Config(
        vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, head_dim=8
    )
    with pytest.raises(ValueError, match="got Qwen3Model without one"):
        inject(transformers.Qwen3Model(config))
    with pytest.raises(ValueError, match="kernel needs a GatedDeltaKernel"):
        inject(make("3.5"), "fla")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="model needs an"):
        inject("model")  # type: ignore[arg-type]


def test_an_adapter_put_on_the_convolution_later_is_refused() -> None:
    _, ours, _ = pair("3.5")
    layer = ours.model.layers[0].linear_attn
    layer.conv1d = nn.Sequential(layer.conv1d)
    with pytest.raises(ValueError, match="an adapter on it would be dropped"):
        ours(tokens(1, 3))


def test_a_part_of_a_model() -> None:
    theirs, _, _ = pair("3.5")
    layer = copy.deepcopy(theirs.model.layers[0])
    report = inject(layer, TorchKernel())
    assert "position_ids do not reach linear_attn" in str(report)
    x = torch.randn(1, 5, 32)
    torch.testing.assert_close(
        layer(x, position_embeddings=None), theirs.model.layers[0](x, position_embeddings=None), **CLOSE
    )


def test_deepcopy_and_pickle_stay_injected_and_apart() -> None:
    theirs, ours, _ = pair("3.5", TorchKernel())
    buffer = io.BytesIO()
    torch.save(ours, buffer)
    buffer.seek(0)
    ids = tokens(1, 8)
    places = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    want = torch.cat([theirs(part, use_cache=False).logits for part in ids.split([3, 5], 1)], 1)
    for other in (copy.deepcopy(ours), torch.load(buffer, weights_only=False)):
        assert "kernel=TorchKernel()" in repr(other)
        torch.testing.assert_close(other(ids, position_ids=places, use_cache=False).logits, want, **CLOSE)
        assert restore(other) == 3
        assert not other.model._forward_pre_hooks
    assert restore(ours) == 3


@pytest.mark.parametrize("family", FAMILIES)
def test_save_and_load(family, tmp_path) -> None:
    theirs, ours, _ = pair(family)
    theirs.save_pretrained(tmp_path / "theirs")
    ours.save_pretrained(tmp_path / "ours")
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("theirs", "ours")]
    assert files[0] == files[1]
    assert (tmp_path / "theirs/config.json").read_text() == (tmp_path / "ours/config.json").read_text()
    loaded = type(theirs).from_pretrained(tmp_path / "ours", dtype=torch.bfloat16, device_map=None)
    kernel = CountingKernel()
    inject(loaded, kernel)
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    ids = tokens(1, 9)
    exact, got = theirs(ids).logits, loaded(ids).logits
    assert (got - exact).norm() < 0.05 * exact.norm()
    assert kernel.chunks == 3
    ours.load_state_dict(make(family).state_dict())


def test_torch_compile() -> None:
    """Eager backend: the graphs that dynamo takes, with its guards, give the same numbers call after call."""
    theirs, ours, _ = pair("3.5", TorchKernel(), num_hidden_layers=1, layer_types=["linear_attention"])
    compiled = torch.compile(ours, backend="eager")
    with torch.no_grad():
        ids = tokens(1, 6)
        want = theirs(ids, use_cache=False).logits
        torch.testing.assert_close(compiled(ids, use_cache=False).logits, want, **CLOSE)
        places = torch.tensor([[0, 1, 2, 0, 1, 2]])
        want = torch.cat([theirs(part, use_cache=False).logits for part in ids.split(3, 1)], 1)
        torch.testing.assert_close(compiled(ids, position_ids=places, use_cache=False).logits, want, **CLOSE)


def _doubled(module, args, output):
    return 2 * output


class OwnNorm(nn.Module):
    """A norm that somebody put in the gated norm's place."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        assert x.dim() == 2  # as Transformers calls it
        return self.weight * x * torch.sigmoid(gate)


@pytest.mark.parametrize("change", ["hook", "module"])
def test_a_norm_with_more_than_its_weight_is_called(change) -> None:
    """Both in prefill and decoding, where a plain one's weight is read."""
    theirs = make("3.5")
    for name in LAYERS:
        layer = theirs.get_submodule(name)
        if change == "hook":
            layer.norm.register_forward_hook(_doubled)
        else:
            layer.norm = OwnNorm(layer.head_v_dim)
    ours, kernel = copy.deepcopy(theirs), CountingKernel()
    inject(ours, kernel)
    assert f"epilogue=norm {'has hooks' if change == 'hook' else 'is a OwnNorm'}" in repr(ours)
    ids, answers = tokens(2, 6), []
    with torch.no_grad():
        for model in (ours, theirs):
            first = model(ids[:, :5], use_cache=True)
            answers.append((first.logits, model(ids[:, 5:], past_key_values=first.past_key_values).logits))
    assert kernel.steps == 3
    for got, want in zip(*answers, strict=True):
        torch.testing.assert_close(got, want, **CLOSE)


@pytest.mark.parametrize("when", ["before", "after"])
def test_accelerate_hooks(when) -> None:
    """Weights that are on no device until a hook fetches them, laid before and after the injection."""
    hooks = pytest.importorskip("accelerate")
    theirs = make("3.5")
    ours, kernel = copy.deepcopy(theirs), CountingKernel()
    if when == "before":
        hooks.cpu_offload(ours, execution_device=torch.device("cpu"))
    inject(ours, kernel)
    if when == "after":
        hooks.cpu_offload(ours, execution_device=torch.device("cpu"))
    assert ours.model.layers[0].linear_attn.conv1d.weight.is_meta
    ids = tokens(2, 6)
    with torch.no_grad():
        torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, **CLOSE)
        assert kernel.chunks == 3
        restore(ours)
        assert torch.equal(ours(ids).logits, theirs(ids).logits)
    assert kernel.chunks == 3


_WITH_FLA = """
import torch, transformers
torch.set_num_threads(1)
from tests.hf.models import CountingKernel, make, tokens
from qwenlinear.hf import inject
ours, kernel = make("3.5"), CountingKernel()
inject(ours, kernel)
torch.manual_seed(3)
ids = tokens(2, 9)
loss = ours(ids, labels=ids).loss
loss.backward()
grads = sum(p.grad.double().norm() for p in ours.parameters() if p.grad is not None)
generated = ours.generate(ids, do_sample=False, max_new_tokens=4)
print(kernel.chunks, kernel.steps, f"{loss.item():.5f} {grads.item():.4f}", generated[:, 9:].tolist())
try:
    make("3.5")(ids)
    print("untouched runs")
except RuntimeError as error:
    print("untouched:", error)
"""


def test_with_a_package_named_fla_and_without(tmp_path) -> None:
    """Transformers takes its kernels from whatever `fla` there is; an injected model does not."""
    package = tmp_path / "fla"
    failing = "".join(
        f"def {name}(query, key, value, **kwargs):\n    raise RuntimeError('0 active drivers ([])')\n"
        for name in ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule")
    )
    for name in ("__init__", "ops/__init__", "ops/gated_delta_rule", "modules/__init__"):
        file = package / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("__version__ = '0.6.0'\n" + (failing if name == "ops/gated_delta_rule" else ""))
    for name in ("fla_core", "flash_linear_attention"):
        metadata = tmp_path / f"{name}-0.6.0.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 0.6.0\n")
    root = str(pathlib.Path(__file__).parents[2])
    answers = []
    for extra in ([], [str(tmp_path)]):
        path = os.pathsep.join([root, *extra, *filter(None, [os.environ.get("PYTHONPATH")])])
        done = subprocess.run(
            [sys.executable, "-c", _WITH_FLA],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            cwd=root,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        answers.append(done.stdout.split("\n"))
    assert answers[0][0] == answers[1][0]
    assert answers[0][0].startswith("6 9 ")
    assert answers[0][1] == "untouched runs"
    if Version(transformers.__version__) >= Version("5.24"):  # older ones look for a GPU first
        assert answers[1][1] == "untouched: 0 active drivers ([])"
