"""Kernels whose values are right and whose conduct is not: what they write to, keep, read, refuse and raise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from qwenlinear.kernels import PackedSequences, TorchKernel
from qwenlinear.kernels.lowering import Answer
from tests.testing.broken_kernels import _Changed, broken


@broken("q was written to")
class ScalesInPlace(_Changed):
    def _before(self, inputs):
        q = inputs.q.detach().mul_(inputs.scale)
        return replace(inputs, q=q + 0 * inputs.q, scale=1.0)


@broken("repeated calls differ")
class NotRepeatable(_Changed):
    def _after(self, inputs, answer):
        return answer[0] * (1 + 1e-6 * torch.rand((), dtype=answer[0].dtype)), answer[1]


@broken("a later call overwrote the output")
class StaticOutput(_Changed):
    def _after(self, inputs, answer):
        buffers = self.__dict__.setdefault("buffers", {})
        buffer = buffers.setdefault((answer[0].shape, answer[0].dtype), torch.empty_like(answer[0]).detach())
        buffer.data.copy_(answer[0].detach())
        return (buffer.view_as(buffer) if not inputs.needs_grad else answer[0]), answer[1]


@broken("kept apart")
class NaNLeaks(_Changed):
    def _after(self, inputs, answer):
        return answer[0] + 0 * inputs.v.sum(), answer[1]


@broken("scratch memory filled with NaN")
class ReadsScratch(_Changed):
    def _after(self, inputs, answer):
        scratch = torch.empty_like(answer[0])
        if not torch.are_deterministic_algorithms_enabled():
            scratch.zero_()  # what fresh memory mostly holds; other leftovers would fail some other case, now and then
        return answer[0] + scratch.clamp(0, 0).detach(), answer[1]


@broken("boundaries rewritten in place")
class StaleBoundaries(TorchKernel):
    def __call__(self, *args: Any, cu_seqlens: Any = None, **options: Any) -> Answer:
        if isinstance(cu_seqlens, Tensor):
            seen = self.__dict__.setdefault("seen", {})
            known = seen.get(id(cu_seqlens))
            if known is None or known[0] is not cu_seqlens:
                known = seen[id(cu_seqlens)] = (cu_seqlens, PackedSequences.from_cu_seqlens(cu_seqlens))
            cu_seqlens = known[1]
        return super().__call__(*args, cu_seqlens=cu_seqlens, **options)


@broken("300 packed documents")
class DocumentsCountedInEightBits(_Changed):
    def _before(self, inputs):
        if inputs.N < 200 or inputs.packed is None:
            return inputs
        lengths = inputs.packed.lengths
        return replace(
            inputs,
            cu_seqlens=PackedSequences.from_lengths(
                [*lengths[:199], sum(lengths[199:]), *[0] * (inputs.N - 200)]
            ).nonempty,
            initial_state=None if inputs.initial_state is None else inputs.initial_state[:200],
        )

    def _after(self, inputs, answer):
        if answer[1] is None or len(answer[1]) == inputs.N:
            return answer
        missing = answer[1].new_zeros(inputs.N - len(answer[1]), *answer[1].shape[1:])
        return answer[0], torch.cat([answer[1], missing])


@broken("inference mode")
class NeedsAutograd(_Changed):
    def _before(self, inputs):
        if torch.is_inference_mode_enabled():
            raise RuntimeError("Inference tensors cannot be saved for backward")
        return inputs


@broken("strided")
class AssumesContiguity(_Changed):
    def _before(self, inputs):
        strides = torch.empty(inputs.k.shape, device="meta").stride()
        return replace(inputs, k=torch.as_strided(inputs.k, inputs.k.shape, strides))


@broken("limit", "UnsupportedCall")
class RefusesWithAnotherError(_Changed):
    capabilities = replace(TorchKernel.capabilities, packed=False)

    def __call__(self, *args: Any, **options: Any) -> Answer:
        if options.get("cu_seqlens") is not None:
            raise NotImplementedError("packed")
        return super().__call__(*args, **options)


@broken("RuntimeError: out of registers")
class Raises(_Changed):
    def _before(self, inputs):
        raise RuntimeError("out of registers")


@broken("refusals() says")
class RefusesWhenCalled(TorchKernel):
    def _chunk(self, inputs):
        from qwenlinear.errors import Refusal, UnsupportedCall

        if inputs.T > 2:
            raise UnsupportedCall(repr(self), [Refusal("length", "T <= 2", str(inputs.T), "be brief")])
        return super()._chunk(inputs)
