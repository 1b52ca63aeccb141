"""How a process of ours starts another that runs a module of ours."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]  # where the package lies


def python() -> list[str]:
    """The interpreter; `-m` and a module's name come after. It does not look for modules in the working directory, where any file may have the
    name of one, unless the package itself lies there."""
    try:
        here = Path.cwd().resolve()
    except OSError:  # the folder is gone
        return [sys.executable, "-P"]
    return [sys.executable] if here == ROOT else [sys.executable, "-P"]
