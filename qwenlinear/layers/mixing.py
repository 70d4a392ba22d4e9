"""The one path between a layer's projections: prologue, kernel, epilogue; and its form for one token, with states in place.

Shared by this package's layers and by injected Transformers layers, whose states lie in caches of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from qwenlinear.errors import UnsupportedCall
from qwenlinear.kernels import GatedDeltaKernel, PackedSequences
from qwenlinear.kernels.tangents import forward_mode
from qwenlinear.layers.config import GatedDeltaNetConfig
from qwenlinear.layers.gated_norm import GatedRMSNorm
from qwenlinear.layers.padding import RightPadding
from qwenlinear.layers.plain import why_not_plain
from qwenlinear.layers.projection import Projected
from qwenlinear.layers.token import ProjectedToken
from qwenlinear.ops import decode_prologue, prologue, why_not_fused
from qwenlinear.ops.available import refuse_forward_mode


class MixingWeights(NamedTuple):
    """What a layer's prologue reads.

    Args:
        conv: ``[conv_dim, 1, W]``.
        A_log: ``[HV]``.
        dt_bias: ``[HV]``.
    """

    conv: Tensor
    A_log: Tensor
    dt_bias: Tensor


@dataclass(frozen=True)
class KernelArguments:
    """What a kernel is called with, besides its state and boundaries.

    Args:
        q: ``[B, T, H, K]``.
        k: ``[B, T, H, K]``.
        v: ``[B, T, HV, V]``.
        g: ``[B, T, HV]``.
        beta: ``[B, T, HV]``.
        normalised: whether q and k already are; otherwise the kernel does it, or its base class.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    normalised: bool


