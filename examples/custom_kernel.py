"""A kernel of your own in twenty lines, checked against TorchKernel and injected into a layer.

python examples/custom_kernel.py
python examples/custom_kernel.py --qwen-gdn-backend fla       # compare with another kernel
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from qwenlinear import GatedDeltaKernel, GatedDeltaNetConfig, Qwen3_5GatedDeltaNet, usage
from qwenlinear.kernels import DeltaRuleInputs, KernelCapabilities, Tolerance, add_kernel_arguments, kernel_from_args


class LoopKernel(GatedDeltaKernel):
    """The recurrence, one token after another. What is not declared here is refused or lowered by the base class."""

    capabilities = KernelCapabilities(
        dtypes=frozenset({torch.float32, torch.float64}),
        devices=None,
        chunk=True,
        backward=True,
        state_backward=True,
        initial_state=True,
        final_state=True,
        strided=True,
    )
    tolerances = {torch.float32: Tolerance(1e-5, 1e-5, 1e-4), torch.float64: Tolerance(1e-11, 1e-11, 1e-9)}

    def _chunk(self, inputs: DeltaRuleInputs) -> tuple[Tensor, Tensor | None]:
        S, out = inputs.state_or_zeros(), []  # [B, HV, K, V]
        for t in range(inputs.T):
            q, k, v, g, beta = (x[:, t] for x in (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta))
            S = S * g.exp()[..., None, None]
            error = v - torch.einsum("bhkv,bhk->bhv", S, k)
            S = S + torch.einsum("bhk,bhv->bhkv", k, beta[..., None] * error)
            out.append(torch.einsum("bhkv,bhk->bhv", S, q * inputs.scale))
        return torch.stack(out, 1), S


def command_line() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=usage.whole(1), default=100, help="of each of two rows (default: 100)")
    parser.add_argument("--device", type=usage.device, default="cpu", help="default: cpu")
    add_kernel_arguments(parser)
    return parser


def main(args: argparse.Namespace) -> None:
    """Compare a layer on LoopKernel with the same layer on another kernel."""
    torch.manual_seed(0)
    config = GatedDeltaNetConfig(hidden_size=64, linear_num_key_heads=2, linear_num_value_heads=4,
                                 linear_key_head_dim=16, linear_value_head_dim=16)  # fmt: skip
    mine = Qwen3_5GatedDeltaNet(config, kernel=LoopKernel()).to(args.device)
    other = Qwen3_5GatedDeltaNet(config, kernel=kernel_from_args(args, args.device)).to(args.device)
    other.load_state_dict(mine.state_dict())
    x = torch.randn(2, args.tokens, 64, device=args.device)
    print(mine)
    print(mine.explain(x))  # value head groups and l2norm are lowered: LoopKernel never sees them
    for refusal in LoopKernel().refusals(
        *torch.rand(3, 1, 4, 2, 8), *torch.rand(2, 1, 4, 2), cu_seqlens=torch.tensor([0, 4])
    ):
        print(f"packed documents are refused: {refusal}")
    difference = (mine(x) - other(x)).norm() / other(x).norm()
    print(f"relative difference to {other.kernel!r}: {difference.item():.1e}")


if __name__ == "__main__":
    usage.run(main, command_line())
