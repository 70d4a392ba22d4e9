"""DeltaRuleInputs: one validated call of the gated delta rule, the same object for every check, lowering and kernel.

Shape letters, here and everywhere: B batch, T tokens, H query/key heads, HV value heads (value head j uses key head
``j // (HV // H)``), K key head size, V value head size, N sequences (B when dense, the documents when packed).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from qwenlinear.kernels.packing import PackedSequences
from qwenlinear.kernels.writable import why_not_writable


@dataclass(frozen=True, slots=True)
class DeltaRuleInputs:
    """The arguments of a kernel call after validation; made by :meth:`validate`.

    Args:
        q: ``[B, T, H, K]`` queries; float64, float32, bfloat16 or float16.
        k: ``[B, T, H, K]`` keys, q's dtype.
        v: ``[B, T, HV, V]`` values, q's dtype.
        g: ``[B, T, HV]`` log-decay, natural logarithm, float32 (float64 when q is).
        beta: ``[B, T, HV]`` write strength after the sigmoid, any floating dtype.
        scale: factor on q.
        initial_state: ``[N, HV, K, V]`` of g's dtype, or None for zeros.
        output_final_state: whether the final state is wanted.
        use_qk_l2norm_in_kernel: whether q and k are still to be normalised, ``x * rsqrt(sum(x**2) + 1e-6)``.
        cu_seqlens: boundaries of packed documents as they came, or None for dense input.
        state_in_place: whether the final state is to take the initial state's place in memory; only the recurrent form is
            asked, only with both states and without gradients.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    scale: float
    initial_state: Tensor | None
    output_final_state: bool
    use_qk_l2norm_in_kernel: bool
    cu_seqlens: Tensor | PackedSequences | None
    state_in_place: bool = False

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        scale: float,
        initial_state: Tensor | None,
        output_final_state: bool,
        use_qk_l2norm_in_kernel: bool,
        cu_seqlens: Tensor | PackedSequences | None,
        state_in_place: bool = False,
    ) -> None:
        put = object.__setattr__  # which a frozen dataclass looks up for each field: every call pays for it
        put(self, "q", q)
        put(self, "k", k)
        put(self, "v", v)
        put(self, "g", g)
        put(self, "beta", beta)
        put(self, "scale", scale)
        put(self, "initial_state", initial_state)
        put(self, "output_final_state", output_final_state)
        put(self, "use_qk_l2norm_in_kernel", use_qk_l2norm_in_kernel)
        put(self, "cu_seqlens", cu_seqlens)
        put(self, "state_in_place", state_in_place)

    @classmethod
    def validate(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        scale: float | None,
        initial_state: Tensor | None,
        output_final_state: bool,
        use_qk_l2norm_in_kernel: bool,
        cu_seqlens: Tensor | PackedSequences | None,
        state_in_place: bool = False,
    ) -> DeltaRuleInputs:
        """Check everything that needs no tensor value; the first fault found is reported.

        Raises:
            ValueError: naming the argument, what it needs and what came.
        """
        if not _go_together(q, k, v, g, beta, initial_state):
            _check_tensors(q, k, v, g, beta, initial_state)
        if not isinstance(output_final_state, bool):
            raise _no_flag("output_final_state", output_final_state)
        if not isinstance(use_qk_l2norm_in_kernel, bool):
            raise _no_flag("use_qk_l2norm_in_kernel", use_qk_l2norm_in_kernel)
        if not isinstance(state_in_place, bool):
            raise _no_flag("state_in_place", state_in_place)
        if cu_seqlens is not None or initial_state is not None:
            _check_sequences(q, v, g, initial_state, cu_seqlens)
        inputs = cls(
            q,
            k,
            v,
            g,
            beta,
            float(q.shape[3] ** -0.5) if scale is None else _checked(scale),
            initial_state,
            output_final_state,
            use_qk_l2norm_in_kernel,
            cu_seqlens,
            state_in_place,
        )
        if state_in_place:
            _check_in_place(inputs)
        return inputs

    @property
    def B(self) -> int:
        """Batch size."""
        return self.q.shape[0]

    @property
    def T(self) -> int:
        """Tokens of a batch row."""
        return self.q.shape[1]

    @property
    def H(self) -> int:
        """Query/key heads."""
        return self.q.shape[2]

    @property
    def HV(self) -> int:
        """Value heads."""
        return self.v.shape[2]

    @property
    def K(self) -> int:
        """Key head size."""
        return self.q.shape[3]

    @property
    def V(self) -> int:
        """Value head size."""
        return self.v.shape[3]

    @property
    def N(self) -> int:
        """Sequences: batch rows when dense, documents when packed."""
        return _count_sequences(self.cu_seqlens, self.B, self.T)

    @property
    def packed(self) -> PackedSequences | None:
        """The boundaries as a PackedSequences, which they are by the time a kernel's ``_chunk`` or ``_step`` sees them."""
        assert not isinstance(self.cu_seqlens, Tensor), "boundaries are materialised before a kernel runs"
        return self.cu_seqlens

    @property
    def boundaries(self) -> Tensor | None:
        """``[N+1]`` int32 boundaries on q's device, shared by every call of the batch and not to be written to."""
        return None if self.packed is None else self.packed._boundaries(self.q.device)

    @property
    def needs_grad(self) -> bool:
        """Whether autograd will want a backward pass."""
        state = self.initial_state
        return torch.is_grad_enabled() and (
            self.q.requires_grad
            or self.k.requires_grad
            or self.v.requires_grad
            or self.g.requires_grad
            or self.beta.requires_grad
            or (state is not None and state.requires_grad)
        )

    def state_or_zeros(self) -> Tensor:
        """The initial state, or ``[N, HV, K, V]`` zeros of g's dtype."""
        if self.initial_state is not None:
            return self.initial_state
        return self.g.new_zeros(self.N, self.HV, self.K, self.V)

    def describe(self) -> str:
        """The call in one line: shapes, dtype, device, what is asked for."""
        words = [
            f"B={self.B} T={self.T} H={self.H} HV={self.HV} K={self.K} V={self.V}",
            f"{str(self.q.dtype).removeprefix('torch.')} on {self.q.device}",
            "dense" if self.cu_seqlens is None else f"packed N={self.N}",
        ]
        if self.needs_grad:
            words.append("with gradients")
        if self.initial_state is not None:
            words.append("from a state" + (", in place" if self.state_in_place else ""))
        return ", ".join(words)


