"""Where checkpoints go: one store a scheme."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from sexpgpu.diagnostics import fail, suggestion

#: scheme -> class(path)
SCHEMES = {"file": "sexpgpu.run.storage.file:FileStore"}
LATER = ("s3",)


def resolve(location: str, folder: str | Path = ".") -> Path:
    """The folder a location names, relative ones by `folder`; `s3://` is E-NET-001, an unknown scheme E-NET-002."""
    scheme, mark, rest = location.partition("://")
    if mark and scheme in LATER:
        fail("E-NET-001", f"`{location}`: checkpoints in a bucket come in a later version",
             help="name a local folder: --checkpoint-dir checkpoints/{slug}")
    if mark and scheme not in SCHEMES:
        fail("E-NET-002", f"`{location}`: there is no storage scheme `{scheme}`",
             help=suggestion(scheme, [*SCHEMES, *LATER], "schemes"))
    return (Path(folder) / (rest if mark else location)).absolute()


def open_store(path: Path, scheme: str = "file") -> Any:
    module, name = SCHEMES[scheme].split(":")
    return getattr(import_module(module), name)(path)
