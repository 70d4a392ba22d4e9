"""The Python code of README.md and docs/ runs, each page from top to bottom in one namespace.

A comment on the line before a block says more about it:

- ``<!-- skip: needs a GPU -->``: it cannot run everywhere, for this reason;
- ``<!-- raises -->``: it ends in the error that the ```` ```text ```` block after it shows;
- ``<!-- prints -->``: it prints what the ```` ```text ```` block after it shows;
- ``<!-- raises on sm80 -->``, ``<!-- prints on sm80 -->``: the same on a machine as docs/generate.py describes it. No such
  device is needed: tensors have shapes and dtypes there, and no memory.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
from collections.abc import Iterator
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import NamedTuple
from unittest import mock

import pytest
from torch._subclasses.fake_tensor import FakeTensorMode

from qwenlinear.kernels import FLAKernel, FlashQLAKernel, KernelCapabilities, TritonKernel, base

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NEEDS = {"trainers.md": "transformers"}  # pages whose code imports a package that the core does without
_BLOCK = re.compile(
    r"(?:^<!-- (?P<note>(?:skip|raises|prints)\b.*?) -->\n+)?^```(?:python|py)\b[^\n]*\n(?P<code>.*?)^```$"
    r"(?:\n+^```text\n(?P<text>.*?)^```$)?",
    re.M | re.S,
)


class Block(NamedTuple):
    """A piece of code on a page: where, what the comment before it says, and what the text after it shows."""

    line: int
    code: str
    skip: str | None = None
    outcome: str = "runs"
    machine: str | None = None
    shown: str | None = None


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [_block(found, text) for found in _BLOCK.finditer(text)]


def _block(found: re.Match[str], text: str) -> Block:
    line, code, note = text[: found.start("code")].count("\n"), found["code"], found["note"] or ""
    if note.startswith("skip"):
        reason = note.removeprefix("skip:").strip()
        assert note.startswith("skip:"), f"line {line}: a block is skipped for a reason, got {note!r}"
        assert reason, f"line {line}: a block is skipped for a reason, got none"
        return Block(line, code, skip=reason)
    if not note:
        return Block(line, code)
    outcome, _, machine = note.partition(" on ")
    assert outcome in ("raises", "prints"), f"line {line}: unknown comment {note!r}"
    assert found["text"] is not None, f"line {line}: a block that {outcome} needs a text block after it"
    return Block(line, code, outcome=outcome, machine=machine or None, shown=found["text"])


def outcome(block: Block, page: Path, namespace: dict[str, object]) -> str:
    """Run a block; what it prints, or the error that it ends in."""
    code = compile("\n" * block.line + block.code, str(page), "exec")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), _on(block.machine):
        if block.outcome != "raises":
            exec(code, namespace)
            return printed.getvalue()
        try:
            exec(code, namespace)
        except Exception as error:
            return f"{type(error).__name__}: {error}\n"
    raise AssertionError(f"{page.name}, line {block.line}: no error came")


@contextlib.contextmanager
def _on(machine: str | None) -> Iterator[None]:
    if machine is None:
        yield
        return
    hardware = generator().MACHINES[machine]
    with (
        mock.patch.object(base, "probe", return_value=hardware),
        mock.patch.object(FLAKernel, "_load", return_value=()),
        mock.patch.object(FlashQLAKernel, "_load", return_value=()),
        mock.patch.object(TritonKernel, "_load", return_value=()),
        FakeTensorMode(),
    ):
        yield


@lru_cache(maxsize=1)
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs/generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_runs(page: Path) -> None:
    if page.name in NEEDS:
        pytest.importorskip(NEEDS[page.name])
    namespace: dict[str, object] = {"__name__": "docs"}
    for block in blocks(page):
        if block.skip is None:
            came = outcome(block, page, namespace)
            assert block.shown is None or block.shown == came, f"{page.name}, line {block.line}"


def test_blocks_are_found_and_skips_need_a_reason(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n```python\nx = 1\n```\n<!-- skip: needs a GPU -->\n```python\nboom()\n```\n```text\nno\n```\n")
    assert blocks(page) == [Block(2, "x = 1\n"), Block(6, "boom()\n", skip="needs a GPU")]
    assert len(blocks(ROOT / "docs/writing-a-kernel.md")) >= 8
    page.write_text("<!-- skip: -->\n```python\nboom()\n```\n")
    with pytest.raises(AssertionError, match="for a reason"):
        blocks(page)


def test_what_a_block_shows_is_compared(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- raises -->\n```python\nint('x')\n```\n\n```text\nValueError: wrong\n```\n")
    with pytest.raises(AssertionError, match="invalid literal"):
        test_code_runs(page)
    page.write_text("<!-- raises -->\n```python\nint('1')\n```\n\n```text\nValueError: wrong\n```\n")
    with pytest.raises(AssertionError, match="no error came"):
        test_code_runs(page)
    page.write_text("<!-- prints -->\n```python\nprint(1)\n```\n")
    with pytest.raises(AssertionError, match="needs a text block"):
        test_code_runs(page)


def test_the_errors_of_the_faq_are_real() -> None:
    shown = [block.shown or "" for block in blocks(ROOT / "docs/faq.md") if block.outcome == "raises"]
    assert len(shown) >= 10
    for word in ("fla_backward", "compute_capability", "cu_seqlens", "attention_mask", "cache", "package"):
        assert any(word in text for text in shown), word


def test_the_kernel_of_the_guide_is_short() -> None:
    code = blocks(ROOT / "docs/writing-a-kernel.md")
    first = code[0].code.split("class MyKernel")[1]
    assert len(first.strip().splitlines()) < 20


def test_everything_that_a_kernel_can_declare_is_explained() -> None:
    page = (ROOT / "docs/writing-a-kernel.md").read_text()
    assert [field.name for field in fields(KernelCapabilities) if not re.search(rf"`{field.name}\b", page)] == []
