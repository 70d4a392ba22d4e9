"""Arguments that do not fit are one ValueError in words of the package, before anything changes; never PyTorch's own error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import qwenlinear.testing as conformance
from qwenlinear import (
    CommMemoryPolicy,
    GatedDeltaNetBlock,
    GatedDeltaNetCache,
    GatedDeltaNetConfig,
    PackedSequences,
    Qwen3_5GatedDeltaNet,
    TorchKernel,
)
from qwenlinear.distributed.process_group import check_policy
from qwenlinear.distributed.registration import check_options, members
from qwenlinear.hf import convert_lora, convert_weights, load_layers, restore
from qwenlinear.layers import GatedRMSNorm, ShortConvolution, ZeroCenteredRMSNorm
from qwenlinear.layers.block import SwiGLU

CONFIG = GatedDeltaNetConfig(
    hidden_size=16, linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8
)
LAYER = Qwen3_5GatedDeltaNet(CONFIG, TorchKernel())
META = torch.zeros(2, dtype=torch.int64, device="meta")
CONV = ShortConvolution(8, 4)
NORM = ZeroCenteredRMSNorm(8)
Q, G = torch.randn(1, 4, 2, 8), -torch.rand(1, 4, 2)
FLAT = {
    "in_proj_qkv.weight": torch.randn(32, 16),
    "in_proj_z.weight": torch.randn(16, 16),
    "in_proj_b.weight": torch.randn(2, 16),
    "in_proj_a.weight": torch.randn(2, 16),
}
A, B = torch.randn(2, 16), torch.randn(32, 2)


def cache(**states: Any) -> GatedDeltaNetCache:
    found = GatedDeltaNetCache()
    with torch.no_grad():
        LAYER(torch.randn(2, 4, 16), cache=found)
    for name, state in states.items():
        setattr(found, name, state)
    return found


def flat(**changes: Any) -> dict[str, Any]:
    return {**FLAT, **{f"in_proj_{name}.weight": tensor for name, tensor in changes.items()}}


CALLS: dict[str, tuple[Callable[[], object], str]] = {
    "form": (lambda: TorchKernel().refusals(Q, Q, Q, G, G, form="both"), "form needs 'chunk' or 'step', got 'both'"),
    "state": (
        lambda: TorchKernel()(Q, Q, Q, G, G, initial_state=[1]),
        "initial_state needs a tensor or None, got list",
    ),
    "require": (lambda: TorchKernel().require("gpu"), "device needs a device such as cpu or cuda:0, got 'gpu'"),
    "unavailable": (lambda: TorchKernel().unavailable(None), "device needs a device such as cpu or cuda:0, got None"),
    "kernel": (lambda: setattr(LAYER, "kernel", "fla"), "kernel needs a GatedDeltaKernel, got 'fla'; kernel_from_name"),
    "lengths on meta": (lambda: PackedSequences.from_lengths(META), "lengths needs a tensor with values"),
    "boundaries on meta": (lambda: PackedSequences.from_cu_seqlens(META), "cu_seqlens needs a tensor with values"),
    "positions on meta": (lambda: PackedSequences.from_position_ids(META), "position_ids needs a tensor with values"),
    "too long": (lambda: PackedSequences.from_lengths([2**31]), "at most 2147483647 tokens together (int32), got 2147"),
    "where": (lambda: PackedSequences.from_lengths([1], device="gpu"), "device needs a device such as cpu or cuda:0"),
    "where to": (lambda: PackedSequences.from_lengths([1]).cu_seqlens("gpu"), "device needs a device such as"),
    "segments": (lambda: PackedSequences.from_lengths([1]).segment_ids("gpu"), "device needs a device such as"),
    "float boundaries": (
        lambda: PackedSequences.from_lengths([1]).cu_seqlens(dtype=torch.float16),
        "dtype needs torch.int32 or torch.int64, got torch.float16",
    ),
    "x": (lambda: CONV([1]), "x needs a tensor, got list"),
    "integer x": (lambda: CONV(torch.ones(1, 5, 8, dtype=torch.int64)), "x needs a floating dtype, got torch.int64"),
    "x elsewhere": (lambda: CONV(torch.ones(1, 5, 8, device="meta")), "x needs the weight's device cpu, got meta"),
    "conv state": (lambda: CONV(torch.ones(1, 5, 8), [1]), "initial_state needs a tensor, got list"),
    "integer conv state": (
        lambda: CONV(torch.ones(1, 5, 8), torch.zeros(1, 8, 3, dtype=torch.int32)),
        "initial_state needs a floating dtype, got torch.int32",
    ),
    "conv state elsewhere": (
        lambda: CONV(torch.ones(1, 5, 8), torch.zeros(1, 8, 3, device="meta")),
        "initial_state needs x's device cpu, got meta",
    ),
    "conv lengths": (lambda: CONV(torch.ones(1, 5, 8), lengths=[5]), "lengths needs a tensor, got list"),
    "activation": (lambda: ShortConvolution(8, 4, ["silu"]), "activation needs None or one of silu"),
    "norm size": (lambda: GatedRMSNorm("8"), "size needs a whole number >= 1, got '8'"),
    "norm eps": (lambda: GatedRMSNorm(8, -1e-6), "eps needs a number > 0, got -1e-06"),
    "zero-centred size": (lambda: ZeroCenteredRMSNorm(0), "size needs a whole number >= 1, got 0"),
    "zero-centred eps": (lambda: ZeroCenteredRMSNorm(8, float("nan")), "eps needs a number > 0, got nan"),
    "norm x": (lambda: NORM(torch.ones(2, 8, dtype=torch.int64)), "x needs a floating dtype, got torch.int64"),
    "norm shape": (lambda: NORM(torch.ones(2, 7)), "x needs 8 as its last dimension, got [2, 7]"),
    "norm scalar": (lambda: NORM(torch.tensor(1.0)), "x needs 8 as its last dimension, got []"),
    "norm elsewhere": (lambda: NORM(torch.ones(2, 8, device="meta")), "x needs the weight's device cpu, got meta"),
    "mlp": (lambda: SwiGLU(8, 2.5), "intermediate_size needs a whole number >= 1, got 2.5"),
    "mlp activation": (lambda: SwiGLU(8, 8, "fast"), "hidden_act needs one of silu"),
    "block elsewhere": (
        lambda: GatedDeltaNetBlock(CONFIG, intermediate_size=8)(torch.ones(1, 2, 16, device="meta")),
        "x needs the weight's device cpu, got meta",
    ),
    "conv_state by hand": (
        lambda: LAYER(torch.ones(2, 1, 16), cache=cache(conv_state=[1])),
        "cache.conv_state needs a",
    ),
    "recurrent_state by hand": (
        lambda: LAYER(torch.ones(2, 1, 16), cache=cache(recurrent_state=torch.tensor(1.0))),
        "cache.recurrent_state needs 4 dimensions, got []",
    ),
    "integer conv_state": (
        lambda: LAYER(torch.ones(2, 1, 16), cache=cache(conv_state=torch.zeros(2, 32, 3, dtype=torch.int64))),
        "cache.conv_state needs a floating dtype, got torch.int64",
    ),
    "weights": (lambda: convert_weights([1], CONFIG, "flat"), "weights needs a mapping of names, got list"),
    "weight names": (lambda: convert_weights({3: A}, CONFIG, "flat"), "weights needs names as its keys, got 3"),
    "weight": (lambda: convert_weights(flat(z=[1]), CONFIG, "fused"), "in_proj_z.weight needs a tensor, got list"),
    "target": (lambda: convert_weights(FLAT, CONFIG, ["flat"]), "target needs one of grouped, flat, fused, got"),
    "columns": (
        lambda: convert_weights(flat(z=torch.ones(16, 15)), CONFIG, "fused"),
        "the projections need one number of columns, got in_proj_qkv.weight (16,), in_proj_z.weight (15,)",
    ),
    "dtypes": (
        lambda: convert_weights(flat(z=torch.ones(16, 16).half()), CONFIG, "fused"),
        "the projections need one dtype, got in_proj_qkv.weight torch.float32, in_proj_z.weight torch.float16",
    ),
    "devices": (
        lambda: convert_weights(flat(z=torch.ones(16, 16, device="meta")), CONFIG, "fused"),
        "the projections need one device, got in_proj_qkv.weight cpu, in_proj_z.weight meta",
    ),
    "adapters": (lambda: convert_lora(None, CONFIG, "fused"), "adapters needs a mapping of names, got NoneType"),
    "pair": (lambda: convert_lora({"in_proj_qkv": (A, B, A)}, CONFIG, "fused"), "in_proj_qkv needs a pair (A, B)"),
    "matrix": (lambda: convert_lora({"in_proj_qkv": (A, [1])}, CONFIG, "fused"), "B of in_proj_qkv needs a tensor"),
    "integers": (
        lambda: convert_lora({"in_proj_qkv": (A.long(), B)}, CONFIG, "fused"),
        "A of in_proj_qkv needs a floating dtype, got torch.int64",
    ),
    "meta adapter": (
        lambda: convert_lora({"in_proj_qkv": (A, B.to("meta"))}, CONFIG, "fused"),
        "B of in_proj_qkv needs a tensor with values",
    ),
    "model": (lambda: restore(None), "model needs an nn.Module, got NoneType"),
    "path": (lambda: load_layers(3), "path needs the path of a folder, got 3"),
    "numbers": (lambda: load_layers("x", layers=3), "layers needs a collection of whole numbers or None, got 3"),
    "words": (lambda: load_layers("x", layers="0"), "layers needs a collection of whole numbers or None, got '0'"),
    "dtype": (lambda: load_layers("x", dtype="bfloat16"), "dtype needs a floating torch dtype or None, got 'bfloat16'"),
    "int8": (lambda: load_layers("x", dtype=torch.int8), "dtype needs a floating torch dtype or None, got torch.int8"),
    "device": (lambda: load_layers("x", device="gpu"), "device needs a device such as cpu or cuda:0, got 'gpu'"),
    "allow": (lambda: CommMemoryPolicy(allow=3), "allow needs a collection of names, got 3"),
    "rule": (lambda: CommMemoryPolicy().rule("all_reduce"), "collective needs a Collective, got 'all_reduce'"),
    "policy": (lambda: check_policy("profiled"), "policy needs a CommMemoryPolicy or None, got 'profiled'"),
    "no ranks": (lambda: members(3, 2), "ranks needs a sequence of whole numbers or None, got 3"),
    "half a rank": (lambda: members([0.5], 2), "ranks needs a sequence of whole numbers or None, got [0.5]"),
    "backend": (lambda: check_options("nickel", None, None, None), "backend needs one of "),
    "timeout": (lambda: check_options("gloo", 30, None, None), "timeout needs a datetime.timedelta or None, got 30"),
    "group_desc": (lambda: check_options("gloo", None, 3, None), "group_desc needs a string or None, got 3"),
    "device_id": (lambda: check_options("gloo", None, None, 0), "device_id needs a torch.device or None, got 0"),
    "packings": (lambda: conformance.check_kernel(TorchKernel(), packings=-1), "packings needs a whole number >= 0"),
    "cases": (
        lambda: conformance.check_kernel(TorchKernel(), cases=["dense"]),
        "cases needs a sequence of Case objects",
    ),
    "a case": (
        lambda: conformance.check_kernel(TorchKernel(), cases=conformance.Case("dense")),
        "got one by itself: [Case('dense')]",
    ),
    "layer": (lambda: conformance.check_layer(nn.Linear(1, 1)), "layer needs a GatedDeltaNet, got Linear("),
}


@pytest.mark.parametrize("name", CALLS)
def test_one_error_in_words(name: str) -> None:
    call, told = CALLS[name]
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # the words are compared below, brackets and all
        call()
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("index", "told"),
    [
        (torch.tensor([2]), "index needs rows from 0 to N-1=1, got 2"),
        (torch.tensor([0, -1]), "index needs rows from 0 to N-1=1, got -1"),
        (torch.tensor([[0]]), "index needs a one-dimensional int32 or int64 tensor, got [1, 1] torch.int64"),
        (torch.tensor([0.0]), "index needs a one-dimensional int32 or int64 tensor, got [1] torch.float32"),
        (torch.tensor([True]), "index needs a one-dimensional int32 or int64 tensor, got [1] torch.bool"),
        ([0], "index needs a one-dimensional int32 or int64 tensor, got list"),
        (META, "index needs the cache's device cpu, got meta"),
    ],
)
def test_reordering_by_a_bad_index_changes_nothing(index: Any, told: str) -> None:
    full = cache()
    before = full.conv_state, full.recurrent_state
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        full.reorder(index)
    assert told in str(caught.value)
    assert full.conv_state is before[0]
    assert full.recurrent_state is before[1]


@pytest.mark.parametrize(
    ("states", "told"),
    [
        ({"conv_state": None}, "cache needs both its states or neither"),
        ({"recurrent_state": [1]}, "cache.recurrent_state needs a tensor, got list"),
        ({"conv_state": torch.zeros(1, 32, 3)}, "cache needs as many rows in both states, got 1 and 2"),
    ],
)
def test_reordering_states_that_do_not_go_together(states: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told.replace("[", r"\[")):
        cache(**states).reorder(torch.tensor([0]))


def test_a_torn_cache_is_not_reordered() -> None:
    torn = cache(_torn=True)
    with pytest.raises(ValueError, match="cache needs whole states"):
        torn.reorder(torch.tensor([0]))


def test_reordering_drops_and_repeats_rows() -> None:
    full = cache()
    conv, recurrent = full.conv_state, full.recurrent_state
    full.reorder(torch.tensor([1, 1, 0], dtype=torch.int32))
    assert torch.equal(full.conv_state, conv[[1, 1, 0]])
    assert torch.equal(full.recurrent_state, recurrent[[1, 1, 0]])
    full.reorder(torch.tensor([], dtype=torch.int64))
    assert full.num_sequences == 0


def test_a_folder_with_broken_files(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    (tmp_path / "config.json").write_text("{nothing")
    with pytest.raises(ValueError, match=r"path needs a readable config\.json, got "):
        load_layers(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(vars(CONFIG)))
    (tmp_path / "model.safetensors").write_text("no tensors")
    with pytest.raises(ValueError, match="path needs files of safetensors, got "):
        load_layers(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ValueError, match="path needs an index with a weight_map, got "):
        load_layers(tmp_path)
