"""Objects in a bucket: range reads ahead, uploads in parts, begun anew where the server forgot them.

Every body carries its MD5, so that a damaged upload is refused by the server.
"""

from __future__ import annotations

import base64
import hashlib
import re
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from botocore.exceptions import BotoCoreError
from urllib3.exceptions import HTTPError

from sexpgpu.diagnostics import fail
from sexpgpu.run.storage import Buffer, Entry, Missing, StorageError, Taken, storage_error
from sexpgpu.run.storage.ahead import Ahead
from sexpgpu.run.storage.client import check_endpoint
from sexpgpu.run.storage.lease import Lease
from sexpgpu.run.storage.link import Link, NotOffered, Patience, Transient, UploadGone, in_words
from sexpgpu.settings import Credentials

BLOCK = 8 << 20  # bytes of one range read and of the least part of an upload
WHOLE = 16 << 20  # bytes up to which an upload is one request
MOST_PARTS = 9_000  # S3 takes 10,000
BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}\Z")


def open_bucket(rest: str, credentials: Credentials) -> S3Storage:
    """The place `bucket/prefix`; E-NET-016, E-NET-017, E-NET-022. Nothing is sent."""
    bucket, _, prefix = rest.partition("/")
    if not BUCKET.match(bucket):
        fail("E-NET-022", f"`s3://{rest}` begins with no bucket's name", help="write s3://bucket/prefix")
    parts = [part for part in prefix.split("/") if part]
    if any(part in (".", "..") for part in parts):
        fail("E-NET-022", f"`s3://{rest}` has `.` or `..` in it, which S3 takes for names", help="leave them out")
    check_endpoint(credentials)
    return S3Storage(Link(credentials, bucket), "/".join(parts))


