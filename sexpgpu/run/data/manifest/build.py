"""`sexpgpu data build`: local JSON lines into jsonl.gz shards under a manifest, written last.

The same input gives the same bytes on every machine with the same zlib. Each finished shard has a note beside it
(`….metadata.json`) of what it was made from: a build that was interrupted goes on behind the last such shard. Nothing
that holds something else is written over.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sexpgpu.diagnostics import fail, printable
from sexpgpu.experiment.model import DataSource
from sexpgpu.run.data.cache import Say, silent
from sexpgpu.run.data.files import digest, text_chunks, whole_lines
from sexpgpu.run.data.manifest.schema import Part, Shard, text
from sexpgpu.run.data.once import write_once

NAME = "data-manifest-v1.json"
SCHEMA = "sexpgpu-shard-1"
SAFE = "-_.=+"  # what the format's own savers leave as it is in names of splits and stages
GZIP_HEAD = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"  # no name, no time, no system: nothing of this machine
PIECE = 1 << 20


@dataclass(frozen=True)
class Input:
    """A file of JSON lines, and the split and stage its records belong to."""

    split: str
    stage: str | None
    path: Path


def parse_input(word: str) -> Input:
    """`train=a.jsonl`, `train/easy=a.jsonl`, or a path alone, which is the split `train`."""
    name, mark, path = word.partition("=")
    if not mark:
        name, path = "train", word
    split, _, stage = name.partition("/")
    if not split or not path or (mark and "/" in name and not stage):
        fail("E-DATA-019", f"`{printable(word)}` is no input", help="train=a.jsonl, or train/easy=a.jsonl for a stage of the curriculum")
    return Input(split, stage or None, Path(path))


def build(inputs: Sequence[Input], out: Path, records: int, base: str | None, say: Say = silent) -> Path:
    """Writes shards of at most `records` records and the manifest; gives its path. `base`: what URIs begin with.

    Errors: E-DATA-001, 005, 016, 019, 037, 046.
    """
    if records < 1:
        fail("E-DATA-019", f"--records is at least 1, and is {records}")
    if base is not None and not _absolute(base):
        fail("E-DATA-019", f"--base `{printable(base)}` is nothing that a URI can begin with", help="s3://bucket/prefix, file:///folder or an absolute path")
    groups: dict[tuple[str, str | None], list[Path]] = {}
    for one in inputs:
        groups.setdefault((one.split, one.stage), []).append(one.path)
    parts: dict[str, Part] = {}
    for split in dict.fromkeys(split for split, _ in groups):
        stages = {stage: _group(split, stage, paths, out, records, base, say)
                  for (name, stage), paths in groups.items() if name == split}
        shards = tuple(shard for made in stages.values() for shard in made)
        parts[split] = Part(_count(shards), shards, {s: Part(_count(made), made) for s, made in stages.items() if s is not None})
    path = out / NAME
    write_once(path, text("jsonl.gz", parts).encode())
    return path


def _absolute(base: str) -> bool:
    scheme, mark, rest = base.partition("://")
    return rest.strip("/") != "" and scheme in ("s3", "file") if mark else base.startswith("/") and base.strip("/") != ""


def _count(shards: Sequence[Shard]) -> int:
    return sum(shard.records for shard in shards)


def _group(split: str, stage: str | None, paths: Sequence[Path], out: Path, most: int, base: str | None, say: Say) -> tuple[Shard, ...]:
    """The shards of one split or stage, in the order of its inputs."""
    folder = f"shards/{quote(split, safe=SAFE)}" + (f"/curriculum/{quote(stage, safe=SAFE)}" if stage is not None else "")
    sources = [DataSource(path.name, "jsonl", str(path), "", ()) for path in paths]
    origin = hashlib.sha256(json.dumps([SCHEMA, most, [digest(s, p) for s, p in zip(sources, paths, strict=True)]]).encode()).hexdigest()
    lines = _lines(sources, paths)
    shards: list[Shard] = []
    while True:
        name = f"{folder}/part-{len(shards):05d}.jsonl.gz"
        uri = name if base is None else f"{base.rstrip('/')}/{name}"
        known = _finished(out / name, origin)
        if known is not None:
            skipped = sum(1 for _ in zip(range(known["records"]), lines, strict=False))
            if skipped != known["records"]:
                fail("E-DATA-046", f"{printable(str(out / name))} has a note that does not fit its input", help="name another --out")
        else:
            known = _shard(out / name, lines, most, origin)
        if known is None:
            break
        shards.append(Shard(uri, known["records"], known["size_bytes"], known["etag"]))
        say(f"{printable(uri)}: {known['records']:,} records, {known['size_bytes']:,} bytes")
    if not shards:
        fail("E-DATA-019", f"{printable(', '.join(map(str, paths)))}: no records for `{printable(split)}`")
    return tuple(shards)


def _finished(path: Path, origin: str) -> dict[str, Any] | None:
    """The note of a shard that an earlier call finished from the same input; E-DATA-046 for one from another input."""
    try:
        known = json.loads((path.parent / f"{path.name}.metadata.json").read_bytes())
        size = path.stat().st_size
    except (OSError, ValueError):
        return None
    if not isinstance(known, dict) or known.get("origin") != origin or known.get("size_bytes") != size:
        fail("E-DATA-046", f"{printable(str(path))} was built from another input, or with another --records",
             help="name another --out, or move the old shards away")
    return known


def _shard(path: Path, lines: Iterator[bytes], most: int, origin: str) -> dict[str, Any] | None:
    """The next shard, and its note after it; None where no record is left."""
    packer = zlib.compressobj(6, zlib.DEFLATED, -15)
    out, count, length, check = [GZIP_HEAD], 0, 0, 0
    for line in lines:
        out.append(packer.compress(line))
        count, length, check = count + 1, length + len(line), zlib.crc32(line, check)
        if count == most:
            break
    if not count:
        return None
    out += [packer.flush(), check.to_bytes(4, "little"), (length & 0xFFFFFFFF).to_bytes(4, "little")]
    made = write_once(path, b"".join(out))
    note = {"schema": SCHEMA, "origin": origin, "records": count, "size_bytes": made.size, "etag": f'"{made.md5}"', "sha256": made.sha256}
    write_once(path.parent / f"{path.name}.metadata.json", (json.dumps(note, indent=2) + "\n").encode())
    return note


def _lines(sources: Sequence[DataSource], paths: Sequence[Path]) -> Iterator[bytes]:
    """Each record as one compact line of ASCII."""
    for source, path in zip(sources, paths, strict=True):
        number = 0
        for piece in whole_lines(text_chunks(source, path), PIECE):
            for line in (piece if number else piece.removeprefix(b"\xef\xbb\xbf")).split(b"\n"):
                if line.strip():
                    yield _compact(path, number + 1, line)
                number += 1
            number -= piece.endswith(b"\n")  # nothing stands behind the last line break


def _compact(path: Path, number: int, line: bytes) -> bytes:
    try:
        record = json.loads(line.decode("utf-8"), parse_constant=_refuse)
        if not isinstance(record, dict):
            raise ValueError("it is no object")
        return json.dumps(record, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode() + b"\n"
    except (ValueError, RecursionError) as error:
        fail("E-DATA-037", f"{printable(str(path))}, line {number:,}: not a JSON record ({printable(str(error))})",
             help="a record is one JSON object on one line; NaN and Infinity are not JSON")


def _refuse(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")
