"""Places in a bucket and in a folder, by the same tests; then what only S3 has, against a real server."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from seaweed import Server

import sexpgpu.run.storage.client as client
import sexpgpu.run.storage.lease as lease
import sexpgpu.run.storage.link as link
import sexpgpu.run.storage.s3 as s3
from sexpgpu.diagnostics import SexpError
from sexpgpu.run.storage import Missing, StorageError, Taken, grant, local_copy, open_object, open_storage, split
from sexpgpu.run.storage.file import open_folder
from sexpgpu.settings import load

MIB = 1 << 20


def code(call: Callable[[], Any]) -> str:
    with pytest.raises(SexpError) as caught:
        call()
    return caught.value.diagnostic.code


def noise(size: int, seed: int = 0) -> bytes:
    return hashlib.shake_128(str(seed).encode()).digest(size)


@pytest.fixture(params=["file", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    if request.param == "file":
        yield open_folder(str(tmp_path / "place"))
    else:
        storage = request.getfixturevalue("server").storage(request.getfixturevalue("place"))
        yield storage
        storage.close()


# --- both ------------


def test_objects_by_name(store: Any) -> None:
    assert store.entries() == [] and store.folders() == [] and store.head("a") is None
    a = store.put("a", b"first")
    store.put("step-2/part", [b"he", memoryview(b"ad"), bytearray(b"er")])
    store.put("step-10/x/y", b"")
    assert [(e.name, e.size) for e in store.entries()] == [("a", 5), ("step-10/x/y", 0), ("step-2/part", 6)]
    assert [e.name for e in store.entries("step-2")] == ["step-2/part"]
    assert store.folders() == ["step-10", "step-2"]
    assert store.head("a") == a and a.size == 5
    assert store.at("step-2").read("part") == b"header" and store.at("step-2").url == f"{store.url}/step-2"
    assert store.read("step-10/x/y") == b""
    again = store.put("a", b"other")
    assert again.tag != a.tag and store.read("a") == b"other"
    store.delete(["a", "never", "step-10/x/y"])
    assert [e.name for e in store.entries()] == ["step-2/part"] and store.head("a") is None


def test_ranges(store: Any) -> None:
    data = noise(1000)
    store.put("x", data)
    assert store.read("x", 10) == data[10:] and store.read("x", 10, 20) == data[10:20]
    assert store.read("x", 990, 5000) == data[990:] and store.read("x", 5, 5) == b""
    assert store.read("x", 1000) == b"" and store.read("x", 2000, 3000) == b""


def test_names_are_raw(store: Any) -> None:
    names = ["a b", "a%20b", "a+b", "\u00fc/\u00df", "x/y&z=1", "q?r#s"]
    for name in names:
        store.put(name, name.encode())
    assert [e.name for e in store.entries()] == sorted(names)
    for name in names:
        assert store.read(name) == name.encode() and store.head(name).size == len(name.encode())
    store.delete(names)
    assert store.entries() == []


def test_own_names_are_not_shown(store: Any) -> None:
    for name in (".x", "a/.y", ".d/z", "b"):
        store.put(name, b"1")
    assert [e.name for e in store.entries()] == ["b"] and store.folders() == ["a"] and store.read(".x") == b"1"


def test_what_is_missing(store: Any) -> None:
    for call in (lambda: store.read("no"), lambda: list(store.stream("no", 5, 9))):
        with pytest.raises(Missing) as caught:
            call()
        assert caught.value.diagnostic.code == "E-NET-019" and caught.value.reason.startswith("there is no such")


def test_conditional_writes(store: Any) -> None:
    first = store.put("x", b"1", absent=True)
    assert code(lambda: store.put("x", b"2", absent=True)) == "E-NET-023"
    second = store.put("x", b"3", tag=first.tag)
    with pytest.raises(Taken):
        store.put("x", b"4", tag=first.tag)
    assert store.read("x") == b"3" and store.head("x") == second
    with pytest.raises(Taken):
        store.put("y", b"5", tag=first.tag)
    assert store.head("y") is None


def test_one_writer(store: Any) -> None:
    hold = store.hold({"run_id": "r1", "slug": "night"})
    hold.check()
    assert code(lambda: store.hold({"run_id": "r2", "slug": "day"})) == "E-CKPT-011"
    hold.release()
    hold.release()
    other = store.hold({"run_id": "r2", "slug": "day"})
    other.check()
    other.release()


def test_unique_names_are_names_of_a_manifest(store: Any) -> None:
    name = store.unique("part-00001-of-00001.safetensors")
    assert name.endswith(".safetensors") and set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789.-")


# --- folders alone ------------


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    inside = open_folder(str(tmp_path / "file" / "x"))
    for call in (
        lambda: inside.put("a", b"1"),
        lambda: inside.hold({}),
        lambda: open_folder(str(tmp_path)).read("file/x"),
        lambda: open_folder(str(tmp_path / "file")).entries() or inside.folders(),
    ):
        assert code(call) == "E-NET-024"


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_folder(str(tmp_path / "p"))
    store.put("x", b"old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError) as caught:
        store.put("x", b"new")
    assert caught.value.reason == "No space left on device" and caught.value.diagnostic.code == "E-NET-024"
    assert store.read("x") == b"old" and [p.name for p in (tmp_path / "p").iterdir()] == ["x"]


def test_what_a_killed_writer_left_is_swept(tmp_path: Path) -> None:
    store = open_folder(str(tmp_path / "p"))
    store.put("step-1/x", b"1")
    (tmp_path / "p/step-1/.tmp-99-aa").write_bytes(b"half")
    (tmp_path / "p/.tmp-99-bb").mkdir()
    assert store.sweep() == 2 and store.sweep() == 0 and store.read("step-1/x") == b"1"


# --- locations ------------


def test_locations(tmp_path: Path) -> None:
    assert split("runs/x", tmp_path) == ("file", str(tmp_path / "runs/x"))
    assert split("file://runs/x", tmp_path) == ("file", str(tmp_path / "runs/x"))
    assert split("S3://b/p") == ("s3", "b/p")
    assert code(lambda: split("sw://b/p")) == "E-NET-002"
    grant(load({}))
    assert code(lambda: open_storage("s3://b/p", "data")) == "E-NET-010"


@pytest.mark.parametrize(
    ("location", "what"),
    [("s3://", "E-NET-022"), ("s3:///p", "E-NET-022"), ("s3://b/../p", "E-NET-022"), ("s3://b?x", "E-NET-022")],
)
def test_bad_locations(location: str, what: str) -> None:
    grant(load({f"AWS_{n}": "https://h" for n in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "ENDPOINT_URL", "REGION")}))
    try:
        assert code(lambda: open_storage(location, "data")) == what
        assert code(lambda: open_object("s3://bucket", "data")) == "E-NET-022"
    finally:
        grant(load({}))


@pytest.mark.parametrize(
    ("url", "what"),
    [("host", "E-NET-016"), ("ftp://host", "E-NET-016"), ("https://", "E-NET-016"), ("https://me:pw@host", "E-NET-016"), ("https://host:x", "E-NET-016"),
     ("https://h?x=1", "E-NET-016"), ("http://minio:9000", "E-NET-017"), ("http://10.0.0.1", "E-NET-017"), ("http://127.evil.com", "E-NET-017"),
     ("http://localhost.evil.com", "E-NET-017"), ("https://minio", ""), ("http://127.0.0.1:1", ""), ("http://[::1]:1", ""), ("http://localhost", "")],
)  # fmt: skip
def test_endpoints(url: str, what: str) -> None:
    def check(**more: str) -> None:
        client.check_endpoint(load({"AWS_ENDPOINT_URL": url, **more}).credentials("data"))

    if what:
        with pytest.raises(SexpError) as caught:
            check()
        assert caught.value.diagnostic.code == what and "pw" not in str(caught.value.diagnostic)
    else:
        check()
    if url == "http://minio:9000":
        check(SEXPGPU_PLAIN_HTTP="other,minio")


# --- S3 alone ------------


def test_large_objects_go_and_come_in_parts(server: Server, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store, data = server.storage(place), noise(37 * MIB + 11)
    sent: list[str] = []
    real = link.Link.send
    monkeypatch.setattr(
        link.Link,
        "send",
        lambda self, operation, key=None, **a: (sent.append(operation), real(self, operation, key, **a))[1],
    )
    view = memoryview(data)
    entry = store.put("x", [view[: 5 * MIB], view[5 * MIB : 5 * MIB + 1], view[5 * MIB + 1 :]])
    assert entry.size == len(data) and sent.count("upload_part") == 5 and store.head("x") == entry
    sent.clear()
    blocks = list(store.stream("x", 3))
    assert b"".join(blocks) == data[3:] and sent.count("get_object") == 5
    assert store.read("x", 8 * MIB - 5, 16 * MIB + 5) == data[8 * MIB - 5 : 16 * MIB + 5]


def test_a_conditional_upload_in_parts(server: Server, place: str) -> None:
    store, data = server.storage(place), noise(17 * MIB)
    store.put("x", data, absent=True)
    with pytest.raises(Taken):
        store.put("x", noise(17 * MIB, 1), absent=True)
    assert (
        store.read("x") == data
        and store.link.call("list_multipart_uploads", Prefix=store.prefix).get("Uploads", []) == []
    )


def test_reads_are_of_one_version(server: Server, place: str) -> None:
    store = server.storage(place)
    store.put("x", noise(20 * MIB))
    stream = store.stream("x")
    next(stream)
    store.put("x", noise(20 * MIB, 1))
    assert code(lambda: [None for _ in stream]) == "E-NET-021"


def test_a_cut_answer_goes_on_where_it_was_cut(server: Server, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store, data, cuts = server.storage(place), noise(20 * MIB), []
    store.put("x", data)
    real = s3.S3Storage._receive

    class Cut:
        def __init__(self, body: Any):
            self.body = body

        def iter_chunks(self, size: int) -> Iterator[bytes]:
            yield self.body.read(100_000)
            cuts.append(1)
            raise OSError("cut")

        def close(self) -> None:
            self.body.close()

    def receive(self: Any, body: Any, got: bytearray, patience: Any) -> None:
        real(self, Cut(body) if len(got) < 400_000 else body, got, patience)

    monkeypatch.setattr(s3.S3Storage, "_receive", receive)
    assert store.read("x") == data and len(cuts) >= 9


@pytest.mark.parametrize("silent", [True, False])
def test_a_server_without_conditional_writes(
    server: Server, place: str, monkeypatch: pytest.MonkeyPatch, silent: bool
) -> None:
    """It ignores the condition, or says that it has none: one writer is still told from the next, and the run says what is missing."""
    real = link.Link.send

    def send(self: Any, operation: str, key: str | None = None, **arguments: Any) -> Any:
        condition = {
            name: arguments.pop(name)
            for name in ("IfNoneMatch", "IfMatch")
            if operation == "put_object" and name in arguments
        }
        if condition and not silent:
            raise s3.storage_error("E-NET-020", "501", kind=link.NotOffered)
        return real(self, operation, key, **arguments)

    monkeypatch.setattr(link.Link, "send", send)
    store, said = server.storage(place), []
    first = store.put("x", b"1", absent=True)
    if not silent:
        for condition in ({"absent": True}, {"tag": '"other"'}):
            with pytest.raises(Taken):
                store.put("x", b"2", **condition)
        store.put("x", b"3", tag=first.tag)
    hold = store.hold({"run_id": "r", "slug": "s"}, said.append)
    assert len(said) == silent and "no conditional writes" in "".join(said) or not silent
    hold.check()
    if not silent:
        assert code(lambda: store.hold({"run_id": "q", "slug": "t"})) == "E-CKPT-011"
    hold.release()


def test_listings_of_many_pages(server: Server, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store, asked = server.storage(place), []
    for i in range(8):
        store.put(f"step-{i}/x", b"")
    real = link.Link.send

    def send(self: Any, operation: str, key: str | None = None, **arguments: Any) -> Any:
        asked.append(operation)
        return real(self, operation, key, **arguments, **({"MaxKeys": 3} if operation == "list_objects_v2" else {}))

    monkeypatch.setattr(link.Link, "send", send)
    assert [e.name for e in store.entries()] == [f"step-{i}/x" for i in range(8)] and len(asked) >= 3
    assert store.folders() == [f"step-{i}" for i in range(8)]


def test_orphaned_parts_are_swept(server: Server, place: str) -> None:
    store = server.storage(place)
    other = server.storage(f"{place}-other")
    for one in (store, other):
        upload = one.link.call("create_multipart_upload", one.key("step-1/part"))["UploadId"]
        one.link.call("upload_part", one.key("step-1/part"), UploadId=upload, PartNumber=1, Body=b"x" * 100)
    assert store.entries() == [] and store.sweep() == 1 and store.sweep() == 0
    assert other.sweep() == 1


def test_a_failed_upload_is_aborted(server: Server, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = server.storage(place)
    real = link.Link.send

    def send(self: Any, operation: str, key: str | None = None, **arguments: Any) -> Any:
        if operation == "upload_part" and arguments["PartNumber"] == 2:
            raise s3.storage_error("E-NET-018", "no")
        return real(self, operation, key, **arguments)

    monkeypatch.setattr(link.Link, "send", send)
    with pytest.raises(StorageError):
        store.put("x", noise(30 * MIB))
    monkeypatch.undo()
    assert store.head("x") is None and store.sweep() == 0


@pytest.mark.parametrize(
    "operation",
    [
        "put_object",
        "create_multipart_upload",
        "upload_part",
        "complete_multipart_upload",
        "delete_object",
        "list_objects_v2",
    ],
)
def test_an_answer_that_is_lost(server: Server, place: str, monkeypatch: pytest.MonkeyPatch, operation: str) -> None:
    """The request is done and its answer never comes: what was written is written once, and is ours."""
    store, lost = server.storage(place), []
    real = link.Link.send

    def send(self: Any, name: str, key: str | None = None, **arguments: Any) -> Any:
        answer = real(self, name, key, **arguments)
        if name == operation and not lost:
            lost.append(name)
            raise link.Transient("lost")
        return answer

    monkeypatch.setattr(link.Link, "send", send)
    small, large = noise(1000), noise(17 * MIB)
    store.put("small", small, absent=True)
    store.put("large", large)
    store.put("gone", b"x")
    store.delete(["gone"])
    assert [(e.name, e.size) for e in store.entries()] == [("large", 17 * MIB), ("small", 1000)] and lost
    assert store.read("small") == small and store.read("large") == large
    store.sweep()


def test_an_upload_that_the_server_forgot_is_begun_anew(
    server: Server, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, forgotten = server.storage(place), []
    real = link.Link.send

    def send(self: Any, name: str, key: str | None = None, **arguments: Any) -> Any:
        if name == "upload_part" and not forgotten:
            forgotten.append(real(self, "abort_multipart_upload", key, UploadId=arguments["UploadId"]))
        return real(self, name, key, **arguments)

    monkeypatch.setattr(link.Link, "send", send)
    store.put("x", noise(20 * MIB))
    assert store.read("x") == noise(20 * MIB) and forgotten


def test_a_certificate_that_is_none_is_told_at_once(server: Server) -> None:
    storage = server.storage("datasets/x", AWS_ENDPOINT_URL=server.url.replace("http://", "https://"))
    start = time.monotonic()
    assert code(storage.entries) == "E-NET-011" and time.monotonic() - start < 60


def test_a_server_that_restarts_in_mid_upload_is_waited_for(tmp_path: Path) -> None:
    server = Server(tmp_path / "w").start()
    try:
        store, data = server.make_buckets().storage("checkpoints/r", patience=60), noise(64 * MIB)
        restarted = []

        def restart() -> None:
            time.sleep(0.15)
            server.kill()
            time.sleep(0.5)
            server.start()
            restarted.append(time.monotonic())

        thread = threading.Thread(target=restart)
        thread.start()
        entry = store.put("x", data)
        done = time.monotonic()
        thread.join()
        assert entry.size == len(data) and restarted and restarted[0] < done
        assert store.read("x") == data
    finally:
        server.stop()


def test_a_server_that_stalls_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes connections and answers nothing for a while, as a stopped process does."""
    monkeypatch.setattr(client, "ANSWER", 1.0)
    server = Server(tmp_path / "w").start().make_buckets()
    try:
        store = server.storage("checkpoints/stall", patience=30)
        store.put("first", b"1")
        assert server.process is not None
        server.process.send_signal(signal.SIGSTOP)
        threading.Timer(2.5, server.process.send_signal, (signal.SIGCONT,)).start()
        start = time.monotonic()
        store.put("x", b"2")
        assert store.read("x") == b"2" and time.monotonic() - start > 2
    finally:
        server.process.send_signal(signal.SIGCONT)
        server.stop()


