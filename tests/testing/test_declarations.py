"""What a kernel declares is proven both ways: a flag too wide fails, a flag too narrow is found."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from qwenlinear.kernels import GatedDeltaKernel, KernelCapabilities, Tolerance, TorchKernel
from qwenlinear.testing import ConformanceError, check_kernel, too_narrow
from qwenlinear.testing.generate import generate
from tests.testing.broken_kernels import wrong_gradient

FULL = TorchKernel.capabilities
FLAGS = set(KernelCapabilities.__dataclass_fields__)


class _SpoiledByAnyToken(torch.autograd.Function):
    """The gradient of every document is multiplied with every other's values, and with zero."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient + 0 * ctx.saved_tensors[0].sum()


class Limited(TorchKernel):
    """A kernel that lacks what `lacks` says, whatever it declares."""

    lacks = ""

    def _chunk(self, inputs):
        return self._run_limited(inputs, super()._chunk)

    def _step(self, inputs):
        return self._run_limited(inputs, super()._step)

    def _run_limited(self, inputs, run):
        packed, group = inputs.packed, inputs.HV // inputs.H
        state = inputs.initial_state
        if inputs.state_in_place and "backward" in self.lacks:
            return run(inputs)  # no gradient is wanted there
        match self.lacks:
            case "dtypes":
                narrow = {name: getattr(inputs, name).float() for name in ("q", "k", "v", "g", "beta")}
                state = None if state is None else state.float()
                o, final = run(replace(inputs, **narrow, initial_state=state))
                return o.to(inputs.q.dtype), None if final is None else final.to(inputs.g.dtype)
            case "devices":
                if inputs.q.device.type == "cpu":
                    raise RuntimeError("no kernel image for this device")
            case "backward" | "step_backward":
                o, final = run(inputs)
                return o.detach(), None if final is None else final.detach()
            case "state_backward" | "initial_state" if state is not None:
                inputs = replace(inputs, initial_state=state.detach() if self.lacks == "state_backward" else None)
            case "final_state":
                return run(inputs)[0], None
            case "state_in_place":
                return run(replace(inputs, state_in_place=False))
            case "packed" if packed is not None:
                inputs = replace(inputs, initial_state=None if state is None else state[:1], cu_seqlens=None)
                o, final = run(inputs)
                return o, None if final is None else final.repeat(packed.num_sequences, 1, 1, 1)
            case "dense" if packed is None:
                raise ValueError("cu_seqlens is required")
            case "key_head_sizes" if inputs.K % 16:
                inputs = replace(inputs, k=torch.cat([inputs.k[..., :-1], 0 * inputs.k[..., -1:]], -1))
            case "value_head_sizes" if inputs.V % 16:
                inputs = replace(inputs, v=torch.cat([inputs.v[..., :-1], 0 * inputs.v[..., -1:]], -1))
            case "empty_sequences" if packed is not None and 0 in packed.lengths:
                raise ValueError("empty segments are not supported")
            case "value_head_groups":
                inputs = replace(inputs, q=inputs.q.repeat(1, 1, group, 1), k=inputs.k.repeat(1, 1, group, 1))
            case "qk_l2norm":
                inputs = replace(inputs, use_qk_l2norm_in_kernel=False)
            case "strided":
                inputs = replace(
                    inputs, v=torch.as_strided(inputs.v, inputs.v.shape, torch.empty(inputs.v.shape).stride())
                )
            case "isolated_gradients" if packed is not None:
                inputs = replace(inputs, q=_SpoiledByAnyToken.apply(inputs.q))
            case "deterministic":
                o, final = run(inputs)
                return o + 1e-7 * torch.rand(()) * o, final
            case "compile_safe":
                inputs = replace(inputs, scale=inputs.scale * (1.0 if inputs.v.sum().item() else 2.0))
        return run(inputs)


def _limited(flag: str, **declared: object) -> type[GatedDeltaKernel]:
    return type(f"Without_{flag}", (Limited,), {"lacks": flag, "capabilities": replace(FULL, **declared)})


# Kernels that lack a flag and declare all the rest rightly; chunk and step cannot be declared without their method.
LACKING = {flag: {flag: True} for flag in FLAGS if isinstance(getattr(FULL, flag), bool)} | {
    "backward": {"step_backward": False, "step": True},
    "step_backward": {"chunk": True},
    "dtypes": {"dtypes": frozenset({torch.float64})},
    "devices": {"devices": None},
    "key_head_sizes": {},
    "value_head_sizes": {},
    "state_layout": {"state_layout": "vk"},
}


