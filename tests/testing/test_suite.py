"""The suite itself: TorchKernel passes it, its cases can be rebuilt, its errors and reports say what they should."""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import replace

import pytest
import torch

from qwenlinear.kernels import AutoKernel, PackedSequences, TorchKernel
from qwenlinear.testing import Case, ConformanceError, KernelConformance, check_kernel
from qwenlinear.testing.__main__ import main
from qwenlinear.testing.cases import draw
from qwenlinear.testing.checks import CHECKS, reference_of
from qwenlinear.testing.generate import generate, head_configurations
from qwenlinear.testing.reference import token_by_token
from qwenlinear.testing.running import compare, execution_of, in_words, relative_error, run
from tests.testing.broken_conduct import Raises
from tests.testing.broken_kernels import BetaTwice, GradientOfGDropped, ScaleForgotten


def test_torch_kernel_passes_and_the_report_says_so() -> None:
    report = check_kernel(TorchKernel())
    assert report.passed is True
    assert report.counts["failed"] == report.counts["refused"] == 0
    assert report.counts["passed"] > 500
    assert report.too_narrow == ()
    worst = report.worst()
    assert {key[1] for key in worst} == {"float64", "float32", "bfloat16", "float16"}
    assert {key[0] for key in worst} == {"chunk", "step"}
    assert all(0 <= error <= allowed for error, allowed in worst.values())
    assert worst["chunk", "bfloat16", "output"][0] > 1e-4  # a rounded output can't be exact: something was measured
    assert "| chunk, float64 |" in report.table()
    loaded = json.loads(report.to_json())
    assert loaded["passed"] is True
    assert len(loaded["results"]) == sum(report.counts.values())


def test_auto_kernel_passes_in_float32() -> None:
    cases = [case for case in generate(AutoKernel(), "cpu", packings=20) if case.dtype == "float32" and case.T < 1000]
    assert check_kernel(AutoKernel(), cases=cases).passed


class TestMixin(KernelConformance):
    """One test a case, as an author writes it."""

    kernel = type(
        "Float32", (TorchKernel,), {"capabilities": replace(TorchKernel.capabilities, dtypes={torch.float32})}
    )()
    packings = 20


def test_cases_are_rebuilt_from_what_they_print() -> None:
    cases = list(generate(TorchKernel(), "cpu"))
    assert len(set(cases)) == len(cases)
    for case in cases:
        assert eval(repr(case)) == case
    assert pickle.loads(pickle.dumps(cases[-1])) == cases[-1]


def test_equal_cases_draw_equal_tensors_whatever_was_drawn_before() -> None:
    case = Case("twice", lengths=(3, 0, 2), initial_state=True, layout="strided", dtype="bfloat16")
    first = draw(case, "cpu")
    torch.rand(7)
    second, other = draw(case, "cpu"), draw(case.but(seed=1), "cpu")
    assert all(torch.equal(first.bases[name], second.bases[name]) for name in "kv")
    assert not torch.equal(first.bases["v"], other.bases["v"])


def test_layouts_are_what_they_say() -> None:
    for layout, contiguous in (("contiguous", True), ("strided", False), ("expanded", False)):
        case = Case(layout, B=2, T=3, heads=(2, 4, 8, 4), initial_state=True, layout=layout)
        drawn = draw(case, "cpu")
        views = drawn.view(drawn.bases)
        assert {view.is_contiguous() for view in views.values()} == {contiguous}
        assert views["q"].shape == (2, 3, 2, 8)
        assert views["initial_state"].shape == (2, 4, 8, 4)
        assert all(torch.isfinite(view).all() for view in views.values())


def test_the_reference_of_a_kernel_is_another_one() -> None:
    assert reference_of(TorchKernel()) is token_by_token
    assert isinstance(reference_of(AutoKernel()), TorchKernel)


def test_the_reference_is_the_formula() -> None:
    torch.manual_seed(3)
    q, k = torch.randn(2, 1, 3, 1, 2, dtype=torch.float64)
    v, g, beta = (
        torch.randn(1, 3, 2, 2, dtype=torch.float64),
        -torch.rand(1, 3, 2).double(),
        torch.rand(1, 3, 2).double(),
    )
    state = torch.randn(2, 2, 2, 2, dtype=torch.float64)
    o, final = token_by_token(q, k, v, g, beta, 0.5, state, True, False, torch.tensor([0, 2, 3]))
    for head in range(2):
        for document, tokens in ((0, (0, 1)), (1, (2,))):
            S = state[document, head]
            for t in tokens:
                S = math.exp(g[0, t, head]) * S
                S = S + torch.outer(k[0, t, 0], beta[0, t, head] * (v[0, t, head] - S.T @ k[0, t, 0]))
                torch.testing.assert_close(o[0, t, head], S.T @ (0.5 * q[0, t, 0]), rtol=1e-14, atol=1e-14)
            torch.testing.assert_close(final[document, head], S, rtol=1e-14, atol=1e-14)


