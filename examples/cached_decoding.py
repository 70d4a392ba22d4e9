"""Cached decoding with one Gated DeltaNet layer: prompt, pieces and single tokens give what one pass gives, in constant memory.

    python examples/cached_decoding.py
    python examples/cached_decoding.py --device cuda --dtype bfloat16 --hidden 2048 --heads 16/32 --head-dim 128

prints which kernel runs a prompt and which a token, then a table such as

    generated   cache MiB   ms a token   ms without a cache
            1        0.02          0.8                  4.6
           64        0.02          0.3                  5.6
          256        0.02          0.3                  8.2
    prompt and 256 cached tokens against one pass: 4e-07
    a branch from the prompt's cache, run twice: 0e+00; the first cache is untouched
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable

import torch
from torch import Tensor

from qwenlinear import GatedDeltaNetCache, GatedDeltaNetConfig, Qwen3_5GatedDeltaNet, usage
from qwenlinear.kernels import add_kernel_arguments, kernel_from_args


@torch.no_grad()
def main(args: argparse.Namespace) -> None:
    """Build a layer, decode with a cache, compare with one pass."""
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
    total = args.prompt + args.generate
    x = torch.randn(args.batch, total, args.hidden, device=device, dtype=dtype)

    cache = GatedDeltaNetCache()
    print("a prompt:", *accepted(layer.explain(x[:, : args.prompt], cache=cache)), sep="\n")
    outputs = [layer(x[:, : args.prompt], cache=cache)]
    after_prompt = copy.deepcopy(cache)
    print("a token:", *accepted(layer.explain(x[:, :1], cache=cache)), sep="\n")

    print("generated   cache MiB   ms a token   ms without a cache")
    shown = {1, args.generate // 4, args.generate}
    for count in range(1, args.generate + 1):
        position = args.prompt + count - 1
        y, cached = timed(lambda position=position: layer(x[:, position : position + 1], cache=cache), device)
        outputs.append(y)
        if count in shown:
            _, without = timed(lambda position=position: layer(x[:, : position + 1])[:, -1:], device)
            print(f"{count:9d} {mebibytes(cache):11.2f} {cached:12.1f} {without:20.1f}")

    whole = layer(x)
    print(f"prompt and {args.generate} cached tokens against one pass: {relative(torch.cat(outputs, 1), whole):.0e}")
    branches = [layer(x[:, args.prompt : args.prompt + 8], cache=copy.deepcopy(after_prompt)) for _ in range(2)]
    again = layer(x[:, args.prompt : args.prompt + 8], cache=after_prompt)
    print(
        f"a branch from the prompt's cache, run twice: {relative(*branches):.0e}; "
        f"the first cache is {'untouched' if torch.equal(again, branches[0]) else 'changed'}"
    )


def command_line() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=usage.whole(1), default=128, help="hidden size (default: 128)")
    parser.add_argument(
        "--heads", type=usage.heads, default="2/4", metavar="H/HV", help="key/value heads (default: 2/4)"
    )
    parser.add_argument("--head-dim", type=usage.whole(1), default=32, help="K and V (default: 32)")
    parser.add_argument("--batch", type=usage.whole(1), default=1, help="sequences (default: 1)")
    parser.add_argument("--prompt", type=usage.whole(1), default=512, help="tokens of the prompt (default: 512)")
    parser.add_argument("--generate", type=usage.whole(1), default=256, help="tokens after it (default: 256)")
    parser.add_argument("--device", type=usage.device, default="cpu", help="default: cpu")
    parser.add_argument("--dtype", default="float32", choices=["float64", "float32", "bfloat16", "float16"])
    add_kernel_arguments(parser)
    return parser


def accepted(explanation: str) -> list[str]:
    """An explanation without what was refused."""
    return [line for line in explanation.splitlines() if "- [" not in line and "refused" not in line]


def timed(call: Callable[[], Tensor], device: torch.device) -> tuple[Tensor, float]:
    """A call's result and its milliseconds."""
    begin = time.perf_counter()
    result = call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return result, (time.perf_counter() - begin) * 1e3


def mebibytes(cache: GatedDeltaNetCache) -> float:
    """What the cache holds, however many tokens it has seen."""
    states = (cache.conv_state, cache.recurrent_state)
    return sum(state.numel() * state.element_size() for state in states if state is not None) / 2**20


def relative(x: Tensor, reference: Tensor) -> float:
    """norm(x - reference) / norm(reference)."""
    return ((x - reference).float().norm() / reference.float().norm()).item()


if __name__ == "__main__":
    usage.run(main, command_line())
