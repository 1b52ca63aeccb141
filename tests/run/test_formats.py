"""text, tokens, npy and jsonl: what they read, and each mistake with its place."""

import gzip
import io
import json
import zipfile
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sexpgpu.diagnostics import SexpError
from sexpgpu.experiment.model import DataSource, Field
from sexpgpu.run.data import open_source
from sexpgpu.run.data.dataset import FieldBound, check_bound
from sexpgpu.run.data.stream import Stream

X, LABEL = Field("x", "f32", (3,)), Field("label", "i32")


def source(folder, fmt, location, *fields, **options):
    return DataSource("d", fmt, location, str(folder), fields, options)


def read(folder, fmt, data, *fields, location="d.bin", **options):
    (Path(folder) / location).write_bytes(data if isinstance(data, bytes) else data.encode())
    return open_source(source(folder, fmt, location, *fields, **options))


def mistake(code, *args, **keys):
    with pytest.raises(SexpError) as error:
        read(*args, **keys)
    assert error.value.diagnostic.code == code, error.value
    return error.value.diagnostic


def saved(*arrays, **named):
    file = io.BytesIO()
    np.savez(file, **named) if named else np.save(file, arrays[0], allow_pickle=True)
    return file.getvalue()


# text and tokens


def test_text_is_its_bytes(tmp_path):
    text = "naïve\n\0end".encode()
    for data, location in ((text, "t.txt"), (gzip.compress(text), "t.txt.gz"), (gzip.compress(text), "t.bin")):
        found = read(tmp_path, "text", data, location=location)
        assert isinstance(found, Stream) and found.tokens.dtype == np.uint8 and bytes(found.tokens) == text
        assert found.count == len(text) and len(found.digest) == 64