def why_not_fused_prologue(config: GatedDeltaNetConfig, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why a layer's prologue runs in PyTorch.

    Args:
        config: the layer's sizes.
        device: where the tensors are.
        dtype: of the projections' outputs.

    Returns:
        One reason in words, or None where it is fused.
    """
    return why_not_fused(
        device,
        dtype,
        activation=config.hidden_act,
        width=config.linear_conv_kernel_dim,
        head_dims=(config.linear_key_head_dim, config.linear_value_head_dim),
    )


def why_norm_is_called(norm: nn.Module) -> str | None:
    """Why a layer's gated norm is called as the module that it is, instead of its weight being read by the epilogue.

    Args:
        norm: this package's, Transformers' or FLA's gated norm, or what was put in its place.

    Returns:
        One reason in words that follows the module's name, or None.
    """
    kind = type(norm)
    theirs = kind.__name__.endswith("RMSNormGated") and kind.__module__.partition(".")[0] in ("transformers", "fla")
    return why_not_plain(norm, kind if theirs else GatedRMSNorm)


def prepare(
    config: GatedDeltaNetConfig,
    parts: Projected,
    weights: MixingWeights,
    conv_state: Tensor | None = None,
    output_final_state: bool = False,
    packed: PackedSequences | None = None,
    padding: RightPadding | None = None,
) -> tuple[KernelArguments, Tensor | None]:
    """From the projections to a kernel's arguments: convolution, activation, split, norms, gates.

    Args:
        config: the layer's sizes.
        parts: the projections.
        weights: the layer's own.
        conv_state: ``[N, conv_dim, W-1]`` to go on from, or None at a sequence's start.
        output_final_state: whether to return the convolution's state after the last token.
        packed: boundaries of packed documents, or None.
        padding: padding at the right, or None.

    Returns:
        The arguments, and ``[N, conv_dim, W-1]`` or None.
    """
    c = config
    # In PyTorch q and k are better normalised where they are cut into chunks, or by the base class, which keeps less of them.
    normalise = why_not_fused_prologue(c, parts.qkv.device, parts.qkv.dtype) is None
    q, k, v, g, beta, final = prologue(
        parts.qkv,
        parts.b,
        parts.a,
        weights.conv,
        weights.A_log,
        weights.dt_bias,
        heads=(c.linear_num_key_heads, c.linear_num_value_heads),
        head_dims=(c.linear_key_head_dim, c.linear_value_head_dim),
        activation=c.hidden_act,
        l2norm=normalise,
        initial_state=conv_state,
        output_final_state=output_final_state,
        packed=packed,
        lengths=None if padding is None else padding.lengths,
    )
    if padding is not None:
        g, beta = padding.fill(g), padding.fill(beta)  # neither decays the state nor writes to it
    return KernelArguments(q, k, v, g, beta, normalise), final


def recur(
    kernel: GatedDeltaKernel,
    given: KernelArguments,
    state: Tensor | None,
    output_final_state: bool,
    packed: PackedSequences | None,
    decodes: bool,
) -> tuple[Tensor, Tensor | None]:
    """The kernel: its recurrent form where one token is decoded without gradients and it has one, else its chunked form.

    Args:
        kernel: the injected one.
        given: from :func:`prepare`.
        state: ``[N, HV, K, V]`` to go on from, or None.
        output_final_state: whether to return the state after the last token.
        packed: boundaries of packed documents, or None.
        decodes: whether this is a cached call with one token a sequence.

    Returns:
        ``o [B, T, HV, V]``, and the state or None.
    """
    step = steps(kernel, decodes, given.q, given.k, given.v, given.g, given.beta, state)
    return (kernel.step if step else kernel)(
        given.q,
        given.k,
        given.v,
        given.g,
        given.beta,
        initial_state=state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=not given.normalised,
        cu_seqlens=packed,
    )


def steps(kernel: GatedDeltaKernel, decodes: bool, *tensors: Tensor | None) -> bool:
    """Whether a call takes the kernel's recurrent form.

    Args:
        kernel: the injected one.
        decodes: whether this is a cached call with one token a sequence.
        *tensors: what the kernel would be called with.

    Returns:
        True where it decodes, no tensor needs a gradient, and the kernel has that form.
    """
    trains = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    return decodes and not trains and kernel.capabilities.step


def decode_in_place(
    config: GatedDeltaNetConfig,
    kernel: GatedDeltaKernel,
    token: ProjectedToken,
    weights: MixingWeights,
    conv_state: Tensor,
    recurrent_state: Tensor,
) -> Tensor:
    """One token a sequence without gradients: both states are written where they are.

    Args:
        config: the layer's sizes.
        kernel: the injected one, asked by :func:`check_step` before.
        token: the projections.
        weights: the layer's own.
        conv_state: ``[B, conv_dim, W-1]`` in the projections' dtype; changed.
        recurrent_state: ``[B, HV, K, V]``; changed.

    Returns:
        ``[B, 1, HV, V]``.
    """
    normalise = why_not_fused_prologue(config, token.q.device, token.q.dtype) is None
    q, k, v, g, beta = decode_prologue(
        token.q,
        token.k,
        token.v,
        token.b,
        token.a,
        conv_state,
        weights.conv,
        weights.A_log,
        weights.dt_bias,
        activation=config.hidden_act,
        l2norm=normalise,
    )
    o, _ = kernel.step(
        q,
        k,
        v,
        g,
        beta,
        initial_state=recurrent_state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=not normalise,
        state_in_place=True,
    )
    return o


def check_step(
    config: GatedDeltaNetConfig,
    kernel: GatedDeltaKernel,
    token: ProjectedToken,
    weights: MixingWeights,
    recurrent_state: Tensor,
) -> None:
    """Ask a kernel before anything is written whether it takes a step; what it will get has the shapes of what is there.

    Args:
        config: the layer's sizes.
        kernel: the injected one.
        token: the projections.
        weights: the layer's own.
        recurrent_state: ``[B, HV, K, V]``.

    Raises:
        UnsupportedCall: it refuses.
        NotImplementedError: forward-mode derivatives, which the fused prologue has not.
    """
    if forward_mode() and why_not_fused_prologue(config, token.q.device, token.q.dtype) is None:
        refuse_forward_mode("decode_prologue", *token, *weights)
    B, HV, _, V = recurrent_state.shape
    v, beta = token.v.new_empty(B, 1, HV, V), token.b.new_empty(B, 1, HV)  # shapes and dtypes are what is asked about
    g = recurrent_state[:, None, :, 0, 0]
    refusals = kernel.refusals(
        token.q, token.k, v, g, beta, None, recurrent_state, True, form="step", state_in_place=True
    )
    if refusals:
        raise UnsupportedCall(repr(kernel), refusals, "step of one token, states in place")
