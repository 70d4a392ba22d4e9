"""The checks of a layer: each runs one case and compares with a float64 twin of the layer on TorchKernel."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from qwenlinear.kernels.packing import PackedSequences
from qwenlinear.kernels.torch_kernel import TorchKernel
from qwenlinear.layers.cache import GatedDeltaNetCache
from qwenlinear.layers.gated_delta_net import GatedDeltaNet, Qwen3_5GatedDeltaNet, Qwen3NextGatedDeltaNet
from qwenlinear.testing.cases import Case
from qwenlinear.testing.checks import Errors, WrongValues
from qwenlinear.testing.running import Answers, Fault, in_words, relative_error, same_bits

# What rounding activations between the layer's parts costs besides the kernel (values, gradients).
_TOLERANCES = {
    torch.float64: (1e-10, 1e-9),
    torch.float32: (1e-5, 1e-4),
    torch.float16: (4e-3, 6e-3),
    torch.bfloat16: (2e-2, 3e-2),
}
# One number a head, summed over all tokens from terms of both signs, each with the error of 16-bit activations.
_GATE = ("gradient of A_log", "gradient of dt_bias")
Execution = Callable[[GatedDeltaNet, Tensor], Answers]


# ---- running and judging -------------------------------------------------------------------------------------------


def _twin(layer: GatedDeltaNet) -> GatedDeltaNet:
    """The same weights in float64 on TorchKernel, in a layer of this package: what a subclass changes is under test."""
    ours = next((c for c in type(layer).__mro__ if c in (Qwen3_5GatedDeltaNet, Qwen3NextGatedDeltaNet)), type(layer))
    twin = ours(layer.config, TorchKernel()).to(layer.A_log.device).double()
    twin.load_state_dict(layer.state_dict())
    return twin.train()


def _draw(layer: GatedDeltaNet, case: Case, B: int, T: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(case.seed)
    x = torch.randn(B, T, layer.config.hidden_size, generator=generator, dtype=torch.float64)
    return x.to(layer.out_proj.weight.dtype).to(layer.A_log.device)


def _run(layer: GatedDeltaNet, case: Case, execution: Execution, x: Tensor) -> Answers:
    """The answers of an execution and, where the case wants them, the gradients of x and of every parameter."""
    leaf = x.detach().clone().requires_grad_(bool(case.grad))
    with torch.set_grad_enabled(bool(case.grad)):
        answers = execution(layer, leaf)
    if not torch.equal(leaf.nan_to_num(), x.nan_to_num()):
        raise Fault("hidden_states was written to")
    if not case.grad:
        return answers
    wanted = {"hidden_states": leaf, **dict(layer.named_parameters())}
    generator = torch.Generator("cpu").manual_seed(case.seed + 1)
    cotangents = [torch.randn(a.shape, generator=generator).to(x.dtype).to(a) for a in answers.values()]
    found = torch.autograd.grad(list(answers.values()), list(wanted.values()), cotangents, allow_unused=True)
    pairs = zip(wanted.items(), found, strict=True)
    gradients = {f"gradient of {name}": torch.zeros_like(w) if d is None else d for (name, w), d in pairs}
    return {name: answer.detach() for name, answer in answers.items()} | gradients


def _judged(layer: GatedDeltaNet, case: Case, execution: Execution, plain: Execution, x: Tensor) -> Errors:
    """Compare an execution with the plain one of the float64 twin; padding in x is not-a-number and no part of the twin's."""
    answers = _run(layer, case, execution, x)
    truth = _run(_twin(layer), case, plain, x.double())
    dtype = layer.out_proj.weight.dtype
    values, gradients = _TOLERANCES[dtype]
    promised = layer.kernel.tolerances.get(dtype)
    if promised is not None:
        values, gradients = max(values, promised.output, promised.state), max(gradients, promised.gradient)
    errors = {}
    for name, right in truth.items():
        allowed = gradients if name.startswith("gradient") else values
        if dtype.itemsize == 2 and name in _GATE:
            allowed *= 3
        errors[name] = (relative_error(answers[name], right, 1e-30), allowed)
    if any(not error <= allowed for error, allowed in errors.values()):
        raise WrongValues(errors, in_words(answers, truth))
    return errors


def _one_pass(layer: GatedDeltaNet, x: Tensor) -> Answers:
    return {"output": layer(x)}


def _remembered(output: Tensor, cache: GatedDeltaNetCache) -> Answers:
    assert cache.conv_state is not None
    assert cache.recurrent_state is not None
    return {"output": output, "conv state": cache.conv_state, "recurrent state": cache.recurrent_state}


def _cached(layer: GatedDeltaNet, x: Tensor) -> Answers:
    cache = GatedDeltaNetCache()
    return _remembered(layer(x, cache=cache), cache)


def _alone(lengths: tuple[int, ...]) -> Execution:
    """Each document by itself, out of the packed tokens."""

    def execution(layer: GatedDeltaNet, x: Tensor) -> Answers:
        return {"output": torch.cat([layer(part) for part in x.split(lengths, 1)], 1)}

    return execution


