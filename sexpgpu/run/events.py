"""What a run says while it goes on: frozen facts. The loop yields them; console, metrics and status listen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from sexpgpu.diagnostics import Diagnostic
from sexpgpu.run.program import StepResult


@dataclass(frozen=True)
class Started:
    """Everything before step 1 went well. `step`: updates already done; `supersedes`: contracts.md, Metrics record.

    `changes`: what `--accept` accepted, as lines for a person.
    """

    step: int
    steps: int
    resumed: bool = False
    supersedes: int | None = None
    changes: tuple[str, ...] = ()


@dataclass(frozen=True)
class PhaseChanged:
    """`state` is a word of the status file: compiling, running, evaluating, saving."""

    state: str
    step: int


@dataclass(frozen=True)
class StepDone:
    """One update. `interval_*` cover the steps since the last logged one (seconds without evals and saves)."""

    step: int
    steps: int
    logged: bool
    result: StepResult
    interval_seconds: float
    interval_steps: int
    interval_samples: int
    interval_tokens: float | None = None

    def rates(self) -> dict[str, float]:
        """step-seconds, samples-per-second and, where the loss counts or the data are windows, tokens-per-second."""
        seconds = max(self.interval_seconds, 1e-9)
        rates = {
            "step-seconds": self.interval_seconds / self.interval_steps,
            "samples-per-second": self.interval_samples / seconds,
        }
        if self.interval_tokens is not None:
            rates["tokens-per-second"] = self.interval_tokens / seconds
        return rates


@dataclass(frozen=True)
class NotFinite:
    """Update `step` fell and changed nothing; the run ends. `told`: what the autopsy found, a line each."""

    step: int
    steps: int
    result: StepResult
    told: tuple[str, ...] = ()


@dataclass(frozen=True)
class EvalDone:
    """Every batch of an evaluation, after `step` updates. `split` is None where the source is not split."""

    step: int
    name: str
    split: str | None
    metrics: Mapping[str, float]
    seconds: float


@dataclass(frozen=True)
class Saved:
    """A durable checkpoint."""

    step: int
    location: str
    health: str = "healthy"
    seconds: float = 0.0


@dataclass(frozen=True)
class Warned:
    diagnostic: Diagnostic


@dataclass(frozen=True)
class Annotation:
    text: str
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Failed:
    """The run ends with an error; `code` is empty for a bug of ours."""

    step: int
    code: str
    message: str
    place: str | None = None


@dataclass(frozen=True)
class Stopped:
    """Ended by a signal (or --max-time, as SIGTERM). `durable`: the last step is in a checkpoint."""

    step: int
    signal: int
    durable: bool


@dataclass(frozen=True)
class Finished:
    step: int


Event = Started | PhaseChanged | StepDone | NotFinite | EvalDone | Saved | Warned | Annotation | Failed | Stopped | Finished


class Listener(Protocol):
    """Hears every event in order; `close` comes once, whatever happened."""

    def on(self, event: Any) -> None: ...

    def close(self) -> None: ...
