"""The S3 server of these tests: one a process, with a prefix of its own for each test."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
from seaweed import Server


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
