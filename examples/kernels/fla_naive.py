"""flash-linear-attention's `naive` functions as a kernel, as its user would write it, run through the conformance suite.

pip install 'fla-core>=0.6.0' --no-deps
python examples/kernels/fla_naive.py
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from qwenlinear import GatedDeltaKernel, Refusal, usage
from qwenlinear.kernels import DeltaRuleInputs, KernelCapabilities, Tolerance


class FLANaiveKernel(GatedDeltaKernel):
    """Plain PyTorch from fla-core, in float32: dense only, no head groups, no normalisation.

    Repeated heads, normalised q and k and contiguous copies are the base class's lowerings; packed calls are refused.
    """

    capabilities = KernelCapabilities(
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        devices=None,
        chunk=True,
        step=True,
        backward=True,
        step_backward=True,
        state_backward=True,
        initial_state=True,
        final_state=True,
        strided=True,
        deterministic=True,
    )
    tolerances = {
        torch.float32: Tolerance(output=2e-3, state=2e-4, gradient=4e-3),  # of 1e-6 but for the chunked form's sums of
        # decays in float32: behind a token that forgets everything (a log-decay of -1e4) three digits are left
        torch.bfloat16: Tolerance(output=1e-2, state=1e-2, gradient=1e-2),
        torch.float16: Tolerance(output=2e-3, state=2e-3, gradient=2e-3),
    }

    def _load(self):  # asked last, and then imported where it is used: the class is there without its library
        if find_spec("fla") is None:
            yield Refusal("package", "fla-core", "none", "pip install fla-core --no-deps")

    def _chunk(self, inputs: DeltaRuleInputs) -> tuple[Tensor, Tensor | None]:
        from fla.ops.gated_delta_rule.naive import naive_chunk_gated_delta_rule

        return self._call(naive_chunk_gated_delta_rule, inputs)

    def _step(self, inputs: DeltaRuleInputs) -> tuple[Tensor, Tensor | None]:
        from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule

        return self._call(naive_recurrent_gated_delta_rule, inputs)

    def _call(self, function, inputs: DeltaRuleInputs) -> tuple[Tensor, Tensor | None]:
        o, final = function(  # by name: the two functions take g and beta in opposite orders
            q=inputs.q,
            k=inputs.k,
            v=inputs.v,
            g=inputs.g,
            beta=inputs.beta,
            scale=inputs.scale,
            initial_state=inputs.initial_state,
            output_final_state=inputs.output_final_state,
        )
        return o.to(inputs.q.dtype), final  # FLA answers in float32


if __name__ == "__main__":
    usage.check(FLANaiveKernel(), "cpu", __doc__)
