"""The conformance suite on a GPU: every kernel, and both layers on each. A kernel that the machine lacks is skipped.

``python -m qwenlinear.testing --kernels torch,fla,flashqla --device cuda`` writes the whole report, with the worst errors.
"""

from __future__ import annotations

import pytest
import torch

from qwenlinear import AutoKernel, FLAKernel, FlashQLAKernel, TorchKernel, TritonKernel, UnsupportedCall
from qwenlinear.layers import GatedDeltaNetConfig, Qwen3_5GatedDeltaNet, Qwen3NextGatedDeltaNet
from qwenlinear.testing import check_kernel, check_layer

pytestmark = pytest.mark.gpu

KERNELS = [TorchKernel(), FLAKernel(), FlashQLAKernel(), AutoKernel()]
STEPS = [TritonKernel()]  # no chunked form: a layer needs another beside it


def require(kernel) -> None:
    try:
        kernel.require("cuda")
    except UnsupportedCall as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("kernel", KERNELS + STEPS, ids=repr)
def test_kernel(kernel) -> None:
    require(kernel)
    report = check_kernel(kernel, "cuda", first_failure=False, packings=200)
    print(report.table())
    assert report.passed


@pytest.mark.parametrize("kernel", KERNELS, ids=repr)
@pytest.mark.parametrize("layer_class", [Qwen3NextGatedDeltaNet, Qwen3_5GatedDeltaNet])
def test_layer(layer_class, kernel) -> None:
    require(kernel)
    torch.manual_seed(0)
    layer = layer_class(GatedDeltaNetConfig(hidden_size=256), kernel).to("cuda", torch.bfloat16)
    report = check_layer(layer, first_failure=False)
    print(report.table())
    assert report.passed
