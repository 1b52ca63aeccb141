"""Records of made-up runs, and what the tests of delivery share."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

from sexpgpu.run.metrics.delivery import Clock, Delivery
from sexpgpu.run.metrics.record import line_of, metric
from sexpgpu.run.metrics.service import connect
from sexpgpu.run.metrics.syvain import Client
from sexpgpu.run.metrics.target import Service
from sexpgpu.settings import Secret

RUN = "a" * 32
KEY = "ak_org_test"


class ScaledClock(Clock):
    """A clock that runs `factor` times faster."""

    def __init__(self, factor: float):
        self.factor = factor

    def now(self) -> float:
        return time.monotonic() * self.factor

    def wait(self, event: threading.Event, seconds: float) -> None:
        event.wait(seconds / self.factor)


def run_record(event: str, **more: Any) -> dict[str, Any]:
    return {"type": "run", "event": event, "slug": "toy-20260101-000000-abcd", "run": "train", "trajectory": "t0",
            "knobs": {"lr": {"value": 0.1, "source": "default", "place": "toy.lisp:1:1"}}, "ir_hash": "ab", "versions": {}, **more}


def points(count: int, first: int = 1, name: str = "loss") -> list[dict[str, Any]]:
    return [metric(name, 1 / step, step, {"split": "train"}) for step in range(first, first + count)]


def note(text: str, **metadata: str) -> dict[str, Any]:
    return {"type": "annotation", "text": text, "metadata": metadata}


def whole_run(count: int) -> list[dict[str, Any]]:
    return [run_record("start", step=0), *points(count), note("checkpoint step-1", step="1"), run_record("done", step=count)]


def append(path: Path, records: list[dict[str, Any]], run_id: str = RUN) -> None:
    """As a jsonl target would, seq going on from what is there."""
    seq = sum(1 for _ in path.open()) if path.exists() else 0
    with path.open("ab") as file:
        for i, record in enumerate(records):
            file.write(line_of({"type": record["type"], "run_id": run_id, "time": 1000.0 + seq + i, **record, "seq": seq + i}))


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def service(url: str, tmp_path: Path, key: str = KEY, folder: str | None = None) -> Service:
    return Service(Secret(key), folder, url, tmp_path / "state")


def client(url: str, timeout: float = 10.0) -> Client:
    return Client(url, Secret(KEY), timeout)


def deliver(url: str, path: Path, seconds: float = 20.0, run_id: str = RUN, timeout: float = 10.0, **keys: Any) -> Delivery:
    """Everything the file holds, or what the time allows."""
    delivery = Delivery(client(url, timeout), path, run_id, **keys)
    delivery.start()
    delivery.finish(seconds)
    return delivery


__all__ = ["connect", "deliver"]
