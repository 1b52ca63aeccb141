"""What a person sees on standard error while a run goes on, and the summary at its end."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from sexpgpu.diagnostics import printable, render
from sexpgpu.run.events import Annotation, EvalDone, PhaseChanged, Saved, Started, StepDone, Warned


def say(stream: TextIO, text: str) -> None:
    """One line; a reader that went away is no mistake."""
    with contextlib.suppress(OSError, ValueError):
        stream.write(text + "\n")
        stream.flush()


class PlainProgress:
    """Lines at logged steps: for logs and pipes."""

    def __init__(self, stream: TextIO | None = None):
        self._stream = stream if stream is not None else sys.stderr

    def on(self, event: Any) -> None:
        line = line_of(event)
        if line:
            say(self._stream, line)

    def close(self) -> None:
        pass


class RichProgress:
    """A bar on a terminal; evaluations, saves and warnings scroll above it."""

    def __init__(self, stream: TextIO | None = None):
        self._console = Console(file=stream if stream is not None else sys.stderr, highlight=False, markup=False)
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"),
            TextColumn("{task.fields[facts]}"), TimeRemainingColumn(), console=self._console, transient=True)
        self._task: Any = None

    def on(self, event: Any) -> None:
        match event:
            case Started():
                self._bar.start()
                self._task = self._bar.add_task("running", total=event.steps, completed=event.step, facts="")
            case PhaseChanged() if self._task is not None:
                self._bar.update(self._task, description=event.state)
            case StepDone() if self._task is not None:
                self._bar.update(self._task, completed=event.step)
                if event.logged:
                    self._bar.update(self._task, facts=_step_facts(event))
            case EvalDone() | Saved() | Warned() | Annotation():
                self._console.print(line_of(event))

    def close(self) -> None:
        self._bar.stop()


def progress_for(stream: TextIO | None = None) -> PlainProgress | RichProgress:
    stream = stream if stream is not None else sys.stderr
    return RichProgress(stream) if stream.isatty() else PlainProgress(stream)


def line_of(event: Any) -> str:
    """One event as a line; empty for those a person need not see."""
    match event:
        case StepDone(logged=True):
            return f"step {event.step}/{event.steps}  {_step_facts(event)}"
        case EvalDone():
            return f"step {event.step}  eval {event.name}: {numbers(event.metrics)}"
        case Saved():
            suspect = "" if event.health == "healthy" else f" ({event.health})"
            return f"step {event.step}  saved {printable(event.location)}/step-{event.step}{suspect}"
        case Warned():
            return render(event.diagnostic)
        case Annotation():
            return printable(event.text)
    return ""


def _step_facts(event: StepDone) -> str:
    rates = " ".join(f"{rate:.3g}" for rate in event.result.learning_rates.values())
    speed = event.rates()["samples-per-second"]
    extra = f"  {numbers(event.result.metrics)}" if event.result.metrics else ""
    return f"loss {event.result.loss:.4g}{extra}  lr {rates}  {speed:.0f} samples/s"


def numbers(values: Any) -> str:
    return "  ".join(f"{name} {value:.4g}" for name, value in values.items())


class Tally:
    """A listener that remembers what the summary says."""

    def __init__(self) -> None:
        self.step = 0
        self.loss: tuple[int, float] | None = None
        self.evals: dict[str, EvalDone] = {}
        self.saved: Saved | None = None
        self._start = time.monotonic()

    def on(self, event: Any) -> None:
        match event:
            case Started():
                self.step = event.step
            case StepDone():
                self.step = event.step
                self.loss = (event.step, event.result.loss)
            case EvalDone():
                self.evals[event.name] = event
            case Saved():
                self.saved = event

    def close(self) -> None:
        pass

    def summary(self, headline: str, places: Sequence[tuple[str, str]]) -> str:
        """`places`: (word, where) pairs that follow the losses."""
        rows = []
        if self.loss is not None:
            rows.append(("loss", f"{self.loss[1]:.4g} (train, step {self.loss[0]})"))
        for name, event in self.evals.items():
            rows.append((f"eval {name}", f"{numbers(event.metrics)} (step {event.step})"))
        rows += list(places)
        width = max((len(word) for word, _ in rows), default=0)
        head = f"{headline} after {time.monotonic() - self._start:.1f} s"
        return "\n".join([head, *(f"  {word:<{width}}  {printable(text)}" for word, text in rows)])
