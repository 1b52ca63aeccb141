"""Parsing in workers, the content cache, BPE tokens, prefetch, the disk, and the command `data`."""

import gzip
import json
import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sexpgpu.cli import main
from sexpgpu.diagnostics import SexpError
from sexpgpu.experiment.model import Batches, DataSource, Field
from sexpgpu.run import disk, storage
from sexpgpu.run.data import jsonl, open_source, parsed, tokenizer
from sexpgpu.run.data.block import BlockWriter, facts, open_block
from sexpgpu.run.data.cache import Cache, key_of, open_cache, size
from sexpgpu.run.data.dataset import FieldBound, check_bound
from sexpgpu.run.data.feed import EvalFeed, TrainFeed, train_feed
from sexpgpu.run.data.prefetch import Prefetched
from sexpgpu.run.data.records import Start, Wrong, parse_lines
from sexpgpu.run.data.workers import Task, child_environment, default_workers, run_all
from sexpgpu.settings import load

X, LABEL = Field("x", "f32", (3,)), Field("label", "i32")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "_granted", load({"XDG_CACHE_HOME": str(tmp_path / "cache")}))


def source(folder, fmt, location, *fields, **options):
    return DataSource("d", fmt, location, str(folder), fields, options)


def code_of(call, *args, **keys):
    with pytest.raises(SexpError) as error:
        call(*args, **keys)
    return error.value.diagnostic


def lines(count):
    return "".join(json.dumps({"x": [i, i / 2, -i], "label": i % 7, "text": "é" * (i % 9)}) + "\n" for i in range(count))


# places in files


def test_a_bound_names_the_files_line(tmp_path):
    (tmp_path / "d.jsonl").write_text('{"label": 1}\n\n{"label": 12}\n')
    (tmp_path / "d.csv").write_text('label,note\n1,"two\nlines"\n\n12,a\n')
    for fmt, name, line in (("jsonl", "d.jsonl", 3), ("csv", "d.csv", 5)):
        found = open_source(source(tmp_path, fmt, name, LABEL))
        assert f"is 12 in line {line} of {name}" in code_of(check_bound, found, FieldBound("label", 0, 9)).message


# workers


def test_workers_give_the_same_rows(tmp_path, monkeypatch):
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(lines(3000).encode()))
    monkeypatch.setattr(jsonl, "PIECE", 20_000)
    found = source(tmp_path, "jsonl", "d.jsonl.gz", X, LABEL)
    wanted = jsonl.read(found, tmp_path / "d.jsonl.gz", workers=0)
    assert wanted.count == 3000 and wanted.lines.tolist() == list(range(1, 3001))
    got = jsonl.read(found, tmp_path / "d.jsonl.gz", workers=2)
    for name in ("x", "label"):
        assert got.fields[name].tobytes() == wanted.fields[name].tobytes()
    assert got.lines.tolist() == wanted.lines.tolist()


@pytest.mark.parametrize("workers", [0, 2])
def test_mistakes_of_workers_name_the_line(tmp_path, monkeypatch, workers):
    (tmp_path / "d.jsonl").write_text(lines(500) + "\n" + '{"x": [1, 2, 3], "label": "7"}\n' + lines(500))
    monkeypatch.setattr(jsonl, "PIECE", 10_000)
    bad = code_of(jsonl.read, source(tmp_path, "jsonl", "d.jsonl", X, LABEL), tmp_path / "d.jsonl", workers=workers)
    assert bad.code == "E-DATA-039" and bad.message.startswith("d.jsonl, line 502, field `label`")


def test_a_worker_that_dies_is_an_error(monkeypatch):
    monkeypatch.setattr("sexpgpu.run.data.workers.child_environment", lambda: {"PYTHONPATH": ""})
    monkeypatch.setattr("sexpgpu.run.children.sys.executable", "/bin/false")
    with pytest.raises(SexpError) as error:
        list(run_all([Task("cache:size", (1,), what="shard s")], 1))
    found = error.value.diagnostic
    assert found.code == "E-DATA-018" and "shard s" in found.message and "exit code 1" in found.message


