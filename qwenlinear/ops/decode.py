"""The prologue of one token: what decoding does between the projections and the kernel's `step`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from qwenlinear._launch import eager, needs_grad, written
from qwenlinear.checks import needs_tensor
from qwenlinear.kernels.writable import why_not_writable
from qwenlinear.ops.activations import ACTIVATIONS
from qwenlinear.ops.available import refuse_forward_mode, why_not_fused
from qwenlinear.ops.gate import log_decay

Prepared = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
_TENSORS: list[type] = [*[Tensor] * 6, nn.Parameter, nn.Parameter, nn.Parameter]  # as a layer calls it


def decode_prologue(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    b: Tensor,
    a: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    *,
    activation: str | None = "silu",
    l2norm: bool = True,
) -> Prepared:
    """Convolution of one token with its state, activation, normalisation of q and k, decay and write strength.

    In one Triton launch where :func:`qwenlinear.ops.why_not_fused` has nothing against it, else in PyTorch
    (:func:`decode_prologue_twin`). Everything is computed in float32 at least and rounded once. There are no gradients.

    Args:
        q: ``[B, 1, H, K]`` of one token, as projected; any strides, so that Qwen3-Next's grouped rows are read in place.
        k: ``[B, 1, H, K]``.
        v: ``[B, 1, H, HV//H, V]``.
        b: ``[B, 1, H, HV//H]`` write strength before the sigmoid.
        a: ``[B, 1, H, HV//H]`` decay before the gate.
        conv_state: ``[B, C, W-1]`` the columns before this token, oldest first, for q's channels, k's, v's
            (``C = 2*H*K + HV*V``); **updated in place**. Any strides.
        weight: ``[C, 1, W]`` the convolution's taps.
        A_log: ``[HV]``.
        dt_bias: ``[HV]``.
        activation: silu, swish, relu, gelu, gelu_pytorch_tanh, sigmoid, tanh, or None for none; default ``"silu"``.
        l2norm: whether q and k are normalised, ``x * rsqrt(sum(x**2) + 1e-6)``; default True.

    Returns:
        ``(q [B, 1, H, K], k [B, 1, H, K], v [B, 1, HV, V], g [B, 1, HV], beta [B, 1, HV])``, contiguous; g float32
        (float64 where q is), beta in b's dtype, the others in q's.

    Raises:
        ValueError: shapes or dtypes that do not fit, an unknown activation, a conv_state that cannot be written to (expanded,
            or of inference mode outside of it), or a gradient that would be wanted. conv_state is unchanged then.
        NotImplementedError: forward-mode differentiation of the Triton form, before anything is written.

    Example:
        >>> q, k = torch.randn(2, 3, 1, 2, 4)
        >>> v, b, a = torch.randn(3, 1, 2, 2, 8), torch.randn(3, 1, 2, 2), torch.randn(3, 1, 2, 2)
        >>> state, weight = torch.zeros(3, 48, 3), torch.randn(48, 1, 4)
        >>> *_, v, g, beta = decode_prologue(q, k, v, b, a, state, weight, torch.zeros(4), torch.zeros(4))
        >>> v.shape, g.shape, state[:, :, :2].any().item(), state[:, :, 2].any().item()
        (torch.Size([3, 1, 4, 8]), torch.Size([3, 1, 4]), False, True)
    """
    tensors = (q, k, v, b, a, conv_state, weight, A_log, dt_bias)
    _check(*tensors, activation)
    width, sizes = weight.shape[2], (q.shape[3], v.shape[4])
    if why_not_fused(q.device, q.dtype, activation=activation, width=width, head_dims=sizes) is None:
        refuse_forward_mode("decode_prologue", *tensors)
        if eager(*tensors):
            from qwenlinear.ops import _decode_triton

            prepared = _decode_triton.launch(*tensors, l2norm)
            written(conv_state)
            return prepared
        through: Prepared = decode_prologue_op(*tensors, l2norm)
        return through
    return decode_prologue_twin(*tensors, activation=activation, l2norm=l2norm)


def decode_prologue_twin(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    b: Tensor,
    a: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    *,
    activation: str | None = "silu",
    l2norm: bool = True,
) -> Prepared:
    """:func:`decode_prologue` in PyTorch; arguments and results are its own.

    Example:
        >>> q = k = torch.ones(1, 1, 1, 2)
        >>> v, ba, state = torch.ones(1, 1, 1, 1, 2), torch.zeros(1, 1, 1, 1), torch.zeros(1, 6, 1)
        >>> decode_prologue_twin(q, k, v, ba, ba, state, torch.ones(6, 1, 2), *torch.zeros(2, 1), activation=None)[2]
        tensor([[[[1., 1.]]]])
    """
    wide, (B, _, H, K), V = torch.promote_types(q.dtype, torch.float32), q.shape, v.shape[4]
    token = torch.cat([q.flatten(1), k.flatten(1), v.flatten(1)], 1)[..., None]
    window = torch.cat([conv_state.to(token.dtype), token], 2)
    y = (window.to(wide) * weight.squeeze(1).to(wide)).sum(2)
    if activation is not None:
        y = ACTIVATIONS[activation](y)
    heads = y[:, : 2 * H * K].view(B, 2, H, K)
    if l2norm:
        heads = heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + 1e-6)
    q_out, k_out = (x[:, None].to(q.dtype).contiguous() for x in heads.unbind(1))
    v_out = y[:, None, 2 * H * K :].to(v.dtype).unflatten(-1, (-1, V)).contiguous()
    g, beta = log_decay(a.flatten(2), A_log, dt_bias).to(wide), b.flatten(2).sigmoid()
    conv_state.copy_(window[:, :, 1:])
    return q_out, k_out, v_out, g, beta


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    b: Tensor,
    a: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    activation: str | None,
) -> None:
    tensors = (q, k, v, b, a, conv_state, weight, A_log, dt_bias)
    if list(map(type, tensors)) != _TENSORS:  # name by name only where it is not the usual: this runs at each token
        for name, x in zip(("q", "k", "v", "b", "a", "conv_state", "weight", "A_log", "dt_bias"), tensors, strict=True):
            needs_tensor(name, x)
    if q.dim() != 4 or q.shape[1] != 1:
        raise ValueError(f"q needs shape [B, 1, H, K], got {list(q.shape)}")
    if v.dim() != 5 or v.shape[:3] != q.shape[:3]:
        raise ValueError(f"v needs shape [B, 1, H, HV//H, V] with q's B and H, {list(q.shape)}, got {list(v.shape)}")
    if weight.dim() != 3 or weight.shape[1] != 1:
        raise ValueError(f"weight needs shape [C, 1, W], got {list(weight.shape)}")
    shape, (B, _, H, K), (*_, G, V), W = q.shape, q.shape, v.shape, weight.shape[2]
    device, C, heads = q.device, 2 * H * K + H * G * V, (B, 1, H, G)
    for name, x, wanted in (
        ("k", k, shape),
        ("b", b, heads),
        ("a", a, heads),
        ("weight", weight, (C, 1, W)),
        ("conv_state", conv_state, (B, C, W - 1)),
        ("A_log", A_log, (H * G,)),
        ("dt_bias", dt_bias, (H * G,)),
    ):
        if x.shape != wanted or x.device != device or not x.is_floating_point():
            needs = f"shape {list(wanted)} on {device} and a floating dtype"
            raise ValueError(f"{name} needs {needs}, got {list(x.shape)} on {x.device}, {x.dtype}")
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise ValueError(f"{name} needs q's dtype {q.dtype}, got {x.dtype}")
    if activation is not None and not (isinstance(activation, str) and activation in ACTIVATIONS):
        raise ValueError(f"activation needs None or one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    if (reason := why_not_writable("a conv_state", conv_state)) is not None:
        raise ValueError(f"decode_prologue needs {reason}")
    if needs_grad(q, k, v, b, a, conv_state, weight, A_log, dt_bias):
        raise ValueError(
            "decode_prologue needs a call without gradients, got an argument that requires them: use torch.no_grad(), or "
            "prologue, which has them"
        )


# ---- the Triton form as an operator --------------------------------------------------------------------------------


@torch.library.custom_op(
    "qwenlinear::decode_prologue",
    mutates_args=("conv_state",),
    schema="(Tensor q, Tensor k, Tensor v, Tensor b, Tensor a, Tensor(m!) conv_state, Tensor weight, Tensor A_log, "
    "Tensor dt_bias, bool l2norm) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def decode_prologue_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    b: Tensor,
    a: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    l2norm: bool,
) -> Prepared:
    """The Triton form, with SiLU."""
    from qwenlinear.ops import _decode_triton

    return _decode_triton.launch(q, k, v, b, a, conv_state, weight, A_log, dt_bias, l2norm)


@decode_prologue_op.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    b: Tensor,
    a: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    l2norm: bool,
) -> Prepared:
    (B, _, H, K), (G, V) = q.shape, v.shape[3:]
    keys, heads = (B, 1, H, K), (B, 1, H * G)
    g = torch.empty(heads, dtype=torch.float32, device=q.device)
    return q.new_empty(keys), k.new_empty(keys), v.new_empty(*heads, V), g, b.new_empty(heads)
