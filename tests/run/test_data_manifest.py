"""Manifests: the samples of the format's own savers, order, resume, stages, padding, and every fault with its shard."""

import gzip
import hashlib
import json
import shutil
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from sexpgpu.diagnostics import SexpError
from sexpgpu.experiment.model import Batches, DataSource, Field
from sexpgpu.run import storage
from sexpgpu.run.data import open_source
from sexpgpu.run.data import place as places
from sexpgpu.run.data.dataset import FieldBound
from sexpgpu.run.data.feed import TrainFeed, eval_feed, train_feed
from sexpgpu.run.data.manifest import index, reader, schema
from sexpgpu.run.data.manifest.build import Input, build, parse_input
from sexpgpu.run.data.manifest.look import inspect, objects, open_manifest, verify
from sexpgpu.run.data.manifest.schema import Shard, parse
from sexpgpu.run.data.manifest.shards import check_digest, fetch
from sexpgpu.run.data.place import LocalPlace
from sexpgpu.run.data.records import Wrong
from sexpgpu.run.data.workers import Progress
from sexpgpu.settings import load

SAMPLES = Path(__file__).parents[1] / "data" / "manifest_sample"
ID = Field("id", "i64")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    cache_in(monkeypatch, tmp_path / "cache")


def cache_in(monkeypatch, folder):
    """As a command does that found XDG_CACHE_HOME."""
    monkeypatch.setattr(storage, "_granted", load({"XDG_CACHE_HOME": str(folder)}))


def source(folder, *fields, location="m/data-manifest-v1.json", **options):
    return DataSource("d", "manifest", location, str(folder), fields or (ID,), options)


def data_of(found, **keys):
    return Batches(found, keys.pop("split", None), keys.pop("batch", 4), **keys)


def wrong(code, call, *args, **keys):
    with pytest.raises((SexpError, Wrong)) as error:
        call(*args, **keys)
    found = error.value.diagnostic if isinstance(error.value, SexpError) else error.value
    assert found.code == code, found
    return found


def make(folder, groups, records=7, base=None):
    """Builds `{"train": rows, "train/easy": rows}` below folder/m; gives the manifest's path."""
    inputs = []
    for i, (name, rows) in enumerate(groups.items()):
        path = folder / f"in-{i}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        inputs.append(parse_input(f"{name}={path}"))
    return build(inputs, folder / "m", records, base)


def rows(count, first=0):
    return [{"id": i, "x": [i / 2, -i], "tokens": list(range(i % 5 + 1)), "note": "é\n"} for i in range(first, first + count)]


def local_sample(folder, bucket, prefix):
    """A sample with its absolute URIs made relative, so that it is read from disk."""
    target = folder / "sample"
    shutil.copytree(SAMPLES / bucket / prefix, target)
    path = target / "data-manifest-v1.json"
    path.write_text(path.read_text().replace(f"s3://{bucket}/{prefix}/", ""))
    return path


# the samples of the format's own savers


@pytest.mark.parametrize(("bucket", "prefix"), [
    ("sample-bucket", "datasets/toy"), ("o41-bucket", "toy-jsonl.gz"), ("o41-bucket", "toy-parquet"), ("o41-bucket", "toy-msgpack.zstf")])
def test_samples_have_exactly_the_expected_records(tmp_path, bucket, prefix):
    expected = json.loads((SAMPLES / "expected.json").read_text())
    wanted = expected.get(f"s3://{bucket}/{prefix}/data-manifest-v1.json", expected["s3://o41-bucket/toy-jsonl.gz/data-manifest-v1.json"])
    where, manifest = open_manifest(str(local_sample(tmp_path, bucket, prefix)), tmp_path)
    assert set(manifest.splits) == set(wanted) and verify(where, manifest) == []

    def ids(shards):
        return [r["id"] for s in shards for r in objects(str(where.path.parent / s.uri), s, manifest.format)]

    for name, split in manifest.splits.items():
        assert ids(split.shards) == wanted[name]["ids_in_manifest_order"]
        assert {n: ids(stage.shards) for n, stage in split.stages.items()} == wanted[name]["stages"]


