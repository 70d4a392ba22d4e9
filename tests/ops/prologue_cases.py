"""Inputs of a prologue, and both forms run on them with gradients of everything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qwenlinear.kernels import PackedSequences
from qwenlinear.ops._prologue_torch import prologue_twin
from qwenlinear.ops.prologue import fused_prologue

NAMES = ("buffer", "weight", "A_log", "dt_bias", "initial_state")


@dataclass(frozen=True)
class Case:
    """Sizes and options of a call; qkv, b and a are views of one buffer, with z behind them."""

    B: int = 1
    T: int = 20
    heads: tuple[int, int] = (1, 2)
    head_dims: tuple[int, int] = (8, 8)
    W: int = 4
    documents: tuple[int, ...] | None = None
    state: bool = False
    final: bool = False
    lengths: tuple[int, ...] | None = None
    l2norm: bool = True
    dtype: torch.dtype = torch.float32
    padding: int = 0  # further columns, so that rows are aligned to less

    @property
    def C(self) -> int:
        (H, HV), (K, V) = self.heads, self.head_dims
        return 2 * H * K + HV * V

    @property
    def packed(self) -> PackedSequences | None:
        return None if self.documents is None else PackedSequences.from_lengths(self.documents)

    def leaves(self, seed: int = 0) -> dict[str, Tensor]:
        torch.manual_seed(seed)
        (_, HV), V = self.heads, self.head_dims[1]
        T = self.T if self.documents is None else sum(self.documents)
        N = self.B if self.documents is None else len(self.documents)
        leaves = {
            "buffer": torch.randn(self.B, T, self.C + 2 * HV + HV * V + self.padding, dtype=self.dtype),
            "weight": torch.randn(self.C, 1, self.W, dtype=self.dtype),
            "A_log": torch.randn(HV),
            "dt_bias": torch.randn(HV),
        }
        if self.state:
            leaves["initial_state"] = torch.randn(N, self.C, self.W - 1, dtype=self.dtype)
        return leaves

    def call(self, form: Callable[..., tuple[Tensor | None, ...]], leaves: dict[str, Tensor]) -> list[Tensor | None]:
        HV, buffer = self.heads[1], leaves["buffer"]
        qkv, b, a, _ = buffer.split([self.C, HV, HV, buffer.shape[2] - self.C - 2 * HV], -1)
        gate = leaves["weight"], leaves["A_log"], leaves["dt_bias"]
        lengths = None if self.lengths is None else torch.tensor(self.lengths, device=buffer.device)
        how = ("silu",) if form is prologue_twin else ()
        return list(
            form(
                qkv, b, a, *gate, self.heads, self.head_dims, *how, self.l2norm, leaves.get("initial_state"), self.final,
                self.packed, lengths,
            )
        )  # fmt: skip


def differentiate(
    case: Case,
    form: Callable[..., tuple[Tensor | None, ...]],
    leaves: dict[str, Tensor],
    needs: tuple[str, ...] = NAMES,
    outputs: tuple[int, ...] = (0, 1, 2, 3, 4, 5),
) -> tuple[list[Tensor | None], dict[str, Tensor | None]]:
    """Outputs, and the gradients of a fixed weighting of some of them with respect to some of the inputs."""
    leaves = {name: leaf.detach().clone().requires_grad_(name in needs) for name, leaf in leaves.items()}
    answers = case.call(form, leaves)
    generator = torch.Generator().manual_seed(1)
    loss = torch.zeros((), dtype=torch.float64)
    for i, answer in enumerate(answers):
        if answer is None:
            continue
        weights = torch.randn(answer.shape, generator=generator, dtype=torch.float64).to(answer)
        if i in outputs:
            loss = loss + (answer * weights).double().sum().cpu()
    loss.backward()
    return [a if a is None else a.detach() for a in answers], {name: leaf.grad for name, leaf in leaves.items()}


def compare(case: Case, tolerance: float, gate_tolerance: float = 5e-6, **which: tuple[Any, ...]) -> None:
    """The Triton form against the twin in float64: outputs and gradients, each relative to its own size.

    Gates are float32 in every dtype; the gradients of A_log and dt_bias are sums over all tokens, of either sign.
    """
    leaves = case.leaves()
    got, got_gradients = differentiate(case, fused_prologue, leaves, **which)
    double = {name: leaf.double() for name, leaf in leaves.items()}
    want, want_gradients = differentiate(case, prologue_twin, double, **which)
    pairs = dict(zip(("q", "k", "v", "g", "beta", "conv_state"), zip(got, want, strict=True), strict=True))
    pairs |= {f"d{name}": (got_gradients[name], want_gradients[name]) for name in leaves}
    for name, (ours, reference) in pairs.items():
        if ours is None or reference is None:  # no gradient and one of zeros are the same
            assert name.startswith("d") or ours is reference, name
            assert all(t is None or not t.any() for t in (ours, reference)), name
            continue
        assert ours.shape == reference.shape, name
        limit = gate_tolerance if name in ("g", "dA_log", "ddt_bias") else tolerance
        error = float((ours.double() - reference).norm() / reference.norm().clamp(min=1e-30))
        assert error <= limit, f"{name}: relative error {error:.1e} above {limit:.1e}"
