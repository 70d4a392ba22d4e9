"""Where compilers and autotuners keep what they made: Triton's, TileLang's and Inductor's folders. Read here, never set."""

from __future__ import annotations

import getpass
import os
import re
import shlex
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Cache:
    """One compiler's folder.

    Args:
        name: the compiler.
        variable: the environment variable that moves it.
        folder: where it is.
        given: whether the variable says so, or it is the compiler's default.
    """

    name: str
    variable: str
    folder: Path
    given: bool

    def files(self) -> tuple[int, int]:
        """How many files it holds, and their bytes; links are not followed."""
        sizes = [
            os.lstat(os.path.join(root, name)).st_size
            for root, _, names in os.walk(self.folder)
            for name in names
            if not os.path.islink(os.path.join(root, name))
        ]
        return len(sizes), sum(sizes)


def caches(environment: Mapping[str, str]) -> tuple[Cache, ...]:
    """The folders as the compilers themselves find them.

    Args:
        environment: a process's variables, as it started with them: Inductor sets two of them while it runs.

    Returns:
        Triton's, TileLang's and Inductor's.

    Example:
        >>> [str(cache.folder) for cache in caches({"TRITON_CACHE_DIR": "/a", "TILELANG_CACHE_DIR": "/b",
        ...                                         "TORCHINDUCTOR_CACHE_DIR": "/c"})]
        ['/a', '/b', '/c']
    """
    home = Path(os.path.expanduser("~"))
    triton_home = Path(environment.get("TRITON_HOME", home))
    defaults = (
        ("Triton", "TRITON_CACHE_DIR", triton_home / ".triton" / "cache"),
        ("TileLang", "TILELANG_CACHE_DIR", home / ".tilelang" / "cache"),
        ("Inductor", "TORCHINDUCTOR_CACHE_DIR", Path(tempfile.gettempdir()) / f"torchinductor_{_user()}"),
    )
    return tuple(
        Cache(name, variable, Path(environment.get(variable) or default), bool(environment.get(variable)))
        for name, variable, default in defaults
    )


def _user() -> str:
    """The user's name as Inductor writes it into its folder's name."""
    try:
        name = getpass.getuser()
    except (KeyError, ModuleNotFoundError, OSError):
        name = f"uid_{os.getuid()}" if hasattr(os, "getuid") else "unknown_user"
    return re.sub(r'[\\/:*?"<>|]', "_", name)


def shipping(found: tuple[Cache, ...]) -> list[str]:
    """Lines that say how the folders get to another node.

    Args:
        found: the folders; those that hold nothing are left out.

    Returns:
        Shell commands and what they need; empty where there is nothing to ship.
    """
    full = [cache for cache in found if cache.files()[0]]
    if not full:
        return []
    packs, unpacks = [], []
    for cache in full:
        name = f"{cache.name.lower()}-cache"
        packs.append(f"tar -C {shlex.quote(str(cache.folder))} -czf {name}.tgz .")
        unpacks += [f"mkdir -p {name} && tar -C {name} -xzf {name}.tgz &&", f"  export {cache.variable}=$PWD/{name}"]
    return [
        "Pack here:",
        *(f"  {line}" for line in packs),
        "Unpack on every node (same GPU, driver and package versions),",
        "and start the job with the variables set:",
        *(f"  {line}" for line in unpacks),
    ]
