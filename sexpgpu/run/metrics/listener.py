"""Turns events into records and hands each to every target."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sexpgpu.run.events import (
    Annotation,
    EvalDone,
    Failed,
    Finished,
    NotFinite,
    PhaseChanged,
    Saved,
    Started,
    StepDone,
    Stopped,
)
from sexpgpu.run.metrics.record import eval_records, lost_records, step_records
from sexpgpu.run.metrics.target import Target


class MetricsListener:
    """`identity`: run_id, slug, run, knobs, ir_hash, versions of contracts.md, Metrics record, and what else is known."""

    def __init__(self, targets: Sequence[Target], identity: Mapping[str, Any]):
        self.targets = targets
        self._identity = dict(identity)
        self._started = False
        self._closed = False
        self._odd: set[str] = set()  # metrics that were once not finite

    def know(self, **more: Any) -> None:
        """More that the run's records are to say, such as its device; before Started."""
        self._identity |= more

    def on(self, event: Any) -> None:
        if self._closed:
            return
        match event:
            case Started():
                self._begin(event)
            case StepDone(logged=True):
                self._numbers(step_records(event))
            case NotFinite():
                self._numbers(lost_records(event))
                if event.told:
                    self._say("\n".join(event.told), "autopsy", event.step)
            case EvalDone():
                self._numbers(eval_records(event))
            case PhaseChanged(state="saving"):
                for target in self.targets:  # a checkpoint never knows of more steps than the metrics do
                    target.sync()
            case Saved():
                self._say(f"checkpoint step-{event.step}", "checkpoint", event.step, location=event.location, health=event.health)
            case Annotation():
                self._write([{"type": "annotation", "text": event.text, "metadata": dict(event.metadata)}])
            case Finished():
                self._run("done", step=event.step)
            case Stopped():
                self._run("stopped", step=event.step)
            case Failed():
                self._run("error", step=event.step, error={"code": event.code, "message": event.message})

    def hurry(self) -> None:
        for target in self.targets:
            target.hurry()

    def close(self) -> None:
        """Ends every target, whatever happened to another; bounded, and troubles and notes are final after it."""
        self._closed = True
        for target in self.targets:
            target.close()

    def troubles(self) -> list[str]:
        return [target.trouble for target in self.targets if target.trouble]

    def notes(self) -> list[str]:
        """Lines for a person, after the end, that are no trouble."""
        return [note for target in self.targets for note in getattr(target, "notes", ())]

    def pages(self) -> list[str]:
        """Addresses at which a person finds the numbers."""
        return [page for target in self.targets if (page := getattr(target, "page", str)())]

    def _begin(self, event: Started) -> None:
        self._started = True
        others = event.resumed and any(getattr(target, "supersedes", False) for target in self.targets)
        more = {"supersedes_after": event.step} if event.supersedes is not None or others else {}
        self._run("resume" if event.resumed else "start", step=event.step, **more)
        if event.resumed:
            self._say(f"resumed after step {event.step}", "resume", event.step)
        if event.changes:
            self._say(f"--accept: goes on although {'; '.join(event.changes)}", "accept", event.step)

    def _numbers(self, records: Iterable[Mapping[str, Any]]) -> None:
        for record in records:
            self._write([record])
            if record["value"] is None and record["name"] not in self._odd:
                self._odd.add(record["name"])
                self._say(f"`{record['name']}` is {record['nonfinite']} at step {record['step']}", "not-finite", record["step"])

    def _say(self, text: str, kind: str, step: int, **more: str) -> None:
        self._write([{"type": "annotation", "text": text, "metadata": {"kind": kind, "step": str(step), **more}}])

    def _run(self, what: str, **more: Any) -> None:
        if not self._started:  # what never started leaves no record
            return
        known = {key: value for key, value in self._identity.items() if key != "run_id"}
        self._write([{"type": "run", "event": what, **known, **more}])

    def _write(self, records: Iterable[Mapping[str, Any]]) -> None:
        for record in records:
            stamped = {"type": record["type"], "run_id": self._identity["run_id"], "time": time.time(), **record}
            for target in self.targets:
                target.write(stamped)
