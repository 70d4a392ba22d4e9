"""What a captured call holds on to."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext

import torch

from qwenlinear.bench.timing import captured


def test_a_captured_call_keeps_its_tensors(mocker) -> None:
    """A CUDA graph owns none of the memory that it reads; freed, somebody else's numbers would be there at a replay."""
    cuda = mocker.patch("qwenlinear.bench.timing.torch.cuda")
    cuda.stream.return_value = cuda.graph.return_value = nullcontext()
    calls = []

    def made() -> tuple[object, weakref.ref]:
        tensor = torch.ones(3)

        def call() -> None:
            calls.append(float(tensor.sum()))

        return captured(call), weakref.ref(tensor)

    replay, tensor = made()
    gc.collect()
    assert calls == [3.0] * 4  # three to warm up, one that is captured
    assert tensor() is not None
    replay()
    cuda.CUDAGraph.return_value.replay.assert_called_once_with()
    assert calls == [3.0] * 4
    del replay
    gc.collect()
    assert tensor() is None  # and no longer than itself
