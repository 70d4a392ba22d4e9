"""No time without a right answer: every contender meets the float64 recurrence before it is measured."""

from __future__ import annotations

import traceback

import torch
from torch import Tensor

from qwenlinear.bench.cases import Case, Inputs, sample
from qwenlinear.bench.contenders import Contender
from qwenlinear.kernels.packing import PackedSequences
from qwenlinear.testing.reference import token_by_token

# Largest relative errors of o and of gradients; loose enough for every contender's own arithmetic (TF32 in Triton), and far
# below what a wrong kernel shows.
_LIMITS = {torch.float64: 1e-9, torch.float32: 4e-3, torch.bfloat16: 2e-2, torch.float16: 8e-3}


def check(
    contender: Contender, heads: tuple[int, int], sizes: tuple[int, int], device: torch.device, dtype: torch.dtype
) -> dict[str, object]:
    """Compare a contender with the recurrence: one sequence, packed documents, and gradients of both.

    Args:
        contender: who.
        heads: H and HV.
        sizes: K and V.
        device: where.
        dtype: of the activations.

    Returns:
        A row for JSON: ``dense`` and ``packed``, each the largest relative error found, or why there is none (a string);
        ``passed`` names those that may be timed.
    """
    row: dict[str, object] = {"contender": contender.name, "heads": f"{heads[0]}/{heads[1]}", "limit": _LIMITS[dtype]}
    passed = []
    for kind, lengths in (("dense", [200]), ("packed", [1, 63, 64, 5, 67])):
        inputs = sample(Case(1, sum(lengths), *heads, *sizes), device, dtype)
        if kind == "packed":
            inputs = Inputs(*inputs.tensors, PackedSequences.from_lengths(lengths))
        reason = contender.why_not(inputs)
        if reason is not None:
            row[kind] = reason
            continue
        try:
            row[kind] = error = _largest_error(contender, inputs)
            if error <= _LIMITS[dtype]:
                passed.append(kind)
        except Exception:
            row[kind] = traceback.format_exc(limit=-4)
    row["passed"] = passed
    return row


def _largest_error(contender: Contender, inputs: Inputs) -> float:
    exact = inputs.double().leaves()
    wanted = token_by_token(*exact.tensors, use_qk_l2norm_in_kernel=True, cu_seqlens=exact.packed)[0]
    weights = torch.linspace(-1, 1, wanted.shape[-1], device=wanted.device, dtype=wanted.dtype).expand_as(wanted)
    with torch.no_grad():
        errors = [_error(contender.run(inputs), wanted)]
    own = inputs.leaves()
    if contender.why_not(own) is None:
        o = contender.run(own)
        grads = torch.autograd.grad(o, own.tensors, weights.to(o.dtype))
        exact_grads = torch.autograd.grad(wanted, exact.tensors, weights)
        errors += [_error(o, wanted), *map(_error, grads, exact_grads)]
    return max(errors)


def _error(x: Tensor, wanted: Tensor) -> float:
    difference = ((x.double() - wanted).norm() / wanted.norm()).detach()
    return float(difference) if bool(difference.isfinite()) else float("inf")
