"""bench model's side without the layers, the layers' own time and the profile: names of groups, made-up times, a tiny run."""

from __future__ import annotations

import argparse
import json

import pytest
import torch

from qwenlinear import cli
from qwenlinear.bench import machine, model_profile
from qwenlinear.bench.model_profile import WITHOUT, group_of, layer_cells, layer_times, summary
from qwenlinear.bench.timing import Timing

GDN, GLUE = "Gated DeltaNet kernels", "convolution, gates and norms of Gated DeltaNet"
MATMUL, ATTENTION, LOSS = "matrix products", "attention", "softmax and loss"
OPTIMIZER, ELEMENTWISE, OTHER = "optimizer", "elementwise, copies and reductions", "other"
NAMES = {
    "tilelang_fused_chunk_gdr_bwd_kernel_kernel": GDN,
    "tilelang_kkt_solve_kernel_kernel": GDN,
    "chunk_gated_delta_rule_fwd_kernel_h_blockdim64": GDN,
    "chunk_bwd_kernel_dqkwg": GDN,
    "chunk_local_cumsum_scalar_kernel": GDN,
    "recompute_w_u_fwd_kernel": GDN,
    "prepare_wy_repr_bwd_kernel": GDN,
    "merge_16x16_to_64x64_inverse_kernel": GDN,
    "ChunkedGatedDeltaRuleBackward": GDN,
    "causal_conv1d_fwd_kernel": GLUE,
    "void causal_conv1d_bwd_kernel<Causal_conv1d_bwd_kernel_traits<128, 4, true, true, c10::BFloat16, float> >": GLUE,
    "void at::native::(anonymous namespace)::conv_depthwise2d_forward_kernel_generic<float, int>": GLUE,
    "prologue_forward_kernel": GLUE,
    "prologue_state_backward_kernel": GLUE,
    "gated_rms_norm_backward_kernel": GLUE,
    "layer_norm_gated_fwd_kernel": GLUE,
    "l2norm_fwd_kernel": GLUE,
    "aten::convolution_backward": GLUE,
    "nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNT": MATMUL,
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel": MATMUL,
    "ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_nt": MATMUL,
    "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>": MATMUL,
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_bfloat16, true>": MATMUL,
    "void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4, false, false>": MATMUL,
    "aten::addmm": MATMUL,
    "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Traits<256, cutlass::bfloat16_t>>": ATTENTION,
    "void pytorch_flash::flash_bwd_convert_dq_kernel<pytorch_flash::Flash_bwd_kernel_traits<256> >": ATTENTION,
    "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::bfloat16_t>)": ATTENTION,
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0": ATTENTION,
    "aten::_scaled_dot_product_flash_attention_for_cpu": ATTENTION,
    "void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, float, float, float, LogSoftMaxForwardEpilogue>": LOSS,
    "void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d<float, float, long>": LOSS,
    "aten::_log_softmax_backward_data": LOSS,
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::FusedAdamMathFunctor<float, 4>>": OPTIMIZER,
    "aten::addcdiv_": OPTIMIZER,
    "void at::native::vectorized_elementwise_kernel<4, at::native::(anonymous namespace)::silu_kernel(at::Tensor)>": ELEMENTWISE,
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float, float> > >": ELEMENTWISE,
    "void at::native::(anonymous namespace)::CatArrayBatchedCopy<at::native::OpaqueType<2u>, unsigned int, 3>": ELEMENTWISE,
    "Memcpy DtoD (Device -> Device)": ELEMENTWISE,
    "Memset (Device)": ELEMENTWISE,
    "aten::lerp": ELEMENTWISE,
    "void format::write<float>(float*)": OTHER,
    "autograd::engine::evaluate_function: MulBackward0": OTHER,
}


@pytest.mark.parametrize(("name", "group"), NAMES.items())
def test_group_of(name: str, group: str) -> None:
    assert group_of(name) == group


def test_layer_times_are_differences_within_a_round() -> None:
    timings = {
        "failed": Timing([9.0], error="late"),
        "first": Timing([1.0, 3.0, 2.0]),
        "ours": Timing([0.7, 2.6, 1.6]),
        "once": Timing([1.5]),  # too slow for more than one round
        WITHOUT: Timing([0.5, 2.5, 1.4]),
    }
    times = layer_times(timings)
    assert list(times) == ["first", "ours", "once", WITHOUT]
    assert times[WITHOUT] == {"step_ms": 1400.0}
    want = {"first": (2000.0, 500.0, 1.0), "ours": (1600.0, 200.0, 2.5), "once": (1500.0, 1000.0, 0.5)}
    for side, values in want.items():
        assert list(times[side].values()) == pytest.approx(values)
    assert layer_cells(times["ours"]) == ["1,600.00", "200.00 (2.50)"]
    assert layer_cells(times[WITHOUT]) == ["1,400.00", ""]
    assert layer_cells({}) == ["", ""]


def test_layer_times_without_what_they_need() -> None:
    assert layer_times({"a": Timing([0.5]), WITHOUT: Timing(error="no")}) == {"a": {"step_ms": 500.0}}
    below = layer_times({"a": Timing([0.5]), "b": Timing([0.25]), WITHOUT: Timing([0.375])})
    assert below["b"] == {"step_ms": 250.0, "layers_ms": -125.0}  # noise: no ratio
    assert below["a"]["layers_speedup"] == 1.0


