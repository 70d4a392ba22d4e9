"""Fill in what the documentation says by machine: capability table, the doctor's words, tables of measurements.

    python docs/generate.py            # rewrite the generated parts
    python docs/generate.py --check    # exit 1 where they are out of date
    python docs/generate.py --plots    # draw the plots of docs/data/*.json first

A generated part lies between `<!-- generated: NAME -->` and `<!-- end -->`. Measurements come from docs/data/*.json, as
`qwenlinear bench kernels | layer | decode | model` wrote them; a part whose file does not exist is left out.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from packaging.version import Version
from torch._subclasses.fake_tensor import FakeTensorMode

from qwenlinear import doctor
from qwenlinear.bench import decode_report, kernels_report, layer_report, model
from qwenlinear.errors import Refusal
from qwenlinear.kernels import (
    FLAKernel,
    FlashQLAKernel,
    GatedDeltaKernel,
    KernelCapabilities,
    TorchKernel,
    TritonKernel,
)
from qwenlinear.kernels.hardware import Hardware

DOCS = Path(__file__).resolve().parent
_PART = re.compile(r"<!-- generated: (?P<name>[\w:./-]+) -->\n.*?<!-- end -->", re.DOTALL)
_KERNELS: tuple[type[GatedDeltaKernel], ...] = (TorchKernel, FLAKernel, FlashQLAKernel, TritonKernel)


def main() -> int:
    """Rewrite or check every page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a page is out of date")
    parser.add_argument("--plots", action="store_true", help="draw the plots first (matplotlib)")
    args = parser.parse_args()
    if args.plots:
        plots()
    stale = []
    for page in sorted(DOCS.rglob("*.md")):
        text = page.read_text()
        new = fill(text)
        if new != text:
            stale.append(page.name)
            if not args.check:
                page.write_text(new)
    print(f"{'out of date' if args.check else 'rewritten'}: {', '.join(stale) or 'nothing'}")
    return int(args.check and bool(stale))


def fill(text: str) -> str:
    """A page with its generated parts made anew.

    Args:
        text: the page.

    Returns:
        The page.

    Raises:
        KeyError: a part that nobody knows how to make.
    """

    def part(found: re.Match[str]) -> str:
        kind, _, rest = found["name"].partition(":")
        return f"<!-- generated: {found['name']} -->\n{_MAKERS[kind](rest)}\n<!-- end -->"

    return _PART.sub(part, text)


# ---- parts ---------------------------------------------------------------------------------------------------------


def capabilities(_: str) -> str:
    """What each kernel declares."""

    def yes(name: str) -> Callable[[KernelCapabilities], str]:
        return lambda found: "yes" if getattr(found, name) else "-"

    rows: list[tuple[str, Callable[[KernelCapabilities], str]]] = [
        ("devices", lambda found: "any" if found.devices is None else ", ".join(sorted(found.devices))),
        ("dtypes of q, k, v", lambda found: ", ".join(sorted(str(d).removeprefix("torch.") for d in found.dtypes))),
        ("key head sizes K", lambda found: _sizes(found.key_head_sizes)),
        ("value head sizes V", lambda found: _sizes(found.value_head_sizes)),
        ("chunked form: training, prefill", yes("chunk")),
        ("recurrent form: decoding", yes("step")),
        ("gradients of the chunked form", yes("backward")),
        ("gradients of the recurrent form", yes("step_backward")),
        ("gradients to and from states", yes("state_backward")),
        ("states of the recurrent form in place", _in_place),
        ("packed documents", yes("packed")),
        ("documents of no tokens", lambda found: "yes" if found.empty_sequences else "left out and put back"),
        ("more value heads than key heads", lambda found: "yes" if found.value_head_groups else "by repeating q and k"),
        ("normalises q and k itself", lambda found: "yes" if found.qk_l2norm else "before the call"),
        ("strided tensors", lambda found: "yes" if found.strided else "by copying"),
        (
            "NaN kept from other documents' gradients",
            lambda found: "declared" if found.isolated_gradients else "not declared",
        ),
        ("bitwise repeatable", lambda found: "declared" if found.deterministic else "not declared"),
        ("`torch.compile(fullgraph=True)`", lambda found: "yes" if found.compile_safe else "-"),
    ]
    head = ["", *(f"`{kernel.__name__}`" for kernel in _KERNELS)]
    body = [[name, *(cell(kernel.capabilities) for kernel in _KERNELS)] for name, cell in rows]
    for dtype in (torch.bfloat16, torch.float32):
        name = f"promised relative errors, {str(dtype).removeprefix('torch.')}: output, state, gradient"
        body.append([name, *(_tolerance(kernel, dtype) for kernel in _KERNELS)])
    lines = [f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in body)])


