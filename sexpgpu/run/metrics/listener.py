"""Turns events into records and hands each to every target."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from sexpgpu.run.events import Annotation, EvalDone, Failed, Finished, PhaseChanged, Started, StepDone, Stopped
from sexpgpu.run.metrics.record import eval_records, step_records
from sexpgpu.run.metrics.target import Target


class MetricsListener:
    """`identity`: run_id, slug, run, knobs, ir_hash, versions of contracts.md, Metrics record."""

    def __init__(self, targets: Sequence[Target], identity: Mapping[str, Any]):
        self.targets = targets
        self._identity = identity
        self._started = False

    def on(self, event: Any) -> None:
        match event:
            case Started():
                self._started = True
                more = {"supersedes_after": event.supersedes} if event.supersedes is not None else {}
                self._run("resume" if event.resumed else "start", step=event.step, **more)
            case StepDone(logged=True):
                self._write(step_records(event))
            case EvalDone():
                self._write(eval_records(event))
            case PhaseChanged(state="saving"):
                for target in self.targets:  # a checkpoint never knows of more steps than the metrics do
                    target.sync()
            case Annotation():
                self._write([{"type": "annotation", "text": event.text, "metadata": dict(event.metadata)}])
            case Finished():
                self._run("done", step=event.step)
            case Stopped():
                self._run("stopped", step=event.step)
            case Failed():
                self._run("error", step=event.step, error={"code": event.code, "message": event.message})

    def close(self) -> None:
        for target in self.targets:
            target.close()

    def troubles(self) -> list[str]:
        return [target.trouble for target in self.targets if target.trouble]

    def _run(self, what: str, **more: Any) -> None:
        if not self._started:  # what never started leaves no record
            return
        known = {key: value for key, value in self._identity.items() if key != "run_id"}
        self._write([{"type": "run", "event": what, **known, **more}])

    def _write(self, records) -> None:
        for record in records:
            stamped = {"type": record["type"], "run_id": self._identity["run_id"], "time": time.time(), **record}
            for target in self.targets:
                target.write(stamped)
