"""A worker process: takes calls of named functions from its standard input, gives results on its standard output.

Started anew (never forked: no CUDA context, no client of a store comes along), with no more of the environment than it
needs. Ends when its input ends. A message is a length (u64 little-endian) and a pickle: both ends are this program.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
from importlib import import_module
from typing import IO, Any


def send(stream: IO[bytes], value: Any) -> None:
    data = pickle.dumps(value, protocol=5)
    stream.write(len(data).to_bytes(8, "little"))
    stream.write(data)
    stream.flush()


def receive(stream: IO[bytes]) -> Any:
    """The next message; EOFError when the other end is gone."""
    size = stream.read(8)
    if len(size) < 8:
        raise EOFError
    data = stream.read(int.from_bytes(size, "little"))
    return pickle.loads(data)


def call(function: str, arguments: tuple[Any, ...]) -> Any:
    """`module:name` of this package, called."""
    module, name = function.split(":")
    return getattr(import_module(f"sexpgpu.run.data.{module}"), name)(*arguments)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is the parent's business
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing printed by a library may get among the messages
    while True:
        try:
            function, arguments = receive(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer: tuple[bool, Any] = (True, call(function, arguments))
        except Exception as error:
            answer = (False, error)
        send(out, answer)


if __name__ == "__main__":
    main()
