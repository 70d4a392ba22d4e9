"""bench layer and bench decode: peers with the same weights, a gate that keeps wrong ones out, a floor that adds up."""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from dataclasses import replace

import pytest
import torch

from qwenlinear import GatedDeltaNetConfig, PackedSequences, TorchKernel, cli
from qwenlinear.bench import decode, decode_report, layer, layer_gate, layer_report, ops
from qwenlinear.bench.cases import Case
from qwenlinear.bench.composition import parts_of
from qwenlinear.bench.decode_contenders import OfTransformers, decoders
from qwenlinear.bench.floor import FORMULAS, Sizes, copying, products
from qwenlinear.bench.layer_contenders import KINDS, Composition, FLALayer, Ours, Setup, Transformers, contenders
from qwenlinear.bench.layer_contenders import _as_fla as as_fla
from qwenlinear.bench.peak import peak_bytes
from qwenlinear.bench.session import Session
from qwenlinear.bench.timing import Timing
from qwenlinear.layers.projection import why_not_faster

CPU = torch.device("cpu")
SIZES = ["--hidden", "16", "--heads", "1/2", "--head-dim", "8", "--rounds", "3", "--device", "cpu"]
CONFIG = GatedDeltaNetConfig(
    hidden_size=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
)
HERE = __name__


class Wrong(TorchKernel):
    """Lets a little of the token before through; its norm alone would not tell."""

    def _chunk(self, inputs):
        o, state = super()._chunk(inputs)
        return o + 0.1 * o.roll(1, 1), state

    def _step(self, inputs):
        o, state = super()._step(inputs)
        return o + 0.1 * o.roll(1, 2), state


class Leaky(TorchKernel):
    """Right on one sequence, forgets boundaries."""

    def _chunk(self, inputs):
        return super()._chunk(replace(inputs, cu_seqlens=None))


class Slow(TorchKernel):
    """Right, and 20 ms late."""

    def _chunk(self, inputs):
        time.sleep(0.02)
        return super()._chunk(inputs)


class Fails(TorchKernel):
    """Right on little, falls over on more."""

    def _chunk(self, inputs):
        if inputs.q.shape[1] > 256:
            raise RuntimeError("out of luck")
        return super()._chunk(inputs)


def _run(bench: str, out, *words: str) -> tuple[int, dict]:
    status = cli.main(["bench", bench, *SIZES, "--out", str(out), *words])
    return status, json.loads((out / f"{bench}.json").read_text())


def _setup(dtype=torch.float32) -> Setup:
    return Setup.draw(CONFIG, CPU, dtype)


# ---- who is right --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_gate_lets_right_layers_in(dtype) -> None:
    setup = _setup(dtype)
    for one in contenders(["composition", "called", "ours"], ["torch"]):
        row = layer_gate.check(one, one.build(setup), setup)
        assert row["passed"] == ["dense", "packed"], row
        assert 0 < max(row["dense"], row["packed"]) <= 1


def test_the_gate_lets_transformers_in() -> None:
    pytest.importorskip("transformers")
    setup, one = _setup(), Transformers()
    assert layer_gate.check(one, one.build(setup), setup)["passed"] == ["dense", "packed"]


def test_the_gate_keeps_wrong_layers_out() -> None:
    setup = _setup()
    for kind in (Ours(f"{HERE}:Wrong", called=False), Composition(f"{HERE}:Wrong")):
        row = layer_gate.check(kind, kind.build(setup), setup)
        assert row["passed"] == []
        assert row["dense"] > 1
    leaky = Ours(f"{HERE}:Leaky", called=False)
    assert layer_gate.check(leaky, leaky.build(setup), setup)["passed"] == ["dense"]


def test_a_wrong_gradient_is_found_by_its_name() -> None:
    setup, one = _setup(), Ours("torch", called=False)
    module = one.build(setup)
    module.in_proj_b.weight.register_hook(lambda gradient: 1.1 * gradient)
    row = layer_gate.check(one, module, setup)
    assert row["passed"] == []
    assert set(row["worst"].values()) == {"in_proj_b.weight"}


