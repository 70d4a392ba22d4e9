"""The Python code of README.md and docs/ runs, each page from top to bottom in one namespace.

A block that cannot run everywhere is skipped by a comment on the line before it, with a reason: ``<!-- skip: needs a GPU -->``.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(r"(?:^<!-- skip: (?P<reason>.+?) -->\n+)?^```(?:python|py)\b[^\n]*\n(?P<code>.*?)^```", re.M | re.S)


def blocks(page: Path) -> list[tuple[int, str | None, str]]:
    """Line number, reason to skip, and code of each block."""
    text = page.read_text(encoding="utf-8")
    return [(text[: m.start("code")].count("\n"), m["reason"], m["code"]) for m in _BLOCK.finditer(text)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_runs(page: Path) -> None:
    namespace: dict[str, object] = {"__name__": "docs"}
    for line, reason, code in blocks(page):
        if reason is None:
            exec(compile("\n" * line + code, str(page), "exec"), namespace)


def test_blocks_are_found_and_skips_need_a_reason(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n```python\nx = 1\n```\n<!-- skip: needs a GPU -->\n```python\nboom()\n```\n```text\nno\n```\n")
    assert blocks(page) == [(2, None, "x = 1\n"), (6, "needs a GPU", "boom()\n")]
    assert len(blocks(ROOT / "docs/writing-a-kernel.md")) >= 8


def test_the_kernel_of_the_guide_is_short() -> None:
    code = blocks(ROOT / "docs/writing-a-kernel.md")
    first = code[0][2].split("class MyKernel")[1]
    assert len(first.strip().splitlines()) < 20
