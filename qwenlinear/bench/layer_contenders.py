"""Who takes part in ``bench layer``: one Gated DeltaNet layer with the same weights, as different people run it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from qwenlinear.bench.composition import CommonComposition, parts_of, shared_boundaries
from qwenlinear.bench.fla_switch import SWITCH, fla_switch
from qwenlinear.kernels.auto import kernel_from_name
from qwenlinear.kernels.base import GatedDeltaKernel
from qwenlinear.kernels.packing import PackedSequences
from qwenlinear.kernels.torch_kernel import TorchKernel
from qwenlinear.layers.config import GatedDeltaNetConfig
from qwenlinear.layers.gated_delta_net import Qwen3_5GatedDeltaNet

Named = dict[str, Tensor]


@dataclass(frozen=True)
class Setup:
    """A layer that all contenders are: sizes, place, dtype, and weights under Transformers' names.

    Args:
        config: sizes.
        device: where.
        dtype: of weights and activations; A_log and dt_bias stay float32.
        weights: the state dict in that dtype.
    """

    config: GatedDeltaNetConfig
    device: torch.device
    dtype: torch.dtype
    weights: Mapping[str, Tensor]

    @classmethod
    def draw(cls, config: GatedDeltaNetConfig, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Setup:
        """Weights as PyTorch draws them; the gate as FLA and Mamba-2 draw it, so that states live for 1 to 1e5 tokens.

        Args:
            config: sizes.
            device: where.
            dtype: of weights and activations.
            seed: of the generator.

        Returns:
            The setup.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            layer = Qwen3_5GatedDeltaNet(config, TorchKernel())
            layer.reset_parameters()
            dt = torch.empty_like(layer.dt_bias).uniform_(-3.0, -1.0).mul_(2.302585).exp_()  # 1e-3 to 1e-1
            with torch.no_grad():
                layer.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))
                layer.norm.weight.uniform_(0.5, 1.5)
        layer = layer.to(device=device, dtype=dtype)
        return cls(config, device, dtype, {name: value.detach() for name, value in layer.state_dict().items()})

    def layer(self, kernel: GatedDeltaKernel, dtype: torch.dtype | None = None) -> Qwen3_5GatedDeltaNet:
        """Our layer with these weights, its own copy of them."""
        layer = Qwen3_5GatedDeltaNet(self.config, kernel).to(device=self.device, dtype=dtype or self.dtype)
        layer.load_state_dict(dict(self.weights))
        return layer


class LayerContender:
    """One layer as somebody runs it.

    Args:
        name: how tables call it.
        note: what is worth knowing about how it is run.
        kernel: the kernel whose floor it is held against, by name; None for the first one.
    """

    def __init__(self, name: str, note: str, kernel: str | None = None) -> None:
        self.name, self.note, self.kernel = name, note, kernel

    def build(self, setup: Setup) -> nn.Module:
        """The module with the setup's weights.

        Raises:
            Exception: what is missing here.
        """
        raise NotImplementedError

    def why_not(self, layer: nn.Module, x: Tensor, packed: PackedSequences | None) -> str | None:
        """Why it does not run this call, None when it does."""
        return None

    def run(self, layer: nn.Module, x: Tensor, packed: PackedSequences | None) -> Tensor:
        """``[1, T, hidden]``."""
        return cast(Tensor, layer(x, cu_seqlens=packed))

    def renamed(self, gradients: Named) -> Named:
        """Gradients by parameter, under Transformers' names and in its shapes."""
        return gradients

    def describe(self, layer: nn.Module, x: Tensor, packed: PackedSequences | None) -> str:
        """What really runs, in words, where the module can tell."""
        return self.note