def test_what_is_timed_on_a_gpu_is_what_was_checked() -> None:
    """The layer's fused projections begin at a number of tokens; a shorter check would never see it."""
    where, lengths = torch.device("cuda"), layer_gate.lengths_on(torch.device("cuda"))
    assert len(lengths["dense"]) == 1
    assert lengths["packed"][:5] == layer_gate.PACKED
    for kind in ("dense", "packed"):
        assert why_not_faster(where, sum(lengths[kind])) is None
        assert why_not_faster(CPU, sum(layer_gate.lengths_on(CPU)[kind])) is not None


def test_float64_truths_agree() -> None:
    setup, lengths = _setup(), (3, 130)
    x, packed = layer_gate.draw(setup, sum(lengths)), PackedSequences.from_lengths(lengths)
    plain, ours = layer_gate.plain_truth(setup, x, lengths), layer_gate.layer_truth(setup, x, packed)
    assert plain.keys() == ours.keys() == {"output", "hidden_states", *setup.weights}
    for name, right in plain.items():
        torch.testing.assert_close(ours[name], right, rtol=1e-8, atol=1e-8)


def test_plain_means_that_the_modules_are_called() -> None:
    setup, one = _setup(), Ours("torch", called=True)
    module = one.build(setup)
    assert all(module.get_submodule(f"in_proj_{part}")._forward_hooks for part in ("qkv", "z", "b", "a"))


def test_weights_go_into_flas_layer_under_its_names_and_gradients_come_back() -> None:
    setup = _setup()
    named = as_fla(CONFIG, setup.weights)
    expected = {f"{n}_proj.weight" for n in "qkvgbao"} | {f"{n}_conv1d.weight" for n in "qkv"}
    assert named.keys() == expected | {"A_log", "dt_bias", "o_norm.weight"}
    back = FLALayer().renamed(named)
    assert back.keys() == setup.weights.keys()
    assert all(torch.equal(back[name], value) for name, value in setup.weights.items())
    with pytest.raises(RuntimeError, match="needs a GPU"):
        FLALayer().build(setup)


def test_contenders_by_kind_and_kernel() -> None:
    names = [one.name for one in contenders(list(KINDS), ["flashqla", "torch"])]
    assert len(names) == len(set(names)) == 3 + 2 * 3
    assert "common composition, FlashQLA" in names
    assert "its own q/k norm" in parts_of("flashqla").note


# ---- the floor -----------------------------------------------------------------------------------------------------


def test_bytes_of_prologue_and_epilogue_are_those_of_their_tensors() -> None:
    T, sizes = 10, Sizes(CONFIG, torch.bfloat16)
    C, HV, V = CONFIG.conv_dim, CONFIG.linear_num_value_heads, CONFIG.linear_value_head_dim

    def taken(*channels: int, dtype=torch.bfloat16) -> int:
        return sum(torch.empty(T, c, dtype=dtype).nbytes for c in channels)

    g = taken(HV, dtype=torch.float32)
    assert sizes.bytes_of("prologue forward", T) == taken(C, HV, HV) + taken(C, HV) + g
    assert sizes.bytes_of("prologue backward", T) == taken(C, HV, HV) + taken(C, HV) + g + taken(C, HV, HV)
    assert sizes.bytes_of("epilogue forward", T) == taken(HV * V, HV * V) + taken(HV * V)
    assert sizes.bytes_of("epilogue backward", T) == taken(HV * V, HV * V, HV * V) + taken(HV * V, HV * V)
    assert sizes.glue(T, train=True) == sum(sizes.bytes_of(op, T) for op in FORMULAS)
    assert sizes.glue(T, train=False) == sizes.bytes_of("prologue forward", T) + sizes.bytes_of("epilogue forward", T)


def test_bytes_of_a_decoded_token_at_the_size_of_the_issue() -> None:
    sizes = Sizes(GatedDeltaNetConfig(hidden_size=2048), torch.bfloat16)
    state = 256 * 32 * 128 * 128 * 4
    weights = (8192 + 4096 + 64) * 2048 + 2048 * 4096 + 8192 * 4
    assert sizes.decode(256) == 2 * state + 2 * (weights + 256 * 8192 * 3)
    assert sizes.projected == 12352