@pytest.mark.parametrize("prefix", ["toy-jsonl.gz", "toy-parquet", "toy-msgpack.zstf"])
def test_samples_as_batches(tmp_path, prefix):
    path = local_sample(tmp_path, "o41-bucket", prefix)
    found = source(tmp_path, ID, location=str(path), stages=[[["hard", "first-shards"], None]])
    batches = list(eval_feed(open_source(found), data_of(found, split="train", batch=4)))
    assert np.concatenate([b["id"] for b in batches]).tolist() == [100, 101, 102, 110, 111, 112, 0, 1, 2]
    assert [len(b["id"]) for b in batches] == [4, 4, 1] and batches[0]["id"].dtype == np.int64


def test_raw_keys_are_not_decoded(tmp_path):
    path = local_sample(tmp_path, "sample-bucket", "datasets/toy")
    manifest = parse(path.read_bytes(), "m")
    assert any("hard%20level%2F2" in s.uri for s in manifest.splits["train"].shards)
    assert manifest.splits["train"].stages["hard level/2"].records == 11


def test_metadata_of_stages_is_kept():
    data = (SAMPLES / "o41-bucket/toy-jsonl.gz/data-manifest-v1.json").read_bytes()
    assert parse(data, "m").splits["train"].stages["easy"].metadata == {"family": "arithmetic", "weight": 1.0}


# what a manifest may say


WHOLE = {"version": 1, "data_format": "jsonl.gz", "splits": {"train": {
    "records": 3, "shards": [{"uri": "a", "records": 1, "size_bytes": 9, "etag": ""}, {"uri": "b", "records": 2, "size_bytes": 9}],
    "curriculum": {"easy": {"records": 1, "shards": [{"uri": "a", "records": 1, "size_bytes": 9}]}}}}}


def changed(path, value):
    found = json.loads(json.dumps(WHOLE))
    spot = found
    *way, last = path
    for step in way:
        spot = spot[step]
    if value is ...:
        del spot[last]
    else:
        spot[last] = value
    return json.dumps(found).encode()


S0 = ("splits", "train", "shards", 0)


@pytest.mark.parametrize(("code", "path", "value", "says"), [
    ("E-DATA-021", ("version",), "1", 'version: this reader knows version 1, and it is "1"'),
    ("E-DATA-021", ("version",), True, "version"),
    ("E-DATA-021", ("version",), ..., "it is missing"),
    ("E-DATA-021", ("data_format",), "jsonl", "data_format"),
    ("E-DATA-021", ("splits",), {}, "splits: an object with at least one name"),
    ("E-DATA-021", ("splits", ""), WHOLE["splits"]["train"], "a name is empty"),
    ("E-DATA-021", ("splits", "train"), [], "splits.train: an object"),
    ("E-DATA-021", ("splits", "train", "records"), 4, "splits.train.records: it is 4, and the shards have 3"),
    ("E-DATA-021", ("splits", "train", "records"), 3.0, "splits.train.records"),
    ("E-DATA-021", ("splits", "train", "shards"), [], "splits.train.shards: a list of at least one"),
    ("E-DATA-021", (*S0, "uri"), "", "splits.train.shards.0.uri"),
    ("E-DATA-021", (*S0, "uri"), "http://x/y", "no storage scheme `http`"),
    ("E-DATA-021", (*S0, "records"), True, "splits.train.shards.0.records: a whole number above 0 belongs here, and it is true"),
    ("E-DATA-021", (*S0, "size_bytes"), 0, "splits.train.shards.0.size_bytes"),
    ("E-DATA-021", (*S0, "etag"), None, "splits.train.shards.0.etag"),
    ("E-DATA-021", ("splits", "train", "curriculum", "easy", "records"), 2, "splits.train.curriculum.easy.records"),
    ("E-DATA-021", ("splits", "train", "curriculum", "easy", "metadata"), 3, "curriculum.easy.metadata"),
    ("E-DATA-021", ("splits", "train", "curriculum"), [], "splits.train.curriculum"),
    ("E-DATA-044", ("splits", "train", "shards", 1, "uri"), "a", "the shard a is already splits.train.shards.0"),
])
def test_mistakes_of_a_manifest_name_the_path(code, path, value, says):
    found = wrong(code, parse, changed(path, value), "m.json")
    assert says in found.message and "m.json" in found.message


