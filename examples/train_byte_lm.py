"""Train a byte language model of four Gated DeltaNet blocks, then decode from its cache.

    python examples/train_byte_lm.py                           # about a minute on a CPU
    python examples/train_byte_lm.py --device cuda --dtype bfloat16 --heads 16/32 --head-dim 128 --qwen-gdn-backend flashqla

The text is Python's own standard library as found on this machine, or any file (--text). Every step packs documents of
mixed lengths into one row; `PackedSequences` keeps them apart in every layer.
"""

from __future__ import annotations

import argparse
import logging
import random
import sysconfig
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qwenlinear import (
    GatedDeltaKernel,
    GatedDeltaNetBlock,
    GatedDeltaNetCache,
    GatedDeltaNetConfig,
    PackedSequences,
    usage,
)
from qwenlinear.kernels import add_kernel_arguments, kernel_from_args
from qwenlinear.layers import ZeroCenteredRMSNorm


class ByteLM(nn.Module):
    """Bytes in, logits of the next byte out; products in `dtype`, parameters in float32."""

    def __init__(self, config: GatedDeltaNetConfig, blocks: int, kernel: GatedDeltaKernel, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.embed = nn.Embedding(256, config.hidden_size)
        self.blocks = nn.ModuleList(GatedDeltaNetBlock(config, kernel) for _ in range(blocks))
        self.norm = ZeroCenteredRMSNorm(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, 256, bias=False)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(
        self, tokens: Tensor, packed: PackedSequences | None = None, caches: list[GatedDeltaNetCache] | None = None
    ) -> Tensor:
        """tokens [B, T] to logits [B, T, 256]; with caches, one a block, the call goes on where the last one stopped."""
        with torch.autocast(tokens.device.type, self.dtype, enabled=self.dtype != torch.float32):
            x = self.embed(tokens)
            for i, block in enumerate(self.blocks):
                x = block(x, cu_seqlens=packed, cache=None if caches is None else caches[i])
            return self.head(self.norm(x)).float()


def read_documents(text: Path | None) -> tuple[list[bytes], list[bytes]]:
    """Documents to train on and documents held out, about one in ten."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")) if text is None else [text]
    documents = [data[i : i + 4096] for data in (p.read_bytes() for p in files) for i in range(0, len(data), 4096)]
    documents = [document for document in documents if len(document) > 1]
    if len(documents) < 2:
        needs = "--text needs at least two documents, which is a file of more than 4097 bytes"
        raise usage.UsageError(f"{needs}, got {text or 'a standard library without sources: name a file'}")
    return [d for i, d in enumerate(documents) if i % 10], documents[::10]


def pack(
    documents: list[bytes], tokens: int, draw: random.Random, device: str
) -> tuple[Tensor, Tensor, PackedSequences]:
    """One row of pieces of random documents, at most 512 bytes each: inputs, targets [1, tokens], and the boundaries."""
    pieces: list[bytes] = []
    while tokens > 0:
        document = draw.choice(documents)
        start = draw.randrange(len(document) - 1)
        pieces.append(document[start : start + min(draw.randint(16, 512), tokens) + 1])
        tokens -= len(pieces[-1]) - 1  # n + 1 bytes make n predictions
    inputs = torch.tensor([byte for piece in pieces for byte in piece[:-1]], device=device)
    targets = torch.tensor([byte for piece in pieces for byte in piece[1:]], device=device)
    return inputs[None], targets[None], PackedSequences.from_lengths([len(piece) - 1 for piece in pieces], device)


@torch.no_grad()
def held_out_loss(model: ByteLM, documents: list[bytes], tokens: int, device: str) -> float:
    """Mean nats a byte over the same eight packed rows every time."""
    draw = random.Random(1)
    rows = [pack(documents, tokens, draw, device) for _ in range(8)]
    return torch.stack([F.cross_entropy(model(x, packed)[0], y[0]) for x, y, packed in rows]).mean().item()


@torch.no_grad()
def sample(model: ByteLM, prompt: bytes, length: int) -> tuple[bytes, float]:
    """Decode byte by byte from the caches; also how far its logits lie from one full forward over the same bytes."""
    device = model.head.weight.device
    caches = [GatedDeltaNetCache() for _ in model.blocks]
    tokens = torch.tensor([list(prompt)], device=device)
    logits = [model(tokens, caches=caches)[:, -1:]]
    for _ in range(length):
        probabilities = (logits[-1][:, -1] / 0.7).softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(probabilities, 1)], 1)
        logits.append(model(tokens[:, -1:], caches=caches))
    full = model(tokens)[:, len(prompt) - 1 :]
    return bytes(tokens[0].tolist()), ((torch.cat(logits, 1) - full).norm() / full.norm()).item()


def command_line() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    size = usage.whole(1)
    parser.add_argument("--text", type=usage.file, help="a file to learn (default: Python's standard library)")
    parser.add_argument("--steps", type=size, default=250, help="training steps (default: 250)")
    parser.add_argument("--tokens", type=size, default=2048, help="tokens of a step (default: 2048)")
    parser.add_argument("--hidden", type=size, default=128, help="hidden size (default: 128)")
    parser.add_argument("--heads", type=usage.heads, default="2/4", help="key heads / value heads (default: 2/4)")
    parser.add_argument("--head-dim", type=size, default=32, help="K and V; FlashQLA needs 128 (default: 32)")
    parser.add_argument("--device", type=usage.device, default="cpu", help="default: cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"], help="of autocast")
    add_kernel_arguments(parser)
    return parser


def main(args: argparse.Namespace) -> None:
    """Train, report, decode."""
    try:
        from tqdm import tqdm  # after the words are read: --help needs nothing
    except ImportError as error:
        raise usage.UsageError("needs tqdm: pip install tqdm") from error
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # AutoKernel says once what it chose, and why
    kernel = kernel_from_args(args, args.device)
    torch.manual_seed(0)
    torch.set_num_threads(1)  # a model this small gains little from more, and loses all where others use the cores too
    train, held_out = read_documents(args.text)
    H, HV = args.heads
    config = GatedDeltaNetConfig(hidden_size=args.hidden, linear_num_key_heads=H, linear_num_value_heads=HV,
                                 linear_key_head_dim=args.head_dim, linear_value_head_dim=args.head_dim)  # fmt: skip
    model = ByteLM(config, 4, kernel, getattr(torch, args.dtype)).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=args.steps + 1, pct_start=0.1)
    before = held_out_loss(model, held_out, args.tokens, args.device)
    draw, start = random.Random(0), time.perf_counter()
    progress = tqdm(range(args.steps), desc="training", unit="step")
    for step in progress:
        inputs, targets, packed = pack(train, args.tokens, draw, args.device)
        loss = F.cross_entropy(model(inputs, packed)[0], targets[0])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 10 == 0:
            progress.set_postfix(nats=f"{loss.item():.2f}")
    seconds = time.perf_counter() - start
    after = held_out_loss(model, held_out, args.tokens, args.device)
    text, difference = sample(model.eval(), b"def ", 200)
    print(f"held-out nats a byte: {before:.2f} before, {after:.2f} after {args.steps} steps")
    print(f"kernel: {kernel!r}, {args.steps * args.tokens / seconds:,.0f} tokens/s in training")
    print(f"decoded step by step from the cache:\n{'-' * 60}\n{text.decode(errors='replace')}\n{'-' * 60}")
    print(f"decoding against one full forward: relative difference {difference:.1e}")
    if not difference < (1e-4 if args.dtype == "float32" else 5e-2):
        raise SystemExit("decoding from the cache differs from the full forward")


if __name__ == "__main__":
    usage.run(main, command_line())
