"""The prologue as a public function, and its twin against a plain loop over documents."""

from __future__ import annotations

import ast
import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from qwenlinear.kernels import PackedSequences
from qwenlinear.ops import prologue
from tests.ops.prologue_cases import Case

MODULE = importlib.import_module("qwenlinear.ops.prologue")  # the package's attribute of this name is the function

CASES = [
    Case(B=2, T=7, dtype=torch.float64),
    Case(B=2, T=2, state=True, final=True, dtype=torch.float64),
    Case(documents=(3, 0, 1, 2, 5), state=True, final=True, dtype=torch.float64),
    Case(B=3, T=5, lengths=(2, 0, 5), state=True, final=True, dtype=torch.float64),
    Case(B=2, T=0, state=True, final=True, dtype=torch.float64),
    Case(documents=(4,), W=2, final=True, l2norm=False, dtype=torch.float64),
    Case(T=4, W=6, dtype=torch.float64),
]


def arguments(case: Case, leaves: dict[str, Tensor]) -> dict[str, Any]:
    HV, buffer = case.heads[1], leaves["buffer"]
    qkv, b, a, _ = buffer.split([case.C, HV, HV, buffer.shape[2] - case.C - 2 * HV], -1)
    return {
        "qkv": qkv,
        "b": b,
        "a": a,
        "weight": leaves["weight"],
        "A_log": leaves["A_log"],
        "dt_bias": leaves["dt_bias"],
        "heads": case.heads,
        "head_dims": case.head_dims,
        "l2norm": case.l2norm,
        "initial_state": leaves.get("initial_state"),
        "output_final_state": case.final,
        "packed": case.packed,
        "lengths": None if case.lengths is None else torch.tensor(case.lengths),
    }


def by_document(case: Case, leaves: dict[str, Tensor]) -> list[Tensor | None]:
    """One document after another, one tap after another, nothing shared with the code that is tested."""
    (H, HV), (K, V), keep = case.heads, case.head_dims, case.W - 1
    x = leaves["buffer"][..., : case.C]
    rows = list(x[0].split(case.documents)) if case.documents is not None else list(x)
    convolved, states = [], []
    for n, row in enumerate(rows):
        state = leaves["initial_state"][n].t() if case.state else row.new_zeros(keep, case.C)
        history = torch.cat([state, row])
        y = sum(history[i : i + len(row)] * leaves["weight"][:, 0, i] for i in range(case.W))
        convolved.append(y * torch.sigmoid(y))
        count = len(row) if case.lengths is None else case.lengths[n]
        states.append(history[count : count + keep].t())
    y = torch.cat(convolved)[None] if case.documents is not None else torch.stack(convolved)
    q, k, v = y.split([H * K, H * K, HV * V], -1)
    q, k, v = q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (HV, V))
    if case.l2norm:
        q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    b, a = leaves["buffer"][..., case.C : case.C + 2 * HV].split(HV, -1)
    g = -leaves["A_log"].exp() * F.softplus(a + leaves["dt_bias"])
    return [q, k, v, g, torch.sigmoid(b), torch.stack(states) if case.final else None]