_STATE_DTYPES = {
    torch.float64: torch.float64,
    torch.float32: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
}
_LETTERS = {
    "q": "[B, T, H, K]",
    "k": "[B, T, H, K]",
    "v": "[B, T, HV, V]",
    "g": "[B, T, HV]",
    "beta": "[B, T, HV]",
}


# A call costs the host as much as it makes the host look at. So what is right is found in few looks, each shape, dtype and
# device asked for once; and only what is wrong is looked at name by name, for an error that says which.


def _go_together(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None) -> bool:
    """Whether `_check_tensors` would find nothing: the same conditions, all at once."""
    tensors: tuple[object, ...] = (q, k, v, g, beta)
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            return False
    if q.dim() != 4 or v.dim() != 4:
        return False
    shape, dtype, device = q.shape, q.dtype, q.device
    B, T, H, K = shape
    _, _, HV, V = values = v.shape
    gates = (B, T, HV)
    return (
        k.shape == shape
        and values == (B, T, HV, V)
        and g.shape == gates
        and beta.shape == gates
        and (H >= 1 and HV >= 1 and HV % H == 0 and K >= 1 and V >= 1)
        and (k.dtype == dtype and v.dtype == dtype and g.dtype == _STATE_DTYPES.get(dtype))
        and beta.is_floating_point()
        and (k.device == device and v.device == device and g.device == device and beta.device == device)
        and (initial_state is None or (isinstance(initial_state, Tensor) and initial_state.device == device))
    )


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None) -> None:
    for name, tensor, dims in (("q", q, 4), ("k", k, 4), ("v", v, 4), ("g", g, 3), ("beta", beta, 3)):
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name} needs a tensor, got {type(tensor).__name__}")
        if tensor.dim() != dims:
            raise ValueError(f"{name} needs shape {_LETTERS[name]}, got {list(tensor.shape)}")
    if initial_state is not None and not isinstance(initial_state, Tensor):
        raise ValueError(f"initial_state needs a tensor or None, got {type(initial_state).__name__}")
    B, T, H, K = q.shape
    HV, V = v.shape[2], v.shape[3]
    _same_shape("k", k, q.shape, "q's")
    _same_shape("v", v, (B, T, HV, V), "q's B and T")
    _same_shape("g", g, (B, T, HV), "v's")
    _same_shape("beta", beta, (B, T, HV), "v's")
    if H < 1 or HV % H or HV < 1:
        raise ValueError(f"v needs a number of heads HV that is a multiple of q's H, got HV={HV} and H={H}")
    if K < 1 or V < 1:
        raise ValueError(f"q and v need head sizes of at least 1, got K={K} and V={V}")
    _check_dtypes(q, k, v, g, beta)
    for name, other in (("k", k), ("v", v), ("g", g), ("beta", beta), ("initial_state", initial_state)):
        if other is not None and other.device != q.device:
            raise ValueError(f"{name} needs q's device {q.device}, got {other.device}")


