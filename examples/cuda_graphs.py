"""CUDA graphs of one Gated DeltaNet layer: forward, forward and backward over packed documents, and decoding with a cache.

    python examples/cuda_graphs.py
    python examples/cuda_graphs.py --hidden 2048 --heads 16/32 --lengths 1024 3072 --batch 1

Shapes and boundaries are fixed at capture: the same input tensors are filled anew before each replay, and one
`PackedSequences` is made before. A cache's states are written in place, so that a replayed token finds those of the one before.
Prints how far each replay is from the same call without a graph, and both times. Without a GPU it says so and does nothing."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qwenlinear import GatedDeltaNetCache, GatedDeltaNetConfig, PackedSequences, Qwen3_5GatedDeltaNet, usage
from qwenlinear.kernels import add_kernel_arguments, kernel_from_args


def main(args: argparse.Namespace) -> None:
    """Capture the three, replay them on new numbers, compare."""
    if not torch.cuda.is_available():
        print("no CUDA device here: CUDA graphs need one, nothing was run")
        return
    torch.manual_seed(0)
    H, HV = args.heads
    config = GatedDeltaNetConfig(hidden_size=args.hidden, linear_num_key_heads=H, linear_num_value_heads=HV)
    layer = Qwen3_5GatedDeltaNet(config, kernel=kernel_from_args(args, "cuda")).to("cuda", torch.bfloat16)
    packed = PackedSequences.from_lengths(args.lengths, device="cuda")
    x = torch.randn(1, packed.total_tokens, args.hidden, device="cuda", dtype=torch.bfloat16).requires_grad_()
    upstream, inputs = torch.randn_like(x), [x, *layer.parameters()]

    def forward() -> list[Tensor]:
        with torch.no_grad():
            return [layer(x, packed)]

    def both_ways() -> list[Tensor]:
        output = layer(x, packed)
        return [output, *torch.autograd.grad(output, inputs, upstream)]

    for name, call in (("forward", forward), ("forward and backward", both_ways)):
        graph, results = capture(call)
        with torch.no_grad():
            x.normal_()  # new numbers in the old memory
        graph.replay()
        report(name, results, call(), milliseconds(graph.replay), milliseconds(call))
    decode(layer, args.batch, args.tokens)


@torch.no_grad()
def decode(layer: Qwen3_5GatedDeltaNet, batch: int, tokens: int) -> None:
    """A prompt as usual, then one graph replayed for each token."""
    hidden, options = layer.config.hidden_size, {"device": "cuda", "dtype": torch.bfloat16}
    cache, token = GatedDeltaNetCache(), torch.randn(batch, 1, hidden, **options)
    layer(torch.randn(batch, 16, hidden, **options), cache=cache)
    print(*[line for line in layer.explain(token, cache=cache).splitlines() if line.startswith("  form")])
    graph, (output,) = capture(lambda: [layer(token, cache=cache)])  # warming up decodes; capturing does not
    without = cache.copy()
    replayed, eager = [], []
    for _ in range(tokens):
        token.normal_()
        graph.replay()
        replayed.append(output.clone())
        eager.append(layer(token, cache=without))
    got, want = ([torch.cat(y, 1), c.copy().recurrent_state] for y, c in ((replayed, cache), (eager, without)))
    times = milliseconds(graph.replay), milliseconds(lambda: layer(token, cache=without))
    report(f"{tokens} tokens of {batch} sequences, and the state after them", got, want, *times)


def capture(call: Callable[[], list[Tensor]]) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    """A graph of a call, and the tensors that a replay fills. The calls before it compile, tune and derive what they need."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    return graph, results


def milliseconds(call: Callable[[], Any], rounds: int = 20) -> float:
    """Mean time of a call on the device."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(rounds):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / rounds


def report(name: str, got: list[Tensor], want: list[Tensor], replayed: float, eager: float) -> None:
    """The largest relative difference of a replay from the call without a graph, and both times."""
    pairs = zip(got, want, strict=True)
    difference = max(((a.double() - b.double()).norm() / b.double().norm()).item() for a, b in pairs)
    print(f"{name}: off by {difference:.0e}, {replayed:.3f} ms in a graph, {eager:.3f} ms without")


def command_line() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    size = usage.whole(1)
    parser.add_argument("--hidden", type=size, default=512, help="hidden size (default: 512)")
    parser.add_argument("--heads", type=usage.heads, default="4/8", help="key/value heads of 128 (default: 4/8)")
    parser.add_argument("--lengths", type=size, nargs="+", default=[100, 300, 112], help="documents, in tokens")
    parser.add_argument("--batch", type=size, default=1, help="sequences that decode together")
    parser.add_argument("--tokens", type=size, default=16, help="how many each decodes")
    add_kernel_arguments(parser)
    return parser


if __name__ == "__main__":
    usage.run(main, command_line())
