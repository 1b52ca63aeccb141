"""Our requests against captured ones of the vendor's clients (tests/data/service_requests.json), and the fake's replies too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_service import FOLDER, FakeService, short
from support_metrics import append, client, deliver, note, points, run_record, service

from sexpgpu.run.metrics.service import connect

CAPTURED = json.loads((Path(__file__).resolve().parents[1] / "data" / "service_requests.json").read_text())["requests"]
EVENTS = {r["event"]["event"]: r for r in CAPTURED if r["event"] is not None}


def kinds(value):
    """A value's structure: keys and types, texts and numbers left out."""
    if isinstance(value, dict):
        return {k: kinds(v) if k not in ("meta",) else dict for k, v in value.items()}
    return float if isinstance(value, int | float) and not isinstance(value, bool) else type(value)


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """Every kind of request there is."""
    folder = tmp_path_factory.mktemp("wire")
    with FakeService() as fake:
        connect(service(fake.url, folder), FOLDER).close()
        for name, end in (("a", run_record("done")), ("b", run_record("error", error={"code": "E", "message": "m"}))):
            append(folder / name, [run_record("start", slug=name), *points(1), note("n", step="1"), end], name * 32)
            fake.token_seconds = 100
            assert deliver(fake.url, folder / name, run_id=name * 32, folder=FOLDER).finished
        return fake, list(fake.asked)


def test_the_key_check(asked):
    assert (asked[1][0].method, asked[1][0].path) == ("GET", "/api/v2/auth/status")
    assert any(r["event"] is None and r["path"] == asked[1][0].path for r in CAPTURED)


@pytest.mark.parametrize("event", sorted(EVENTS), ids=short)
def test_event(asked, event):
    fake, requests = asked
    found = [(a, e) for a in requests for e in a.body or () if e["event"] == event]
    assert found, f"we send no {event}"
    for request, ours in found:
        theirs = EVENTS[event]
        assert request.path.split("/")[:4] == theirs["path"].split("/")[:4] and request.method == theirs["method"]
        assert kinds(ours) == kinds(theirs["event"])
        assert set(fake.reply_to(ours)) == set(theirs["reply"]) and fake.reply_to(ours)["event"] == theirs["reply"]["event"]


def test_we_send_nothing_else(asked):
    sent = {e["event"] for a in asked[1] for e in a.body or ()}
    assert sent == set(EVENTS)


def test_the_api_reference_of_a_page(asked):
    assert client("https://metrics.041.io").page("x") == "https://metrics.041.io/app/experiments/x"
