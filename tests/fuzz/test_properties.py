"""Arbitrary input to each reader: a coded mistake with places inside the text, or a result; never another exception."""

from __future__ import annotations

import json
import string
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sexpgpu.diagnostics import Diagnostic, SexpError, render
from sexpgpu.experiment.model import DataSource, Field, Init
from sexpgpu.ir.text import TextProblem, graph_text, read_graph
from sexpgpu.lisp.builtins import BUILTINS
from sexpgpu.lisp.evaluator import Evaluator
from sexpgpu.lisp.modules import Loader
from sexpgpu.lisp.special import TABLE
from sexpgpu.lisp.values import show
from sexpgpu.ops import build
from sexpgpu.ops.verify import VerifyError, verify
from sexpgpu.read.printer import print_form
from sexpgpu.read.reader import read, read_datum
from sexpgpu.run.checkpoints.manifest import Torn, read_manifest
from sexpgpu.run.data import open_source
from sexpgpu.run.initial import open_weights
from sexpgpu.run.storage import open_storage
from sexpgpu.source import Source

MANY = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), database=None, derandomize=True)
MARKS = st.sampled_from(["(", ")", "[", "]", '"', "'", "`", ",", ",@", "#|", "|#", "#;", ";", "\n", " ", "\\", "\r\n", "\x00", "\u202e", "\ufeff", "\u2028"])
TEXTS = st.lists(st.one_of(MARKS, MARKS, st.text(max_size=4), st.sampled_from(["1/2", "1e999", "-", ":k", "nil", "true", "1.", "+inf", "a/b", "#"])),
                 max_size=40).map("".join)  # fmt: skip
ATOMS = st.one_of(
    st.integers(-10, 10).map(str), st.sampled_from(["1/3", "-2/7", "0.5", "1e300", "+inf", "+nan", "true", "nil", ":key", '"s"', "'a", "x", "f32"]),
    st.integers(0, 10**30).map(str), st.text(string.ascii_letters + "\u202e\x1b\n", max_size=6).map(lambda t: json.dumps(t)),
)  # fmt: skip
NAMES = st.sampled_from(sorted(set(BUILTINS) | set(TABLE) - {"import"}) + ["x", "f"])
EXPRESSIONS = st.recursive(ATOMS, lambda inner: st.one_of(
    st.tuples(NAMES, st.lists(inner, max_size=4)).map(lambda p: f"({p[0]} {' '.join(p[1])})"),
    st.lists(inner, max_size=3).map(lambda p: f"[{' '.join(p)}]"),
    inner.map(lambda e: f"(lambda (x) {e})"),
    st.tuples(inner, inner).map(lambda p: f"(let ((x {p[0]})) {p[1]})"),
    st.tuples(inner, inner).map(lambda p: f"((lambda (x &optional (f {p[0]})) {p[1]}) {p[0]})"),
    inner.map(lambda e: f"`(a ,{e} ,@(list {e}))"),
), max_leaves=12)  # fmt: skip


def sound(d: Diagnostic) -> None:
    """A diagnostic that can be shown: known family, places inside their texts, printable lines."""
    for span in (d.span, *(r.span for r in d.related)):
        assert span is None or 0 <= span.start <= span.end <= len(span.source.text) + 1
    assert all(c.isprintable() or c == "\n" for c in render(d))


@MANY
@given(TEXTS)
@example("\ufeff(a)")
@example("(" * 1001)
@example('"\n(' * 50)
def test_reader(text: str) -> None:
    try:
        forms = read(Source("t", text))
    except SexpError as mistake:
        for d in mistake.diagnostics:
            assert d.code.startswith("E-READ-")
            sound(d)
    else:
        again = read(Source("t", "\n".join(map(print_form, forms))))
        assert len(again) == len(forms)


@MANY
@given(st.text(max_size=60))
def test_a_value_of_set(text: str) -> None:
    try:
        read_datum(text, "--set x")
    except SexpError as mistake:
        sound(mistake.diagnostic)


@settings(MANY, max_examples=400)
@given(st.lists(EXPRESSIONS, min_size=1, max_size=3))
def test_evaluator(forms: list[str]) -> None:
    text = "\n".join(["(defparameter f (lambda (a &key b &rest c) a))", "(defparameter x [1 2 3])", *forms])
    try:
        ev = Evaluator(Loader(Source("t", text)), limit=200_000)
        ev.load_main()
        for form in ev.loader.main.forms:
            show(ev.eval(form, ev.main.env))
    except SexpError as mistake:
        for d in mistake.diagnostics:
            sound(d)


