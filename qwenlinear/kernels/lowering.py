"""Exact lowerings: what a kernel lacks and what has a mathematically equal, differentiable equivalent, once for all kernels.

A lowering rewrites the call before the kernel sees it and mends the kernel's answer afterwards. :func:`plan` yields only those
that apply, so that running and explaining can't disagree. A call whose boundaries came as a tensor is planned as it came: their
values are read when it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from qwenlinear.kernels.capabilities import KernelCapabilities
from qwenlinear.kernels.inputs import DeltaRuleInputs
from qwenlinear.kernels.packing import PackedSequences

Answer = tuple[Tensor, Tensor | None]


@dataclass(frozen=True)
class Lowering:
    """One rewrite: words for ``explain``, the new call, and what mends the kernel's answer."""

    text: str
    before: Callable[[DeltaRuleInputs], DeltaRuleInputs]
    after: Callable[[DeltaRuleInputs, Answer], Answer] | None = None  # given the call as it was before this rewrite


def l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Normalise the last dimension, in float32 at least.

    Args:
        x: any floating tensor.
        eps: added to the sum of squares.

    Returns:
        ``x * rsqrt(sum(x**2) + eps)`` in x's dtype.
    """
    wide = x if x.dtype == torch.float64 else x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


class _L2Norm(torch.autograd.Function):
    """`l2norm` that keeps, for its backward pass, the answer (which a kernel keeps anyway) and one float32 factor a row.

    Autograd's own would keep float32 copies of q and k, in training a good part of a layer's memory.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, eps: float) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        factor = torch.rsqrt(torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide).square() + eps)
        y = torch.mul(x, factor, out=torch.empty_like(x))  # widened element by element, rounded once
        ctx.save_for_backward(y, factor)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        y, factor = ctx.saved_tensors
        along = (gradient.to(factor.dtype) * y).sum(-1, keepdim=True)
        return ((gradient - y * along) * factor).to(y.dtype), None


def plan(inputs: DeltaRuleInputs, capabilities: KernelCapabilities) -> Iterator[Lowering]:
    """The lowerings that this call needs on a kernel of these capabilities, in the order they are applied.

    Args:
        inputs: the validated call.
        capabilities: what the kernel takes as it is.

    Yields:
        Each lowering that applies.
    """
    if isinstance(inputs.cu_seqlens, Tensor):
        sync = " (one synchronisation a call; make a PackedSequences once a batch)" if inputs.cu_seqlens.is_cuda else ""
        yield Lowering(f"boundaries are read from the cu_seqlens tensor{sync}", _read_boundaries)
    if inputs.state_in_place and not _reaches_kernel(inputs, capabilities):
        yield Lowering("the final state is copied into initial_state", _out_of_place, _copy_state)
    if inputs.cu_seqlens is None and not capabilities.dense:
        yield Lowering(f"the {inputs.B} rows of the batch are packed one behind another", _pack_rows, _unpack_rows)
    if inputs.cu_seqlens is not None and not capabilities.empty_sequences and _maybe_empty(inputs.cu_seqlens):
        yield Lowering("empty documents are left out and their states put back", _drop_empty, _restore_empty)
    if not capabilities.qk_l2norm and inputs.use_qk_l2norm_in_kernel:
        yield Lowering("q and k are normalised before the kernel", _normalise)
    if not capabilities.value_head_groups and inputs.HV > inputs.H:
        yield Lowering(f"q and k are repeated {inputs.HV // inputs.H} times to HV={inputs.HV} heads", _repeat_heads)
    if capabilities.state_layout == "vk" and (inputs.initial_state is not None or inputs.output_final_state):
        yield Lowering("states are transposed to [N, HV, V, K] and back", _transpose_state, _transpose_answer)
    if not capabilities.strided and (names := strided_names(inputs)):
        yield Lowering(f"strided {', '.join(names)} copied to contiguous memory", _contiguous)


def run_without_tokens(inputs: DeltaRuleInputs) -> Answer:
    """The answer where no sequence has a token: an empty output, and each state as it came.

    Args:
        inputs: a call with T = 0 (or B = 0).

    Returns:
        ``o [B, T, HV, V]`` and the final state if it was asked for, differentiable in every argument.
    """
    # Every argument keeps its (empty) gradient: an empty batch on one rank must not leave parameters out of a reduction.
    o = inputs.v.clone(memory_format=torch.contiguous_format)
    for tensor in _tensors(inputs).values():
        o = o + tensor.sum().to(o.dtype)
    if inputs.state_in_place:
        return o, inputs.initial_state
    return o, inputs.state_or_zeros().clone() if inputs.output_final_state else None


def strided_names(inputs: DeltaRuleInputs) -> list[str]:
    """The names of the arguments whose memory is not contiguous.

    Args:
        inputs: the validated call.

    Returns:
        Names, in the order of the arguments.
    """
    state = inputs.initial_state
    if (
        inputs.q.is_contiguous()
        and inputs.k.is_contiguous()
        and inputs.v.is_contiguous()
        and inputs.g.is_contiguous()
        and inputs.beta.is_contiguous()
        and (state is None or state.is_contiguous())
    ):
        return []  # what nearly every call comes to
    return [name for name, tensor in _tensors(inputs).items() if not tensor.is_contiguous()]