# ---- the checks ----------------------------------------------------------------------------------------------------


def _values(layer: GatedDeltaNet, case: Case) -> Errors:
    return _judged(layer.train(), case, _one_pass, _one_pass, _draw(layer, case, case.B, case.T))


def _evaluation(layer: GatedDeltaNet, case: Case) -> Errors:
    return _judged(layer.eval(), case, _one_pass, _one_pass, _draw(layer, case, case.B, case.T))


def _packed(layer: GatedDeltaNet, case: Case) -> Errors:
    lengths = _lengths(case)
    packed = PackedSequences.from_lengths(lengths)
    x = _draw(layer, case, 1, packed.total_tokens)
    return _judged(layer, case, lambda layer, x: {"output": layer(x, cu_seqlens=packed)}, _alone(lengths), x)


def _apart(layer: GatedDeltaNet, case: Case) -> Errors:
    """Not-a-number in the middle document reaches no other."""
    lengths = _lengths(case)
    start, end = lengths[0], lengths[0] + lengths[1]
    packed = PackedSequences.from_lengths(lengths)

    def spoiled(layer: GatedDeltaNet, x: Tensor) -> Answers:
        x = x.clone()
        x[:, start:end] = torch.nan
        y = layer(x, cu_seqlens=packed)
        return {"output": torch.cat([y[:, :start], y[:, end:]], 1)}

    def plain(layer: GatedDeltaNet, x: Tensor) -> Answers:
        return {"output": torch.cat([layer(x[:, :start]), layer(x[:, end:])], 1)}

    return _judged(layer, case, spoiled, plain, _draw(layer, case, 1, packed.total_tokens))


def _split(layer: GatedDeltaNet, case: Case) -> Errors:
    def in_pieces(layer: GatedDeltaNet, x: Tensor) -> Answers:
        cache = GatedDeltaNetCache()
        return _remembered(torch.cat([layer(piece, cache=cache) for piece in x.split(case.pieces, 1)], 1), cache)

    return _judged(layer, case, in_pieces, _cached, _draw(layer, case, case.B, case.T))


def _continued(layer: GatedDeltaNet, case: Case) -> Errors:
    """N packed documents, then a batch of N that goes on with them."""
    lengths, more = _lengths(case), case.T
    N, first = len(lengths), sum(lengths)

    def in_two(layer: GatedDeltaNet, x: Tensor) -> Answers:
        cache = GatedDeltaNetCache()
        layer(x[:, :first], cu_seqlens=PackedSequences.from_lengths(lengths), cache=cache)
        return _remembered(layer(x[:, first:].unflatten(1, (N, more)).flatten(0, 1), cache=cache), cache)

    def whole(layer: GatedDeltaNet, x: Tensor) -> Answers:
        parts = zip(x[:, :first].split(lengths, 1), x[:, first:].split(more, 1), strict=True)
        found = [_cached(layer, torch.cat(part, 1)) for part in parts]
        answers = {name: torch.cat([one[name] for one in found]) for name in ("conv state", "recurrent state")}
        return {"output": torch.cat([one["output"][:, -more:] for one in found])} | answers

    return _judged(layer, case, in_two, whole, _draw(layer, case, 1, first + N * more))


def _mask(case: Case, device: torch.device) -> Tensor:
    place, lengths = torch.arange(case.T), torch.tensor(_lengths(case))[:, None]
    real = place < lengths if case.expects == "right" else place >= case.T - lengths
    return real.to(device)


def _with_padding(x: Tensor, case: Case) -> Tensor:
    return x.masked_fill(~_mask(case, x.device)[..., None], torch.nan)


def _real(x: Tensor, row: int, case: Case) -> Tensor:
    length = _lengths(case)[row]
    return x[row : row + 1, :length] if case.expects == "right" else x[row : row + 1, case.T - length :]


def _padded(layer: GatedDeltaNet, case: Case) -> Errors:
    """Padding, full of not-a-number, changes no real token and gets a zero output and a zero gradient."""
    rows = range(len(_lengths(case)))

    def masked(layer: GatedDeltaNet, x: Tensor) -> Answers:
        return {"output": layer(_with_padding(x, case), attention_mask=_mask(case, x.device))}

    def plain(layer: GatedDeltaNet, x: Tensor) -> Answers:
        y = [layer(_real(x, row, case)) for row in rows]
        sides = [(0, 0, 0, case.T - len(a[0])) if case.expects == "right" else (0, 0, case.T - len(a[0]), 0) for a in y]
        return {"output": torch.cat([torch.nn.functional.pad(a, side) for a, side in zip(y, sides, strict=True)])}

    return _judged(layer, case, masked, plain, _draw(layer, case, len(rows), case.T))


