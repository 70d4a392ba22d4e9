"""``qwenlinear run``: generate from a Transformers folder with injected kernels, and say what ran and how fast.

Nothing is fetched: the model is a local folder, or a tiny random one whose output is noise.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qwenlinear import terminal, usage
from qwenlinear.errors import UnsupportedCall
from qwenlinear.hf.inject import inject
from qwenlinear.kernels import AutoKernel, GatedDeltaKernel
from qwenlinear.kernels.auto import add_kernel_arguments, kernel_from_args

_TINY = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments.

    Args:
        parser: the command's own parser.
    """
    parser.add_argument("--model", required=True, metavar="FOLDER|tiny", help="a local folder, or a tiny random model")
    add_kernel_arguments(parser)
    parser.add_argument("--prompt", default="The gated delta rule", help="what to go on from (default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=32, metavar="N", help="tokens (default: %(default)s)")
    parser.add_argument("--device", type=usage.device, help="default: the accelerator PyTorch finds, else the CPU")
    parser.add_argument("--dtype", default="auto", help="auto (what is stored), bfloat16, float32, ... (default: auto)")
    parser.add_argument("--seed", type=int, default=0, help="of the tiny model's weights (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Load, inject, generate greedily, report.

    Args:
        args: parsed by a parser that :func:`add_arguments` has seen.

    Returns:
        0, or 2 where the arguments or this machine do not do; the reason is printed.
    """
    try:
        device = torch.device(args.device) if args.device is not None else _default_device()
        if args.max_new_tokens < 1:
            raise ValueError(f"--max-new-tokens needs a number >= 1, got {args.max_new_tokens}")
        kernel = kernel_from_args(args, device)
        model, ids, decode = _load(args, device)
        report = inject(model, kernel)
    except (ValueError, OSError, UnsupportedCall, ImportError) as error:
        print(f"qwenlinear run: {error}", file=sys.stderr)
        return 2
    if args.model == "tiny":
        print("tiny: a model of four layers with random weights, reading bytes; what it writes is noise")
    print(terminal.fold(str(report)))
    layer = next(module for module in model.modules() if hasattr(module, "_qwenlinear"))
    print(f"on {device}, weights in {str(next(layer.parameters()).dtype).removeprefix('torch.')}\n")
    greedy = {"do_sample": False, "max_new_tokens": args.max_new_tokens, "min_new_tokens": args.max_new_tokens}
    model.generate(ids, **{**greedy, "max_new_tokens": 2, "min_new_tokens": 2})  # type: ignore[operator]
    stream = _Stream(decode)
    start = time.perf_counter()
    model.generate(ids, streamer=stream, **greedy)  # type: ignore[operator]
    print("\n")
    for form, name in _what_ran(kernel).items():
        print(f"{form}: {name}")
    prefill, new = stream.times[0] - start, len(stream.times)
    print(
        f"prefill: {ids.shape[1]} tokens, {ids.shape[1] / prefill:.1f} tokens/s (after a first call that is not timed)"
    )
    if new > 1:
        print(f"decode: {new - 1} tokens, {(new - 1) / (stream.times[-1] - stream.times[0]):.1f} tokens/s")
    return 0


def _what_ran(kernel: GatedDeltaKernel) -> dict[str, str]:
    """Form to kernel, of an AutoKernel what it chose in the calls that it has seen."""
    if isinstance(kernel, AutoKernel):
        names = {id(candidate): repr(candidate) for candidate in kernel.candidates}
        return {f"kernel of the {form} form": names[chosen] for form, chosen in sorted(kernel._said)}
    return {"kernel": repr(kernel)}


class _Stream:
    """Prints tokens as they come and notes when; a token arrives on the host, so the clock waits for it."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self.decode = decode
        self.ids: list[int] = []
        self.times: list[float] = []
        self.prompt_seen = False
        self.printed = 0

    def put(self, value: Tensor) -> None:
        """Take the prompt, then one token at a time."""
        if not self.prompt_seen:
            self.prompt_seen = True
            return
        self.ids += value.flatten().tolist()
        self.times.append(time.perf_counter())
        text = self.decode(self.ids)
        if not text.endswith("\ufffd"):  # half of a character
            print(text[self.printed :], end="", flush=True)
            self.printed = len(text)

    def end(self) -> None:
        """Print what was held back."""
        print(self.decode(self.ids)[self.printed :], end="", flush=True)


def _load(args: argparse.Namespace, device: torch.device) -> tuple[nn.Module, Tensor, Callable[[list[int]], str]]:
    """The model, the prompt's ids ``[1, T]``, and what makes text of ids."""
    try:
        import transformers
    except ImportError as error:
        raise ImportError(f"transformers is needed; pip install 'transformers>=5.6' ({error})") from error
    dtype = args.dtype if args.dtype == "auto" else getattr(torch, args.dtype, None)
    if dtype != "auto" and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"--dtype needs auto or the name of a floating torch dtype, got {args.dtype!r}")
    decode: Callable[[list[int]], str]
    if args.model == "tiny":
        torch.manual_seed(args.seed)
        model = transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**_TINY))
        model = model.to(device, None if dtype == "auto" else dtype).eval()
        ids = list(args.prompt.encode())
        decode = _printable
    else:
        folder = Path(args.model)
        if not (folder / "config.json").is_file():
            raise ValueError(f"--model needs tiny or a local folder with config.json, got {args.model}")
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
        model = model.to(device).eval()
        ids = tokenizer(args.prompt)["input_ids"]
        decode = _decoder(tokenizer)
    if not ids:
        raise ValueError("--prompt needs at least one token, got none")
    return model, torch.tensor([ids], device=device), decode


def _printable(ids: list[int]) -> str:
    return "".join(chr(i) if chr(i).isprintable() else "." for i in ids)


def _decoder(tokenizer: Any) -> Callable[[list[int]], str]:
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True))


def _default_device() -> torch.device:
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device("cpu") if found is None else found
