"""TorchKernel (being written): recurrent form only."""

from __future__ import annotations

import torch
from torch import Tensor

from qwenlinear.kernels.base import GatedDeltaKernel
from qwenlinear.kernels.capabilities import KernelCapabilities, Tolerance
from qwenlinear.kernels.inputs import DeltaRuleInputs


class TorchKernel(GatedDeltaKernel):
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
        strided=True,
        deterministic=True,
    )
    tolerances = {d: Tolerance(1e-2, 1e-2, 1e-2) for d in capabilities.dtypes}

    def _chunk(self, inputs: DeltaRuleInputs) -> tuple[Tensor, Tensor | None]:
        return self._step(inputs)

    def _step(self, inputs: DeltaRuleInputs) -> tuple[Tensor, Tensor | None]:
        q, k, v, g, beta = (x.to(inputs.g.dtype) for x in (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta))
        bounds = inputs.packed.bounds if inputs.packed else None
        S0 = inputs.state_or_zeros()
        outs, finals = [], []
        for n in range(inputs.N):
            b, (s, e) = (n, (0, inputs.T)) if bounds is None else (0, (bounds[n], bounds[n + 1]))
            S = S0[n]
            for t in range(s, e):
                S = S * g[b, t].exp()[:, None, None]
                u = beta[b, t][:, None] * (v[b, t] - torch.einsum("hkv,hk->hv", S, k[b, t]))
                S = S + k[b, t][:, :, None] * u[:, None, :]
                outs.append(torch.einsum("hkv,hk->hv", S, q[b, t]) * inputs.scale)
            finals.append(S)
        return torch.stack(outs).view(inputs.v.shape).to(inputs.q.dtype), torch.stack(finals)
