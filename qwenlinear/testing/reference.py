"""What is right, token by token in the order of the formula, and what known faults would give instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from qwenlinear.kernels.packing import PackedSequences

Call = Callable[..., tuple[Tensor, Tensor | None]]


def token_by_token(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | PackedSequences | None = None,
    *,
    decay: Callable[[Tensor], Tensor] = torch.exp,
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule as it is written (Yang et al., arXiv:2412.06464, eq. 10), slow and plain, in the dtype that comes.

    Shares no code with any kernel, so that TorchKernel is proven by it.

    Args: those of a kernel call, float64 throughout being expected, and ``decay``: what g does to the state, for known faults.

    Returns:
        ``o [B, T, HV, V]`` and the final state ``[N, HV, K, V]`` or None.

    Example:
        >>> q = k = torch.eye(2, dtype=torch.float64).view(1, 2, 1, 2)
        >>> v = torch.tensor([3.0, 5.0], dtype=torch.float64).view(1, 2, 1, 1)
        >>> g = torch.zeros(1, 2, 1, dtype=torch.float64)
        >>> token_by_token(q, k, v, g, torch.ones_like(g), scale=1.0)[0].flatten().tolist()
        [3.0, 5.0]
    """
    if use_qk_l2norm_in_kernel:
        q, k = (x / (x.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    group = v.shape[2] // q.shape[2]
    head = torch.arange(v.shape[2], device=q.device) // group  # the key head of each value head
    q, k = q[:, :, head] * (q.shape[-1] ** -0.5 if scale is None else scale), k[:, :, head]
    if cu_seqlens is None:
        rows = [(slice(None), slice(None), slice(None))]
    else:
        bounds = cu_seqlens.bounds if isinstance(cu_seqlens, PackedSequences) else cu_seqlens.tolist()
        rows = [(slice(0, 1), slice(*ends), slice(n, n + 1)) for n, ends in enumerate(pairwise(bounds))]
    outputs, finals = [], []
    for batch, tokens, n in rows:
        parts = [x[batch, tokens] for x in (q, k, v, g, beta)]
        S = (
            v.new_zeros(len(parts[0]), v.shape[2], q.shape[3], v.shape[3])
            if initial_state is None
            else initial_state[n]
        )
        o, S = _recurrence(decay, S, *parts)
        outputs.append(o)
        finals.append(S)
    return torch.cat(outputs, 1), torch.cat(finals) if output_final_state else None


def _recurrence(
    decay: Callable[[Tensor], Tensor], S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    outputs = [v[:, :0]]
    for q_t, k_t, v_t, g_t, beta_t in zip(*(x.unbind(1) for x in (q, k, v, g, beta)), strict=True):
        S = decay(g_t)[..., None, None] * S
        remembered = (S * k_t[..., None]).sum(-2)
        written = beta_t[..., None] * (v_t - remembered)
        S = S + k_t[..., None] * written[..., None, :]
        outputs.append((S * q_t[..., None]).sum(-2)[:, None])
    return torch.cat(outputs, 1), S


Arguments = dict[str, Any]


@dataclass(frozen=True)
class KnownFault:
    """A way to be wrong that has happened: the reference with other arguments, or with its final state changed.

    Args:
        text: what a kernel with this fault does.
        before: changes the arguments of the call.
        after: changes the final state.
        decay: what it multiplies the state by, of g.
    """

    text: str
    before: Callable[[Arguments], Arguments] = lambda arguments: arguments
    after: Callable[[Tensor], Tensor] = lambda state: state
    decay: Callable[[Tensor], Tensor] = torch.exp

    def __call__(self, **arguments: Any) -> tuple[Tensor, Tensor | None]:
        """The wrong answer."""
        o, final = token_by_token(**self.before(arguments), decay=self.decay)
        return o, None if final is None else self.after(final)


def _changing(name: str, change: Callable[[Any, Arguments], Any]) -> Callable[[Arguments], Arguments]:
    def before(arguments: Arguments) -> Arguments:
        return arguments if arguments.get(name) is None else {**arguments, name: change(arguments[name], arguments)}

    return before


def _tiled(x: Tensor, arguments: Arguments) -> Tensor:
    H, HV = x.shape[2], arguments["v"].shape[2]
    return x[:, :, torch.arange(HV, device=x.device) % H]  # one query/key head a value head, in the wrong order


def _square(x: Tensor) -> bool:
    return x.shape[-1] == x.shape[-2]


def _transposed(x: Tensor, arguments: Mapping[str, Any] | None = None) -> Tensor:
    return x.mT if _square(x) else x.reshape(*x.shape[:-2], x.shape[-1], x.shape[-2]).mT


def _default_scale(arguments: Arguments) -> float:
    scale = arguments.get("scale")
    return float(arguments["q"].shape[-1]) ** -0.5 if scale is None else float(scale)


KNOWN_FAULTS = (
    KnownFault("beta applied twice", _changing("beta", lambda x, _: x * x)),
    KnownFault("beta ignored", _changing("beta", lambda x, _: torch.ones_like(x))),
    KnownFault("beta taken for a logit", _changing("beta", lambda x, _: x.sigmoid())),
    KnownFault("scale ignored", lambda a: {**a, "scale": 1.0}),
    KnownFault("scale always K**-0.5", lambda a: {**a, "scale": None}),
    KnownFault("scale applied twice", lambda a: {**a, "scale": _default_scale(a) ** 2}),
    KnownFault("decay ignored: the state never fades", _changing("g", lambda x, _: torch.zeros_like(x))),
    KnownFault("exp of g forgotten: the state multiplied by g itself", decay=lambda g: g),
    KnownFault("decay taken as 1 + g instead of exp(g)", decay=lambda g: 1 + g),
    KnownFault("decay in base 2 instead of e", _changing("g", lambda x, _: x * 0.6931471805599453)),
    KnownFault("decay applied twice", _changing("g", lambda x, _: 2 * x)),
    KnownFault("decay with the wrong sign", _changing("g", lambda x, _: -x)),
    KnownFault("decay taken for linear, exp(exp(g))", _changing("g", lambda x, _: x.exp())),
    KnownFault("decay applied after the write instead of before", _changing("g", lambda x, _: x.roll(1, 1))),
    KnownFault(
        "head groups tiled instead of repeated", lambda a: {**a, "q": _tiled(a["q"], a), "k": _tiled(a["k"], a)}
    ),
    KnownFault("q and k swapped", lambda a: {**a, "q": a["k"], "k": a["q"]}),
    KnownFault("q and k not normalised", lambda a: {**a, "use_qk_l2norm_in_kernel": False}),
    KnownFault("boundaries ignored", lambda a: {**a, "cu_seqlens": None} if a.get("initial_state") is None else a),
    KnownFault("initial state ignored", lambda a: {**a, "initial_state": None}),
    KnownFault("initial state read transposed", _changing("initial_state", _transposed)),
    KnownFault("final state returned transposed", after=_transposed),
    KnownFault("states transposed both ways", _changing("initial_state", _transposed), _transposed),
)
