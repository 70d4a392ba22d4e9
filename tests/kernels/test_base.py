"""The strategy's own promises: validation, refusals, lowerings, words. What a kernel computes is tested elsewhere."""

from __future__ import annotations

import copy
import pickle
from dataclasses import fields, replace

import pytest
import torch

from qwenlinear import GatedDeltaKernel, PackedSequences, Refusal, TorchKernel, UnsupportedCall
from qwenlinear.kernels import KernelCapabilities, Tolerance
from qwenlinear.kernels.hardware import Hardware
from tests.kernels.reference import random_call, recurrence, relative

FLOAT32 = frozenset({torch.float32})
EVERYTHING = KernelCapabilities(
    dtypes=FLOAT32, devices=None, chunk=True, step=True, backward=True, step_backward=True, state_backward=True,
    initial_state=True, final_state=True, packed=True, empty_sequences=True, value_head_groups=True, qk_l2norm=True,
    strided=True,
)  # fmt: skip


class Spy(GatedDeltaKernel):
    """Keeps the call it is handed and computes it with TorchKernel."""

    capabilities = EVERYTHING
    tolerances = {torch.float32: Tolerance(1e-5, 1e-5, 1e-4)}

    def __init__(self, **changes: object) -> None:
        self.capabilities = replace(type(self).capabilities, **changes)  # type: ignore[arg-type]
        self.calls: list[object] = []
        super().__init__()

    def _chunk(self, inputs):  # type: ignore[no-untyped-def]
        self.calls.append(inputs)
        if self.capabilities.state_layout == "kv":
            return TorchKernel()._execute(inputs, "chunk")
        state = None if inputs.initial_state is None else inputs.initial_state.mT
        o, final = TorchKernel()._execute(replace(inputs, initial_state=state), "chunk")
        return o, None if final is None else final.mT

    def _step(self, inputs):  # type: ignore[no-untyped-def]
        self.calls.append(inputs)
        return TorchKernel()._execute(inputs, "step")


# ---- malformed calls: one clear ValueError, before anything runs -----------------------------------------------------


def _with(**changes: object) -> dict[str, object]:
    return {**random_call(1, 12, dtype=torch.float32), **changes}


MALFORMED = {
    "q has three dimensions": (_with(q=torch.zeros(1, 12, 8)), r"q needs shape \[B, T, H, K\], got \[1, 12, 8\]"),
    "q is no tensor": (_with(q=[1.0]), "q needs a tensor, got list"),
    "k of another size": (_with(k=torch.zeros(1, 12, 2, 4)), r"k needs shape \[1, 12, 2, 8\] .* got \[1, 12, 2, 4\]"),
    "v of another length": (_with(v=torch.zeros(1, 11, 4, 8)), r"v needs shape \[1, 12, 4, 8\]"),
    "g of another head count": (_with(g=torch.zeros(1, 12, 2)), r"g needs shape \[1, 12, 4\]"),
    "beta with a size": (_with(beta=torch.zeros(1, 12, 4, 1)), "beta needs shape"),
    "integers": ({**_with(), **{n: torch.zeros(1, 12, 2, 8, dtype=torch.int64) for n in "qkv"}, "g": torch.zeros(1, 12, 2),
                  "beta": torch.zeros(1, 12, 2)}, "q needs float64, float32, bfloat16 or float16, got torch.int64"),
    "two dtypes": (_with(k=torch.zeros(1, 12, 2, 8, dtype=torch.bfloat16)), "q, k and v need one dtype"),
    "g in bfloat16": (_with(g=torch.zeros(1, 12, 4, dtype=torch.bfloat16)), "g needs torch.float32"),
    "beta of integers": (_with(beta=torch.zeros(1, 12, 4, dtype=torch.int64)), "beta needs a floating dtype"),
    "scale is a tensor": (_with(scale=torch.ones(())), "scale needs a finite number"),
    "scale is infinite": (_with(scale=float("inf")), "scale needs a finite number"),
    "flag is a state": (_with(output_final_state=torch.zeros(1)), "output_final_state needs True or False"),
    "state of another count": (_with(initial_state=torch.zeros(2, 4, 8, 8)), r"initial_state needs shape \[1, 4, 8, 8\]"),
    "state in bfloat16": (_with(initial_state=torch.zeros(1, 4, 8, 8, dtype=torch.bfloat16)), "initial_state needs"),
    "state on another device": (_with(initial_state=torch.zeros(1, 4, 8, 8, device="meta")), "initial_state needs q's device"),
    "boundaries are a list": (_with(cu_seqlens=[0, 12]), "cu_seqlens needs a tensor or a PackedSequences"),
    "boundaries of floats": (_with(cu_seqlens=torch.tensor([0.0, 12.0])), "int32 or int64"),
    "one boundary": (_with(cu_seqlens=torch.tensor([0])), r"shape \[N\+1\] with N >= 1"),
    "boundaries end early": (_with(cu_seqlens=torch.tensor([0, 11])), "end at T=12, got 11"),
    "boundaries start late": (_with(cu_seqlens=torch.tensor([1, 12])), "start at 0, got 1"),
    "boundaries fall": (_with(cu_seqlens=torch.tensor([0, 7, 5, 12])), "got 7 then 5 at document 1"),
    "object of another length": (_with(cu_seqlens=PackedSequences.from_lengths([5])), "end at T=12, got 5"),
    "a state for each document": (
        _with(cu_seqlens=torch.tensor([0, 4, 12]), initial_state=torch.zeros(1, 4, 8, 8)), r"initial_state needs shape \[2,"),
}  # fmt: skip