def double_leaves(case: Case) -> dict[str, Tensor]:
    return {name: leaf.double().requires_grad_() for name, leaf in case.leaves().items()}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_a_loop_over_documents(case: Case) -> None:
    ours, theirs = double_leaves(case), double_leaves(case)
    got, want = prologue(**arguments(case, ours)), by_document(case, theirs)
    assert [t is None for t in got] == [t is None for t in want]
    for answer, reference in zip(got, want, strict=True):
        if answer is not None:
            assert answer.is_contiguous()
            assert answer.dtype == torch.float64
            torch.testing.assert_close(answer, reference, rtol=1e-12, atol=1e-14)
    for answers in (got, want):
        sum(t.square().sum() for t in answers if t is not None).backward()
    for name in ours:
        torch.testing.assert_close(ours[name].grad, theirs[name].grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_and_one_rounding(dtype: torch.dtype) -> None:
    case = Case(B=2, T=9, state=True, final=True, dtype=dtype)
    leaves = case.leaves()
    got = prologue(**arguments(case, leaves))
    want = by_document(case, {name: leaf.double() for name, leaf in leaves.items()})
    assert [t.dtype for t in got] == [dtype, dtype, dtype, torch.float32, dtype, dtype]
    for answer, reference in zip(got, want, strict=True):
        rounding = torch.finfo(answer.dtype).eps
        torch.testing.assert_close(answer.double(), reference, rtol=0.6 * rounding + 3e-6, atol=2e-7)


def test_an_initial_state_is_taken_in_the_dtype_of_qkv() -> None:
    case = Case(T=3, state=True, final=True, dtype=torch.bfloat16)
    leaves = case.leaves()
    wide = leaves | {"initial_state": leaves["initial_state"].float() * (1 + 2**-12)}
    for ours, theirs in zip(prologue(**arguments(case, wide)), prologue(**arguments(case, leaves)), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("reason", "tokens", "fused"), [(None, 4, True), ("tensors on cpu", 4, False), (None, 0, False)]
)
def test_which_form_runs(monkeypatch, reason: str | None, tokens: int, fused: bool) -> None:
    asked, ran = [], []

    def why_not(device, dtype, **sizes):
        asked.append((device, dtype, sizes))
        return reason

    monkeypatch.setattr(MODULE, "why_not_fused", why_not)
    monkeypatch.setattr(MODULE, "fused_prologue", lambda *args: ran.append("fused"))
    monkeypatch.setattr(MODULE, "prologue_twin", lambda *args: ran.append("twin"))
    prologue(**arguments(Case(T=tokens), Case(T=tokens).leaves()))
    assert ran == ["fused" if fused else "twin"]
    sizes = {"activation": "silu", "width": 4, "head_dims": (8, 8)}
    assert asked == [(torch.device("cpu"), torch.float32, sizes)]


def test_one_document_runs_as_a_dense_row(monkeypatch) -> None:
    seen = []
    monkeypatch.setattr(MODULE, "prologue_twin", lambda *args: seen.append(args[-2]))
    for documents in ((5,), (3, 2)):
        case = Case(documents=documents)
        prologue(**arguments(case, case.leaves()))
    assert seen == [None, PackedSequences.from_lengths([3, 2])]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qkv": torch.zeros(1, 4, 31)}, r"qkv needs shape \[B, T, 32\].*got \[1, 4, 31\]"),
        ({"qkv": torch.zeros(1, 4, 32, dtype=torch.int64)}, "floating dtype, got .* torch.int64"),
        ({"b": torch.zeros(1, 3, 2)}, r"b needs shape \[1, 4, 2\]"),
        ({"a": torch.zeros(1, 4, 2, device="meta")}, "a needs qkv's device cpu, got meta"),
        ({"weight": torch.zeros(32, 4)}, r"weight needs shape \[32, 1, W\], got \[32, 4\]"),
        ({"A_log": torch.zeros(3)}, r"A_log needs shape \[2\]"),
        ({"dt_bias": torch.zeros(2, dtype=torch.int32)}, "dt_bias needs .* floating dtype"),
        ({"heads": (0, 2)}, "whole numbers >= 1"),
        ({"activation": "swoosh"}, "activation needs None or one of .*, got 'swoosh'"),
        ({"packed": torch.tensor([0, 4])}, "packed needs a PackedSequences, got Tensor"),
        ({"packed": PackedSequences.from_lengths([5])}, r"packed needs to end at T=\d+, got 5"),
        (
            {"packed": PackedSequences.from_lengths([4]), "lengths": torch.tensor([4])},
            "one without the other, got both",
        ),
        ({"lengths": torch.tensor([4.0])}, r"lengths needs shape \[1\] and int64"),
        ({"lengths": torch.tensor([5])}, r"lengths needs numbers from 0 to T=4, got 5"),
        ({"lengths": torch.tensor([-1])}, r"lengths needs numbers from 0 to T=4, got -1"),
        ({"lengths": torch.tensor([4], device="meta")}, "lengths needs the device cpu of the tokens, got meta"),
        ({"initial_state": torch.zeros(1, 32, 4)}, r"initial_state needs shape \[1, 32, 3\] \(\[N, C, W-1\]\)"),
        ({"initial_state": torch.zeros(1, 32, 3, device="meta")}, "initial_state needs qkv's device cpu, got meta"),
    ],
)
def test_what_does_not_fit_is_refused_in_words(change: dict[str, Any], message: str) -> None:
    case = Case(T=4)
    with pytest.raises(ValueError, match=message):
        prologue(**(arguments(case, case.leaves()) | change))


@pytest.mark.parametrize("case", [Case(T=6, state=True, final=True), Case(documents=(2, 4))], ids=str)
def test_compiles_to_one_graph(case: Case) -> None:
    leaves, packed = case.leaves(), case.packed
    at = {"packed": packed} if packed is not None else {}

    def run(**tensors: Tensor) -> tuple[Tensor | None, ...]:
        return prologue(**(arguments(replace(case, documents=None), tensors) | at))

    want = run(**leaves)  # also makes what is derived from the boundaries once
    got = torch.compile(run, fullgraph=True, backend="aot_eager")(**leaves)
    assert all(a is b or torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_lengths_whose_values_cannot_be_read_are_clamped() -> None:
    """In a captured graph, as on a GPU: what the Triton form does too (tests/interpreted)."""
    case = Case(B=3, T=5, state=True, final=True)
    leaves = case.leaves()

    def run(lengths: Tensor) -> Tensor | None:
        return prologue(**(arguments(case, leaves) | {"lengths": lengths}))[5]

    got = torch.compile(run, fullgraph=True, backend="aot_eager")(torch.tensor([9, -2, 3]))
    assert torch.equal(got, run(torch.tensor([5, 0, 3])))


def test_operators_know_no_layer() -> None:
    allowed = ("qwenlinear.kernels.", "qwenlinear.ops", "qwenlinear.errors", "qwenlinear._launch", "qwenlinear.checks")
    for path in Path(MODULE.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("qwenlinear"):
                assert node.module.startswith(allowed), f"{path.name} imports {node.module}"
