"""Flipped, cut and doctored files: csv, csv.gz, jsonl, jsonl.gz, npy, npz, token files, safetensors and checkpoints.

    python tests/fuzz/files.py [--count 1000] [--seed 0]

Each damaged file must give a coded mistake or the right arrays, by an oracle that shares no code with the reader: Python's
own csv and json for texts, NumPy for its files, the undamaged arrays where the format has a checksum.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import json
import random
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save

from sexpgpu.cli import main
from sexpgpu.diagnostics import SexpError, render
from sexpgpu.experiment.model import DataSource, Field, Init
from sexpgpu.run.checkpoints.find import at_path
from sexpgpu.run.checkpoints.header import saved_schema
from sexpgpu.run.checkpoints.store import load
from sexpgpu.run.data import open_source
from sexpgpu.run.initial import open_weights

ROWS = 40
X = (np.arange(ROWS * 3).reshape(ROWS, 3) % 17 / 4 - 1).astype(np.float32)
LABEL = (np.arange(ROWS) % 7).astype(np.int32)
FIELDS = (Field("x", "f32", (3,)), Field("label", "i32"))
Arrays = dict[str, np.ndarray]


@dataclass
class Tally:
    """How each damaged file ended."""

    ends: Counter[str] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)


def corrupt(data: bytes, rng: random.Random) -> bytes:
    """One to three damages: a bit, a byte, a cut, a piece doubled, removed or blank."""
    out = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        if not out:
            break
        at, kind = rng.randrange(len(out)), rng.randrange(7)
        length = rng.randrange(1, 9)
        if kind <= 1:
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            out[at] = rng.randrange(256)
        elif kind == 3:
            del out[at:]
        elif kind == 4:
            del out[at : at + length]
        elif kind == 5:
            out[at:at] = out[at : at + length]
        else:
            out[at : at + length] = bytes(min(length, len(out) - at))
    return bytes(out)


def csv_text() -> bytes:
    rows = [",".join([*(f"{float(v):g}" for v in X[i]), str(LABEL[i])]) for i in range(ROWS)]
    return ("x_0,x_1,x_2,label\n" + "\n".join(rows) + "\n").encode()


def jsonl_text() -> bytes:
    lines = [json.dumps({"x": [float(v) for v in X[i]], "label": int(LABEL[i])}) for i in range(ROWS)]
    return ("\n".join(lines) + "\n").encode()


def npy_bytes() -> bytes:
    file = io.BytesIO()
    np.save(file, X)
    return file.getvalue()


def npz_bytes() -> bytes:
    file = io.BytesIO()
    np.savez(file, x=X, label=LABEL)
    return file.getvalue()


def csv_oracle(data: bytes) -> Arrays:
    """By Python's csv and float."""
    rows = [r for r in csv.reader(io.StringIO(data.decode("utf-8").removeprefix("\ufeff"), newline="")) if r]
    at = {name.strip(): i for i, name in enumerate(rows[0])}
    x = np.array([[float(r[at[f"x_{i}"]]) for i in range(3)] for r in rows[1:]], np.float64)
    return {"x": x.astype(np.float32), "label": np.array([float(r[at["label"]]) for r in rows[1:]]).astype(np.int32)}


def jsonl_oracle(data: bytes) -> Arrays:
    records = [json.loads(line) for line in data.removeprefix(b"\xef\xbb\xbf").decode("utf-8").split("\n") if line.strip()]
    x = np.array([[float(v) for v in r["x"]] for r in records], np.float64)
    return {"x": x.astype(np.float32), "label": np.array([int(r["label"]) for r in records]).astype(np.int32)}


def npy_oracle(data: bytes) -> Arrays:
    """By the format's own words: a header that literal_eval reads, then the bytes."""
    array = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
    return {"x": np.asarray(array, np.float32)}


def whole_oracle(data: bytes) -> Arrays:
    """The undamaged arrays: the format's checksum lets no other through."""
    return {"x": X, "label": LABEL}


@dataclass(frozen=True)
class Kind:
    name: str
    format: str
    file: str
    data: bytes
    oracle: Callable[[bytes], Arrays]
    fields: tuple[Field, ...] = FIELDS


KINDS = [
    Kind("csv", "csv", "d.csv", csv_text(), csv_oracle),
    Kind("csv.gz", "csv", "d.csv.gz", gzip.compress(csv_text(), mtime=0), whole_oracle),
    Kind("jsonl", "jsonl", "d.jsonl", jsonl_text(), jsonl_oracle),
    Kind("jsonl.gz", "jsonl", "d.jsonl.gz", gzip.compress(jsonl_text(), mtime=0), whole_oracle),
    Kind("npy", "npy", "d.npy", npy_bytes(), npy_oracle, FIELDS[:1]),
    Kind("npz", "npy", "d.npz", npz_bytes(), whole_oracle),
]


