"""Shards of three formats as records in the fields' arrays. Runs in workers; every mistake is a `Wrong` naming the shard."""

from __future__ import annotations

import hashlib
import io
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import zstandard

from sexpgpu.diagnostics import suggestion
from sexpgpu.experiment.model import Field
from sexpgpu.run.data.block import BlockWriter
from sexpgpu.run.data.files import whole_lines
from sexpgpu.run.data.manifest.schema import Shard
from sexpgpu.run.data.place import LocalPlace, Place
from sexpgpu.run.data.records import Cut, Parsed, Start, Wrong, parse_lines, parse_objects
from sexpgpu.run.data.workers import Progress
from sexpgpu.run.storage import Missing

CHUNK = 1 << 20
PIECE = 1 << 20  # bytes of text parsed in one go
TOGETHER = 2048  # records of the other formats
FRAME, PAYLOAD = 256 << 20, 1 << 30  # bytes: the most one record of msgpack.zstf may take, packed and not
ETAG = re.compile(r'"?([0-9a-f]{32})(?:-([0-9]{1,5}))?"?')


def fetch(place: Place, shard: Shard, copy: Path | None, progress: Progress) -> Path:
    """Reads a shard once and checks size and digest; gives the file to parse, `copy` for an object of a bucket.

    Raises Wrong: E-DATA-023 (it is not there), 024 (size), 025 (digest); StorageError.
    """
    try:
        if isinstance(place, LocalPlace):
            found = place.stat()
            if found is None:
                raise gone(place, shard)
            check_size(shard, found.size)
        digest, size = hashlib.md5(usedforsecurity=False), 0
        out = open(copy, "wb") if copy is not None else None  # noqa: SIM115 - closed below
        try:
            for piece in place.chunks():
                progress.touch()
                size += len(piece)
                digest.update(piece)
                if out is not None:
                    out.write(piece)
        finally:
            if out is not None:
                out.close()
    except Missing:
        raise gone(place, shard) from None
    except OSError as error:
        raise Wrong("E-DATA-023", f"shard {shard.uri}: {place.text} cannot be read: {error.strerror or error}") from None
    check_size(shard, size)
    asked = isinstance(place, LocalPlace) or made_from(shard, digest.digest()) == shard.etag  # saves a request
    known = None if asked else place.stat()
    check_digest(shard, digest.digest(), known.etag if known is not None else "")
    if copy is not None:
        return copy
    assert isinstance(place, LocalPlace)
    return place.path


def gone(place: Place, shard: Shard) -> Wrong:
    """E-DATA-023 for a shard that is not there."""
    return Wrong("E-DATA-023", f"shard {shard.uri} ({shard.at}): there is no {place.text}",
                 ("the manifest is older or newer than the shards, or they were renamed",))


def made_from(shard: Shard, digest: bytes) -> str:
    """The etag of an upload in one request, or in one part, whichever the manifest's is."""
    if shard.etag.rstrip('"').endswith("-1"):
        return f'"{hashlib.md5(digest, usedforsecurity=False).hexdigest()}-1"'
    return f'"{digest.hex()}"'


def check_size(shard: Shard, size: int) -> None:
    """E-DATA-024 where a shard has another size than its manifest says."""
    if size != shard.size:
        what = "it is empty" if not size else f"it has {size:,} bytes"
        raise Wrong("E-DATA-024", f"shard {shard.uri}: {what}, and the manifest says {shard.size:,}",
                    ("it was cut or replaced: fetch it again",))


