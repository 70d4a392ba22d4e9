"""The shapes a kernel benchmark measures, and tensors for them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from qwenlinear.kernels.packing import PackedSequences


@dataclass(frozen=True)
class Case:
    """One shape.

    Args:
        documents: N; more than one are packed into a batch of one.
        length: tokens of each.
        H: query/key heads.
        HV: value heads.
        K: key head size.
        V: value head size.
    """

    documents: int
    length: int
    H: int
    HV: int
    K: int = 128
    V: int = 128

    @property
    def tokens(self) -> int:
        """Tokens altogether."""
        return self.documents * self.length

    @property
    def packed(self) -> PackedSequences | None:
        """The boundaries, None for one document."""
        return None if self.documents == 1 else PackedSequences.from_lengths([self.length] * self.documents)

    @property
    def heads(self) -> str:
        """H/HV."""
        return f"{self.H}/{self.HV}"

    def as_row(self) -> dict[str, object]:
        """The fields for JSON."""
        return {**asdict(self), "tokens": self.tokens, "heads": self.heads}

    def __str__(self) -> str:
        shape = f"T={self.length}" if self.documents == 1 else f"{self.documents} x {self.length}"
        return f"{shape}, heads {self.heads}"


@dataclass(frozen=True)
class Inputs:
    """Tensors of a case: activations in the model's dtype, decays in float32 (float64 with float64)."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    packed: PackedSequences | None

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """q, k, v, g, beta."""
        return self.q, self.k, self.v, self.g, self.beta

    def leaves(self) -> Inputs:
        """The same values, with gradients wanted."""
        return self._like(x.detach().requires_grad_() for x in self.tensors)

    def double(self) -> Inputs:
        """The same values in float64."""
        return self._like(x.detach().double() for x in self.tensors)

    def _like(self, tensors: Iterable[Tensor]) -> Inputs:
        q, k, v, g, beta = tensors
        return Inputs(q, k, v, g, beta, self.packed)


def sample(case: Case, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Inputs:
    """Draw tensors for a case: normal activations, decays of up to 0.1 a token as in a trained model, beta in (0, 1).

    Args:
        case: the shape.
        device: where.
        dtype: of q, k, v and beta.
        seed: of the generator.

    Returns:
        The tensors.
    """
    generator = torch.Generator(device).manual_seed(seed)
    T, wide = case.tokens, torch.float64 if dtype == torch.float64 else torch.float32

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=wide, generator=generator)

    q, k = (draw(1, T, case.H, case.K).to(dtype) for _ in range(2))
    v = draw(1, T, case.HV, case.V).to(dtype)
    g = -0.1 * torch.rand(1, T, case.HV, device=device, dtype=wide, generator=generator)
    beta = draw(1, T, case.HV).sigmoid().to(dtype)
    return Inputs(q, k, v, g, beta, case.packed)