def test_no_progress_is_an_error_in_time(tmp_path: Path) -> None:
    credentials = load(Server(tmp_path / "down").environ()).credentials("data")
    storage = s3.open_bucket("datasets/x", credentials)
    storage.link.patience = 1.0
    start = time.monotonic()
    assert code(lambda: storage.entries()) == "E-NET-011"
    assert code(lambda: storage.put("x", b"x")) == "E-NET-011"
    assert time.monotonic() - start < 60


def test_closing_ends_waiting(tmp_path: Path) -> None:
    storage = s3.open_bucket("datasets/x", load(Server(tmp_path / "down").environ()).credentials("data"))
    threading.Timer(0.3, storage.close).start()
    start = time.monotonic()
    assert code(lambda: storage.entries()) == "E-NET-011" and time.monotonic() - start < 30


def test_a_copy_of_an_object(server: Server, place: str) -> None:
    server.storage("datasets/c").put("a/n.txt", noise(9 * MIB))
    grant(load(server.environ("data", "SEXPGPU_DATA_")))
    try:
        path = local_copy("s3://datasets/c/a/n.txt", "data")
        assert path.name == "n.txt" and path.read_bytes() == noise(9 * MIB) and path.parent.stat().st_mode & 0o77 == 0
        assert code(lambda: local_copy("s3://datasets/c/a/m.txt", "data")) == "E-NET-019"
    finally:
        grant(load({}))