def test_an_error_carries_a_report_and_starts_with_a_line_that_reproduces_it() -> None:
    with pytest.raises(AssertionError) as caught:
        check_kernel(BetaTwice())
    error = caught.value
    assert isinstance(error, ConformanceError)
    assert error.report.passed is False
    assert len(error.report.failures) == 1
    first, second, *_ = str(error).splitlines()
    assert first == (
        "check_kernel(BetaTwice(), device='cpu', cases=[Case('write strength beta', gates='none', scale=1.0)])"
    )
    assert second.startswith("write strength beta: output: relative error 0.")
    assert second.endswith("allowed 1e-05; this is what a kernel gives with beta applied twice")


def test_a_full_report_goes_on_after_a_failure() -> None:
    cases = [Case("scale", scale=0.37), Case("unit scale", scale=1.0), Case("default scale")]
    with pytest.raises(ConformanceError) as caught:
        check_kernel(ScaleForgotten(), cases=cases, first_failure=False)
    report = caught.value.report
    assert report.counts == {"passed": 1, "failed": 2, "refused": 0}
    assert "and 1 more" in str(caught.value)
    assert str(report).count("FAILED check_kernel(ScaleForgotten()") == 2
    assert json.loads(report.to_json())["results"][0]["status"] == "failed"


def test_an_exception_from_the_kernel_is_a_failure() -> None:
    with pytest.raises(ConformanceError, match="RuntimeError: out of registers"):
        check_kernel(Raises())


def test_an_exception_says_which_line_of_the_kernel_it_came_through() -> None:
    with pytest.raises(ConformanceError, match=r"out of registers \(broken_conduct.py, line \d+\)"):
        check_kernel(Raises())


class NotFinite(TorchKernel):
    """NaN from token 60 on and one infinity, where decays are strong."""

    def _chunk(self, inputs):
        o, final = super()._chunk(inputs)
        if (inputs.g < -20).any():
            o = torch.cat([o[:, :60], torch.full_like(o[:, 60:], torch.nan)], 1)
            o[0, 3, 1, 2] = torch.inf
        return o, final


def test_what_is_not_finite_is_counted_and_placed_and_the_likely_cause_named() -> None:
    with pytest.raises(ConformanceError) as caught:
        check_kernel(NotFinite(), cases=[Case("gates strong", T=130, gates="strong")])
    assert str(caught.value).splitlines()[1] == (
        "gates strong: output: 2240 NaN and 1 infinite among 4160 values, the first at [0, 3, 1, 2] of [1, 130, 2, 16]; "
        "mostly exp of a positive sum of decays overflows: mask what is above the diagonal before exp, not after"
    )
    assert caught.value.report.failures[0].errors["output"] == (math.inf, 1e-5)


def test_what_replaces_a_relative_error() -> None:
    answers = {"output": torch.tensor([1.0, -math.inf]), "gradient of q": torch.zeros(2), "final state": torch.ones(1)}
    truth = {"output": torch.ones(2), "gradient of q": torch.zeros(2, 1), "final state": torch.ones(1)}
    assert in_words(answers, truth) == {
        "output": "1 infinite among 2 values, the first at [1] of [2]",
        "gradient of q": "shape [2] instead of [2, 1]",
    }


def test_lost_small_decays_are_suspected() -> None:
    with pytest.raises(ConformanceError, match="differences of cumulative sums lose small decays"):
        check_kernel(SmallDecaysLost(), cases=[Case("gates mixed", T=130, gates="mixed")])


class SmallDecaysLost(TorchKernel):
    def _chunk(self, inputs):
        sums = torch.cat([torch.zeros_like(inputs.g[:, :1]), inputs.g.cumsum(1)], 1)
        return super()._chunk(replace(inputs, g=sums.diff(dim=1)))


@pytest.mark.parametrize("device", ["meta", "no such device", *([] if torch.cuda.is_available() else ["cuda"])])
def test_a_device_that_is_not_there_is_said_before_any_case(device: str) -> None:
    with pytest.raises(ValueError, match=f"device needs one that PyTorch can compute on here, got '{device}'"):
        check_kernel(TorchKernel(), device)