def test_floor_calls_do_the_work() -> None:
    sizes = Sizes(CONFIG, torch.float32)
    with torch.profiler.profile() as record:
        products(sizes, 8, CPU, train=True)()
    counts = {event.key: event.count for event in record.key_averages()}
    assert (counts["aten::mm"], counts["aten::addmm_"]) == (9, 1)
    assert copying(1000, CPU)().nbytes == 500


def test_peak_memory_on_a_cpu_counts_what_lives_together() -> None:
    def call() -> torch.Tensor:
        a, b = (torch.empty(mib << 20, dtype=torch.uint8) for mib in (1, 2))
        del a
        c = torch.empty(3 << 20, dtype=torch.uint8)
        return b[:1] + c[:1]

    assert peak_bytes(call, CPU) == pytest.approx(5 << 20, abs=1024)


def test_the_floor_is_the_sum_of_its_parts_round_by_round() -> None:
    bench = layer.Bench.__new__(layer.Bench)
    bench.args = argparse.Namespace(kernels=["fla"])
    rounds = {"products": [3.0, 4.0, 9.0], "fla": [2.0, 2.0, 2.0], "bytes": [1.0, 2.0, 1.0]}
    floors = bench._floors({f"floor: {part}": Timing(seconds) for part, seconds in rounds.items()})
    assert floors["fla"]["total"].seconds == [6.0, 8.0, 12.0]
    found = layer._above(Timing([12.0, 12.0, 12.0]), floors, "fla")
    assert found["over_floor"] == 1.5  # 2, 1.5, 1
    assert (found["floor_products_ms"], found["floor_kernel_ms"], found["floor_total_ms"]) == (4e3, 2e3, 8e3)


# ---- a run ---------------------------------------------------------------------------------------------------------


def test_a_run_of_every_part(tmp_path, capsys) -> None:
    words = ["--tokens", "64", "--packed", "4x16", "--gradient-tokens", "64", "--flat-tokens", "32", "64"]
    words += ["--contenders", "composition", "called", "ours", "--parts", "times", "memory", "gradients", "flat"]
    status, results = _run("layer", tmp_path, *words)
    assert status == 0
    assert results["errors"] == {}
    timed = [row for row in results["times"] if "ms" in row]
    assert len(timed) == 3 * 2 * 2  # contenders, cases, modes
    for row in timed:
        assert all(row[f"floor_{part}_ms"] > 0 for part in ("products", "kernel", "bytes", "total"))
        assert row["over_floor"] > 0
        assert row["against"][row["contender"]] == 1.0
    assert {row["contender"] for row in results["flat"]} == {"qwenlinear, TorchKernel"}
    assert all(row["bytes_a_token"] > 0 and row["ns_a_token"] > 0 for row in results["flat"])
    assert len(results["memory"]) == 12
    assert all(row["peak_mib"] > 0 for row in results["memory"])
    listed = {(row["kind"], row["of"]) for row in results["gradients"]}
    assert {("dense", "A_log"), ("packed", "in_proj_qkv.weight"), ("packed", "output")} <= listed
    assert len(results["gradients"]) == 2 * 3 * 11
    assert all(row["error"] < 1e-4 for row in results["gradients"])
    assert "prologue" in results["explain"]["qwenlinear, TorchKernel, packed"]
    page = (tmp_path / "layer.md").read_text()
    assert "common composition, TorchKernel" in capsys.readouterr().out.replace("\n", " ") + page
    if importlib.util.find_spec("matplotlib") is not None:
        for kind in layer_report.PICTURES:
            assert (tmp_path / f"layer-{kind}.png").stat().st_size > 1000
    again = tmp_path / "again"
    assert cli.main(["bench", "layer", "--render", str(tmp_path / "layer.json"), "--out", str(again)]) == 0
    assert (again / "layer.md").read_text() == page


