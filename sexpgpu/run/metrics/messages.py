"""Records as the service's events: what is sent of each, within its limits, under an id that a repetition has again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sexpgpu.run.metrics.record import key_of, lineage
from sexpgpu.run.metrics.syvain import clip, envelope

KEYS, KEY_BYTES, VALUE_BYTES, META_BYTES = 32, 128, 512, 4096  # of a metric's metadata
ANNOTATION_UNITS, ANNOTATION_BYTES, ERROR_UNITS = 16_000, 65_536, 8_000


@dataclass(frozen=True)
class Message:
    """A record on its way. `event` is None for one that stays in the file: a value that is not finite, an unknown type."""

    seq: int
    time: float
    event: dict[str, Any] | None
    alone: bool = False  # a lifecycle event shares a request with no other
    nonfinite: str = ""  # the metric's name, where that is why


@dataclass
class Lineage:
    """Which trajectory the records of a run belong to, by the run records before them.

    A metric's id comes of run, trajectory, name, step and metadata, not of its value or place in a file: sent again after a
    crash, or written again by a resume whose file was lost, it is the same point. A resume on a changed
    trajectory makes other points of the same steps, and so does a return to a trajectory that was left: each `run`
    record says both.
    """

    tag: str = ""
    after: str = ""  # the step after which a changed trajectory began

    def take(self, record: Mapping[str, Any]) -> None:
        """Hears every `run` record of the run in order."""
        if record.get("event") not in ("start", "resume"):
            return
        accepted = record.get("accepted") or []
        self.tag = lineage(str(record.get("trajectory", "")), accepted)
        self.after = str(accepted[-1]) if accepted else ""


def message_of(record: Mapping[str, Any], experiment: str, lineage: Lineage) -> Message:
    """One record of a run whose `run` records `lineage` has heard up to here."""
    seq, time = int(record.get("seq", 0)), float(record.get("time", 0.0))
    kind = record.get("type")
    if kind == "metric":
        if record.get("value") is None:
            return Message(seq, time, None, nonfinite=str(record.get("name")))
        return Message(seq, time, _metric(record, experiment, lineage))
    identity = _digest([record.get("run_id"), kind, seq, time])
    if kind == "annotation":
        return Message(seq, time, _annotation(record, experiment, identity))
    if kind == "run":
        return Message(seq, time, _lifecycle(record, experiment, identity), alone=True)
    return Message(seq, time, None)


def opening(record: Mapping[str, Any]) -> tuple[str, str, dict[str, Any]]:
    """Slug, description and metadata of the experiment that a `start` or `resume` record is of."""
    left_out = ("type", "time", "seq", "event", "step", "slug", "supersedes_after")
    return (str(record["slug"]), f"SexpGPU, run {record.get('run', '')}",
            {key: value for key, value in record.items() if key not in left_out})


def _metric(record: Mapping[str, Any], experiment: str, lineage: Lineage) -> dict[str, Any]:
    meta = dict(record.get("metadata", {}))
    if lineage.after:  # points of one step and two trajectories are two series
        meta["accepted-after"] = lineage.after
    return envelope("metric", {
        "experimentId": experiment, "metricName": record["name"], "metricValue": float(record["value"]),
        "step": int(record["step"]), "timestampMs": int(float(record["time"]) * 1000), "meta": _fitted(meta)},
        _digest([record["run_id"], lineage.tag, *key_of(record)]))


def _annotation(record: Mapping[str, Any], experiment: str, identity: str) -> dict[str, Any]:
    meta: dict[str, Any] = dict(record.get("metadata", {}))
    if str(meta.get("step", "")).isdecimal():
        meta["step"] = int(meta["step"])
    if len(json.dumps(meta)) > ANNOTATION_BYTES:
        meta = {"step": meta["step"]} if "step" in meta else {}
    text = clip(str(record.get("text", "")), ANNOTATION_UNITS) or "-"
    return envelope("annotate", {"experimentId": experiment, "annotation": text, "meta": meta}, identity)


def _lifecycle(record: Mapping[str, Any], experiment: str, identity: str) -> dict[str, Any] | None:
    event = record.get("event")
    if event in ("start", "resume"):
        return envelope("start", {"experimentId": experiment}, identity)
    if event == "done":
        return envelope("done", {"experimentId": experiment}, identity)
    if event == "stopped":  # the service has no word for it; a resume starts it again
        return _error(experiment, "Stopped", f"after step {record.get('step')}", identity)
    if event == "error":
        error = record.get("error") or {}
        return _error(experiment, str(error.get("code") or "Bug"), str(error.get("message", "")), identity)
    return None


def _error(experiment: str, kind: str, text: str, identity: str) -> dict[str, Any]:
    return envelope("error", {"experimentId": experiment, "error": clip(f"{kind}: {text}", ERROR_UNITS),
                              "meta": {"error_type": kind}}, identity)


def _fitted(meta: Mapping[str, str]) -> dict[str, str]:
    """Within the service's limits; a text that is cut ends with a digest of the whole, so that two stay two."""
    out: dict[str, str] = {}
    total = 2
    for key, value in sorted(meta.items()):
        key, value = _cut(key, KEY_BYTES), _cut(str(value), VALUE_BYTES)
        total += len(json.dumps(key, ensure_ascii=False).encode()) + len(json.dumps(value, ensure_ascii=False).encode()) + 2
        if len(out) == KEYS or total > META_BYTES:
            break
        out[key] = value
    return out


def _cut(text: str, size: int) -> str:
    data = text.encode("utf-8", "replace")
    if len(data) <= size:
        return data.decode()
    return data[: size - 13].decode("utf-8", "ignore") + "~" + hashlib.sha256(data).hexdigest()[:12]


def _digest(parts: list[Any]) -> str:
    """32 lowercase hex digits."""
    return hashlib.sha256(json.dumps(parts, separators=(",", ":")).encode()).hexdigest()[:32]