def check_digest(shard: Shard, digest: bytes, etag: str) -> None:
    """E-DATA-025 where the bytes are not those of the manifest's etag. `digest`: their MD5; `etag`: the store's, or empty.

    An etag is the MD5 of the bytes, or `<hex>-n` for an upload in n parts: with one part the MD5 of the MD5. More parts
    tell nothing without their size, and some stores' etags are no MD5: then an etag that is still the store's is enough.
    """
    wanted = ETAG.fullmatch(shard.etag)
    if wanted is None or shard.etag == etag:
        return
    if wanted[2] is None:
        made = digest.hex()
    elif wanted[2] == "1":
        made = hashlib.md5(digest, usedforsecurity=False).hexdigest()
    else:
        there = ETAG.fullmatch(etag)
        made = wanted[1] if there is None or there[2] != wanted[2] else there[1]
    if made != wanted[1]:
        raise Wrong("E-DATA-025", f"shard {shard.uri}: the digest of its bytes is {made}, and the manifest's etag is {shard.etag}: its "
                    "content was damaged or replaced", ("fetch it again",))


def parse_shard(path: str, shard: Shard, form: str, fields: tuple[Field, ...], block: str, tag: str | None = None) -> dict[str, Any]:
    """Writes the shard's records to the block file; its facts: count, least and greatest values, cuts. `tag`: of BlockWriter.

    Raises Wrong: E-DATA-009, 008, 026, 027, 037 … 039, 045; OSError where the block cannot be written.
    """
    facts = _Facts()
    writer = BlockWriter(Path(block), tag)
    try:
        for parsed in READERS[form](path, shard, fields):
            facts.add(parsed)
            if facts.count > shard.records:
                raise Wrong("E-DATA-026", f"shard {shard.uri}: it has more records than the {shard.records:,} of the manifest")
            writer.add(parsed.arrays)
        if facts.count < shard.records:
            raise Wrong("E-DATA-026", f"shard {shard.uri}: it has {facts.count:,} records, and the manifest says {shard.records:,}")
        writer.finish(facts.told())
    finally:
        writer.drop()
    return facts.told()


class _Facts:
    def __init__(self) -> None:
        self.count = 0
        self.low: dict[str, Any] = {}
        self.high: dict[str, Any] = {}
        self.cuts: dict[str, Cut] = {}

    def add(self, parsed: Parsed) -> None:
        self.count += parsed.count
        for name, array in parsed.arrays.items():
            low, high = array.min().item(), array.max().item()
            self.low[name] = min(self.low.get(name, low), low)
            self.high[name] = max(self.high.get(name, high), high)
        for name, cut in parsed.cuts.items():
            self.cuts.setdefault(name, Cut()).join(cut)

    def told(self) -> dict[str, Any]:
        return {"count": self.count, "low": self.low, "high": self.high, "cuts": {n: vars(c) for n, c in self.cuts.items()}}


def broken(shard: Shard, why: str) -> Wrong:
    return Wrong("E-DATA-027", f"shard {shard.uri}: {why}", ("fetch it again, or have it written again",))


# jsonl.gz


def _jsonl(path: str, shard: Shard, fields: tuple[Field, ...]) -> Iterator[Parsed]:
    start = Start(shard.uri, shard=True)
    for piece in whole_lines(one_member(path, shard), PIECE):
        parsed = parse_lines(piece, fields, start)
        count = 0
        if parsed is not None:
            count = parsed.count
            yield parsed
        start = Start(shard.uri, True, start.line + piece.count(b"\n"), start.record + count, start.byte + len(piece))


def one_member(path: str, shard: Shard) -> Iterator[bytes]:
    """The text of a gzip file of exactly one member."""
    member = zlib.decompressobj(wbits=31)
    read = 0
    with open(path, "rb") as file:
        while data := file.read(CHUNK):
            if member.eof:
                raise broken(shard, f"there are bytes after its gzip member, from byte {read:,} on")
            read += len(data)
            try:
                while data:
                    piece = member.decompress(data, CHUNK)
                    if piece:
                        yield piece
                    data = member.unconsumed_tail
                while not member.eof and (piece := member.decompress(b"", CHUNK)):
                    yield piece
            except zlib.error as error:
                raise broken(shard, f"its gzip data is damaged near byte {read:,} ({error})") from None
            if member.unused_data:
                raise broken(shard, f"there are bytes after its gzip member, from byte {read - len(member.unused_data):,} on")
    if not member.eof:
        raise broken(shard, f"its gzip data ends early, at byte {read:,}")


# parquet


