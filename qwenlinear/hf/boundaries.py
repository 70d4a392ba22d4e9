"""Where packed documents begin in a call of a Transformers model, and how its Gated DeltaNet layers get to know.

A forward pre-hook on the text model reads the boundaries once a call and hands them on as one more keyword argument
that Transformers passes down like its own. Nothing is stored on the way: the argument is part of each layer's call, so
checkpointing repeats it, and nested calls and threads have their own. Releases whose decoder layers keep their keyword
arguments to themselves get them past it by a context variable that is set for the duration of one decoder layer's call.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from qwenlinear.kernels import PackedSequences

DOCUMENTS = "gated_delta_net_documents"
"""The keyword argument between the text model's hook and the layers."""

_READ = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx", DOCUMENTS)
_LOOKS_LIKE = ("cu_seq", "seq_idx", "seqlens", "packed", "segment_id", "document_id", "sequence_id")
_HANDED: ContextVar[Mapping[str, Any] | None] = ContextVar("qwenlinear_handed", default=None)


def documents_of_layer_call(
    kwargs: Mapping[str, Any], hidden_states: Tensor, passed_on: bool
) -> PackedSequences | None:
    """Boundaries that reached a layer.

    Args:
        kwargs: the layer's further keyword arguments.
        hidden_states: ``[B, T, C]``.
        passed_on: whether this release's decoder layer passes keyword arguments on.

    Returns:
        Documents of the flattened batch ``[B * T]``, or None for dense rows.

    Raises:
        ValueError: boundaries that contradict one another or do not fit, or an argument that looks like boundaries under
            a name that is not read.
    """
    given = kwargs if passed_on else {**(_HANDED.get() or {}), **kwargs}
    for name, value in given.items():
        if value is not None and name not in _READ and _looks_like(name):
            raise ValueError(
                f"{name} looks like boundaries of packed documents, which need to come as cu_seq_lens_q ([N+1] int32) or "
                "seq_idx ([B, T]); rename it, or leave it out"
            )
    documents = given.get(DOCUMENTS)
    if documents is None:
        return _explicit(given, hidden_states.shape[0], hidden_states.shape[1], hidden_states.device)
    if not isinstance(documents, PackedSequences) or documents.total_tokens != hidden_states[..., 0].numel():
        raise ValueError(
            f"{DOCUMENTS} needs a PackedSequences of {hidden_states[..., 0].numel()} tokens, got {documents!r}"
        )
    return documents


