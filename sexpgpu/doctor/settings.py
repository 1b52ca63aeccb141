"""Settings with their sources, versions of the packages, S3 roles: nothing is imported or asked."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from sexpgpu import __version__
from sexpgpu.diagnostics import Diagnostic, note_warning
from sexpgpu.doctor import Ask, Check, Fact
from sexpgpu.settings import FOUR, ROLES, VARIABLES, Settings, Value, not_yet

PACKAGES = ("torch", "triton", "numpy", "lark", "safetensors", "click", "rich", "boto3", "requests")
NEEDED = frozenset(PACKAGES) - {"triton"}


def run(ask: Ask) -> Iterator[Fact | Diagnostic]:
    """Malformed values, what this version refuses, unknown variables, missing packages."""
    yield from (*ask.settings.problems, *not_yet(ask.settings), *ask.settings.warnings, *absent())


def roles(settings: Settings) -> list[tuple[str, str, str]]:
    """(role, value, the variable that gives it) of each S3 role that has any value."""
    out = []
    for role in ROLES:
        found = settings.credentials(role).via
        names = (*FOUR, "SESSION_TOKEN") if "SESSION_TOKEN" in found else FOUR
        out += [(role, name.lower().replace("_", " "), found.get(name, "missing")) for name in names if found]
    return out


def versions() -> dict[str, str | None]:
    """Versions of us, Python and the libraries, none of which is imported."""
    named: dict[str, str | None] = {"sexpgpu": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            named[name] = version(name)
        except PackageNotFoundError:
            named[name] = None
    return named


def absent() -> list[Diagnostic]:
    """E-ENV-011 for each package that is not there."""
    return [
        note_warning(
            "E-ENV-011", f"the package {name} is not installed", help=f"{sys.executable} -m pip install {name}"
        )
        for name, number in versions().items()
        if number is None and (name in NEEDED or (name == "triton" and sys.platform == "linux"))
    ]


def rows(settings: Settings) -> list[tuple[str, Value]]:
    """Every setting by the name of its variable."""
    values = list(settings.values.values())
    return [(v.name, value) for v, value in zip(VARIABLES, values, strict=True)]


CHECK = Check("settings", "settings", "error", 20, run)
