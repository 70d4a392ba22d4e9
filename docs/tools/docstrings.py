"""How this project writes docstrings, told to griffe: Sphinx roles become links, ``Example:`` a section of examples."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|meth|func|attr|data):`(?P<name>[\w.]+)`")
_EXAMPLE = re.compile(r"^(?P<indent>\s*)Example:\s*$", re.M)
_ARGS = re.compile(r"^(?P<indent>\s*)Args: (?P<text>\S.*)$", re.M)
_PACKAGES = ("", ".kernels", ".layers", ".distributed", ".testing")


class Docstrings(griffe.Extension):
    """Rewrites docstrings before they are parsed."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **kwargs: Any) -> None:
        """Rewrite those of a whole package, once its names are known."""
        public = {}
        for package in _PACKAGES:
            module = pkg[package[1:]] if package else pkg
            for name in module.exports or ():
                public[str(name)] = module[str(name)].canonical_path
        self._rewrite(pkg, public)

    def _rewrite(self, obj: griffe.Object, public: dict[str, str]) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _mend(obj.docstring.value, obj, public)
        for member in obj.members.values():
            if not member.is_alias:
                self._rewrite(member, public)  # type: ignore[arg-type]


def _mend(text: str, obj: griffe.Object, public: dict[str, str]) -> str:
    def link(found: re.Match[str]) -> str:
        name = found["name"].removeprefix("qwenlinear.")
        head, dot, rest = name.partition(".")
        owner = obj if obj.is_class else obj.parent
        if head in public:
            return f"[`{name}`][{public[head]}{dot}{rest}]"
        if owner is not None and owner.path in public.values() and name in owner.members and name[0] != "_":
            return f"[`{name}`][{owner.path}.{name}]"
        return f"`{name}`"

    text = _ROLE.sub(link, text)
    text = _ARGS.sub(r"\g<indent>**Parameters:** \g<text>", text)  # prose such as "Args: those of the call itself."
    return _EXAMPLE.sub(r"\g<indent>Examples:", text)
