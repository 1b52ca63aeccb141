"""A server of one answer: what S3 servers say when they refuse, for the errors that a test server does not give."""

from __future__ import annotations

import threading
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Refusing:
    """Answers every request with `status` and an S3 error of `code`; keeps what it was sent."""

    def __init__(
        self, status: int, code: str, extra: str = "", headers: dict[str, str] | None = None, date: float | None = None
    ):
        self.requests: list[tuple[str, dict[str, str]]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                self.rfile.read(length)
                outer.requests.append((f"{self.command} {self.path}", dict(self.headers)))
                body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>SERVERTEXT</Message>{extra}</Error>".encode()
                self.send_response_only(status)
                self.send_header("Date", formatdate(date, usegmt=True))
                self.send_header("Content-Type", "application/xml")
                self.send_header("Content-Length", str(len(body) if self.command != "HEAD" else 0))
                for name, value in (headers or {}).items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = answer  # noqa: N815 - the base class's names

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's word
                """Nothing is printed."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def __enter__(self) -> Refusing:
        self.thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.server.shutdown()
        self.server.server_close()
