"""`sexpgpu data tokenize`: texts into token files, with the tokenizer beside them. The same texts give the same bytes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sexpgpu.diagnostics import fail, printable
from sexpgpu.experiment.model import DataSource
from sexpgpu.run.data.files import digest, text_chunks
from sexpgpu.run.data.once import Once, write_once
from sexpgpu.run.data.tokenizer import LEAST, Tokenizer, decoded, encode, load, pieces, train

FORMAT = "sexpgpu-tokens-1"
MOST = 1 << 31


@dataclass(frozen=True)
class Tokenized:
    """What was written: `record` is tokens.json."""

    folder: Path
    record: dict[str, Any]


def tokenize(inputs: Sequence[Path], out: Path, vocabulary: int | None, given: Path | None) -> Tokenized:
    """Trains a tokenizer on the inputs, or takes the given one; writes a token file for each input.

    Errors: E-DATA-001, 005, 008, 016, 017, 019, 046.
    """
    names = [_stem(path) for path in inputs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        fail("E-DATA-019", f"two inputs would both become `{printable(twice)}`", help="rename one, or call twice with two --out")
    if (vocabulary is None) == (given is None):
        fail("E-DATA-019", "either --vocab trains a tokenizer, or --tokenizer takes one that is there",
             help="sexpgpu data tokenize corpus.txt --vocab 8192 --out tok")
    if vocabulary is not None and not LEAST <= vocabulary < MOST:
        fail("E-DATA-019", f"--vocab is at least {LEAST}, one token for each byte, and is {vocabulary}")
    tokenizer = _made(inputs, out, vocabulary) if given is None else load(given, str(given))
    if given is not None:
        write_once(out / "tokenizer.json", given.read_bytes())
    kind = "u16" if tokenizer.dtype.itemsize == 2 else "u32"
    files = [_encoded(tokenizer, path, out / f"{name}.{kind}") for path, name in zip(inputs, names, strict=True)]
    record = {"format": FORMAT, "vocabulary": tokenizer.vocabulary, "dtype": kind,
              "tokenizer": {"name": "tokenizer.json", "sha256": tokenizer.digest}, "files": files}
    write_once(out / "tokens.json", (json.dumps(record, indent=2) + "\n").encode())
    return Tokenized(out, record)


def _stem(path: Path) -> str:
    name = path.name.removesuffix(".gz")
    return name.rsplit(".", 1)[0] if "." in name.lstrip(".") else name


def _made(inputs: Sequence[Path], out: Path, vocabulary: int | None) -> Tokenizer:
    assert vocabulary is not None
    some = False

    def texts() -> Iterator[str]:
        nonlocal some
        for path in inputs:
            for piece in pieces(_text(path)):
                some = True
                yield piece

    model = train(texts(), vocabulary)
    if not some:
        fail("E-DATA-019", "the inputs have no text at all")
    path = out / "tokenizer.json"
    write_once(path, model.encode())
    return load(path, str(path))


def _text(path: Path) -> Iterator[str]:
    source = DataSource(path.name, "text", str(path), "", ())
    try:
        yield from decoded(text_chunks(source, path))
    except UnicodeDecodeError as error:
        fail("E-DATA-008", f"{printable(str(path))}, byte {error.start + 1:,}: it is not UTF-8", help="save the file as UTF-8")


def _encoded(tokenizer: Tokenizer, path: Path, target: Path) -> dict[str, Any]:
    with Once(target) as once:
        for part in encode(tokenizer, _text(path)):
            once.write(part.tobytes())
        if not once.size:
            fail("E-DATA-019", f"{printable(str(path))} has no text at all")
    source = DataSource(path.name, "text", str(path), "", ())
    return {"name": target.name, "tokens": once.size // tokenizer.dtype.itemsize, "bytes": once.size, "sha256": once.sha256,
            "text": {"name": path.name, "sha256": digest(source, path)}}


def verify(folder: Path) -> list[str]:
    """What of a folder that `tokenize` wrote is not as its tokens.json says; E-DATA-020 where that cannot be read."""
    path = folder / "tokens.json"
    try:
        record = json.loads(path.read_bytes())
        files = [(record["tokenizer"]["name"], record["tokenizer"]["sha256"])] + [(f["name"], f["sha256"]) for f in record["files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        fail("E-DATA-020", f"{printable(str(path))} cannot be read ({type(error).__name__})")
    wrong = []
    for name, wanted in files:
        try:
            with open(folder / Path(str(name)).name, "rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != wanted:
                    wrong.append(f"{printable(str(name))}: its content is not the one that was written")
        except OSError as error:
            wrong.append(f"{printable(str(name))}: {error.strerror or error}")
    return wrong