@pytest.mark.parametrize(("code", "data", "says"), [
    ("E-DATA-020", b"\xff", "not UTF-8"),
    ("E-DATA-020", b"", "not JSON"),
    ("E-DATA-020", b'{"version": NaN}', "not JSON"),
    ("E-DATA-020", b"[" * 200_000, "not JSON"),
    ("E-DATA-020", b'{"version": ' + b"9" * 5000 + b"}", "not JSON"),
    ("E-DATA-021", b"[]", "the top: an object belongs here"),
    ("E-DATA-021", b'{"version": 1, "version": 1}', "twice"),
])
def test_manifests_that_cannot_be_read(code, data, says):
    assert says in wrong(code, parse, data, "m.json").message


def test_unknown_keys_are_noted(tmp_path):
    made = make(tmp_path, {"train": rows(3)})
    found = json.loads(made.read_text())
    found["owner"] = found["splits"]["train"]["shards"][0]["colour"] = 1
    made.write_text(json.dumps(found))
    said = []
    assert open_source(source(tmp_path), say=said.append).count == 3
    assert len(said) == 1 and "owner, splits.train.shards.0.colour" in said[0]


def test_splits_and_stages_by_name(tmp_path):
    make(tmp_path, {"train/easy": rows(5), "train/hard": rows(5, 10), "valid": rows(3, 20)})
    found = source(tmp_path)
    opened = open_source(found)
    assert "2 splits" in wrong("E-DATA-022", eval_feed, opened, data_of(found)).message
    near = wrong("E-DATA-022", eval_feed, opened, data_of(found, split="trian"))
    assert "train" in near.help[0]
    far = source(tmp_path, split="train", stages=[[["hrad"], None]])
    assert "hard" in wrong("E-DATA-022", eval_feed, open_source(far), data_of(far)).help[0]
    fixed = source(tmp_path, split="valid")
    assert [b["id"].tolist() for b in eval_feed(open_source(fixed), data_of(fixed))] == [[20, 21, 22]]


# order


def ids(feed, steps):
    return [feed.batch(step)["id"].tolist() for step in steps]


def test_500_batches_are_the_same_for_ranks_workers_and_resumes(tmp_path, monkeypatch):
    make(tmp_path, {"train": rows(601)}, records=13)
    found = source(tmp_path)
    data = data_of(found, batch=8, shuffle=True)
    wanted = None
    for workers in (0, 1, 4):
        cache_in(monkeypatch, tmp_path / f"cache-{workers}")
        opened = reader.read(found, tmp_path, workers=workers)
        for ranks in (1, 2, 4):
            feeds = [train_feed(opened, data, 3, rank, ranks) for rank in range(ranks)]
            got = [sum((feed.batch(step)["id"].tolist() for feed in feeds), []) for step in range(500)]
            wanted = wanted or got
            assert got == wanted, (workers, ranks)
    assert sorted(sum(wanted, [])[:601]) == list(range(601))
    for start in range(0, 500, 50):
        again = train_feed(reader.read(found, tmp_path), data, 3)
        assert ids(again, range(start, min(start + 60, 500))) == wanted[start : start + 60]
    assert again.cursor(100) == (1, 199)


def test_shard_boundaries_do_not_change_the_order(tmp_path):
    orders = []
    for records in (1000, 10, 3):
        folder = tmp_path / str(records)
        folder.mkdir()
        make(folder, {"train": rows(50)}, records=records)
        found = source(folder)
        orders.append(ids(train_feed(open_source(found), data_of(found, shuffle=True), 1), range(30)))
    assert orders[0] == orders[1] == orders[2]


def test_stages_switch_by_step(tmp_path):
    make(tmp_path, {"train/easy": rows(8), "train/hard": rows(8, 100), "train": rows(2, 900)})
    found = source(tmp_path, split="train", stages=[[["easy"], 3], [["hard", "easy"], None]])
    feed = train_feed(open_source(found), data_of(found), 0)
    assert ids(feed, range(6)) == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3], [100, 101, 102, 103], [104, 105, 106, 107], [0, 1, 2, 3]]
    assert (feed.cursor(2), feed.cursor(3), feed.cursor(5)) == ((1, 0), (0, 0), (0, 8))
    assert ids(feed, [4, 2]) == [[104, 105, 106, 107], [0, 1, 2, 3]]  # back, and over the switch
    assert "no steps" in wrong("E-DATA-022", eval_feed, open_source(found), data_of(found)).message


