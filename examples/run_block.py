"""Run one Qwen3.5 block: packed documents, a prompt and cached decoding; print what ran and how fast.

python examples/run_block.py
python examples/run_block.py --device cuda --dtype bfloat16 --hidden 2048 --heads 16/32 --head-dim 128
"""

from __future__ import annotations

import argparse
import time

import torch

from qwenlinear import GatedDeltaNetBlock, GatedDeltaNetCache, GatedDeltaNetConfig, PackedSequences, usage
from qwenlinear.kernels import add_kernel_arguments, kernel_from_args


def command_line() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=usage.whole(1), default=128, help="hidden size (default: 128)")
    parser.add_argument(
        "--heads", type=usage.heads, default="2/4", metavar="H/HV", help="key/value heads (default: 2/4)"
    )
    parser.add_argument("--head-dim", type=usage.whole(1), default=32, help="K and V (default: 32)")
    parser.add_argument("--tokens", type=usage.whole(9), default=512, help="the last eight are decoded (default: 512)")
    parser.add_argument("--device", type=usage.device, default="cpu", help="default: cpu")
    parser.add_argument("--dtype", default="float32", choices=["float64", "float32", "bfloat16", "float16"])
    add_kernel_arguments(parser)
    return parser


def main(args: argparse.Namespace) -> None:
    """Build the block, run it three ways, compare."""
    torch.manual_seed(0)
    H, HV = args.heads
    config = GatedDeltaNetConfig(
        hidden_size=args.hidden,
        linear_num_key_heads=H,
        linear_num_value_heads=HV,
        linear_key_head_dim=args.head_dim,
        linear_value_head_dim=args.head_dim,
    )
    block = GatedDeltaNetBlock(config, kernel_from_args(args, args.device)).to(args.device, getattr(torch, args.dtype))
    print(block)
    x = torch.randn(1, args.tokens, args.hidden, device=args.device, dtype=getattr(torch, args.dtype))

    first = args.tokens // 3
    packed = PackedSequences.from_lengths([first, args.tokens - first], args.device)
    print(block.linear_attn.explain(x, packed))
    start = time.perf_counter()
    together = block(x, packed)
    together.float().square().sum().backward()
    apart = torch.cat([block(piece) for piece in x.split([first, args.tokens - first], 1)], 1)
    print(f"two packed documents against each alone: {relative(together, apart):.1e}")
    print(f"forward and backward, first call: {args.tokens / (time.perf_counter() - start):,.0f} tokens/s")

    with torch.no_grad():
        cache = GatedDeltaNetCache()
        pieces = [block(x[:, :-8], cache=cache)]
        print(block.linear_attn.explain(x[:, -1:], cache=cache))
        pieces += [block(x[:, t : t + 1], cache=cache) for t in range(args.tokens - 8, args.tokens)]
        print(f"prompt and eight cached tokens against one pass: {relative(torch.cat(pieces, 1), block(x)):.1e}")


def relative(x: torch.Tensor, reference: torch.Tensor) -> float:
    """norm(x - reference) / norm(reference)."""
    return ((x - reference).float().norm() / reference.float().norm()).item()


if __name__ == "__main__":
    usage.run(main, command_line())