# --- one writer ------------


def test_a_dead_writer_of_this_machine_is_replaced_at_once(server: Server, place: str) -> None:
    store = server.storage(place)
    pid = os.fork()
    if pid == 0:
        try:
            server.storage(place).hold({"run_id": "r1", "slug": "killed"})
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert store.head(lease.NAME) is not None
    start = time.monotonic()
    hold = store.hold({"run_id": "r1", "slug": "killed"})
    assert time.monotonic() - start < lease.LEASE
    hold.check()
    hold.release()
    assert store.head(lease.NAME) is None


def test_signs_of_life() -> None:
    """A number that another process has by now, a zombie, and a process that may not be looked at."""
    me = lease.identity()
    assert lease.is_alive(me) and not lease.is_dead(me)
    assert lease.is_dead({**me, "started": "1"}) and not lease.is_alive({**me, "started": "1"})
    other = {**me, "machine": "elsewhere"}
    assert not lease.is_dead(other) and not lease.is_alive(other)
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    try:
        zombie = {**me, "pid": pid, "started": "5"}
        end = time.monotonic() + 60
        while not lease.is_dead(zombie) and time.monotonic() < end:
            time.sleep(0.01)
        assert lease.is_dead(zombie)
    finally:
        os.waitpid(pid, 0)


