"""What qwenlinear's own Python adds to a call: with a kernel that returns at once, and against the function underneath."""

from __future__ import annotations

import importlib
import inspect
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from qwenlinear.bench.cases import Case, Inputs, sample
from qwenlinear.bench.timing import interleave
from qwenlinear.kernels import (
    AutoKernel,
    DeltaRuleInputs,
    FLAKernel,
    FlashQLAKernel,
    GatedDeltaKernel,
    Tolerance,
    TorchKernel,
)
from qwenlinear.kernels.lowering import Answer

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class ReturnsAtOnce(GatedDeltaKernel):
    """Declares everything, computes nothing: its call is qwenlinear's Python alone."""

    capabilities = replace(TorchKernel.capabilities, step=False, step_backward=False, empty_sequences=True)
    tolerances = {dtype: Tolerance(1.0, 1.0, 1.0) for dtype in _DTYPES}

    def _chunk(self, inputs: DeltaRuleInputs) -> Answer:
        return inputs.v, inputs.initial_state


def measure(device: torch.device, dtype: torch.dtype, heads: tuple[int, int]) -> list[dict[str, Any]]:
    """Microseconds a call.

    Args:
        device: where the tensors are.
        dtype: of the activations.
        heads: H and HV.

    Returns:
        Rows for JSON: ``of`` in words and ``microseconds``, or ``error``.
    """
    rows: list[dict[str, Any]] = []
    dense, packed = sample(Case(1, 64, *heads), device, dtype), sample(Case(4, 16, *heads), device, dtype)
    kernel = ReturnsAtOnce()
    for words, who, inputs in (
        ("a kernel that returns at once, dense", kernel, dense),
        ("the same, PackedSequences", kernel, packed),
        ("the same, dense, with gradients", kernel, dense.leaves()),
        ("AutoKernel over it", AutoKernel([kernel]), dense),
    ):
        rows.append({"of": words, "microseconds": _host_microseconds(partial(_call, who, inputs))})
    for name, own, direct in _against_the_function(device, dense):
        try:
            timings = interleave({"own": own, "direct": direct}, device, rounds=60, seconds=3.0, least=0.02)
            errors = [timing.error for timing in timings.values() if timing.error]
            if errors:
                raise RuntimeError(errors[0])
            a, b = timings["own"], timings["direct"]
            own_best, direct_best = min(a.seconds), min(b.seconds)  # the host's time: disturbances only add to it
            row = {
                "of": f"{name}, eager, T=64: call minus the function underneath",
                "microseconds": (own_best - direct_best) * 1e6,
                "call_microseconds": own_best * 1e6,
                "function_microseconds": direct_best * 1e6,
            }
        except Exception:
            row = {"of": name, "error": traceback.format_exc(limit=-4)}
        rows.append(row)
    return rows


def _call(kernel: GatedDeltaKernel, inputs: Inputs) -> object:
    return kernel(*inputs.tensors, cu_seqlens=inputs.packed)


def _host_microseconds(call: Callable[[], object], calls: int = 500, batches: int = 9) -> float:
    """The host's time of a call that launches nothing: the fastest batch, as nothing but disturbance makes one slower."""
    call()
    best = float("inf")
    for _ in range(batches):
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - begin) / calls)
    return best * 1e6


def _against_the_function(
    device: torch.device, inputs: Inputs
) -> Iterator[tuple[str, Callable[[], object], Callable[[], object]]]:
    """Kernel and underlying function on the same tensors; nothing where the machine does not run it."""
    kernels: tuple[tuple[GatedDeltaKernel, str], ...] = (
        (FLAKernel(), "fla.ops.gated_delta_rule"),
        (FlashQLAKernel(), "flash_qla"),
    )
    q, k, v, g, beta = inputs.tensors
    words: dict[str, Any] = {"q": q, "k": k, "v": v, "g": g, "beta": beta.float(), "scale": q.shape[-1] ** -0.5}
    for kernel, module in kernels:
        if kernel.refusals(q, k, v, g, words["beta"]):
            continue
        found = importlib.import_module(module)
        function = found.chunk_gated_delta_rule
        if module.startswith("fla."):  # as FLAKernel calls it: without the dispatcher, out of graphs
            function = torch.compiler.disable(inspect.unwrap(function))

        def own(kernel: GatedDeltaKernel = kernel) -> object:
            with torch.no_grad():
                return kernel(q, k, v, g, words["beta"])

        def direct(function: Callable[..., object] = function) -> object:
            with torch.no_grad():
                return function(**words, use_qk_l2norm_in_kernel=False)

        yield type(kernel).__name__, own, direct
