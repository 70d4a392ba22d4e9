"""Packed documents in one Gated DeltaNet layer: what packing saves, that nothing leaks, and what forgetting it costs.

    python examples/packed_sequences.py
    python examples/packed_sequences.py --device cuda --dtype bfloat16 --hidden 2048 --heads 16/32 --head-dim 128 --scale 32

prints

    12 documents, 1160 tokens, the longest of 400; a padded batch would hold 4800 (4.1 times as many)
    packed: the layer takes 23.0 ms forward and backward, padded 79.1 ms
    packed against each document alone: outputs 2e-08, gradients of the input 4e-08
    without boundaries the outputs are off by 2e-01: documents see one another
    document 3 rewritten: the other outputs change by 0.0e+00
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from qwenlinear import GatedDeltaNetConfig, PackedSequences, Qwen3_5GatedDeltaNet, usage
from qwenlinear.kernels import add_kernel_arguments, kernel_from_args

LENGTHS = [400, 32, 1, 150, 64, 7, 90, 200, 16, 100, 75, 25]  # as documents come: long, short, and one of one token


def main(args: argparse.Namespace) -> None:
    """Build a layer, run the documents packed, alone, padded, and wrongly without boundaries."""
    dtype, device = getattr(torch, args.dtype), torch.device(args.device)
    torch.manual_seed(0)
    H, HV = args.heads
    config = GatedDeltaNetConfig(
        hidden_size=args.hidden,
        linear_num_key_heads=H,
        linear_num_value_heads=HV,
        linear_key_head_dim=args.head_dim,
        linear_value_head_dim=args.head_dim,
    )
    layer = Qwen3_5GatedDeltaNet(config, kernel=kernel_from_args(args, device)).to(device, dtype)
    lengths = [length * args.scale for length in LENGTHS]
    packed = PackedSequences.from_lengths(lengths, device)  # once a batch; every layer reuses it
    x = torch.randn(1, sum(lengths), args.hidden, device=device, dtype=dtype, requires_grad=True)
    padding = len(lengths) * max(lengths)
    print(
        f"{len(lengths)} documents, {packed.total_tokens} tokens, the longest of {max(lengths)}; "
        f"a padded batch would hold {padding} ({padding / packed.total_tokens:.1f} times as many)"
    )
    batch, mask = pad(x.detach(), lengths)
    batch.requires_grad_()
    print(
        f"packed: the layer takes {milliseconds(lambda: layer(x, packed), device):.1f} ms forward and backward, "
        f"padded {milliseconds(lambda: layer(batch, attention_mask=mask), device):.1f} ms"
    )

    together = layer(x, packed)
    alone = torch.cat([layer(document) for document in x.split(lengths, 1)], 1)
    weights = torch.linspace(-1, 1, args.hidden, device=device, dtype=dtype).expand_as(together)
    gradients = [torch.autograd.grad(y, x, weights)[0] for y in (together, alone)]
    print(
        f"packed against each document alone: outputs {relative(together, alone):.0e}, "
        f"gradients of the input {relative(*gradients):.0e}"
    )
    with torch.no_grad():
        print(f"without boundaries the outputs are off by {relative(layer(x), alone):.0e}: documents see one another")
        other = x.clone()
        start = sum(lengths[:3])
        other[:, start : start + lengths[3]] = torch.randn_like(other[:, start : start + lengths[3]])
        change = (layer(other, packed) - together).abs()
        change[:, start : start + lengths[3]] = 0
        print(f"document 3 rewritten: the other outputs change by {change.max().item():.1e}")


def command_line() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=usage.whole(1), default=128, help="hidden size (default: 128)")
    parser.add_argument(
        "--heads", type=usage.heads, default="2/4", metavar="H/HV", help="key/value heads (default: 2/4)"
    )
    parser.add_argument("--head-dim", type=usage.whole(1), default=32, help="K and V (default: 32)")
    parser.add_argument("--scale", type=usage.whole(1), default=1, help="times as many tokens a document (default: 1)")
    parser.add_argument("--device", type=usage.device, default="cpu", help="default: cpu")
    parser.add_argument("--dtype", default="float32", choices=["float64", "float32", "bfloat16", "float16"])
    add_kernel_arguments(parser)
    return parser


def pad(x: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """The documents as a batch padded at the right, and its mask."""
    batch = torch.nn.utils.rnn.pad_sequence([document[0] for document in x.split(lengths, 1)], batch_first=True)
    sizes = torch.tensor(lengths, device=x.device)
    return batch, torch.arange(batch.shape[1], device=x.device) < sizes[:, None]


def milliseconds(forward: Callable[[], Tensor], device: torch.device, rounds: int = 5) -> float:
    """The fastest of some forward and backward passes."""
    best = float("inf")
    for _ in range(rounds):
        begin = time.perf_counter()
        forward().float().sum().backward()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - begin)
    return best * 1e3


def relative(x: Tensor, reference: Tensor) -> float:
    """norm(x - reference) / norm(reference)."""
    return ((x - reference).float().norm() / reference.float().norm()).item()


if __name__ == "__main__":
    usage.run(main, command_line())