def _tensors(inputs: DeltaRuleInputs) -> dict[str, Tensor]:
    named = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "g": inputs.g, "beta": inputs.beta}
    return named if inputs.initial_state is None else {**named, "initial_state": inputs.initial_state}


def _reaches_kernel(inputs: DeltaRuleInputs, capabilities: KernelCapabilities) -> bool:
    """Whether initial_state itself comes to a kernel that writes to it, and no rewritten copy of it."""
    state, bounds = inputs.initial_state, inputs.cu_seqlens
    assert state is not None, "validated"
    dropped = bounds is not None and not capabilities.empty_sequences and _maybe_empty(bounds)
    copied = not (capabilities.strided or state.is_contiguous())
    return capabilities.state_in_place and capabilities.state_layout == "kv" and not dropped and not copied


def _out_of_place(inputs: DeltaRuleInputs) -> DeltaRuleInputs:
    return replace(inputs, state_in_place=False)


def _copy_state(inputs: DeltaRuleInputs, answer: Answer) -> Answer:
    o, final = answer
    state = inputs.initial_state
    assert state is not None, "validated"
    assert final is not None, "validated"
    with torch.no_grad():  # no gradient is asked for, and a state that requires one may be written to all the same
        state.copy_(final)
    return o, state


def _read_boundaries(inputs: DeltaRuleInputs) -> DeltaRuleInputs:
    assert isinstance(inputs.cu_seqlens, Tensor)
    packed = PackedSequences.from_cu_seqlens(inputs.cu_seqlens, device=inputs.q.device)
    if packed.total_tokens != inputs.T:
        raise ValueError(f"cu_seqlens needs to end at T={inputs.T}, got {packed.total_tokens}")
    return replace(inputs, cu_seqlens=packed)


@lru_cache(maxsize=64)
def _rows(B: int, T: int) -> PackedSequences:
    """Boundaries of B equal rows, kept so that what kernels derive from them is derived once a shape."""
    return PackedSequences.from_lengths([T] * B)


def _pack_rows(inputs: DeltaRuleInputs) -> DeltaRuleInputs:
    if inputs.B == 0:
        return inputs  # nothing runs
    tokens = {name: getattr(inputs, name).flatten(0, 1).unsqueeze(0) for name in ("q", "k", "v", "g", "beta")}
    return replace(inputs, **tokens, cu_seqlens=_rows(inputs.B, inputs.T))


def _unpack_rows(inputs: DeltaRuleInputs, answer: Answer) -> Answer:
    o, final = answer
    return o.reshape(inputs.v.shape), final


def _maybe_empty(cu_seqlens: Tensor | PackedSequences) -> bool:
    return isinstance(cu_seqlens, Tensor) or cu_seqlens.nonempty is not cu_seqlens


def _drop_empty(inputs: DeltaRuleInputs) -> DeltaRuleInputs:
    packed = inputs.packed
    assert packed is not None
    if packed.nonempty is packed:  # boundaries came as a tensor, and none is empty
        return inputs
    state = inputs.initial_state
    if state is not None:
        state = state.index_select(0, packed._nonempty_index(state.device))
    return replace(inputs, cu_seqlens=packed.nonempty, initial_state=state)


def _restore_empty(inputs: DeltaRuleInputs, answer: Answer) -> Answer:
    packed = inputs.packed
    o, final = answer
    assert packed is not None
    if final is None or packed.nonempty is packed:
        return answer
    return o, inputs.state_or_zeros().index_copy(0, packed._nonempty_index(final.device), final)


def _normalise(inputs: DeltaRuleInputs) -> DeltaRuleInputs:
    q, k = (cast(Tensor, _L2Norm.apply(x, 1e-6)) for x in (inputs.q, inputs.k))
    return replace(inputs, q=q, k=k, use_qk_l2norm_in_kernel=False)


def _repeat_heads(inputs: DeltaRuleInputs) -> DeltaRuleInputs:
    group = inputs.HV // inputs.H
    return replace(inputs, q=inputs.q.repeat_interleave(group, 2), k=inputs.k.repeat_interleave(group, 2))


def _transpose_state(inputs: DeltaRuleInputs) -> DeltaRuleInputs:
    state = inputs.initial_state
    return inputs if state is None else replace(inputs, initial_state=state.transpose(-1, -2).contiguous())


def _transpose_answer(inputs: DeltaRuleInputs, answer: Answer) -> Answer:
    o, final = answer
    return o, None if final is None else final.transpose(-1, -2).contiguous()


def _contiguous(inputs: DeltaRuleInputs) -> DeltaRuleInputs:
    return replace(inputs, **{name: x.contiguous() for name, x in _tensors(inputs).items()})  # type: ignore[arg-type]