def test_the_second_start_reads_no_shard(tmp_path, monkeypatch):
    make(tmp_path, {"train": rows(40)})
    found = source(tmp_path)
    first = ids(train_feed(open_source(found), data_of(found, shuffle=True), 0), range(9))
    monkeypatch.setattr(index, "fetch", None)
    assert ids(train_feed(open_source(found), data_of(found, shuffle=True), 0), range(9)) == first


def test_a_cache_cleared_under_a_run(tmp_path):
    make(tmp_path, {"train": rows(40)})
    found = source(tmp_path)
    feed = train_feed(open_source(found), data_of(found), 0)
    shutil.rmtree(tmp_path / "cache" / "sexpgpu" / "data")
    (tmp_path / "cache" / "sexpgpu" / "data").mkdir()
    assert ids(feed, range(10)) == [list(range(i, i + 4)) for i in range(0, 40, 4)]


def test_a_republished_manifest_has_another_digest(tmp_path):
    make(tmp_path, {"train": rows(9)})
    before = open_source(source(tmp_path)).digest
    shutil.rmtree(tmp_path / "m")
    make(tmp_path, {"train": rows(10)})
    assert open_source(source(tmp_path)).digest != before


# fields


def test_fields_of_any_shape(tmp_path):
    make(tmp_path, {"train": rows(20)})
    found = source(tmp_path, Field("x", "f32", (2,), scale=2), ID)
    batch = next(iter(eval_feed(open_source(found), data_of(found, batch=20))))
    assert batch["x"].tolist() == [[i, -2 * i] for i in range(20)] and batch["x"].dtype == np.float32


def test_padding_is_asked_for_and_counted(tmp_path):
    make(tmp_path, {"train": rows(10)})
    short = source(tmp_path, Field("tokens", "i32", (3,)))
    assert "record 1 (line 1, byte 0 of its text)" in wrong("E-DATA-039", eval_feed, open_source(short), data_of(short)).message
    found, said = source(tmp_path, Field("tokens", "i32", (3,), pad=-1)), []
    batch = next(iter(eval_feed(open_source(found, say=said.append), data_of(found, batch=10))))
    assert batch["tokens"].tolist() == 2 * [[0, -1, -1], [0, 1, -1], [0, 1, 2], [0, 1, 2], [0, 1, 2]]
    assert said == ["data d: of 10 lists of field `tokens`, 4 were cut and 4 filled up (the longest has 5)"]


def test_padding_of_lists_of_lists(tmp_path):
    make(tmp_path, {"train": [{"m": [[1, 2], [3, 4], [5, 6]]}, {"m": [[7, 8.0]]}, {"m": []}]})
    found = source(tmp_path, Field("m", "f32", (2, 2), pad=9))
    batch = next(iter(eval_feed(open_source(found), data_of(found, batch=3))))
    assert batch["m"].tolist() == [[[1, 2], [3, 4]], [[7, 8], [9, 9]], [[9, 9], [9, 9]]]


@pytest.mark.parametrize(("code", "row", "says"), [
    ("E-DATA-038", {"ID": 1}, "the record has no key `id`"),
    ("E-DATA-039", {"id": "7"}, "field `id`: a number belongs here, and this is a string"),
    ("E-DATA-039", {"id": None}, "null"),
    ("E-DATA-039", {"id": True}, "true or false"),
    ("E-DATA-009", {"id": 1.5}, "1.5 is not a whole number"),
    ("E-DATA-009", {"id": 2**70}, "outside"),
])
@pytest.mark.parametrize("form", ["jsonl.gz", "msgpack.zstf"])
def test_wrong_records_name_shard_record_and_byte(tmp_path, code, row, says, form):
    records = [{"id": 1}, {"id": 2.0}, row]
    if form == "jsonl.gz":
        make(tmp_path, {"train": records})
        where = "record 3 (line 3, byte 20 of its text)"
    else:
        if row.get("id") == 2**70:
            pytest.skip("MessagePack has no such integer")
        offset = packed(tmp_path, records)[2]
        where = f"record 3 (byte {offset})"
    found = source(tmp_path)
    message = wrong(code, eval_feed, open_source(found), data_of(found)).message
    assert "shard shards/train/part-00000" in message and where in message and says in message


