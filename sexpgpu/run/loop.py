"""The run loop: steps, evaluations and saves in the order of contracts.md, "A run", as a stream of events."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from sexpgpu.diagnostics import SexpError, note_warning, problem
from sexpgpu.experiment.model import Eval, Run
from sexpgpu.run.best import Best
from sexpgpu.run.data.feed import EvalFeed, TrainFeed
from sexpgpu.run.events import EvalDone, Event, Finished, PhaseChanged, Saved, StepDone, Stopped, Warned
from sexpgpu.run.program import Program, StepResult

Save = Callable[[int], Saved]


class Controls(Protocol):
    """What may interrupt a run; `signals.Signals` is the one of a process."""

    def stopping(self) -> int | None:
        """The signal that asked for the end, or None."""

    def take_save_request(self) -> bool:
        """Whether a checkpoint was asked for since the last call."""


class NoControls:
    """Nothing interrupts."""

    def stopping(self) -> int | None:
        return None

    def take_save_request(self) -> bool:
        return False


@dataclass(frozen=True)
class Feeds:
    """The bound data of a run: batches of the n-th update, and each evaluation's."""

    train: TrainFeed
    evals: Mapping[str, EvalFeed] = field(default_factory=dict)


@dataclass
class _Meter:
    """Time, steps, samples and tokens since the last logged step."""

    seconds: float = 0.0
    steps: int = 0
    samples: int = 0
    tokens: float | None = None

    def add(self, seconds: float, samples: int, tokens: float | None) -> None:
        self.seconds += seconds
        self.steps += 1
        self.samples += samples
        if tokens is not None:
            self.tokens = (self.tokens or 0.0) + tokens


def train(
    program: Program,
    run: Run,
    feeds: Feeds,
    start_step: int,
    stop_step: int,
    *,
    controls: Controls | None = None,
    save: Save | None = None,
    durable_step: int | None = None,
    best: Best | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[Event]:
    """Steps `start_step + 1 … stop_step` of an initialised or loaded program; the last event is Finished or Stopped.

    `save` writes a durable checkpoint of the program as it stands (None: no location); `durable_step` is the step
    that one holds already; an evaluation that improves `best` is followed by a save. Raises E-RUN-001 (exit 3) at a step that is not finite: that step changed nothing.
    """
    controls = controls or NoControls()
    step, meter = start_step, _Meter()
    yield PhaseChanged("running", step)
    while step < stop_step:
        if controls.stopping() is not None:
            break
        step += 1
        last = step == stop_step
        logged = last or _divides(run.log_every, step)
        result = _update(program, run, feeds, step, logged, meter, clock)
        yield StepDone(step, stop_step, logged, result, meter.seconds, meter.steps, meter.samples, meter.tokens)
        if logged:
            meter = _Meter()
        better = False
        for evaluation in run.evals:
            if _divides(evaluation.every, step) or (last and evaluation.every):
                yield PhaseChanged("evaluating", step)
                done = evaluate(program, evaluation, feeds.evals[evaluation.name], step, clock)
                better = (best is not None and best.take(done)) or better
                yield done
                yield PhaseChanged("running", step)
        asked = controls.take_save_request()
        if asked and save is None:
            yield Warned(note_warning(
                "E-RUN-003", "SIGUSR1 asks for a checkpoint, but this run has no location for one",
                help="give --checkpoint-dir"))
        if save is not None and (last or asked or better or _divides(run.checkpoint_every, step)):
            saved = False
            for event in _saving(save, step, must=last):
                saved = saved or isinstance(event, Saved)
                yield event
            durable_step = step if saved else durable_step
            if better and not saved and best is not None:
                best.undo()
    if step >= stop_step:  # also when a signal fell in the last step: nothing is left to do
        yield Finished(step)
        return
    if save is not None and durable_step != step:
        yield from _saving(save, step, must=True)
        durable_step = step
    durable = save is not None and durable_step == step
    yield Stopped(step, controls.stopping() or signal.SIGTERM, durable)


def evaluate(program: Program, evaluation: Eval, feed: EvalFeed, step: int, clock=time.perf_counter) -> EvalDone:
    """All batches once, in order; a metric is the sum of sums over the sum of counts (NaN over no samples)."""
    start = clock()
    sums: dict[str, list[float]] = {}
    for batch in feed:
        for name, (total, count) in program.evaluate(evaluation.name, batch).items():
            pair = sums.setdefault(name, [0.0, 0.0])
            pair[0] += total
            pair[1] += count
    metrics = {name: total / count if count else math.nan for name, (total, count) in sums.items()}
    return EvalDone(step, evaluation.name, evaluation.data.split, metrics, clock() - start)


def _update(program: Program, run: Run, feeds: Feeds, step: int, logged: bool, meter: _Meter, clock: Any) -> StepResult:
    start = clock()
    batch = feeds.train.batch(step - 1)
    result = program.step(batch, logged)
    meter.add(clock() - start, run.data.batch, run.data.tokens if result.tokens is None else result.tokens)
    if not result.finite:
        raise _not_finite(run, step, result)
    return result


def _saving(save: Save, step: int, must: bool) -> Iterator[Event]:
    """A checkpoint that fails is a warning, except the one that a run may not end without (exit 3)."""
    yield PhaseChanged("saving", step)
    try:
        yield save(step)
    except SexpError as error:
        if must:
            raise
        d = error.diagnostic
        yield Warned(note_warning(d.code, d.message, d.span, notes=d.notes, help=d.help))
    yield PhaseChanged("running", step)


def _divides(every: int | None, step: int) -> bool:
    """`every` None or 0 is never."""
    return every is not None and every > 0 and step % every == 0


def _not_finite(run: Run, step: int, result: StepResult) -> SexpError:
    fell = result.fell or ("loss" if not math.isfinite(result.loss) else "gradient norm")
    value = result.loss if fell == "loss" else result.gradient_norm
    return problem(
        "E-RUN-001",
        f"step {step}: the {fell} is {value:g}; the step changed nothing and the run stops",
        run.loss.span or run.span,
        notes=(f"loss {result.loss:g}, gradient norm {result.gradient_norm:g}, "
               f"updates made before: {step - 1}",),
        help=("a smaller learning rate or `:clip-norm 1.0` in the run often mends this",),
        exit_code=3,
    )
