"""Case: one thing that a kernel is asked to do, small enough to print and rebuilt from what is printed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from qwenlinear.kernels.capabilities import Form
from qwenlinear.kernels.packing import PackedSequences

INPUTS = ("q", "k", "v", "g", "beta", "initial_state")


@dataclass(frozen=True, repr=False)
class Case:
    """One call (or one comparison of calls) of a kernel. Two equal cases draw equal tensors, whatever the device.

    Args:
        topic: what the case is about, in a few words; a failure is reported under it.
        check: how the answer is obtained and judged: a name in ``qwenlinear.testing.checks.CHECKS``.
        dtype: of q, k and v.
        form: ``"chunk"`` for the call itself, ``"step"`` for the recurrent form.
        B: batch size, where dense.
        T: tokens of a batch row, where dense.
        heads: ``(H, HV, K, V)``.
        lengths: tokens of each packed document; None for dense input.
        boundaries: how they are handed over: ``"object"`` (a PackedSequences), ``"int32"`` or ``"int64"`` (a tensor).
        pieces: lengths in tokens of the calls that a sequence is split into, for the check ``"resume"``.
        gates: which log-decays: ``"none"``, ``"usual"``, ``"weak"``, ``"strong"``, ``"mixed"`` or ``"reset"``.
        beta: which write strengths: ``"usual"``, ``"ones"``, ``"zeros"`` or ``"ends"`` (0 and 1 among them).
        beta_dtype: dtype of beta; empty for that of q.
        scale: factor on q; None for ``K**-0.5``.
        initial_state: whether the sequences start from a random state.
        final_state: whether the final state is asked for.
        l2norm: whether the kernel normalises q and k; ``"tiny"`` with keys near and at zero.
        grad: ``""`` for none, ``"all"``, ``"inputs"`` for all but the initial state, or the one input that requires a gradient.
        loss: what it is taken of: ``"both"``, ``"output"`` or ``"state"``.
        layout: ``"contiguous"``, ``"strided"`` or ``"expanded"``.
        scratch: whether memory that the kernel allocates comes filled with NaN.
        mode: ``"grad"``, ``"no_grad"`` or ``"inference"``: the autograd mode around the call.
        expects: what must be said, for the checks ``"refused"`` (a refusal's code) and ``"malformed"`` (a key of MALFORMED).
        seed: of the drawn values.

    Example:
        >>> case = Case("scale", T=5, scale=0.5)
        >>> case
        Case('scale', T=5, scale=0.5)
        >>> eval(repr(case)) == case
        True
    """

    topic: str
    check: str = "values"
    dtype: str = "float32"
    form: Form = "chunk"
    B: int = 1
    T: int = 64
    heads: tuple[int, int, int, int] = (2, 2, 16, 16)
    lengths: tuple[int, ...] | None = None
    boundaries: str = "object"
    pieces: tuple[int, ...] = ()
    gates: str = "usual"
    beta: str = "usual"
    beta_dtype: str = ""
    scale: float | None = None
    initial_state: bool = False
    final_state: bool = False
    l2norm: bool | str = False
    grad: str = ""
    loss: str = "both"
    layout: str = "contiguous"
    scratch: bool = False
    mode: str = "grad"
    expects: str = ""
    seed: int = 0

    def __repr__(self) -> str:
        changed = (f for f in fields(self)[1:] if getattr(self, f.name) != f.default)
        words = [repr(self.topic), *(f"{f.name}={_shown(getattr(self, f.name))}" for f in changed)]
        return f"Case({', '.join(words)})"

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself."""
        return _dtype(self.dtype)

    @property
    def N(self) -> int:
        """Sequences."""
        return self.B if self.lengths is None else len(self.lengths)

    @property
    def shape(self) -> tuple[int, int]:
        """Batch size and tokens of a row, packed or not."""
        return (self.B, self.T) if self.lengths is None else (1, sum(self.lengths))

    @property
    def wanted(self) -> tuple[str, ...]:
        """The inputs that require a gradient."""
        if self.grad not in ("all", "inputs"):
            return (self.grad,) if self.grad else ()
        return INPUTS if self.initial_state and self.grad == "all" else INPUTS[:-1]

    def but(self, **changes: object) -> Case:
        """The same case with other fields."""
        return replace(self, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Drawn:
    """The tensors of a case. What the kernel gets are views of ``bases``, which own the memory and receive the gradients.

    Args:
        case: what they were drawn for.
        bases: by input name.
        d_output: gradient of the loss with respect to o.
        d_state: the same for the final state.
        cu_seqlens: boundaries as they are handed over, or None.
    """

    case: Case
    bases: dict[str, Tensor]
    d_output: Tensor
    d_state: Tensor
    cu_seqlens: Tensor | PackedSequences | None

    def double(self) -> Drawn:
        """The same values in float64, for a reference."""
        bases = {name: base.double() for name, base in self.bases.items()}
        return replace(self, bases=bases, d_output=self.d_output.double(), d_state=self.d_state.double())

    def view(self, bases: dict[str, Tensor]) -> dict[str, Tensor]:
        """The kernel's view of such bases, differentiable."""
        return {name: _VIEWS[self.case.layout](name, base, self.case) for name, base in bases.items()}

    @property
    def options(self) -> dict[str, object]:
        """Every argument of the call that is no floating tensor."""
        return {
            "scale": self.case.scale,
            "output_final_state": self.case.final_state,
            "use_qk_l2norm_in_kernel": bool(self.case.l2norm),
            "cu_seqlens": self.cu_seqlens,
        }


def draw(case: Case, device: torch.device | str) -> Drawn:
    """Draw the tensors of a case, on the CPU and then moved, so that every device gets the same values.

    Args:
        case: what to draw.
        device: where the kernel runs.

    Returns:
        The tensors.
    """
    generator = torch.Generator("cpu").manual_seed(case.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    (B, T), (H, HV, K, V), dtype = case.shape, case.heads, case.torch_dtype
    wide = torch.promote_types(dtype, torch.float32)
    values = {
        "q": _directions(normal(B, T, H, K), case),
        "k": _directions(normal(B, T, H, K), case),
        "v": normal(B, T, HV, V),
        "g": _GATES[case.gates](uniform(B, T, HV)),
        "beta": _BETAS[case.beta](uniform(B, T, HV)),
        "initial_state": normal(case.N, HV, K, V),
    }
    dtypes = dict.fromkeys("qkv", dtype) | {
        "g": wide,
        "beta": _dtype(case.beta_dtype or case.dtype),
        "initial_state": wide,
    }
    names = INPUTS if case.initial_state else INPUTS[:-1]
    return Drawn(
        case,
        {name: _BASES[case.layout](name, values[name].to(dtypes[name])).to(device) for name in names},
        normal(B, T, HV, V).to(dtype).to(device),
        normal(case.N, HV, K, V).to(wide).to(device),
        _boundaries(case, device),
    )


def checked_cases(cases: Iterable[Case] | None) -> tuple[Case, ...] | None:
    """Cases that a user gave, looked at before the first of them runs.

    Args:
        cases: meant as cases, or None for those of the suite.

    Returns:
        The same.

    Raises:
        ValueError: something else.
    """
    if cases is None:
        return None
    found = tuple(cases) if isinstance(cases, Iterable) else (cases,)
    for case in found:
        if not isinstance(case, Case):
            raise ValueError(f"cases needs a sequence of Case objects or None, got {case!r:.80}")
    if not isinstance(cases, Iterable):
        raise ValueError(f"cases needs a sequence of Case objects, got one by itself: [{cases!r}]")
    return found


def _shown(value: object) -> str:
    """``repr``, a long repetition written as one."""
    if isinstance(value, tuple) and len(value) > 8:
        for period in range(1, len(value) // 3 + 1):
            times, rest = divmod(len(value), period)
            if not rest and value == value[:period] * times:
                return f"{value[:period]!r} * {times}"
    return repr(value)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), name
    return dtype


def _boundaries(case: Case, device: torch.device | str) -> Tensor | PackedSequences | None:
    if case.lengths is None:
        return None
    packed = PackedSequences.from_lengths(case.lengths)
    return packed if case.boundaries == "object" else packed.cu_seqlens(device, _dtype(case.boundaries))


def _directions(x: Tensor, case: Case) -> Tensor:
    """Unit vectors, as a delta rule needs them, unless the kernel is to normalise."""
    x = x / x.norm(dim=-1, keepdim=True)
    if not case.l2norm:
        return x
    sizes = [1.0, 1e-3, 0.0] if case.l2norm == "tiny" else [1.0, 20.0, 0.3]
    return x * torch.tensor(sizes, dtype=x.dtype)[torch.arange(x.shape[1]) % 3].view(1, -1, 1, 1)


def _mixed(u: Tensor) -> Tensor:
    """Any of these decays at any token (the values that broke exponentials elsewhere)."""
    return -torch.tensor([0.0, 1e-3, 0.1, 2.0, 27.6, 100.0, 1e4], dtype=u.dtype)[(u * 7).long()]


def _reset(u: Tensor) -> Tensor:
    """One token that forgets everything, nothing forgotten before and after."""
    g = torch.zeros_like(u)
    g[:, u.shape[1] // 2] = -90.0
    return g


_GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "none": torch.zeros_like,
    "usual": lambda u: -(10.0 ** (3 * u - 3)),  # log-uniform between -0.001 and -1
    "weak": lambda u: -1e-4 * u,
    "strong": lambda u: -2 - 28 * u,
    "mixed": _mixed,
    "reset": _reset,
}
_BETAS: dict[str, Callable[[Tensor], Tensor]] = {
    "usual": lambda u: 0.05 + 0.9 * u,
    "ones": torch.ones_like,
    "zeros": torch.zeros_like,
    "ends": lambda u: (3 * u - 1).clamp(0, 1),
}


def _strided_base(name: str, x: Tensor) -> Tensor:
    """Memory in another order than the view's, or with gaps that nobody may read or write."""
    if name == "q":
        return torch.nn.functional.pad(x, (1, 2), value=torch.nan)
    if name == "initial_state":
        return x.transpose(-1, -2).contiguous()
    if name == "k":
        return x.transpose(-1, -2).contiguous()
    return x.transpose(1, 2).contiguous()


def _strided_view(name: str, base: Tensor, case: Case) -> Tensor:
    if name == "q":
        return base[..., 1:-2]
    return base.transpose(-1, -2) if name in ("k", "initial_state") else base.transpose(1, 2)


def _expanded_base(name: str, x: Tensor) -> Tensor:
    """One value where the view shows many."""
    return {
        "q": x[:, :, :1],
        "k": x[:, :, :1],
        "v": x[..., :1],
        "g": x[:1, :1],
        "beta": x[..., :1],
        "initial_state": x[:1],
    }[name].contiguous()


def _expanded_view(name: str, base: Tensor, case: Case) -> Tensor:
    (B, T), (H, HV, K, V) = case.shape, case.heads
    shapes: dict[str, Sequence[int]] = {
        "q": (B, T, H, K),
        "k": (B, T, H, K),
        "v": (B, T, HV, V),
        "g": (B, T, HV),
        "beta": (B, T, HV),
        "initial_state": (case.N, HV, K, V),
    }
    return base.expand(*shapes[name])


_BASES: dict[str, Callable[[str, Tensor], Tensor]] = {
    "contiguous": lambda name, x: x.contiguous(),
    "strided": _strided_base,
    "expanded": _expanded_base,
}
_VIEWS: dict[str, Callable[[str, Tensor, Case], Tensor]] = {
    "contiguous": lambda name, base, case: base.view_as(base),
    "strided": _strided_view,
    "expanded": _expanded_view,
}
