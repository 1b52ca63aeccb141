"""Bytes of a source's file: read, hashed, unpacked, with the errors of each."""

from __future__ import annotations

import hashlib
import zlib
from pathlib import Path
from typing import NoReturn

from sexpgpu.diagnostics import fail, suggestion
from sexpgpu.experiment.model import DataSource


def read_bytes(source: DataSource, path: Path) -> bytes:
    """The whole file, or E-DATA-001."""
    check_file(source, path)
    try:
        return path.read_bytes()
    except OSError as error:
        unreadable(source, path, error)


def digest(source: DataSource, path: Path) -> str:
    """SHA-256 of the file in hex, without holding it; E-DATA-001 if it cannot be read."""
    check_file(source, path)
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        unreadable(source, path, error)


def check_file(source: DataSource, path: Path) -> None:
    """A pipe or device would never end."""
    if path.exists() and not path.is_file():
        fail("E-DATA-001", f"data `{source.name}`: {path} is a folder or device, not a file",
             source.location_span or source.span)


def unreadable(source: DataSource, path: Path, error: OSError) -> NoReturn:
    near: tuple[str, ...] = ()
    if isinstance(error, FileNotFoundError) and path.parent.is_dir():
        near = suggestion(path.name, [p.name for p in path.parent.iterdir() if p.is_file()], "files there")
    reason = "there is no such file" if isinstance(error, FileNotFoundError) else (error.strerror or str(error))
    fail("E-DATA-001", f"data `{source.name}`: {path}: {reason}", source.location_span or source.span, help=near)


def unpacked(source: DataSource, path: Path, raw: bytes) -> bytes:
    """Gzip by its magic bytes or the name's `.gz`; several members in a row are one text. Else E-DATA-005."""
    if raw[:2] != b"\x1f\x8b" and path.suffix != ".gz":
        return raw
    out, rest = [], raw
    try:
        while rest.strip(b"\0"):
            member = zlib.decompressobj(wbits=31)
            out.append(member.decompress(rest) + member.flush())
            if not member.eof:
                raise EOFError("it ends early: the file was cut")
            rest = member.unused_data
    except (zlib.error, EOFError) as error:
        fail("E-DATA-005", f"{source.location} is not a whole gzip file ({error})", source.location_span or source.span,
             help="fetch or write the file again")
    return b"".join(out)


def no_rows(source: DataSource, what: str) -> NoReturn:
    fail("E-DATA-006", f"{source.location} has {what}", source.location_span or source.span)
