"""Objects in a bucket: range reads ahead, uploads in parts, retries with a deadline, and errors a person can mend.

boto3 is given values and nothing else: no profile, no configuration file, no instance metadata, no proxy of the
environment, no redirection to another region. Every body carries its MD5, so that a damaged upload is refused by the
server. Nothing here prints what a server answered: its text may repeat a key.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from ipaddress import ip_address
from random import uniform
from typing import Any, TypeVar
from urllib.parse import urlsplit

from sexpgpu.diagnostics import fail
from sexpgpu.run.storage import Buffer, Entry, Missing, StorageError, Taken, storage_error
from sexpgpu.settings import Credentials, shown

BLOCK = 8 << 20  # bytes of one range read and of the least part of an upload
WHOLE = 16 << 20  # bytes up to which an upload is one request
DEPTH = 4  # requests on their way at a time
MOST_PARTS = 9_000  # S3 takes 10,000
PATIENCE = 120.0  # seconds without any progress after which an operation is given up
FIRST_PATIENCE = 30.0  # the same before the server has answered anything
LEAST = 3  # attempts that are made however long one of them takes
CONNECT, ANSWER = 5.0, 20.0  # seconds that one request waits for a connection, and for the next bytes
SKEW = 300.0  # seconds between clocks worth a word when a signature is refused
BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}\Z")

TRANSIENT = {
    "InternalError", "ServiceUnavailable", "SlowDown", "RequestTimeout", "Throttling", "ThrottlingException",
    "TooManyRequests", "BadDigest", "IncompleteBody", "OperationAborted", "ConditionalRequestConflict", "BandwidthLimitExceeded",
}  # fmt: skip
WRONG_KEY = {
    "InvalidAccessKeyId": "the server does not know this key id",
    "SignatureDoesNotMatch": "the secret key does not belong to this key id",
    "InvalidToken": "the session token does not belong to this key id",
    "ExpiredToken": "the session token has expired",
    "TokenRefreshRequired": "the session token has expired",
    "InvalidClientTokenId": "the server does not know this key id",
    "UnrecognizedClientException": "the server does not know this key id",
}
WRONG_REGION = {
    "AuthorizationHeaderMalformed", "PermanentRedirect", "TemporaryRedirect", "IllegalLocationConstraintException", "InvalidRegion",
    "301", "307",
}  # fmt: skip
R = TypeVar("R")
T = TypeVar("T")


class Transient(Exception):
    """A request that may succeed when it is sent again; the message says what happened, without the server's text."""


class UploadGone(Exception):
    """The server no longer knows an upload: finished by a lost answer, or forgotten."""


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


def check_endpoint(credentials: Credentials) -> None:
    """E-NET-016 for an address that is none, E-NET-017 for plain http to another machine."""
    url, via = credentials.endpoint_url or "", credentials.via.get("ENDPOINT_URL", "the endpoint")
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host, parts = None, urlsplit("")
    if parts.scheme not in ("http", "https") or not host or "@" in parts.netloc or parts.query or parts.fragment:
        fail("E-NET-016", f"{via} is no address of a server", help="write it as https://host or https://host:port")
    if parts.scheme == "http" and not is_loopback(host) and host not in credentials.plain_http:
        fail("E-NET-017", f"{via} is plain http to {host}: keys' signatures and data would cross the network unprotected",
             help=("write https://", f"if that network is yours: export SEXPGPU_PLAIN_HTTP={host}"))


def is_loopback(host: str) -> bool:
    """Whether a host is this machine."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def make_client(credentials: Credentials) -> Any:
    """boto3's client of explicit values. Its configuration has constants alone, and its files are empty."""
    import boto3
    import botocore.session
    from botocore.config import Config
    from botocore.configprovider import BOTOCORE_DEFAUT_SESSION_VARIABLES, ConfigChainFactory, ConfigValueStore

    core = botocore.session.Session()
    chains = ConfigChainFactory(session=core, environ={})
    fixed = {"config_file": os.devnull, "credentials_file": os.devnull}
    core.register_component("config_store", ConfigValueStore(mapping={
        name: chains.create_config_chain(instance_name=name, default=fixed.get(name, default), conversion_func=convert)
        for name, (_, _, default, convert) in BOTOCORE_DEFAUT_SESSION_VARIABLES.items()}))
    token = credentials.session_token
    assert credentials.access_key_id is not None and credentials.secret_access_key is not None
    client = boto3.Session(botocore_session=core).client(
        "s3", endpoint_url=credentials.endpoint_url, region_name=credentials.region,
        aws_access_key_id=credentials.access_key_id.reveal(),
        aws_secret_access_key=credentials.secret_access_key.reveal(),
        aws_session_token=None if token is None else token.reveal(),
        config=Config(signature_version="s3v4", connect_timeout=CONNECT, read_timeout=ANSWER, proxies={},
                      retries={"mode": "standard", "total_max_attempts": 1}, tcp_keepalive=True,
                      max_pool_connections=4 * DEPTH, ignore_configured_endpoint_urls=True,
                      request_checksum_calculation="when_required", response_checksum_validation="when_required"))
    client.meta.events.register("before-call.s3", _no_redirection)
    return client


