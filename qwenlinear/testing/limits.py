"""What a kernel must say no to: everything that it does not declare, and calls that no kernel could take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from qwenlinear.errors import UnsupportedCall
from qwenlinear.kernels.base import GatedDeltaKernel
from qwenlinear.kernels.capabilities import Form, KernelCapabilities
from qwenlinear.testing.cases import Case, draw
from qwenlinear.testing.running import Arguments, Execution, Fault, form_of, run

_SIZES = (16, 24, 64, 128, 1, 2, 256, 512, 7)


def beyond(capabilities: KernelCapabilities, case: Case) -> Iterator[Case]:
    """Calls outside the declared capabilities, and calls that nobody could take.

    Args:
        capabilities: of a kernel.
        case: a call within them, in a form that is declared.

    Yields:
        Cases that only one limit forbids.
    """
    plain = case.but(grad="", T=3, B=1)
    for code, limited in _beyond(capabilities, plain):
        yield limited.but(topic=f"limit {code}", check="refused", expects=code)
    for text in MALFORMED:
        if text.startswith("state_in_place") and plain.form == "chunk":
            continue  # an argument of the recurrent form alone
        yield plain.but(topic="malformed call", check="malformed", expects=text)


def _beyond(capabilities: KernelCapabilities, plain: Case) -> Iterator[tuple[str, Case]]:
    H, HV, K, V = plain.heads
    for form, declared in (("chunk", capabilities.chunk), ("step", capabilities.step)):
        if not declared:
            yield "form", plain.but(form=form)
    for dtype in ("float64", "float32", "bfloat16", "float16"):
        if getattr(torch, dtype) not in capabilities.dtypes:
            yield "dtype", plain.but(dtype=dtype)
    for size in _SIZES:
        if capabilities.key_head_sizes is not None and size not in capabilities.key_head_sizes:
            yield "key_head_size", plain.but(heads=(H, HV, size, V))
        if capabilities.value_head_sizes is not None and size not in capabilities.value_head_sizes:
            yield "value_head_size", plain.but(heads=(H, HV, K, size))
    if not (capabilities.backward if plain.form == "chunk" else capabilities.step_backward):
        for name in ("q", "k", "v", "g", "beta"):
            yield "backward", plain.but(grad=name)
    elif not capabilities.state_backward and capabilities.initial_state:
        yield "state_backward", plain.but(grad="initial_state", initial_state=True)
    for flag in ("initial_state", "final_state"):
        if not getattr(capabilities, flag):
            yield flag, plain.but(**{flag: True})
    if not capabilities.packed:
        yield "packed", plain.but(lengths=(1, 2))


def refused(kernel: GatedDeltaKernel, case: Case, device: torch.device | str) -> dict[str, tuple[float, float]]:
    """A call beyond a limit is refused by the question and by the call alike, before anything runs."""
    try:
        run(lambda arguments: _refuse(kernel, case, arguments), draw(case, device))
    except (Fault, UnsupportedCall) as error:
        if isinstance(error, Fault):
            raise
    except Exception as error:
        raise Fault(
            f"a call beyond {case.expects!r} needs UnsupportedCall, got {type(error).__name__}: {error}"
        ) from error
    return {}


def _refuse(kernel: GatedDeltaKernel, case: Case, arguments: Arguments) -> Any:
    asked = kernel.refusals(**arguments, form=case.form)
    if case.expects not in [refusal.code for refusal in asked]:
        raise Fault(f"refusals() does not name {case.expects!r}, which is not declared: {list(asked)}")
    if not all(refusal.needs and refusal.got and refusal.remedy for refusal in asked):
        raise Fault(f"a refusal needs all of needs, got and remedy: {list(asked)}")
    if "refused" not in kernel.explain(**arguments):
        raise Fault(f"explain() does not say that {case.expects!r} is refused")
    form_of(kernel, case.form)(arguments)
    raise Fault(f"the call ran although {case.expects!r} is not declared")


def _in_place(a: Arguments) -> Arguments:
    states = (len(a["q"]), *a["v"].shape[2:3], a["q"].shape[3], a["v"].shape[3])
    return {**a, "initial_state": a["g"].new_zeros(states), "output_final_state": True, "state_in_place": True}


def _expanded(a: Arguments) -> Tensor:
    state: Tensor = a["initial_state"]
    return state.new_zeros(1, 1, 1, 1).expand(state.shape)


MALFORMED: dict[str, Callable[[Arguments], Arguments]] = {  # the first word names the argument
    "q with three dimensions": lambda a: {**a, "q": a["q"][0]},
    "k with fewer tokens": lambda a: {**a, "k": a["k"][:, :-1]},
    "k of another dtype": lambda a: {**a, "k": a["k"].to(torch.complex64)},
    "v without heads": lambda a: {**a, "v": a["v"][:, :, :0], "g": a["g"][:, :, :0], "beta": a["beta"][:, :, :0]},
    "g in 16 bits": lambda a: {**a, "g": a["g"].to(torch.float16)},
    "beta with four dimensions": lambda a: {**a, "beta": a["beta"][..., None]},
    "scale not finite": lambda a: {**a, "scale": float("nan")},
    "initial_state of another shape": lambda a: {**a, "initial_state": a["g"].new_zeros(7, 7, 7, 7)},
    "cu_seqlens as a list": lambda a: {**a, "cu_seqlens": [0, 3]},
    "state_in_place without an initial_state": lambda a: {**_in_place(a), "initial_state": None},
    "state_in_place without output_final_state": lambda a: {**_in_place(a), "output_final_state": False},
    "state_in_place with gradients": lambda a: {**_in_place(a), "v": a["v"].detach().clone().requires_grad_()},
    "state_in_place of an expanded state": lambda a: {**_in_place(a), "initial_state": _expanded(_in_place(a))},
}


def malformed(kernel: GatedDeltaKernel, case: Case, device: torch.device | str) -> dict[str, tuple[float, float]]:
    """A malformed call is a ValueError that names the argument, whatever the capabilities."""
    drawn, argument = draw(case, device), case.expects.split()[0]
    broken = MALFORMED[case.expects]({**drawn.view(drawn.bases), **drawn.options})
    asked: Execution = lambda arguments: kernel.refusals(**arguments, form=case.form)  # type: ignore[assignment, return-value] # noqa: E731
    for name, call in (("the call", form_of(kernel, case.form)), ("refusals()", asked)):
        try:
            call(broken)
        except ValueError as error:
            if argument in str(error):
                continue
            raise Fault(f"{name} with {case.expects} needs to name {argument}, got: {error}") from error
        except Exception as error:
            raise Fault(
                f"{name} with {case.expects} needs a ValueError, got {type(error).__name__}: {error}"
            ) from error
        raise Fault(f"{name} with {case.expects} needs a ValueError, got an answer")
    return {}


def widened(capabilities: KernelCapabilities, device_type: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each capability that is not declared, declared.

    Args:
        capabilities: of a kernel.
        device_type: where it is tried.

    Yields:
        What is tried, in words, and the fields to replace.
    """
    forms: dict[str, Form] = {"backward": "chunk", "step_backward": "step", "state_in_place": "step"}
    names = (
        "backward",
        "step_backward",
        "state_backward",
        "initial_state",
        "final_state",
        "state_in_place",
        "packed",
        "value_head_groups",
    )
    for name in (*names, "dense", "empty_sequences", "qk_l2norm", "strided", "deterministic", "isolated_gradients"):
        if not getattr(capabilities, name) and getattr(capabilities, forms.get(name, "chunk"), True):
            yield name, {name: True}
    for name in ("key_head_sizes", "value_head_sizes"):
        if getattr(capabilities, name) is not None:
            yield name, {name: None}
    for dtype in ("float64", "float32", "bfloat16", "float16"):
        if getattr(torch, dtype) not in capabilities.dtypes:
            yield f"dtypes: {dtype}", {"dtypes": capabilities.dtypes | {getattr(torch, dtype)}}
    if capabilities.devices is not None and device_type not in capabilities.devices:
        yield f"devices: {device_type}", {"devices": capabilities.devices | {device_type}}