@pytest.mark.parametrize("form", ["chunk", "step"])
@pytest.mark.parametrize("fault", MALFORMED)
def test_a_malformed_call_is_one_value_error_before_anything_runs(fault: str, form: str) -> None:
    call, message = MALFORMED[fault]
    spy = Spy()
    with pytest.raises(ValueError, match=message):
        (spy if form == "chunk" else spy.step)(**call)
    assert spy.calls == []


def test_boundaries_need_a_batch_of_one() -> None:
    with pytest.raises(ValueError, match="batch of one, got B=2"):
        TorchKernel()(**random_call(2, 6), cu_seqlens=torch.tensor([0, 6]))


def test_unknown_arguments_are_not_swallowed() -> None:
    with pytest.raises(TypeError, match="head_first"):
        TorchKernel()(**random_call(), head_first=True)


# ---- limits: every refusal at once, before anything runs ------------------------------------------------------------

LIMITS = {
    "form": ({"chunk": False}, {}),
    "device": ({"devices": frozenset({"cuda"})}, {}),
    "dtype": ({"dtypes": frozenset({torch.bfloat16})}, {}),
    "key_head_size": ({"key_head_sizes": frozenset({128})}, {}),
    "value_head_size": ({"value_head_sizes": range(1, 5)}, {}),
    "backward": ({"backward": False}, {"grad": True}),
    "state_backward": ({"state_backward": False}, {"grad": True, "N": 1}),
    "initial_state": ({"initial_state": False}, {"N": 1}),
    "final_state": ({"final_state": False}, {}),
    "packed": ({"packed": False}, {}),
}


@pytest.mark.parametrize("code", LIMITS)
def test_a_limit_is_refused_with_a_reason_and_nothing_runs(code: str) -> None:
    limits, options = LIMITS[code]
    spy = Spy(**limits)
    call = random_call(1, 12, dtype=torch.float32, **options)
    arguments = {**call, "output_final_state": True, "cu_seqlens": torch.tensor([0, 12])}
    assert [refusal.code for refusal in spy.refusals(**arguments)] == [code]
    with pytest.raises(UnsupportedCall) as error:
        spy(**arguments)
    assert [refusal.code for refusal in error.value.refusals] == [code]
    assert spy.calls == []
    assert str(error.value.refusals[0]) in str(error.value)
    assert "T=12 H=2 HV=4" in str(error.value)


def test_all_reasons_are_collected() -> None:
    spy = Spy(chunk=False, devices=frozenset({"cuda"}), dtypes=frozenset(), packed=False)
    got = spy.refusals(**random_call(1, 12, dtype=torch.float32), cu_seqlens=torch.tensor([0, 12]))
    assert [refusal.code for refusal in got] == ["form", "device", "dtype", "packed"]


