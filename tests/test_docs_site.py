"""The site says everything: public names have a reference, examples a place, patterns and links lead somewhere."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

DOCS = Path(__file__).parents[1] / "docs"
EXAMPLES = DOCS.parent / "examples"


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_hooks", DOCS / "tools/hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("package", ["", ".kernels", ".layers", ".ops", ".distributed", ".testing", ".hf"])
def test_public_names_have_a_reference(package: str) -> None:
    pages = "".join(page.read_text() for page in sorted((DOCS / "reference").glob("*.md")))
    documented = {name.rpartition(".")[2] for name in re.findall(r"^::: (qwenlinear[\w.]+)$", pages, re.M)}
    assert set(importlib.import_module(f"qwenlinear{package}").__all__) <= documented


def test_a_reference_is_no_module_that_has_the_name_of_what_is_in_it() -> None:
    """``qwenlinear.ops.prologue`` is the module to mkdocstrings and the function to everybody else."""
    for page in sorted((DOCS / "reference").glob("*.md")):
        for name in re.findall(r"^::: (qwenlinear[\w.]+)$", page.read_text(), re.M):
            where = importlib.import_module(name.rpartition(".")[0])
            is_module = hasattr(where, "__path__") and importlib.util.find_spec(name) is not None
            assert not is_module, name


def test_examples_are_on_their_page() -> None:
    page = (DOCS / "examples.md").read_text()
    for path in EXAMPLES.rglob("*.py"):
        name = path.relative_to(EXAMPLES).with_suffix("").as_posix()
        if path.name != "__init__.py":
            assert f"{{ #{name.replace('/', '-')} }}" in page, name
            assert f'--8<-- "examples/{name}.py"' in page, name


def test_links_to_examples_lead_to_their_page(hooks: ModuleType) -> None:
    text = "[a](../examples/run_block.py), [b](../../examples/kernels/fla_naive.py), [c](faq.md)"
    page = SimpleNamespace(file=SimpleNamespace(src_uri="zh/page.md"))
    expected = "[a](../examples.md#run_block), [b](../examples.md#kernels-fla_naive), [c](faq.md)"
    assert hooks.on_page_markdown(text, page) == expected
    page.file.src_uri = "page.md"
    assert "[a](examples.md#run_block)" in hooks.on_page_markdown(text, page)


def test_patterns_in_the_navigation_stand_for_pages(hooks: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    for name in ("b", "a"):
        (tmp_path / f"results/{name}.md").touch()
    config = SimpleNamespace(docs_dir=tmp_path, nav=[{"Home": "index.md"}, {"Results": ["results/*.md", "none*.md"]}])
    nav = [{"Home": "index.md"}, {"Results": ["results/a.md", "results/b.md"]}]
    assert hooks.on_config(config).nav == nav


def test_a_chinese_page_says_so(hooks: ModuleType) -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="zh/page.md"))
    assert hooks.on_post_page('<html lang="en" class="no-js">', page) == '<html lang="zh" class="no-js">'
    page.file.src_uri = "page.md"
    assert hooks.on_post_page('<html lang="en">', page) == '<html lang="en">'