def test_workers_have_no_secrets_and_few_tasks_ahead(monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    monkeypatch.setenv("SYVAIN_METRICS_API_KEY", "hidden")
    assert "hidden" not in child_environment().values() and "PATH" in child_environment()
    taken = []

    def tasks():
        for i in range(50):
            taken.append(i)
            yield Task("cache:size", (i,))

    for done, text in enumerate(run_all(tasks(), 2)):
        assert text == f"{done} bytes" and len(taken) - done <= 5
    assert default_workers(100) == 0 and 1 <= default_workers(1 << 40) <= 8


def test_an_interrupted_parse_leaves_no_children(tmp_path):
    results = run_all((Task("cache:size", (i,)) for i in range(100)), 2)
    next(results)
    results.close()
    deadline = time.monotonic() + 10
    while children() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not children()


def children():
    found = subprocess.run(["ps", "-o", "args=", "--ppid", str(os.getpid())], capture_output=True, text=True).stdout
    return [line for line in found.splitlines() if "sexpgpu.run.data.child" in line]


# records: the quick way and the slow way agree


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.lists(st.integers(-5, 300) | st.floats(-4, 400, width=32), max_size=5), st.integers(-3, 300)), min_size=1, max_size=6))
def test_padding_agrees_with_plain_python(rows):
    fields = (Field("v", "f64", (3,), pad=-1), Field("n", "i64"))
    text = "".join(json.dumps({"v": v, "n": n}) + "\n" for v, n in rows).encode()
    found = parse_lines(text, fields, Start("f"))
    assert found.arrays["v"].tolist() == [[float(a) for a in (v + [-1] * 3)[:3]] for v, _ in rows]
    assert found.arrays["n"].tolist() == [n for _, n in rows]
    assert found.cuts["v"] == {"padded": sum(len(v) < 3 for v, _ in rows), "cut": sum(len(v) > 3 for v, _ in rows),
                               "longest": max(len(v) for v, _ in rows)}
    odd = text + b'{"v": [true], "n": 1}\n'
    with pytest.raises(Wrong, match=f"line {len(rows) + 1}"):
        parse_lines(odd, fields, Start("f"))


# the cache


def test_a_large_file_is_parsed_once(tmp_path, monkeypatch):
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(lines(2000).encode()))
    (tmp_path / "d.csv").write_text("label\n" + "3\n" * 2000)
    np.savez(tmp_path / "d.npz", label=np.arange(2000))
    monkeypatch.setattr(parsed, "WORTH", 1000)
    for fmt, name, field in (("jsonl", "d.jsonl.gz", "label"), ("csv", "d.csv", "label"), ("npy", "d.npz", "label")):
        found = source(tmp_path, fmt, name, LABEL)
        first = open_source(found)
        assert isinstance(first.fields[field], np.memmap) and first.count == 2000
        with monkeypatch.context() as patch:
            patch.setattr(parsed, "_write", None)  # would fail
            again = open_source(found)
        assert again.fields[field].tolist() == first.fields[field].tolist() and again.digest == first.digest
        assert (again.lines is None) == (first.lines is None)
        other = source(tmp_path, fmt, name, Field("label", "f64"))
        assert open_source(other).fields[field].dtype == np.float64
    folder = tmp_path / "cache" / "sexpgpu" / "data"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
    (tmp_path / "d.csv").write_text("label\n" + "4\n" * 2000)
    assert set(open_source(source(tmp_path, "csv", "d.csv", LABEL)).fields["label"].tolist()) == {4}


def test_a_torn_block_is_written_anew(tmp_path, monkeypatch):
    (tmp_path / "d.csv").write_text("label\n" + "3\n" * 2000)
    monkeypatch.setattr(parsed, "WORTH", 1000)
    found = source(tmp_path, "csv", "d.csv", LABEL)
    wanted = open_source(found).fields["label"].tolist()
    block, = (tmp_path / "cache" / "sexpgpu" / "data").glob("*.block")
    data = block.read_bytes()
    for torn in (data[:-1], data[:20], b"", b"junk" * 500, data[:16] + b"\xff" * 40 + data[56:]):
        block.unlink()
        block.write_bytes(torn)
        assert open_source(found).fields["label"].tolist() == wanted
        assert block.read_bytes() == data


