"""Kernels that are wrong on purpose, each in one way that some framework has been wrong, and what must be said of each.

`BROKEN` maps a kernel to words that the first failure's message has to contain: the topic of a case, or the quantity.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from qwenlinear.kernels import DeltaRuleInputs, GatedDeltaKernel, TorchKernel
from qwenlinear.kernels.lowering import Answer
from qwenlinear.testing.reference import token_by_token

BROKEN: dict[type[GatedDeltaKernel], tuple[str, ...]] = {}


def broken(*words: str) -> Callable[[type[GatedDeltaKernel]], type[GatedDeltaKernel]]:
    """Register a kernel with the words that name its fault."""

    def register(kernel: type[GatedDeltaKernel]) -> type[GatedDeltaKernel]:
        BROKEN[kernel] = words
        return kernel

    return register


class _Changed(TorchKernel):
    """TorchKernel on other inputs, in both forms."""

    def _before(self, inputs: DeltaRuleInputs) -> DeltaRuleInputs:
        return inputs

    def _after(self, inputs: DeltaRuleInputs, answer: Answer) -> Answer:
        return answer

    def _chunk(self, inputs: DeltaRuleInputs) -> Answer:
        return self._after(inputs, super()._chunk(self._before(inputs)))

    def _step(self, inputs: DeltaRuleInputs) -> Answer:
        return self._after(inputs, super()._step(self._before(inputs)))


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


def wrong_gradient(x: Tensor, factor: float) -> Tensor:
    return _ScaleGradient.apply(x, factor)


# ---- the seven that the issue names --------------------------------------------------------------------------------


@broken("final state", "transposed")
class StateTransposed(_Changed):
    def _before(self, inputs):
        state = inputs.initial_state
        return inputs if state is None else replace(inputs, initial_state=self._flip(state))

    def _after(self, inputs, answer):
        return answer[0], None if answer[1] is None else self._flip(answer[1])

    @staticmethod
    def _flip(state):  # [N, HV, K, V] read as [N, HV, V, K]
        return state.reshape(*state.shape[:2], state.shape[3], state.shape[2]).mT.contiguous()


@broken("packed documents", "boundaries ignored")
class BoundariesIgnored(_Changed):
    def _chunk(self, inputs):
        if inputs.packed is None:
            return super()._chunk(inputs)
        state = inputs.initial_state
        whole = replace(inputs, cu_seqlens=None, initial_state=None if state is None else state[:1])
        o, final = super()._chunk(whole)
        return o, None if final is None else final.expand(inputs.N, -1, -1, -1).clone()


@broken("write strength beta", "beta applied twice")
class BetaTwice(_Changed):
    def _before(self, inputs):
        return replace(inputs, beta=inputs.beta * inputs.beta)


@broken("head groups", "tiled instead of repeated")
class HeadGroupsTiled(_Changed):
    def _before(self, inputs):
        group = inputs.HV // inputs.H
        return replace(inputs, q=inputs.q.repeat(1, 1, group, 1), k=inputs.k.repeat(1, 1, group, 1))


@broken("scale", "scale ignored")
class ScaleForgotten(_Changed):
    def _before(self, inputs):
        return replace(inputs, scale=1.0)


@broken("gradient of g")
class GradientOfGDropped(_Changed):
    def _before(self, inputs):
        return replace(inputs, g=inputs.g.detach())


@broken("final state of an unfilled chunk")
class FinalStateOfPaddedChunk(_Changed):
    def _chunk(self, inputs):
        if inputs.packed is not None:
            return super()._chunk(inputs)
        pad = -inputs.T % 64

        def padded(x, value=0.0):
            last = x[:, -1:] * value
            return torch.cat([x, last.expand(-1, pad, *x.shape[2:])], 1)

        more = {name: padded(getattr(inputs, name)) for name in ("q", "k", "v", "beta")}
        o, final = super()._chunk(replace(inputs, g=padded(inputs.g, 1.0), **more))
        return o[:, : inputs.T].clone(), final


# ---- values --------------------------------------------------------------------------------------------------------


@broken("decay", "wrong sign")
class DecaySign(_Changed):
    def _before(self, inputs):
        return replace(inputs, g=-inputs.g)


@broken("decay", "base 2")
class DecayInBaseTwo(_Changed):
    def _before(self, inputs):
        return replace(inputs, g=inputs.g * 0.6931471805599453)


@broken("exp of g forgotten")
class ExpForgotten(_Changed):
    def _chunk(self, inputs):
        if inputs.packed is not None:
            return super()._chunk(inputs)
        rest = (inputs.scale, inputs.initial_state, inputs.output_final_state, inputs.use_qk_l2norm_in_kernel)
        o, final = token_by_token(*(inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta), *rest, decay=lambda g: g)
        return o.to(inputs.q.dtype), final


@broken("decay ignored")
class NeverDecays(_Changed):
    def _before(self, inputs):
        return replace(inputs, g=torch.zeros_like(inputs.g))


@broken("1 + g")
class DecayLinearised(_Changed):
    def _before(self, inputs):
        return replace(inputs, g=(1 + inputs.g).clamp(min=1e-30).log())


@broken("decay", "after the write")
class DecayAfterTheWrite(_Changed):
    def _before(self, inputs):
        return replace(inputs, g=inputs.g.roll(1, 1))


@broken("gates")
class GatesClamped(_Changed):
    def _before(self, inputs):
        return replace(inputs, g=inputs.g.clamp(min=-5.0))


@broken("normalised q and k near zero")
class NormWithoutEpsilon(_Changed):
    def _before(self, inputs):
        if not inputs.use_qk_l2norm_in_kernel:
            return inputs
        q, k = (torch.nn.functional.normalize(x.double(), dim=-1).to(x.dtype) for x in (inputs.q, inputs.k))
        return replace(inputs, q=q, k=k, use_qk_l2norm_in_kernel=False)


@broken("length 1")
class SingleTokenWrong(_Changed):
    def _before(self, inputs):
        return replace(inputs, g=torch.zeros_like(inputs.g)) if inputs.T == 1 else inputs


@broken("length 127")
class WrongBeyondTwoChunks(_Changed):
    def _chunk(self, inputs):
        o, final = super()._chunk(inputs)
        if inputs.packed is None and 100 < inputs.T < 33_000:
            o = torch.cat([o[:, :100], o[:, 100:] * 1.1], 1)
        return o, final


@broken("33000 tokens")
class PositionsInSixteenBits(_Changed):
    def _after(self, inputs, answer):
        o = answer[0]
        return (o if inputs.T < 32_768 else torch.cat([o[:, :32_767], o[:, 32_767:] * 0], 1)), answer[1]


@broken("batch")
class BatchReversed(_Changed):
    def _before(self, inputs):
        return replace(inputs, g=inputs.g.flip(0)) if inputs.packed is None else inputs


# ---- states --------------------------------------------------------------------------------------------------------


@broken("packed", "initial state ignored")
class PackedStateIgnored(_Changed):
    def _before(self, inputs):
        return inputs if inputs.packed is None else replace(inputs, initial_state=None)


@broken("gradient of initial_state")
class GradientOfStateMissing(_Changed):
    def _before(self, inputs):
        state = inputs.initial_state
        return inputs if state is None else replace(inputs, initial_state=state.detach())


@broken("gradient")
class FinalStateDetached(_Changed):
    def _after(self, inputs, answer):
        return answer[0], None if answer[1] is None else answer[1].detach()


@broken("initial_state was written to")
class StateUpdatedInPlace(_Changed):
    def _after(self, inputs, answer):
        if inputs.initial_state is not None and answer[1] is not None:
            inputs.initial_state.data.copy_(answer[1])
        return answer


@broken("shares memory with initial_state")
class StateAliasesInput(_Changed):
    """Decoding without a write: where nothing decays and nothing is written the state is handed through."""

    def _after(self, inputs, answer):
        state = inputs.initial_state
        if state is None or answer[1] is None or not torch.equal(state, answer[1]):
            return answer
        return answer[0], state.view_as(state)


class _InPlace(_Changed):
    def _step(self, inputs):
        o, final = super()._step(replace(inputs, state_in_place=False))
        return (o, self._overwrite(inputs.initial_state, final)) if inputs.state_in_place else (o, final)


@broken("state in place", "final state: relative error")
class InPlaceHandsBackTheOldState(_InPlace):
    def _overwrite(self, state, final):
        return state


@broken("state in place", "memory beside initial_state was written to")
class InPlaceWritesBeyondTheState(_InPlace):
    def _overwrite(self, state, final):
        torch.as_strided(state, (1,), (1,), state.storage_offset() + state.numel()).zero_()
        return state.copy_(final)


@broken("state in place", "TypeError", "initial_state itself")
class InPlaceHandsBackAnotherTensor(_InPlace):
    def _overwrite(self, state, final):
        state.copy_(final)
        return final


@broken("state in place, call after call")
class InPlaceReadsTheStateOfAnEarlierCall(_InPlace):
    def _overwrite(self, state, final):
        seen = self.__dict__.setdefault("seen", {})
        address = state.data_ptr()
        state.copy_(seen[address] if address in seen and seen[address].shape == final.shape else final)
        seen[address] = final
        return state


@broken("final state")
class StateRoundedToSixteenBits(_Changed):
    def _after(self, inputs, answer):
        return answer[0], None if answer[1] is None else answer[1].bfloat16().to(answer[1].dtype)


@broken("TypeError", "final_state")
class StateReturnedInSixteenBits(_Changed):
    def _after(self, inputs, answer):
        return answer[0], None if answer[1] is None else answer[1].bfloat16()


@broken("empty document")
class EmptyDocumentLosesItsState(_Changed):
    capabilities = replace(TorchKernel.capabilities, empty_sequences=True)

    def _chunk(self, inputs):
        packed = inputs.packed
        if packed is None or packed.nonempty is packed:
            return super()._chunk(inputs)
        kept = torch.tensor([n for n, length in enumerate(packed.lengths) if length])
        state = None if inputs.initial_state is None else inputs.initial_state[kept]
        o, final = super()._chunk(replace(inputs, cu_seqlens=packed.nonempty, initial_state=state))
        return o, None if final is None else final.new_zeros(inputs.N, *final.shape[1:]).index_copy(0, kept, final)

    _step = _chunk  # type: ignore[assignment]


# ---- gradients -----------------------------------------------------------------------------------------------------


@broken("gradient of k")
class GroupGradientAveraged(_Changed):
    def _before(self, inputs):
        return replace(inputs, k=wrong_gradient(inputs.k, inputs.H / inputs.HV))


@broken("gradient of g")
class GradientOfGSign(_Changed):
    def _before(self, inputs):
        return replace(inputs, g=wrong_gradient(inputs.g, -1.0))


@broken("gradient of q")
class GradientForDefaultScaleOnly(_Changed):
    def _before(self, inputs):
        return replace(inputs, q=wrong_gradient(inputs.q, inputs.K**-0.5 / inputs.scale))


@broken("gradient of beta")
class GradientOfBetaForLogits(_Changed):
    def _before(self, inputs):
        return replace(inputs, beta=wrong_gradient(inputs.beta, 0.5))


@broken("gradient of v")
class GradientOfPackedTailMissing(_Changed):
    def _before(self, inputs):
        if inputs.packed is None or inputs.N < 2:
            return inputs
        v = inputs.v
        return replace(inputs, v=torch.cat([v[:, :-1], v[:, -1:].detach()], 1))
