"""The Triton kernels compile for Hopper without a GPU, and move their bytes sixteen at a time."""

from __future__ import annotations

import re

import pytest

triton = pytest.importorskip("triton")

SIZES = {"H": 16, "HV": 32, "K": 128, "V": 128}


def ptx_of(kernel, types, constants, warps):
    """PTX for SM 90; pointers and integers are multiples of 16, as in a layer of 16/32 heads of 128."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    where = {name: (position,) for position, name in enumerate(names)}
    source = triton.compiler.ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={where[name]: value for name, value in constants.items()},
        attrs={where[n]: [["tt.divisibility", 16]] for n in names if n not in constants and types[n] != "fp32"},
    )
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    return triton.compile(source, target=target, options={"num_warps": warps}).asm["ptx"]


def vectors(ptx):
    """Loads and stores of 16 bytes."""
    return len(re.findall(r"ld\.global\S*v4\.(?:b32|f32)", ptx)), len(re.findall(r"st\.global\S*v4\.(?:b32|f32)", ptx))


@pytest.mark.parametrize("heads", [32, 8192])
def test_a_step_moves_its_state_in_whole_vectors(heads):
    from qwenlinear.kernels import _step_triton

    BK, BV, warps = _step_triton.tile(heads, 128, 128, 132)
    types = dict.fromkeys(("q", "k", "v", "beta", "o"), "*bf16") | dict.fromkeys(("g", "initial", "final"), "*fp32")
    flags = {"NORMALISE": False, "PACKED": False, "FROM_STATE": True, "KEEP_STATE": True}
    constants = {**SIZES, "BK": BK, "BV": BV, **flags, "cu_seqlens": None, "T": 1}
    ptx = ptx_of(_step_triton.step_kernel, types | {"scale": "fp32"}, constants, warps)
    each = BK * BV // (32 * warps) // 4
    assert vectors(ptx) == (each, each)


@pytest.mark.parametrize("name", ["FORWARD", "BACKWARD"])
def test_the_gated_norm_moves_rows_in_whole_vectors(name):
    from qwenlinear.ops import _epilogue_triton

    config = dict(getattr(_epilogue_triton, name))
    warps, rows = config.pop("num_warps"), config["ROWS"]
    kernel = {
        "FORWARD": _epilogue_triton.gated_rms_norm_kernel,
        "BACKWARD": _epilogue_triton.gated_rms_norm_backward_kernel,
    }[name]
    types = dict.fromkeys(("o", "z", "weight", "y", "dy", "do", "dz"), "*bf16") | {"partial": "*fp32", "eps": "fp32"}
    types |= dict.fromkeys(("rows", "size1", "size2", "stride0", "stride1", "stride2"), "i32")
    ptx = ptx_of(kernel, types, {"V": 128, "BV": 128, **config}, warps)
    each = rows * 128 // (32 * warps) // 8
    loads, stores = {"FORWARD": (2, 1), "BACKWARD": (3, 2)}[name]
    assert vectors(ptx) == (loads * each, stores * each)


def test_the_one_token_prologue_compiles():
    from qwenlinear.ops import _decode_triton

    kernel = _decode_triton.decode_prologue_kernel
    types = dict.fromkeys(kernel.arg_names[:14], "*bf16") | dict.fromkeys(kernel.arg_names[14:], "i32")
    types |= dict.fromkeys(("A_log", "dt_bias", "g_out"), "*fp32")
    constants = {**SIZES, "W": 4, "BK": 128, "BV": 128, "NORMALISE": True, "state_w": 1, "b_g": 1, "a_g": 1}
    assert ".local" not in ptx_of(kernel, types, constants, 1)  # nothing spilled by the compiler before ptxas