@pytest.mark.parametrize("flag", sorted(FLAGS - {"chunk", "step"}))
def test_a_flag_too_wide_fails(flag: str) -> None:
    with pytest.raises(ConformanceError):
        check_kernel(_limited(flag, **LACKING[flag])(), packings=10)


@pytest.mark.parametrize("flag", ["dtypes", "backward", "state_backward", "initial_state", "final_state", "packed"])
def test_the_same_kernels_pass_where_they_do_not_declare_it(flag: str) -> None:
    honest = {"dtypes": frozenset({torch.float32}), "step_backward": flag not in ("backward", "state_backward")}
    if flag != "dtypes":
        honest[flag] = False
    kernel = _limited(flag, **honest)()
    cases = [case for case in generate(kernel, "cpu", packings=10) if case.shape[1] < 1000 or case.check == "packings"]
    assert check_kernel(kernel, cases=cases).passed  # the long sequences say nothing about a flag


@pytest.mark.parametrize(("form", "method"), [("chunk", "_chunk"), ("step", "_step")])
def test_a_form_is_declared_exactly_where_it_is_written(form: str, method: str) -> None:
    other = {"chunk": "_step", "step": "_chunk"}
    with pytest.raises(TypeError, match=f"capabilities.{form}=True exactly where it writes {method}"):
        type(
            "Wide",
            (GatedDeltaKernel,),
            {"capabilities": replace(FULL), "tolerances": TorchKernel.tolerances, other[form]: TorchKernel._chunk},
        )
    with pytest.raises(TypeError, match=f"capabilities.{form}=True exactly where it writes {method}"):
        type("Narrow", (TorchKernel,), {"capabilities": replace(FULL, **{form: False})})


NARROWED = {flag: {flag: False} for flag in FLAGS if getattr(FULL, flag) is True and flag not in ("chunk", "step")} | {
    "backward": {"backward": False, "state_backward": True},
    "initial_state": {"initial_state": False},
    "dtypes: bfloat16": {"dtypes": FULL.dtypes - {torch.bfloat16}},
    "dtypes: float64": {"dtypes": FULL.dtypes - {torch.float64}},
    "devices: cpu": {"devices": frozenset({"cuda"})},
    "key_head_sizes": {"key_head_sizes": frozenset({16, 64})},
    "value_head_sizes": {"value_head_sizes": range(8, 65)},
}


@pytest.mark.parametrize("flag", NARROWED)
def test_a_flag_too_narrow_is_found(flag: str) -> None:
    narrow = type("Narrow", (TorchKernel,), {"capabilities": replace(FULL, **NARROWED[flag])})
    assert [remark.split(" (")[0] for remark in too_narrow(narrow())] == [flag]


def test_remarks_on_narrow_flags_are_in_the_report() -> None:
    narrow = {"dtypes": frozenset({torch.float32}), "packed": False, "step_backward": False}
    kernel = type("Narrow", (TorchKernel,), {"capabilities": replace(FULL, **narrow)})()
    report = check_kernel(kernel)
    assert report.passed
    assert any(remark.startswith("packed") for remark in report.too_narrow)
    assert "declared too narrow: packed" in report.table()


def test_a_kernel_for_another_device_passes_nothing() -> None:
    elsewhere = type("Elsewhere", (TorchKernel,), {"capabilities": replace(FULL, devices=frozenset({"cuda"}))})
    with pytest.raises(
        ConformanceError, match=r"no case ran: every one was refused(?s:.*)\[device\] needs cuda; got cpu"
    ):
        check_kernel(elsewhere())


def test_a_promise_of_any_value_is_no_promise() -> None:
    loose = type(
        "Loose",
        (TorchKernel,),
        {
            "capabilities": replace(FULL, dtypes=frozenset({torch.float32})),
            "tolerances": {torch.float32: Tolerance(1.0, 1.0, 1.0)},
            "_chunk": lambda self, inputs: TorchKernel._chunk(self, replace(inputs, g=wrong_gradient(inputs.g, 0.0))),
        },
    )
    with pytest.raises(ConformanceError, match="tolerance"):
        check_kernel(loose())
