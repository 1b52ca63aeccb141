"""csv, split and order."""

import gzip
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from sexpgpu.diagnostics import SexpError
from sexpgpu.experiment.model import DataSource, Field
from sexpgpu.run.data import open_source
from sexpgpu.run.data.dataset import FieldBound, check_bound
from sexpgpu.run.data.order import batch_indices, cursor, permute, round_keys
from sexpgpu.run.data.split import split_rows, split_sizes

A = Field("a", "f32")
SHARES = (("train", Fraction(4, 5)), ("valid", Fraction(1, 5)))


def source(folder, *fields, location="t.csv", fmt="csv"):
    return DataSource("t", fmt, location, str(folder), fields or (A,), split=SHARES)


def read(folder, data, *fields, location="t.csv"):
    (Path(folder) / location).write_bytes(data if isinstance(data, bytes) else data.encode())
    return open_source(source(folder, *fields, location=location))


def test_digits():
    folder = Path(__file__).parents[2] / "examples"
    image = Field("image", "f32", (64,), scale=Fraction(1, 16))
    digits = open_source(source(folder, image, Field("label", "i32"), location="data/digits.csv.gz"))
    assert digits.fields["image"].shape == (1797, 64) and digits.fields["image"].dtype == np.float32
    assert digits.fields["label"].dtype == np.int32
    assert digits.range("label") == (0, 9) and digits.range("image") == (0.0, 1.0)
    assert len(digits.rows("train")) == 1438 and len(digits.rows("valid")) == 359
    assert len(digits.digest) == 64


def test_values_are_exact(tmp_path):
    table = read(tmp_path, "\ufeffa,b,c\r\n0.1,-9223372036854775808,5.0\r\n\r\n1e-3, 7 ,2\r\n",
                 Field("a", "f32", scale=Fraction(1, 3)), Field("b", "i64"), Field("c", "i32"))
    assert table.fields["a"].tolist() == [np.float32(0.1 * (1 / 3)), np.float32(1e-3 * (1 / 3))]
    assert table.fields["b"].tolist() == [-(2**63), 7]
    assert table.fields["c"].tolist() == [5, 2]


@pytest.mark.parametrize(("code", "data", "fields", "says"), [
    ("E-DATA-002", "alpha,b\n1,2\n", (Field("alpho", "f32"),), "alpho"),
    ("E-DATA-002", "a_0,a_1\n1,2\n", (Field("a", "f32", (3,)),), "a_2"),
    ("E-DATA-003", "a\n1\ntwo\n", (A,), "line 3, column `a`: `two`"),
    ("E-DATA-003", "a,b\n1,2\n,2\n", (A,), "line 3"),
    ("E-DATA-003", "a\n1_000\n", (A,), "1_000"),
    ("E-DATA-003", "a\n1_000\n", (Field("a", "i32"),), "1_000"),
    ("E-DATA-004", "a,b\n1,2\n\n1\n", (A,), "line 4"),
    ("E-DATA-006", "", (A,), "no text"),
    ("E-DATA-006", "a\n", (A,), "no rows"),
    ("E-DATA-007", "a,a\n1,2\n", (A,), "twice"),
    ("E-DATA-008", b"a\n1\n\xff\n", (A,), "line 3"),
    ("E-DATA-009", "a\n1\n2.5\n", (Field("a", "i32"),), "line 3"),
    ("E-DATA-009", "a\n3000000000\n", (Field("a", "i32"),), "3000000000"),
    ("E-DATA-009", "a\n-1\n", (Field("a", "u8"),), "-1"),
    ("E-DATA-009", "a\n1\nnan\n", (A,), "line 3"),
    ("E-DATA-009", "a\n1e39\n", (A,), "1e39"),
    ("E-DATA-011", "a\n1\n", (Field("a", "f32", (2, 2)),), "csv has"),
    ("E-DATA-012", 'a\n"1\n', (A,), "t.csv"),
])
def test_mistakes(tmp_path, code, data, fields, says):
    with pytest.raises(SexpError) as error:
        read(tmp_path, data, *fields)
    assert error.value.diagnostic.code == code
    assert says in error.value.diagnostic.message


