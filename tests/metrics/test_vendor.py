"""The same script through the vendor's collector 0.0.352 and through ours: the service hears the same.

Left out of the comparison, by design: how events are shared out among requests (ours sends lifecycle events alone), and
the version of the key's check. The rest is equal, event for event, once ids and times are normalised.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest
from fake_service import FOLDER, FakeService, short
from support_metrics import KEY, RUN, append, deliver, run_record

HERE = Path(__file__).resolve().parent
VERSION = "0.0.352"


def installed() -> bool:
    try:
        return importlib.metadata.version("syvain-metrics-collector") == VERSION
    except importlib.metadata.PackageNotFoundError:
        return False


def normal(fake: FakeService) -> list[tuple]:
    """Events in order, whatever request they came in: name, data without ids and tokens."""
    out = []
    for asked in fake.asked:
        for event in asked.body or ():
            assert set(event) == {"messageId", "event", "data"}
            data = {k: v for k, v in event["data"].items() if k not in ("experimentId", "experimentToken")}
            data["ours"] = "experimentId" in event["data"]
            out.append((short(event["event"]), json.dumps(data, sort_keys=True)))
    return out


@pytest.mark.skipif(not installed(), reason=f"syvain-metrics-collector {VERSION} has no wheel here")
@pytest.mark.parametrize("error", ["", "shape mismatch: (8,) vs (4,)"])
def test_equal_events(tmp_path, error):
    about = run_record("start", step=0)
    meta = {k: v for k, v in {"run_id": RUN, **about}.items() if k not in ("type", "event", "step", "slug")}
    events = []
    for step in range(1, 40):
        for name, metadata in (("loss", {"split": "train"}), ("attention/norm", {"split": "train", "path": "gpt/block/3/attention/norm"})):
            events.append(("metric", {"name": name, "value": 1 / step, "step": step, "metadata": metadata, "time": 1_700_000_000.5 + step}))
        if step % 10 == 0:
            events.append(("annotation", {"text": f"checkpoint step-{step}", "step": step, "metadata": {"kind": "checkpoint"}}))
    script = {"slug": about["slug"], "description": "SexpGPU, run train", "meta": meta, "events": events, "error": error}
    with FakeService(auth_version="v1") as theirs:
        subprocess.run([sys.executable, str(HERE / "vendor_script.py"), theirs.url, KEY, FOLDER], input=json.dumps(script), text=True, check=True,
                       timeout=60)
        assert theirs.asked[0].headers["user-agent"] == f"syvain-metrics-collector/{VERSION}"
    with FakeService() as ours:
        records = [about]
        for kind, what in events:
            if kind == "metric":
                records.append({"type": "metric", **what})
            else:
                records.append({"type": "annotation", "text": what["text"], "metadata": {**what["metadata"], "step": str(what["step"])}})
        end = {"error": {"code": "ValueError", "message": error}} if error else {}
        append(tmp_path / "m.jsonl", [*records, run_record("error" if error else "done", **end)])
        done = deliver(ours.url, tmp_path / "m.jsonl", folder=FOLDER)
        assert done.finished and not done.cursor.refused
    expected = [e for e in normal(theirs) if e[0] != "foldertree.read"]
    assert len(expected) == 5 + len(events) + 1 and normal(ours) == expected
    wanted = {"authorization", "accept", "accept-encoding", "content-type", "content-length", "host", "user-agent", "x-syvain-client",
              "x-syvain-client-version"}
    for fake in (theirs, ours):
        sent = {name for asked in fake.asked if asked.method == "POST" for name in asked.headers}
        assert sent - {"connection"} == wanted
