"""Who takes part in ``bench decode``: a layer that prefills and then takes a token at a time, as different people run it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from qwenlinear.bench.composition import CommonComposition, parts_of
from qwenlinear.bench.fla_switch import fla_switch
from qwenlinear.bench.layer_contenders import Setup, Transformers, transformers_config
from qwenlinear.hf.boundaries import positional_names
from qwenlinear.kernels.auto import kernel_from_name
from qwenlinear.kernels.torch_kernel import TorchKernel
from qwenlinear.layers.cache import GatedDeltaNetCache
from qwenlinear.layers.gated_delta_net import Qwen3_5GatedDeltaNet


class Decoder:
    """One layer as somebody decodes with it.

    Args:
        name: how tables call it.
        note: what is worth knowing about how it is run.
    """

    def __init__(self, name: str, note: str) -> None:
        self.name, self.note = name, note

    def build(self, setup: Setup) -> nn.Module:
        """The module with the setup's weights; raises what is missing here."""
        raise NotImplementedError

    def start(self, layer: nn.Module, x: Tensor) -> Any:
        """The states after a prompt ``[B, T, hidden]``."""
        raise NotImplementedError

    def step(self, layer: nn.Module, x: Tensor, state: Any) -> Tensor:
        """One token: ``[B, 1, hidden]`` to the same; ``state`` holds the new states afterwards."""
        raise NotImplementedError

    def step_in_graph(self, layer: nn.Module, x: Tensor, state: Any) -> Tensor:
        """The same for a CUDA graph, whose replays find the new states only where the old ones were."""
        return self.step(layer, x, state)

    def describe(self, layer: nn.Module, x: Tensor) -> str:
        """What really runs, in words, where the module can tell."""
        return self.note


class Ours(Decoder):
    """Our layer with a kernel; the prompt goes in token by token, which every kernel can do."""

    def __init__(self, kernel: str) -> None:
        self._kernel = kernel
        super().__init__(f"qwenlinear, {type(kernel_from_name(kernel)).__name__}", "layer(x, cache=cache)")

    def build(self, setup: Setup) -> nn.Module:
        return setup.layer(kernel_from_name(self._kernel)).eval()

    def start(self, layer: nn.Module, x: Tensor) -> GatedDeltaNetCache:
        cache = GatedDeltaNetCache()
        for token in x.split(1, 1):
            layer(token, cache=cache)
        return cache

    def step(self, layer: nn.Module, x: Tensor, state: Any) -> Tensor:
        return cast(Tensor, layer(x, cache=state))

    def describe(self, layer: nn.Module, x: Tensor) -> str:
        with torch.no_grad():
            return cast(Qwen3_5GatedDeltaNet, layer).explain(x, cache=self.start(layer, x))


class OfTransformers(Decoder):
    """Transformers' layer as installed, with its ``DynamicCache``."""

    def __init__(self) -> None:
        super().__init__("Transformers", "as installed, with its DynamicCache")

    def build(self, setup: Setup) -> nn.Module:
        return Transformers().build(setup).eval()

    def start(self, layer: nn.Module, x: Tensor) -> Any:
        cache = importlib.import_module("transformers").DynamicCache(config=transformers_config(_sizes(layer)))
        self.step(layer, x, cache)
        return cache

    def step(self, layer: nn.Module, x: Tensor, state: Any) -> Tensor:
        # Transformers 5.17 calls it cache_params, and drops a name that it does not know
        name = "cache" if "cache" in positional_names(layer) else "cache_params"
        with fla_switch(None):
            return cast(Tensor, layer(x, **{name: state}))


class OfComposition(Decoder):
    """The common composition around FLA's recurrent function (or a kernel's step), which leaves a new state."""

    def __init__(self, kernel: str) -> None:
        self._kernel = kernel
        what = "fused_recurrent" if kernel == "fla" else "step"
        super().__init__(
            f"common composition, {parts_of(kernel).name} {what}",
            "eager: the new state takes the old one's place; in a CUDA graph it is copied back, as a replay needs",
        )

    def build(self, setup: Setup) -> nn.Module:
        return CommonComposition(setup.layer(TorchKernel()), parts_of(self._kernel).loaded()).eval()

    def start(self, layer: nn.Module, x: Tensor) -> list[Tensor]:
        c = cast(CommonComposition, layer).layer.config
        B, wide = x.shape[0], torch.promote_types(x.dtype, torch.float32)
        columns = x.new_zeros(B, c.conv_dim, c.linear_conv_kernel_dim)
        heads = (c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim)
        states = [columns, torch.zeros(B, *heads, device=x.device, dtype=wide)]
        for token in x.split(1, 1):
            self.step(layer, token, states)
        return states

    def step(self, layer: nn.Module, x: Tensor, state: Any) -> Tensor:
        y, state[1] = cast(CommonComposition, layer).step(x, *state)
        return y

    def step_in_graph(self, layer: nn.Module, x: Tensor, state: Any) -> Tensor:
        y, new = cast(CommonComposition, layer).step(x, *state)
        state[1].copy_(new)
        return y


def _sizes(layer: nn.Module) -> dict[str, Any]:
    own = cast(Any, layer)
    return {
        "hidden_size": own.hidden_size,
        "linear_num_key_heads": own.num_k_heads,
        "linear_num_value_heads": own.num_v_heads,
        "linear_key_head_dim": own.head_k_dim,
        "linear_value_head_dim": own.head_v_dim,
        "linear_conv_kernel_dim": own.conv_kernel_size,
    }


KINDS = ("transformers", "composition", "ours")


def decoders(kinds: list[str], kernels: list[str]) -> list[Decoder]:
    """Everybody, peers first.

    Args:
        kinds: some of ``KINDS``.
        kernels: of our layer; the composition is FLA's, or PyTorch's around the first one where FLA is none of them.

    Returns:
        The contenders, in the order of tables.
    """
    makers: dict[str, Callable[[], list[Decoder]]] = {
        "transformers": lambda: [OfTransformers()],
        "composition": lambda: [OfComposition("fla" if "fla" in kernels or "auto" in kernels else kernels[0])],
        "ours": lambda: [Ours(name) for name in kernels],
    }
    return [one for kind in KINDS if kind in kinds for one in makers[kind]()]
