"""A metrics service on 127.0.0.1 for tests: the v2 protocol, duplicates removed by message id, faults on demand.

Shapes of requests and replies follow captures of the vendor's own clients (tests/data/service_requests.json).
"""

from __future__ import annotations

import gzip
import json
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

FOLDER = "019e0000-0000-7000-8000-0000000000f0"
PREFIX = "syvain.v2.experiment."
REPLIES = {"open": "opened", "start": "started", "metric": "metricRecorded", "annotate": "annotated", "error": "errored",
           "tokenRevoke": "tokenRevoked", "tokenRefresh": "tokenRefreshed"}
CLOSE = "close the connection"


@dataclass
class Asked:
    """One request as it came."""

    at: float
    method: str
    path: str
    headers: dict[str, str]
    body: Any
    size: int

    @property
    def names(self) -> list[str]:
        """Events of the body, without what all begin with."""
        return [short(e["event"]) for e in self.body] if isinstance(self.body, list) else []


@dataclass
class FakeService:
    """`hooks`: each may answer a request in the service's stead, with (status, headers, body), CLOSE, or None to pass."""

    key: str = "ak_org_test"
    token_seconds: float = 86_400.0
    auth_version: str = "v2"
    asked: list[Asked] = field(default_factory=list)
    hooks: list[Callable[[Asked], Any]] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    experiments: dict[str, str] = field(default_factory=dict)
    tokens: set[str] = field(default_factory=set)
    arrived: list[dict[str, Any]] = field(default_factory=list)  # events of experiments in order, repetitions too
    metas: list[Any] = field(default_factory=list)

    def __enter__(self) -> FakeService:
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._server.shutdown()
        self._server.server_close()

    # -- what tests look at

    def points(self) -> list[dict[str, Any]]:
        """Metrics as the service keeps them: the first of each message id."""
        kept: dict[str, dict[str, Any]] = {}
        for event in self.arrived:
            if event["event"] == PREFIX + "metric":
                kept.setdefault(event["messageId"], event["data"])
        return list(kept.values())

    def events(self) -> list[str]:
        return [short(e["event"]) for e in self.arrived]

    def batches(self) -> list[list[str]]:
        """Names of the events of each request to an experiment."""
        return [a.names for a in self.asked if "/experiments/" in a.path]

    # -- the service

    def answer(self, asked: Asked) -> Any:
        with self._lock:
            self.asked.append(asked)
            hooks = list(self.hooks)
        for hook in hooks:
            found = hook(asked)
            if found is not None:
                return found
        with self._lock:
            return self._answer(asked)

    def _answer(self, asked: Asked) -> Any:
        bearer = asked.headers.get("authorization", "").removeprefix("Bearer ")
        if asked.method == "GET":
            if asked.path != f"/api/{self.auth_version}/auth/status":
                return error(404, "not found")
            if bearer != self.key:
                return error(401, "unknown key")
            return reply({"data": {"auth": {"kind": "organization_api_key"}}, "error": None})
        if asked.path == "/api/v2/events":
            if bearer != self.key:
                return error(401, "unknown key")
        elif bearer not in self.tokens:
            return error(401, "unknown token")
        else:
            self.arrived += asked.body
        return reply([self.reply_to(event) for event in asked.body])

    def reply_to(self, event: dict[str, Any]) -> dict[str, Any]:
        name, data = short(event["event"]), event["data"]
        out: dict[str, Any] = {"experimentId": data.get("experimentId")}
        if name in ("open", "tokenRefresh"):
            if name == "open":
                self.metas.append(data["meta"])
                self.experiments.setdefault(data["slug"], str(uuid.uuid4()))
            token = f"tok-{uuid.uuid4().hex}"
            self.tokens.add(token)
            out = {"experimentId": data.get("experimentId") or self.experiments[data["slug"]], "experimentToken": token,
                   "expiresAtMs": int((time.time() + self.token_seconds) * 1000)}
        elif event["event"].endswith("foldertree.read"):
            inner = {"folderId": FOLDER, "name": "runs", "experiments": [], "folders": []}
            out = {"experiments": [], "folders": [{"folderId": str(uuid.uuid4()), "name": "top", "folders": [inner]}]}
        kind = PREFIX + REPLIES.get(name, name) if event["event"].startswith(PREFIX) else event["event"].replace(".move", ".moved")
        return {"messageId": str(uuid.uuid4()), "correlationId": event["messageId"], "event": kind, "data": out}


def short(event: str) -> str:
    return event.removeprefix(PREFIX).removeprefix("syvain.v2.")


def reply(value: Any, status: int = 200, **headers: str) -> tuple[int, dict[str, str], bytes]:
    return status, headers, json.dumps(value).encode()


def error(status: int, text: str = "", **headers: str) -> tuple[int, dict[str, str], bytes]:
    return reply({"data": None, "error": {"message": text}}, status, **{k.replace("_", "-"): v for k, v in headers.items()})


def error_event(event: dict[str, Any], status: int | None, **more: Any) -> dict[str, Any]:
    data = {"code": "odd", "message": "odd", **({"status": status} if status else {}), **more}
    return {"messageId": "m", "correlationId": event["messageId"], "event": "syvain.v2.error", "data": data}


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        pass


def _handler(service: FakeService) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def _do(self) -> None:
            raw = self.rfile.read(int(self.headers.get("content-length") or 0))
            text = gzip.decompress(raw) if self.headers.get("content-encoding") == "gzip" else raw
            asked = Asked(time.monotonic(), self.command, self.path, {k.lower(): v for k, v in self.headers.items()},
                          json.loads(text) if text else None, len(text))
            answer = service.answer(asked)
            if answer == CLOSE:
                self.close_connection = True
                return
            status, headers, body = answer
            try:
                self.send_response(status)
                for name, value in {**service.headers, **headers}.items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
            except OSError:
                self.close_connection = True

        do_GET = do_POST = _do

    return Handler