def arrow() -> Any:
    """pyarrow.parquet, an optional library."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise Wrong("E-DATA-045", "shards of format parquet are read with pyarrow, which is not installed",
                    ("pip install 'sexpgpu[parquet]'",)) from None
    return pyarrow.parquet


def _parquet(path: str, shard: Shard, fields: tuple[Field, ...]) -> Iterator[Parsed]:
    done = 0
    for group, objects in parquet_objects(path, shard, [f.name for f in fields]):
        first = done
        yield parse_objects(objects, fields, lambda row, first=first, group=group:  # type: ignore[misc]
                            f"shard {shard.uri}, record {first + row + 1} (row group {group})")
        done += len(objects)


def parquet_objects(path: str, shard: Shard, names: list[str] | None) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """(row group, some of its records); only the named columns, which must be there."""
    reader = arrow()
    import pyarrow

    try:
        with reader.ParquetFile(path) as file:
            there = file.schema_arrow.names
            for name in names or ():
                if name not in there:
                    raise Wrong("E-DATA-038", f"shard {shard.uri}: it has no column `{name}`", suggestion(name, there, "columns"))
            for group in range(file.num_row_groups):
                for batch in file.iter_batches(TOGETHER, row_groups=[group], columns=names, use_threads=False):
                    yield group, batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise broken(shard, f"it is not a whole Parquet file ({str(error).splitlines()[0][:120]})") from None


# msgpack.zstf


def _msgpack(path: str, shard: Shard, fields: tuple[Field, ...]) -> Iterator[Parsed]:
    objects: list[Any] = []
    offsets: list[int] = []
    done = 0

    def parsed() -> Parsed:
        first, at = done, tuple(offsets)
        return parse_objects(objects, fields, lambda row: f"shard {shard.uri}, record {first + row + 1} (byte {at[row]})")

    for offset, value in msgpack_objects(path, shard):
        offsets.append(offset)
        objects.append(value)
        if len(objects) == TOGETHER:
            yield parsed()
            done, objects, offsets = done + TOGETHER, [], []
    if objects:
        yield parsed()


def msgpack_objects(path: str, shard: Shard) -> Iterator[tuple[int, Any]]:
    """(byte where its frame's length stands, record)."""
    with open(path, "rb") as file:
        offset = record = 0
        while head := file.read(8):
            record += 1
            size = int.from_bytes(head, "big")
            if len(head) < 8 or not 0 < size <= FRAME:
                raise broken(shard, f"record {record} (byte {offset}): no length of a frame stands there")
            frame = file.read(size)
            if len(frame) < size:
                raise broken(shard, f"record {record} (byte {offset}): its frame ends early")
            try:
                value = msgspec.msgpack.decode(_unframed(frame))
            except (msgspec.DecodeError, RecursionError, ValueError) as error:
                raise broken(shard, f"record {record} (byte {offset}): {str(error) or 'it is no MessagePack'}") from None
            yield offset, value
            offset += 8 + size


def _unframed(frame: bytes) -> bytes:
    """What one zstd frame holds; ValueError where it is not exactly one, or holds too much."""
    try:
        out = io.BytesIO()
        with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(frame), read_across_frames=False) as reader:
            while piece := reader.read(CHUNK):
                if out.tell() + len(piece) > PAYLOAD:
                    raise ValueError("it unpacks to more than 1 GiB")
                out.write(piece)
        parameters = zstandard.get_frame_parameters(frame)
    except zstandard.ZstdError as error:
        raise ValueError(f"its zstd frame is damaged ({error})") from None
    known = parameters.content_size
    if known not in (zstandard.CONTENTSIZE_UNKNOWN, zstandard.CONTENTSIZE_ERROR) and known != out.tell():
        raise ValueError("its zstd frame ends early")
    return out.getvalue()


READERS: dict[str, Callable[[str, Shard, tuple[Field, ...]], Iterator[Parsed]]] = {
    "jsonl.gz": _jsonl, "parquet": _parquet, "msgpack.zstf": _msgpack,
}
