"""attention-gym's gated delta rule as a kernel: another library's own conventions, run through the conformance suite.

pip install 'attn-gym>=0.0.17' && python examples/kernels/attention_gym.py
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from qwenlinear import GatedDeltaKernel, Refusal, usage
from qwenlinear.kernels import DeltaRuleInputs, KernelCapabilities, Tolerance


class AttentionGymKernel(GatedDeltaKernel):
    """Its eager reference (https://github.com/meta-pytorch/attention-gym), which runs anywhere.

    States are [N, HV, V, K] there, which ``state_layout="vk"`` says and the base class transposes; boundaries are int32 on
    q's device, which `inputs.boundaries` is; empty documents and head groups are its own.
    """

    capabilities = KernelCapabilities(
        dtypes=frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16}),
        devices=None,
        chunk=True,
        step=True,
        backward=True,
        step_backward=True,
        state_backward=True,
        initial_state=True,
        final_state=True,
        packed=True,
        empty_sequences=True,
        value_head_groups=True,
        strided=True,
        state_layout="vk",
        deterministic=True,
    )
    tolerances = {
        torch.float64: Tolerance(output=1e-10, state=1e-10, gradient=1e-9),
        torch.float32: Tolerance(output=2e-3, state=2e-4, gradient=4e-3),  # of 1e-6 but for the chunked form's sums of
        # decays in float32: behind a token that forgets everything (a log-decay of -1e4) three digits are left
        torch.bfloat16: Tolerance(output=1e-2, state=1e-2, gradient=1e-2),
        torch.float16: Tolerance(output=2e-3, state=2e-3, gradient=2e-3),
    }

    def _load(self):  # asked last, and imported where it is used: the class is there without its library
        if find_spec("attn_gym") is None:
            yield Refusal("package", "attn-gym", "none", "pip install 'attn-gym>=0.0.17'")

    def _chunk(self, inputs: DeltaRuleInputs) -> tuple[Tensor, Tensor | None]:
        from attn_gym.linear import chunk_gdn

        return self._call(chunk_gdn, inputs)

    def _step(self, inputs: DeltaRuleInputs) -> tuple[Tensor, Tensor | None]:
        from attn_gym.linear import recurrent_gdn

        return self._call(recurrent_gdn, inputs)

    def _call(self, function, inputs: DeltaRuleInputs) -> tuple[Tensor, Tensor | None]:
        return function(
            inputs.q,
            inputs.k,
            inputs.v,
            inputs.g,
            inputs.beta,
            inputs.initial_state,
            cu_seqlens=inputs.boundaries,
            scale=inputs.scale,
            output_final_state=inputs.output_final_state,
            impl="reference",
        )


if __name__ == "__main__":
    usage.check(AttentionGymKernel(), "cpu", __doc__)
