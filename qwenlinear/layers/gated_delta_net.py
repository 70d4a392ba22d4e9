"""GatedDeltaNet: the layer of Qwen3-Next and Qwen3.5, with the kernel of its recurrence injected.

Parameters carry Transformers' names, shapes and order, so a checkpoint loads by name. The two models differ in how the
input projections are laid out, which is all that the two subclasses say.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from qwenlinear.kernels import AutoKernel, GatedDeltaKernel, PackedSequences
from qwenlinear.kernels.precision import autocast_enabled, without_autocast
from qwenlinear.layers.cache import GatedDeltaNetCache
from qwenlinear.layers.call import LayerCall, check_input, state_dtype
from qwenlinear.layers.config import GatedDeltaNetConfig
from qwenlinear.layers.explain import describe, explain_layer
from qwenlinear.layers.gated_norm import GatedRMSNorm
from qwenlinear.layers.mixing import (
    KernelArguments,
    MixingWeights,
    check_step,
    decode_in_place,
    prepare,
    recur,
)
from qwenlinear.layers.plain import why_not_plain
from qwenlinear.layers.projection import Projected, project
from qwenlinear.layers.short_conv import ShortConvolution
from qwenlinear.layers.token import project_output, project_token
from qwenlinear.ops import epilogue
from qwenlinear.ops.gate import log_decay


class GatedDeltaNet(nn.Module, ABC):
    """A Gated DeltaNet layer (Yang et al., "Gated Delta Networks", arXiv:2412.06464), abstract in its projections.

    project -> short convolution over q, k, v -> gated delta rule -> gated RMS norm -> project. On a GPU what
    lies around the kernel are fused operators, the input projections too where their modules are plain ``nn.Linear``; `repr`
    and :meth:`explain` say what runs, and why not that.

    ``A_log`` and ``dt_bias`` stay float32 (or float64) through every cast, so ``layer.to(torch.bfloat16)`` is safe.
    Nothing but :meth:`reset_parameters` initialises, so loading is never undone.

    Args:
        config: a :class:`GatedDeltaNetConfig`, a Transformers config (nested ``text_config`` too), or a mapping of one.
        kernel: what computes the recurrence; default None for ``AutoKernel()``.

    Raises:
        ValueError: a config or a kernel that is none.
    """

    kernel: GatedDeltaKernel
    conv1d: ShortConvolution
    norm: GatedRMSNorm
    out_proj: nn.Linear

    def __init__(self, config: object, kernel: GatedDeltaKernel | None = None) -> None:
        super().__init__()
        if kernel is not None and not isinstance(kernel, GatedDeltaKernel):
            raise ValueError(
                f"kernel needs a GatedDeltaKernel or None, got {kernel!r}; kernel_from_name makes one from a name"
            )
        self.config = GatedDeltaNetConfig.from_config(config)
        self.kernel = kernel if kernel is not None else AutoKernel()
        wide = torch.promote_types(torch.get_default_dtype(), torch.float32)
        HV = self.config.linear_num_value_heads
        self.dt_bias = nn.Parameter(torch.empty(HV, dtype=wide))
        self.A_log = nn.Parameter(torch.empty(HV, dtype=wide))
        self._add_modules()
        self._reset_gate()

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "kernel" and not isinstance(value, GatedDeltaKernel):
            raise ValueError(f"kernel needs a GatedDeltaKernel, got {value!r}; kernel_from_name makes one from a name")
        super().__setattr__(name, value)

    # ---- what a layout says ----------------------------------------------------------------------------------------

    @abstractmethod
    def _add_modules(self) -> None:
        """Add the submodules in Transformers' order: `_add_convolution`, `_add_output`, and the input projections."""

    def _add_convolution(self) -> None:
        c = self.config
        self.conv1d = ShortConvolution(c.conv_dim, c.linear_conv_kernel_dim, c.hidden_act)

    def _add_output(self) -> None:
        c = self.config
        self.norm = GatedRMSNorm(c.linear_value_head_dim, c.rms_norm_eps)
        self.out_proj = nn.Linear(c.value_dim, c.hidden_size, bias=False)

    def _add_projection(self, name: str, rows: int) -> None:
        self.add_module(name, nn.Linear(self.config.hidden_size, rows, bias=False))

    # ---- run -------------------------------------------------------------------------------------------------------

    def forward(
        self,
        hidden_states: Tensor,
        cu_seqlens: Tensor | PackedSequences | None = None,
        cache: GatedDeltaNetCache | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Mix the tokens of each sequence, causally.

        Args:
            hidden_states: ``[B, T, hidden_size]`` in the weights' dtype (any under autocast); T may be 0.
            cu_seqlens: ``[N+1]`` int32 or int64 boundaries of packed documents, or a :class:`PackedSequences` (B must
                be 1); default None. A tensor on a GPU costs one synchronisation a call.
            cache: goes on from its states and leaves the new ones there; default None for sequences that start and end
                here. One token without gradients runs the kernel's recurrent form where it declares one, and writes the
                states in place (:class:`GatedDeltaNetCache`).
            attention_mask: ``[B, T or longer]`` any dtype, nonzero for real tokens, the last T columns count; default
                None. Padding may lie at the left, the right, or fill a row, not between real tokens (checked on the CPU);
                its output is zero. Not with ``cu_seqlens``.

        Returns:
            ``[B, T, hidden_size]``.

        Raises:
            ValueError: an argument that does not fit; ``attention_mask`` together with ``cu_seqlens``.
            UnsupportedCall: the kernel refuses the call. After any error the cache is unchanged, or refuses further calls
                where its states were being written in place.
        """
        call = self._prepare(hidden_states, cu_seqlens, cache, attention_mask)
        if cache is not None and self._why_not_in_place(hidden_states, call, cache) is None:
            return self._decode_in_place(hidden_states, cache)
        padding, cached = call.padding, cache is not None
        if padding is not None:
            hidden_states = padding.align(hidden_states)
        parts = self._project(hidden_states)
        gate = parts.z
        with without_autocast(hidden_states.device):  # states, gates and norms stay float32: only projections are cast
            given, conv_state = self._prepare_kernel(parts, call, cached)
            del parts  # nobody needs q, k and v as projected any more
            o, recurrent_state = recur(self.kernel, given, call.recurrent_state, cached, call.packed, call.decodes)
            del given
        z = gate()
        with without_autocast(hidden_states.device):
            o = self.norm(o, z)
        output: Tensor = self.out_proj(o.flatten(2))
        if padding is not None:
            output = padding.restore(output)
        if cache is not None:
            cache.store(self, conv_state, recurrent_state)
        return output

    def _project(self, hidden_states: Tensor) -> Projected:
        return project(self, self.config, hidden_states)

    def _prepare_kernel(self, parts: Projected, call: LayerCall, cached: bool) -> tuple[KernelArguments, Tensor | None]:
        """The fused prologue reads the convolution's weight; a convolution that is more than its weight is called."""
        c = self.config
        if why_not_plain(self.conv1d, ShortConvolution) is None:
            return prepare(c, parts, self._weights(), call.conv_state, cached, call.packed, call.padding)
        mixed, conv_state = self.conv1d(
            parts.qkv,
            initial_state=call.conv_state,
            output_final_state=cached,
            cu_seqlens=call.packed,
            lengths=None if call.padding is None else call.padding.lengths,
        )
        q, k, v = torch.split(mixed, [c.key_dim, c.key_dim, c.value_dim], -1)
        q, k = (x.unflatten(-1, (c.linear_num_key_heads, c.linear_key_head_dim)) for x in (q, k))
        v = v.unflatten(-1, (c.linear_num_value_heads, c.linear_value_head_dim))
        g, beta = log_decay(parts.a, self.A_log, self.dt_bias).to(state_dtype(q.dtype)), parts.b.sigmoid()
        if call.padding is not None:
            g, beta = call.padding.fill(g), call.padding.fill(beta)
        return KernelArguments(q, k, v, g, beta, False), conv_state

    def _decode_in_place(self, hidden_states: Tensor, cache: GatedDeltaNetCache) -> Tensor:
        conv_state, recurrent_state = cache.conv_state, cache.recurrent_state
        assert conv_state is not None
        assert recurrent_state is not None
        config, kernel, weights = self.config, self.kernel, self._weights()
        token = project_token(self, config, hidden_states)
        cache.agreed(kernel, token.q.dtype, lambda: check_step(config, kernel, token, weights, recurrent_state))
        with cache.writing():
            with without_autocast(hidden_states.device):
                o = decode_in_place(config, kernel, token, weights, conv_state, recurrent_state).view_as(token.z)
                norm = self.norm
                o = epilogue(o, token.z, norm.weight, norm.eps)
            return project_output(self, o.flatten(2))

    def _weights(self) -> MixingWeights:
        return MixingWeights(self.conv1d.weight, self.A_log, self.dt_bias)

    def _why_not_in_place(self, hidden_states: Tensor, call: LayerCall, cache: GatedDeltaNetCache) -> str | None:
        """Why a call leaves new states instead of writing over the old ones, in words."""
        if not call.decodes or call.packed is not None or call.padding is not None:
            return "that is for one token a sequence, dense and without a mask"
        if not self.kernel.capabilities.step:
            return "the kernel has no recurrent form"
        if torch.compiler.is_compiling() and not self.kernel.capabilities.compile_safe:
            return "compiled code leaves its graph for this kernel"
        if (reason := cache.why_not_in_place()) is not None:
            return reason
        if torch.is_grad_enabled() and any(t.requires_grad for t in (hidden_states, *self.parameters())):
            return "gradients are needed"
        assert cache.conv_state is not None
        if cache.conv_state.dtype != self._dtype(hidden_states):
            return f"cache.conv_state is {cache.conv_state.dtype}"
        modules = {"conv1d": ShortConvolution, "norm": GatedRMSNorm, "out_proj": nn.Linear}
        for name, kind in modules.items():  # what could raise after the states were written
            if (reason := why_not_plain(getattr(self, name), kind)) is not None:
                return f"{name} {reason}"
        return None

    def _dtype(self, hidden_states: Tensor) -> torch.dtype:
        """What the projections return."""
        device, dtype = hidden_states.device, hidden_states.dtype
        cast = autocast_enabled(device) and dtype != torch.float64
        return torch.get_autocast_dtype(device.type) if cast else dtype

    def explain(
        self,
        hidden_states: Tensor,
        cu_seqlens: Tensor | PackedSequences | None = None,
        cache: GatedDeltaNetCache | None = None,
        attention_mask: Tensor | None = None,
    ) -> str:
        """What a call with these arguments would run, in words, and why not what is faster. Nothing is computed.

        Args: those of the call itself.

        Returns:
            A few lines to print: projections, prologue, epilogue, padding, the kernel's form, and the kernel.

        Raises:
            ValueError: an argument that does not fit.
        """
        call = self._prepare(hidden_states, cu_seqlens, cache, attention_mask)
        return explain_layer(self, hidden_states, call, cache)

    def extra_repr(self) -> str:
        c = self.config
        heads = f"heads={c.linear_num_key_heads}/{c.linear_num_value_heads}"
        sizes = f"{c.linear_key_head_dim}/{c.linear_value_head_dim}"
        return f"hidden_size={c.hidden_size}, {heads} x {sizes}, kernel={self.kernel!r}\n{describe(self, c)}"

    def _prepare(
        self,
        hidden_states: Tensor,
        cu_seqlens: Tensor | PackedSequences | None,
        cache: GatedDeltaNetCache | None,
        attention_mask: Tensor | None,
    ) -> LayerCall:
        """Check everything before anything runs."""
        check_input(self.config, hidden_states, cache)
        device = self.A_log.device
        if hidden_states.device != device:
            raise ValueError(f"hidden_states needs the layer's device {device}, got {hidden_states.device}")
        call = LayerCall.check(self.config, hidden_states, cu_seqlens, cache, attention_mask)
        if cache is not None:
            cache.check_layer(self)
        if type(self.out_proj) is nn.Linear:  # an adapter in its place casts as it likes
            weights = self.out_proj.weight.dtype
            if hidden_states.dtype != weights and not autocast_enabled(hidden_states.device):
                raise ValueError(
                    f"hidden_states needs the weights' dtype {weights}, or autocast; got {hidden_states.dtype}"
                )
        return call

    # ---- parameters ------------------------------------------------------------------------------------------------

    def reset_parameters(self) -> None:
        """Redraw every parameter: linear and convolution weights as PyTorch does by default, norms to one, the gate as
        Transformers does (A uniform in 0.01 .. 16, dt_bias one), in float32 at least."""
        for module in self.children():
            module.reset_parameters()  # type: ignore[operator]
        self._reset_gate()

    @torch.no_grad()
    def _reset_gate(self) -> None:
        self.dt_bias.fill_(1.0)
        self.A_log.uniform_(0.01, 16.0).log_()  # from 0 it would be -inf

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> GatedDeltaNet:
        """`to`, `half`, `bfloat16`, ...: the layer's own two parameters follow to a device, not below float32."""

        def keep_wide(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if moved.is_floating_point() and moved.dtype.itemsize < 4:
                return tensor.to(moved.device)
            return moved

        if recurse:
            for module in self.children():
                module._apply(fn)
        super()._apply(keep_wide, recurse=False)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """With ``assign=True`` a checkpoint's tensors take the parameters' place: these two not below float32."""
        super()._load_from_state_dict(state_dict, prefix, *args)  # hooks rewrite this very dict for the children
        for name, parameter in self._parameters.items():
            if parameter is not None and parameter.is_floating_point() and parameter.dtype.itemsize < 4:
                self._parameters[name] = nn.Parameter(parameter.detach().float(), parameter.requires_grad)


class Qwen3NextGatedDeltaNet(GatedDeltaNet):
    """The layer as Qwen3-Next lays it out: two projections whose rows are grouped by key head.

    The rows of ``in_proj_qkvz`` are, for each key head, q, k, its value heads' v, their z; those of ``in_proj_ba`` b and
    a. Arguments, call and errors are :class:`GatedDeltaNet`'s. Source: Transformers' ``Qwen3NextGatedDeltaNet``.

    Example:
        >>> heads = dict(linear_num_key_heads=2, linear_num_value_heads=4)
        >>> layer = Qwen3NextGatedDeltaNet(GatedDeltaNetConfig(hidden_size=32, **heads))
        >>> layer(torch.randn(1, 12, 32), cu_seqlens=torch.tensor([0, 5, 12])).shape
        torch.Size([1, 12, 32])
    """

    in_proj_qkvz: nn.Linear
    in_proj_ba: nn.Linear

    def _add_modules(self) -> None:
        c = self.config
        self._add_convolution()
        self._add_projection("in_proj_qkvz", 2 * c.key_dim + 2 * c.value_dim)
        self._add_projection("in_proj_ba", 2 * c.linear_num_value_heads)
        self._add_output()


class Qwen3_5GatedDeltaNet(GatedDeltaNet):
    """The layer as Qwen3.5 lays it out: projections for q|k|v, z, b and a, heads in order.

    Arguments, call and errors are :class:`GatedDeltaNet`'s. Source: Transformers' ``Qwen3_5GatedDeltaNet``.

    Example:
        >>> heads = dict(linear_num_key_heads=2, linear_num_value_heads=4)
        >>> layer, cache = Qwen3_5GatedDeltaNet(GatedDeltaNetConfig(hidden_size=32, **heads)), GatedDeltaNetCache()
        >>> x = torch.randn(2, 6, 32)
        >>> pieces = [layer(piece, cache=cache) for piece in x.split([4, 1, 1], 1)]
        >>> torch.testing.assert_close(torch.cat(pieces, 1), layer(x))
    """

    in_proj_qkv: nn.Linear
    in_proj_z: nn.Linear
    in_proj_b: nn.Linear
    in_proj_a: nn.Linear

    def _add_modules(self) -> None:
        c = self.config
        self._add_convolution()
        self._add_output()
        self._add_projection("in_proj_qkv", c.conv_dim)
        self._add_projection("in_proj_z", c.value_dim)
        self._add_projection("in_proj_b", c.linear_num_value_heads)
        self._add_projection("in_proj_a", c.linear_num_value_heads)
