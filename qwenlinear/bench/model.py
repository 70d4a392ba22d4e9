"""``qwenlinear bench model``: a whole Transformers model, as installed and injected; training, prefill, decode, and a profile.

One process, the same weights: the sides are models that share their parameters and differ in what computes the Gated DeltaNet
layers, and they take turns within rounds. Before anything is timed every side computes the loss of the same batch and the norm
of its gradient. The optimizer does its whole work at a learning rate of zero, so the weights stay the same ones.
Training has one more side, whose Gated DeltaNet layers do nothing: what a faster layer could leave at the least.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib.util
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qwenlinear import terminal, usage
from qwenlinear.bench import machine, model_profile, session
from qwenlinear.bench.fla_switch import SWITCH, fla_switch
from qwenlinear.bench.layer_options import fill_defaults
from qwenlinear.bench.model_profile import WITHOUT
from qwenlinear.bench.tables import reason
from qwenlinear.bench.timing import Timing, interleave
from qwenlinear.hf import inject
from qwenlinear.kernels.auto import kernel_from_name

# Qwen3.5-2B as its model card gives it (https://huggingface.co/Qwen/Qwen3.5-2B, "Model Overview"): hidden 2048, 24 layers of
# 3 x Gated DeltaNet (16 heads for V, 16 for QK, of 128) to 1 x attention (8 heads for Q, 2 for KV, of 256), feed forward 6144.
# Only the vocabulary differs, 32768 instead of 248320: its product would hide what the layers do. Hidden 2048 with 16/32 heads,
# which `bench layer` measures by default, is Qwen3-Next's layer (the default of Transformers' Qwen3NextConfig).
SHAPES: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "vocab_size": 32768,
}
TINY: dict[str, Any] = {
    **SHAPES,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "vocab_size": 64,
}
_PARTS = ("train", "prefill", "decode", "profile")
_CPU: dict[str, Any] = {
    "dtype": "float32",
    "layers": 4,
    "tokens": 1024,
    "prompt": 1024,
    "kernels": ["torch"],
    "parts": list(_PARTS[:3]),
}
_GPU: dict[str, Any] = {
    "dtype": "bfloat16",
    "layers": 12,
    "tokens": 32768,
    "prompt": 32768,
    "kernels": ["fla", "flashqla"],
    "parts": list(_PARTS),
}
_ATTENTION = "sdpa_by_document"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options to a parser."""
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=usage.device, default=default, help="default here: %(default)s")
    parser.add_argument(
        "--dtype", type=usage.dtype(), help="of weights and activations; default: float32 on a CPU, bfloat16 on a GPU"
    )
    parser.add_argument(
        "--layers", type=usage.whole(1), help="of which every fourth is attention; default: 4 (CPU), 12 (GPU)"
    )
    parser.add_argument(
        "--tokens", type=usage.whole(1), help="of a packed training batch; default: 1024 (CPU), 32768 (GPU)"
    )
    parser.add_argument("--documents", type=usage.whole(1), default=8, help="of equal length in it (default 8)")
    parser.add_argument("--prompt", type=usage.whole(1), help="tokens of the prefill; default: 1024 (CPU), 32768 (GPU)")
    parser.add_argument("--rows", type=usage.whole(1), default=8, help="sequences of the decode (default 8)")
    parser.add_argument("--steps", type=usage.whole(1), default=16, help="decode steps of one measurement (default 16)")
    kernels = "to inject; default: torch (CPU), fla flashqla (GPU)"
    parser.add_argument("--kernels", type=usage.kernel(), nargs="*", help=kernels)
    parts = (
        "what to measure; default: train prefill decode, on a GPU also profile (a training step by group of kernels)"
    )
    parser.add_argument("--parts", nargs="+", choices=_PARTS, help=parts)
    parser.add_argument("--rounds", type=usage.whole(1), default=7, help="rounds of turns (default 7)")
    parser.add_argument(
        "--part-seconds", type=usage.positive, default=90.0, help="time for the rounds of one part (default 90)"
    )
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the benchmark itself")
    parser.add_argument("--out", type=Path, default=Path("bench-model"), help="folder for JSON and Markdown")


def run(args: argparse.Namespace) -> int:
    """Measure, print the table and write it.

    Args:
        args: the parsed options.

    Returns:
        0 when the losses of all sides that ran agree, 1 otherwise.

    Raises:
        UsageError: documents of unequal length, or Transformers is missing.
    """
    if importlib.util.find_spec("transformers") is None:
        raise usage.UsageError("Transformers is needed: pip install 'transformers>=5.6'")
    fill_defaults(args, _CPU, _GPU)
    if args.tokens % args.documents:
        raise usage.UsageError(f"--tokens needs a multiple of --documents, got {args.tokens} and {args.documents}")
    bench = Bench(args)
    for part in args.parts:
        if part == "profile":
            bench.profile()
        else:
            bench.part(part)
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "model.json").write_text(json.dumps(bench.results, indent=1) + "\n")
    text = markdown(bench.results)
    title = f"# A whole model on {bench.results['machine']['device']}"
    (args.out / "model.md").write_text(f"{title}\n\n{text}\n")
    terminal.show_markdown(text)
    return 0 if bench.results["losses_agree"] else 1


