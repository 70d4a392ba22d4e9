"""``python -m qwenlinear``: the command line, where the ``qwenlinear`` script is not on the path."""

from __future__ import annotations

from qwenlinear.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