@pytest.mark.parametrize("alive", [True, False])
def test_a_writer_elsewhere_is_watched(
    server: Server, place: str, monkeypatch: pytest.MonkeyPatch, alive: bool
) -> None:
    monkeypatch.setattr(lease, "BEAT", 0.1)
    monkeypatch.setattr(lease, "LEASE", 1.5)
    first = server.storage(place).hold({"run_id": "r1", "slug": "far"})
    monkeypatch.setattr(lease, "_machine", lambda: "another")
    said: list[str] = []
    if not alive:
        first._end.set()
        first._thread.join()
    store = server.storage(place)
    if alive:
        assert code(lambda: store.hold({"run_id": "r2", "slug": "near"}, said.append)) == "E-CKPT-011"
        first.check()
    else:
        second = store.hold({"run_id": "r2", "slug": "near"}, said.append)
        with pytest.raises(Taken):
            first.check()
        second.check()
        second.release()
    assert len(said) == 1 and "far" in said[0]
    first.release()


def test_a_server_that_is_gone_does_not_keep_a_run_from_ending(
    server: Server, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "BEAT", 1.0)
    hold = server.storage(place).hold({"run_id": "r1", "slug": "end"})

    def gone(self: Any, *_: Any, **__: Any) -> None:
        raise link.Transient("gone")

    monkeypatch.setattr(link.Link, "send", gone)
    start = time.monotonic()
    hold.release()
    assert time.monotonic() - start < 30


def test_sixteen_writers_and_one_wins(server: Server, place: str) -> None:
    stores, won = [server.storage(place) for _ in range(16)], []

    def race(number: int) -> None:
        try:
            stores[number].put("x", b"%d" % number, absent=True)
            won.append(number)
        except Taken:
            pass

    threads = [threading.Thread(target=race, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1 and stores[0].read("x") == b"%d" % won[0]