class S3Storage:
    """A prefix of a bucket."""

    scheme = "s3"

    def __init__(self, link: Link, prefix: str):
        self.link, self.prefix = link, prefix
        self.url = link.place(prefix or None)

    def key(self, name: str) -> str:
        return f"{self.prefix}/{name}" if self.prefix else name

    def at(self, name: str) -> S3Storage:
        return S3Storage(self.link, self.key(name.strip("/")))

    def within(self, seconds: float) -> S3Storage:
        """The same place, given up after so long without progress."""
        link = Link(self.link.credentials, self.link.bucket, seconds)
        link.closed, link.reached = self.link.closed, self.link.reached
        return S3Storage(link, self.prefix)

    def close(self) -> None:
        self.link.closed.set()

    # -- looking

    def entries(self, prefix: str = "") -> list[Entry]:
        cut = len(self.key(""))
        found = (
            Entry(o["Key"][cut:], o["Size"], o["ETag"])
            for page in self._pages(Prefix=self.key(prefix))
            for o in page.get("Contents", ())
        )
        return sorted(
            (
                e
                for e in found
                if not any(part.startswith(".") for part in e.name.split("/")) and not e.name.endswith("/")
            ),
            key=lambda entry: entry.name,
        )

    def folders(self) -> list[str]:
        cut = len(self.key(""))
        pages = self._pages(Prefix=self.key(""), Delimiter="/")
        return sorted(
            p["Prefix"][cut:].rstrip("/")
            for page in pages
            for p in page.get("CommonPrefixes", ())
            if not p["Prefix"][cut:].startswith(".")
        )

    def _pages(self, **arguments: Any) -> Iterator[dict[str, Any]]:
        while True:
            page = self.link.call("list_objects_v2", **arguments)
            yield page
            if not page.get("IsTruncated") or not page.get("NextContinuationToken"):
                return
            arguments["ContinuationToken"] = page["NextContinuationToken"]

    def head(self, name: str) -> Entry | None:
        """A HEAD has no body to say why it failed, so a listing is asked, which has one."""
        try:
            answer = self.link.call("head_object", self.key(name))
        except StorageError as error:
            try:
                self.link.call("list_objects_v2", Prefix=self.key(name), MaxKeys=1)
            except StorageError as why:
                if not (
                    isinstance(error, Missing) and why.diagnostic.code == "E-NET-018"
                ):  # a key that reads and does not list
                    raise
            if isinstance(error, Missing):
                return None
            raise
        return Entry(name, answer["ContentLength"], answer["ETag"])

    # -- reading

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        return b"".join(self.stream(name, start, stop))

    def stream(self, name: str, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
        if stop is not None and stop <= start:
            return
        patience = Patience(self.link)
        limit = start + BLOCK if stop is None else min(stop, start + BLOCK)
        first, total, tag = self._range(name, start, limit, None, patience)
        yield first
        end = total if stop is None else min(stop, total)
        spans = [(at, min(at + BLOCK, end)) for at in range(limit, end, BLOCK)]
        yield from Ahead(lambda span: self._range(name, *span, tag, patience)[0], spans)

    def _range(self, name: str, start: int, stop: int, tag: str | None, patience: Patience) -> tuple[bytes, int, str]:
        """(bytes [start, stop) as far as there are, size of the object, its tag). A cut answer goes on where it was cut."""
        got, total = bytearray(), -1
        while True:
            begin = start + len(got)
            try:
                same = {} if tag is None else {"IfMatch": tag}
                answer = self.link.send("get_object", self.key(name), Range=f"bytes={begin}-{stop - 1}", **same)
                tag, total = answer["ETag"], self._total(name, answer, begin)
                self._receive(answer["Body"], got, patience)
                if len(got) >= min(stop, total) - start:
                    return bytes(got), total, tag
                raise Transient("the answer was cut short")
            except Transient as why:
                patience.wait(why)
            except Taken:
                raise storage_error(
                    "E-NET-021",
                    f"{self.link.place(self.key(name))} was changed while it was read",
                    reason="it was changed while it was read",
                    help="start again when nobody writes it",
                ) from None
            except StorageError as error:
                if error.diagnostic.code == "E-NET-020":  # perhaps 416: nothing lies there to read
                    entry = self.head(name)
                    if entry is not None and begin >= entry.size:
                        return bytes(got), entry.size, entry.tag
                raise

    def _receive(self, body: Any, got: bytearray, patience: Patience) -> None:
        try:
            for piece in body.iter_chunks(1 << 18):
                got += piece
                patience.progress()
        except (BotoCoreError, HTTPError, OSError) as error:
            raise Transient(in_words(error)) from None
        finally:
            body.close()

    def _total(self, name: str, answer: Mapping[str, Any], begin: int) -> int:
        """The object's size, from the answer to a range."""
        match = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", answer.get("ContentRange") or "")
        if match and int(match[1]) == begin:
            return int(match[2])
        if not match and begin == 0 and answer["ContentLength"] <= WHOLE:  # a small object, given whole
            return int(answer["ContentLength"])
        raise storage_error(
            "E-NET-020",
            f"{self.link.place(self.key(name))}: the server does not answer range reads",
            reason="the server does not answer range reads",
        )

    # -- writing

    def put(self, name: str, data: Buffer | Sequence[Buffer], *, absent: bool = False, tag: str | None = None) -> Entry:
        pieces = [memoryview(p).cast("B") for p in ([data] if isinstance(data, Buffer) else data)]
        size = sum(len(piece) for piece in pieces)
        condition = {"IfNoneMatch": "*"} if absent else {"IfMatch": tag} if tag is not None else {}
        try:
            etag = self._put(name, pieces, size, condition)
        except Missing:
            raise self._changed(name) from None  # the version that `tag` names is gone
        except NotOffered:
            if not condition:
                raise
            entry = self.head(name)  # the best there is: the server compares nothing
            if entry is not None and (absent or entry.tag != tag):
                raise self._changed(name) from None
            etag = self._put(name, pieces, size, {})
        return Entry(name, size, etag)

    def _changed(self, name: str) -> StorageError:
        return storage_error(
            "E-NET-023",
            f"{self.link.place(self.key(name))}: another writer was there first",
            kind=Taken,
            reason="another writer was there first",
        )

    def _put(self, name: str, pieces: Sequence[memoryview], size: int, condition: Mapping[str, str]) -> str:
        if size <= WHOLE:
            return self._put_whole(name, b"".join(pieces), condition)
        return self._put_parts(name, pieces, size, condition)

    def _put_whole(self, name: str, body: bytes, condition: Mapping[str, str]) -> str:
        patience, again = Patience(self.link), False
        while True:
            try:
                answer = self.link.send("put_object", self.key(name), Body=body, ContentMD5=_md5(body), **condition)
                return str(answer["ETag"])
            except Transient as why:
                patience.wait(why)
                again = True
            except Taken:  # by our own first attempt, whose answer was lost?
                entry = self.head(name) if again else None
                if entry is None or entry.size != len(body) or self.read(name) != body:
                    raise
                return entry.tag

    def _put_parts(self, name: str, pieces: Sequence[memoryview], size: int, condition: Mapping[str, str]) -> str:
        """An upload that the server forgot (restarted from an older state) is begun anew, three times at most."""
        key, patience = self.key(name), Patience(self.link)
        for _ in range(3):
            upload = self.link.call("create_multipart_upload", key, patience)["UploadId"]
            try:
                return self._upload(key, upload, pieces, size, condition, patience)
            except UploadGone:
                entry = self.head(name)
                if entry is not None and entry.size == size and not condition:
                    return (
                        entry.tag
                    )  # it was finished, and the answer was lost: `unique` made the name this attempt's own
            except BaseException:
                self._abort(key, upload)
                raise
        raise storage_error(
            "E-NET-020",
            f"{self.link.place(key)}: the server forgot the upload three times",
            reason="the server forgets uploads",
        )

    def _upload(
        self,
        key: str,
        upload: str,
        pieces: Sequence[memoryview],
        size: int,
        condition: Mapping[str, str],
        patience: Patience,
    ) -> str:
        length = max(BLOCK, -(-size // MOST_PARTS // (1 << 20)) * (1 << 20))
        stop = threading.Event()

        def part(number: int) -> dict[str, Any]:
            body = cut(pieces, (number - 1) * length, min(number * length, size))
            while not stop.is_set():
                try:
                    answer = self.link.send(
                        "upload_part", key, UploadId=upload, PartNumber=number, Body=body, ContentMD5=_md5(body)
                    )
                    patience.progress()
                    return {"ETag": answer["ETag"], "PartNumber": number}
                except Transient as why:
                    patience.wait(why)
            raise Transient("given up")

        ahead = Ahead(part, range(1, -(-size // length) + 1))
        try:
            parts = list(ahead)
        except BaseException:
            stop.set()
            ahead.settle()  # a part that arrives after the abort would be kept, and paid for
            raise
        done = self.link.call(
            "complete_multipart_upload", key, patience, UploadId=upload, MultipartUpload={"Parts": parts}, **condition
        )
        return str(done["ETag"])

    def _abort(self, key: str, upload: str) -> bool:
        try:
            self.link.call("abort_multipart_upload", key, UploadId=upload)
        except (StorageError, UploadGone):
            return False
        return True

    def delete(self, names: Iterable[str]) -> None:
        def one(name: str) -> None:
            try:
                self.link.call("delete_object", self.key(name))
            except Missing:
                pass

        for _ in Ahead(one, list(names)):
            pass

    def unique(self, name: str) -> str:
        stem, dot, suffix = name.rpartition(".")
        mark = uuid.uuid4().hex[:16]
        return f"{stem}.{mark}.{suffix}" if dot and stem else f"{name}.{mark}"

    def sweep(self) -> int:
        """Aborts every unfinished upload below this place."""
        count = 0
        arguments: dict[str, Any] = {"Prefix": self.key("")}
        while True:
            try:
                page = self.link.call("list_multipart_uploads", **arguments)
            except StorageError as error:
                if error.diagnostic.code in (
                    "E-NET-018",
                    "E-NET-020",
                ):  # a server without that, or a key without the right
                    return count
                raise
            for upload in page.get("Uploads", ()):
                if upload["Key"].startswith(self.key("")):
                    count += self._abort(upload["Key"], upload["UploadId"])
            if not page.get("IsTruncated"):
                return count
            arguments |= {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page.get("NextUploadIdMarker", "")}

    def hold(self, owner: Mapping[str, Any], say: Callable[[str], None] = lambda text: None) -> Any:
        return Lease(self, owner, say)


def cut(pieces: Sequence[memoryview], start: int, stop: int) -> bytes:
    """Bytes [start, stop) of pieces that follow one another."""
    out, at = [], 0
    for piece in pieces:
        low, high = max(start - at, 0), min(stop - at, len(piece))
        if low < high:
            out.append(piece[low:high])
        at += len(piece)
    return b"".join(out)


def _md5(body: bytes) -> str:
    return base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()