@pytest.mark.parametrize("spoil", ["writable", "file", "readonly", "foreign"])
def test_a_cache_that_cannot_be_trusted_is_not_used(tmp_path, monkeypatch, spoil):
    folder = tmp_path / "cache" / "sexpgpu"
    folder.mkdir(parents=True, mode=0o700)
    if spoil == "writable":
        folder.chmod(0o777)
    elif spoil == "file":
        (folder / "data").write_text("x")
    elif spoil == "readonly":
        monkeypatch.setattr("sexpgpu.run.data.cache.os.access", lambda path, mode: False)
    else:
        monkeypatch.setattr("sexpgpu.run.data.cache.os.geteuid", lambda: os.getuid() + 1)
    monkeypatch.setattr("sexpgpu.run.data.cache._temporary", [])
    said = []
    cache = open_cache(said.append)
    assert not cache.lasting and "E-DATA-015" in said[0] and stat.S_IMODE(cache.folder.stat().st_mode) == 0o700
    assert open_cache(said.append) is cache and len(said) == 1


def test_csv_in_parts_is_the_whole(tmp_path, monkeypatch):
    path = tmp_path / "d.csv"
    path.write_bytes(b"\xef\xbb\xbfx_0,label\r\n" + b"".join(b'%d.5,"%d"\r\n' % (i, i % 7) for i in range(1000)) + b"\n")
    fields = (Field("x", "f32", (1,)), LABEL)
    wanted = open_source(source(tmp_path, "csv", "d.csv", *fields))
    monkeypatch.setattr("sexpgpu.run.data.csv.CELLS", 7)
    found = open_source(source(tmp_path, "csv", "d.csv", *fields))
    assert found.count == 1000 and found.lines.tolist() == wanted.lines.tolist() == list(range(2, 1002))
    for name in ("x", "label"):
        assert found.fields[name].tobytes() == wanted.fields[name].tobytes()
    for line, code in ((b"1,2,3\n", "E-DATA-004"), (b"x,1\n", "E-DATA-003"), (b"\xff,1\n", "E-DATA-008"), (b"1_0,1\n", "E-DATA-003")):
        bad = tmp_path / "bad.csv"
        bad.write_bytes(path.read_bytes().rstrip(b"\n") + b"\n" + line)
        with pytest.raises(SexpError) as error:
            open_source(source(tmp_path, "csv", "bad.csv", *fields))
        assert error.value.diagnostic.code == code and "line 1002" in error.value.diagnostic.message


def test_a_full_disk_keeps_rows_in_memory(tmp_path, monkeypatch):
    (tmp_path / "d.csv").write_text("label\n" + "3\n" * 2000)
    monkeypatch.setattr(parsed, "WORTH", 1000)

    def full(path, parts):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(parsed, "_write", full)
    said = []
    assert open_source(source(tmp_path, "csv", "d.csv", LABEL), say=said.append).count == 2000
    assert "E-DATA-015" in said[0] and "No space" in said[0]


def test_entries_nobody_opens_go_after_a_month(tmp_path):
    cache = Cache(tmp_path, True)
    (tmp_path / "a.block").write_text("x")
    (tmp_path / ".torn").write_text("x")
    now = time.time()
    assert cache.tidy(now) == 0 and cache.tidy(now + 2 * 86400) == 1 and (tmp_path / "a.block").exists()
    assert cache.tidy(now + 31 * 86400) == 1 and not (tmp_path / "a.block").exists()
    assert key_of("a", 1) != key_of("a", "1") and (size(5), size(3 << 19)) == ("5 bytes", "1.5 MiB")


def test_blocks(tmp_path):
    writer = BlockWriter(tmp_path / "b")
    for i in range(3):
        writer.add({"x": np.full((2, 3), i, np.float32), "b": np.array([True, False]), "n": np.array([i, -i])})
    writer.finish({"k": [1]})
    found = open_block(tmp_path / "b")
    assert found.count == 6 and found.arrays["x"][:, 1].tolist() == [0, 0, 1, 1, 2, 2] and found.arrays["b"].dtype == bool
    assert facts(tmp_path / "b") == {"k": [1]} and [p.name for p in tmp_path.iterdir() if p.is_file()] == ["b"]
    with pytest.raises(ValueError):
        found.arrays["n"][0] = 1


