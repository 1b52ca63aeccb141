"""`(text location :tokens bytes)`: a text, plain or gzipped, whose tokens are its bytes, or `(bpe "tokenizer.json")`'s."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from sexpgpu.diagnostics import fail
from sexpgpu.experiment.model import DataSource
from sexpgpu.run.data.cache import Say, key_of, silent
from sexpgpu.run.data.files import digest, is_packed, no_rows, text_chunks
from sexpgpu.run.data.parsed import WORTH, cached
from sexpgpu.run.data.stream import Stream
from sexpgpu.run.data.tokenizer import decoded, encode, load


def read(source: DataSource, path: Path, say: Say = silent) -> Stream:
    """Tokens as narrow as they go. Errors: E-DATA-001, 005, 006; with bpe also 008, 017."""
    known, size = digest(source, path), path.stat().st_size
    if source.options.get("tokens", "bytes") == "bpe":
        return _bpe(source, path, known, size, say)
    if not size:
        no_rows(source, "no text at all")
    if size >= WORTH and not is_packed(source, path):
        return Stream(source, np.memmap(path, np.uint8, "r"), known)
    found = cached(key_of(known, "bytes"), size, lambda: _bytes(source, path), say)
    if not found:
        no_rows(source, "no text at all")
    return Stream(source, found["tokens"], known)


def _bytes(source: DataSource, path: Path) -> Iterator[dict[str, np.ndarray]]:
    for piece in text_chunks(source, path):
        yield {"tokens": np.frombuffer(piece, np.uint8)}


def _bpe(source: DataSource, path: Path, known: str, size: int, say: Say) -> Stream:
    """The digest is of both files: other merges are other data."""
    place = source.location_span or source.span
    tokenizer = load(Path(source.folder) / source.options["tokenizer"], source.options["tokenizer"], place)
    both = hashlib.sha256(f"{known} {tokenizer.digest}".encode()).hexdigest()

    def parts() -> Iterator[dict[str, np.ndarray]]:
        try:
            for part in encode(tokenizer, decoded(text_chunks(source, path))):
                yield {"tokens": part}
        except UnicodeDecodeError as error:
            fail("E-DATA-008", f"{source.location}, byte {error.start + 1:,}: it is not UTF-8, and bpe tokens are of text",
                 place, help="save the file as UTF-8, or take :tokens bytes")

    found = cached(key_of(both, "bpe"), size, parts, say)
    if not found:
        no_rows(source, "no text at all")
    return Stream(source, found["tokens"], both)