def test_nearest_names(tmp_path):
    with pytest.raises(SexpError) as error:
        read(tmp_path, "alpha\n1\n", Field("alpho", "f32"))
    assert "alpha" in error.value.diagnostic.help[0]
    with pytest.raises(SexpError) as error:
        open_source(source(tmp_path, location="u.csv"))
    assert error.value.diagnostic.code == "E-DATA-001" and "t.csv" in error.value.diagnostic.help[0]
    with pytest.raises(SexpError) as error:
        open_source(source(tmp_path, fmt="cvs"))
    assert error.value.diagnostic.code == "E-DATA-010" and "csv" in error.value.diagnostic.help[0]


@pytest.mark.parametrize("change", [lambda b: b[:-4], lambda b: b[: len(b) // 2], lambda b: b"junk" + b,
                                    lambda b: b[:-8] + b"\0\0\0\0" + b[-4:], lambda b: b""])
def test_broken_gzip(tmp_path, change):
    whole = gzip.compress(b"a\n" + b"".join(b"%d\n" % i for i in range(1000)))
    with pytest.raises(SexpError) as error:
        read(tmp_path, change(whole), location="t.csv.gz")
    assert error.value.diagnostic.code in ("E-DATA-005", "E-DATA-006")


def test_gzip_members_are_one_text(tmp_path):
    table = read(tmp_path, gzip.compress(b"a\n1\n") + gzip.compress(b"2\n"), location="t.csv.gz")
    assert table.fields["a"].tolist() == [1, 2]


def test_bounds(tmp_path):
    table = read(tmp_path, "label\n0\n10\n", Field("label", "i32"))
    check_bound(table, FieldBound("label", 0, 10))
    with pytest.raises(SexpError) as error:
        check_bound(table, FieldBound("label", 0, 9, why="10 classes"))
    assert error.value.diagnostic.code == "E-DATA-014" and "line 3" in error.value.diagnostic.message


def test_split(tmp_path):
    assert split_sizes(1797, SHARES) == {"train": 1438, "valid": 359}
    thirds = tuple((name, Fraction(1, 3)) for name in "abc")
    assert split_sizes(10, thirds) == {"a": 4, "b": 3, "c": 3}
    for count in (1, 2, 7, 100, 1797):
        parts = split_rows(count, SHARES)
        assert sorted(np.concatenate(list(parts.values()))) == list(range(count))
    with pytest.raises(SexpError) as error:
        split_sizes(10, (("a", Fraction(1, 2)),))
    assert error.value.diagnostic.code == "E-DATA-013"
    with pytest.raises(SexpError):
        read(tmp_path, "a\n1\n2\n").rows("trian")


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8, 17, 64, 65, 1000, 1438, 70_001])
def test_permutation(n):
    for epoch in (0, 1):
        assert sorted(permute(np.arange(n), n, round_keys(7, epoch))) == list(range(n))


def test_permutation_is_even():
    n, count = 50, np.zeros((50, 50))
    for epoch in range(2000):
        count[np.arange(n), permute(np.arange(n), n, round_keys(1, epoch))] += 1
    chi = ((count - 40) ** 2 / 40).sum()
    assert abs(chi - 49 * 49) < 6 * (2 * 49 * 49) ** 0.5


def test_order_is_a_pure_function_and_seeks():
    n, batch = 11, 4
    taken = np.concatenate([batch_indices(n, 5, batch, step, True) for step in range(22)])
    for epoch in range(8):
        assert sorted(taken[epoch * n : (epoch + 1) * n]) == list(range(n))
    assert taken[:n].tolist() != taken[n : 2 * n].tolist()
    far = batch_indices(10**9, 5, 3, 10**8, True)
    assert far.shape == (3,) and (far < 10**9).all()
    assert cursor(n, batch, 3) == (1, 1)
    assert batch_indices(3, 0, 8, 0, False).tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert len(batch_indices(3, 0, 8, 1, True)) == 8


def test_order_never_changes():
    """Golden: checkpoints of older versions rely on it."""
    assert batch_indices(1000, 1, 8, 0, True).tolist() == GOLDEN_ORDER
    assert split_rows(20, SHARES)["valid"].tolist() == GOLDEN_SPLIT


GOLDEN_ORDER = [469, 653, 912, 968, 909, 312, 282, 307]
GOLDEN_SPLIT = [2, 9, 10, 19]
