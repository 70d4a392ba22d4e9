"""Which cases a kernel is asked: derived from what it declares, simple ones first, one feature more at a time."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator

import torch

from qwenlinear.kernels.base import GatedDeltaKernel
from qwenlinear.kernels.capabilities import Form, KernelCapabilities
from qwenlinear.testing.cases import Case
from qwenlinear.testing.limits import beyond

Heads = tuple[int, int, int, int]  # H, HV, K, V

LENGTHS = (1, 2, 63, 64, 65, 127, 300)
_SIZES = (16, 8, 64, 128, 32, 24, 1, 2, 3, 5, 48, 96, 100, 192, 256)
_FLOATS = ("float32", "bfloat16", "float16", "float64")


def head_configurations(capabilities: KernelCapabilities, device_type: str) -> tuple[Heads, ...]:
    """The head configurations that a kernel is tried with; one where each may cost a compilation.

    Args:
        capabilities: of the kernel.
        device_type: ``"cpu"`` tries every size that is declared out of a list of 15; elsewhere one, that of Qwen3.5.

    Returns:
        ``(H, HV, K, V)`` each: the first for single features, the second (or the only one) with head groups, then sizes alone.
    """
    keys, values = (_declared(s) for s in (capabilities.key_head_sizes, capabilities.value_head_sizes))
    if not keys or not values:
        raise ValueError(
            f"no head size to try: K in {keys}, V in {values} of {sorted(_SIZES)}; pass heads=[(H, HV, K, V)]"
        )
    if device_type != "cpu":
        return ((16, 32, 128 if 128 in keys else keys[0], 128 if 128 in values else values[0]),)
    plain = (2, 2, keys[0], values[0])
    grouped = (2, 6, keys[1 % len(keys)], values[-1 if len(values) < 3 else 2])
    if keys == values == list(_SIZES):
        grouped = (2, 6, 8, 4)
    rest = [(1, 1, keys[n % len(keys)], values[-n % len(values)]) for n in range(max(len(keys), len(values)))]
    return (plain, grouped, *rest)


def generate(
    kernel: GatedDeltaKernel,
    device_type: str,
    heads: tuple[Heads, ...] | None = None,
    packings: int = 1000,
    dtypes: Collection[str] | None = None,
) -> Iterator[Case]:
    """Every case that the suite asks of a kernel.

    Args:
        kernel: only its capabilities are looked at.
        device_type: where it will run.
        heads: configurations to try instead of the default ones.
        packings: how many random packings.
        dtypes: names of the only dtypes to try; default None for all that are declared.

    Yields:
        Cases within the declared capabilities.
    """
    capabilities = kernel.capabilities
    configurations = heads or head_configurations(capabilities, device_type)
    declared = [name for name in _FLOATS if getattr(torch, name) in capabilities.dtypes]
    tried = [name for name in declared if dtypes is None or name in dtypes]
    forms: list[Form] = [form for form in ("chunk", "step") if getattr(capabilities, form)]
    for dtype in tried:
        generators = [_Generator(capabilities, configurations, dtype, form) for form in forms]
        for generator in generators:
            yield from generator.all()
        for generator in generators if dtype == tried[0] else ():  # the long ones: what fails at all fails before them
            yield from generator.once(packings)


class _Generator:
    """Cases of one dtype and one form."""

    def __init__(self, capabilities: KernelCapabilities, heads: tuple[Heads, ...], dtype: str, form: Form) -> None:
        self.capabilities = capabilities
        self.base = Case("", dtype=dtype, form=form, heads=heads[0])
        self.plain, self.grouped, self.sizes = heads[0], heads[min(1, len(heads) - 1)], heads[2:]
        self.states = {"initial_state": capabilities.initial_state, "final_state": capabilities.final_state}
        self.backward = capabilities.backward if form == "chunk" else capabilities.step_backward

    @property
    def full(self) -> Case:
        """Everything that is declared, at once."""
        return self.base.but(heads=self.grouped, B=2, T=65, scale=0.7, **self.states, **self.gradients())

    def gradients(self) -> dict[str, str]:
        """All gradients that are declared."""
        if not self.backward:
            return {}
        return {"grad": "all"} if self.capabilities.state_backward else {"grad": "inputs", "loss": "output"}

    def all(self) -> Iterator[Case]:
        """The cases of every dtype."""
        yield self.base.but(topic="tolerances", check="tolerances")
        yield from self.features()
        yield from self.gradient_cases()
        full = self.full
        for T in LENGTHS:
            yield full.but(topic=f"length {T}", B=1 if T > 100 else 2, T=T)
        for gates in ("none", "weak", "strong", "mixed", "reset"):
            yield full.but(topic=f"gates {gates}", gates=gates, B=1, T=130)
        if self.capabilities.packed:
            yield from self.packed()
        for layout in ("strided", "expanded"):
            yield full.but(topic=f"{layout} inputs", layout=layout)
        yield full.but(topic="scratch memory filled with NaN", scratch=True, T=70)
        yield full.but(topic="repeated calls", check="repeat", T=100)
        yield full.but(topic="repeated calls without gradients", check="repeat", grad="", T=10)
        yield full.but(topic="sequences kept apart", check="isolation", B=3, T=40)
        if self.capabilities.initial_state and self.capabilities.final_state:
            yield from self.resumed()
            if self.base.form == "step":
                yield from self.in_place()

    def features(self) -> Iterator[Case]:
        """One feature at a time, so that the first failure says which."""
        bare = self.base.but(topic="delta rule alone", gates="none", beta="ones", scale=1.0)
        yield bare
        yield bare.but(topic="write strength beta", beta="usual")
        yield bare.but(topic="beta of 0 and 1", beta="ends")
        yield bare.but(topic="decay", gates="usual")
        yield bare.but(topic="scale", scale=0.37)
        yield bare.but(topic="default scale", scale=None)
        yield bare.but(topic="batch", B=3, gates="usual")
        yield self.base.but(topic="head groups", heads=self.grouped)
        yield self.base.but(topic="normalised q and k", l2norm=True)
        yield self.base.but(topic="normalised q and k near zero", l2norm="tiny", T=9)
        if self.capabilities.final_state:
            yield self.base.but(topic="final state", final_state=True)
            yield self.base.but(topic="final state of an unfilled chunk", final_state=True, T=70)
        if self.capabilities.initial_state:
            yield self.base.but(topic="initial state", initial_state=True)
            yield self.base.but(topic="no token", T=0, **self.states)
            yield self.base.but(
                topic="tokens that neither decay nor write", gates="none", beta="zeros", T=5, **self.states
            )
        other = "float32" if self.base.dtype in ("bfloat16", "float16") else "bfloat16"
        yield self.full.but(topic=f"beta in {other}", beta_dtype=other, grad="")
        yield self.full.but(topic="without gradients", mode="no_grad", grad="")
        yield self.full.but(topic="inference mode", mode="inference", grad="")

    def gradient_cases(self) -> Iterator[Case]:
        """Every gradient alone and all together, through the output and through the final state."""
        if not self.backward:
            return
        plain = self.base.but(heads=self.grouped, T=40, **self.gradients())
        for name in self.full.wanted:
            yield plain.but(topic=f"gradient of {name}", heads=self.plain, grad=name, **self.states)
        yield plain.but(topic="gradients without states")
        if self.capabilities.initial_state:
            yield plain.but(topic="gradients from an initial state alone", initial_state=True)
        yield plain.but(topic="gradients through the normalisation", l2norm=True, T=20)
        for beta_dtype in ("float32", "bfloat16"):
            if beta_dtype != self.base.dtype:
                yield plain.but(topic=f"gradients with beta in {beta_dtype}", beta_dtype=beta_dtype)
        if self.capabilities.final_state and self.capabilities.state_backward:
            yield plain.but(topic="gradients of the final state alone", final_state=True, loss="state")
            yield plain.but(topic="gradients of the output beside a final state", final_state=True, loss="output")

    def packed(self) -> Iterator[Case]:
        """Packed documents, with empty ones, many of them, and boundaries in every type."""
        full = self.full.but(B=1, T=64)
        yield self.base.but(topic="packed documents", lengths=(30, 34))
        yield full.but(topic="packed documents of odd lengths", lengths=(1, 63, 2, 65))
        yield full.but(topic="packed documents of whole chunks", lengths=(64, 128, 64))
        for missing in (name for name, there in self.states.items() if there):
            yield full.but(topic=f"packed documents without {missing}", lengths=(3, 0, 66, 9), **{missing: False})
        yield full.but(topic="packed single document", lengths=(50,))
        for words, lengths in (("first", (0, 9, 4)), ("between", (9, 0, 0, 4)), ("last", (9, 4, 0)), ("only", (0, 0))):
            yield full.but(topic=f"empty document {words}", lengths=lengths)
        for boundaries in ("int32", "int64"):
            yield full.but(topic=f"boundaries in {boundaries}", lengths=(5, 0, 12), boundaries=boundaries)
        yield full.but(topic="packed equals separate", check="separate", lengths=(3, 0, 70))
        grad = full.grad if self.capabilities.isolated_gradients else ""
        yield full.but(topic="packed documents kept apart", check="isolation", lengths=(20, 30, 70, 1), grad=grad)
        yield full.but(topic="boundaries rewritten in place", check="stale", lengths=(4, 6, 9), boundaries="int32")
        for layout in ("strided", "expanded"):
            yield full.but(topic=f"{layout} packed inputs", layout=layout, lengths=(5, 0, 70))
        everything = full.but(
            topic="everything at once", l2norm=True, layout="strided", boundaries="int64", gates="mixed"
        )
        yield everything.but(lengths=(66, 0, 7, 130), beta="ends")
        yield full.but(topic="packed, scratch memory filled with NaN", scratch=True, lengths=(5, 0, 70))
        yield full.but(topic="repeated packed calls", check="repeat", lengths=(5, 0, 70))

    def resumed(self) -> Iterator[Case]:
        """A sequence in several calls."""
        full = self.full if self.capabilities.state_backward else self.full.but(grad="", loss="both")
        for pieces in ((6, 3, 1), (64, 64), (1, 64, 5), (65, 1, 1)):
            yield full.but(topic=f"resumed after {pieces[0]} tokens", check="resume", T=sum(pieces), pieces=pieces)
        if self.capabilities.packed:
            lengths = (4, 0, 70, 1)
            yield full.but(topic="packed documents resumed", check="resume", B=1, lengths=lengths, pieces=(1, 1, 1))
        forms = self.capabilities.chunk and self.capabilities.step
        if forms and self.base.form == "chunk":
            grad = full.grad if self.capabilities.backward and self.capabilities.step_backward else ""
            yield full.but(topic="chunked, then step by step", check="handover", T=68, pieces=(65, 1, 1, 1), grad=grad)

    def in_place(self) -> Iterator[Case]:
        """Steps that overwrite their state, declared or lowered."""
        one = self.base.but(check="in_place", heads=self.grouped, B=2, T=1, l2norm=True, mode="no_grad", **self.states)
        yield one.but(topic="state in place")
        yield one.but(topic="state in place, call after call", T=5, pieces=(1, 1, 3))
        yield one.but(topic="state in place, strided", layout="strided")
        yield one.but(topic="state in place, no token", T=0)
        yield one.but(topic="state in place, inference mode", mode="inference")
        yield one.but(topic="state in place, scratch memory filled with NaN", scratch=True, T=3)
        if self.capabilities.packed:
            yield one.but(topic="state in place, packed documents", lengths=(1, 1, 1), B=1)
            yield one.but(topic="state in place, empty documents", lengths=(0, 1, 0, 3), B=1)
            yield one.but(topic="state in place, boundaries in int64", lengths=(2, 1), B=1, boundaries="int64")

    def once(self, packings: int) -> Iterator[Case]:
        """What does not depend on the dtype, asked with the first."""
        for H, HV, K, V in self.sizes:
            yield self.full.but(topic=f"head sizes K={K} V={V}", heads=(H, HV, K, V), T=70, B=1)
        if self.base.form == "chunk":
            yield self.full.but(topic="600 tokens", T=600, B=1)
            yield self.base.but(topic="33000 tokens", T=33_000, heads=self.plain, **self.states)
            if self.capabilities.packed:
                yield self.full.but(topic="300 packed documents", lengths=(1, 3, 0, 2) * 75, heads=self.plain)
            if self.capabilities.packed and packings:
                pool = tuple(
                    int(n) for n in torch.randint(0, 301, (24,), generator=torch.Generator("cpu").manual_seed(1))
                )
                random = self.base.but(
                    topic="random packings", check="packings", T=packings, lengths=(0, 1, 300, *pool)
                )
                yield random.but(heads=self.plain, **self.states, **self.gradients())
        if self.capabilities.compile_safe:
            yield self.full.but(topic="torch.compile", check="compiled", T=5)
        yield from beyond(self.capabilities, self.base)


def _declared(sizes: Container[int] | None) -> list[int]:
    return [size for size in _SIZES if sizes is None or size in sizes]