def test_gradients_count_only_where_autograd_records() -> None:
    spy = Spy(backward=False)
    call = random_call(1, 12, dtype=torch.float32, grad=True)
    with torch.no_grad():
        assert spy.refusals(**call) == ()
        spy(**call)
    assert spy.refusals(**call, form="step") == ()


def test_refusals_never_read_a_tensor() -> None:
    """On the meta device every read of a value raises."""
    call = {name: x.to("meta") for name, x in random_call(1, 12, dtype=torch.float32, N=2).items()}
    cu_seqlens = torch.empty(3, dtype=torch.int32, device="meta")
    kernel = TorchKernel()
    assert kernel.refusals(**call, cu_seqlens=cu_seqlens) == ()
    assert kernel.refusals(**call, cu_seqlens=cu_seqlens, form="step") == ()
    assert "packed N=2" in kernel.explain(**call, cu_seqlens=cu_seqlens)


class Missing(Spy):
    def _machine_refusals(self, hardware: Hardware):  # type: ignore[no-untyped-def]
        yield Refusal("package", "frob >= 2", "none", "pip install 'frob>=2'")


def test_require_says_what_a_machine_lacks_and_constructing_never_does() -> None:
    kernel = Missing()
    with pytest.raises(
        UnsupportedCall, match=r"Missing\(\) cannot run on cpu:\n  - \[package\] needs frob >= 2; got none"
    ):
        kernel.require("cpu")
    Spy().require("cpu")
    with pytest.raises(UnsupportedCall, match=r"\[device\] needs cuda; got cpu"):
        Spy(devices=frozenset({"cuda"})).require("cpu")


def test_an_exception_inside_a_check_is_a_bug_and_propagates() -> None:
    class Broken(Spy):
        def _refusals(self, inputs, form):  # type: ignore[no-untyped-def]
            raise KeyError("bug")

    with pytest.raises(KeyError, match="bug"):
        Broken().refusals(**random_call(1, 12, dtype=torch.float32))


def test_errors_cross_process_boundaries() -> None:
    error = UnsupportedCall("K()", [Refusal("dtype", "a", "b", "c")], "step")
    again = pickle.loads(pickle.dumps(error))
    assert (again.refusals, str(again)) == (error.refusals, str(error))


# ---- lowerings: exact, differentiable, said --------------------------------------------------------------------------

LOWERED = {
    "empty_sequences": ({"empty_sequences": False}, "empty documents are left out"),
    "value_head_groups": ({"value_head_groups": False}, r"repeated 2 times to HV=4"),
    "qk_l2norm": ({"qk_l2norm": False}, "normalised before the kernel"),
    "strided": ({"strided": False}, "strided q, k, v, g, beta, initial_state copied"),
    "state_layout": ({"state_layout": "vk"}, r"transposed to \[N, HV, V, K\]"),
}


@pytest.mark.parametrize("name", LOWERED)
def test_a_lowering_changes_nothing_but_the_way(name: str) -> None:
    limits, _ = LOWERED[name]
    bounds = (0, 0, 5, 5, 70, 70)
    call = random_call(1, 70, K=8, V=6, dtype=torch.float32, N=5, grad=True)
    if name == "strided":
        call = {n: x.detach().transpose(0, -1).contiguous().transpose(0, -1).requires_grad_() for n, x in call.items()}
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True, "cu_seqlens": torch.tensor(bounds)}
    spy = Spy(**limits)
    o, final = spy(**call, **options)
    (seen,) = spy.calls
    wide = {n: x.detach().double().requires_grad_() for n, x in call.items()}
    want_o, want_final = recurrence(**wide, norm=True, bounds=bounds)
    assert relative(o, want_o) < 1e-5
    assert relative(final, want_final) < 1e-5
    weight = torch.randn(final.shape)
    got = torch.autograd.grad(o.sum() + (final * weight).sum(), list(call.values()))
    want = torch.autograd.grad(want_o.sum() + (want_final * weight).sum(), list(wide.values()))
    for n, a, b in zip(call, got, want, strict=True):
        assert relative(a, b) < 1e-4, n
    lowered_state = (2, 4, 6, 8) if name == "state_layout" else (2, 4, 8, 6)
    expected = {
        "empty_sequences": seen.packed.lengths == (5, 65),
        "value_head_groups": seen.H == 4,
        "qk_l2norm": not seen.use_qk_l2norm_in_kernel and relative(seen.q.norm(dim=-1), torch.ones(1, 70, 2)) < 1e-5,
        "strided": all(x.is_contiguous() for x in (seen.q, seen.k, seen.v, seen.g, seen.beta, seen.initial_state)),
        "state_layout": tuple(seen.initial_state.shape)[-2:] == lowered_state[-2:],
    }
    assert expected[name]


