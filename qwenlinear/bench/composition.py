"""The layer as trainers compose it today, written out here so that a benchmark has it beside ours.

Four projections; one convolution over q, k and v; q and k repeated to the value heads; the decay as Transformers writes it; a
kernel that normalises q and k by itself; a gated norm; the output projection. Every part is the library's own function.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qwenlinear.kernels.auto import kernel_from_name
from qwenlinear.kernels.packing import PackedSequences
from qwenlinear.layers.gated_delta_net import Qwen3_5GatedDeltaNet

Convolve = Callable[[Tensor, Tensor, "PackedSequences | None"], Tensor]
Recur = Callable[..., Tensor]
Norm = Callable[[Tensor, Tensor, Tensor, float], Tensor]
Update = Callable[[Tensor, Tensor, Tensor], Tensor]
Step = Callable[..., "tuple[Tensor, Tensor]"]


@dataclass(frozen=True)
class Loaded:
    """The functions of a composition.

    Args:
        convolve: x ``[1, T, C]``, weight ``[C, 1, W]``, boundaries -> ``[1, T, C]`` with SiLU.
        recur: q, k, v, g, beta, boundaries -> o.
        norm: o, z, weight, eps -> y.
        update: x ``[B, 1, C]``, the last W columns ``[B, C, W]`` (updated in place), weight -> ``[B, 1, C]`` with SiLU.
        step: q, k, v, g, beta, state -> o, new state.
    """

    convolve: Convolve
    recur: Recur
    norm: Norm
    update: Update
    step: Step


@dataclass(frozen=True)
class Parts:
    """A composition by name; ``load`` imports its functions.

    Args:
        name: how tables call it.
        note: which functions it is made of.
        load: imports them.
    """

    name: str
    note: str
    load: Callable[[], Loaded]

    def loaded(self) -> Loaded:
        """The functions; raises what keeps them from being imported."""
        return self.load()


class CommonComposition(nn.Module):
    """The composition over the parameters of a layer, which computes nothing itself.

    Args:
        layer: holds the parameters.
        parts: the functions.
    """

    def __init__(self, layer: Qwen3_5GatedDeltaNet, parts: Loaded) -> None:
        super().__init__()
        self.layer = layer
        self.parts = parts

    def forward(self, x: Tensor, cu_seqlens: PackedSequences | None = None) -> Tensor:
        """Training and prefill: ``[1, T, hidden]`` to the same."""
        layer = self.layer
        mixed, z = layer.in_proj_qkv(x), layer.in_proj_z(x)
        b, a = layer.in_proj_b(x), layer.in_proj_a(x)
        q, k, v = self._heads(self.parts.convolve(mixed, layer.conv1d.weight, cu_seqlens))
        o = self.parts.recur(q, k, v, self._decay(a), b.sigmoid(), cu_seqlens)
        return self._output(o, z)

    def step(self, x: Tensor, columns: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """One token: ``[B, 1, hidden]`` to the same, and the new state; ``columns`` is updated in place."""
        layer = self.layer
        mixed, z = layer.in_proj_qkv(x), layer.in_proj_z(x)
        b, a = layer.in_proj_b(x), layer.in_proj_a(x)
        q, k, v = self._heads(self.parts.update(mixed, columns, layer.conv1d.weight))
        o, new = self.parts.step(q, k, v, self._decay(a), b.sigmoid(), state)
        return self._output(o, z), new

    def _heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        c = self.layer.config
        q, k, v = torch.split(mixed, [c.key_dim, c.key_dim, c.value_dim], -1)
        group = c.linear_num_value_heads // c.linear_num_key_heads
        q, k = (t.unflatten(-1, (c.linear_num_key_heads, c.linear_key_head_dim)) for t in (q, k))
        if group > 1:
            q, k = q.repeat_interleave(group, 2), k.repeat_interleave(group, 2)
        return q, k, v.unflatten(-1, (c.linear_num_value_heads, c.linear_value_head_dim))

    def _decay(self, a: Tensor) -> Tensor:
        wide = torch.promote_types(a.dtype, torch.float32)
        return -self.layer.A_log.to(wide).exp() * F.softplus(a.to(wide) + self.layer.dt_bias)

    def _output(self, o: Tensor, z: Tensor) -> Tensor:
        layer = self.layer
        z = z.unflatten(-1, (layer.config.linear_num_value_heads, layer.config.linear_value_head_dim))
        y: Tensor = layer.out_proj(self.parts.norm(o, z, layer.norm.weight, layer.config.rms_norm_eps).flatten(2))
        return y


def shared_boundaries(packed: PackedSequences, device: torch.device) -> Tensor:
    """``[N+1]`` int32, one tensor for all calls of a batch: FLA caches what it derives by the tensor's identity."""
    return packed.derive(("bench.boundaries", device), lambda: packed.cu_seqlens(device))


