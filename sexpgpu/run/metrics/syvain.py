"""The hosted metrics service, spoken to over HTTP: one request a call, one classification of what went wrong.

The protocol (v2): every POST is an array of events `{messageId, event, data}`, every good reply an array of
`{correlationId, event, data}`. The organization's key opens an experiment and gets a token, with which its events are
sent. Nothing here repeats a request or sleeps; `delivery` does. No exception or text carries the key or a token.
"""

from __future__ import annotations

import gzip
import json
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

import requests
import urllib3
from requests.auth import AuthBase

from sexpgpu import __version__
from sexpgpu.diagnostics import printable
from sexpgpu.settings import Secret, is_loopback

NAME = "sexpgpu"
MAX_EVENTS, MAX_BYTES = 1000, 1 << 20  # of one request, before compression
MAX_REPLY = 32 << 20
REFRESH_BEFORE = 300.0  # seconds of a token's life that are left when it is renewed
LONGEST_PAUSE = 60.0  # that a reply may ask for

_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")
_EDGE = re.compile(rb"error code: 1\d\d\d|cloudflare-1xxx-errors|cf-error-code")


class ServiceError(Exception):
    """A request that did not succeed. `kind`:

    `unreachable` no connection · `slow` no answer in time · `busy` 408, 425, 429, 5xx, a redirect, a CDN's own page ·
    `garbled` a good status with a body that makes no sense · `denied` 401, 403 · `absent` 404 · `refused` any other.
    The first four pass by themselves. `after`: seconds the service asked to wait.
    """

    def __init__(self, kind: str, text: str, status: int | None = None, after: float = 0.0, code: str = ""):
        super().__init__(text)
        self.kind, self.text, self.status, self.after, self.code = kind, text, status, after, code

    @property
    def transient(self) -> bool:
        return self.kind in ("unreachable", "slow", "busy", "garbled")


@dataclass(frozen=True)
class Experiment:
    """An open experiment. `expires`: Unix seconds of its token's end."""

    id: str
    token: Secret
    expires: float

    @property
    def stale(self) -> bool:
        return self.expires - time.time() < REFRESH_BEFORE


