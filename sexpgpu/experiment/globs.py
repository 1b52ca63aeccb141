"""Globs over model paths (contracts.md, Diagnostics): `*` and `?` within a component, `**` any components."""

from __future__ import annotations

import re
from functools import cache


@cache
def _pattern(glob: str) -> re.Pattern[str]:
    anchored = glob.startswith("/")
    parts = []
    for component in glob.strip("/").split("/"):
        if component == "**":
            parts.append("(?:[^/]+/)*")
        else:
            parts.append(re.escape(component).replace(r"\*", "[^/]*").replace(r"\?", "[^/]") + "/")
    return re.compile(("" if anchored else "(?:[^/]+/)*") + "".join(parts) + r"\Z")


def matches(glob: str, path: str) -> bool:
    """Whether the glob matches the path from its start or from any component; a leading `/` anchors it."""
    return _pattern(glob).match(path + "/") is not None


def split_globs(text: str) -> tuple[str, ...]:
    """The globs of a flag or variable: commas separate, blanks are trimmed."""
    return tuple(g for g in (part.strip() for part in text.split(",")) if g)
