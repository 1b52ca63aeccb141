"""Where Python keeps the bytecode of what a command imports: in the cache folder, where it has none beside torch.

An image may hold packages without bytecode, in a folder that is read-only or under PYTHONDONTWRITEBYTECODE; every start then compiles
the sources of torch again, which takes longer than all else in a second start (docs/decisions/0062). That variable keeps
bytecode out of the folders of sources, and so it stays; the cache folder holds compiled code already. A PYTHONPYCACHEPREFIX of the user's stands.

Imports nothing that takes time: it is for before all other imports.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib.machinery import PathFinder
from importlib.util import cache_from_source

LARGEST = "torch"  # the package that decides


def keep(environ: Mapping[str, str]) -> None:
    """Sets this process's place of bytecode, where that is needed and can be done. What is imported before is not kept."""
    folder = place(environ)
    if folder is not None:
        sys.pycache_prefix, sys.dont_write_bytecode = folder, False


def place(environ: Mapping[str, str]) -> str | None:
    """The folder for bytecode; None where Python finds it by itself or is told where, or no safe folder can be had."""
    found = None if sys.pycache_prefix is not None else PathFinder.find_spec(LARGEST)
    if found is None or not found.has_location or found.origin is None:
        return None
    if os.path.exists(cache_from_source(found.origin)):
        return None
    home = environ.get("XDG_CACHE_HOME") or os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".cache")
    folder = os.path.join(home, "sexpgpu", "bytecode")
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        facts = os.stat(folder)
    except OSError:
        return None
    own = facts.st_uid == os.geteuid() and not facts.st_mode & 0o022  # what lies there is run: contracts.md, "Safety"
    return folder if own and os.access(folder, os.W_OK) else None
