"""The S3 server of these tests: one a process, with a prefix of its own for each test; and the search for secrets."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
from seaweed import KEYS, STUB, Server


@pytest.fixture(scope="session", autouse=True)
def _no_secret_is_left_in_any_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """When all tests of this folder are over, every file they wrote is searched, but the server's own."""
    yield
    words = [word.encode() for key, secret, _ in KEYS.values() for word in (key, secret)] + [
        word.encode() for word in STUB
    ]
    base = tmp_path_factory.getbasetemp()
    servers = {path.parent for path in base.rglob("s3.json")}
    for path in base.rglob("*"):
        if path.is_file() and not path.is_symlink() and not any(server in path.parents for server in servers):
            left = [word for word in words if word in path.read_bytes()]
            assert not left, f"{path} holds {len(left)} secrets"


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Running, with both buckets."""
    running = Server(tmp_path_factory.mktemp("seaweed"))
    try:
        yield running.start().make_buckets()
    finally:
        running.stop()


@pytest.fixture
def place(server: Server) -> str:
    """`checkpoints/<prefix>`, with nothing in it."""
    return f"checkpoints/t-{uuid.uuid4().hex[:8]}"