def _in_place(found: KernelCapabilities) -> str:
    if not found.step:
        return "-"
    return "yes" if found.state_in_place else "by copying"


def _sizes(sizes: object) -> str:
    if sizes is None:
        return "any"
    if isinstance(sizes, range):
        return f"{sizes.start} to {sizes.stop - 1}"
    assert isinstance(sizes, (set, frozenset))
    return ", ".join(map(str, sorted(sizes)))


def _tolerance(kernel: type[GatedDeltaKernel], dtype: torch.dtype) -> str:
    found, declared = kernel.tolerances.get(dtype), kernel.capabilities
    if found is None:
        return "-"
    gradient = f"{found.gradient:g}" if declared.backward or declared.step_backward else "-"
    return f"{found.output:g}, {found.state:g}, {gradient}"


_GENERATIONS: list[tuple[str, tuple[int, int], str]] = [
    ("Ampere (A100)", (8, 0), "0.1.3"),
    ("Ada (RTX 40, L40S)", (8, 9), "0.1.3"),
    ("Hopper (H100, H200, GH200)", (9, 0), "0.1.3"),
    ("Blackwell (B200, GB200)", (10, 0), "0.1.3"),
    ("Blackwell (B300, GB300)", (10, 3), "0.1.3"),
    ("Blackwell (RTX 50, RTX PRO)", (12, 0), "0.1.3"),
    ("Blackwell (RTX 50, RTX PRO)", (12, 0), "0.1.2"),
    ("Blackwell (DGX Spark)", (12, 1), "0.1.3"),
    ("Blackwell (DGX Spark)", (12, 1), "0.1.2"),
]
_WORDS = {
    "en": (
        "GPU",
        "compute capability",
        "flash-qla",
        "prefill",
        "training",
        "measured here",
        "bfloat16, float16, on an H200",
        "no",
    ),
    "zh": ("GPU", "计算能力", "flash-qla", "预填充", "训练", "是否实测", "bfloat16, float16 (H200)", "未实测"),
}


