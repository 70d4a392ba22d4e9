"""Arguments of decode_prologue as projections leave them."""

from __future__ import annotations

import torch
from torch import Tensor


def one_token(
    dtype: torch.dtype, B: int = 3, H: int = 2, G: int = 2, K: int = 8, V: int = 16, W: int = 4, grouped: bool = True,
    device: str = "cpu",
) -> dict[str, Tensor]:  # fmt: skip
    """One token of B sequences, drawn alike on every device; rows grouped by key head (Qwen3-Next) or not (Qwen3.5)."""
    generator = torch.Generator("cpu").manual_seed(B + 10 * W)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device)

    if grouped:
        rows, gates = normal(B, 1, H, 2 * K + 2 * G * V).to(dtype), normal(B, 1, H, 2 * G).to(dtype)
        q, k, v, _ = rows.split([K, K, G * V, G * V], -1)
        b, a = gates.split([G, G], -1)
        v = v.unflatten(-1, (G, V))
    else:
        rows = normal(B, 1, 2 * H * K + 2 * H * G * V + 2 * H * G).to(dtype)
        q, k, v, b, a, _ = rows.split([H * K, H * K, H * G * V, H * G, H * G, H * G * V], -1)
        q, k, v, b, a = (x.unflatten(-1, (H, -1)) for x in (q, k, v, b, a))
        v = v.unflatten(-1, (G, V))
    C, wide = 2 * H * K + H * G * V, torch.promote_types(dtype, torch.float32)
    return {
        "q": q,
        "k": k,
        "v": v,
        "b": b,
        "a": a,
        "conv_state": normal(B, C, W - 1).to(dtype),
        "weight": normal(C, 1, W).to(dtype),
        "A_log": normal(H * G).to(wide),
        "dt_bias": normal(H * G).to(wide),
    }
