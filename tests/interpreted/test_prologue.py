"""The prologue's Triton form against its twin in float64: outputs, states, gradients, and what the operators promise."""

from __future__ import annotations

import pytest
import torch

from qwenlinear.ops._prologue_torch import prologue_twin
from qwenlinear.ops.prologue import fused_prologue, prologue_backward_op, prologue_op
from tests.ops.prologue_cases import NAMES, Case, compare, differentiate

DOCUMENTS = (3, 0, 1, 2, 11, 1, 4, 0)


@pytest.mark.parametrize(
    "case",
    [
        Case(T=37),
        Case(B=2, T=17, state=True, final=True),
        Case(B=3, T=2, state=True, final=True),
        Case(T=1, final=True),
        Case(B=3, T=7, lengths=(2, 0, 7), state=True, final=True),
        Case(documents=DOCUMENTS),
        Case(documents=DOCUMENTS, state=True, final=True),
        Case(documents=(40, 1, 23), final=True),
        Case(documents=DOCUMENTS, W=3, state=True, final=True),
        Case(documents=DOCUMENTS, W=2, state=True, final=True),
        Case(T=9, W=1, final=True),
        Case(T=9, heads=(3, 3), head_dims=(4, 2), l2norm=False, padding=3),
        Case(T=9, heads=(2, 2), head_dims=(2, 16)),
    ],
    ids=str,
)
def test_outputs_and_gradients(case: Case) -> None:
    compare(case, 1e-6)


def test_lengths_outside_of_a_row_are_clamped_as_the_twin_clamps_them() -> None:
    case = Case(B=3, T=7, lengths=(99, -2, 3), state=True, final=True)
    compare(case, 1e-6)
    inside = Case(B=3, T=7, lengths=(7, 0, 3), state=True, final=True)
    for form in (fused_prologue, prologue_twin):
        assert torch.equal(case.call(form, case.leaves())[5], inside.call(form, case.leaves())[5])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 1e-3), (torch.bfloat16, 1e-2)])
def test_narrow_dtypes(dtype: torch.dtype, tolerance: float) -> None:
    """The interpreter cuts bfloat16 off instead of rounding it, hence twice the tolerance of a rounding."""
    compare(Case(documents=(3, 0, 1, 5), state=True, final=True, dtype=dtype), tolerance)


@pytest.mark.parametrize(
    "needs", [("buffer",), ("weight",), ("initial_state",), ("A_log",), ("dt_bias",), ("weight", "dt_bias")]
)
def test_only_some_inputs_need_gradients(needs: tuple[str, ...]) -> None:
    compare(Case(B=2, T=5, state=True, final=True), 1e-6, needs=needs)


@pytest.mark.parametrize("outputs", [(0,), (2, 5), (5,), (3,), (4,)])
def test_only_some_outputs_are_used(outputs: tuple[int, ...]) -> None:
    compare(Case(B=2, T=5, state=True, final=True), 1e-6, outputs=outputs)


def test_gradients_of_the_projections_lie_in_one_buffer() -> None:
    case = Case(T=6)
    leaves = case.leaves()
    HV = case.heads[1]
    qkv, b, a, _ = (
        t.detach().requires_grad_() for t in leaves["buffer"].split([case.C, HV, HV, HV * case.head_dims[1]], -1)
    )
    gate = leaves["weight"], leaves["A_log"], leaves["dt_bias"]
    answers = fused_prologue(qkv, b, a, *gate, case.heads, case.head_dims, True, None, False, None, None)
    assert answers[5] is None
    dqkv, db, da = torch.autograd.grad(sum(t.sum() for t in answers if t is not None), (qkv, b, a))
    assert {t.untyped_storage().data_ptr() for t in (dqkv, db, da)} == {dqkv.untyped_storage().data_ptr()}
    assert [t.storage_offset() for t in (dqkv, db, da)] == [0, case.C, case.C + HV]
    assert {t.stride() for t in (dqkv, db, da)} == {(6 * (case.C + 2 * HV), case.C + 2 * HV, 1)}


def test_small_tensors_may_be_strided() -> None:
    case = Case(B=3, T=7, state=True, final=True)
    leaves, HV = case.leaves(), case.heads[1]
    qkv, b, a, _ = leaves["buffer"].split([case.C, HV, HV, HV * case.head_dims[1]], -1)
    small = [leaves[name] for name in ("weight", "A_log", "dt_bias")] + [torch.tensor([2, 0, 7])]
    strided = [torch.stack([t, torch.full_like(t, 5)], -1)[..., 0] for t in small]
    assert not any(t.is_contiguous() for t in strided)
    answers = [
        fused_prologue(
            qkv, b, a, *tensors[:3], case.heads, case.head_dims, True, leaves["initial_state"], True, None, tensors[3]
        )
        for tensors in (small, strided)
    ]
    assert all(torch.equal(x, y) for x, y in zip(*answers, strict=True) if x is not None and y is not None)


def test_gates_of_another_dtype() -> None:
    case = Case(T=6, dtype=torch.float16)
    leaves, HV = case.leaves(), case.heads[1]
    qkv, b, a, _ = (t.detach() for t in leaves["buffer"].split([case.C, HV, HV, HV * case.head_dims[1]], -1))
    b, a = b.float().requires_grad_(), a.requires_grad_()
    gate = leaves["weight"], leaves["A_log"], leaves["dt_bias"]
    rest = (case.heads, case.head_dims)
    for form, how in ((fused_prologue, ()), (prologue_twin, ("silu",))):
        g, beta = form(qkv, b, a, *gate, *rest, *how, True, None, False, None, None)[3:5]
        assert (g.dtype, beta.dtype) == (torch.float32, torch.float32)
        db, da = torch.autograd.grad(g.square().sum() + beta.square().sum(), (b, a))
        if form is fused_prologue:
            kept = g, beta, db, da
    for ours, theirs in zip(kept, (g, beta, db, da), strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs)


