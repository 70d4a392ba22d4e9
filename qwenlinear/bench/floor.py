"""What a Gated DeltaNet layer cannot do without: its matrix products, its kernel, and the bytes between them.

The floor of a call is the sum of three times that are measured in the same rounds as the call:

- products: those of the input, ``[T, hidden]`` with the rows of q|k|v, of b|a and of z, and the output's, ``[T, HV V]``; with
  backward the gradients of both inputs, that of the first summed in place, and of all weights;
- the kernel alone, on what the layer hands it: contiguous q, k, v, g, beta with q and k normalised before;
- the bytes that prologue and epilogue must move, over the bandwidth of a copy: a copy that reads and writes as many.

A token's bytes, with e bytes an activation, C = 2 H K + HV V, g in float32, weights left out (they are below a thousandth):

- prologue forward: reads qkv, b, a; writes q, k, v, beta, g:           C e + 2 HV e + C e + HV e + 4 HV
- prologue backward, which recomputes: reads qkv, b, a and the gradients of q, k, v, beta, g; writes those of qkv, b, a:
                                                                        3 C e + 5 HV e + 4 HV
- epilogue forward: reads o, z; writes y:                               3 HV V e
- epilogue backward: reads o, z and the gradient of y; writes those of o and z:  5 HV V e
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from qwenlinear.bench.cases import Inputs
from qwenlinear.bench.timing import Call
from qwenlinear.kernels import (
    DeltaRuleInputs,
    GatedDeltaKernel,
    KernelCapabilities,
    PackedSequences,
    TorchKernel,
)
from qwenlinear.kernels.lowering import Answer
from qwenlinear.layers import GatedDeltaNetConfig, Qwen3_5GatedDeltaNet

FORMULAS = {
    "prologue forward": "(2 C + 3 HV) e + 4 HV",
    "prologue backward": "(3 C + 5 HV) e + 4 HV",
    "epilogue forward": "3 HV V e",
    "epilogue backward": "5 HV V e",
}
"""Bytes a token; C = 2 H K + HV V channels, e bytes an activation. `Sizes.bytes_of` computes them."""


@dataclass(frozen=True)
class Sizes:
    """A layer's sizes, as the floor counts them.

    Args:
        config: the layer's.
        dtype: of the activations.
    """

    config: GatedDeltaNetConfig
    dtype: torch.dtype

    @property
    def projected(self) -> int:
        """P, rows of the input projections together: qkv, z, b, a."""
        c = self.config
        return c.conv_dim + c.value_dim + 2 * c.linear_num_value_heads

    def bytes_of(self, op: str, tokens: int) -> int:
        """The bytes that must move.

        Args:
            op: a key of ``FORMULAS``.
            tokens: T.

        Returns:
            Bytes read and written.
        """
        C, HV = self.config.conv_dim, self.config.linear_num_value_heads
        e, values = self.dtype.itemsize, self.config.value_dim
        g = 8 if self.dtype == torch.float64 else 4
        a_token = {
            "prologue forward": (2 * C + 3 * HV) * e + g * HV,
            "prologue backward": (3 * C + 5 * HV) * e + g * HV,
            "epilogue forward": 3 * values * e,
            "epilogue backward": 5 * values * e,
        }[op]
        return a_token * tokens

    def glue(self, tokens: int, train: bool) -> int:
        """Bytes of prologue and epilogue together: forward, or forward and backward."""
        ops = [op for op in FORMULAS if train or op.endswith("forward")]
        return sum(self.bytes_of(op, tokens) for op in ops)

    def decode(self, rows: int) -> int:
        """Bytes of one decoded token a row: state read and written, weights and convolution state read."""
        c, e = self.config, self.dtype.itemsize
        state = rows * c.linear_num_value_heads * c.linear_key_head_dim * c.linear_value_head_dim
        weights = self.projected * c.hidden_size + c.hidden_size * c.value_dim + c.conv_dim * c.linear_conv_kernel_dim
        columns = rows * c.conv_dim * (c.linear_conv_kernel_dim - 1)
        return 2 * state * (8 if self.dtype == torch.float64 else 4) + (weights + columns) * e


def copying(size: int, device: torch.device) -> Call:
    """A copy that reads and writes ``size`` bytes together.

    Args:
        size: bytes read plus bytes written.
        device: where.

    Returns:
        The call.
    """
    source = torch.ones(max(16, size // 2), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def products(sizes: Sizes, tokens: int, device: torch.device, train: bool, seed: int = 2) -> Call:
    """The layer's matrix products alone.

    Args:
        sizes: the layer's.
        tokens: T.
        device: where.
        train: whether to form the gradients of inputs and weights, too.
        seed: of the operands.

    Returns:
        The call: four products, or ten.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=torch.float32, generator=generator).to(sizes.dtype)

    hidden, inner, gates = sizes.config.hidden_size, sizes.config.value_dim, 2 * sizes.config.linear_num_value_heads
    x, o = draw(tokens, hidden), draw(tokens, inner)
    mixing, gate, out = draw(sizes.config.conv_dim + gates, hidden), draw(inner, hidden), draw(hidden, inner)
    qkv, ba = mixing.split_with_sizes((sizes.config.conv_dim, gates))
    pairs: list[Callable[[], Tensor]] = [
        lambda: x @ qkv.t(),
        lambda: x @ ba.t(),
        lambda: x @ gate.t(),
        lambda: o @ out.t(),
    ]
    if train:
        dy, dz, dmixed = draw(tokens, hidden), draw(tokens, inner), draw(tokens, sizes.config.conv_dim + gates)
        pairs += [lambda: dy @ out, lambda: dy.t() @ o, lambda: dz.t() @ x, lambda: dmixed.t() @ x]
        pairs += [lambda: (dz @ gate).addmm_(dmixed, mixing)]

    def call() -> None:
        for product in pairs:
            product()

    return call


