"""Hypothesis strategies: cases that nobody has thought of. Using this module needs `hypothesis`, importing it does not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from qwenlinear.kernels.base import GatedDeltaKernel
from qwenlinear.kernels.capabilities import Form
from qwenlinear.testing.cases import Case
from qwenlinear.testing.generate import Heads, head_configurations

if TYPE_CHECKING:
    from hypothesis import strategies as st


def kernel_cases(
    kernel: GatedDeltaKernel, device_type: str = "cpu", heads: Sequence[Heads] | None = None
) -> st.SearchStrategy[Case]:
    """Cases within a kernel's declared capabilities, of any shape, dtype, layout, gates and packing.

    Args:
        kernel: only its capabilities are looked at.
        device_type: ``"cpu"`` draws head counts and sizes, elsewhere they come from ``heads``.
        heads: head configurations to draw from; default None for those of ``check_kernel``.

    Returns:
        The strategy; a failing case shrinks to a short, unpacked, contiguous one.

    Example:
        >>> from hypothesis import given
        >>> from qwenlinear import TorchKernel
        >>> @given(kernel_cases(TorchKernel()))
        ... def test_values(case):
        ...     check_kernel(TorchKernel(), cases=[case])
    """
    from hypothesis import strategies as st

    capabilities = kernel.capabilities
    configurations = list(heads or head_configurations(capabilities, device_type))
    dtypes = [
        name for name in ("float32", "bfloat16", "float16", "float64") if getattr(torch, name) in capabilities.dtypes
    ]
    forms: list[Form] = [form for form in ("chunk", "step") if getattr(capabilities, form)]

    @st.composite
    def cases(draw: st.DrawFn) -> Case:
        form: Form = draw(st.sampled_from(forms))
        shape: Heads = draw(st.sampled_from(configurations))
        if device_type == "cpu" and heads is None:
            H, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
            shape = (H, H * group, *shape[2:])
        backward = capabilities.backward if form == "chunk" else capabilities.step_backward
        grad, loss = "", "both"
        if backward and draw(st.booleans()):
            grad, loss = ("all", "both") if capabilities.state_backward else ("inputs", "output")
        lengths = None
        if capabilities.packed:
            lengths = draw(st.none() | st.lists(st.integers(0, 140), min_size=1, max_size=6).map(tuple))
        return Case(
            "drawn by Hypothesis",
            check=draw(st.sampled_from(["values", "repeat"])),
            dtype=draw(st.sampled_from(dtypes)),
            form=form,
            B=1 if lengths else draw(st.integers(1, 3)),
            T=64 if lengths else draw(st.integers(0, 200)),
            heads=shape,
            lengths=lengths,
            boundaries=draw(st.sampled_from(["object", "int32", "int64"])) if lengths else "object",
            gates=draw(st.sampled_from(["usual", "none", "weak", "strong", "mixed", "reset"])),
            beta=draw(st.sampled_from(["usual", "ones", "zeros", "ends"])),
            scale=draw(st.none() | st.sampled_from([1.0, 0.125, 3.0])),
            initial_state=capabilities.initial_state and draw(st.booleans()),
            final_state=capabilities.final_state and draw(st.booleans()),
            l2norm=draw(st.booleans()),
            layout=draw(st.sampled_from(["contiguous", "strided", "expanded"])),
            scratch=draw(st.booleans()),
            seed=draw(st.integers(0, 3)),
            grad=grad,
            loss=loss,
        )

    return cases()