def test_extreme_gates_stay_finite_and_right() -> None:
    x = torch.tensor([-1e4, -200.0, -60.0, -41.0, -39.0, -17.0, 0.0, 5.0, 39.0, 41.0, 300.0, 1e4])
    A_log = torch.tensor([-100.0, -5.0, 0.0, 5.0, 9.3, 100.0])
    HV = len(x) * len(A_log)
    case = Case(T=3, heads=(1, HV), head_dims=(32, 1))
    leaves = case.leaves() | {"dt_bias": x.repeat(len(A_log)), "A_log": A_log.repeat_interleave(len(x))}
    got, got_gradients = differentiate(case, fused_prologue, leaves, outputs=(3,))
    want, want_gradients = differentiate(case, prologue_twin, {n: t.double() for n, t in leaves.items()}, outputs=(3,))
    assert got[3].isfinite().all()
    assert got[3].min() == -1e4
    torch.testing.assert_close(got[3].double(), want[3], rtol=1e-5, atol=1e-37)
    for name in ("buffer", "A_log", "dt_bias"):
        assert got_gradients[name].isfinite().all()
        torch.testing.assert_close(got_gradients[name].double(), want_gradients[name], rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("broken", ["a", "A_log", "dt_bias"])
def test_not_a_number_in_the_gate_is_not_hidden(broken: str) -> None:
    """A clamp that drops it would leave a head that forgets everything, with a finite loss."""
    case = Case(T=5, heads=(1, 2))
    leaves = case.leaves()
    if broken == "a":
        leaves["buffer"][0, 2, case.C + 2] = float("nan")
    else:
        leaves[broken][0] = float("nan")
    g, want = case.call(fused_prologue, leaves)[3], case.call(prologue_twin, leaves)[3]
    assert g is not None
    assert want is not None
    assert g.isnan().any()
    assert torch.equal(g.isnan(), want.isnan())


def test_a_document_never_sees_another() -> None:
    case = Case(documents=(5, 0, 2, 6), state=True)
    leaves = case.leaves()
    leaves["buffer"][:, 5:7] = float("inf")
    leaves["initial_state"][1:3] = float("nan")
    whole, gradients = differentiate(case, fused_prologue, leaves)
    for tokens in (slice(0, 5), slice(7, 13)):
        assert all(t[:, tokens].isfinite().all() for t in whole[:5] if t is not None)
        assert gradients["buffer"][:, tokens].isfinite().all()
    assert gradients["initial_state"][[0, 3]].isfinite().all()


def test_a_second_derivative_is_refused() -> None:
    case = Case(T=3)
    leaves = {name: leaf.requires_grad_() for name, leaf in case.leaves().items()}
    q = case.call(fused_prologue, leaves)[0]
    assert q is not None
    (first,) = torch.autograd.grad(q.square().sum(), leaves["buffer"], create_graph=True)
    with pytest.raises(RuntimeError, match="prologue_backward"):
        first.sum().backward()


def test_registrations() -> None:
    case = Case(heads=(1, 1), head_dims=(2, 2), documents=(2, 0, 1), state=True, final=True, dtype=torch.float16)
    leaves, HV, packed = case.leaves(), case.heads[1], case.packed
    qkv, b, a, _ = leaves["buffer"].split([case.C, HV, HV, HV * case.head_dims[1]], -1)
    at = torch.tensor([0, 1, 0]).int(), torch.tensor([0, 0, 2]).int(), packed.cu_seqlens()
    inputs = (qkv, b, a, leaves["weight"], leaves["A_log"], leaves["dt_bias"], leaves["initial_state"], *at, None)
    sizes = (*case.heads, *case.head_dims, True)
    torch.library.opcheck(prologue_op, (*(_leaf(t) for t in inputs), *sizes, True))
    gradients = [torch.randn_like(t) for t in prologue_op(*inputs, *sizes, True)]
    torch.library.opcheck(prologue_backward_op, (*inputs, *gradients, *sizes, True, True))
    for needs in ((False, False), (True, False)):  # fakes say what is empty
        nothing = [None] * 6 if needs == (False, False) else [*gradients[:3], None, None, None]
        torch.library.opcheck(
            prologue_backward_op, (*inputs, *nothing, *sizes, *needs), test_utils=("test_faketensor",)
        )


def _leaf(tensor: torch.Tensor | None) -> torch.Tensor | None:
    if tensor is None or not tensor.is_floating_point():
        return tensor
    return tensor.detach().clone().requires_grad_()


def test_compiles_to_one_graph() -> None:
    case = Case(B=2, T=5, state=True, final=True)
    leaves = case.leaves()

    def step(**tensors: torch.Tensor) -> list[torch.Tensor | None]:
        return case.call(fused_prologue, tensors)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    wanted = {name: leaf.clone().requires_grad_() for name, leaf in leaves.items()}
    given = {name: leaf.clone().requires_grad_() for name, leaf in leaves.items()}
    want, got = step(**wanted), compiled(**given)
    for ours, theirs in zip(got, want, strict=True):
        assert torch.equal(ours, theirs)
    for answers in (want, got):
        sum(t.square().sum() for t in answers).backward()
    assert all(torch.equal(given[name].grad, wanted[name].grad) for name in NAMES)
