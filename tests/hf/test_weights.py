"""load_layers reads what save_pretrained wrote, and says everything that does not fit at once."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from qwenlinear import Qwen3_5GatedDeltaNet, Qwen3NextGatedDeltaNet, TorchKernel
from qwenlinear.hf import load_layers

pytest.importorskip("transformers", minversion="5.6")
pytest.importorskip("safetensors")
from safetensors import torch as safetensors_torch

from tests.hf.models import FAMILIES, SIZES, make


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sharded", [False, True])
def test_equal_to_the_models_layers(family, sharded, tmp_path) -> None:
    model = make(family)
    model.save_pretrained(tmp_path, max_shard_size="20KB" if sharded else "1GB")
    assert (tmp_path / "model.safetensors").exists() != sharded
    kernel = TorchKernel()
    layers = load_layers(tmp_path, kernel=kernel)
    assert list(layers) == [0, 1, 3]
    x = torch.randn(2, 7, 32)
    for number, layer in layers.items():
        assert type(layer) is (Qwen3NextGatedDeltaNet if family == "next" else Qwen3_5GatedDeltaNet)
        assert layer.kernel is kernel
        theirs = model.model.layers[number].linear_attn
        assert all(torch.equal(tensor, theirs.state_dict()[name]) for name, tensor in layer.state_dict().items())
        torch.testing.assert_close(layer(x), theirs(x), rtol=1e-5, atol=1e-5)
        assert layer.A_log.requires_grad
    (one,) = load_layers(tmp_path, [3], dtype=torch.bfloat16).values()
    assert one.out_proj.weight.dtype == torch.bfloat16
    assert one.A_log.dtype == torch.float32


def test_a_multimodal_folder_with_further_layers(tmp_path) -> None:
    """Nested config and names as in the released models; layers for multi-token prediction are not the model's."""
    model = make("3.5")
    tensors = {f"model.language_model.{n}": t.clone() for n, t in model.model.state_dict().items()}
    tensors["mtp.layers.0.linear_attn.A_log"] = torch.zeros(1)
    safetensors_torch.save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5", "text_config": SIZES}))
    layers = load_layers(tmp_path)
    assert torch.equal(layers[1].A_log, model.model.layers[1].linear_attn.A_log)


def test_everything_that_does_not_fit_in_one_message(tmp_path) -> None:
    make("3.5").save_pretrained(tmp_path)
    tensors = safetensors_torch.load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.0.linear_attn.A_log"]
    tensors["model.layers.1.linear_attn.gate.weight"] = torch.zeros(2)
    tensors["model.layers.3.linear_attn.dt_bias"] = torch.zeros(5)
    safetensors_torch.save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="need to fit") as error:
        load_layers(tmp_path)
    assert str(error.value).splitlines()[1:] == [
        "  misshapen model.layers.3.linear_attn.dt_bias: needs [4], got [5]",
        "  missing layers.0.linear_attn.A_log [4]",
        "  surplus model.layers.1.linear_attn.gate.weight",
    ]


def test_folders_that_do_not_do(tmp_path) -> None:
    with pytest.raises(ValueError, match="folder with config"):
        load_layers(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    with pytest.raises(ValueError, match="a pickle is never read"):
        load_layers(tmp_path)
    safetensors_torch.save_file({"model.norm.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="got none"):
        load_layers(tmp_path)
    make("3.5").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"\[0, 1, 3\], got \[2\]"):
        load_layers(tmp_path, [0, 2])
    (tmp_path / "model.safetensors").unlink()
    index = {"weight_map": {"model.layers.0.linear_attn.A_log": "model-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="got none of model-1"):
        load_layers(tmp_path)


def test_importing_the_package_imports_no_optional_one() -> None:
    code = "import sys, qwenlinear.hf; print([m for m in ('transformers', 'safetensors', 'peft') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
