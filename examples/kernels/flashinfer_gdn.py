"""FlashInfer's prefill kernel as a kernel: packed input only, linear decay, value-first states, no gradients.

pip install flashinfer-python
python examples/kernels/flashinfer_gdn.py           # needs a GPU of compute capability 9.0 or newer
"""

from __future__ import annotations

import torch
from torch import Tensor

from qwenlinear import GatedDeltaKernel, Refusal, usage
from qwenlinear.kernels import DeltaRuleInputs, KernelCapabilities, Tolerance


class FlashInferKernel(GatedDeltaKernel):
    """`flashinfer.gdn_prefill.chunk_gated_delta_rule` (https://docs.flashinfer.ai), for inference.

    ``dense=False`` has the base class pack the rows of a batch, ``state_layout="vk"`` transposes states; what is left to do
    here is to drop the batch axis, exponentiate the decay, and hand over boundaries as int64.
    """

    capabilities = KernelCapabilities(
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        devices=frozenset({"cuda"}),
        chunk=True,
        initial_state=True,
        final_state=True,
        packed=True,
        dense=False,
        key_head_sizes=frozenset({128}),
        value_head_sizes=frozenset({128}),
        value_head_groups=True,
        state_layout="vk",
    )
    tolerances = {
        torch.bfloat16: Tolerance(output=1e-2, state=1e-2, gradient=1e-2),
        torch.float16: Tolerance(output=2e-3, state=2e-3, gradient=2e-3),
    }

    def _refusals(self, inputs: DeltaRuleInputs, form: str):
        if inputs.scale == 0:
            yield Refusal("scale", "a scale other than 0", "0, for FlashInfer the default", "use TorchKernel()")

    def _machine_refusals(self, hardware):
        if hardware.capability is not None and hardware.capability < (9, 0):
            yield Refusal("compute_capability", "9.0 or newer", str(hardware), "use FLAKernel() or TorchKernel()")

    def _load(self):  # asked last: the class is there without its library
        try:
            import flashinfer.gdn_prefill  # noqa: F401
        except ImportError as error:
            yield Refusal("package", "flashinfer-python", str(error), "pip install flashinfer-python")

    def _chunk(self, inputs: DeltaRuleInputs) -> tuple[Tensor, Tensor | None]:
        from flashinfer.gdn_prefill import chunk_gated_delta_rule

        device = inputs.q.device
        boundaries = inputs.packed.derive(
            ("FlashInferKernel", device), lambda: inputs.packed.cu_seqlens(device, torch.int64)
        )
        answer = chunk_gated_delta_rule(
            inputs.q[0],
            inputs.k[0],
            inputs.v[0],
            inputs.g[0].exp(),
            inputs.beta[0].float(),
            inputs.scale,
            inputs.initial_state,
            inputs.output_final_state,
            boundaries,
        )
        o, final = answer if inputs.output_final_state else (answer, None)
        return o.unsqueeze(0), final


if __name__ == "__main__":
    usage.check(FlashInferKernel(), "cuda", __doc__)