def test_wrong_and_slow_contenders(tmp_path) -> None:
    kernels = ["torch", f"{HERE}:Wrong", f"{HERE}:Slow", f"{HERE}:Fails", "flashqla"]
    words = ["--tokens", "300", "--packed", "--kernels", *kernels, "--contenders", "ours", "--parts", "times"]
    status, results = _run("layer", tmp_path, *words)
    assert status == 1  # one is wrong
    forward = {row["contender"]: row for row in results["times"] if row["mode"] == "forward"}
    assert forward["qwenlinear, Wrong"]["error"].startswith("wrong against float64")
    slow = forward["qwenlinear, Slow"]
    assert slow["ms"] > 20
    assert slow["against"]["qwenlinear, TorchKernel"] < 0.8
    assert "out of luck" in forward["qwenlinear, Fails"]["error"]
    assert "[device]" in forward["qwenlinear, FlashQLAKernel"]["error"]
    assert "ms" in forward["qwenlinear, TorchKernel"]
    tables = {title: body for title, _, body in layer_report.tables(results)}
    assert any("out of luck" in why for _, _, why in tables["Not timed"])
    assert "REFUSED" in str(next(body for title, body in tables.items() if title.startswith("Gate")))


def test_a_run_stops_at_its_limit_and_keeps_what_it_has(tmp_path) -> None:
    status, results = _run("layer", tmp_path, "--contenders", "ours", "--limit", "1e-9")
    assert status == 0
    assert results["times"] == []
    assert results["errors"]["limit"].startswith("stopped before T=1024")
    assert results["gate"][0]["passed"] == ["dense", "packed"]


def test_gradients_clearly_worse_than_the_compositions_are_bold() -> None:
    def row(contender: str, *each: float) -> dict:
        error = layer_gate.root_mean_square(each)
        return {"kind": "dense", "tokens": 8, "contender": contender, "of": "A_log", "error": error, "each": each}

    kernels = {"common composition, FLA": "fla", "qwenlinear, FLAKernel": "fla"}
    rows = [row("common composition, FLA", 1e-3, 1.1e-3), row("qwenlinear, FLAKernel", 1.3e-3, 1.4e-3)]
    _, _, body = layer_report._gradients("dense", rows, {"kernels": kernels})
    assert body == [["gradient of A_log", "1.05e-03", "**1.35e-03**"]]


def test_clearly_worse_is_more_than_the_scatter_of_the_draws() -> None:
    assert layer_gate.worse([1.06], [1.0])
    assert not layer_gate.worse([1.04], [1.0])
    assert not layer_gate.worse([1.5, 0.7, 1.2, 0.8], [1.0, 1.0, 1.0, 0.9])  # by luck
    assert layer_gate.worse([1.1, 1.09, 1.11, 1.1], [1.0, 1.0, 1.01, 1.0])  # little, but always


@pytest.mark.parametrize("name", ["cache", "cache_params"])
def test_transformers_gets_its_states_under_the_name_that_it_knows(name) -> None:
    """A layer drops what it does not know, and would decode without states."""
    layer = {"cache": Newer, "cache_params": Older}[name]()
    assert OfTransformers().step(layer, torch.ones(1), "states") == (name, "states")


class Newer(torch.nn.Module):
    def forward(self, hidden_states, cache=None, attention_mask=None, **kwargs):
        return "cache", cache


class Older(torch.nn.Module):
    def forward(self, hidden_states, cache_params=None, attention_mask=None, **kwargs):
        return "cache_params", cache_params


def test_operators_alone(tmp_path) -> None:
    session = Session(CPU, tmp_path / "ops.json", 1e9, ops=[])
    ops.measure(session, _setup(), [Case(1, 32, 2, 4, 8, 8), Case(4, 8, 2, 4, 8, 8)], rounds=3, seconds=2.0)
    rows = session.results["ops"]
    assert [row["op"] for row in rows] == 2 * list(FORMULAS)
    assert all(row["gb_s"] > 0 and row["share"] > 0 and row["form"].startswith("PyTorch") for row in rows)


# ---- decode --------------------------------------------------------------------------------------------------------