def packed(folder, records):
    """A manifest over one msgpack.zstf shard; gives where each frame's length stands."""
    import msgspec
    import zstandard

    frames = [zstandard.compress(msgspec.msgpack.encode(r)) for r in records]
    offsets = [sum(8 + len(f) for f in frames[:i]) for i in range(len(frames))]
    write_shard(folder, "msgpack.zstf", b"".join(len(f).to_bytes(8, "big") + f for f in frames), len(records))
    return offsets


def write_shard(folder, form, data, count):
    name = f"shards/train/part-00000.{form}"
    (folder / "m/shards/train").mkdir(parents=True, exist_ok=True)
    (folder / "m" / name).write_bytes(data)
    shard = Shard(name, count, len(data), f'"{hashlib.md5(data).hexdigest()}"')
    part = schema.Part(count, (shard,))
    (folder / "m/data-manifest-v1.json").write_text(schema.text(form, {"train": part}))


def test_a_parquet_shard_without_the_column(tmp_path):
    pyarrow = pytest.importorskip("pyarrow.parquet")
    import pyarrow as pa

    target = tmp_path / "t.parquet"
    pyarrow.write_table(pa.table({"id": [1, 2, None], "y": [[1.5], [2.5], [3.5]]}), target)
    write_shard(tmp_path, "parquet", target.read_bytes(), 3)
    found = source(tmp_path, Field("idd", "i64"))
    assert "id" in wrong("E-DATA-038", eval_feed, open_source(found), data_of(found)).help[0]
    found = source(tmp_path)
    assert "record 3 (row group 0), field `id`" in wrong("E-DATA-039", eval_feed, open_source(found), data_of(found)).message
    found = source(tmp_path, Field("y", "f32", (1,)))
    assert next(iter(eval_feed(open_source(found), data_of(found))))["y"].tolist() == [[1.5], [2.5], [3.5]]
    data = target.read_bytes()
    write_shard(tmp_path, "parquet", data[: len(data) // 2], 3)
    assert "Parquet" in wrong("E-DATA-027", eval_feed, open_source(found), data_of(found)).message


def test_labels_out_of_range_name_shard_and_record(tmp_path):
    make(tmp_path, {"train": rows(20), "valid": rows(3)}, records=6)
    found = source(tmp_path)
    opened = open_source(found)
    train_feed(opened, data_of(found, split="train"), 0)
    opened.expect(FieldBound("id", 0, 19))
    opened.expect(FieldBound("other", 0, 1))
    bad = wrong("E-DATA-014", opened.expect, FieldBound("id", 0, 13))
    assert "is 14 in record 3 of shard shards/train/part-00002.jsonl.gz" in bad.message and "6 values" in bad.notes[0]


# shards that are not as they should be


def spoiled(tmp_path, spoil, etag=True):
    """A built manifest whose second shard is spoiled; what a feed then says, and what `verify` says."""
    made = make(tmp_path, {"train": rows(30)}, records=10)
    if not etag:
        found = json.loads(made.read_text())
        for shard in found["splits"]["train"]["shards"]:
            shard["etag"] = ""
        made.write_text(json.dumps(found))
    target = tmp_path / "m/shards/train/part-00001.jsonl.gz"
    spoil(target, made)
    found = source(tmp_path)
    with pytest.raises(SexpError) as error:
        train_feed(open_source(found), data_of(found), 0)
    told = verify(*open_manifest("m", tmp_path))
    assert "part-00001" in error.value.diagnostic.message and "part-00001" in told[0].message and len(told) == 1
    assert told[0].code == error.value.diagnostic.code
    return error.value.diagnostic


def sized(target, made, data):
    """Puts data there and corrects the manifest's size."""
    target.write_bytes(data)
    found = json.loads(made.read_text())
    found["splits"]["train"]["shards"][1]["size_bytes"] = len(data)
    made.write_text(json.dumps(found))


def test_truncated_shard(tmp_path):
    assert spoiled(tmp_path, lambda t, m: t.write_bytes(t.read_bytes()[:-20])).code == "E-DATA-024"


def test_truncated_shard_of_the_right_size(tmp_path):
    assert "ends early" in spoiled(tmp_path, lambda t, m: sized(t, m, t.read_bytes()[:-20]), etag=False).message


def test_bit_flipped_shard(tmp_path):
    def flip(target, made):
        data = bytearray(target.read_bytes())
        data[60] ^= 4
        target.write_bytes(bytes(data))

    assert spoiled(tmp_path, flip).code == "E-DATA-025"


def test_etags_of_uploads_in_parts():
    inner = hashlib.md5(b"x").digest()
    one = hashlib.md5(inner).hexdigest()
    check_digest(Shard("s", 1, 1, f'"{one}-1"'), inner, "")
    wrong("E-DATA-025", check_digest, Shard("s", 1, 1, f'"{one[::-1]}-1"'), inner, "")
    many = f'"{"0" * 32}-3"'
    check_digest(Shard("s", 1, 1, many), inner, "")
    check_digest(Shard("s", 1, 1, many), inner, many)
    wrong("E-DATA-025", check_digest, Shard("s", 1, 1, many), inner, f'"{"1" * 32}-3"')
    check_digest(Shard("s", 1, 1, f'"{"0" * 32}"'), inner, f'"{"0" * 32}"')  # a store whose etags are no MD5
    check_digest(Shard("s", 1, 1, "opaque"), inner, "other")


def test_bit_flipped_shard_without_etag(tmp_path):
    def flip(target, made):
        data = bytearray(target.read_bytes())
        data[-6] ^= 4  # its CRC
        target.write_bytes(bytes(data))

    assert spoiled(tmp_path, flip, etag=False).code == "E-DATA-027"


def test_renamed_shard(tmp_path):
    assert spoiled(tmp_path, lambda t, m: t.rename(t.with_name("part-1.jsonl.gz"))).code == "E-DATA-023"


def test_missing_shard(tmp_path):
    assert spoiled(tmp_path, lambda t, m: t.unlink()).code == "E-DATA-023"


def test_empty_shard(tmp_path):
    found = spoiled(tmp_path, lambda t, m: t.write_bytes(b""))
    assert found.code == "E-DATA-024" and "it is empty" in found.message


def test_shard_without_records(tmp_path):
    found = spoiled(tmp_path, lambda t, m: sized(t, m, gzip.compress(b"\n\n", mtime=0)), etag=False)
    assert found.code == "E-DATA-026" and "it has 0 records" in found.message


def test_duplicated_shard(tmp_path):
    """One shard's file in the place of another of the same size and count."""
    def swap(target, made):
        other = target.with_name("part-00002.jsonl.gz").read_bytes()
        sized(target, made, other)

    assert spoiled(tmp_path, swap).code == "E-DATA-025"
    assert wrong("E-DATA-044", parse, changed(("splits", "train", "shards", 1, "uri"), "a"), "m").code == "E-DATA-044"


def test_more_records_than_declared(tmp_path):
    data = b"".join(b'{"id": %d}\n' % i for i in range(11))
    assert spoiled(tmp_path, lambda t, m: sized(t, m, gzip.compress(data, mtime=0)), etag=False).code == "E-DATA-026"


def test_second_gzip_member(tmp_path):
    def twice(target, made):
        sized(target, made, target.read_bytes() + gzip.compress(b'{"id": 1}\n', mtime=0))

    assert "after its gzip member" in spoiled(tmp_path, twice, etag=False).message


def test_line_that_is_no_record(tmp_path):
    data = b'{"id": 1}\n' * 4 + b"[1]\n" + b'{"id": 1}\n' * 5
    found = spoiled(tmp_path, lambda t, m: sized(t, m, gzip.compress(data, mtime=0)), etag=False)
    assert found.code == "E-DATA-037" and "record 5 (line 5, byte 40" in found.message


@pytest.mark.parametrize("spoil", [lambda d: d[:-3], lambda d: d[:4], lambda d: b"\0" * 8 + d, lambda d: b"\xff" * 8 + d,
                                   lambda d: d[:8] + b"junk" + d[12:]])
def test_damaged_msgpack(tmp_path, spoil):
    packed(tmp_path, rows(5))
    target = tmp_path / "m/shards/train/part-00000.msgpack.zstf"
    write_shard(tmp_path, "msgpack.zstf", spoil(target.read_bytes()), 5)
    found = source(tmp_path)
    told = wrong("E-DATA-027", eval_feed, open_source(found), data_of(found))
    assert "shard shards/train/part-00000" in told.message and "byte " in told.message


def test_a_stalled_read_ends_with_the_shards_name(tmp_path, monkeypatch):
    make(tmp_path, {"train": rows(9)})
    release = threading.Event()

    def hang(self):
        yield b""
        release.wait(20)

    monkeypatch.setattr(LocalPlace, "chunks", lambda self: hang(self) if "part-" in str(self.path) else iter([self.path.read_bytes()]))
    found = source(tmp_path)
    opened = reader.read(found, tmp_path, stall=0.5)
    try:
        assert "part-00000" in wrong("E-DATA-029", eval_feed, opened, data_of(found)).message
    finally:
        release.set()


def test_workers_report_the_same_mistake(tmp_path):
    make(tmp_path, {"train": [*rows(30), {"id": "x"}]}, records=10)
    found = source(tmp_path)
    told = [wrong("E-DATA-039", eval_feed, reader.read(found, tmp_path, workers=n), data_of(found)).message for n in (0, 2)]
    assert told[0] == told[1] and "part-00003" in told[0]


def test_not_enough_disk(tmp_path, monkeypatch):
    make(tmp_path, {"train": rows(9)})
    found = source(tmp_path)
    monkeypatch.setattr("sexpgpu.run.data.cache.Cache.free", lambda self: 10)
    assert "take 72 bytes" in wrong("E-DATA-016", eval_feed, open_source(found), data_of(found)).message


def test_without_a_cache_folder_it_works_and_says_so(tmp_path, monkeypatch):
    make(tmp_path, {"train": rows(9)})
    (tmp_path / "cache").write_text("a file")
    said = []
    found = source(tmp_path)
    assert ids(train_feed(open_source(found, say=said.append), data_of(found), 0), [0]) == [[0, 1, 2, 3]]
    assert sum("E-DATA-015" in line for line in said) <= 1


# build, inspect, verify


def test_build_is_deterministic_and_resumes(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        make(tmp_path / name, {"train/easy": rows(20), "valid": rows(3)}, records=6)

    def files(folder):
        return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}

    whole = files(tmp_path / "one/m")
    assert files(tmp_path / "two/m") == whole and len(whole) == 2 * 5 + 1
    for name in ("part-00002.jsonl.gz", "part-00003.jsonl.gz", "part-00003.jsonl.gz.metadata.json"):
        (tmp_path / "two/m/shards/train/curriculum/easy" / name).unlink()
    (tmp_path / "two/m/data-manifest-v1.json").unlink()
    times = {p: p.stat().st_mtime_ns for p in (tmp_path / "two/m").rglob("*.gz")}
    make(tmp_path / "two", {"train/easy": rows(20), "valid": rows(3)}, records=6)
    assert files(tmp_path / "two/m") == whole
    assert all(p.stat().st_mtime_ns == t for p, t in times.items())
    assert b"\\u00e9" in gzip.decompress(whole["shards/valid/part-00000.jsonl.gz"])


def test_build_writes_over_nothing(tmp_path):
    make(tmp_path, {"train": rows(5)})
    before = (tmp_path / "m/data-manifest-v1.json").read_bytes()
    assert "another input" in wrong("E-DATA-046", make, tmp_path, {"train": rows(6)}).message
    wrong("E-DATA-046", make, tmp_path, {"train": rows(5), "valid": rows(2)})
    assert (tmp_path / "m/data-manifest-v1.json").read_bytes() == before


@pytest.mark.parametrize(("code", "text", "says"), [
    ("E-DATA-037", '{"id": 1}\n\n{"id": NaN}\n', "line 3"), ("E-DATA-037", "[1]\n", "line 1"), ("E-DATA-019", "\n\n", "no records")])
def test_mistakes_of_build(tmp_path, code, text, says):
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    assert says in wrong(code, build, [Input("train", None, path)], tmp_path / "m", 5, None).message


@pytest.mark.parametrize("base", ["", "http://host/x", "folder", "s3://", "/", "s3:/bucket"])
def test_a_base_that_no_reader_takes(tmp_path, base):
    assert "--base" in wrong("E-DATA-019", make, tmp_path, {"train": rows(3)}, base=base).message
    assert not (tmp_path / "m").exists()


def test_words_of_inputs():
    assert parse_input("a.jsonl") == Input("train", None, Path("a.jsonl"))
    assert parse_input("valid/hard 2=x/y=z.jsonl") == Input("valid", "hard 2", Path("x/y=z.jsonl"))
    for word in ("=a", "train=", "/easy=a", "train/=a"):
        wrong("E-DATA-019", parse_input, word)


def test_inspect(tmp_path):
    make(tmp_path, {"train/easy": rows(20)}, records=6)
    told = inspect(*open_manifest("m", tmp_path), first=1, looked=8)
    train = told["splits"]["train"]
    assert (train["records"], train["shards"], train["looked_at"]) == (20, 4, 8)
    assert train["first"][0]["id"] == 0 and train["stages"]["easy"]["records"] == 20
    assert train["keys"]["tokens"]["lengths"] == {"least": 1, "most": 5, "histogram": {"1": 2, "2": 4, "4": 2}}
    assert train["keys"]["x"]["kinds"] == {"a list of a number": 8}


def test_the_formats_own_loader_takes_what_we_write(tmp_path, monkeypatch):
    """syvain-training-data 0.0.118, where it is installed (tests/README.md); it knows absolute s3 URIs only."""
    pytest.importorskip("syvain_training_data")
    from syvain_training_data import gzjsonl
    from syvain_training_data.loader import SplitDataLoader
    from syvain_training_data.manifest import parse_manifest_json

    class Store:
        def get(self, key):
            return Answer((tmp_path / "m" / key.removeprefix("toy/")).read_bytes())

    class Answer:
        def __init__(self, data):
            self.data = data

        def stream(self, min_chunk_size):
            return iter([self.data[:50], self.data[50:]])

    wanted = {"train/easy": rows(20), "train/hard 2": rows(3, 50), "valid": rows(3)}
    made = make(tmp_path, wanted, records=6, base="s3://bucket/toy")
    monkeypatch.setattr(gzjsonl, "store_for_uri", lambda uri, storage_config: (Store(), None))
    loader = SplitDataLoader(parse_manifest_json(made.read_bytes(), source="m"), None, list, {"batch_size": 5})
    assert sum(loader.load("train", "hard 2"), []) == wanted["train/hard 2"]
    assert sum(loader.load("train"), []) == wanted["train/easy"] + wanted["train/hard 2"]
    assert sum(loader.load("valid"), []) == wanted["valid"]


def test_fetch_is_one_read_of_the_file(tmp_path):
    make(tmp_path, {"train": rows(3)})
    shard = parse((tmp_path / "m/data-manifest-v1.json").read_bytes(), "m").splits["train"].shards[0]
    path = tmp_path / "m" / shard.uri
    assert fetch(LocalPlace(path), shard, None, Progress()) == path


def test_a_feed_is_of_the_plain_kind_below(tmp_path):
    make(tmp_path, {"train": rows(9)})
    found = source(tmp_path)
    opened = open_source(found)
    plain = TrainFeed(opened.picked(opened.phases(data_of(found))[0][1]), 4, 7, True)
    ahead = train_feed(opened, data_of(found, shuffle=True), 7)
    assert ids(plain, range(20)) == ids(ahead, range(20)) == ids(ahead, range(20))


def test_parquet_without_its_library(tmp_path, monkeypatch):
    write_shard(tmp_path, "parquet", b"PAR1", 3)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    found = source(tmp_path)
    missing = wrong("E-DATA-045", eval_feed, open_source(found), data_of(found))
    assert "pip install" in missing.help[0]


def test_places_of_uris():
    here = places.place("m/x.json", "/data")
    assert places.beside(here, "shards/a%20b").path == Path("/data/m/shards/a%20b")
    assert places.beside(here, "file:///z/a").path == Path("/z/a") and places.beside(here, "s3://b/a%2F//c").text == "s3://b/a%2F//c"
    there = places.place("s3://b/k/x.json")
    assert places.beside(there, "shards/a").text == "s3://b/k/shards/a" and places.beside(places.place("s3://b/x"), "a").text == "s3://b/a"
    for uri in ("/etc/passwd", "file:///etc/passwd"):
        assert "names a file of this machine" in wrong("E-DATA-021", places.beside, there, uri).message
    wrong("E-NET-022", places.place, "s3://bucket")


def test_shards_elsewhere_are_announced(tmp_path):
    (tmp_path / "far").mkdir()
    made = make(tmp_path / "far", {"train": rows(5)}, base=str(tmp_path / "far" / "m"))
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / made.name).write_bytes(made.read_bytes())
    said, found = [], source(tmp_path)
    eval_feed(open_source(found, say=said.append), data_of(found))
    assert said == [f"data d: the manifest's shards are read from {tmp_path}/far/m/shards/train"]
