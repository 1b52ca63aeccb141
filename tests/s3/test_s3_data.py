"""Data from a bucket: the samples of the format's own savers under their own keys, and the faults of objects."""

import json
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from sexpgpu.cli import main
from sexpgpu.diagnostics import SexpError
from sexpgpu.experiment.model import Batches, DataSource, Field
from sexpgpu.run import storage
from sexpgpu.run.data import open_source
from sexpgpu.run.data.feed import eval_feed
from sexpgpu.run.data.manifest.look import objects, open_manifest, verify
from sexpgpu.run.data.manifest.shards import fetch
from sexpgpu.run.data.place import RemotePlace, beside
from sexpgpu.run.data.workers import Progress
from sexpgpu.run.storage import client
from sexpgpu.settings import load

SAMPLES = Path(__file__).parents[1] / "data" / "manifest_sample"


@pytest.fixture(scope="module")
def uploaded(server):
    """Both buckets of the samples, byte for byte under their own keys."""
    for name in ("sample-bucket", "o41-bucket"):
        bucket = server.storage(name)
        bucket.link.call("create_bucket")
        for path in sorted((SAMPLES / name).rglob("*")):
            if path.is_file():
                bucket.put(path.relative_to(SAMPLES / name).as_posix(), path.read_bytes())
    return server


@pytest.fixture(autouse=True)
def _reached(server, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, value in server.environ(prefix="SEXPGPU_DATA_").items():
        monkeypatch.setenv(name, value)
    before = storage.granted()
    storage.grant(load(server.environ() | {"XDG_CACHE_HOME": str(tmp_path / "cache")}))
    yield
    storage.grant(before)


@pytest.mark.parametrize(
    "location",
    ["sample-bucket/datasets/toy", "o41-bucket/toy-jsonl.gz", "o41-bucket/toy-parquet", "o41-bucket/toy-msgpack.zstf"],
)
def test_samples_from_the_server(uploaded, tmp_path, location):
    expected = json.loads((SAMPLES / "expected.json").read_text())
    location = f"s3://{location}/data-manifest-v1.json"
    wanted = expected.get(location, expected["s3://o41-bucket/toy-jsonl.gz/data-manifest-v1.json"])
    where, manifest = open_manifest(location, tmp_path)
    assert verify(where, manifest) == []
    for name, split in manifest.splits.items():
        for part, ids in [
            (split, wanted[name]["ids_in_manifest_order"]),
            *((split.stages[n], i) for n, i in wanted[name]["stages"].items()),
        ]:
            found = []
            for shard in part.shards:
                path = fetch(beside(where, shard.uri), shard, tmp_path / "copy", Progress())
                found += [record["id"] for record in objects(str(path), shard, manifest.format)]
            assert found == ids


def test_batches_and_files_from_the_server(uploaded, tmp_path):
    found = DataSource(
        "d",
        "manifest",
        "s3://o41-bucket/toy-msgpack.zstf/data-manifest-v1.json",
        str(tmp_path),
        (Field("id", "i64"),),
        {"split": "train", "stages": [[["hard"], None]]},
    )
    assert next(iter(eval_feed(open_source(found), Batches(found, None, 6))))["id"].tolist() == [
        100,
        101,
        102,
        110,
        111,
        112,
    ]
    assert not list((tmp_path / "cache").rglob("*.shard"))
    uploaded.storage("datasets").put("rows.csv", b"a\n1\n2\n")
    rows = DataSource("r", "csv", "s3://datasets/rows.csv", str(tmp_path), (Field("a", "f32"),))
    assert open_source(rows).fields["a"].tolist() == [1, 2]
    uploaded.storage("datasets").put("t.bin", np.arange(9, dtype="<u2").tobytes())
    tokens = DataSource("t", "tokens", "s3://datasets/t.bin", str(tmp_path), (), {"dtype": "u16"})
    assert open_source(tokens).tokens.tolist() == list(range(9))


def test_a_disk_too_small_for_a_copy(uploaded, tmp_path, monkeypatch):
    uploaded.storage("datasets").put("small.bin", bytes(1000))
    tokens = DataSource("t", "tokens", "s3://datasets/small.bin", str(tmp_path), (), {"dtype": "u16"})
    monkeypatch.setattr("sexpgpu.run.storage.shutil.disk_usage", lambda folder: SimpleNamespace(free=999))
    with pytest.raises(SexpError) as error:
        open_source(tokens)
    assert error.value.diagnostic.code == "E-NET-024" and "1,000 bytes" in error.value.diagnostic.message


def test_other_credentials_are_used_at_once(uploaded, server):
    place = beside(RemotePlace("datasets", "x"), "rows-of-keys.csv")
    uploaded.storage("datasets").put("rows-of-keys.csv", b"a\n1\n")
    assert place.stat() is not None
    storage.grant(load(server.environ() | {"AWS_SECRET_ACCESS_KEY": "wrong"}))
    with pytest.raises(SexpError):
        place.stat()
    storage.grant(load(server.environ()))
    assert place.stat() is not None


def test_a_client_made_ahead_is_the_one_that_is_used(uploaded, server):
    storage.grant(load(server.environ()))
    storage.warm("data")
    for thread in threading.enumerate():
        if thread.name == "s3":
            thread.join(30)
    known = storage.credentials_for("data", "s3://datasets")
    assert id(known) in client._CLIENTS
    storage.grant(storage.read({}))
    storage.warm("data")  # nothing to make, and no mistake


@pytest.mark.parametrize(("code", "fault"), [("E-DATA-023", "gone"), ("E-DATA-024", "cut"), ("E-DATA-025", "replaced")])
def test_faults_of_objects_name_the_shard(uploaded, tmp_path, capfd, monkeypatch, code, fault):
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text("".join(f'{{"id": {i}}}\n' for i in range(20)))
    assert (
        main.perform(["data", "build", "a.jsonl", "--out", "m", "--records", "10", "--base", f"s3://datasets/{fault}"])
        == 0
    )
    bucket = uploaded.storage("datasets")
    for path in Path("m").rglob("*"):
        if path.is_file():
            bucket.put(f"{fault}/{path.relative_to('m').as_posix()}", path.read_bytes())
    key = f"{fault}/shards/train/part-00001.jsonl.gz"
    data = bucket.read(key)
    if fault == "gone":
        bucket.delete([key])
    else:
        bucket.put(key, data[:-1] if fault == "cut" else bytes([*data[:-1], data[-1] ^ 1]))
    found = DataSource(
        "d", "manifest", f"s3://datasets/{fault}/data-manifest-v1.json", str(tmp_path), (Field("id", "i64"),)
    )
    with pytest.raises(SexpError) as error:
        eval_feed(open_source(found), Batches(found, None, 4))
    assert error.value.diagnostic.code == code and f"s3://datasets/{key}" in error.value.diagnostic.message
    assert main.perform(["data", "verify", found.location]) == 1
    assert code in capfd.readouterr().err
