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
