"""Generated parts of the documentation are what the code says today."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = sorted(DOCS.rglob("*.md"))


def _generator():
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_generated_parts_are_up_to_date(page) -> None:
    text = page.read_text()
    assert _generator().fill(text) == text, "run python docs/generate.py"


def test_the_capability_table_has_every_kernel() -> None:
    table = _generator().capabilities("")
    head = table.splitlines()[0]
    assert all(name in head for name in ("`TorchKernel`", "`FLAKernel`", "`FlashQLAKernel`"))
    assert "| key head sizes K | any | 1 to 256 | 128 |" in table


def test_an_unknown_part_is_an_error() -> None:
    with pytest.raises(KeyError):
        _generator().fill("<!-- generated: nosuch -->\n<!-- end -->")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page) -> None:
    import re

    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_runs_of_the_layer_benchmarks_appear_with_their_data(tmp_path, monkeypatch) -> None:
    import json

    generator = _generator()
    monkeypatch.setattr(generator, "DOCS", tmp_path)
    assert generator.layer_runs("") == "## Training and prefill\n\nNo run of `qwenlinear bench layer` is kept here yet."
    assert generator.decode_runs("") == "## Decoding\n\nNo run of `qwenlinear bench decode` is kept here yet."
    machine = {"device": "H200", "hardware": "cuda", "torch": "2.11", "packages": {}, "driver": None, "date": "today"}
    size = {"hidden": 2048, "heads": "16/32", "head_dim": 128}
    common = {"machine": machine, "command": "qwenlinear bench x", "dtype": "bfloat16", "size": size, "errors": {}}
    row = {"documents": 1, "length": 64, "mode": "forward", "contender": "qwenlinear, FLAKernel"}
    times = [{**row, "ms": 5.0, "against": {}, "over_floor": 1.1}]
    parts = {
        "gate": [],
        "memory": [],
        "gradients": [],
        "flat": [],
        "ops": [],
        "kernels": {"qwenlinear, FLAKernel": "fla"},
    }
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "layer-h200.json").write_text(json.dumps({**common, **parts, "times": times}))
    page = generator.layer_runs("")
    assert page.startswith("## Training and prefill\n\n### H200, hidden 2048, heads 16/32, bfloat16 (h200)\n")
    assert "| qwenlinear, FLAKernel | 5.000 | 1.10 |" in page
    assert "    qwenlinear bench x" in page
    assert "![" not in page  # no picture was drawn
    decoded = {
        "batch": 8,
        "contender": "ours",
        "graph": True,
        "us": 41.0,
        "over_floor": 1.2,
        "floor_us": 34.0,
        "floor_mb": 84.0,
    }
    results = {**common, "gate": [], "layers": 4, "times": [decoded]}
    (tmp_path / "data" / "decode-h200.json").write_text(json.dumps(results))
    assert "| 8 | 34.0 (84.0 MB) | 41.0 (1.20) |" in generator.decode_runs("")