class Bench:
    """One run.

    Args:
        args: the parsed options.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device, self.dtype = torch.device(args.device), getattr(torch, args.dtype)
        model, self.attention = _build(args, self.device, self.dtype)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
        model_profile.give_every_gradient(self.optimizer)
        self.sides = _sides(model, args.kernels)
        self.without = Side(model_profile.without_layers(model))
        self.results: dict[str, Any] = {
            "machine": machine.describe(self.device),
            "command": session.command(sys.argv[1:]),
            "shapes": TINY if args.tiny else SHAPES,
            "arguments": {name: str(value) for name, value in vars(args).items() if name not in ("run", "out")},
            "rows": [],
            "losses_agree": True,
        }

    def part(self, part: str) -> None:
        """One of train, prefill, decode, on every side."""
        make = {"train": self._train, "prefill": self._prefill, "decode": self._decode}[part]
        self.attention.length = self.args.tokens // self.args.documents if part == "train" else None
        work, tokens, facts = make()
        sides = self.sides | ({WITHOUT: self.without} if part == "train" else {})
        calls, failed = {}, {}
        for name, side in sides.items():
            try:
                with side.switched():
                    facts.setdefault(name, {}).update(work(name, side.model) or {})
                calls[name] = self._on(side, work, name)
            except Exception:
                failed[name] = traceback.format_exc(limit=-3)
                print(failed[name], file=sys.stderr)
            self._forget()
        if part == "train":
            self._compare({name: facts[name] for name in calls if name != WITHOUT})
        timings = interleave(calls, self.device, self.args.rounds, self.args.part_seconds)
        timings |= {name: Timing(error=text) for name, text in failed.items()}
        timings = {name: timings[name] for name in sides}
        base = next((timing for timing in timings.values() if timing.seconds and timing.error is None), None)
        if part == "train":
            for name, times in model_profile.layer_times(timings).items():
                facts[name].update(times)
        for name, timing in timings.items():
            row: dict[str, Any] = {"part": part, "side": name, **facts.get(name, {})}
            if timing.error is not None or base is None:
                row["error"] = timing.error
            else:
                row |= {"tokens_per_second": tokens / timing.median, "rounds": len(timing.seconds)}
                row["speedup"] = timing.ratio(base)
            self.results["rows"].append(row)
            rate = row.get("tokens_per_second")
            shown = reason(row.get("error")) if rate is None else f"{rate:,.0f} tokens/s"
            print(f"# {part} {name}: {shown}", file=sys.stderr)

    def profile(self) -> None:
        """One training step of every side under the profiler."""
        self.attention.length = self.args.tokens // self.args.documents
        work, _, _ = self._train()
        calls = {name: self._on(side, work, name) for name, side in {**self.sides, WITHOUT: self.without}.items()}
        self.results["profile"] = model_profile.profile_steps(calls, self.device, self._forget)

    def _on(self, side: Side, work: Work, name: str) -> Callable[[], object]:
        def call() -> None:
            with side.switched():
                work(name, side.model)

        return call

    def _forget(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _ids(self, rows: int, tokens: int) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        vocabulary = self.results["shapes"]["vocab_size"]
        return torch.randint(vocabulary, (rows, tokens), generator=generator).to(self.device)

    def _train(self) -> tuple[Work, int, Facts]:
        ids, length = self._ids(1, self.args.tokens), self.args.tokens // self.args.documents
        positions = torch.arange(length).repeat(self.args.documents)[None].to(self.device)
        bounds = torch.arange(0, self.args.tokens + 1, length, dtype=torch.int32, device=self.device)
        documents = torch.arange(self.args.documents, dtype=torch.int32).repeat_interleave(length)[None].to(self.device)
        seen: set[str] = set()

        def work(name: str, model: nn.Module) -> dict[str, float] | None:
            model.train()
            loss = model(
                input_ids=ids,
                labels=ids,
                position_ids=positions,
                cu_seq_lens_q=bounds,
                cu_seq_lens_k=bounds,
                max_length_q=length,
                max_length_k=length,
                seq_idx=documents,
                use_cache=False,
            ).loss
            loss.backward()
            facts = None
            if name not in seen:
                seen.add(name)
                norms = [p.grad.float().norm() for p in model.parameters() if p.grad is not None]
                facts = {"loss": float(loss.detach()), "gradient_norm": float(torch.stack(norms).norm())}
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            return facts

        return work, self.args.tokens, {}

    def _compare(self, facts: Facts) -> None:
        losses = [fact["loss"] for fact in facts.values()]
        norms = [fact["gradient_norm"] for fact in facts.values()]
        same = all(max(x) - min(x) <= share * max(map(abs, x)) for x, share in ((losses, 2e-3), (norms, 2e-2)) if x)
        self.results["losses_agree"] = same

    def _prefill(self) -> tuple[Work, int, Facts]:
        ids = self._ids(1, self.args.prompt)

        @torch.no_grad()
        def work(name: str, model: nn.Module) -> None:
            model.eval()
            model(input_ids=ids, use_cache=True, logits_to_keep=1)

        return work, self.args.prompt, {}

    def _decode(self) -> tuple[Work, int, Facts]:
        ids, caches = self._ids(self.args.rows, min(512, self.args.prompt)), {}

        @torch.no_grad()
        def work(name: str, model: nn.Module) -> None:
            model.eval()
            if name not in caches:
                output = model(input_ids=ids, use_cache=True, logits_to_keep=1)
                caches[name] = output.get("cache", output.get("past_key_values"))
            token = ids[:, -1:]
            kind = "cache" if "cache" in self.attention.names else "past_key_values"
            for _ in range(self.args.steps):
                token = model(input_ids=token, use_cache=True, **{kind: caches[name]}).logits[:, -1:].argmax(-1)

        return work, self.args.rows * self.args.steps, {}


class Side(NamedTuple):
    """A model that shares its parameters with the others, and the state of FLA's own choice while it runs."""

    model: nn.Module
    switch: str | None = None

    def switched(self) -> contextlib.AbstractContextManager[None]:
        """FLA's switch as this side wants it."""
        return fla_switch(self.switch)