class Ours(LayerContender):
    """Our layer with a kernel; ``called`` puts a hook that does nothing on every projection, so that the modules are called."""

    def __init__(self, kernel: str, called: bool) -> None:
        self._kernel = kernel_from_name(kernel)
        self.called = called
        title = f"qwenlinear, {type(self._kernel).__name__}"
        if called:
            super().__init__(f"{title}, modules called", "a hook on each projection keeps them apart", kernel)
        else:
            super().__init__(title, "as it comes", kernel)

    def build(self, setup: Setup) -> nn.Module:
        layer = setup.layer(kernel_from_name(self.kernel or "auto"))
        if self.called:
            for name, module in layer.named_children():
                if name.startswith("in_proj"):
                    module.register_forward_hook(_nothing)
        return layer

    def why_not(self, layer: nn.Module, x: Tensor, packed: PackedSequences | None) -> str | None:
        c, (B, T, _) = cast(Qwen3_5GatedDeltaNet, layer).config, x.shape
        trains = torch.is_grad_enabled() and x.requires_grad

        def empty(*heads: int, dtype: torch.dtype = x.dtype) -> Tensor:
            return torch.empty(B, T, *heads, device=x.device, dtype=dtype, requires_grad=trains)

        q = empty(c.linear_num_key_heads, c.linear_key_head_dim)
        v = empty(c.linear_num_value_heads, c.linear_value_head_dim)
        beta = empty(c.linear_num_value_heads)
        g = empty(c.linear_num_value_heads, dtype=torch.promote_types(x.dtype, torch.float32))
        refusals = self._kernel.refusals(q, q, v, g, beta, use_qk_l2norm_in_kernel=True, cu_seqlens=packed)
        return "; ".join(map(str, refusals)) or None

    def describe(self, layer: nn.Module, x: Tensor, packed: PackedSequences | None) -> str:
        return cast(Qwen3_5GatedDeltaNet, layer).explain(x, cu_seqlens=packed)


class Composition(LayerContender):
    """What trainers write: see :mod:`qwenlinear.bench.composition`."""

    def __init__(self, kernel: str) -> None:
        super().__init__(f"common composition, {parts_of(kernel).name}", parts_of(kernel).note, kernel)

    def build(self, setup: Setup) -> nn.Module:
        assert self.kernel is not None
        return CommonComposition(setup.layer(TorchKernel()), parts_of(self.kernel).loaded())

    def renamed(self, gradients: Named) -> Named:
        return {name.removeprefix("layer."): value for name, value in gradients.items()}


class Transformers(LayerContender):
    """Transformers' ``Qwen3_5GatedDeltaNet`` as installed; its convolution wants another package to keep documents apart."""

    def __init__(self, switch: str | None = None) -> None:
        title = "Transformers" if switch is None else f"Transformers, {SWITCH}={switch}"
        note = "as installed; documents of one length are rows of a batch, others a call each"
        super().__init__(title, note if switch is None else f"{note}; FLA's own kernels instead of its hand-over")
        self.switch = switch

    def build(self, setup: Setup) -> nn.Module:
        modeling = importlib.import_module("transformers.models.qwen3_5.modeling_qwen3_5")
        config = transformers_config(asdict(setup.config))
        layer = modeling.Qwen3_5GatedDeltaNet(config, 0).to(device=setup.device, dtype=setup.dtype)
        layer.A_log.data, layer.dt_bias.data = layer.A_log.data.float(), layer.dt_bias.data.float()
        if setup.dtype == torch.float64:
            layer.double()
        layer.load_state_dict(dict(setup.weights))
        return cast(nn.Module, layer)

    def run(self, layer: nn.Module, x: Tensor, packed: PackedSequences | None) -> Tensor:
        with fla_switch(self.switch):
            if packed is None:
                return cast(Tensor, layer(x))
            if len(set(packed.lengths)) == 1:
                return cast(Tensor, layer(x.view(packed.num_sequences, packed.lengths[0], -1)).view_as(x))
            return torch.cat([layer(document) for document in x.split(packed.lengths, 1)], 1)


