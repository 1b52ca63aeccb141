"""The places that a run reads and writes, each tried with the credentials of its role."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module

from sexpgpu.diagnostics import Diagnostic, SexpError, SexpErrors, problem
from sexpgpu.doctor import Ask, Check, Fact
from sexpgpu.run.storage import StorageError, is_remote

#: role -> what is tried at a location of it, (location, folder) -> lines; only the probe of a bucket brings boto3
PROBES = {"data": "sexpgpu.run.storage.probe:data", "checkpoints": "sexpgpu.run.storage.probe:checkpoints"}


def run(ask: Ask) -> Iterator[Fact | Diagnostic]:
    """E-NET-…, E-CKPT-011 for each place that is not as a run needs it."""
    for role, location in places(ask):
        try:
            for line in tried(role, location, ask.folder):
                yield role, line
        except SexpError as error:
            yield from error.diagnostics


def places(ask: Ask) -> list[tuple[str, str]]:
    """(role, location): those asked for, the checkpoint location of the settings, and the file's sources in buckets."""
    found = [(role, location) for role, location in ask.probes.items() if location is not None]
    if ask.settings.checkpoint_dir:
        found.append(("checkpoints", ask.settings.checkpoint_dir))
    return list(dict.fromkeys(found))


def sources(ask: Ask) -> Iterator[Fact | Diagnostic]:
    """The same of FILE's sources in buckets, once they are known."""
    for source in ask.known["loaded"].experiment.data.values():
        if not is_remote(source.location):
            continue
        try:
            for line in tried("data", source.location, ask.folder):
                yield source.name, line
        except SexpError as error:
            yield from error.diagnostics


def tried(role: str, location: str, folder: str) -> list[str]:
    """The lines of a probe; an operating system's refusal is a coded mistake too."""
    module, name = PROBES[role].split(":")
    probe: Callable[[str, str], list[str]] = getattr(import_module(module), name)
    try:
        return probe(location, folder)
    except StorageError as error:
        if error.diagnostic.help or is_remote(location):
            raise
        mend = "check the path" if role == "data" else "name a folder that you may read and write"
        raise SexpErrors([replace(d, help=(mend,)) for d in error.diagnostics]) from None
    except OSError as error:
        raise problem("E-NET-024", f"{location}: {error.strerror or error}", help="name a folder that you may read and write") from None


CHECK = Check("storage", "storage", "error", 90, run)
