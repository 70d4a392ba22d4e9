"""The doctor, on faked machines: what it says is what the kernels say, and every reason comes with a remedy."""

from __future__ import annotations

import json

import pytest
import torch

from qwenlinear import cli, doctor
from qwenlinear.errors import Refusal
from qwenlinear.kernels import FLAKernel, FlashQLAKernel, TritonKernel
from qwenlinear.kernels.hardware import Hardware
from tests.kernels.machines import machine

FLASHQLA, FLA, TORCH = "FlashQLAKernel(contiguity='copy')", "FLAKernel()", "TorchKernel()"
TRITON = "TritonKernel()"


@pytest.fixture(autouse=True)
def packages_that_import(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faked machines have their packages: an import says nothing about them here."""
    for kernel in (FLAKernel, FlashQLAKernel, TritonKernel):
        monkeypatch.setattr(kernel, "_load", lambda self: ())


def _examine(hardware, device="cuda", config=None, **more):
    return doctor.examine(
        config, device, hardware, driver="580.1", requirements=more.pop("requirements", {}), environment=more, **{}
    )


def _codes(report, name, use):
    (kernel,) = [kernel for kernel in report["kernels"] if kernel["name"] == name]
    return {refusal["code"] for refusal in kernel["uses"][use]}


@pytest.mark.parametrize(
    ("hardware", "picks"),
    [
        pytest.param(machine((8, 0)), [FLA, FLA, FLA, TRITON], id="SM80"),
        pytest.param(machine((9, 0)), [FLASHQLA, FLASHQLA, FLASHQLA, TRITON], id="SM90"),
        pytest.param(machine((10, 0)), [FLASHQLA, FLASHQLA, FLASHQLA, TRITON], id="SM100"),
        pytest.param(machine((12, 0)), [FLASHQLA, FLASHQLA, FLASHQLA, TRITON], id="SM120"),
        pytest.param(
            machine((12, 0), flash_qla="0.1.2"), [FLA, FLASHQLA, FLA, TRITON], id="SM120 before FlashQLA's backward"
        ),
        pytest.param(machine(hip="7.0", triton=None, triton_rocm="3.5"), [FLA, FLA, FLA, TRITON], id="ROCm"),
        pytest.param(machine((9, 0), flash_qla=None), [FLA, FLA, FLA, TRITON], id="SM90 without flash-qla"),
        pytest.param(
            machine((9, 0), flash_qla=None, tilelang=None),
            [TORCH, FLA, TORCH, TRITON],
            id="SM90, FLA's backward is wrong",
        ),
        pytest.param(
            machine((9, 0), flash_qla=None, fla_core=None),
            [TORCH, TORCH, TORCH, TRITON],
            id="SM90 with nothing but Triton",
        ),
        pytest.param(
            machine((9, 0), flash_qla=None, fla_core=None, triton=None), [TORCH] * 4, id="SM90 without packages"
        ),
        pytest.param(machine((7, 0)), [TORCH] * 4, id="SM70"),
    ],
)
def test_what_autokernel_picks(hardware, picks) -> None:
    report = _examine(hardware)
    assert [report["picks"][use]["kernel"] for use in ("training", "prefill", "packed", "decode")] == picks
    chosen = [
        line.split(maxsplit=1)
        for line in doctor.text(report).splitlines()
        if line.startswith(("  training ", "  decode "))
    ]
    assert chosen == [["training", picks[0]], ["decode", picks[3]]]


def test_a_cpu_has_torch_and_says_why_not_more() -> None:
    report = _examine(lambda device: Hardware(device_type="cpu", packages={}), "cpu")
    assert {pick["kernel"] for pick in report["picks"].values()} == {TORCH}
    assert "device" in _codes(report, FLA, "prefill")
    assert "device" in _codes(report, FLASHQLA, "prefill")
    assert _codes(report, TRITON, "decode") == {"device"}
    assert report["conflicts"] == []
    text = doctor.text(report)
    assert "does not run" in text
    assert "built without CUDA" not in text or report["machine"]["cuda"] is None


def test_fla_without_a_gpu_is_a_known_trap() -> None:
    hardware = lambda device: Hardware(device_type="cpu", packages={"fla-core": "0.6.0", "triton": "3.6.0"})  # noqa: E731
    (trap,) = _examine(hardware, "cpu")["conflicts"]
    assert "Transformers' own Gated DeltaNet layers" in trap


@pytest.mark.parametrize(
    "hardware", [machine((8, 0)), machine((9, 0), nvcc=False), machine(hip="7.0"), machine((12, 1))]
)
def test_every_reason_comes_with_what_is_needed_and_a_remedy(hardware) -> None:
    report = _examine(hardware)
    text = doctor.text(report)
    for kernel in report["kernels"]:
        for why in kernel["uses"].values():
            for refusal in why:
                assert all(refusal[part] for part in ("code", "needs", "got", "remedy"))
                assert str(Refusal(**refusal)) in text


def test_reasons_are_the_kernels_own() -> None:
    report = _examine(machine((8, 0), nvcc=False))
    assert _codes(report, FLASHQLA, "training") == {"compute_capability", "nvcc"}
    assert _codes(report, FLASHQLA, "decode") == {"compute_capability", "nvcc", "form"}
    assert _codes(report, FLA, "training") == set()


def test_the_models_sizes_and_dtype_count() -> None:
    config = {
        "model_type": "qwen3_5",
        "dtype": "float32",
        "text_config": {
            "hidden_size": 64,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "linear_conv_kernel_dim": 4,
        },
    }
    report = _examine(machine((9, 0)), config=config)
    assert _codes(report, FLASHQLA, "prefill") == {"dtype", "key_head_size", "value_head_size"}
    assert report["picks"]["prefill"]["kernel"] == FLA
    assert report["model"]["head_sizes"] == [64, 64]
    assert report["fla_dispatcher"]["uses"] == []


@pytest.mark.parametrize(
    ("hardware", "environment", "uses"),
    [
        (machine((9, 0)), {}, ["training", "prefill", "packed"]),
        (machine((10, 3)), {}, ["training", "prefill", "packed"]),
        (machine((12, 0)), {}, ["prefill"]),
        (machine((8, 0)), {}, []),
        (machine((9, 0), flash_qla=None), {}, []),
        (machine((9, 0), fla_core="0.5.1"), {}, []),
        (machine((9, 0)), {"FLA_FLASH_QLA": "0"}, []),
        (machine((9, 0)), {"FLA_DISABLE_BACKEND_DISPATCH": "1"}, []),
    ],
)
def test_whether_flas_dispatcher_hands_over(hardware, environment, uses) -> None:
    assert _examine(hardware, **environment)["fla_dispatcher"]["uses"] == uses


def test_pins_of_other_packages_are_conflicts() -> None:
    requirements = {
        "someserver 1.0": ["tilelang==0.1.8", "numpy<2", "tilelang==9; extra == 'dev'", "not a requirement !!"],
        "flash-qla 0.1.3": ["tilelang>=0.1.12", "torch>=2.8"],
        "needy 2.0": ["causal-conv1d>=1.7"],
    }
    conflicts = _examine(machine((9, 0)), requirements=requirements)["conflicts"]
    assert len(conflicts) == 2
    assert "needy 2.0 needs causal-conv1d>=1.7, which is not installed" in conflicts
    assert any(line.startswith("someserver 1.0 needs tilelang==0.1.8, got 0.1.12") for line in conflicts)


def test_the_command_reads_a_config_and_prints_json(tmp_path, capsys) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"linear_num_key_heads": 2, "linear_num_value_heads": 8, **_SIZES}))
    assert cli.main(["doctor", "--config", str(path), "--device", "cpu", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["model"]["heads"] == [2, 8]
    assert report["machine"]["torch"] == torch.__version__


_SIZES = {"hidden_size": 64, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4}


@pytest.mark.parametrize(
    "content", [None, "{", "{}x", '{"hidden_size": 4}', '{"linear_num_key_heads": 3, "dtype": "int8"}']
)
def test_a_config_that_cannot_be_read_is_one_line(tmp_path, capsys, content) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_text(content)
    assert cli.main(["doctor", "--config", str(path), "--device", "cpu"]) == 2
    assert "--config" in capsys.readouterr().err.splitlines()[0]


def test_the_text_of_this_machine(capsys) -> None:
    assert cli.main(["doctor", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "TorchKernel(): runs training, prefill, packed, decode" in out