def test_a_dropped_gradient_is_named() -> None:
    with pytest.raises(ConformanceError, match="gradient of g: no gradient comes back to g"):
        check_kernel(GradientOfGDropped())


def test_scratch_is_filled_with_nan_and_everything_restored() -> None:
    seen = []

    class Watcher(TorchKernel):
        def _chunk(self, inputs):
            seen.append(torch.empty(64).isnan().all().item())
            return super()._chunk(inputs)

    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
    )
    check_kernel(Watcher(), cases=[Case("scratch", scratch=True)])
    assert seen == [True]
    assert before == (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
    )


@pytest.mark.parametrize(
    ("x", "truth", "error"),
    [
        ([3.0, 4.0], [3.0, 4.0], 0.0),
        ([3.0, 5.0], [3.0, 4.0], 0.2),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([1e-30, 0.0], [0.0, 0.0], 1e-2),
        ([math.nan, 4.0], [3.0, 4.0], math.inf),
        ([math.inf, 4.0], [3.0, 4.0], math.inf),
        ([3.0], [3.0, 4.0], math.inf),
    ],
)
def test_relative_error(x: list[float], truth: list[float], error: float) -> None:
    truth64 = torch.tensor(truth, dtype=torch.float64)
    assert relative_error(torch.tensor(x, dtype=torch.float64), truth64, 1e-28) == pytest.approx(error, rel=1e-12)


def test_what_flows_through_a_token_bounds_how_its_decay_is_judged() -> None:
    case = Case("one token", T=1, grad="all")
    drawn = draw(case, "cpu")
    truth = run(execution_of(token_by_token), drawn.double())
    assert not truth["gradient of g"].any()  # it decays a state of zeros
    noise = {**truth, "gradient of g": truth["gradient of g"] + 1e-9}
    gone = {**truth, "gradient of g": truth["gradient of g"] + 1e-2}
    tolerance = TorchKernel.tolerances[torch.float32]
    for answers, fine in ((noise, True), (gone, False)):
        error, allowed = compare(answers, truth, drawn.double(), tolerance)["gradient of g"]
        assert (error <= allowed) is fine


def test_head_configurations_are_few_on_a_gpu() -> None:
    any_size = TorchKernel.capabilities
    only_128 = replace(any_size, key_head_sizes=frozenset({128}), value_head_sizes=frozenset({128}))
    assert head_configurations(any_size, "cuda") == ((16, 32, 128, 128),)
    assert head_configurations(only_128, "cuda") == ((16, 32, 128, 128),)
    assert {heads[2:] for heads in head_configurations(only_128, "cpu")} == {(128, 128)}
    with pytest.raises(ValueError, match="no head size to try"):
        head_configurations(replace(any_size, key_head_sizes=frozenset({17})), "cpu")


def test_every_check_is_asked_for() -> None:
    kernel = type("Full", (TorchKernel,), {"capabilities": replace(TorchKernel.capabilities, compile_safe=True)})()
    limited = type("Dense", (TorchKernel,), {"capabilities": replace(TorchKernel.capabilities, packed=False)})()
    asked = {case.check for k in (kernel, limited) for case in generate(k, "cpu")}
    assert asked == set(CHECKS)


def test_packed_sequences_of_a_case() -> None:
    drawn = draw(Case("packed", lengths=(2, 0, 3), boundaries="int64"), "cpu")
    assert drawn.cu_seqlens.dtype == torch.int64
    assert drawn.cu_seqlens.tolist() == [0, 2, 2, 5]
    assert draw(Case("packed", lengths=(2, 0, 3)), "cpu").cu_seqlens == PackedSequences.from_lengths([2, 0, 3])


def test_the_command_writes_what_it_found(tmp_path, capsys) -> None:
    page, data = tmp_path / "report.md", tmp_path / "report.json"
    options = ["--heads", "1,2,8,8", "--packings", "5", "--seconds", "2", "--markdown", str(page), "--json", str(data)]
    assert main(["--kernels", "torch,fla", *options]) == 1  # FLA needs a GPU, and two seconds are too few
    text, loaded = page.read_text(), json.loads(data.read_text())
    assert text.startswith("# Conformance on cpu\n")
    assert "| chunk, float32 |" in text
    assert "cases were not run: the limit of 2 s" in text
    assert "Not run here. FLAKernel() cannot run on cpu" in text
    assert loaded["reports"][0]["subject"] == "TorchKernel()"
    assert loaded["packages"]["torch"]
    assert "## torch" in capsys.readouterr().out
