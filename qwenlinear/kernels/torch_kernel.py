"""TorchKernel: plain PyTorch on any device, everyone's reference and the default where nothing else runs."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from qwenlinear.errors import Refusal
from qwenlinear.kernels.base import GatedDeltaKernel
from qwenlinear.kernels.capabilities import KernelCapabilities, Tolerance
from qwenlinear.kernels.chunk_layout import ChunkLayout, token_slots
from qwenlinear.kernels.hardware import Hardware
from qwenlinear.kernels.inputs import DeltaRuleInputs
from qwenlinear.kernels.lowering import Answer, l2norm
from qwenlinear.kernels.packing import PackedSequences
from qwenlinear.kernels.torch_chunked import chunked_gated_delta_rule


class TorchKernel(GatedDeltaKernel):
    """The gated delta rule in plain PyTorch: any device, float64, float32, bfloat16 and float16, gradients, packed, repeatable.

    Both forms compute in float32 at least (float64 for float64), whatever autocast says, and round once at the end. Products
    follow PyTorch's own float32 setting: `torch.set_float32_matmul_precision("high")` makes them TF32 on a GPU. The chunked
    form stores only the states between chunks for its backward pass and recomputes the rest; it has no second derivative,
    the recurrent form has.

    Args:
        hardware: as in :class:`GatedDeltaKernel`.

    Example:
        >>> kernel = TorchKernel()
        >>> q, k, v = torch.randn(3, 1, 8, 2, 4, dtype=torch.bfloat16).unbind()
        >>> g, beta = -torch.rand(1, 8, 2), torch.rand(1, 8, 2)
        >>> packed = PackedSequences.from_lengths([5, 3])
        >>> o, state = kernel(q, k, v, g, beta, output_final_state=True, cu_seqlens=packed)
        >>> o.dtype, state.shape, state.dtype
        (torch.bfloat16, torch.Size([2, 2, 4, 4]), torch.float32)
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
        state_in_place=True,
        packed=True,
        value_head_groups=True,
        qk_l2norm=True,
        strided=True,
        deterministic=True,
        isolated_gradients=True,
    )
    tolerances = {
        torch.float64: Tolerance(output=1e-11, state=1e-11, gradient=1e-9),
        torch.float32: Tolerance(output=1e-5, state=1e-5, gradient=1e-4),
        torch.bfloat16: Tolerance(output=5e-3, state=1e-5, gradient=5e-3),
        torch.float16: Tolerance(output=1e-3, state=1e-5, gradient=1e-3),
    }

    def _machine_refusals(self, hardware: Hardware) -> Iterable[Refusal]:
        if hardware.device_type == "cuda" and hardware.hip is None and hardware.capability is None:
            remedy = "use the CPU, or a driver and a PyTorch build that find the GPU"
            yield Refusal("device", "a GPU", f"{hardware} without one that PyTorch can use", remedy)

    def _chunk(self, inputs: DeltaRuleInputs) -> Answer:
        H, HV, K, V, size = inputs.H, inputs.HV, inputs.K, inputs.V, inputs.g.element_size()
        state = HV * K * V * size
        within = 32 * (H * 2 * K + HV * (2 * V + 4 * 32)) * size  # of a chunk of 32 tokens
        layout = ChunkLayout.of(
            inputs.packed, inputs.B, inputs.T, inputs.q.device, within, state, keeps=inputs.needs_grad
        )
        return chunked_gated_delta_rule(
            inputs.q,
            inputs.k,
            inputs.v,
            inputs.g,
            inputs.beta,
            inputs.initial_state,
            inputs.scale,
            inputs.use_qk_l2norm_in_kernel,
            inputs.output_final_state,
            layout,
        )

    def _step(self, inputs: DeltaRuleInputs) -> Answer:
        """Token by token, all sequences together; sequences that have ended drop out of the batch."""
        dtype, device, packed = inputs.g.dtype, inputs.q.device, inputs.packed
        H, G = inputs.H, inputs.HV // inputs.H
        q, k, v, beta = (x.to(dtype) for x in (inputs.q, inputs.k, inputs.v, inputs.beta))
        if inputs.use_qk_l2norm_in_kernel:
            q, k = l2norm(q), l2norm(k)
        q, decay = q * inputs.scale, inputs.g.exp()
        S = inputs.state_or_zeros().unflatten(1, (H, G))  # [N, H, G, K, V]
        in_place = inputs.state_in_place and packed is None  # packed sequences are put in another order
        if packed is None:
            counts = [inputs.B] * inputs.T
            steps = [[x[:, t] for x in (q, k, v, beta, decay)] for t in range(inputs.T)]
        else:
            counts, order, slots = packed.derive(("TorchKernel.step", device), lambda: _token_steps(packed, device))
            S = S.index_select(0, order)
            by_step = (x[0].index_select(0, slots.argsort()).split(counts) for x in (q, k, v, beta, decay))
            steps = [list(parts) for parts in zip(*by_step, strict=True)]
        outs, ended = [], []
        for n, (q_t, k_t, v_t, beta_t, decay_t) in zip(counts, steps, strict=True):
            ended.append(S[n:])
            decay_t = decay_t.unflatten(1, (H, G))[..., None, None]
            S = S.mul_(decay_t) if in_place else S[:n] * decay_t
            error = v_t.unflatten(1, (H, G)) - torch.einsum("nhgkv,nhk->nhgv", S, k_t)
            written = torch.einsum("nhk,nhgv->nhgkv", k_t, beta_t.unflatten(1, (H, G)).unsqueeze(-1) * error)
            S = S.add_(written) if in_place else S + written
            outs.append(torch.einsum("nhgkv,nhk->nhgv", S, q_t).flatten(1, 2))
        if packed is None:
            o = torch.stack(outs, dim=1)
            final = S.flatten(1, 2)
        else:
            o = torch.cat(outs).index_select(0, slots).unsqueeze(0)
            final = torch.cat([S, *reversed(ended)]).flatten(1, 2).index_select(0, order.argsort())
        if inputs.state_in_place:
            assert inputs.initial_state is not None, "validated"
            final = inputs.initial_state if in_place else inputs.initial_state.copy_(final)
        return o.to(inputs.q.dtype), final


def _token_steps(packed: PackedSequences, device: torch.device) -> tuple[list[int], Tensor, Tensor]:
    counts, order, slots = token_slots(torch.tensor(packed.lengths, dtype=torch.int64, device="cpu"), size=1)
    return counts, order.to(device), slots.to(device)
