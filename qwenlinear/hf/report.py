"""What an injection did, layer by layer, to print."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerReport:
    """One Gated DeltaNet layer of a model.

    Args:
        name: the module's name in the model.
        kind: its class.
        kernel: the kernel's ``repr``, or None where the layer was left as it was.
        reason: why it was left, or what to know about it; empty for nothing.
    """

    name: str
    kind: str
    kernel: str | None
    reason: str = ""


@dataclass(frozen=True)
class InjectionReport:
    """The layers of a model and what computes them now.

    Args:
        layers: every Gated DeltaNet layer found, in the model's order.
        notes: what concerns all of them.

    Example:
        >>> print(InjectionReport((LayerReport("model.layers.0.linear_attn", "Qwen3_5GatedDeltaNet", "TorchKernel()"),)))
        1 of 1 Gated DeltaNet layers computes with an injected kernel
          model.layers.0.linear_attn  Qwen3_5GatedDeltaNet  TorchKernel()
    """

    layers: tuple[LayerReport, ...]
    notes: tuple[str, ...] = ()

    @property
    def injected(self) -> tuple[LayerReport, ...]:
        """The layers that compute with qwenlinear."""
        return tuple(layer for layer in self.layers if layer.kernel is not None)

    @property
    def left(self) -> tuple[LayerReport, ...]:
        """The layers that were left as they were, with reasons."""
        return tuple(layer for layer in self.layers if layer.kernel is None)

    def __str__(self) -> str:
        done = len(self.injected)
        verb = "computes" if done == 1 else "compute"
        rows = [
            (layer.name, layer.kind, layer.kernel or "not injected") + ((layer.reason,) if layer.reason else ())
            for layer in self.layers
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(2)] if rows else [0, 0]
        lines = [f"{done} of {len(rows)} Gated DeltaNet layers {verb} with an injected kernel"]
        for name, kind, kernel, *reason in rows:
            lines.append(
                "  ".join(
                    ["", name.ljust(widths[0]), kind.ljust(widths[1]), kernel + "".join(f": {r}" for r in reason)]
                )
            )
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])
