"""The decay gate; it lives with the operators, which compute it."""

from qwenlinear.ops.gate import STRONGEST_LOG_DECAY, log_decay

__all__ = ["STRONGEST_LOG_DECAY", "log_decay"]
