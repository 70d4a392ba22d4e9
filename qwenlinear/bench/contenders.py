"""Who takes part: qwenlinear's kernels, and what people run without them, called the way they are."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from qwenlinear.bench.cases import Inputs
from qwenlinear.kernels.auto import kernel_from_name
from qwenlinear.kernels.base import GatedDeltaKernel
from qwenlinear.kernels.lowering import l2norm


class Contender:
    """Something that computes the gated delta rule with normalised q and k.

    Args:
        name: how tables call it.
        note: what is worth knowing about how it is called.
    """

    def __init__(self, name: str, note: str) -> None:
        self.name, self.note = name, note

    def why_not(self, inputs: Inputs) -> str | None:
        """Why it does not run these tensors, None when it does."""
        raise NotImplementedError

    def run(self, inputs: Inputs) -> Tensor:
        """o ``[1, T, HV, V]``."""
        raise NotImplementedError


class OfKernel(Contender):
    """A kernel of qwenlinear through its public call."""

    def __init__(self, kernel: GatedDeltaKernel) -> None:
        super().__init__(type(kernel).__name__, "through qwenlinear's public call")
        self.kernel = kernel

    def why_not(self, inputs: Inputs) -> str | None:
        refusals = self.kernel.refusals(
            *inputs.tensors, use_qk_l2norm_in_kernel=True, cu_seqlens=inputs.packed, form="chunk"
        )
        return "; ".join(map(str, refusals)) or None

    def run(self, inputs: Inputs) -> Tensor:
        return self.kernel(*inputs.tensors, use_qk_l2norm_in_kernel=True, cu_seqlens=inputs.packed)[0]


class OfFunction(Contender):
    """A function of another package; ``get`` imports it at first use."""

    def __init__(self, name: str, note: str, get: Callable[[], Callable[..., Any]]) -> None:
        super().__init__(name, note)
        self._get = get
        self._function: Callable[..., Any] | None = None
        self._missing: str | None = None

    def why_not(self, inputs: Inputs) -> str | None:
        if self._function is None and self._missing is None:
            try:
                self._function = self._get()
            except Exception as error:
                self._missing = f"{type(error).__name__}: {error}"
        return self._missing

    @property
    def function(self) -> Callable[..., Any]:
        """The imported function."""
        assert self._function is not None, "asked why_not first"
        return self._function


class Transformers(OfFunction):
    """Transformers' PyTorch fallback, ``torch_chunk_gated_delta_rule`` of Qwen3.5 (or Qwen3-Next), on its native head groups.

    It takes no boundaries (it would swallow and ignore them), so packed documents are a call each.
    """

    def __init__(self) -> None:
        super().__init__("Transformers", "its PyTorch fallback; packed documents one call each", _transformers_function)

    def run(self, inputs: Inputs) -> Tensor:
        def call(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
            return cast(Tensor, self.function(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0])

        if inputs.packed is None:
            return call(*inputs.tensors)
        documents = zip(*(x.split(inputs.packed.lengths, 1) for x in inputs.tensors), strict=True)
        return torch.cat([call(*document) for document in documents], 1)


class Naive(OfFunction):
    """One of FLA's ``naive`` functions: float32, no head groups, no normalisation, no packing; those are done around it."""

    def __init__(self, name: str, function: str) -> None:
        def get() -> Callable[..., Any]:
            module = importlib.import_module("fla.ops.gated_delta_rule.naive")
            return cast(Callable[..., Any], getattr(module, function))

        super().__init__(name, f"fla.ops.gated_delta_rule.naive.{function}, heads repeated, q and k normalised", get)

    def why_not(self, inputs: Inputs) -> str | None:
        if inputs.packed is not None:
            return "takes no packed documents"
        return super().why_not(inputs)

    def run(self, inputs: Inputs) -> Tensor:
        q, k, v, g, beta = inputs.tensors
        G = v.shape[2] // q.shape[2]
        q, k = (l2norm(x).repeat_interleave(G, 2) for x in (q, k))
        return cast(Tensor, self.function(q=q, k=k, v=v, g=g, beta=beta)[0]).to(v.dtype)


def _transformers_function() -> Callable[..., Any]:
    for family in ("qwen3_5", "qwen3_next"):
        try:
            module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        except ModuleNotFoundError:
            continue
        found = getattr(module, "torch_chunk_gated_delta_rule", None)
        if found is not None:  # unwrapped, so that an installed FLA does not run in its place
            return cast(Callable[..., Any], inspect.unwrap(found))
    raise ImportError("no torch_chunk_gated_delta_rule in transformers; pip install 'transformers>=5'")


_OTHERS: dict[str, Callable[[], Contender]] = {
    "transformers": Transformers,
    "fla-naive": lambda: Naive("FLA naive chunk", "naive_chunk_gated_delta_rule"),
    "fla-naive-recurrent": lambda: Naive("FLA naive recurrent", "naive_recurrent_gated_delta_rule"),
}
NAMES = (*_OTHERS, "torch", "fla", "flashqla")


def contender(name: str) -> Contender:
    """Make a contender.

    Args:
        name: one of ``NAMES``, or any name that :func:`qwenlinear.kernel_from_name` takes.

    Returns:
        The contender.

    Raises:
        ValueError: an unknown name.
    """
    return _OTHERS[name]() if name in _OTHERS else OfKernel(kernel_from_name(name))
