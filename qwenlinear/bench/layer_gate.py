"""No time without a right answer, for layers: output and every gradient against a float64 layer written out plainly."""

from __future__ import annotations

import math
import statistics
import traceback
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from qwenlinear.bench.layer_contenders import LayerContender, Named, Setup
from qwenlinear.kernels.packing import PackedSequences
from qwenlinear.kernels.torch_kernel import TorchKernel
from qwenlinear.layers.projection import FEWEST_TOKENS
from qwenlinear.testing.reference import token_by_token

# Largest relative errors of the output and of gradients; loose enough for every contender's own roundings, far below what a wrong
# layer shows. Those of A_log and dt_bias, one number a head summed over all tokens with both signs, may be three times as large.
LIMITS = {
    torch.float64: (1e-9, 1e-8),
    torch.float32: (4e-3, 8e-3),
    torch.bfloat16: (2e-2, 3e-2),
    torch.float16: (4e-3, 8e-3),
}
_SUMMED = ("A_log", "dt_bias")
DENSE = 200
PACKED: tuple[int, ...] = (1, 63, 64, 5, 67)
_SEGMENT = 64  # tokens whose states the plain form keeps at a time


def lengths_on(device: torch.device) -> dict[str, tuple[int, ...]]:
    """The documents of each kind of check: on a GPU as many tokens as a layer's fastest form begins at, since that is timed.

    Args:
        device: where.

    Returns:
        ``dense``, one sequence; ``packed``, several documents.
    """
    dense, packed = DENSE, PACKED
    if device.type != "cpu":
        dense = max(dense, FEWEST_TOKENS + 7)
        packed += (_SEGMENT,) * -(-(FEWEST_TOKENS - sum(packed)) // _SEGMENT)
    return {"dense": (dense,), "packed": packed}


def check(one: LayerContender, layer: nn.Module, setup: Setup, known: dict[str, Named] | None = None) -> dict[str, Any]:
    """Compare a contender with the plain layer: one sequence, packed documents, gradients of both.

    Args:
        one: who.
        layer: what it built.
        setup: sizes and weights.
        known: keeps the truths of this setup for the next contender; default None.

    Returns:
        A row for JSON: ``dense`` and ``packed``, each the largest error as a share of what is allowed, or why there is none (a
        string); ``worst`` where it was; ``passed`` the kinds that may be timed.
    """
    c = setup.config
    row: dict[str, Any] = {"contender": one.name, "heads": f"{c.linear_num_key_heads}/{c.linear_num_value_heads}"}
    row |= {"hidden": c.hidden_size, "passed": [], "worst": {}}
    known = {} if known is None else known
    for kind, lengths in lengths_on(setup.device).items():
        x = draw(setup, sum(lengths))
        packed = PackedSequences.from_lengths(lengths, device=setup.device) if kind == "packed" else None
        reason = one.why_not(layer, x.requires_grad_(), packed)
        if reason is not None:
            row[kind] = reason
            continue
        try:
            if kind not in known:
                known[kind] = plain_truth(setup, x.detach(), lengths)
            found = errors(one, layer, x, packed, known[kind])
            shares = {name: error / allowed(name, setup.dtype) for name, error in found.items()}
            row["worst"][kind] = max(shares, key=lambda name: shares[name])
            row[kind] = max(shares.values())
            row["passed"] += [kind] if row[kind] <= 1 else []
        except Exception:
            row[kind] = traceback.format_exc(limit=-4)
    return row


def allowed(name: str, dtype: torch.dtype) -> float:
    """The relative error that the gate allows ``"output"`` or the gradient of a parameter."""
    values, gradients = LIMITS[dtype]
    return values if name == "output" else gradients * (3 if name in _SUMMED else 1)


def draw(setup: Setup, tokens: int, seed: int = 3) -> Tensor:
    """Hidden states ``[1, T, hidden]``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, tokens, setup.config.hidden_size, generator=generator).to(setup.device, setup.dtype)


def cotangent(x: Tensor) -> Tensor:
    """What backward starts from, the same for everybody: of x's shape, reproducible, in x's dtype."""
    generator = torch.Generator().manual_seed(4)
    return torch.randn(x.shape, generator=generator).to(x.device, x.dtype)


def errors(
    one: LayerContender, layer: nn.Module, x: Tensor, packed: PackedSequences | None, truth: Named
) -> dict[str, float]:
    """Relative errors of a contender's output and gradients.

    Args:
        one: who.
        layer: what it built.
        x: hidden states.
        packed: boundaries.
        truth: ``output``, ``hidden_states`` and every parameter's gradient in float64.

    Returns:
        By name; infinite where a value is not finite.
    """
    found = gradients(one, layer, x, packed)
    missing = truth.keys() - found.keys()
    assert not missing, f"{one.name} has no {sorted(missing)}"
    return {name: _relative(found[name], right) for name, right in truth.items()}


def gradients(one: LayerContender, layer: nn.Module, x: Tensor, packed: PackedSequences | None) -> Named:
    """The output, and the gradients of hidden states and parameters, under Transformers' names."""
    leaf = x.detach().clone().requires_grad_()
    named = dict(layer.named_parameters())
    y = one.run(layer, leaf, packed)
    found = torch.autograd.grad(y, [leaf, *named.values()], cotangent(y))
    return {"output": y.detach(), "hidden_states": found[0], **one.renamed(dict(zip(named, found[1:], strict=True)))}


def _relative(x: Tensor, right: Tensor) -> float:
    difference = ((x.double().view_as(right) - right).norm() / right.norm().clamp(min=1e-300)).detach()
    return float(difference) if bool(difference.isfinite()) else float("inf")


def root_mean_square(errors: Sequence[float]) -> float:
    """Of one quantity's errors in several draws."""
    return math.sqrt(sum(error * error for error in errors) / len(errors))


def worse(errors: Sequence[float], others: Sequence[float], factor: float = 1.05) -> bool:
    """Whether errors are clearly larger than others of the same draws.

    Args:
        errors: relative errors, one a draw.
        others: somebody else's, for the same draws.
        factor: how many times the others' they may be.

    Returns:
        True where the mean of what their squares are larger by is more than two of its standard errors above zero; for one draw,
        above zero. A gradient of a few numbers scatters so much that fewer draws would decide by luck.

    Example:
        >>> worse([1.0, 1.2, 0.9], [1.0, 0.9, 1.1]), worse([1.2, 1.3, 1.25], [1.0, 0.9, 1.1])
        (False, True)
    """
    above = [mine * mine - (factor * other) ** 2 for mine, other in zip(errors, others, strict=True)]
    if len(above) < 2:
        return above[0] > 0
    return statistics.mean(above) > 2 * statistics.stdev(above) / math.sqrt(len(above))


def layer_truth(setup: Setup, x: Tensor, packed: PackedSequences | None) -> Named:
    """Our layer in float64 on TorchKernel, for lengths that the plain form is too slow for.

    Args:
        setup: sizes and weights.
        x: hidden states.
        packed: boundaries.

    Returns:
        ``output`` and gradients by name.
    """
    twin = setup.layer(TorchKernel(), torch.float64)
    return gradients(LayerContender("float64", ""), twin, x.double(), packed)


def plain_truth(setup: Setup, x: Tensor, lengths: tuple[int, ...]) -> Named:
    """The layer as its formulas say, a document at a time, token by token, in float64; shares no code with any contender.

    Args:
        setup: sizes and weights.
        x: hidden states.
        lengths: of the documents.

    Returns:
        ``output`` and gradients by name.
    """
    weights = {name: value.double().requires_grad_() for name, value in setup.weights.items()}
    leaf = x.double().requires_grad_()
    y = torch.cat([_plain(setup, weights, document) for document in leaf.split(lengths, 1)], 1)
    wanted = {"hidden_states": leaf, **weights}
    found = torch.autograd.grad(y, list(wanted.values()), cotangent(x).double())
    return {"output": y.detach(), **dict(zip(wanted, found, strict=True))}


def _recurrence(*tensors: Tensor) -> Tensor:
    """Token by token; a segment's states are computed again for its gradient, as all of them would fill a GPU."""
    outputs: list[Tensor] = []
    state: Tensor | None = None
    for segment in zip(*(x.split(_SEGMENT, 1) for x in tensors), strict=True):
        run = partial(token_by_token, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True)
        o, state = checkpoint(run, *segment, use_reentrant=False)
        outputs.append(o)
    return torch.cat(outputs, 1)


def _plain(setup: Setup, w: Named, x: Tensor) -> Tensor:
    c = setup.config
    keys, values = c.linear_num_key_heads, c.linear_num_value_heads
    qkv, z, b, a = (F.linear(x, w[f"in_proj_{part}.weight"]) for part in ("qkv", "z", "b", "a"))
    padded = F.pad(qkv.transpose(1, 2), (c.linear_conv_kernel_dim - 1, 0))
    mixed = F.silu(F.conv1d(padded, w["conv1d.weight"], groups=c.conv_dim)).transpose(1, 2)
    q, k, v = mixed.split([c.key_dim, c.key_dim, c.value_dim], -1)
    q, k, v = q.unflatten(-1, (keys, -1)), k.unflatten(-1, (keys, -1)), v.unflatten(-1, (values, -1))
    g = -w["A_log"].exp() * F.softplus(a + w["dt_bias"])
    o = _recurrence(q, k, v, g, b.sigmoid())
    normed = o / (o.square().mean(-1, keepdim=True) + c.rms_norm_eps).sqrt() * w["norm.weight"]
    return F.linear((normed * F.silu(z.unflatten(-1, (values, -1)))).flatten(2), w["out_proj.weight"])