class FLALayer(LayerContender):
    """flash-linear-attention's own ``GatedDeltaNet``, set to the same sizes and given the same weights."""

    def __init__(self) -> None:
        super().__init__(
            "FLA's GatedDeltaNet",
            "same sizes and weights; six projections instead of four, three convolutions over packed documents, decay and "
            "beta formed in its kernel, states [V, K]; its gate keeps FlashQLA from being handed the call",
            "fla",
        )

    def build(self, setup: Setup) -> nn.Module:
        c = setup.config
        if setup.device.type != "cuda":
            raise RuntimeError(f"FLA's layer needs a GPU, got {setup.device}")
        module = importlib.import_module("fla.layers.gated_deltanet")
        layer = module.GatedDeltaNet(
            hidden_size=c.hidden_size,
            expand_v=c.linear_value_head_dim / c.linear_key_head_dim,
            head_dim=c.linear_key_head_dim,
            num_heads=c.linear_num_key_heads,
            num_v_heads=c.linear_num_value_heads,
            conv_size=c.linear_conv_kernel_dim,
            norm_eps=c.rms_norm_eps,
            layer_idx=0,
        ).to(device=setup.device, dtype=setup.dtype)
        layer.A_log.data, layer.dt_bias.data = layer.A_log.data.float(), layer.dt_bias.data.float()
        layer.load_state_dict(_as_fla(c, setup.weights))
        return cast(nn.Module, layer.train())

    def run(self, layer: nn.Module, x: Tensor, packed: PackedSequences | None) -> Tensor:
        boundaries = {} if packed is None else {"cu_seqlens": shared_boundaries(packed, x.device)}
        return cast(Tensor, layer(x, **boundaries)[0])

    def renamed(self, gradients: Named) -> Named:
        own = dict(gradients)
        for target, sources in (("in_proj_qkv.weight", "{}_proj.weight"), ("conv1d.weight", "{}_conv1d.weight")):
            own[target] = torch.cat([own.pop(sources.format(letter)) for letter in "qkv"])
        return {_FROM_FLA.get(name, name): value for name, value in own.items()}


_FROM_FLA = {
    "g_proj.weight": "in_proj_z.weight",
    "b_proj.weight": "in_proj_b.weight",
    "a_proj.weight": "in_proj_a.weight",
    "o_norm.weight": "norm.weight",
    "o_proj.weight": "out_proj.weight",
}


def _as_fla(config: GatedDeltaNetConfig, weights: Mapping[str, Tensor]) -> Named:
    """Our state dict under the names of FLA's layer."""
    back = {ours: theirs for theirs, ours in _FROM_FLA.items()}
    named = {back.get(name, name): value for name, value in weights.items()}
    rows = [config.key_dim, config.key_dim, config.value_dim]
    for source, target in (("in_proj_qkv.weight", "{}_proj.weight"), ("conv1d.weight", "{}_conv1d.weight")):
        for letter, part in zip("qkv", named.pop(source).split(rows), strict=True):
            named[target.format(letter)] = part
    return named


def _nothing(module: nn.Module, args: Any, output: Tensor) -> None:
    """A forward hook that leaves everything as it is."""


def transformers_config(sizes: Mapping[str, Any]) -> Any:
    """Transformers' config of these sizes, with one layer, a linear one."""
    config = importlib.import_module("transformers").Qwen3_5TextConfig
    return config(**sizes, num_hidden_layers=1, layer_types=["linear_attention"])


KINDS = ("transformers", "fla-layer", "composition", "called", "ours")


def contenders(kinds: list[str], kernels: list[str]) -> list[LayerContender]:
    """Everybody, peers first.

    Args:
        kinds: some of ``KINDS``.
        kernels: names that :func:`qwenlinear.kernel_from_name` takes; composition and our layer come once with each.

    Returns:
        The contenders, in the order of tables.
    """
    makers: dict[str, Callable[[], list[LayerContender]]] = {
        "transformers": lambda: [Transformers(), Transformers("0")],
        "fla-layer": lambda: [FLALayer()],
        "composition": lambda: [Composition(name) for name in kernels],
        "called": lambda: [Ours(name, called=True) for name in kernels],
        "ours": lambda: [Ours(name, called=False) for name in kernels],
    }
    return [one for kind in KINDS if kind in kinds for one in makers[kind]()]
