"""JSON lines over a socket: what supervisors and ranks say to each other beside the collectives."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping
from typing import Any

LONGEST = 4 << 20  # bytes of a line: more is nobody of ours
BACKLOG = 16 << 20  # bytes that the other side has not taken: it is not listening


class Closed(Exception):
    """The other side is gone, or is none of ours."""


class Stranger(Closed):
    """The other side is none of ours."""


class Wire:
    """A socket that never blocks: what cannot be sent yet waits in `pending`."""

    def __init__(self, sock: socket.socket):
        sock.setblocking(False)
        self.socket = sock
        self.pending = bytearray()
        self._got = bytearray()

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, message: Mapping[str, Any]) -> None:
        """Queues one line and sends what it can. Raises Closed."""
        self.pending += json.dumps(message, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        while self.pending:
            try:
                sent = self.socket.send(self.pending)
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:
                raise Closed(error.strerror or str(error)) from None
            del self.pending[:sent]
        if len(self.pending) > BACKLOG:
            raise Closed("it takes nothing any more")

    def receive(self) -> Iterator[dict[str, Any]]:
        """The whole lines that are there. Raises Closed when there will be no more."""
        closed = ""
        while True:
            try:
                block = self.socket.recv(1 << 16)
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:
                closed = error.strerror or str(error)
                break
            if not block:
                closed = "it closed the connection"
                break
            self._got += block
        *lines, rest = self._got.split(b"\n")
        self._got = bytearray(rest)
        for line in lines:
            try:
                message = json.loads(line)
            except (ValueError, RecursionError):
                raise Stranger("it does not speak as we do") from None
            if not isinstance(message, dict):
                raise Stranger("it does not speak as we do")
            yield message
        if len(self._got) > LONGEST:
            raise Stranger("it does not speak as we do")
        if closed:
            raise Closed(closed)

    def close(self) -> None:
        self.socket.close()