def test_a_decode_run(tmp_path) -> None:
    words = ["--batch", "1", "3", "--layers", "2", "--kernels", "torch", f"{HERE}:Wrong"]
    status, results = _run("decode", tmp_path, *words, "--contenders", "composition", "ours")
    assert status == 1  # one is wrong
    gate = {row["contender"]: row for row in results["gate"]}
    assert gate["qwenlinear, TorchKernel"]["passed"]
    assert gate["common composition, TorchKernel step"]["passed"]
    assert not gate["qwenlinear, Wrong"]["passed"]
    timed = [row for row in results["times"] if "us" in row]
    assert [(row["batch"], row["contender"]) for row in timed] == [
        (batch, name)
        for batch in (1, 3)
        for name in ("common composition, TorchKernel step", "qwenlinear, TorchKernel")
    ]
    assert all(row["over_floor"] > 1 and row["graph"] is False for row in timed)
    titles = [title for title, _, _ in decode_report.tables(results)]
    assert titles[-1] == "Not timed"
    if importlib.util.find_spec("matplotlib") is not None:
        assert (tmp_path / "decode-batch.png").stat().st_size > 1000


def test_the_composition_copies_its_state_for_a_graph_alone() -> None:
    """What a peer would not do eagerly, it is not charged for."""
    setup, (one,) = _setup(), decoders(["composition"], ["torch"])
    module = one.build(setup)
    x = layer_gate.draw(setup, 6, 1)
    want = layer_gate.plain_truth(setup, x, (6,))["output"][:, 3:]
    for step, stays in ((one.step, False), (one.step_in_graph, True)):
        with torch.no_grad():
            states = one.start(module, x[:, :3])
            (columns, held), kept = states, states[1].clone()
            got = torch.cat([step(module, x[:, t : t + 1], states) for t in range(3, 6)], 1)
        assert states[0] is columns
        assert (states[1] is held) is stays
        assert torch.equal(held, kept) is not stays
        assert (got.double() - want).norm() < 1e-5 * want.norm()


def test_transformers_decodes_beside_ours() -> None:
    pytest.importorskip("transformers")
    setup = _setup()
    x = torch.cat([layer_gate.draw(setup, 6, seed) for seed in (1, 2)])
    answers = []
    with torch.no_grad():
        for one in decoders(["transformers", "ours"], ["torch"]):
            module = one.build(setup)
            state = one.start(module, x[:, :4])
            answers.append(torch.cat([one.step(module, x[:, t : t + 1], state) for t in (4, 5)], 1))
    torch.testing.assert_close(*answers, rtol=1e-4, atol=1e-5)


def test_a_replay_is_held_against_the_eager_step() -> None:
    bench = decode.Bench.__new__(decode.Bench)
    bench.setup = _setup()
    answers = [torch.randn(4, generator=torch.Generator().manual_seed(n)) for n in range(8)]

    def steps(start: int, out: list, moves: bool = True):
        at = iter(range(start, 8) if moves else [start] * 8)
        return lambda: out.__setitem__(slice(None), [answers[next(at)]])

    def replayed(start: int, moves: bool) -> dict:
        out, wanted = [], []
        return bench.replayed(steps(start, out, moves), out, steps(0, wanted), wanted, done=3)

    assert replayed(3, moves=True) == {"replay_error": 0.0, "goes_on": True}
    assert replayed(3, moves=False) == {"replay_error": 0.0, "goes_on": False}
    with pytest.raises(RuntimeError, match="wrong in a CUDA graph"):
        replayed(2, moves=True)


def test_a_stale_graph_is_marked() -> None:
    row = {"batch": 1, "contender": "x", "graph": True, "us": 9.0, "over_floor": 1.2, "floor_us": 7.5, "floor_mb": 1.0}
    title, _, body = decode_report._times("t", [{**row, "goes_on": False}])
    assert "same state again" in title
    assert body == [["1", "7.5 (1.0 MB)", "9.0 (1.20)*"]]


def test_a_kernel_that_does_not_run_here_has_no_floor_and_says_why(tmp_path) -> None:
    words = ["bench", "layer", "--device", "cpu", "--kernels", "fla", "--contenders", "ours", "--parts", "times"]
    sizes = ["--hidden", "32", "--heads", "1/2", "--head-dim", "16", "--tokens", "128", "--packed", "--rounds", "3"]
    assert cli.main([*words, *sizes, "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "layer.json").read_text())
    assert found["errors"] == {}
    assert all("[device] needs cuda" in row["error"] for row in found["times"])
