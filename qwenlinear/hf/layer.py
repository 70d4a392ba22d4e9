"""The forward that takes the place of a Transformers layer's, on the layer's own modules and parameters.

An injected module stays the object that it was; only its class becomes a subclass of its class, so a hook that was laid
around it before or is laid later, a copy and a pickle all find the injected forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qwenlinear.hf.boundaries import documents_of_layer_call
from qwenlinear.hf.states import last_columns, read_states, write_states, writing
from qwenlinear.kernels import GatedDeltaKernel, PackedSequences
from qwenlinear.kernels.precision import autocast_enabled, without_autocast
from qwenlinear.kernels.writable import why_not_writable
from qwenlinear.layers.call import state_dtype
from qwenlinear.layers.config import GatedDeltaNetConfig
from qwenlinear.layers.explain import describe
from qwenlinear.layers.mixing import MixingWeights, check_step, decode_in_place, prepare, recur, why_norm_is_called
from qwenlinear.layers.padding import real_tokens
from qwenlinear.layers.plain import why_not_plain
from qwenlinear.layers.projection import project
from qwenlinear.layers.token import project_output, project_token
from qwenlinear.ops import epilogue


@dataclass
class Injection:
    """What an injected module carries besides its own attributes.

    Args:
        kernel: what computes the recurrence; replaced by a second injection.
        config: the layer's sizes.
        original: the module's class before.
        passed_on: whether this release's decoder layer passes keyword arguments on to the layer.
    """

    kernel: GatedDeltaKernel
    config: GatedDeltaNetConfig
    original: type[nn.Module]
    passed_on: bool


class InjectedForward:
    """Mixed in before a Transformers Gated DeltaNet class; :func:`injected_class` makes the mixture."""

    _qwenlinear: Injection

    def forward(
        self,
        hidden_states: Tensor,
        cache: Any = None,
        attention_mask: Tensor | None = None,
        cache_params: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        """Transformers' call. Padding, caches and results are what they are in Transformers.

        Args:
            hidden_states: ``[B, T, hidden_size]``.
            cache: a Transformers ``Cache``, gone on from and updated; default None.
            attention_mask: ``[B, T or longer]``, nonzero for real tokens; padding is zeroed before the layer, so it lies at
                the left of sequences that start here. Default None.
            cache_params: the older name of ``cache``.
            **kwargs: Transformers' further arguments, of which ``cu_seq_lens_q`` and ``seq_idx`` concern this layer; an
                unread one that looks like boundaries is refused.

        Returns:
            ``[B, T, hidden_size]``.

        Raises:
            ValueError: an argument that does not fit, or boundaries with a cache or with padding.
            UnsupportedCall: the kernel refuses the call. After any error the cache is unchanged, or, where its states were
                being written, refuses further calls until it is reset.
        """
        if cache is not None and cache_params is not None:
            raise ValueError("cache and cache_params need to come one without the other, got both")
        cache = cache if cache is not None else cache_params
        packed = documents_of_layer_call(kwargs, hidden_states, self._qwenlinear.passed_on)
        if packed is not None:
            _check_packed(packed, cache, attention_mask)
        shape = hidden_states.shape
        if attention_mask is not None:
            padding = ~real_tokens(attention_mask, hidden_states)
            hidden_states = hidden_states.masked_fill(padding[..., None], 0.0)
        if packed is not None and shape[0] != 1:
            hidden_states = hidden_states.reshape(1, -1, shape[2])
        if packed is not None and packed.num_sequences == 1:
            packed = None
        output = _mix(self, self._qwenlinear, hidden_states, cache, packed)
        return output.view(*shape[:2], -1)

    def extra_repr(self) -> str:
        return f"kernel={self._qwenlinear.kernel!r}\n{describe(self, self._qwenlinear.config)}"

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:  # this class has no importable name
        return _new, (self._qwenlinear.original,), self.__dict__.copy()


_CLASSES: dict[type[Any], type[Any]] = {}  # made once each, so that equal modules have one class


def injected_class(original: type[nn.Module]) -> type[nn.Module]:
    """The class of injected modules that were of another class; under that one's name.

    Args:
        original: a Transformers Gated DeltaNet class, or a subclass of one.

    Returns:
        A subclass of it, the same at every call.
    """
    if original not in _CLASSES:
        names = {"__module__": original.__module__, "__qualname__": original.__qualname__, "__doc__": original.__doc__}
        _CLASSES.setdefault(original, type(original.__name__, (InjectedForward, original), names))
    return _CLASSES[original]


def injection_of(module: nn.Module) -> Injection | None:
    """What an injected module carries.

    Args:
        module: any module.

    Returns:
        Its injection, or None where there is none.
    """
    return module._qwenlinear if isinstance(module, InjectedForward) else None


def _new(original: type[nn.Module]) -> nn.Module:
    cls = injected_class(original)
    return object.__new__(cls)


def _check_packed(packed: PackedSequences, cache: Any, attention_mask: Tensor | None) -> None:
    if attention_mask is not None:
        raise ValueError(
            "attention_mask and boundaries of packed documents need to come one without the other, got both: packed "
            "documents have no padding"
        )
    if cache is not None and packed.num_sequences > 1:
        raise ValueError(
            f"boundaries of {packed.num_sequences} packed documents need a call without a cache, whose rows are not "
            "documents; pass use_cache=False"
        )


def _mix(layer: Any, injection: Injection, x: Tensor, cache: Any, packed: PackedSequences | None) -> Tensor:
    """Project, prologue, kernel, epilogue, project; then write the cache."""
    c, kernel, width = injection.config, injection.kernel, injection.config.linear_conv_kernel_dim
    past, recurrent_state = (None, None) if cache is None else read_states(cache, layer.layer_idx)
    past = last_columns(past, width - 1)
    if past is not None and recurrent_state is not None and _in_place(layer, kernel, x, recurrent_state):
        return _decode(layer, injection, x, cache, past, recurrent_state)
    parts = project(layer, c, x)
    gate, columns = parts.z, None if cache is None else parts.qkv
    with without_autocast(x.device), _hooks_fired(layer.conv1d):
        given, _ = prepare(c, parts, _weights(layer), past, packed=packed)
        del parts  # nobody but a cache needs q, k and v as projected any more
        initial = None if recurrent_state is None else recurrent_state.to(state_dtype(given.q.dtype))
        decodes = cache is not None and x.shape[1] == 1
        o, final_state = recur(kernel, given, initial, cache is not None, packed, decodes)
        del given
    z = gate()
    with without_autocast(x.device):
        o = _normed(layer, o, z, c.rms_norm_eps)
    output: Tensor = layer.out_proj(o.flatten(2))
    if cache is not None:
        assert final_state is not None
        assert columns is not None
        write_states(cache, layer.layer_idx, columns, past, final_state, width)
    return output


def _in_place(layer: Any, kernel: GatedDeltaKernel, x: Tensor, recurrent_state: Tensor) -> bool:
    """Whether a call decodes one token and may write the recurrent state where the cache has it; all that follows the write
    is plain, so that it fails only where memory or the device does."""
    return (
        x.shape[1] == 1
        and not torch.is_grad_enabled()
        and kernel.capabilities.step
        and (kernel.capabilities.compile_safe or not torch.compiler.is_compiling())
        and recurrent_state.dtype == state_dtype(layer.out_proj.weight.dtype)
        and recurrent_state.device == x.device
        and not recurrent_state.requires_grad
        and why_not_writable("the cache's recurrent state", recurrent_state) is None
        and not autocast_enabled(x.device)
        and why_norm_is_called(layer.norm) is None
        and why_not_plain(layer.out_proj, nn.Linear) is None
    )


def _decode(layer: Any, injection: Injection, x: Tensor, cache: Any, past: Tensor, recurrent_state: Tensor) -> Tensor:
    """One token: the recurrent state is written in place; the convolution's goes through the cache's own method."""
    c, kernel = injection.config, injection.kernel
    token = project_token(layer, c, x)
    weights = _weights(layer)
    check_step(c, kernel, token, weights, recurrent_state)
    with writing(cache, layer.layer_idx):
        with _hooks_fired(layer.conv1d):
            state = past.to(token.q.dtype, copy=True, memory_format=torch.contiguous_format)
            o = decode_in_place(c, kernel, token, weights, state, recurrent_state)
            o = epilogue(o.view_as(token.z), token.z, layer.norm.weight, c.rms_norm_eps)
        output = project_output(layer, o.flatten(2))
        newest = state[..., -1:].transpose(1, 2)
        write_states(cache, layer.layer_idx, newest, past, recurrent_state, c.linear_conv_kernel_dim)
    return output


def _normed(layer: Any, o: Tensor, z: Tensor, eps: float) -> Tensor:
    """The gated norm; a norm with hooks, or another one in its place, is called as Transformers calls it."""
    if why_norm_is_called(layer.norm) is None:
        return epilogue(o, z, layer.norm.weight, eps)
    y: Tensor = layer.norm(*(x.reshape(-1, o.shape[-1]) for x in (o, z)))
    return y.view(o.shape)


def _weights(layer: Any) -> MixingWeights:
    return MixingWeights(_weight(layer.conv1d), layer.A_log, layer.dt_bias)


def _weight(conv1d: nn.Module) -> Tensor:
    if not isinstance(conv1d, nn.Conv1d):
        raise ValueError(
            f"conv1d needs to stay an nn.Conv1d, whose weight the layer reads, got {type(conv1d).__name__}: an adapter on it "
            "would be dropped; take conv1d out of the adapter's target modules"
        )
    return conv1d.weight


@contextmanager
def _hooks_fired(*modules: nn.Module) -> Iterator[None]:
    """Accelerate's hooks of modules whose weights are read without calling them, so that offloaded weights are there."""
    hooked = [(module, hook) for module in modules if (hook := getattr(module, "_hf_hook", None)) is not None]
    for module, hook in hooked:
        hook.pre_forward(module)
    yield
    for module, hook in reversed(hooked):
        hook.post_forward(module, ())