def flashqla(language: str) -> str:
    """What FlashQLAKernel runs and refuses on each generation of GPUs, everything else being right: a table."""
    *head, measured, unmeasured = _WORDS[language]
    lines = [f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
    for name, capability, version in _GENERATIONS:
        packages = {**_PACKAGES, **_QLA, "flash-qla": version}
        machine = Hardware(capability=capability, packages=packages, **_CUDA)  # type: ignore[arg-type]
        uses = f"{_flashqla_use(machine, trains=False)} | {_flashqla_use(machine, trains=True)}"
        tested = measured if capability == (9, 0) else unmeasured
        lines.append(f"| {name} | {capability[0]}.{capability[1]} | {version} | {uses} | {tested} |")
    return "\n".join(lines)


def _flashqla_use(machine: Hardware, trains: bool) -> str:
    """The dtypes that run, or the first reason why none does."""
    asked = {dtype: _flashqla_refusals(machine, dtype, trains) for dtype in (torch.bfloat16, torch.float16)}
    runs = [str(dtype).removeprefix("torch.") for dtype, refusals in asked.items() if not refusals]
    return ", ".join(runs) or f"`{asked[torch.bfloat16][0].code}`"


def _flashqla_refusals(machine: Hardware, dtype: torch.dtype, trains: bool) -> tuple[Refusal, ...]:
    with mock.patch.object(FlashQLAKernel, "_load", return_value=()), FakeTensorMode():
        q = torch.empty(1, 64, 2, 128, dtype=dtype, device="cuda", requires_grad=trains)
        g = torch.empty(1, 64, 2, device="cuda")
        return FlashQLAKernel(hardware=lambda device: machine).refusals(q, q, q, g, g)


_PACKAGES = {"triton": "3.6.0", "fla-core": "0.6.0", "flash-linear-attention": "0.6.0", "transformers": "5.24.0"}
_QLA = {"flash-qla": "0.1.3", "tilelang": "0.1.15", "apache-tvm-ffi": "0.1.12"}
_CUDA = {"device_type": "cuda", "cuda": Version("13.0"), "torch": Version("2.11.0+cu130"), "nvcc": True}
MACHINES: dict[str, Hardware] = {
    "cpu": Hardware(device_type="cpu", torch=Version("2.14.1+cpu"), packages={"transformers": "5.24.0"}),
    "cpu-with-fla": Hardware(
        device_type="cpu",
        torch=Version("2.14.1+cu130"),
        cuda=Version("13.0"),
        packages={**_PACKAGES, "flash-qla": "0.1.3"},
    ),
    "sm80": Hardware(capability=(8, 0), packages={**_PACKAGES, **_QLA}, **_CUDA),  # type: ignore[arg-type]
    "sm90": Hardware(capability=(9, 0), packages={**_PACKAGES, **_QLA}, **_CUDA),  # type: ignore[arg-type]
    "sm90-without-flash-qla": Hardware(capability=(9, 0), packages=_PACKAGES, **_CUDA),  # type: ignore[arg-type]
    "sm100": Hardware(capability=(10, 0), packages={**_PACKAGES, **_QLA}, **_CUDA),  # type: ignore[arg-type]
    "sm120": Hardware(capability=(12, 0), packages={**_PACKAGES, **_QLA, "flash-qla": "0.1.2"}, **_CUDA),  # type: ignore[arg-type]
    "rocm": Hardware(
        device_type="cuda",
        hip=Version("7.0"),
        torch=Version("2.11.0+rocm7.0"),
        packages={**_PACKAGES, "triton": "3.6.0", "flash-qla": "0.1.3"},
    ),
}
_REQUIREMENTS = {
    "flash-qla 0.1.3": ["torch>=2.8", "tilelang>=0.1.12"],
    "flash-linear-attention 0.6.0": ["fla-core==0.6.0", "transformers<6,>=5.6.2"],
}


def doctor_of(name: str) -> str:
    """The doctor's words on a machine as MACHINES describes it."""
    machine = MACHINES[name]
    device = "cuda" if machine.device_type == "cuda" else "cpu"
    installed = {line: wants for line, wants in _REQUIREMENTS.items() if machine.package(line.split()[0]) is not None}
    driver = "580.159.03" if machine.capability else ""
    with (
        mock.patch.object(FLAKernel, "_load", return_value=()),
        mock.patch.object(FlashQLAKernel, "_load", return_value=()),
        mock.patch.object(TritonKernel, "_load", return_value=()),
    ):
        report = doctor.examine(
            None, device, lambda where: machine, driver=driver, requirements=installed, environment={}
        )
    return f"```text\n{doctor.text(report)}\n```"


def verbatim(path: str) -> str:
    """A file beside the pages, as it is."""
    return f"```text\n{(DOCS / path).read_text().rstrip()}\n```"


def measurements(name: str) -> str:
    """A section with the plots and tables of a run of ``qwenlinear bench kernels``; nothing where there was none."""
    path = DOCS / "data" / f"{name}.json"
    if not path.exists():
        return ""
    results = json.loads(path.read_text())
    what = {"kernels-h200-first": ", first calls", "kernels-h200-heads": ", heads 16/64"}.get(name, "")
    lines = [f"## Measured: {results['machine']['device']}, {results['dtype']}{what}", ""]
    for along in ("tokens", "documents"):
        if (DOCS / "images" / f"{name}-{along}.png").exists():
            lines += [f"![Time against {along}](images/{name}-{along}.png)", ""]
    return "\n".join([*lines, kernels_report.markdown(results)])


def layer_runs(_: str) -> str:
    """A section for each run of ``qwenlinear bench layer`` in docs/data, its pictures before its tables; without one, that."""
    pictures = {"floor": "Everybody beside the floor", "flat": "Time and memory a token over T"}
    return _runs("Training and prefill", "layer", pictures, layer_report.markdown)


def decode_runs(_: str) -> str:
    """The same for ``qwenlinear bench decode``."""
    return _runs("Decoding", "decode", {"batch": "A step against batch"}, decode_report.markdown)


def model_runs(_: str) -> str:
    """A section for each run of ``qwenlinear bench model``, with the longest kernels of two sides."""
    sections: list[str] = []
    for path in sorted((DOCS / "data").glob("model-*.json")):
        results = json.loads(path.read_text())
        for side, found in results.get("profile", {}).items():
            if side not in _PROFILED:
                found["longest"] = []
        sections += [
            f"### {results['machine']['device']}, {results['arguments']['dtype']}",
            "",
            model.markdown(results),
            "",
        ]
    return "\n".join(["## A whole model", "", *sections]).rstrip()


_PROFILED = ("Transformers", "injected FlashQLAKernel")

_REMARKS = {
    "layer-h200-2048": "Time, memory, and both over T. [FLA's memory is in doubt](results/h200-fourth-run.md#not-reached).",
    "layer-h200-4096": "What `--limit` left of hidden 4096: packed documents and memory were not reached.",
    "layer-h200-gradients": "Gradients by parameter.",
    "layer-h200-peers": "With Transformers' and FLA's layers, and the operators alone. Taken before the runs above, when the "
    "input projections were one product of joined weights, not [three](performance-notes.md#three-products-instead-of-one).",
}


def _runs(title: str, kind: str, pictures: dict[str, str], markdown: Callable[[dict[str, object]], str]) -> str:
    sections: list[str] = []
    for path in sorted((DOCS / "data").glob(f"{kind}-*.json")):
        results = json.loads(path.read_text())
        size = results["size"]
        where = f"{results['machine']['device']}, hidden {size['hidden']}, heads {size['heads']}, {results['dtype']}"
        sections += [
            *([] if sections else [f"## {title}", ""]),
            f"### {where} ({path.stem.removeprefix(f'{kind}-')})",
            "",
            *([_REMARKS[path.stem], ""] if path.stem in _REMARKS else []),
        ]
        for name, words in pictures.items():
            if (DOCS / "images" / f"{path.stem}-{name}.png").exists():
                sections += [f"![{words}](images/{path.stem}-{name}.png)", ""]
        sections += [markdown(results), ""]
    return "\n".join(sections).rstrip() or f"## {title}\n\nNo run of `qwenlinear bench {kind}` is kept here yet."


def plots() -> None:
    """Draw the plots of every run in docs/data."""
    for path in sorted((DOCS / "data").glob("layer-*.json")):
        for kind in layer_report.PICTURES:
            layer_report.plot(json.loads(path.read_text()), DOCS / "images" / f"{path.stem}-{kind}.png", kind)
    for path in sorted((DOCS / "data").glob("decode-*.json")):
        decode_report.plot(json.loads(path.read_text()), DOCS / "images" / f"{path.stem}-batch.png")
    for path in sorted((DOCS / "data").glob("kernels-*.json")):
        for along in ("tokens", "documents"):
            kernels_report.plot(json.loads(path.read_text()), DOCS / "images" / f"{path.stem}-{along}.png", along)


_MAKERS: dict[str, Callable[[str], str]] = {
    "capabilities": capabilities,
    "doctor": doctor_of,
    "bench": measurements,
    "layers": layer_runs,
    "decodes": decode_runs,
    "models": model_runs,
    "text": verbatim,
    "flashqla": flashqla,
}

if __name__ == "__main__":
    sys.exit(main())