Work = Callable[[str, nn.Module], "dict[str, float] | None"]
Facts = dict[str, dict[str, float]]


def _sides(model: nn.Module, kernels: list[str]) -> dict[str, Side]:
    sides = {"Transformers": Side(model), f"Transformers, {SWITCH}=0": Side(model, "0")}
    for name in kernels:
        kernel = kernel_from_name(name)
        twin = copy.deepcopy(model, {id(p): p for p in model.parameters()})
        inject(twin, kernel)
        sides[f"injected {type(kernel).__name__}"] = Side(twin)
    return sides


class _Attention:
    """The attention of all sides: causal within documents of one length, or within rows; no mask of T x T is made."""

    length: int | None = None
    names: tuple[str, ...] = ()

    def __call__(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *_: Any, **words: Any
    ) -> tuple[Tensor, None]:
        B, T, D = q.shape[0], q.shape[2], q.shape[3]
        if self.length is not None:
            q, k, v = (x.unflatten(2, (-1, self.length)).transpose(1, 2).flatten(0, 1) for x in (q, k, v))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=T > 1, scale=words.get("scaling"), enable_gqa=True)
        return o.transpose(1, 2).reshape(B, T, -1, D), None


def _build(args: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> tuple[nn.Module, _Attention]:
    import transformers

    from qwenlinear.hf.boundaries import positional_names

    attention = _Attention()
    transformers.AttentionInterface.register(_ATTENTION, attention)
    transformers.AttentionMaskInterface.register(_ATTENTION, lambda *_, **__: None)
    kinds = ["full_attention" if n % 4 == 3 else "linear_attention" for n in range(args.layers)]
    special = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    shapes = TINY if args.tiny else SHAPES
    config = transformers.Qwen3_5TextConfig(**shapes, **special, num_hidden_layers=args.layers, layer_types=kinds)
    config._attn_implementation = _ATTENTION
    torch.manual_seed(0)
    with device:
        model = transformers.Qwen3_5ForCausalLM(config).to(dtype)
    attention.names = positional_names(model)
    return model, attention


def markdown(results: dict[str, Any]) -> str:
    """The results as a page.

    Args:
        results: what a run gathered.

    Returns:
        Markdown.
    """
    lines = [machine.header(results["machine"]), "", f"`{results['command']}`", ""]
    trained = [row for row in results["rows"] if row["part"] == "train" and "tokens_per_second" in row]
    compared = sum(row["side"] != WITHOUT for row in trained)
    if compared > 1:
        agree = "agree" if results["losses_agree"] else "DO NOT AGREE"
        lines += [f"The losses and gradient norms of the {compared} sides that trained {agree}.", ""]
    else:
        lines += ["Fewer than two sides trained: no losses to compare.", ""]
    if len(trained) > compared:
        lines += [model_profile.ABOUT_LAYERS, ""]
    heads = ("part", "side", "tokens/s", "against the first", *model_profile.HEADS, "loss", "gradient norm")
    lines += [f"| {' | '.join(heads)} |", "|" + " --- |" * len(heads)]
    for row in results["rows"]:
        if "tokens_per_second" in row:
            cells = [f"{row['tokens_per_second']:,.0f}", f"{row['speedup']:.2f}"]
        else:
            cells = [reason(row["error"]).replace("|", "/"), ""]
        cells += model_profile.layer_cells(row)
        cells += [f"{row[name]:.5f}" if name in row else "" for name in ("loss", "gradient_norm")]
        lines.append(f"| {row['part']} | {row['side']} | {' | '.join(cells)} |")
    lines += model_profile.markdown(results.get("profile", {}))
    return "\n".join(lines)