class DocumentsHook:
    """Forward pre-hook of a text model: reads the boundaries of its call once and hands them to the layers.

    Args:
        names: the names of the text model's positional arguments, in order.

    Attributes:
        handle: what removes the hook.
    """

    handle: Any

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def __call__(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        documents = documents_of_model_call(model, given)
        return None if documents is None else (args, {**kwargs, DOCUMENTS: documents})


class HandOverHooks:
    """Hooks around a decoder layer that does not pass keyword arguments on: its layers find them in the context."""

    handles: tuple[Any, ...]

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Make this call's boundaries known."""
        _HANDED.set({name: value for name, value in kwargs.items() if name in _READ or _looks_like(name)})

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Forget them, after an exception too."""
        _HANDED.set(None)


def documents_of_model_call(model: nn.Module, given: Mapping[str, Any]) -> PackedSequences | None:
    """Boundaries of a text model's call: explicit ones, else by Transformers' rule from its ``position_ids``.

    That rule (``find_packed_sequence_indices``): without a cache and without a 2-D mask, a document begins wherever a
    position is not its predecessor plus one. What looks like a boundary where the rule does not apply is refused.
    ``position_ids`` of three rows (time, height, width) say nothing about documents. On a GPU reading positions of more
    than one token synchronises once a call.

    Args:
        model: the text model.
        given: its arguments by name.

    Returns:
        Documents of the flattened batch ``[B * T]``, or None for dense rows.

    Raises:
        ValueError: boundaries that contradict one another, do not fit, or cannot be used with a cache or a mask.
    """
    tokens = given.get("input_ids") if given.get("input_ids") is not None else given.get("inputs_embeds")
    if not isinstance(tokens, Tensor) or tokens.dim() < 2:
        return None  # the model has its own words for that
    B, T = tokens.shape[:2]
    documents = _explicit(given, B, T, tokens.device)
    positions = _text_positions(given.get("position_ids"))
    if positions is None or T < 2 or positions.shape[-1] != T:
        return documents
    mask = given.get("attention_mask")
    if isinstance(mask, Mapping):
        mask = mask.get("linear_attention")
    padded = isinstance(mask, Tensor) and mask.dim() == 2
    cached = _uses_cache(model, given)
    if cached and isinstance(mask, Tensor) and not padded:
        return documents  # a prepared mask of a generation: what is padding in it cannot be told
    starts = _starts(positions.expand(B, -1), mask if padded else None)
    if len(starts) == B:
        return documents
    if documents is not None:
        _check_inside(starts, documents, T)
        return documents
    row, column = divmod(next(start for start in starts if start % T), T)
    where = f"position_ids of row {row} do not count up by one at token {column}, which looks like a packed document,"
    if padded:
        raise ValueError(
            f"{where} but a 2-D attention_mask came with them, and Transformers' attention then joins the documents; "
            "leave the mask out, or pass cu_seq_lens_q"
        )
    if cached:
        raise ValueError(
            f"{where} but the call uses a cache, and Transformers' attention then joins the documents; pass use_cache=False"
        )
    return PackedSequences.from_cu_seqlens([*starts, B * T], device=tokens.device)


def positional_names(module: nn.Module) -> tuple[str, ...]:
    """Names of a module's positional arguments, in order.

    Args:
        module: any module.

    Returns:
        The names, without self.
    """
    parameters = inspect.signature(type(module).forward).parameters.values()
    return tuple(p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD)[1:]


def _looks_like(name: str) -> bool:
    return any(part in name for part in _LOOKS_LIKE)


def _uses_cache(model: nn.Module, given: Mapping[str, Any]) -> bool:
    """Whether the text model's masks are made for a cache: given, or made by the model itself."""
    if given.get("cache") is not None or given.get("past_key_values") is not None:
        return True
    asked = given.get("use_cache")
    if asked is None:
        asked = getattr(model.config, "use_cache", False)
    checkpoints = getattr(model, "gradient_checkpointing", False) and model.training and torch.is_grad_enabled()
    return bool(asked) and not checkpoints


def _text_positions(position_ids: Any) -> Tensor | None:
    """``[B or 1, T]``: two-dimensional ids, or the text row of (text, time, height, width)."""
    if not isinstance(position_ids, Tensor):
        return None
    if position_ids.dim() == 3 and position_ids.shape[0] == 4:
        return position_ids[0]
    return position_ids if position_ids.dim() == 2 else None


def _starts(positions: Tensor, mask: Tensor | None) -> list[int]:
    """Where documents begin in the flattened batch: every row's first token, and every jump between real tokens."""
    jumps = positions.diff(dim=-1) != 1
    if mask is not None:
        real = mask[:, -positions.shape[1] :] != 0
        jumps = jumps & real[:, 1:] & real[:, :-1]
    first = torch.ones_like(jumps[:, :1])
    starts: list[int] = torch.cat([first, jumps], -1).flatten().nonzero().flatten().tolist()
    return starts


def _check_inside(starts: list[int], documents: PackedSequences, T: int) -> None:
    bounds = set(documents.bounds)
    stray = next((start for start in starts if start % T and start not in bounds), None)
    if stray is not None:
        raise ValueError(
            f"position_ids and the explicit boundaries need to agree: positions start again at token {stray}, which is no "
            f"boundary of {documents!r}"
        )


def _explicit(given: Mapping[str, Any], B: int, T: int, device: torch.device) -> PackedSequences | None:
    """Boundaries from ``cu_seq_lens_q`` and ``seq_idx``; both have to say the same."""
    cu, seq_idx = given.get("cu_seq_lens_q"), given.get("seq_idx")
    if cu is None and seq_idx is None:
        if given.get("cu_seq_lens_k") is not None:
            raise ValueError("cu_seq_lens_k needs cu_seq_lens_q beside it, got it alone")
        return None
    documents = None
    if cu is not None:
        documents = PackedSequences.from_cu_seqlens(cu.flatten() if isinstance(cu, Tensor) else cu, device=device)
        if documents.total_tokens != B * T:
            raise ValueError(f"cu_seq_lens_q needs to end at B * T = {B * T}, got {documents.total_tokens}")
    if seq_idx is None:
        return documents
    if not isinstance(seq_idx, Tensor) or tuple(seq_idx.shape) != (B, T):
        raise ValueError(f"seq_idx needs shape [{B}, {T}], got {getattr(seq_idx, 'shape', type(seq_idx).__name__)}")
    if T == 0 or B == 0:
        return documents
    if int(seq_idx.min()) < 0:
        raise ValueError("seq_idx needs a document for each token, got a negative index; drop the padding")
    changes = torch.ones_like(seq_idx, dtype=torch.bool)
    changes[:, 1:] = seq_idx.diff(dim=-1) != 0
    starts = changes.flatten().nonzero().flatten().tolist()
    if documents is None:
        return PackedSequences.from_cu_seqlens([*starts, B * T], device=device)
    rows = set(range(0, B * T + 1, T))
    if set(starts) - rows != set(documents.bounds) - rows:
        raise ValueError(
            f"cu_seq_lens_q and seq_idx need to name the same documents, got {documents!r} and starts {starts}"
        )
    return documents