def _no_redirection(context: dict[str, Any], **_: Any) -> None:
    """A wrong region is an error with a name, not a second request to somewhere else."""
    context.setdefault("s3_redirect", {})["redirected"] = True


_CLIENTS: dict[int, tuple[Credentials, Any]] = {}  # by the identity of the credentials, which are kept beside
_MAKING = threading.Lock()


def client_of(credentials: Credentials) -> Any:
    """The client of these credentials, made once: that takes a third of a second."""
    with _MAKING:
        if id(credentials) not in _CLIENTS:
            _CLIENTS[id(credentials)] = (credentials, make_client(credentials))
        return _CLIENTS[id(credentials)][1]


class Patience:
    """How long an operation goes on without progress. Shared by its threads."""

    def __init__(self, link: Link):
        assert link.client is not None  # made before the time is taken
        self._link, self._mark, self._tries = link, time.monotonic(), 0

    def progress(self) -> None:
        self._mark, self._tries = time.monotonic(), 0

    def wait(self, why: Transient) -> None:
        """Sleeps before the next attempt; StorageError when there was no progress for too long, or at the end."""
        self._tries += 1
        pause = min(5.0, 0.1 * 2.0 ** min(self._tries, 10)) * uniform(0.5, 1.0)
        limit = self._link.patience if self._link.reached else min(FIRST_PATIENCE, self._link.patience)
        late = time.monotonic() + pause - self._mark > limit and self._tries >= LEAST
        if late or self._link.closed.wait(pause):
            raise self._link.unreachable(f"{why}; no progress for {time.monotonic() - self._mark:.0f} s in {self._tries} attempts")


