"""The prologue of a Gated DeltaNet layer: from its projections to what a kernel takes, in one pass over the tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qwenlinear._launch import eager, needs_grad
from qwenlinear.checks import needs_floating, needs_tensor
from qwenlinear.kernels.packing import PackedSequences
from qwenlinear.ops._prologue_torch import prologue_twin
from qwenlinear.ops.activations import ACTIVATIONS
from qwenlinear.ops.available import refuse_forward_mode, why_not_fused
from qwenlinear.ops.convolution import check_lengths

Prologue = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, "Tensor | None"]


def prologue(
    qkv: Tensor,
    b: Tensor,
    a: Tensor,
    weight: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    *,
    heads: tuple[int, int],
    head_dims: tuple[int, int],
    activation: str | None = "silu",
    l2norm: bool = True,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    packed: PackedSequences | None = None,
    lengths: Tensor | None = None,
) -> Prologue:
    """Short convolution, activation, split, l2norm of q and k, and the two gates.

    In Triton where :func:`qwenlinear.ops.why_not_fused` has nothing against it: every element is read once and written once,
    rounded once, and the backward pass keeps only the inputs and computes the rest again. Otherwise in PyTorch, with the
    same results. Arguments may be strided views of one buffer, as long as their last dimension is contiguous.

    Args:
        qkv: ``[B, T, C]`` any floating dtype, ``C = 2*H*K + HV*V``: q, k and v side by side.
        b: ``[B, T, HV]`` beta before the sigmoid.
        a: ``[B, T, HV]`` the decay before its bias.
        weight: ``[C, 1, W]`` the convolution's taps, as ``nn.Conv1d`` has them.
        A_log: ``[HV]``.
        dt_bias: ``[HV]``.
        heads: H and HV.
        head_dims: K and V.
        activation: after the convolution: silu, swish, relu, gelu, gelu_pytorch_tanh, sigmoid, tanh or None; default
            ``"silu"``.
        l2norm: whether q and k become ``x * rsqrt(sum(x**2) + 1e-6)``, in float32 at least; default True.
        initial_state: ``[N, C, W-1]`` the columns of qkv before each sequence, oldest first, any floating dtype (taken in
            qkv's); default None for zeros.
        output_final_state: whether to return the columns that the next call needs; default False.
        packed: boundaries of packed documents (B is 1, N the documents); default None for dense rows, N = B.
        lengths: ``[B]`` int64, the tokens of each row that count for its final state, the rest being padding at the right;
            0 to T (checked on the CPU, clamped elsewhere); default None for all. Not together with ``packed``.

    Returns:
        q and k ``[B, T, H, K]``, v ``[B, T, HV, V]``, contiguous and in qkv's dtype; g ``[B, T, HV]`` in [-1e4, 0], float32
        (float64 where qkv is); beta ``[B, T, HV]`` in b's dtype; the final state ``[N, C, W-1]`` in qkv's dtype, or None.
        Differentiable in every floating argument, in Triton once.

    Raises:
        ValueError: a shape, dtype or device that does not fit.
        NotImplementedError: forward-mode differentiation of the Triton form.

    Example:
        >>> qkvba = torch.randn(1, 8, 2 * 2 * 4 + 4 * 4 + 4 + 4)
        >>> qkv, b, a = qkvba.split([32, 4, 4], -1)
        >>> gate = torch.zeros(4), torch.ones(4)
        >>> documents = PackedSequences.from_lengths([5, 3])
        >>> q, k, v, g, beta, state = prologue(
        ...     qkv, b, a, torch.randn(32, 1, 4), *gate, heads=(2, 4), head_dims=(4, 4), packed=documents
        ... )
        >>> q.shape, v.shape, g.shape, state
        (torch.Size([1, 8, 2, 4]), torch.Size([1, 8, 4, 4]), torch.Size([1, 8, 4]), None)
    """
    _check_tensors(qkv, b, a, weight, A_log, dt_bias, heads, head_dims, activation)
    _check_sequences(qkv, weight, initial_state, packed, lengths)
    state = None if initial_state is None else initial_state.to(qkv.dtype)
    if packed is not None and packed.num_sequences == 1:
        packed = None  # one document is dense
    reason = why_not_fused(qkv.device, qkv.dtype, activation=activation, width=weight.shape[2], head_dims=head_dims)
    if reason is not None or qkv.numel() == 0:  # Triton cannot launch nothing
        return prologue_twin(
            qkv, b, a, weight, A_log, dt_bias, heads, head_dims, activation, l2norm, state, output_final_state, packed, lengths
        )  # fmt: skip
    refuse_forward_mode("prologue", qkv, b, a, weight, A_log, dt_bias, state)
    return fused_prologue(
        qkv, b, a, weight, A_log, dt_bias, heads, head_dims, l2norm, state, output_final_state, packed, lengths
    )


def fused_prologue(
    qkv: Tensor,
    b: Tensor,
    a: Tensor,
    weight: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    heads: tuple[int, int],
    head_dims: tuple[int, int],
    l2norm: bool,
    initial_state: Tensor | None,
    output_final_state: bool,
    packed: PackedSequences | None,
    lengths: Tensor | None,
) -> Prologue:
    """The Triton form, of arguments that :func:`prologue` checked."""
    bounds = positions = documents = None
    if packed is not None:
        bounds = packed._boundaries(qkv.device)
        positions, documents = packed.derive(("prologue.tokens", qkv.device), lambda: _tokens(packed, qkv.device))
    inputs = (qkv, b, a, weight, A_log, dt_bias, initial_state, positions, documents, bounds, lengths)
    run: Callable[..., Any] = prologue_op
    if eager(*inputs):
        run = _Prologue.apply if needs_grad(*inputs) else _run
    q, k, v, g, beta, state = run(*inputs, *heads, *head_dims, l2norm, output_final_state)
    return q, k, v, g, beta, state if output_final_state else None


def _tokens(packed: PackedSequences, device: torch.device) -> tuple[Tensor, Tensor]:
    """``[T]`` int32 each: a token's position in its document, and the document's number."""
    documents = packed.segment_ids(device)
    starts = packed._boundaries(device).index_select(0, documents)
    positions = torch.arange(packed.total_tokens, dtype=torch.int32, device=device) - starts
    return positions, documents.to(torch.int32)


# ---- checks --------------------------------------------------------------------------------------------------------


def _check_tensors(
    qkv: Tensor,
    b: Tensor,
    a: Tensor,
    weight: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    heads: tuple[int, int],
    head_dims: tuple[int, int],
    activation: str | None,
) -> None:
    for name, pair in (("heads", heads), ("head_dims", head_dims)):
        two = isinstance(pair, (tuple, list)) and len(pair) == 2
        if not two or any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in pair):
            raise ValueError(f"{name} needs two whole numbers >= 1, got {pair!r}")
    for name, tensor in (
        ("qkv", qkv), ("b", b), ("a", a), ("weight", weight), ("A_log", A_log), ("dt_bias", dt_bias)
    ):  # fmt: skip
        needs_tensor(name, tensor)
    (H, HV), (K, V) = heads, head_dims
    C = 2 * H * K + HV * V
    if qkv.dim() != 3 or qkv.shape[2] != C or not qkv.is_floating_point():
        raise ValueError(
            f"qkv needs shape [B, T, {C}] (2*H*K + HV*V) and a floating dtype, got {list(qkv.shape)} and {qkv.dtype}"
        )
    if weight.dim() != 3 or tuple(weight.shape[:2]) != (C, 1) or weight.shape[2] < 1:
        raise ValueError(f"weight needs shape [{C}, 1, W], got {list(weight.shape)}")
    needs_floating("weight", weight)
    gates = [*qkv.shape[:2], HV]
    for name, tensor, shape in (("b", b, gates), ("a", a, gates), ("A_log", A_log, [HV]), ("dt_bias", dt_bias, [HV])):
        if list(tensor.shape) != shape or not tensor.is_floating_point():
            raise ValueError(
                f"{name} needs shape {shape} and a floating dtype, got {list(tensor.shape)} and {tensor.dtype}"
            )
    for name, tensor in (("b", b), ("a", a), ("weight", weight), ("A_log", A_log), ("dt_bias", dt_bias)):
        if tensor.device != qkv.device:
            raise ValueError(f"{name} needs qkv's device {qkv.device}, got {tensor.device}")
    if activation is not None and not (isinstance(activation, str) and activation in ACTIVATIONS):
        raise ValueError(f"activation needs None or one of {', '.join(ACTIVATIONS)}, got {activation!r}")


def _check_sequences(
    qkv: Tensor,
    weight: Tensor,
    initial_state: Tensor | None,
    packed: PackedSequences | None,
    lengths: Tensor | None,
) -> None:
    B, T, C = qkv.shape
    if packed is not None and not isinstance(packed, PackedSequences):
        raise ValueError(f"packed needs a PackedSequences, got {type(packed).__name__}; from_cu_seqlens makes one")
    if packed is not None and B != 1:
        raise ValueError(f"packed needs a batch of one, got B={B}; flatten qkv, b and a to [1, B*T, ...]")
    if packed is not None and packed.total_tokens != T:
        raise ValueError(f"packed needs to end at T={T}, got {packed.total_tokens}")
    if packed is not None and lengths is not None:
        raise ValueError("packed and lengths need to come one without the other, got both")
    if lengths is not None:
        needs_tensor("lengths", lengths)
        check_lengths(lengths, qkv)
    if initial_state is not None:
        needs_tensor("initial_state", initial_state)
    wanted = [B if packed is None else packed.num_sequences, C, weight.shape[2] - 1]
    if initial_state is not None and (list(initial_state.shape) != wanted or not initial_state.is_floating_point()):
        raise ValueError(
            f"initial_state needs shape {wanted} ([N, C, W-1]) and a floating dtype, got {list(initial_state.shape)} "
            f"and {initial_state.dtype}"
        )
    if initial_state is not None and initial_state.device != qkv.device:
        raise ValueError(f"initial_state needs qkv's device {qkv.device}, got {initial_state.device}")


# ---- the Triton form as operators ----------------------------------------------------------------------------------

_INPUTS = (
    "Tensor qkv, Tensor b, Tensor a, Tensor weight, Tensor A_log, Tensor dt_bias, Tensor? initial_state, Tensor? positions, "
    "Tensor? documents, Tensor? bounds, Tensor? lengths"
)
_SIZES = "int H, int HV, int K, int V, bool l2norm"
_TENSORS = 11
_FIVE = "(Tensor, Tensor, Tensor, Tensor, Tensor)"


def _run(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The Triton form; the final state is empty where it is not asked for."""
    from qwenlinear.ops import _prologue_launch as launch

    inputs, (H, HV, K, V, l2norm, output_final_state) = arguments[:_TENSORS], arguments[_TENSORS:]
    weight = inputs[3]
    return launch.forward(
        launch.Inputs(*inputs), launch.Sizes(H, HV, K, HV * V, weight.shape[2]), l2norm, output_final_state
    )


prologue_op = torch.library.custom_op(
    "qwenlinear::prologue",
    _run,
    mutates_args=(),
    schema=f"({_INPUTS}, {_SIZES}, bool output_final_state) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)


@prologue_op.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    qkv, b, _a, weight, _A_log, _dt_bias, _state, _positions, _documents, bounds, _lengths = arguments[:_TENSORS]
    H, HV, K, V, _l2norm, output_final_state = arguments[_TENSORS:]
    B, T, C = qkv.shape
    N = B if bounds is None else bounds.shape[0] - 1
    return (
        qkv.new_empty(B, T, H, K),
        qkv.new_empty(B, T, H, K),
        qkv.new_empty(B, T, HV, V),
        qkv.new_empty(B, T, HV, dtype=torch.float32),
        b.new_empty(B, T, HV),
        qkv.new_empty((N, C, weight.shape[2] - 1) if output_final_state else (0,)),
    )


def _run_backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Its gradients: of qkv, b and a in one buffer, then of b and a if their dtype differs, of the weight, of A_log and dt_bias,
    of the initial state; what is not needed is empty, or not written."""
    from qwenlinear.ops import _prologue_launch as launch

    inputs, rest = arguments[:_TENSORS], arguments[_TENSORS:]
    dq, dk, dv, dg, dbeta, dfinal, H, HV, K, V, l2norm, needs_dweight, needs_dstate = rest
    return launch.backward(
        launch.Inputs(*inputs),
        launch.Sizes(H, HV, K, HV * V, inputs[3].shape[2]),
        l2norm,
        None if dq is None else (dq, dk, dv),
        None if dg is None else (dg, dbeta),
        dfinal,
        needs_dweight,
        needs_dstate,
    )


prologue_backward_op = torch.library.custom_op(
    "qwenlinear::prologue_backward",
    _run_backward,
    mutates_args=(),
    schema=f"({_INPUTS}, Tensor? dq, Tensor? dk, Tensor? dv, Tensor? dg, Tensor? dbeta, Tensor? dfinal, {_SIZES}, "
    f"bool needs_dweight, bool needs_dstate) -> {_FIVE}",
)


@prologue_backward_op.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    qkv, b, a, weight, _A_log, _dt_bias, state = arguments[:7]
    dq, _dk, _dv, dg, _dbeta, _dfinal, _H, HV, _K, _V, _l2norm, needs_dweight, needs_dstate = arguments[_TENSORS:]
    B, T, C = qkv.shape
    gates = torch.promote_types(b.dtype, a.dtype)
    apart = dg is not None and gates != qkv.dtype
    return (
        qkv.new_empty(B, T, C + 2 * HV),
        qkv.new_empty((B, T, 2 * HV) if apart else (0,), dtype=gates),
        weight.new_empty(weight.shape if needs_dweight and dq is not None else (0,)),
        qkv.new_empty((2, HV) if dg is not None else (0,), dtype=torch.float32),
        qkv.new_empty(state.shape if needs_dstate and dq is not None else (0,)),
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:_TENSORS])
    *ctx.sizes, ctx.kept_final = inputs[_TENSORS:]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    """Gradients of qkv, b and a are views of one buffer, so that a projection's backward pass reads them as one matrix."""
    inputs, needs = ctx.saved_tensors, ctx.needs_input_grad
    qkv, b, a, _weight, A_log, dt_bias, _state = inputs[:7]
    (B, T, C), (H, HV, K, V, _) = qkv.shape, ctx.sizes
    *dqkv, dg, dbeta, dfinal = gradients
    dfinal = dfinal if ctx.kept_final else None
    if (needs[0] or needs[3] or needs[6]) and any(d is not None for d in (*dqkv, dfinal)):
        shapes = ((B, T, H, K), (B, T, H, K), (B, T, HV, V))
        dqkv = [qkv.new_zeros(shape) if d is None else d for d, shape in zip(dqkv, shapes, strict=True)]
    else:
        dqkv, dfinal = [None, None, None], None
    if (needs[1] or needs[2] or needs[4] or needs[5]) and not (dg is None and dbeta is None):
        dg = qkv.new_zeros(B, T, HV, dtype=torch.float32) if dg is None else dg
        dbeta = b.new_zeros(B, T, HV) if dbeta is None else dbeta
    else:
        dg = dbeta = None
    tensors = (*inputs, *dqkv, dg, dbeta, dfinal)
    run: Callable[..., Any] = _run_backward if eager(*tensors) and not needs_grad(*tensors) else prologue_backward_op
    dx, dba, dweight, dgate, dstate = run(*tensors, *ctx.sizes, needs[3], needs[6])
    convolution, gates = dqkv[0] is not None, dg is not None
    dba = dba if dba.numel() else dx[..., C:]
    return (
        dx[..., :C] if needs[0] and convolution else None,
        dba[..., :HV].to(b.dtype) if needs[1] and gates else None,
        dba[..., HV:].to(a.dtype) if needs[2] and gates else None,
        dweight if needs[3] and convolution else None,
        dgate[0].to(A_log.dtype) if needs[4] and gates else None,
        dgate[1].to(dt_bias.dtype) if needs[5] and gates else None,
        dstate if needs[6] and convolution else None,
        *[None] * (_TENSORS - 7 + 6),
    )


prologue_op.register_autograd(_backward, setup_context=_keep)


class _Prologue(torch.autograd.Function):
    """The operator's gradients without the dispatcher, in eager code; of a second derivative the operator knows to refuse it."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        outputs = _run(*inputs)
        _keep(ctx, inputs, outputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return _backward(ctx, *gradients)