class _Records(GatedDeltaKernel):
    """Takes whatever a layer hands it, contiguous and normalised, and keeps it."""

    capabilities = KernelCapabilities(
        dtypes=frozenset(TorchKernel.tolerances), devices=None, chunk=True, packed=True, value_head_groups=True
    )
    tolerances = TorchKernel.tolerances
    given: DeltaRuleInputs

    def _chunk(self, inputs: DeltaRuleInputs) -> Answer:
        self.given = inputs
        return torch.zeros_like(inputs.v), None


@torch.no_grad()
def given_to_the_kernel(layer: Qwen3_5GatedDeltaNet, x: Tensor, packed: PackedSequences | None) -> Inputs:
    """What a layer hands its kernel: kernels look at the decays before they cut a sequence, so others cost other times.

    Args:
        layer: with any kernel, which is left in place.
        x: ``[B, T, hidden_size]``.
        packed: its documents, or None.

    Returns:
        The tensors, contiguous, q and k normalised.
    """
    kernel, layer.kernel = layer.kernel, _Records()
    try:
        layer(x, cu_seqlens=packed)
        given = layer.kernel.given
    finally:
        layer.kernel = kernel
    return Inputs(given.q, given.k, given.v, given.g, given.beta, packed)


def kernel_alone(kernel: GatedDeltaKernel, inputs: Inputs, train: bool) -> Call:
    """A kernel by itself, with the native head groups.

    Args:
        kernel: any.
        inputs: contiguous, q and k normalised.
        train: whether to run backward, too.

    Returns:
        The call.
    """
    if not train:

        @torch.no_grad()
        def forward() -> object:
            return kernel(*inputs.tensors, cu_seqlens=inputs.packed)

        return forward
    leaves, do = inputs.leaves(), torch.randn_like(inputs.v)

    def both() -> object:
        o, _ = kernel(*leaves.tensors, cu_seqlens=leaves.packed)
        return torch.autograd.grad(o, leaves.tensors, do)

    return both