@pytest.mark.parametrize("name", LOWERED)
def test_explain_says_each_lowering_and_only_those(name: str) -> None:
    limits, words = LOWERED[name]
    call = random_call(1, 12, dtype=torch.float32, N=3)
    if name == "strided":
        call = {n: x.transpose(0, -1).contiguous().transpose(0, -1) for n, x in call.items()}
    packed = PackedSequences.from_lengths([5, 0, 7])
    arguments = {**call, "use_qk_l2norm_in_kernel": True, "cu_seqlens": packed}
    import re

    assert re.search(words, Spy(**limits).explain(**arguments))
    assert "lowered" not in Spy().explain(**arguments)


def test_boundaries_given_as_a_tensor_are_said_to_be_read() -> None:
    assert "boundaries are read" in Spy().explain(**_with(cu_seqlens=torch.tensor([0, 12])))


@pytest.mark.parametrize("form", ["chunk", "step"])
@pytest.mark.parametrize("bounds", [None, (0, 0, 0)])
def test_no_token_at_all(form: str, bounds: tuple[int, ...] | None) -> None:
    N = 2
    call = random_call(2 if bounds is None else 1, 0, dtype=torch.float32, N=N, grad=True)
    spy = Spy()
    cu_seqlens = None if bounds is None else torch.tensor(bounds)
    o, final = (spy if form == "chunk" else spy.step)(**call, output_final_state=True, cu_seqlens=cu_seqlens)
    assert o.shape == call["v"].shape
    assert torch.equal(final, call["initial_state"])
    (o.sum() + final.sum()).backward()
    assert torch.equal(call["initial_state"].grad, torch.ones_like(final))
    assert all(x.grad is not None for x in call.values())  # one rank's empty batch must not hold up a reduction
    assert spy.calls == []


def test_a_state_that_was_not_asked_for_is_not_returned() -> None:
    assert TorchKernel()(**random_call())[1] is None
    assert TorchKernel().step(**random_call())[1] is None


# ---- writing a kernel ------------------------------------------------------------------------------------------------


def test_declarations_are_checked_when_the_class_is_made() -> None:
    with pytest.raises(TypeError, match="needs tolerances for each dtype"):
        type("K", (GatedDeltaKernel,), {"capabilities": KernelCapabilities(dtypes=FLOAT32)})
    with pytest.raises(TypeError, match=r"needs capabilities.chunk=True exactly where it writes _chunk"):
        type("K", (GatedDeltaKernel,), {"capabilities": KernelCapabilities(dtypes=FLOAT32, chunk=True)})
    with pytest.raises(TypeError, match="needs a class attribute capabilities"):
        GatedDeltaKernel()