def _check_sequences(
    q: Tensor, v: Tensor, g: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | PackedSequences | None
) -> None:
    B, T, _, K = q.shape
    N = _count_sequences(cu_seqlens, B, T)
    if initial_state is not None:
        HV, V = v.shape[2], v.shape[3]
        _same_shape("initial_state", initial_state, (N, HV, K, V), "[N, HV, K, V] =")
        if initial_state.dtype != g.dtype:
            raise ValueError(f"initial_state needs {g.dtype} where q is {q.dtype}, got {initial_state.dtype}")


def _no_flag(name: str, flag: object) -> ValueError:
    return ValueError(f"{name} needs True or False, got {flag!r}")


def _same_shape(name: str, tensor: Tensor, shape: tuple[int, ...], whose: str) -> None:
    if tensor.shape != shape:
        raise ValueError(f"{name} needs shape {list(shape)} ({whose}), got {list(tensor.shape)}")


def _check_dtypes(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> None:
    if q.dtype not in _STATE_DTYPES:
        raise ValueError(f"q needs float64, float32, bfloat16 or float16, got {q.dtype}")
    if k.dtype != q.dtype or v.dtype != q.dtype:
        raise ValueError(f"q, k and v need one dtype, got {q.dtype}, {k.dtype} and {v.dtype}")
    if g.dtype != _STATE_DTYPES[q.dtype]:
        raise ValueError(f"g needs {_STATE_DTYPES[q.dtype]} where q is {q.dtype}, got {g.dtype}")
    if not beta.is_floating_point():
        raise ValueError(f"beta needs a floating dtype, got {beta.dtype}")


def _check_in_place(inputs: DeltaRuleInputs) -> None:
    state = inputs.initial_state
    if state is None or not inputs.output_final_state:
        raise ValueError(
            "state_in_place needs an initial_state to write to and output_final_state=True, got "
            f"{'no initial_state' if state is None else 'output_final_state=False'}"
        )
    if inputs.needs_grad:
        raise ValueError(
            "state_in_place needs a call without gradients, got an input that requires them: use torch.no_grad()"
        )
    if (reason := why_not_writable("an initial_state", state)) is not None:
        raise ValueError(f"state_in_place needs {reason}")


def _checked(scale: float) -> float:
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not math.isfinite(scale):
        raise ValueError(f"scale needs a finite number or None for K**-0.5, got {scale!r}")
    return float(scale)


def _count_sequences(cu_seqlens: Tensor | PackedSequences | None, B: int, T: int) -> int:
    if cu_seqlens is None:
        return B
    if B != 1:
        raise ValueError(f"cu_seqlens needs a batch of one, got B={B}; flatten the batch to [1, B*T, ...]")
    if isinstance(cu_seqlens, PackedSequences):
        if cu_seqlens.total_tokens != T:
            raise ValueError(f"cu_seqlens needs to end at T={T}, got {cu_seqlens.total_tokens}")
        return cu_seqlens.num_sequences
    if not isinstance(cu_seqlens, Tensor):
        raise ValueError(f"cu_seqlens needs a tensor or a PackedSequences, got {type(cu_seqlens).__name__}")
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"cu_seqlens needs shape [N+1] with N >= 1, int32 or int64; got {list(cu_seqlens.shape)} {cu_seqlens.dtype}"
        )
    return len(cu_seqlens) - 1