def read(kind: Kind, folder: Path, data: bytes) -> Arrays:
    """What the reader of the format gives, as arrays by field."""
    (folder / kind.file).write_bytes(data)
    found = open_source(DataSource("d", kind.format, kind.file, str(folder), kind.fields))
    taken = found.take(np.arange(found.count))
    return {f.name: np.asarray(taken[f.name]) for f in kind.fields}


def judge(tally: Tally, name: str, number: int, work: Callable[[], str]) -> None:
    """One damaged file: `work` says how it ended, or raises a coded mistake."""
    try:
        tally.ends[work()] += 1
    except SexpError as mistake:
        render(mistake.diagnostic)
        tally.ends[mistake.diagnostic.code] += 1
    except Exception:
        tally.bad.append(f"{name} {number}:\n{traceback.format_exc(limit=-5)}")


def equal(got: Arrays, wanted: Arrays) -> bool:
    return all(got[n].shape == wanted[n].shape and np.array_equal(got[n], wanted[n]) for n in got)


def data_files(kind: Kind, count: int, seed: int, folder: Path) -> Tally:
    """Damaged files of one data format."""
    tally = Tally()
    assert equal(read(kind, folder, kind.data), kind.oracle(kind.data))

    def one(data: bytes) -> str:
        got = read(kind, folder, data)
        if not equal(got, kind.oracle(data)):
            raise AssertionError(f"a silently wrong array from {data[:80]!r}")
        return "right"

    for number in range(count):
        data = corrupt(kind.data, random.Random(f"{kind.name}/{seed}/{number}"))
        judge(tally, kind.name, number, lambda data=data: one(data))
    return tally


PROGRAM = """(import "nn" "optim" "loss")
(defdata d (csv "d.csv" :fields ((x f32 [3]) (label i32))))
(defun f (x label) (cross-entropy (linear x 7) label))
(defrun train :data (batches d :batch 8) :loss f :optimizer (adamw :lr 1e-3) :steps 2)
"""


def checkpoint(folder: Path) -> Path:
    """A checkpoint as `run` writes it."""
    (folder / "d.csv").write_bytes(csv_text())
    (folder / "p.lisp").write_text(PROGRAM, "utf-8")
    assert main.perform(["run", str(folder / "p.lisp"), "--checkpoint-dir", str(folder / "ck")]) == 0
    return folder / "ck" / "step-2"


def checkpoints(count: int, seed: int, folder: Path) -> Tally:
    """Damaged checkpoints: the manifest or a part, in a copy of the whole."""
    tally, whole = Tally(), checkpoint(folder)
    files = sorted(p.name for p in whole.iterdir())
    state = load(at_path(str(whole)))
    (folder / "copy").mkdir()

    def one(copy: Path) -> str:
        found = at_path(str(copy))
        saved_schema(found)
        got = load(found)
        same = got.keys() == state.keys() and all(torch.equal(got[n], state[n]) for n in got)
        if not same or found.manifest.step != 2:
            raise AssertionError("a silently wrong state")
        return "right"

    for number in range(count):
        rng = random.Random(f"checkpoint/{seed}/{number}")
        copy = folder / "copy" / "step-2"
        shutil.copytree(whole, copy)
        target = copy / rng.choice(files)
        target.write_bytes(corrupt(target.read_bytes(), rng))
        judge(tally, f"checkpoint {target.name}", number, lambda copy=copy: one(copy))
        shutil.rmtree(copy)
    return tally


def weights(count: int, seed: int, folder: Path) -> Tally:
    """Damaged safetensors files of `:init`, mostly in their headers."""
    tally = Tally()
    data = save({"model/w": torch.arange(12, dtype=torch.float32).reshape(3, 4), "model/b": torch.ones(4)})
    head = 8 + int.from_bytes(data[:8], "little")

    def one(path: Path) -> str:
        schema = open_weights(Init(path.name, str(folder)), lambda text: None).schema
        assert all(isinstance(n, str) and all(s >= 0 for s in shape) for n, (_, shape) in schema.items())
        return "right"

    for number in range(count):
        rng = random.Random(f"weights/{seed}/{number}")
        part = corrupt(data[:head], rng) + data[head:] if rng.random() < 0.8 else corrupt(data, rng)
        path = folder / "w.safetensors"
        path.write_bytes(part)
        judge(tally, "safetensors", number, lambda path=path: one(path))
    return tally


def drive(count: int, seed: int = 0) -> Iterator[tuple[str, Tally]]:
    for name, work in [*((k.name, lambda f, k=k: data_files(k, count, seed, f)) for k in KINDS),
                       ("checkpoint", lambda f: checkpoints(count, seed, f)), ("safetensors", lambda f: weights(count, seed, f))]:
        with tempfile.TemporaryDirectory() as folder:
            yield name, work(Path(folder))


def command() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    failures = 0
    for name, tally in drive(arguments.count, arguments.seed):
        print(f"{name}: {sum(tally.ends.values())} ended well ({', '.join(f'{e} {n}' for e, n in tally.ends.most_common())})")
        print("\n".join(tally.bad[:3]), end="")
        failures += len(tally.bad)
    print(f"failures: {failures}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(command())