# prefetch


def test_batches_made_ahead_are_the_same_batches():
    class Numbers:
        def __len__(self):
            return 100

        def take(self, index):
            return {"i": index}

    plain = TrainFeed(Numbers(), 8, 5, True)
    ahead = Prefetched(plain)
    for step in [*range(40), 7, 8, 300, 301, 0]:
        assert ahead.batch(step)["i"].tolist() == plain.batch(step)["i"].tolist()
    assert ahead.cursor(20) == plain.cursor(20)
    ahead.close()


def test_a_mistake_made_ahead_is_raised_at_its_step():
    class Broken:
        def batch(self, step):
            if step == 3:
                raise ValueError("three")
            return step

    ahead = Prefetched(Broken())
    assert [ahead.batch(i) for i in range(3)] == [0, 1, 2]
    for _ in range(2):
        with pytest.raises(ValueError, match="three"):
            ahead.batch(3)
    assert ahead.batch(4) == 4


def test_a_step_does_not_wait_for_a_slow_source():
    begun, gate = threading.Event(), threading.Event()

    class Slow:
        def batch(self, step):
            if step == 2:
                begun.set()  # 0 and 1 are there
                gate.wait(60)
            return step

    ahead = Prefetched(Slow())
    assert ahead.batch(0) == 0 and begun.wait(60)
    assert ahead.batch(1) == 1 and not gate.is_set()  # while the source makes 2
    gate.set()
    assert ahead.batch(2) == 2


def test_large_mapped_sources_are_made_ahead(tmp_path, monkeypatch):
    np.arange(1 << 16, dtype="<u2").tofile(tmp_path / "t.bin")
    found = open_source(source(tmp_path, "tokens", "t.bin", dtype="u16"))
    data = Batches(found.source, None, 4, shuffle=True, context=16, stride=16)
    plain = train_feed(found, data, 1)
    monkeypatch.setattr("sexpgpu.run.data.feed.AHEAD", 1000)
    ahead = train_feed(found, data, 1)
    assert isinstance(plain, TrainFeed) and isinstance(ahead, Prefetched)
    assert all((plain.batch(i)["tokens"] == ahead.batch(i)["tokens"]).all() for i in range(9))
    assert isinstance(EvalFeed(plain.samples, 4), EvalFeed)


# BPE tokens

CORPUS = "The quick brown fox.\nIt jumps over the lazy dog's back,\n\n  and naïve 123 cats… run\tfast.\r\n" * 40


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    path = tmp_path_factory.mktemp("tok") / "tokenizer.json"
    path.write_text(tokenizer.train([CORPUS], 400), encoding="utf-8")
    return path


def test_training_is_deterministic_over_processes(trained, tmp_path):
    (tmp_path / "c.txt").write_text(CORPUS, encoding="utf-8", newline="")
    program = ("import sys; from sexpgpu.run.data.tokenizer import train; "
               "sys.stdout.reconfigure(encoding='utf-8'); print(train([open(sys.argv[1], encoding='utf-8', newline='').read()], 400), end='')")
    for threads in ("true", "false"):
        made = subprocess.run([sys.executable, "-c", program, str(tmp_path / "c.txt")], capture_output=True, check=True,
                              env=os.environ | {"TOKENIZERS_PARALLELISM": threads}).stdout
        assert made == trained.read_bytes()


@pytest.mark.parametrize("piece", [1, 7, 50, 10**6])
def test_pieces_do_not_change_tokens(trained, piece, monkeypatch):
    found = tokenizer.load(trained, "t")
    whole = found.model.encode(CORPUS, add_special_tokens=False).ids
    monkeypatch.setattr(tokenizer, "PIECE", piece)
    monkeypatch.setattr(tokenizer.pieces, "__defaults__", (piece,))
    cut = [CORPUS[i : i + 13] for i in range(0, len(CORPUS), 13)]
    assert np.concatenate(list(tokenizer.encode(found, cut))).tolist() == whole
    assert found.model.decode(whole) == CORPUS and found.dtype == np.dtype("<u2")


