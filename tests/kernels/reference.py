"""The recurrence token by token, as the paper writes it: slow, obvious, differentiable, in whatever dtype it is given."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    norm: bool = False,
    bounds: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """o [B,T,HV,V] and final states [N,HV,K,V] by S <- exp(g) S; S <- S + k (beta (v - S^T k))^T; o = S^T (scale q)."""
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    if norm:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    scale = K**-0.5 if scale is None else scale
    spans = [(b, 0, T) for b in range(B)] if bounds is None else [(0, s, e) for s, e in pairwise(bounds)]
    outs: list[Tensor] = []
    finals: list[Tensor] = []
    head = torch.arange(HV) // (HV // H)  # value head j reads key head j // (HV // H)
    q, k = scale * q[:, :, head], k[:, :, head]
    for n, (b, start, end) in enumerate(spans):
        S = q.new_zeros(HV, K, V) if initial_state is None else initial_state[n]
        for t in range(start, end):
            S = S * g[b, t].exp()[:, None, None]
            error = v[b, t] - (S.mT @ k[b, t].unsqueeze(-1)).squeeze(-1)
            S = S + k[b, t].unsqueeze(-1) * (beta[b, t].unsqueeze(-1) * error).unsqueeze(-2)
            outs.append((S.mT @ q[b, t].unsqueeze(-1)).squeeze(-1))
        finals.append(S)
    return (torch.stack(outs) if outs else v).view(B, T, HV, V), torch.stack(finals)


def random_call(
    B: int = 1,
    T: int = 12,
    H: int = 2,
    HV: int = 4,
    K: int = 8,
    V: int = 8,
    *,
    dtype: torch.dtype = torch.float64,
    strongest: float = 2.0,
    N: int | None = None,
    seed: int = 0,
    grad: bool = False,
) -> dict[str, Tensor]:
    """q, k (unit keys), v, g in [-strongest, 0], beta in [0, 1], initial_state if N is given."""
    draw = torch.Generator().manual_seed(seed)
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    k = normal(B, T, H, K)
    call = {
        "q": normal(B, T, H, K).to(dtype),
        "k": (k / k.norm(dim=-1, keepdim=True)).to(dtype),
        "v": normal(B, T, HV, V).to(dtype),
        "g": (-strongest * torch.rand(B, T, HV, generator=draw, dtype=torch.float64)).to(wide),
        "beta": torch.rand(B, T, HV, generator=draw, dtype=torch.float64).to(dtype),
    }
    if N is not None:
        call["initial_state"] = normal(N, HV, K, V).to(wide)
    return {name: x.requires_grad_(grad) for name, x in call.items()}


def relative(x: Tensor, reference: Tensor) -> float:
    """norm(x - reference) / norm(reference), in float64."""
    difference, size = (x.double() - reference.double()).norm().item(), reference.double().norm().item()
    return difference / size if size else difference
