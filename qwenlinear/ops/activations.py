"""The activations that a Gated DeltaNet may be configured with."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "sigmoid": F.sigmoid,
    "tanh": F.tanh,
}
"""What ``hidden_act`` may be: a subset of Transformers' ``ACT2FN``, the released models all say ``"silu"``."""