GRAPH = graph_text({"loss": build("sum", build("*", build("input", name="x", dtype="f32", shape=(4, 3), batch=True),
                                             build("param", path="w", shape=(3,), dtype="f32")), axis=None)})  # fmt: skip


@settings(MANY, max_examples=300)
@given(st.integers(0, len(GRAPH) - 1), st.integers(0, 6), st.sampled_from(["", "%9", "[", "]", '"', ":", " ", "f32", "-1", "\n", "0x1p9999", "#nan"]))
def test_ir_text(at: int, cut: int, new: str) -> None:
    try:
        results = read_graph(GRAPH[:at] + new + GRAPH[at + cut :])
    except TextProblem:
        return
    assert isinstance(results, dict)
    try:
        verify(results)
    except VerifyError:
        pass  # a graph that reads need not be sound: verify is what says so


JSONS = st.recursive(st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
                     lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)), max_leaves=6)
WHOLE = {
    "format": 1, "run_id": "r", "slug": "s", "run": "t", "step": 1, "cursor": {"epoch": 0, "index": 8}, "seed": 1, "knobs": {}, "ir_hash": "h",
    "program": [], "data": {}, "versions": {}, "device": "cpu", "ranks": 1, "threads": 1, "kernels": {}, "trajectory": {}, "trajectory_hash": "h",
    "digest": "d", "health": "healthy", "files": [{"name": "part", "size": 3, "sha256": "a" * 64}],
}  # fmt: skip


@settings(MANY, max_examples=300)
@given(st.sampled_from(sorted(WHOLE)), JSONS, st.booleans())
@example("files", [{"name": None, "size": 3, "sha256": "0" * 64}], False)
def test_manifest(key: str, value: object, remove: bool) -> None:
    raw = dict(WHOLE)
    if remove:
        del raw[key]
    else:
        raw[key] = value
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "step-1"
        folder.mkdir()
        (folder / "part").write_bytes(b"abc")
        (folder / "manifest.json").write_text(json.dumps(raw), "utf-8")
        try:
            read_manifest(open_storage(str(folder), "checkpoint"))
        except Torn:
            pass
        except SexpError as mistake:
            assert mistake.diagnostic.code == "E-CKPT-003"


@pytest.mark.parametrize(("form", "file"), [("csv", "d.csv"), ("jsonl", "d.jsonl"), ("npy", "d.npy"), ("text", "d.txt"), ("tokens", "d.bin")])
@MANY
@given(data=st.one_of(st.binary(max_size=80), TEXTS.map(lambda t: t.encode()), st.lists(st.sampled_from(
    [b"x,y\n", b"1,2\n", b'"', b"\n", b"\r\n", b"nan", b"{", b'"x": ', b"}", b"[1, 2]", b"1e400", b"\xff", b"\x1f\x8b\x08", b"\x93NUMPY", b"PK\x03\x04", b","]
), max_size=12).map(b"".join)))  # fmt: skip
def test_data(form: str, file: str, data: bytes) -> None:
    fields = () if form in ("text", "tokens") else (Field("x", "f32"),)
    options = {"text": {"tokens": "bytes"}, "tokens": {"dtype": "u16"}}.get(form, {})
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / file).write_bytes(data)
        try:
            open_source(DataSource("d", form, file, folder, fields, options))
        except SexpError as mistake:
            assert mistake.diagnostic.code.startswith("E-DATA-")
            sound(mistake.diagnostic)


@settings(MANY, max_examples=200)
@given(st.one_of(JSONS, st.dictionaries(st.sampled_from(["w", "__metadata__", "b"]), st.one_of(JSONS, st.fixed_dictionaries({
    "dtype": st.sampled_from(["F32", "I64", "Q9", 3]), "shape": st.one_of(st.lists(st.integers(-2, 10**20), max_size=3), JSONS),
    "data_offsets": st.one_of(st.lists(st.integers(-1, 10**20), max_size=3), JSONS)})), max_size=3)), st.one_of(st.none(), st.integers(0, 2**64 - 1)))  # fmt: skip
def test_safetensors_header(header: object, length: int | None) -> None:
    text = json.dumps(header).encode()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "w.safetensors"
        path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + bytes(16))
        try:
            open_weights(Init("w.safetensors", folder), lambda text: None)
        except SexpError as mistake:
            assert mistake.diagnostic.code == "E-DATA-041"
            sound(mistake.diagnostic)
