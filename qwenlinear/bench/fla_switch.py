"""FLA_FLASH_QLA, which flash-linear-attention reads at every call: whether its dispatcher may hand a call to FlashQLA."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

SWITCH = "FLA_FLASH_QLA"


@contextlib.contextmanager
def fla_switch(value: str | None) -> Iterator[None]:
    """Set the switch, or clear it, and put it back afterwards.

    Args:
        value: ``"0"`` keeps FLA's own kernels; None clears it, which is how FLA comes.
    """
    before = os.environ.pop(SWITCH, None)
    if value is not None:
        os.environ[SWITCH] = value
    try:
        yield
    finally:
        os.environ.pop(SWITCH, None)
        if before is not None:
            os.environ[SWITCH] = before
