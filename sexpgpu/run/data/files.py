"""Bytes of a source's file: read, hashed, unpacked, with the errors of each."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from sexpgpu.diagnostics import fail, suggestion
from sexpgpu.experiment.model import DataSource

CHUNK = 1 << 20
GZIP = b"\x1f\x8b"


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


def is_packed(source: DataSource, path: Path) -> bool:
    """Gzip by its magic bytes or the name's `.gz`."""
    check_file(source, path)
    try:
        with path.open("rb") as file:
            return file.read(2) == GZIP or path.suffix == ".gz"
    except OSError as error:
        unreadable(source, path, error)


def text_chunks(source: DataSource, path: Path) -> Iterator[bytes]:
    """The file's bytes, unpacked where it is gzip, in pieces of about CHUNK. Errors: E-DATA-001, 005."""
    packed = is_packed(source, path)
    try:
        with path.open("rb") as file:
            raw = iter(lambda: file.read(CHUNK), b"")
            yield from inflated(raw) if packed else raw
    except (zlib.error, EOFError) as error:
        fail("E-DATA-005", f"{source.location} is not a whole gzip file ({error})", source.location_span or source.span,
             help="fetch or write the file again")
    except OSError as error:
        unreadable(source, path, error)


def inflated(raw: Iterator[bytes]) -> Iterator[bytes]:
    """Gzip members in a row as one text, never more than CHUNK at once; zlib.error or EOFError where it is not whole."""
    member, rest, some = zlib.decompressobj(wbits=31), b"", False
    while True:
        if not rest:
            rest = next(raw, b"")
            if not rest:
                break
        if member.eof:
            rest = rest.lstrip(b"\0")
            if not rest:
                continue
            member = zlib.decompressobj(wbits=31)
        some = True
        piece = member.decompress(rest, CHUNK)
        rest = member.unused_data if member.eof else member.unconsumed_tail
        if piece:
            yield piece
    if some and not member.eof:
        raise EOFError("it ends early: the file was cut")


def unpacked(source: DataSource, path: Path) -> bytes:
    """The whole text, unpacked where it is gzip."""
    return b"".join(text_chunks(source, path))


def whole_lines(chunks: Iterator[bytes], size: int) -> Iterator[bytes]:
    """The text in pieces of at least `size` bytes that end with a line, but the last."""
    kept: list[bytes] = []
    length = 0
    for chunk in chunks:
        end = chunk.rfind(b"\n") + 1
        if end and length + end >= size:
            yield b"".join((*kept, chunk[:end]))
            kept, length = [chunk[end:]], len(chunk) - end
        else:
            kept.append(chunk)
            length += len(chunk)
    if length:
        yield b"".join(kept)


def no_rows(source: DataSource, what: str) -> NoReturn:
    fail("E-DATA-006", f"{source.location} has {what}", source.location_span or source.span)