@settings(max_examples=60, deadline=None)
@given(text=st.text(alphabet=" \n\tab'é1.", max_size=60), piece=st.integers(1, 9))
def test_pieces_of_any_text(trained, text, piece):
    found = tokenizer.load(trained, "t")
    parts = list(tokenizer.pieces(list(text), piece))
    assert "".join(parts) == text
    ids = [i for part in parts for i in found.model.encode(part, add_special_tokens=False).ids]
    assert ids == found.model.encode(text, add_special_tokens=False).ids


def test_text_of_bpe_tokens(trained, tmp_path):
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(CORPUS.encode()))
    found = open_source(source(tmp_path, "text", "c.txt.gz", tokens="bpe", tokenizer=str(trained)))
    assert tokenizer.load(trained, "t").model.decode(found.tokens.tolist()) == CORPUS and found.tokens.max() < 400
    other = tmp_path / "other.json"
    other.write_text(tokenizer.train([CORPUS], 300), encoding="utf-8")
    assert open_source(source(tmp_path, "text", "c.txt.gz", tokens="bpe", tokenizer="other.json")).digest != found.digest


@pytest.mark.parametrize(("code", "data", "tok", "says"), [
    ("E-DATA-017", b"x", None, "cannot be read"), ("E-DATA-017", b"x", b"{}", "is no tokenizer"), ("E-DATA-017", b"x", b"\xff", "is no tokenizer"),
    ("E-DATA-008", b"ab\xffc", ..., "byte 3"), ("E-DATA-008", b"ab\xc3", ..., "byte 3"), ("E-DATA-006", b"", ..., "no text")])
def test_mistakes_of_bpe(trained, tmp_path, code, data, tok, says):
    (tmp_path / "c.txt").write_bytes(data)
    if tok is not None:
        (tmp_path / "t.json").write_bytes(trained.read_bytes() if tok is ... else tok)
    bad = code_of(open_source, source(tmp_path, "text", "c.txt", tokens="bpe", tokenizer="t.json"))
    assert bad.code == code and says in bad.message


# the command


def run(*words):
    return main.perform(["data", *map(str, words)])