def test_text_mistakes(tmp_path):
    assert "no text" in mistake("E-DATA-006", tmp_path, "text", b"", location="t.txt").message
    mistake("E-DATA-006", tmp_path, "text", gzip.compress(b""), location="t.txt.gz")
    whole = gzip.compress(bytes(range(256)) * 9)
    for cut in (whole[:-1], whole[: len(whole) // 2], whole[:-8] + b"\0" * 4 + whole[-4:], b"plain"):
        mistake("E-DATA-005", tmp_path, "text", cut, location="t.txt.gz")


@pytest.mark.parametrize("fmt", ["text", "tokens", "npy", "jsonl"])
def test_missing_files_and_folders(tmp_path, fmt):
    (tmp_path / "corpus.txt").write_text("x")
    (tmp_path / "folder").mkdir()
    fields = (LABEL,) if fmt in ("npy", "jsonl") else ()
    with pytest.raises(SexpError) as error:
        open_source(source(tmp_path, fmt, "corpse.txt", *fields))
    assert error.value.diagnostic.code == "E-DATA-001" and "corpus.txt" in error.value.diagnostic.help[0]
    with pytest.raises(SexpError) as error:
        open_source(source(tmp_path, fmt, "folder", *fields))
    assert error.value.diagnostic.code == "E-DATA-001"


@pytest.mark.parametrize(("name", "dtype"), [("u16", "<u2"), ("u32", "<u4")])
def test_token_files_are_mapped(tmp_path, name, dtype):
    values = np.array([0, 1, 256, 65535], dtype)
    found = read(tmp_path, "tokens", values.tobytes(), dtype=name)
    assert isinstance(found.tokens, np.memmap) and found.tokens.tolist() == values.tolist()
    assert "7 bytes" in mistake("E-DATA-035", tmp_path, "tokens", b"1234567", dtype=name).message
    mistake("E-DATA-006", tmp_path, "tokens", b"", dtype=name)


def test_tokens_beyond_i32(tmp_path):
    values = np.array([5, 2**31 - 1, 2**31], "<u4")
    assert "token 3" in mistake("E-DATA-009", tmp_path, "tokens", values.tobytes(), dtype="u32").message
    assert read(tmp_path, "tokens", values[:2].tobytes(), dtype="u32").count == 2


def test_bounds_of_a_stream(tmp_path):
    found = read(tmp_path, "text", b"abc\xffd")
    check_bound(found, FieldBound("tokens", 0, 255))
    check_bound(found, FieldBound("label", 0, 3))
    with pytest.raises(SexpError) as error:
        check_bound(found, FieldBound("targets", 0, 127, why="128 rows"))
    assert error.value.diagnostic.code == "E-DATA-014" and "255 in token 4" in error.value.diagnostic.message


# npy


def test_npy_one_field(tmp_path):
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert read(tmp_path, "npy", saved(values), X).fields["x"].tolist() == values.tolist()
    assert read(tmp_path, "npy", saved(np.asfortranarray(values).astype(">f8")), X).fields["x"].dtype == np.float32
    assert read(tmp_path, "npy", saved(np.array([1, 2], np.int64)), LABEL).fields["label"].dtype == np.int32
    flags = np.array([True, False])
    assert read(tmp_path, "npy", saved(flags), Field("b", "bool")).fields["b"].tolist() == [True, False]
    scaled = read(tmp_path, "npy", saved(np.array([0, 255], np.uint8)), Field("p", "f32", scale=Fraction(1, 255)))
    assert scaled.fields["p"].tolist() == [0, 1]


def test_npz_by_name(tmp_path):
    data = saved(x=np.ones((4, 3)), label=np.arange(4), more=np.zeros(9))
    found = read(tmp_path, "npy", data, X, LABEL)
    assert found.count == 4 and found.fields["label"].tolist() == [0, 1, 2, 3]
    assert found.take(np.array([2, 0]))["label"].tolist() == [2, 0]
    wrong = mistake("E-DATA-034", tmp_path, "npy", data, Field("lable", "i32"))
    assert "label" in wrong.help[0]


def test_large_npy_stays_mapped(tmp_path):
    values = np.zeros((1 << 19, 3), np.float32)
    found = read(tmp_path, "npy", saved(values), X)
    assert isinstance(found.fields["x"], np.memmap)
    assert type(found.take(np.array([1]))["x"]) is np.ndarray
    ones = saved(np.ones(values.shape, np.int64))
    assert read(tmp_path, "npy", ones, Field("x", "i32", (3,))).fields["x"].sum() == values.size
    values[400_000, 2] = np.inf
    assert "row 400,001" in mistake("E-DATA-009", tmp_path, "npy", saved(values), X).message
    mistake("E-DATA-031", tmp_path, "npy", saved(values)[:-9], X)


def zipped(name, data):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(name, data)
    return file.getvalue()


@pytest.mark.parametrize(("code", "data", "fields", "says"), [
    ("E-DATA-031", b"", (LABEL,), "neither"),
    ("E-DATA-031", b"label\n1\n", (LABEL,), "neither"),
    ("E-DATA-031", b"\x80\x04K\x01.", (LABEL,), "neither"),
    ("E-DATA-031", saved(np.arange(9))[:-3], (LABEL,), "whole"),
    ("E-DATA-031", saved(np.arange(9))[:30], (LABEL,), "whole"),
    ("E-DATA-031", saved(label=np.arange(900))[:2000], (LABEL,), "whole"),
    ("E-DATA-031", saved(label=np.arange(900)).replace(b"\x07" + b"\0" * 7, b"\x08" + b"\0" * 7), (LABEL,), "whole"),
    ("E-DATA-031", zipped("label", b"hello"), (LABEL,), "no array"),
    ("E-DATA-032", saved(np.array([{}], object)), (LABEL,), "Python objects"),
    ("E-DATA-032", saved(label=np.array([{}], object)), (LABEL,), "`label`"),
    ("E-DATA-033", saved(np.zeros((2, 4))), (X,), "[4]"),
    ("E-DATA-033", saved(np.zeros(2)), (LABEL,), "f64"),
    ("E-DATA-033", saved(np.array(["a"])), (LABEL,), "str"),
    ("E-DATA-033", saved(np.zeros(2, complex)), (Field("z", "f32"),), "complex"),
    ("E-DATA-033", saved(np.float32(1)), (LABEL,), "single number"),
    ("E-DATA-033", saved(x=np.zeros((2, 3)), label=np.arange(3)), (X, LABEL), "2 rows"),
    ("E-DATA-033", saved(x=np.zeros((2, 3)), label=np.int64(3)), (X, LABEL), "none"),
    ("E-DATA-034", saved(np.zeros((2, 3))), (X, LABEL), "one array"),
    ("E-DATA-006", saved(np.zeros((0, 3))), (X,), "without rows"),
    ("E-DATA-009", saved(np.array([1, 2**40])), (LABEL,), "row 2"),
    ("E-DATA-009", saved(np.array([1, 256])), (Field("b", "u8"),), "0…255"),
    ("E-DATA-009", saved(np.array([0, 2])), (Field("b", "bool"),), "0…1"),
    ("E-DATA-009", saved(np.array([2**63], np.uint64)), (Field("b", "i64"),), "range"),
    ("E-DATA-009", saved(np.array([1.0, np.nan])), (Field("a", "f64"),), "row 2"),
    ("E-DATA-009", saved(np.array([1.0, 1e39])), (Field("a", "f32"),), "1e+39"),
    ("E-DATA-009", saved(np.array([1, 3])), (Field("a", "i32", scale=Fraction(1, 2)),), "whole number"),
    ("E-DATA-009", saved(np.array([2.0**63])), (Field("a", "i64", scale=1),), "range"),
    ("E-DATA-011", saved(np.array([1.0])), (Field("a", "bf16"),), "bf16"),
])
def test_npy_mistakes(tmp_path, code, data, fields, says):
    assert says in mistake(code, tmp_path, "npy", data, *fields).message


def test_no_pickle_runs(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    for data in (saved(np.array([Bomb()], object)), saved(label=np.array([Bomb()], object))):
        mistake("E-DATA-032", tmp_path, "npy", data, LABEL)
    assert not (tmp_path / "ran").exists()


# jsonl


def test_jsonl(tmp_path):
    text = '\ufeff{"x": [1, 2.5, -3], "label": 7, "more": {}}\r\n\n{"label": 8.0, "x": [0, 0, 1e-3]}'
    for data, location in ((text.encode(), "d.jsonl"), (gzip.compress(text.encode()), "d.jsonl.gz")):
        found = read(tmp_path, "jsonl", data, X, LABEL, location=location)
        assert found.fields["label"].tolist() == [7, 8] and found.fields["label"].dtype == np.int32
        assert found.fields["x"].tolist() == [[1, 2.5, -3], [0, 0, float(np.float32(1e-3))]]
    flags = read(tmp_path, "jsonl", '{"b": true, "n": 9223372036854775807}\n{"b": 0, "n": -9223372036854775808}',
                 Field("b", "bool"), Field("n", "i64"))
    assert flags.fields["b"].tolist() == [True, False] and flags.fields["n"].tolist() == [2**63 - 1, -(2**63)]
    deep = read(tmp_path, "jsonl", '{"m": [[1, 2], [3, 4]]}', Field("m", "f64", (2, 2), scale=2))
    assert deep.fields["m"].tolist() == [[[2, 4], [6, 8]]]


@pytest.mark.parametrize(("code", "line", "says"), [
    ("E-DATA-037", '{"x": [1, 2, 3', "column"),
    ("E-DATA-037", "[1, 2]", "a list"),
    ("E-DATA-037", "7", "a number"),
    ("E-DATA-037", "{'x': 1}", "not JSON"),
    ("E-DATA-037", '{"x": 1} {"x": 2}', "not JSON"),
    ("E-DATA-037", "[" * 100_000, "deep"),
    ("E-DATA-037", '{"label": ' + "9" * 5000 + "}", "digits"),
    ("E-DATA-038", '{"x": [1, 2, 3], "lable": 1}', "`label`"),
    ("E-DATA-039", '{"x": [1, 2], "label": 1}', "field `x`: a list of 3 belongs here (shape [3]), and this is a list of"),
    ("E-DATA-039", '{"x": [1, 2, [3]], "label": 1}', "a list"),
    ("E-DATA-039", '{"x": 1, "label": 1}', "a number"),
    ("E-DATA-039", '{"x": [1, null, 3], "label": 1}', "null"),
    ("E-DATA-039", '{"x": [1, "2", 3], "label": 1}', "a string"),
    ("E-DATA-039", '{"x": [1, 2, 3], "label": true}', "field `label`: a number belongs here, and this is true or false"),
    ("E-DATA-009", '{"x": [1, NaN, 3], "label": 1}', "nan is not a finite f32"),
    ("E-DATA-009", '{"x": [1, 1e999, 3], "label": 1}', "inf"),
    ("E-DATA-009", '{"x": [1, 1e39, 3], "label": 1}', "1e+39"),
    ("E-DATA-009", '{"x": [1, 1' + "0" * 400 + ', 3], "label": 1}', "401 digits"),
    ("E-DATA-009", '{"x": [1, 2, 3], "label": 1.5}', "field `label`: 1.5 is not a whole number"),
    ("E-DATA-009", '{"x": [1, 2, 3], "label": Infinity}', "inf"),
    ("E-DATA-009", '{"x": [1, 2, 3], "label": 3000000000}', "3000000000 is outside"),
    ("E-DATA-009", '{"x": [1, 2, 3], "label": 1' + "0" * 60 + "}", "61 digits"),
])
def test_jsonl_mistakes_name_file_line_and_field(tmp_path, code, line, says):
    good = '{"x": [1, 2, 3], "label": 0}'
    wrong = mistake(code, tmp_path, "jsonl", f"{good}\n\n{line}\n{good}\n", X, LABEL, location="d.jsonl")
    assert wrong.message.startswith("d.jsonl, line 3") and says in wrong.message
    if code == "E-DATA-038":
        assert "lable" in wrong.help[0]


def test_jsonl_mistakes_of_the_file(tmp_path):
    mistake("E-DATA-006", tmp_path, "jsonl", "\n \n", LABEL)
    assert "line 2" in mistake("E-DATA-008", tmp_path, "jsonl", b'{"label": 1}\n{"label": "\xff"}', LABEL).message
    mistake("E-DATA-005", tmp_path, "jsonl", gzip.compress(b'{"label": 1}\n' * 99)[:-5], LABEL, location="d.jsonl.gz")
    late = '{"label": 1}\n' * 9000 + '{"label": "x"}\n'
    assert "line 9001" in mistake("E-DATA-039", tmp_path, "jsonl", late, LABEL).message
    mistake("E-DATA-011", tmp_path, "jsonl", '{"a": 1}', Field("a", "bf16"))


@settings(max_examples=40, deadline=None)
@given(rows=st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1),
                               st.lists(st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**70), 2**70),
                                        min_size=2, max_size=2)), min_size=1, max_size=5))