# ---- the functions -------------------------------------------------------------------------------------------------


def parts_of(kernel: str) -> Parts:
    """The composition around a kernel.

    Args:
        kernel: ``"fla"``, ``"flashqla"``, or any name of a kernel: then PyTorch's parts stand around it.

    Returns:
        Its parts, not imported yet.
    """
    around = "causal_conv1d and rms_norm_gated"
    if kernel == "fla":
        return Parts("FLA", f"FLA's {around}, chunk_gated_delta_rule (its own, not handed to FlashQLA)", _fla)
    if kernel in ("flashqla", "flash_qla"):
        return Parts("FlashQLA", f"FLA's {around}, flash_qla.chunk_gated_delta_rule with its own q/k norm", _flashqla)
    name = type(kernel_from_name(kernel)).__name__
    return Parts(name, f"convolution and norm in PyTorch around {name}", lambda: _pytorch(kernel))


def _pytorch(name: str) -> Loaded:
    kernel = kernel_from_name(name)

    def recur(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, packed: PackedSequences | None) -> Tensor:
        return kernel(q, k, v, g, beta, use_qk_l2norm_in_kernel=True, cu_seqlens=packed)[0]

    def step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        words = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
        o, new = (kernel.step if kernel.capabilities.step else kernel)(q, k, v, g, beta, **words)  # type: ignore[arg-type]
        assert new is not None
        return o, new

    def update(x: Tensor, columns: Tensor, weight: Tensor) -> Tensor:
        columns.copy_(torch.cat([columns[..., 1:], x.transpose(1, 2)], -1))
        return F.silu((columns * weight.squeeze(1)).sum(-1))[:, None].to(x.dtype)

    return Loaded(_convolve, recur, _norm, update, step)


def _convolve(x: Tensor, weight: Tensor, packed: PackedSequences | None) -> Tensor:
    """A document at a time, as Transformers' fallback convolves."""
    C, _, W = weight.shape

    def one(document: Tensor) -> Tensor:
        return F.silu(F.conv1d(F.pad(document.transpose(1, 2), (W - 1, 0)), weight, groups=C)).transpose(1, 2)

    return one(x) if packed is None else torch.cat([one(document) for document in x.split(packed.lengths, 1)], 1)


def _norm(o: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = torch.promote_types(o.dtype, torch.float32)
    normed = F.rms_norm(o.to(wide), weight.shape, weight.to(wide), eps)
    return (normed * F.silu(z.to(wide))).to(o.dtype)


def _fla() -> Loaded:
    # the library's own function, behind its dispatcher: without that an installed FlashQLA would run instead
    return _around(inspect.unwrap(importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule))


def _flashqla() -> Loaded:
    importlib.import_module("fla.modules")
    return _around(importlib.import_module("flash_qla").chunk_gated_delta_rule)


def _around(function: Callable[..., Any]) -> Loaded:
    convolution = importlib.import_module("fla.modules.causal_conv1d")
    norm_gate = importlib.import_module("fla.modules.norm.fused_norm_gate")
    recurrent = importlib.import_module("fla.ops.gated_delta_rule").fused_recurrent_gated_delta_rule

    def boundaries(packed: PackedSequences | None, device: torch.device) -> Tensor | None:
        return None if packed is None else shared_boundaries(packed, device)

    def convolve(x: Tensor, weight: Tensor, packed: PackedSequences | None) -> Tensor:
        y, _ = convolution.causal_conv1d(
            x, weight.squeeze(1), activation="silu", cu_seqlens=boundaries(packed, x.device)
        )
        return y  # type: ignore[no-any-return]

    def recur(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, packed: PackedSequences | None) -> Tensor:
        words = {"use_qk_l2norm_in_kernel": True, "cu_seqlens": boundaries(packed, q.device)}
        return function(q=q, k=k, v=v, g=g, beta=beta, **words)[0]  # type: ignore[no-any-return]

    def norm(o: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
        return norm_gate.rms_norm_gated(o, z, weight, None, activation="swish", eps=eps)  # type: ignore[no-any-return]

    def update(x: Tensor, columns: Tensor, weight: Tensor) -> Tensor:
        y, _ = convolution.causal_conv1d_update(x, columns, weight=weight.squeeze(1), activation="silu")
        return y  # type: ignore[no-any-return]

    def step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        words = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
        return recurrent(q=q, k=k, v=v, g=g, beta=beta, **words)  # type: ignore[no-any-return]

    return Loaded(convolve, recur, norm, update, step)
