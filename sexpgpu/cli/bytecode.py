"""Where Python keeps the bytecode of what a command imports: in the cache folder, where it has none beside torch.

An image may hold packages without bytecode, in a folder that is read-only or under PYTHONDONTWRITEBYTECODE; every start then compiles
the sources of torch again, which takes longer than all else in a second start (docs/decisions/0062). That variable keeps
bytecode out of the folders of sources, and so it stays; the cache folder holds compiled code already. A PYTHONPYCACHEPREFIX of the user's stands.

Imports nothing that takes time: it is for before all other imports.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Mapping
from importlib.machinery import PathFinder, SourceFileLoader
from importlib.util import cache_from_source
from typing import Any

LARGEST = "torch"  # the package that decides


def keep(environ: Mapping[str, str]) -> None:
    """Sets this process's place of bytecode, where that is needed and can be done. What is imported before is not kept."""
    folder = place(environ)
    if folder is not None:
        sys.pycache_prefix, sys.dont_write_bytecode = folder, False
        SourceFileLoader.set_data = _whole  # type: ignore[method-assign]


def place(environ: Mapping[str, str]) -> str | None:
    """The folder for bytecode; None where Python finds it by itself or is told where, or no safe folder can be had."""
    found = None if sys.pycache_prefix is not None else PathFinder.find_spec(LARGEST)
    if found is None or not found.has_location or found.origin is None:
        return None
    if os.path.exists(cache_from_source(found.origin)):
        return None
    home = environ.get("XDG_CACHE_HOME") or os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".cache")
    if not os.path.isabs(home):  # of whoever made the working directory
        return None
    folder = os.path.realpath(os.path.join(home, "sexpgpu", "bytecode"))  # a link is followed once, and what it led to is looked at
    above = os.path.dirname(folder)
    try:
        for one in (os.path.dirname(above), above, folder):
            os.makedirs(one, mode=0o700, exist_ok=True)
            if not _safe(os.stat(one), one == folder):
                return None
    except OSError:
        return None
    return folder if os.access(folder, os.W_OK) else None


def _safe(facts: os.stat_result, last: bool) -> bool:
    """Whether nobody else may change what lies in a folder, or (last is False) put another folder into the place of one in it: what lies
    there is run. contracts.md, "Safety"."""
    if last:
        return facts.st_uid == os.geteuid() and not facts.st_mode & 0o077
    return facts.st_uid in (os.geteuid(), 0) and (not facts.st_mode & stat.S_IWOTH or bool(facts.st_mode & stat.S_ISVTX))


_WRITE = SourceFileLoader.set_data


def _whole(self: SourceFileLoader, path: str, data: Any, **more: Any) -> None:
    """`SourceFileLoader.set_data`, which at a full disk or quota takes half a file for a whole one (CPython's issue 126606, all of 3.11):
    every later start would end at it."""
    _WRITE(self, path, data, **more)
    try:
        if os.path.getsize(path) != len(data):
            os.unlink(path)
    except OSError:  # not written
        return