def test_tokenize(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    Path("c.txt").write_text(CORPUS, encoding="utf-8", newline="")
    Path("v.txt").write_text("the lazy fox\n" * 9)
    assert run("tokenize", "c.txt", "--vocab", 400, "--out", "tok") == 0
    record = json.loads(Path("tok/tokens.json").read_text())
    found = open_source(source(tmp_path, "tokens", "tok/c.u16", dtype="u16"))
    assert found.count == record["files"][0]["tokens"] and tokenizer.load(Path("tok/tokenizer.json"), "t").model.decode(found.tokens.tolist()) == CORPUS
    assert run("tokenize", "v.txt", "--tokenizer", "tok/tokenizer.json", "--out", "val") == 0
    assert Path("val/tokenizer.json").read_bytes() == Path("tok/tokenizer.json").read_bytes()
    assert run("tokenize", "c.txt", "--vocab", 400, "--out", "tok") == 0  # the same bytes
    before = Path("tok/tokenizer.json").read_bytes()
    assert run("tokenize", "c.txt", "--vocab", 300, "--out", "tok") == 2
    assert Path("tok/tokenizer.json").read_bytes() == before
    assert run("verify", "tok") == 0
    Path("tok/c.u16").write_bytes(b"\0\0")
    assert run("verify", "tok") == 1
    Path("tok/tokens.json").write_text("[]")
    assert run("verify", "tok") == 2
    said = capfd.readouterr()
    assert "E-DATA-046" in said.err and "E-DATA-025" in said.err and '(tokens "tok/c.u16" :dtype u16)' in said.out


@pytest.mark.parametrize(("code", "words"), [
    ("E-DATA-019", ["c.txt", "--out", "t"]), ("E-DATA-019", ["c.txt", "--vocab", "100", "--out", "t"]),
    ("E-DATA-019", ["c.txt", "--vocab", "300", "--tokenizer", "x", "--out", "t"]),
    ("E-DATA-019", ["c.txt", "sub/c.txt", "--vocab", "300", "--out", "t"]), ("E-DATA-019", ["empty.txt", "--vocab", "300", "--out", "t"]),
    ("E-DATA-001", ["nothing.txt", "--vocab", "300", "--out", "t"]), ("E-DATA-008", ["latin.txt", "--vocab", "300", "--out", "t"])])
def test_mistakes_of_tokenize(tmp_path, monkeypatch, capfd, code, words):
    monkeypatch.chdir(tmp_path)
    Path("sub").mkdir()
    for name in ("c.txt", "sub/c.txt"):
        Path(name).write_text(CORPUS, encoding="utf-8")
    Path("empty.txt").write_text("")
    Path("latin.txt").write_bytes(b"na\xefve")
    assert run("tokenize", *words) == 2 and code in capfd.readouterr().err
    assert not list(tmp_path.rglob("*.part"))


def test_build_inspect_verify(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text(lines(30))
    assert run("build", "train/easy=a.jsonl", "valid=a.jsonl", "--out", "m", "--records", 10) == 0
    assert run("inspect", "m/data-manifest-v1.json") == 0 and run("verify", "m", "--quiet") == 0
    out = capfd.readouterr().out
    assert "stage easy: 30 records in 3 shards" in out and "x: a list of a number (30)" in out and "6 shards, all whole" in out
    assert run("inspect", "m", "--json", "--first", 0) == 0
    assert json.loads(capfd.readouterr().out)["splits"]["valid"]["first"] == []
    shard = Path("m/shards/valid/part-00001.jsonl.gz")
    shard.write_bytes(shard.read_bytes()[:-1])
    assert run("verify", "m") == 1 and "E-DATA-024" in capfd.readouterr().err
    assert run("inspect", "m") == 2 and run("inspect", "nothing.json") == 2 and run("build", "a.jsonl", "--out", "m", "--records", 0) == 2
    assert "E-DATA-001" in capfd.readouterr().err


# the disk


def test_disk_needed_for_checkpoints(tmp_path, monkeypatch):
    schema = {"param/w": ("f32", (256, 1024)), "opt/m/w": ("bf16", (1024, 1024))}
    assert disk.state_bytes(schema) == 3 << 20
    usage = type("Usage", (), {"free": 10 << 20})
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: usage)
    said = []
    disk.check_disk(str(tmp_path / "c"), schema, 2, False, said.append)
    assert said == []
    disk.check_disk(str(tmp_path / "c"), schema, 3, False, said.append)
    assert "4 checkpoints" in said[0] and "12.0 MiB" in said[0] and "10.0 MiB free" in said[0]
    (tmp_path / "c" / "step-1").mkdir(parents=True)
    disk.check_disk(str(tmp_path / "c"), schema, 3, False, said.append)
    disk.check_disk("s3://bucket/c", schema, 99, True, said.append)
    assert len(said) == 1
    usage.free = 2 << 20
    assert code_of(disk.check_disk, str(tmp_path / "c"), schema, 3, False, said.append).code == "E-DATA-016"


@pytest.mark.parametrize(("data", "line"), [
    (b'{"x": 1}{"x": 2}\n{"x": 3}\n', 1),
    (b'{"x": 1}\n{"x": 2} {"x": 3}\n\n', 2),  # as many records as lines
    (b'{"x":\n1}\n{"x": 2}\n', 1),
    (b'{"x":\n1}\n{"x": 2}{"x": 3}', 1),  # as many records as lines, too
    (b'{"x": 1, "y": "}\n{"}\n', 1),  # a newline in a string is not JSON
])
def test_records_that_do_not_stand_on_lines_of_their_own(data: bytes, line: int) -> None:
    with pytest.raises(Wrong) as wrong:
        parse_lines(data, (Field("x", "i32"),), Start("f"))
    assert wrong.value.code == "E-DATA-037" and f"line {line}" in wrong.value.message


@pytest.mark.parametrize("data", [b'{"x": 1}\r\n{"x": 2}\r\n', b'\n  {"x": 1}\t\n\n{"x": 2}', b'{"x": 1}\n{"x": 2}\n'])
def test_records_on_lines_with_blanks(data: bytes) -> None:
    found = parse_lines(data, (Field("x", "i32"),), Start("f"))
    assert found is not None and found.arrays["x"].tolist() == [1, 2]
