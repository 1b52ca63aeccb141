"""Where numbers go: the service's key and folder, files that can be written. Nothing is recorded anywhere."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from sexpgpu.diagnostics import Diagnostic, SexpError, printable, problem
from sexpgpu.doctor import Ask, Check, Fact
from sexpgpu.doctor.caches import trouble
from sexpgpu.doctor.machine import existing
from sexpgpu.settings import split_targets

SERVICE = "sexpgpu.run.metrics.service"


def run(ask: Ask) -> Iterator[Fact | Diagnostic]:
    """E-NET-040 … 045 of the service, E-RUN-013, 014 and 020 of files."""
    for target in split_targets(ask.settings.metrics or ""):
        scheme, _, rest = target.partition(":")
        try:
            if scheme == "jsonl":
                yield target, writable("metrics", Path(ask.folder) / rest, "E-RUN-014")
            elif scheme == "syvain":
                yield from service(ask, rest)
        except SexpError as error:
            yield from error.diagnostics
    if ask.settings.status:
        yield "status file", writable("status", Path(ask.folder) / ask.settings.status, "")


def service(ask: Ask, rest: str) -> Iterator[Fact]:
    """Asks the service whether it takes the key and has the folder."""
    if ask.settings.syvain_metrics_api_key is None:
        return  # said with the settings
    of = import_module("sexpgpu.run.metrics.target").service_of(ask.settings)
    folder = rest or of.folder
    import_module(SERVICE).connect(of, folder)
    yield "syvain", f"{of.host} takes the key{f' and has the folder {folder}' if folder else ''}"


def writable(what: str, path: Path, taken: str) -> str:
    """A line; E-RUN-013, of a status file E-RUN-020, where the file could not be made or opened, `taken` where another process has it. The file is not touched."""
    where = printable(str(path))
    if not path.exists():
        why = trouble(existing(path))
        if why:
            _refuse(what, where, why)
        return f"{where} can be made"
    if path.is_dir() or not os.access(path, os.W_OK):
        _refuse(what, where, "it is a folder" if path.is_dir() else "it cannot be written")
    if taken and path.is_file():
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            raise problem(taken, f"another run that is still alive writes to the {what} file {where}", help="wait for it, stop it, or name another file") from None
        finally:
            os.close(descriptor)
    return f"{where} can be written"


def _refuse(what: str, where: str, why: str) -> None:
    raise problem("E-RUN-020" if what == "status" else "E-RUN-013", f"the {what} file {where} cannot be opened: {why}", help="name a file in a folder that you may write to")


CHECK = Check("metrics", "metrics", "error", 60, run)
