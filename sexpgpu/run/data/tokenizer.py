"""Byte-level BPE: trained, saved and used through the `tokenizers` library, which runs on threads of its own.

A text is encoded in pieces. They are cut only between a lone line break and the letter after it, where GPT-2's rule of
splitting into words ends a word in any case: the tokens are those of the whole text, wherever the pieces end.
"""

from __future__ import annotations

import codecs
import contextlib
import hashlib
import re
import signal
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sexpgpu.diagnostics import fail, printable
from sexpgpu.source import Span

PIECE = 1 << 18  # characters encoded in one go
TOGETHER = 8  # pieces handed to the library's threads at once
LEAST = 256  # the bytes themselves
_CUT = re.compile(r"(?<=\S)\n(?=\S)")


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """`model`: the library's. `digest`: SHA-256 of the file it came from."""

    model: Any
    digest: str

    @property
    def vocabulary(self) -> int:
        return int(self.model.get_vocab_size())

    @property
    def dtype(self) -> np.dtype:
        """What one token takes."""
        return np.dtype("<u2" if self.vocabulary <= 1 << 16 else "<u4")


def train(texts: Iterable[str], vocabulary: int) -> str:
    """The JSON of a tokenizer with at most that many tokens; a pure function of the texts' characters."""
    from tokenizers import Tokenizer as Model
    from tokenizers import decoders, models, pre_tokenizers, trainers

    model = Model(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, min_frequency=2, show_progress=False, special_tokens=[],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    with interruptible():
        model.train_from_iterator(texts, trainer)
    return str(model.to_str(pretty=True)) + "\n"


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Inside, Ctrl-C ends the process as the system does: the library looks at no signal, and nothing is half written yet."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    older = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, older)


def load(path: Path, name: str, place: Span | None = None) -> Tokenizer:
    """The tokenizer of a JSON file; E-DATA-017 for one that is missing, broken, or has tokens of its own making."""
    from tokenizers import Tokenizer as Model

    try:
        data = path.read_bytes()
        model = Model.from_str(data.decode("utf-8"))
    except OSError as error:
        fail("E-DATA-017", f"the tokenizer {printable(name)} cannot be read: {error.strerror or error}", place,
             help=f"sexpgpu data tokenize TEXT --vocab 8192 --out {path.parent.name or '.'}")
    except Exception as error:  # the library raises plain exceptions
        fail("E-DATA-017", f"{printable(name)} is no tokenizer: {printable(str(error))}", place,
             help="it is the tokenizer.json that `sexpgpu data tokenize` writes")
    return Tokenizer(model, hashlib.sha256(data).hexdigest())


def decoded(chunks: Iterable[bytes]) -> Iterator[str]:
    """UTF-8 as text; UnicodeDecodeError's `start` counts from the beginning of all chunks."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    seen = 0
    for chunk in chunks:
        kept = len(decoder.getstate()[0])
        try:
            yield decoder.decode(chunk)
        except UnicodeDecodeError as error:
            raise UnicodeDecodeError("utf-8", error.object, seen - kept + error.start, seen - kept + error.end, error.reason) from None
        seen += len(chunk)
    try:
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise UnicodeDecodeError("utf-8", error.object, seen - len(error.object), seen, error.reason) from None


def pieces(texts: Iterable[str], size: int = PIECE) -> Iterator[str]:
    """The text in pieces of about `size` characters or more, cut only where that changes no token."""
    kept = ""
    for text in texts:
        kept += text
        while len(kept) > size:
            cut = _CUT.search(kept, size - 1)
            if cut is None:
                break
            yield kept[: cut.end()]
            kept = kept[cut.end() :]
    if kept:
        yield kept


def encode(tokenizer: Tokenizer, texts: Iterable[str]) -> Iterator[np.ndarray]:
    """Token numbers, in parts."""
    batch: list[str] = []
    for piece in pieces(texts):
        batch.append(piece)
        if len(batch) == TOGETHER:
            yield _encoded(tokenizer, batch)
            batch = []
    if batch:
        yield _encoded(tokenizer, batch)


def _encoded(tokenizer: Tokenizer, batch: list[str]) -> np.ndarray:
    found = tokenizer.model.encode_batch_fast(batch, add_special_tokens=False)
    return np.concatenate([np.array(one.ids, tokenizer.dtype) for one in found])
