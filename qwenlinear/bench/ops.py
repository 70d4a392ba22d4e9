"""Prologue and epilogue by themselves: time, bytes a second on what must move, and the share of a copy's bandwidth."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qwenlinear.bench.cases import Case
from qwenlinear.bench.floor import Sizes, copying
from qwenlinear.bench.layer_contenders import Setup
from qwenlinear.bench.session import Session, say
from qwenlinear.bench.timing import Call, captured, interleave
from qwenlinear.kernels.packing import PackedSequences


def measure(session: Session, setup: Setup, cases: list[Case], rounds: int, seconds: float) -> None:
    """Add rows ``ops`` to a session's results.

    Args:
        session: gathers the rows.
        setup: sizes and weights.
        cases: shapes.
        rounds: rounds of turns.
        seconds: time for the rounds of one shape.

    Raises:
        ImportError: this version of qwenlinear has no operators.
    """
    package = importlib.import_module("qwenlinear.ops")
    c = setup.config
    sizes: dict[str, dict[str, Any]] = {
        "prologue": {
            "width": c.linear_conv_kernel_dim,
            "head_dims": (c.linear_key_head_dim, c.linear_value_head_dim),
        },
        "epilogue": {"norm_size": c.linear_value_head_dim},
    }
    reasons = {op: package.why_not_fused(setup.device, setup.dtype, **its) for op, its in sizes.items()}
    forms = {op: "Triton" if reason is None else f"PyTorch: {reason}" for op, reason in reasons.items()}
    for case in cases:
        if session.late(f"the operators of {case}"):
            return
        _measure(session, setup, case, forms, rounds, seconds, package)
        if setup.device.type == "cuda":
            torch.cuda.empty_cache()


def _measure(
    session: Session, setup: Setup, case: Case, forms: dict[str, str], rounds: int, seconds: float, package: Any
) -> None:
    counted = Sizes(setup.config, setup.dtype)
    calls: dict[str, Call] = {}
    for op, make in (("prologue", prologue_of), ("epilogue", epilogue_of)):
        forward, leaves = make(setup, case, getattr(package, op))
        calls[f"{op} forward"] = _without_gradients(forward)
        calls[f"{op} backward"] = _backward(forward, leaves)
    eager: dict[str, str] = {}
    for op, call in calls.items() if setup.device.type == "cuda" else ():
        calls[op], eager[op] = _captured(call)
    copies = {f"copy for {op}": copying(counted.bytes_of(op, case.tokens), setup.device) for op in list(calls)}
    timings = interleave({**calls, **copies}, setup.device, rounds, seconds)
    for op in calls:
        timing, copy, size = timings[op], timings[f"copy for {op}"], counted.bytes_of(op, case.tokens)
        form = forms[op.split()[0]]
        words = f"{form}, {eager[op]}" if eager.get(op) else form
        row: dict[str, Any] = {**case.as_row(), "op": op, "form": words, "bytes": size}
        if timing.seconds and copy.seconds:
            row |= {
                "ms": timing.median * 1e3,
                "gb_s": size / timing.median / 1e9,
                "copy_gb_s": size / copy.median / 1e9,
            }
            row["share"] = timing.ratio(copy)  # the copy's time over the operator's, round by round
            say(f"ops {case} {op}: {row['ms']:.3f} ms, {row['gb_s']:.0f} GB/s, {100 * row['share']:.0f} % of a copy")
        else:
            row["error"] = timing.error or copy.error
        session.results["ops"].append(row)


def _captured(call: Call) -> tuple[Call, str]:
    """The call as a CUDA graph, because alone it ends before the host has launched the next one; or as it is, and why."""
    try:
        return captured(call), ""
    except RuntimeError as error:
        return call, f"not in a CUDA graph, so with the host's time: {error}"[:300]


Forward = Callable[[], "list[Tensor]"]


def prologue_of(setup: Setup, case: Case, prologue: Callable[..., Any]) -> tuple[Forward, list[Tensor]]:
    """The prologue on views of one buffer, as the layer's projection leaves them.

    Args:
        setup: sizes and weights.
        case: the shape.
        prologue: the operator.

    Returns:
        What runs it, and its leaves.
    """
    c, HV = setup.config, setup.config.linear_num_value_heads
    projected = _draw(setup, case.tokens, Sizes(c, setup.dtype).projected)
    qkv, b, a, _ = torch.split(projected, [c.conv_dim, HV, HV, c.value_dim], -1)
    own = [setup.weights[name] for name in ("conv1d.weight", "A_log", "dt_bias")]
    leaves = [t.detach().requires_grad_() for t in (qkv, b, a, *own)]
    packed = None
    if case.packed is not None:
        packed = PackedSequences.from_lengths(case.packed.lengths, device=setup.device)
    heads = (c.linear_num_key_heads, HV)
    dims = (c.linear_key_head_dim, c.linear_value_head_dim)

    def forward() -> list[Tensor]:
        return list(prologue(*leaves, heads=heads, head_dims=dims, activation="silu", l2norm=True, packed=packed)[:5])

    return forward, leaves


def epilogue_of(setup: Setup, case: Case, epilogue: Callable[..., Any]) -> tuple[Forward, list[Tensor]]:
    """The epilogue on a kernel's contiguous output and z as a view of the projection's buffer.

    Args:
        setup: sizes and weights.
        case: the shape.
        epilogue: the operator.

    Returns:
        What runs it, and its leaves.
    """
    c, T = setup.config, case.tokens
    heads = (c.linear_num_value_heads, c.linear_value_head_dim)
    z = _draw(setup, T, Sizes(c, setup.dtype).projected)[..., -c.value_dim :].unflatten(-1, heads)
    leaves = [_draw(setup, T, c.value_dim).unflatten(-1, heads), z, setup.weights["norm.weight"]]
    leaves = [t.detach().requires_grad_() for t in leaves]
    return lambda: [epilogue(*leaves, c.rms_norm_eps)], leaves


def _without_gradients(forward: Forward) -> Call:
    @torch.no_grad()
    def call() -> object:
        return forward()

    return call


def _backward(forward: Forward, leaves: list[Tensor]) -> Call:
    """Backward alone: the graph is made once, in the first call and on its stream, and kept."""
    made: list[tuple[list[Tensor], list[Tensor]]] = []

    def call() -> object:
        if not made:
            outputs = forward()
            generator = torch.Generator(outputs[0].device).manual_seed(6)
            drawn = [torch.randn(o.shape, device=o.device, generator=generator).to(o.dtype) for o in outputs]
            made.append((outputs, drawn))
        outputs, gradients = made[0]
        return torch.autograd.grad(outputs, leaves, gradients, retain_graph=True)

    return call


def _draw(setup: Setup, T: int, width: int) -> Tensor:
    generator = torch.Generator(setup.device).manual_seed(7)
    return torch.randn(1, T, width, device=setup.device, generator=generator).to(setup.dtype)
