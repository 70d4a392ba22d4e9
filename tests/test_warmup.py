"""warmup: every shape runs, the caches are found where the compilers look, and a new process shows what it saved."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace

import pytest
import torch

from qwenlinear import GatedDeltaKernel, TorchKernel, cli
from qwenlinear.caches import Cache, caches, shipping
from qwenlinear.warmup import _what_to_ship

SIZES = ["--heads", "1/2", "--hidden", "16", "--head-dim", "8", "--device", "cpu", "--dtype", "float32"]


def test_every_shape_runs_and_says_that_a_cpu_compiles_nothing(capsys, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    before = dict(os.environ)
    words = ["--tokens", "8", "--packed", "2x4", "--decode", "1", "3", "--train"]
    assert cli.main(["warmup", *SIZES, *words]) == 0
    out = capsys.readouterr().out
    assert "nothing to compile" in out
    for name in ("T=8, forward ", "T=8, forward and backward", "2 x 4 packed, forward and backward", "decode 3"):
        assert name in out
    assert f"Triton: {tmp_path / 'triton'} TRITON_CACHE_DIR is set 0 files (0 new)" in " ".join(out.split())
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("compiled", "device", "told", "packs"),
    [
        (True, "cpu", "Pack here:", True),
        (False, "cpu", "Nothing was compiled, so there is nothing to ship. Files in the caches are from other runs.", False),
        (False, "cuda", "Nothing new was compiled: these calls found what they need in the caches, or need no compiler.", True),
    ],
)  # fmt: skip
def test_what_to_ship_is_said_by_what_this_run_compiled(tmp_path, compiled, device, told, packs) -> None:
    (tmp_path / "kernel.cubin").write_bytes(b"12345")
    found = (Cache("Triton", "TRITON_CACHE_DIR", tmp_path, True),)
    lines = _what_to_ship(found, compiled, torch.device(device))
    assert " ".join(lines[0].split()) == told
    assert any("tar -C" in line for line in lines) == packs


def test_a_cpu_run_with_full_caches_speaks_of_no_packing(capsys, monkeypatch, tmp_path) -> None:
    for variable in ("TRITON_CACHE_DIR", "TILELANG_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(variable, str(tmp_path))
    (tmp_path / "kernel.cubin").write_bytes(b"12345")
    assert cli.main(["warmup", *SIZES, "--tokens", "8"]) == 0
    out = capsys.readouterr().out
    assert "Nothing was compiled, so there is nothing to ship." in " ".join(out.split())
    assert "Pack here" not in out


class StepOnly(GatedDeltaKernel):
    """A kernel for decoding alone."""

    capabilities = replace(TorchKernel.capabilities, chunk=False, backward=False)
    tolerances = TorchKernel.tolerances

    def _step(self, inputs):
        return TorchKernel()._step(inputs)


def test_a_kernel_without_a_chunked_form_warms_up_decoding(capsys) -> None:
    words = ["--decode", "1", "3", "--qwen-gdn-backend", f"{__name__}:StepOnly"]
    assert cli.main(["warmup", *SIZES, *words]) == 0
    assert "decode 3" in capsys.readouterr().out


def test_what_is_missing_is_said_before_anything_runs(capsys, tmp_path) -> None:
    assert cli.main(["warmup", *SIZES, "--tokens", "8", "--qwen-gdn-backend", "fla"]) == 2
    assert "[device]" in capsys.readouterr().err
    assert cli.main(["warmup", *SIZES]) == 2
    assert "needs a shape" in capsys.readouterr().err
    assert cli.main(["warmup", "--config", str(tmp_path / "none"), "--tokens", "8", "--device", "cpu"]) == 2
    assert "config.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([*SIZES[:-1], "int8", "--tokens", "8"], "--dtype: needs the name of a floating torch dtype, got 'int8'"),
        ([*SIZES, "--tokens", "8", "--verify", "0"], "--verify: needs a number above 0, got '0'"),
        (["--tokens", "8"], "one of the arguments --config --heads is required"),
    ],
)
def test_what_cannot_be_parsed_is_a_usage_error(capsys, words, told) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["warmup", *words])
    assert caught.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("family", "layer"), [("qwen3_next", "Qwen3NextGatedDeltaNet"), ("qwen3_5", "Qwen3_5GatedDeltaNet")]
)
def test_the_layer_is_the_models(capsys, tmp_path, family, layer) -> None:
    sizes = {"hidden_size": 16, "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_conv_kernel_dim": 4}
    sizes |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, **sizes}))
    words = ["--config", str(tmp_path), "--tokens", "4", "--device", "cpu", "--dtype", "float32"]
    assert cli.main(["warmup", *words]) == 0
    assert capsys.readouterr().out.startswith(f"{layer}(")


def test_a_new_process_measures_its_first_step(capsys) -> None:
    assert cli.main(["warmup", *SIZES, "--tokens", "8", "--train", "--verify", "1e-9"]) == 1  # nothing is that fast
    out = " ".join(capsys.readouterr().out.split())
    found = re.search(
        r"A new process: first training step ([\d.]+) s \(the second ([\d.]+) ms\).*more than 1e-09 s", out
    )
    assert found is not None
    assert float(found[2]) > 0


def test_caches_are_where_their_compilers_look(tmp_path) -> None:
    by_default = {cache.variable: cache for cache in caches({"TRITON_HOME": str(tmp_path)})}
    assert by_default["TRITON_CACHE_DIR"].folder == tmp_path / ".triton" / "cache"
    assert not by_default["TRITON_CACHE_DIR"].given
    assert by_default["TILELANG_CACHE_DIR"].folder.parts[-2:] == (".tilelang", "cache")
    given = caches({"TILELANG_CACHE_DIR": str(tmp_path)})[1]
    assert given == Cache("TileLang", "TILELANG_CACHE_DIR", tmp_path, True)


def test_defaults_are_the_compilers_own() -> None:
    cache_dir_utils = pytest.importorskip("torch._inductor.runtime.cache_dir_utils")
    found = {cache.name: str(cache.folder) for cache in caches({})}
    assert found["Inductor"] == cache_dir_utils.default_cache_dir()
    knobs = pytest.importorskip("triton.knobs")
    if "TRITON_CACHE_DIR" not in os.environ and "TRITON_HOME" not in os.environ:
        assert found["Triton"] == os.path.normpath(knobs.cache.dir)


def test_shipping_packs_what_there_is(tmp_path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "kernel.cubin").write_bytes(b"12345")
    full, empty = (Cache("Triton", "TRITON_CACHE_DIR", tmp_path / name, True) for name in ("a", "b"))
    assert full.files() == (1, 5)
    lines = shipping((full, empty))
    assert f"  tar -C {tmp_path / 'a'} -czf triton-cache.tgz ." in lines
    assert any("export TRITON_CACHE_DIR=$PWD/triton-cache" in line for line in lines)
    assert shipping((empty,)) == []