@pytest.mark.parametrize(
    ("field", "error", "words"),
    [
        ({"dtypes": torch.float32}, TypeError, r"dtypes needs a set of dtypes, .*got torch.float32"),
        ({"dtypes": [torch.float32]}, TypeError, "dtypes needs a set"),
        ({"dtypes": {"float32"}}, TypeError, "dtypes needs a set"),
        ({"devices": "cuda"}, TypeError, r"devices needs a set of strs, such as frozenset\({'cuda'}\); got 'cuda'"),
        ({"devices": {torch.device("cpu")}}, TypeError, "devices needs a set"),
        ({"chunk": 1}, TypeError, "chunk needs True or False, got 1"),
        ({"packed": None}, TypeError, "packed needs True or False"),
        ({"key_head_sizes": 128}, TypeError, "key_head_sizes needs None for any size or a container of ints"),
        ({"value_head_sizes": "128"}, TypeError, "value_head_sizes needs None"),
        ({"state_layout": "KV"}, ValueError, "state_layout needs 'kv' or 'vk', got 'KV'"),
        ({"dense": False}, ValueError, "packed=True where dense=False"),
    ],
)
def test_a_wrong_declaration_names_its_field(field: dict[str, object], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        KernelCapabilities(**{"dtypes": FLOAT32, **field})


def test_tolerances_are_numbers_by_dtype() -> None:
    with pytest.raises(TypeError, match="gradient needs a relative error such as 1e-5, got None"):
        Tolerance(1e-5, 1e-5, None)
    declared = KernelCapabilities(dtypes=FLOAT32)
    for wrong in (1e-5, {torch.float32: 1e-5}):
        with pytest.raises(TypeError, match=r"K needs tolerances = {dtype: Tolerance\(...\)}"):
            type("K", (GatedDeltaKernel,), {"capabilities": declared, "tolerances": wrong})


@pytest.mark.parametrize("form", ["chunk", "step"])
@pytest.mark.parametrize(("keep", "got"), [(0, "Tensor"), (slice(0, 1), "1 values"), (slice(1, 1), "0 values")])
def test_a_kernel_that_returns_no_pair_is_told_so(form: str, keep: int | slice, got: str) -> None:
    class Wrong(Spy):
        def _chunk(self, inputs):  # type: ignore[no-untyped-def]
            return super()._chunk(inputs)[keep]

        def _step(self, inputs):  # type: ignore[no-untyped-def]
            return super()._step(inputs)[keep]

    call = random_call(2, 12, dtype=torch.float32)  # o of two rows would unpack into two values
    with pytest.raises(TypeError, match=rf"a pair \(o, final_state or None\) from _{form}, got {got}"):
        (Wrong() if form == "chunk" else Wrong().step)(**call)


@pytest.mark.parametrize("wrong", ["shape", "dtype", "no state"])
def test_a_kernel_that_returns_something_else_is_told_what_it_owes(wrong: str) -> None:
    class Wrong(Spy):
        def _chunk(self, inputs):  # type: ignore[no-untyped-def]
            o, final = super()._chunk(inputs)
            return {"shape": (o[:, 1:], final), "dtype": (o.double(), final), "no state": (o, None)}[wrong]

    with pytest.raises(TypeError, match="needs to return"):
        Wrong()(**random_call(1, 12, dtype=torch.float32), output_final_state=True)


def test_defaults_declare_nothing() -> None:
    bare = KernelCapabilities(dtypes=frozenset())
    flags = {field.name: getattr(bare, field.name) for field in fields(bare)}
    assert flags.pop("dense") is True  # what every kernel computes, unless it says that it takes packed input only
    assert all(value in (False, None, "kv", frozenset()) for value in flags.values()), flags
    assert bare.devices == frozenset()


def test_kernels_copy_and_pickle() -> None:
    for kernel in (copy.deepcopy(TorchKernel()), pickle.loads(pickle.dumps(TorchKernel()))):
        assert repr(kernel) == "TorchKernel()"
        assert kernel.refusals(**random_call()) == ()


# ---- what may import what ----------------------------------------------------------------------------------------------


def test_packages_import_only_downwards() -> None:
    import ast
    from pathlib import Path

    import qwenlinear

    root = Path(qwenlinear.__file__).parent
    forbidden = {
        "kernels": ("qwenlinear.layers", "qwenlinear.distributed", "qwenlinear.testing", "qwenlinear.bench"),
        "distributed": ("qwenlinear.layers", "qwenlinear.kernels", "qwenlinear.testing"),
        "layers": (
            "qwenlinear.distributed",
            "qwenlinear.testing",
            "qwenlinear.kernels.fla",
            "qwenlinear.kernels.flashqla",
        ),
    }
    for package, names in forbidden.items():
        for path in (root / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                imported = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                imported += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                assert not [i for i in imported if i.startswith(names)], f"{path.name} imports {imported}"


def test_no_module_is_longer_than_400_lines() -> None:
    from pathlib import Path

    import qwenlinear

    lengths = {str(path): len(path.read_text().splitlines()) for path in Path(qwenlinear.__file__).parent.rglob("*.py")}
    assert {path: n for path, n in lengths.items() if n > 400} == {}
