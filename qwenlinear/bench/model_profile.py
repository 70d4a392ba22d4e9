"""Where a whole model's training step goes: the model without its Gated DeltaNet layers, and a step under torch's profiler."""

from __future__ import annotations

import copy
import re
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from qwenlinear.bench.tables import reason
from qwenlinear.bench.timing import Timing

WITHOUT = "Transformers without its Gated DeltaNet layers"
LONGEST = 12
HEADS = ("ms a step", "of it the Gated DeltaNet layers")
ABOUT_LAYERS = (
    f'"{WITHOUT}" hands hidden states through where these layers stand and takes no part in the comparison of losses. '
    "It shows the least time that a faster layer could leave; what a step lasts longer is the time of its layers, "
    "in brackets the first side's time of them divided by it."
)
OTHER = "other"
# The first that matches names the group: FlashAttention's names hold "cutlass", and PyTorch's softmax is an at:: kernel too.
# After the names of CUDA and Triton kernels stand those of PyTorch's operators, which is what a CPU's profile lists.
_GROUPS: dict[str, str] = {
    "Gated DeltaNet kernels": r"tilelang|gated_?delta|_gdr_|^chunk_|wy_repr|recompute_w_u|solve_tril|^merge_\d+x\d+_to"
    r"|^fused_recurrent|^step_kernel|^gdn_gate_chunk_cumsum|qwenlinear::\w*(delta|step)",
    "convolution, gates and norms of Gated DeltaNet": r"conv1d|conv_depthwise|shifted_?taps|implicit_gemm|implicit_convolve"
    r"|prologue|gated_rms_?norm|^l2norm|^layer_norm_gated|^gdn_gate|aten::\w*convolution|thnn_conv|ConvolutionBackward",
    "attention": r"flash_|flash::|FlashAttn|fmha|sdpa|efficient_attention|scaled_?dot_?product",
    "softmax and loss": r"softmax|nll_loss|cross_?entropy",
    "optimizer": r"multi_tensor_apply|fused_?adam|aten::_foreach|aten::(lerp|addcmul|addcdiv)_$",
    "matrix products": r"gem[mv]|cutlass|nvjet|cublas|xmma|splitkreduce|^ampere_|^skinny_kernel|qwenlinear::skinny"
    r"|aten::(mm|addmm|bmm|baddbmm|matmul|linear|einsum)$|mkldnn_linear",
    "elementwise, copies and reductions": r"\bat::|\baten::|elementwise|reduce_kernel|CatArray|memcpy|memset"
    r"|^triton_(poi|red|per)_",
}
_PATTERNS = {name: re.compile(pattern, re.IGNORECASE) for name, pattern in _GROUPS.items()}


def group_of(kernel_name: str) -> str:
    """The group of work that a kernel belongs to.

    Args:
        kernel_name: of a kernel as the profiler writes it, or of a PyTorch operator.

    Returns:
        One of the names of groups, "other" where none fits.

    Example:
        >>> group_of("nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_NNT")
        'matrix products'
        >>> group_of("aten::copy_")
        'elementwise, copies and reductions'
    """
    return next((name for name, pattern in _PATTERNS.items() if pattern.search(kernel_name)), OTHER)


