"""A bucket reached as one role: requests, retries with a deadline, and what a refusal means.

Nothing here prints what a server answered: its text may repeat a key.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from random import uniform
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError, SSLError
from botocore.exceptions import ConnectionError as NoConnection
from urllib3.exceptions import HTTPError

from sexpgpu.run.storage import Missing, StorageError, Taken, storage_error
from sexpgpu.run.storage.client import client_of
from sexpgpu.settings import Credentials, shown

PATIENCE = 120.0  # seconds without any progress after which an operation is given up
FIRST_PATIENCE = 30.0  # the same before the server has answered anything
LEAST = 3  # attempts that are made however long one of them takes
SKEW = 300.0  # seconds between clocks worth a word when a signature is refused

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


class Transient(Exception):
    """A request that may succeed when it is sent again; the message says what happened, without the server's text."""


class NotOffered(StorageError):
    """The server does not have this operation, or not with this condition."""


class UploadGone(Exception):
    """The server no longer knows an upload: finished by a lost answer, or forgotten."""


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
            raise self._link.unreachable(
                f"{why}; no progress for {time.monotonic() - self._mark:.0f} s in {self._tries} attempts"
            )


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
        except (NoConnection, HTTPClientError, HTTPError, OSError) as error:  # no connection, none in time, or cut
            raise Transient(in_words(error)) from None
        except (BotoCoreError, ValueError) as error:  # their texts may hold what was to be sent
            raise storage_error(
                "E-NET-020",
                f"{self.place(key)}: boto3 cannot send this request ({type(error).__name__})",
                reason="the request cannot be sent",
                help="look at the key, the region and the endpoint: sexpgpu doctor",
            ) from None

    def call(
        self, operation: str, key: str | None = None, patience: Patience | None = None, **arguments: Any
    ) -> dict[str, Any]:
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
            "E-NET-011",
            f"{self.place()} is not reached at {shown(self.credentials.endpoint_url)}: {why}",
            reason=f"the server is not reached ({why})",
            help=(f"is {self.credentials.via['ENDPOINT_URL']} right, and is the server up?",),
        )

    def _refused(self, error: Any, key: str | None) -> Exception:
        """What a refusal means. Of the server's answer only its code, status, region and date are looked at."""
        answer, http = error.response.get("Error", {}), error.response.get("ResponseMetadata", {})
        code, status, headers = str(answer.get("Code", "")), http.get("HTTPStatusCode", 0), http.get("HTTPHeaders", {})
        where, via = self.place(key), self.credentials.via
        if code == "NoSuchUpload":
            return UploadGone()
        if code == "RequestTimeTooSkewed" or (status == 403 and abs(_skew(headers)) > SKEW):
            seconds = _skew(headers)
            apart = (
                f" It is {abs(seconds):.0f} s {'ahead of' if seconds > 0 else 'behind'} the server's."
                if seconds
                else ""
            )
            return storage_error(
                "E-NET-014",
                f"{where}: the server refuses the signature because of this machine's clock.{apart}",
                reason="this machine's clock is wrong",
                help="set the clock, for instance by NTP, and start again",
            )
        if status == 501 or code == "NotImplemented":
            return storage_error(
                "E-NET-020",
                f"{where}: the server does not offer this request",
                kind=NotOffered,
                reason="the server does not offer this",
            )
        if code in TRANSIENT or status == 429 or status >= 500:
            return Transient(
                f"the server answered {status} {code}"
                if re.fullmatch(r"[A-Za-z]{1,60}", code)
                else f"the server answered {status}"
            )
        if code == "NoSuchBucket":
            return storage_error(
                "E-NET-013",
                f"there is no bucket `{self.bucket}` at {self.credentials.endpoint_url}",
                reason="there is no such bucket",
                help=(f"make it, or look whether {via['ENDPOINT_URL']} and {via['REGION']} are of the right store",),
            )
        if code in WRONG_REGION:
            right = answer.get("Region") or headers.get("x-amz-bucket-region")
            known = isinstance(right, str) and re.fullmatch(r"[a-z0-9-]{1,40}", right)
            return storage_error(
                "E-NET-015",
                f"{where}: {via['REGION']} is `{self.credentials.region}`, and the bucket lies elsewhere"
                + (f", in `{right}`" if known else ""),
                reason="the region is wrong",
                help=f"export {via['REGION']}={right if known else '<the region of the bucket>'}",
            )
        if code in WRONG_KEY:
            names = [via[n] for n in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN") if n in via]
            return storage_error(
                "E-NET-012",
                f"{where}: {WRONG_KEY[code]}",
                reason=WRONG_KEY[code],
                notes=(f"the values come from {', '.join(names)}",),
                help="sexpgpu doctor shows which variable gives what",
            )
        if status == 412 or code == "PreconditionFailed":
            return storage_error(
                "E-NET-023",
                f"{where}: another writer was there first",
                kind=Taken,
                reason="another writer was there first",
            )
        if code in ("NoSuchKey", "NotFound", "404") or status == 404:
            return storage_error(
                "E-NET-019", f"there is no object {where}", kind=Missing, reason="there is no such object"
            )
        if status == 403:
            return storage_error(
                "E-NET-018",
                f"{where}: the key of {via['ACCESS_KEY_ID']} may not do this",
                reason="the key may not do this",
                help=f"the {self.credentials.role} role needs to "
                + ("read objects" if self.credentials.role == "data" else "list, read, write and delete objects"),
            )
        shown = code if re.fullmatch(r"[A-Za-z0-9]{1,60}", code) else "no code"
        return storage_error(
            "E-NET-020",
            f"{where}: the server refuses the request ({status} {shown})",
            reason=f"the server refuses ({shown})",
        )


def in_words(error: BaseException) -> str:
    """A transport's failure in words, without its text."""
    name = type(error).__name__
    words = {
        "EndpointConnectionError": "no connection",
        "ConnectTimeoutError": "no connection in time",
        "ReadTimeoutError": "no answer in time",
        "ConnectionClosedError": "the connection was closed",
        "IncompleteReadError": "the answer was cut short",
        "ProtocolError": "the answer was cut short",
    }
    return words.get(name, name)


def _skew(headers: Mapping[str, str]) -> float:
    """Seconds by which this clock is ahead of the server's; 0 where the server does not say."""
    try:
        return (datetime.now(UTC) - parsedate_to_datetime(headers["date"])).total_seconds()
    except (KeyError, ValueError, TypeError):
        return 0.0