class Client:
    """One connection to `host`, an origin without a final slash. Used by one thread at a time."""

    def __init__(self, host: str, key: Secret, timeout: float = 10.0):
        self.host, self.timeout = host, timeout
        self._key = key
        self._secrets = [key]
        self._gzip = False  # whether the service said that it takes compressed bodies
        self._session = requests.Session()
        # A proxy is no way to this machine, and would be shown the key.
        self._session.trust_env = not is_loopback(urlsplit(host).hostname or "")

    def close(self) -> None:
        self._session.close()

    def page(self, experiment: str) -> str:
        """Where a person looks at an experiment."""
        return f"{self.host}/app/experiments/{experiment}"

    # -- with the organization's key

    def check_key(self) -> None:
        """Nothing if the service takes the key."""
        try:
            self._request("GET", "/api/v2/auth/status", self._key)
        except ServiceError as error:
            if error.kind != "absent":
                raise
            self._request("GET", "/api/v1/auth/status", self._key)

    def has_folder(self, folder: str) -> bool:
        """Whether the organization's tree has a folder of this id, at any depth."""
        todo = _list(self._ask("syvain.v2.foldertree.read", {}).get("folders"))
        while todo:
            found = todo.pop()
            if str(found.get("folderId", "")).lower() == folder.lower():
                return True
            todo += _list(found.get("folders"))
        return False

    def open(self, slug: str, description: str, meta: Mapping[str, Any]) -> Experiment:
        """The experiment of this slug: a new one, or the one there is."""
        return self._opened(self._ask("syvain.v2.experiment.open", {
            "slug": slug, "description": clip(description, 4000), "meta": dict(meta)}))

    def move(self, experiment: str, folder: str) -> None:
        """Into the folder; it may already have been put elsewhere, and then stays there."""
        try:
            self._ask("syvain.v2.folderexperiment.move",
                      {"experimentId": experiment, "fromFolderId": None, "toFolderId": folder})
        except ServiceError as error:
            if error.code != "experiment_folder_move_conflict":
                raise

    def refresh(self, experiment: Experiment) -> Experiment:
        """The same experiment with a new token."""
        return self._opened(self._ask("syvain.v2.experiment.tokenRefresh", {
            "experimentId": experiment.id, "experimentToken": experiment.token.reveal()}))

    # -- with the experiment's token

    def send(self, experiment: Experiment, events: Sequence[Mapping[str, Any]], timeout: float | None = None) -> dict[str, ServiceError]:
        """Sends up to MAX_EVENTS events: {messageId: what is wrong with it}, empty when all arrived."""
        path = f"/api/v2/experiments/{experiment.id}/events"
        replies = {r.get("correlationId"): r for r in _list(self._request("POST", path, experiment.token, events, timeout))}
        wrong: dict[str, ServiceError] = {}
        for event in events:
            reply = replies.get(event["messageId"])
            if reply is None:
                wrong[event["messageId"]] = ServiceError("garbled", "no reply to an event")
            elif reply.get("event") == "syvain.v2.error":
                wrong[event["messageId"]] = self._error_event(reply)
        return wrong

    def revoke(self, experiment: Experiment) -> None:
        """The token is of no more use; a failure is of no account."""
        try:
            self.send(experiment, [envelope("tokenRevoke", {"experimentId": experiment.id})], timeout=2.0)
        except ServiceError:
            pass

    # -- the wire

    def _ask(self, event: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """One event with the organization's key; the data of its reply."""
        sent = {"messageId": uuid.uuid4().hex, "event": event, "data": data}
        for reply in _list(self._request("POST", "/api/v2/events", self._key, [sent])):
            if reply.get("event") == "syvain.v2.error":
                raise self._error_event(reply)
            if isinstance(reply.get("data"), dict):
                return reply["data"]
        raise ServiceError("garbled", "a reply without data")

    def _opened(self, data: Mapping[str, Any]) -> Experiment:
        name, token, expires = data.get("experimentId"), data.get("experimentToken"), data.get("expiresAtMs")
        # Both go into the next request: a path and a header. Nothing else of a reply does.
        if not (isinstance(name, str) and _ID.fullmatch(name) and usable(token) and isinstance(expires, int | float)):
            raise ServiceError("garbled", "a reply without an experiment")
        secret = Secret(str(token))
        self._secrets = [self._key, secret]
        return Experiment(name, secret, expires / 1000)

    def _error_event(self, reply: Mapping[str, Any]) -> ServiceError:
        data = reply.get("data") if isinstance(reply.get("data"), dict) else {}
        assert isinstance(data, dict)
        status = data.get("status")
        text = self._clean(f"{data.get('message') or data.get('code') or 'an error without a message'}")
        after = data.get("retryAfterMs")
        pause = min(after / 1000, LONGEST_PAUSE) if isinstance(after, int | float) and after > 0 else 0.0
        if isinstance(status, int):
            return ServiceError(kind_of(status), f"{status} {text}", status, pause, str(data.get("code", "")))
        kind = "refused" if data.get("retryable") is False else "busy"
        return ServiceError(kind, text, None, pause, str(data.get("code", "")))

    def _request(self, method: str, path: str, secret: Secret, events: Sequence[Any] | None = None, timeout: float | None = None) -> Any:
        headers = {"accept": "application/json", "accept-encoding": "gzip", "user-agent": f"{NAME}/{__version__}",
                   "x-syvain-client": NAME, "x-syvain-client-version": __version__}
        body = None
        if events is not None:
            body = json.dumps(events, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8", "replace")
            headers["content-type"] = "application/json"
            if self._gzip and path != "/api/v2/events":
                body, headers["content-encoding"] = gzip.compress(body, 6), "gzip"
        limit = timeout or self.timeout
        try:
            with self._session.request(
                    method, self.host + path, data=body, headers=headers, auth=_Bearer(secret), stream=True,
                    timeout=(min(limit, 5.0), limit), allow_redirects=False) as response:
                text = _body(response, time.monotonic() + 2 * limit)
        except (requests.Timeout, urllib3.exceptions.TimeoutError):
            raise ServiceError("slow", f"no answer within {limit:g} s") from None
        except requests.ConnectionError:
            raise ServiceError("unreachable", "no connection") from None
        except (requests.RequestException, urllib3.exceptions.HTTPError, OSError, ValueError) as error:  # their texts may quote a header
            raise ServiceError("garbled", f"an answer that is no HTTP ({type(error).__name__})") from None
        return self._judge(response, text)

    def _judge(self, response: requests.Response, text: bytes) -> Any:
        status = response.status_code
        self._gzip = self._gzip or "gzip" in response.headers.get("accept-encoding", "").lower()
        edge = not text.lstrip().startswith((b"{", b"[")) and _EDGE.search(text[:20_000])  # a CDN speaks, not the service
        kind = "busy" if edge else kind_of(status)
        if kind:
            said = self._clean(_message(text))
            raise ServiceError(kind, f"{status} {said}".rstrip(), status, _retry_after(response.headers.get("retry-after")))
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            if response.request.method == "GET":  # of the key's check the status is all that counts
                return None
            raise ServiceError("garbled", "an answer that is no JSON", status) from None

    def _clean(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret.reveal(), "***")
        return printable(text)[:200]


class _Bearer(AuthBase):
    """Sets the header late. Given an `auth`, requests also leaves ~/.netrc alone."""

    def __init__(self, secret: Secret):
        self._secret = secret

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        request.headers["authorization"] = f"Bearer {self._secret.reveal()}"
        return request


def kind_of(status: int) -> str:
    """The kind of ServiceError of an HTTP status; empty for a good one."""
    if 200 <= status < 300:
        return ""
    if status in (401, 403):
        return "denied"
    if status == 404:
        return "absent"
    if status in (408, 425, 429) or status >= 500 or 300 <= status < 400:
        return "busy"
    return "refused"


def usable(token: Any) -> bool:
    """Whether a text can stand in a header as it is."""
    return isinstance(token, str) and re.fullmatch(r"[!-~]{1,4096}", token) is not None


def envelope(event: str, data: Mapping[str, Any], message_id: str | None = None) -> dict[str, Any]:
    """An event of an experiment, `event` without its prefix."""
    return {"messageId": message_id or uuid.uuid4().hex, "event": f"syvain.v2.experiment.{event}", "data": dict(data)}


def clip(text: str, units: int) -> str:
    """At most `units` UTF-16 code units, no pair split."""
    return text.encode("utf-16-le", "replace")[: 2 * units].decode("utf-16-le", "ignore")


def _body(response: requests.Response, deadline: float) -> bytes:
    """The whole body, but no more than MAX_REPLY and no longer than `deadline`, however slowly it drips."""
    parts, size = [], 0
    read = getattr(response.raw, "read1", None) or response.raw.read
    while True:
        part = read(1 << 16, decode_content=True)
        parts.append(part)
        size += len(part)
        if not part:
            return b"".join(parts)
        if size > MAX_REPLY or time.monotonic() > deadline:
            raise requests.Timeout()


def _retry_after(text: str | None) -> float:
    """Seconds of a `Retry-After` header, given in seconds or as a date; 0 without one that can be read."""
    if not text:
        return 0.0
    try:
        seconds = float(text) if re.fullmatch(r"[0-9.]{1,12}", text.strip()) else parsedate_to_datetime(text).timestamp() - time.time()
    except (ValueError, TypeError, OverflowError):
        return 0.0
    return min(max(seconds, 0.0), LONGEST_PAUSE)


def _message(body: bytes) -> str:
    """What an error's body says, whatever its form."""
    try:
        said = json.loads(body)["error"]["message"]
    except (ValueError, TypeError, KeyError, RecursionError):
        said = body[:200].decode("utf-8", "replace").strip() if not body.lstrip().startswith((b"<", b"{", b"[")) else ""
    return str(said)


def _list(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise ServiceError("garbled", "an answer that is no list")
    return [item for item in value if isinstance(item, dict)]