def test_summary_and_its_tables() -> None:
    kernels = [("nvjet_a", 2, 3.0), ("aten::mm", 1, 1.0), ("void " + "x" * 90, 1, 0.5), ("Memset (Device)", 4, 0.25)]
    kernels += [(f"x{n}", 1, 0.01) for n in range(12)]
    found = summary(kernels, wall_ms=6.0)
    assert found["groups"][MATMUL] == 4.0
    assert found["groups"][ELEMENTWISE] == 0.25
    assert found["groups"][OTHER] == pytest.approx(0.62)
    assert found["sum_ms"] == pytest.approx(4.87)
    assert len(found["longest"]) == 12
    assert found["longest"][0] == {"name": "nvjet_a", "group": MATMUL, "calls": 2, "ms": 3.0}
    assert found["longest"][2]["name"] == "x" * 77 + "..."
    page = "\n".join(model_profile.markdown({"A": {"of": "kernels", **found}, "B": {"error": "ValueError: a | b"}}))
    assert "No profile of B: ValueError: a / b" in page
    assert "| matrix products | 4.00 |" in page
    assert "| sum | 4.87 |\n| wall time of the step | 6.00 |" in page
    assert "| `nvjet_a` | matrix products | 2 | 3.00 |" in page
    assert "the GPU's kernels" in page
    assert model_profile.markdown({}) == []


def test_a_parameter_without_gradient_is_stepped_and_stays() -> None:
    used, idle = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = torch.optim.AdamW([used, idle], lr=0.0, weight_decay=0.0)
    model_profile.give_every_gradient(optimizer)
    for _ in range(2):
        used.sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    assert int(optimizer.state[idle]["step"]) == 2
    assert torch.equal(idle, torch.ones(3))
    assert used.grad is None
    assert idle.grad is None


def _row(side: str, loss: float) -> dict[str, object]:
    return {"part": "train", "side": side, "tokens_per_second": 1.0, "speedup": 1.0, "loss": loss, "gradient_norm": 1.0}


def test_the_side_without_layers_is_not_counted_among_those_compared() -> None:
    pytest.importorskip("transformers", minversion="5.6")
    from qwenlinear.bench.model import markdown

    results = {"machine": machine.describe(torch.device("cpu")), "command": "x", "losses_agree": True}
    for sides, told in ((["a", "b"], "of the 2 sides that trained agree."), (["a"], "Fewer than two sides trained")):
        page = markdown({**results, "rows": [_row(side, 1.0) for side in sides] + [_row(WITHOUT, 7.0)]})
        assert told in page
        assert model_profile.ABOUT_LAYERS in page
        assert f"| train | {WITHOUT} | 1 | 1.00 |  |  | 7.00000 | 1.00000 |" in page


@pytest.mark.parametrize(("device", "last"), [("cpu", "decode"), ("cuda", "profile")])
def test_the_profile_is_in_the_default_parts_of_a_gpu(device: str, last: str) -> None:
    from qwenlinear.bench import model
    from qwenlinear.bench.layer_options import fill_defaults

    parser = argparse.ArgumentParser()
    model.add_arguments(parser)
    args = parser.parse_args([])
    args.device = device
    fill_defaults(args, model._CPU, model._GPU)
    assert args.parts[:3] == ["train", "prefill", "decode"]
    assert args.parts[-1] == last


def test_tiny_train_and_profile(tmp_path, monkeypatch) -> None:
    """Every side's loss is compared but that of the one without layers, whose parameters are the others'."""
    pytest.importorskip("transformers", minversion="5.6")
    from qwenlinear.bench import model

    compared: list[set[str]] = []
    benches: list[model.Bench] = []
    compare = model.Bench._compare

    def spy(self: model.Bench, facts: model.Facts) -> None:
        benches.append(self)
        compared.append(set(facts))
        compare(self, facts)

    monkeypatch.setattr(model.Bench, "_compare", spy)
    words = ["--tiny", "--device", "cpu", "--dtype", "float32", "--layers", "4", "--tokens", "16", "--documents", "2"]
    words += ["--kernels", "torch", "--rounds", "3", "--part-seconds", "1", "--parts", "train", "profile"]
    assert cli.main(["bench", "model", *words, "--out", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "model.json").read_text())
    assert results["losses_agree"] is True
    assert WITHOUT not in compared[0]
    assert "injected TorchKernel" in compared[0]
    bench = benches[0]
    without, first = bench.without.model, bench.sides["Transformers"].model
    shared = {id(p) for p in without.parameters()}
    layers = {id(p) for name, p in first.named_parameters() if ".linear_attn." in name}
    assert layers
    assert shared | layers == {id(p) for p in first.parameters()}
    assert not shared & layers
    profiles = results["profile"]
    assert list(profiles)[-2:] == ["injected TorchKernel", WITHOUT]
    ours, theirs = profiles["injected TorchKernel"], profiles[WITHOUT]
    assert ours["of"] == "operators"
    assert ours["groups"][GDN] > 0
    assert theirs["groups"][GDN] == theirs["groups"][GLUE] == 0
    for found in (ours, theirs):
        assert found["sum_ms"] == pytest.approx(sum(found["groups"].values()))
        assert found["groups"][MATMUL] > 0
        assert found["groups"][ATTENTION] > 0
        assert len(found["longest"]) == 12
    assert "| wall time of the step |" in (tmp_path / "model.md").read_text()