class Link:
    """A bucket reached with one role's credentials; the client is made by the first request."""

    def __init__(self, credentials: Credentials, bucket: str, patience: float | None = None):
        self.credentials, self.bucket = credentials, bucket
        self.patience = PATIENCE if patience is None else patience
        self.closed = threading.Event()
        self.reached = False
        self._client: Any = None

    @property
    def client(self) -> Any:
        if self._client is None:
            self._client = client_of(self.credentials)
        return self._client

    def send(self, operation: str, key: str | None = None, **arguments: Any) -> dict[str, Any]:
        """One request, once. Transient, UploadGone, or the StorageError that says what is wrong."""
        from botocore.exceptions import BotoCoreError, ClientError, ConnectionError, HTTPClientError, SSLError
        from urllib3.exceptions import HTTPError

        if key is not None:
            arguments["Key"] = key
        try:
            answer = getattr(self.client, operation)(Bucket=self.bucket, **arguments)
            self.reached = True
            return answer
        except ClientError as error:
            raise self._refused(error, key) from None
        except SSLError:
            raise self.unreachable("TLS failed: is its certificate one that this machine trusts?") from None
        except (ConnectionError, HTTPClientError, HTTPError, OSError) as error:  # no connection, none in time, or cut
            raise Transient(_kind(error)) from None
        except (BotoCoreError, ValueError) as error:  # their texts may hold what was to be sent
            raise storage_error("E-NET-020", f"{self.place(key)}: boto3 cannot send this request ({type(error).__name__})",
                                reason="the request cannot be sent",
                                help="look at the key, the region and the endpoint: sexpgpu doctor") from None

    def call(self, operation: str, key: str | None = None, patience: Patience | None = None, **arguments: Any) -> dict[str, Any]:
        """The same until it succeeds, or there was no progress for too long."""
        patience = patience or Patience(self)
        while True:
            try:
                answer = self.send(operation, key, **arguments)
            except Transient as why:
                patience.wait(why)
            else:
                patience.progress()
                return answer

    def place(self, key: str | None = None) -> str:
        return f"s3://{self.bucket}" + (f"/{key}" if key else "")

    def unreachable(self, why: str) -> StorageError:
        return storage_error(
            "E-NET-011", f"{self.place()} is not reached at {shown(self.credentials.endpoint_url)}: {why}",
            reason=f"the server is not reached ({why})",
            help=(f"is {self.credentials.via['ENDPOINT_URL']} right, and is the server up?",))

    def _refused(self, error: Any, key: str | None) -> Exception:
        """What a refusal means. Of the server's answer only its code, status, region and date are looked at."""
        answer, http = error.response.get("Error", {}), error.response.get("ResponseMetadata", {})
        code, status, headers = str(answer.get("Code", "")), http.get("HTTPStatusCode", 0), http.get("HTTPHeaders", {})
        where, via = self.place(key), self.credentials.via
        if code == "NoSuchUpload":
            return UploadGone()
        if code == "RequestTimeTooSkewed" or (status == 403 and abs(_skew(headers)) > SKEW):
            seconds = _skew(headers)
            apart = f" It is {abs(seconds):.0f} s {'ahead of' if seconds > 0 else 'behind'} the server's." if seconds else ""
            return storage_error("E-NET-014", f"{where}: the server refuses the signature because of this machine's clock.{apart}",
                                 reason="this machine's clock is wrong", help="set the clock, for instance by NTP, and start again")
        if code in TRANSIENT or status == 429 or status >= 500:
            return Transient(f"the server answered {status} {code}" if re.fullmatch(r"[A-Za-z]{1,60}", code) else f"the server answered {status}")
        if code == "NoSuchBucket":
            return storage_error("E-NET-013", f"there is no bucket `{self.bucket}` at {self.credentials.endpoint_url}", reason="there is no such bucket",
                                 help=(f"make it, or look whether {via['ENDPOINT_URL']} and {via['REGION']} are of the right store",))
        if code in WRONG_REGION:
            right = answer.get("Region") or headers.get("x-amz-bucket-region")
            known = isinstance(right, str) and re.fullmatch(r"[a-z0-9-]{1,40}", right)
            return storage_error("E-NET-015", f"{where}: {via['REGION']} is `{self.credentials.region}`, and the bucket lies elsewhere"
                                 + (f", in `{right}`" if known else ""), reason="the region is wrong",
                                 help=f"export {via['REGION']}={right if known else '<the region of the bucket>'}")
        if code in WRONG_KEY:
            names = [via[n] for n in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN") if n in via]
            return storage_error("E-NET-012", f"{where}: {WRONG_KEY[code]}", reason=WRONG_KEY[code],
                                 notes=(f"the values come from {', '.join(names)}",), help="sexpgpu doctor shows which variable gives what")
        if status == 412 or code == "PreconditionFailed":
            return storage_error("E-NET-023", f"{where}: another writer was there first", kind=Taken, reason="another writer was there first")
        if code in ("NoSuchKey", "NotFound", "404") or status == 404:
            return storage_error("E-NET-019", f"there is no object {where}", kind=Missing, reason="there is no such object")
        if status == 403:
            return storage_error("E-NET-018", f"{where}: the key of {via['ACCESS_KEY_ID']} may not do this", reason="the key may not do this",
                                 help=f"the {self.credentials.role} role needs to "
                                 + ("read objects" if self.credentials.role == "data" else "list, read, write and delete objects"))
        shown = code if re.fullmatch(r"[A-Za-z0-9]{1,60}", code) else "no code"
        return storage_error("E-NET-020", f"{where}: the server refuses the request ({status} {shown})", reason=f"the server refuses ({shown})")


def _kind(error: BaseException) -> str:
    """A transport's failure in words, without its text."""
    name = type(error).__name__
    words = {"EndpointConnectionError": "no connection", "ConnectTimeoutError": "no connection in time", "ReadTimeoutError": "no answer in time",
             "ConnectionClosedError": "the connection was closed",
             "IncompleteReadError": "the answer was cut short", "ProtocolError": "the answer was cut short"}
    return words.get(name, name)


def _skew(headers: Mapping[str, str]) -> float:
    """Seconds by which this clock is ahead of the server's; 0 where the server does not say."""
    try:
        return (datetime.now(UTC) - parsedate_to_datetime(headers["date"])).total_seconds()
    except (KeyError, ValueError, TypeError):
        return 0.0


class Ahead:
    """`work(item)` for each item, in order, up to DEPTH on their way on daemon threads: an end of the process waits for none."""

    def __init__(self, work: Callable[[T], R], items: Iterable[T]):
        self._work, self._items = work, iter(items)
        self._pending: deque[Future[Any]] = deque()

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            self._pending.append(self._launch(item))
            if len(self._pending) >= DEPTH:
                yield self._pending.popleft().result()
        while self._pending:
            yield self._pending.popleft().result()

    def settle(self) -> None:
        """Waits for what is on its way, whatever became of it."""
        while self._pending:
            self._pending.popleft().exception()

    def _launch(self, item: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def go() -> None:
            try:
                future.set_result(self._work(item))
            except BaseException as error:  # noqa: BLE001 - handed to whoever takes the result
                future.set_exception(error)

        threading.Thread(target=go, name="s3", daemon=True).start()
        return future


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
        found = (Entry(o["Key"][cut:], o["Size"], o["ETag"]) for page in self._pages(Prefix=self.key(prefix)) for o in page.get("Contents", ()))
        return sorted((e for e in found if not any(part.startswith(".") for part in e.name.split("/")) and not e.name.endswith("/")),
                      key=lambda entry: entry.name)

    def folders(self) -> list[str]:
        cut = len(self.key(""))
        pages = self._pages(Prefix=self.key(""), Delimiter="/")
        return sorted(p["Prefix"][cut:].rstrip("/") for page in pages for p in page.get("CommonPrefixes", ()) if not p["Prefix"][cut:].startswith("."))

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
                if not (isinstance(error, Missing) and why.diagnostic.code == "E-NET-018"):  # a key that reads and does not list
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
                raise storage_error("E-NET-021", f"{self.link.place(self.key(name))} was changed while it was read",
                                    reason="it was changed while it was read", help="start again when nobody writes it") from None
            except StorageError as error:
                if error.diagnostic.code == "E-NET-020":  # perhaps 416: nothing lies there to read
                    entry = self.head(name)
                    if entry is not None and begin >= entry.size:
                        return bytes(got), entry.size, entry.tag
                raise

    def _receive(self, body: Any, got: bytearray, patience: Patience) -> None:
        from botocore.exceptions import BotoCoreError
        from urllib3.exceptions import HTTPError

        try:
            for piece in body.iter_chunks(1 << 18):
                got += piece
                patience.progress()
        except (BotoCoreError, HTTPError, OSError) as error:
            raise Transient(_kind(error)) from None
        finally:
            body.close()

    def _total(self, name: str, answer: Mapping[str, Any], begin: int) -> int:
        """The object's size, from the answer to a range."""
        match = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", answer.get("ContentRange") or "")
        if match and int(match[1]) == begin:
            return int(match[2])
        if not match and begin == 0 and answer["ContentLength"] <= WHOLE:  # a small object, given whole
            return int(answer["ContentLength"])
        raise storage_error("E-NET-020", f"{self.link.place(self.key(name))}: the server does not answer range reads",
                            reason="the server does not answer range reads")

    # -- writing

    def put(self, name: str, data: Buffer | Sequence[Buffer], *, absent: bool = False, tag: str | None = None) -> Entry:
        pieces = [memoryview(p).cast("B") for p in ([data] if isinstance(data, Buffer) else data)]
        size = sum(len(piece) for piece in pieces)
        condition = {"IfNoneMatch": "*"} if absent else {"IfMatch": tag} if tag is not None else {}
        if size <= WHOLE:
            etag = self._put_whole(name, b"".join(pieces), condition)
        else:
            etag = self._put_parts(name, pieces, size, condition)
        return Entry(name, size, etag)

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
                    return entry.tag  # it was finished, and the answer was lost: `unique` made the name this attempt's own
            except BaseException:
                self._abort(key, upload)
                raise
        raise storage_error("E-NET-020", f"{self.link.place(key)}: the server forgot the upload three times", reason="the server forgets uploads")

    def _upload(self, key: str, upload: str, pieces: Sequence[memoryview], size: int, condition: Mapping[str, str], patience: Patience) -> str:
        length = max(BLOCK, -(-size // MOST_PARTS // (1 << 20)) * (1 << 20))
        stop = threading.Event()

        def part(number: int) -> dict[str, Any]:
            body = cut(pieces, (number - 1) * length, min(number * length, size))
            while not stop.is_set():
                try:
                    answer = self.link.send("upload_part", key, UploadId=upload, PartNumber=number, Body=body, ContentMD5=_md5(body))
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
        done = self.link.call("complete_multipart_upload", key, patience, UploadId=upload, MultipartUpload={"Parts": parts}, **condition)
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
                if error.diagnostic.code in ("E-NET-018", "E-NET-020"):  # a server without that, or a key without the right
                    return count
                raise
            for upload in page.get("Uploads", ()):
                if upload["Key"].startswith(self.key("")):
                    count += self._abort(upload["Key"], upload["UploadId"])
            if not page.get("IsTruncated"):
                return count
            arguments |= {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page.get("NextUploadIdMarker", "")}

    def hold(self, owner: Mapping[str, Any], say: Callable[[str], None] = lambda text: None) -> Any:
        from sexpgpu.run.storage.lease import Lease

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