def test_jsonl_numbers_are_exact(tmp_path_factory, rows):
    text = "\n".join(json.dumps({"n": n, "v": v}) for n, v in rows)
    found = read(tmp_path_factory.getbasetemp(), "jsonl", text, Field("n", "i64"), Field("v", "f64", (2,)))
    assert found.fields["n"].tolist() == [n for n, _ in rows]
    assert found.fields["v"].tolist() == [[float(a) for a in v] for _, v in rows]


WHOLE = {
    "npy": saved(np.arange(12, dtype=np.int64).reshape(4, 3)),
    "npz": saved(x=np.arange(12).reshape(4, 3)),
    "jsonl": b'{"x": [1, 2.5, 3]}\n{"x": [4, 5, 6e3]}\n',
    "jsonl.gz": gzip.compress(b'{"x": [1, 2.5, 3]}\n' * 5, mtime=0),
}


@settings(max_examples=200, deadline=None)
@given(kind=st.sampled_from(sorted(WHOLE)), cut=st.none() | st.integers(0, 600),
       changes=st.lists(st.tuples(st.integers(0, 600), st.integers(0, 255)), max_size=4))
def test_damage_is_an_error_with_a_code_or_harmless(tmp_path_factory, kind, changes, cut):
    data = bytearray(WHOLE[kind])
    for at, byte in changes:
        data[at % len(data)] = byte
    fmt = "npy" if kind in ("npy", "npz") else "jsonl"
    try:
        found = read(tmp_path_factory.getbasetemp(), fmt, bytes(data[:cut]), X, location=f"d.{kind}")
        assert found.fields["x"].shape == (found.count, 3) and np.isfinite(found.fields["x"]).all()
    except SexpError as error:
        assert error.diagnostic.code.startswith("E-DATA-0")