def _prefilled(layer: GatedDeltaNet, case: Case) -> Errors:
    """A padded first call leaves the states of the unpadded ones, and decoding goes on from them."""
    rows = range(len(_lengths(case)))

    def masked(layer: GatedDeltaNet, x: Tensor) -> Answers:
        cache = GatedDeltaNetCache()
        prompt = x[:, : case.T]
        layer(_with_padding(prompt, case), attention_mask=_mask(case, x.device), cache=cache)
        return _remembered(layer(x[:, case.T :], cache=cache), cache)

    def plain(layer: GatedDeltaNet, x: Tensor) -> Answers:
        rest = x[:, case.T :]
        found = [_cached(layer, torch.cat([_real(x[:, : case.T], r, case), rest[r : r + 1]], 1)) for r in rows]
        answers = {name: torch.cat([one[name] for one in found]) for name in ("conv state", "recurrent state")}
        return {"output": torch.cat([one["output"][:, -1:] for one in found])} | answers

    return _judged(layer, case, masked, plain, _draw(layer, case, len(rows), case.T + 1))


def _unmasked(layer: GatedDeltaNet, case: Case) -> Errors:
    def masked(layer: GatedDeltaNet, x: Tensor) -> Answers:
        return {"output": layer(x, attention_mask=torch.ones(x.shape[:2], dtype=torch.int64, device=x.device))}

    return _judged(layer, case, masked, _one_pass, _draw(layer, case, case.B, case.T))


def _contradiction(layer: GatedDeltaNet, case: Case) -> Errors:
    """A mask with boundaries, or another number of sequences, is a ValueError and leaves the cache as it was."""
    x, cache = _draw(layer, case, 1, case.T), GatedDeltaNetCache()
    with torch.no_grad():
        before = {name: tensor.clone() for name, tensor in _remembered(layer(x, cache=cache), cache).items()}
    two = torch.tensor([0, 2, case.T], device=x.device)
    mask = torch.ones(1, case.T, device=x.device)
    for options in ({"cu_seqlens": two[::2].contiguous(), "attention_mask": mask}, {"cu_seqlens": two}):
        try:
            layer(x, cache=cache, **options)
        except ValueError:
            after = _remembered(before["output"], cache)
            if changed := same_bits(before, after):
                raise Fault(f"a refused call changed the cache's {changed[0]}") from None
            continue
        raise Fault(f"needs a ValueError for {' with '.join(options)} after another number of sequences, got an answer")
    return {}


def _casts(layer: GatedDeltaNet, case: Case) -> Errors:
    """A_log and dt_bias never go below float32, and the layer still runs."""
    dtype = cast(torch.dtype, getattr(torch, case.expects))
    moved = copy.deepcopy(layer).to(dtype)
    for name in ("A_log", "dt_bias"):
        before, after = getattr(layer, name), getattr(moved, name)
        if after.dtype not in (torch.float32, torch.float64) or not torch.equal(after, before.to(after.dtype)):
            raise Fault(f"{name} needs its {before.dtype} values after a cast to {dtype}, got {after.dtype}")
    if dtype not in layer.kernel.capabilities.dtypes:
        return {}
    return _values(moved, case)


def _saved(layer: GatedDeltaNet, case: Case) -> Errors:
    """Weights go through a file into a fresh layer bit by bit, and the layer itself through pickle."""
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    fresh = _like(layer)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    again = pickle.loads(pickle.dumps(layer))
    for other in (fresh, again):
        if changed := same_bits(dict(layer.state_dict()), dict(other.state_dict())):
            raise Fault(f"{changed[0]} is not what was saved")
    return _values(fresh, case) if fresh.training else _values(again, case)


def _meta(layer: GatedDeltaNet, case: Case) -> Errors:
    """Built without memory, filled by a checkpoint in the place of its parameters; 16 bits of it can't narrow the gate."""
    with torch.device("meta"):
        empty: GatedDeltaNet = type(layer)(layer.config, layer.kernel)
    if real := [name for name, tensor in empty.state_dict().items() if tensor.device.type != "meta"]:
        raise Fault(f"{real[0]} is not on meta")
    empty.load_state_dict({name: tensor.detach().clone() for name, tensor in layer.state_dict().items()}, assign=True)
    narrow = copy.deepcopy(layer)
    narrow.load_state_dict({name: tensor.bfloat16() for name, tensor in layer.state_dict().items()}, assign=True)
    if low := [name for name in ("A_log", "dt_bias") if getattr(narrow, name).dtype == torch.bfloat16]:
        raise Fault(f"a checkpoint in 16 bits narrowed {low[0]}")
    return _values(empty, case)


def _like(layer: GatedDeltaNet) -> GatedDeltaNet:
    fresh: Any = type(layer)(layer.config, layer.kernel)
    return cast(GatedDeltaNet, fresh.to(layer.A_log.device).to(layer.out_proj.weight.dtype))


def _lengths(case: Case) -> tuple[int, ...]:
    assert case.lengths is not None, "a case of documents or padded rows has their lengths"
    return case.lengths


LAYER_CHECKS: dict[str, Callable[[GatedDeltaNet, Case], Errors]] = {
    "values": _values,
    "evaluation": _evaluation,
    "packed": _packed,
    "apart": _apart,
    "split": _split,
    "continued": _continued,
    "padded": _padded,
    "prefilled": _prefilled,
    "unmasked": _unmasked,
    "contradiction": _contradiction,
    "casts": _casts,
    "saved": _saved,
    "meta": _meta,
}
