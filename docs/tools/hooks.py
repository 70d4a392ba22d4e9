"""Beside mkdocs' settings: pages by pattern in the navigation, links to examples, the language of a page."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

_EXAMPLE = re.compile(r"\]\((?:\.\./)+examples/(?P<path>[\w/]+)\.py\)")


def on_config(config: Any) -> Any:
    """Put the pages that a pattern matches in its place."""
    config.nav = list(_expand(config.nav, Path(config.docs_dir)))
    return config


def _expand(entries: list[Any], docs: Path) -> Any:
    for entry in entries:
        if isinstance(entry, dict):
            yield {title: list(_expand(v, docs)) if isinstance(v, list) else v for title, v in entry.items()}
        elif "*" in entry:
            yield from sorted(path.relative_to(docs).as_posix() for path in docs.glob(entry))
        else:
            yield entry


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links to an example's file, right for a reader of the repository, lead to its place on the page of examples."""
    here = posixpath.dirname(page.file.src_uri)
    target = posixpath.relpath("examples.md", here or ".")
    return _EXAMPLE.sub(lambda found: f"]({target}#{found['path'].replace('/', '-')})", markdown)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """A page below zh/ says that it is Chinese, for fonts, hyphenation and screen readers."""
    return output.replace('<html lang="en"', '<html lang="zh"', 1) if page.file.src_uri.startswith("zh/") else output