class PassThrough(nn.Module):
    """Stands where a Gated DeltaNet layer stood and does nothing: hidden states come out as they went in."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """The hidden states; what else a decoder block hands to a mixer belongs to work that is not done."""
        return hidden_states


def without_layers(model: nn.Module) -> nn.Module:
    """A model with the same parameters whose Gated DeltaNet layers do nothing.

    Args:
        model: whose blocks hold their Gated DeltaNet layer as ``linear_attn``; stays as it is.

    Returns:
        The other model.
    """
    twin = copy.deepcopy(model, {id(p): p for p in model.parameters()})
    blocks = [block for block in twin.modules() if isinstance(getattr(block, "linear_attn", None), nn.Module)]
    assert blocks, "no block has a Gated DeltaNet layer"
    for block in blocks:
        block.linear_attn = PassThrough()
    return twin


def give_every_gradient(optimizer: torch.optim.Optimizer) -> None:
    """Make the optimizer's work the same whichever layers ran: a parameter without gradient gets one of zeros before a step.

    Args:
        optimizer: gets a hook. The zeros are kept, so that filling them is in no step's time but the first one's.
    """
    zeros: dict[Tensor, Tensor] = {}

    def fill(given: torch.optim.Optimizer, *_: Any) -> None:
        for group in given.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    if p not in zeros:
                        zeros[p] = torch.zeros_like(p)
                    p.grad = zeros[p]

    optimizer.register_step_pre_hook(fill)


def layer_times(timings: Mapping[str, Timing]) -> dict[str, dict[str, float]]:
    """Milliseconds of each side's step, and of its Gated DeltaNet layers: what a step lasts longer than one without them.

    Args:
        timings: side -> its training steps; those with an error are left out. That of `WITHOUT` has no such layers.

    Returns:
        Side -> ``step_ms``; where `WITHOUT` ran, of the others also ``layers_ms``, the median over rounds of the differences,
        and, where both times are above zero, ``layers_speedup``: the first side's ``layers_ms`` over its own.

    Example:
        >>> sides = {"a": Timing([0.5, 0.7]), "b": Timing([0.3, 0.5]), WITHOUT: Timing([0.1, 0.3])}
        >>> layer_times(sides)["b"]["layers_speedup"]
        2.0
    """
    ran = {name: timing for name, timing in timings.items() if timing.seconds and timing.error is None}
    times = {name: {"step_ms": timing.median * 1e3} for name, timing in ran.items()}
    if WITHOUT not in ran:
        return times
    layers = {name: timing.minus(ran[WITHOUT]).median * 1e3 for name, timing in ran.items() if name != WITHOUT}
    first = next(iter(layers.values()), 0.0)
    for name, ms in layers.items():
        times[name]["layers_ms"] = ms
        if first > 0 and ms > 0:
            times[name]["layers_speedup"] = first / ms
    return times


def layer_cells(row: Mapping[str, Any]) -> list[str]:
    """The cells below `HEADS` of one row.

    Args:
        row: of the results, with what `layer_times` gave where it was measured.

    Returns:
        Two cells, empty where there is nothing to say.
    """
    step = f"{row['step_ms']:,.2f}" if "step_ms" in row else ""
    layers = f"{row['layers_ms']:,.2f}" if "layers_ms" in row else ""
    return [step, layers + (f" ({row['layers_speedup']:.2f})" if "layers_speedup" in row else "")]


def profile_steps(
    calls: Mapping[str, Callable[[], object]], device: torch.device, forget: Callable[[], object]
) -> dict[str, Any]:
    """A profile of each side's step; what raises is printed and does not stop the others.

    Args:
        calls: side -> its step.
        device: where they run.
        forget: called after each side, to let go of what it allocated.

    Returns:
        Side -> what `profile_step` gives, or ``error``: the traceback.
    """
    found: dict[str, Any] = {}
    for name, call in calls.items():
        print(f"# profile {name}", file=sys.stderr)
        try:
            found[name] = profile_step(call, device)
        except Exception:
            found[name] = {"error": traceback.format_exc(limit=-3)}
            print(found[name]["error"], file=sys.stderr)
        forget()
    return found


def profile_step(step: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """One call under torch's profiler, after a warm-up call that is not.

    Args:
        step: what to call.
        device: where it runs. On a GPU the times are those of its kernels, on a CPU those of PyTorch's operators.

    Returns:
        ``of``, kernels or operators; ``groups``, name -> milliseconds; ``sum_ms`` of them; ``wall_ms``, how long the host waited
        for the call; ``longest``, name, group, calls and ms of those that took longest.

    Raises:
        RuntimeError: the profiler saw nothing run.
    """
    on_gpu = device.type == "cuda"
    step()
    _wait(device)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as watch:
        begin = time.perf_counter()
        step()
        _wait(device)
        wall = time.perf_counter() - begin
    kernels = []
    for event in watch.key_averages():
        if (event.device_type.name == "CPU") == on_gpu or event.is_user_annotation:
            continue  # an annotation, such as the optimizer's, spans kernels that are listed themselves
        microseconds = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        kernels.append((event.key, event.count, microseconds / 1e3))
    if not kernels:
        raise RuntimeError(
            "the profiler saw no kernel: CUPTI must be installed and permitted, and no other profiler running"
        )
    return {"of": "kernels" if on_gpu else "operators", **summary(kernels, wall * 1e3)}


def summary(kernels: list[tuple[str, int, float]], wall_ms: float) -> dict[str, Any]:
    """What is written of a profile.

    Args:
        kernels: name, calls and milliseconds of each.
        wall_ms: of the step.

    Returns:
        As of `profile_step`, but for ``of``.
    """
    groups = dict.fromkeys([*_PATTERNS, OTHER], 0.0)
    for name, _, ms in kernels:
        groups[group_of(name)] += ms
    longest = sorted(kernels, key=lambda kernel: -kernel[2])[:LONGEST]
    return {
        "groups": groups,
        "sum_ms": sum(groups.values()),
        "wall_ms": wall_ms,
        "longest": [
            {"name": _short(name), "group": group_of(name), "calls": calls, "ms": ms} for name, calls, ms in longest
        ],
    }


def markdown(profiles: dict[str, Any]) -> list[str]:
    """The profiles as tables: a column a side, then each side's longest kernels.

    Args:
        profiles: what `profile_steps` gave.

    Returns:
        Lines of Markdown, none where there is no profile.
    """
    lines = [f"\nNo profile of {side}: {_cell(reason(p['error']))}" for side, p in profiles.items() if "error" in p]
    ran = {side: found for side, found in profiles.items() if "error" not in found}
    if not ran:
        return lines
    whose = _WHOSE[next(iter(ran.values()))["of"]]
    lines += ["", f"One training step under the profiler, milliseconds of {whose}. The wall time is the host's.", ""]
    rows = [(name, [found["groups"][name] for found in ran.values()]) for name in next(iter(ran.values()))["groups"]]
    rows += [(label, [found[key] for found in ran.values()]) for label, key in _TOTALS.items()]
    lines += [f"| ms | {' | '.join(ran)} |", "| --- |" + " --- |" * len(ran)]
    lines += [f"| {name} | {' | '.join(f'{ms:,.2f}' for ms in values)} |" for name, values in rows]
    for side, found in ran.items():
        if not found["longest"]:
            continue
        lines += ["", f"Longest of {side}:", "", "| kernel | group | calls | ms |", "| --- | --- | --- | --- |"]
        for kernel in found["longest"]:
            cells = (f"`{_cell(kernel['name'])}`", kernel["group"], str(kernel["calls"]), f"{kernel['ms']:,.2f}")
            lines.append(f"| {' | '.join(cells)} |")
    return lines


_WHOSE = {
    "kernels": "the GPU's kernels; PyTorch's own that a layer calls stand under what they are, not under Gated DeltaNet",
    "operators": "PyTorch's operators, each without the operators that it calls",
}
_TOTALS = {"sum": "sum_ms", "wall time of the step": "wall_ms"}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _short(name: str) -> str:
    name = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    return name if len(name) <= 80 else name[:77] + "..."


def _cell(text: str) -> str:
    return text.replace("|", "/")
