"""What ``bench layer`` and ``bench decode`` are told alike: place, dtype, sizes, rounds; and the layer that it describes."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from qwenlinear import usage
from qwenlinear.bench.layer_contenders import Setup
from qwenlinear.layers.config import GatedDeltaNetConfig


def add_size_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what ``bench layer`` and ``bench decode`` share to a parser: place, dtype, sizes, rounds, limit, folder."""
    parser.add_argument("--device", type=usage.device, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--dtype", type=usage.dtype(), help="of weights and activations; default: float32 on a CPU, bfloat16 on a GPU"
    )
    parser.add_argument("--hidden", type=usage.whole(1), help="hidden size; default: 256 (CPU), 2048 (GPU)")
    parser.add_argument("--heads", type=usage.heads, metavar="H/HV", help="default: 2/4 (CPU), 16/32 (GPU)")
    parser.add_argument("--head-dim", type=usage.whole(1), help="K = V; default: 64 (CPU), 128 (GPU)")
    parser.add_argument(
        "--rounds", type=usage.whole(1), default=9, help="rounds of turns (default 9; at least 3 are kept)"
    )
    parser.add_argument(
        "--case-seconds", type=usage.positive, default=12.0, help="time for the rounds of one table row (default 12)"
    )
    parser.add_argument("--limit", type=usage.positive, default=1e9, help="seconds after which no further row is begun")
    parser.add_argument(
        "--render", type=usage.file, metavar="JSON", help="measure nothing: lay out these results again"
    )


def fill_defaults(args: argparse.Namespace, cpu: dict[str, Any], gpu: dict[str, Any]) -> None:
    """Give the options that were left out the values of the device."""
    for name, value in (gpu if torch.device(args.device).type == "cuda" else cpu).items():
        if getattr(args, name) is None:
            setattr(args, name, value)


def setup_of(args: argparse.Namespace) -> Setup:
    """The layer that the options describe, with its weights."""
    H, HV = args.heads
    sizes = {"linear_num_key_heads": H, "linear_num_value_heads": HV, "linear_key_head_dim": args.head_dim}
    config = GatedDeltaNetConfig(hidden_size=args.hidden, linear_value_head_dim=args.head_dim, **sizes)
    return Setup.draw(config, torch.device(args.device), getattr(torch, args.dtype))
