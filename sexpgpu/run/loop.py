"""The run loop: steps, evaluations and saves in the order of contracts.md, "A run", as a stream of events."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from sexpgpu.diagnostics import SexpError, note_warning, problem
from sexpgpu.experiment.model import Eval, Run
from sexpgpu.run.checkpoints.writer import Outcome
from sexpgpu.run.collector import settle
from sexpgpu.run.data.feed import Feed
from sexpgpu.run.events import EvalDone, Event, Finished, NotFinite, PhaseChanged, StepDone, Stopped, Warned
from sexpgpu.run.flights import Flights
from sexpgpu.run.program import Program, StepResult
from sexpgpu.run.signals import Halted

#: (step, its result) -> lines that say why the step was not finite
Autopsy = Callable[[int, StepResult], tuple[str, ...]]


#: metric -> (sum, count) of one batch of an evaluation
Parts = dict[str, tuple[float, float]]
Join = Callable[[Eval, list[Parts]], list[Parts]]


def _alone(evaluation: Eval, parts: list[Parts]) -> list[Parts]:
    """Of a run that has no other ranks."""
    return parts


def _own(number: int) -> int:
    """Of a run that has no other ranks."""
    return number


class EvalBatches(Protocol):
    """An evaluation's batches; None in a round in which other ranks alone have one."""

    def __iter__(self) -> Iterator[Any]: ...


class Saver(Protocol):
    """Writes checkpoints beside the steps; `checkpoints.writer.Writer` is the one of a run."""

    def begin(self, step: int, owed: tuple[str, ...] = ()) -> list[Outcome]:
        """Copies the program's state as it stands and begins to write it; what ended meanwhile."""

    def poll(self) -> list[Outcome]:
        """What ended; never waits."""

    def finish(self) -> list[Outcome]:
        """Waits until nothing is in flight."""


class Keeps(Protocol):
    """The best evaluation; `best.Best` is the one of a process alone."""

    def take(self, done: EvalDone) -> bool: ...

    def kept(self, step: int) -> None: ...

    def lost(self, step: int) -> None: ...


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

    train: Feed
    evals: Mapping[str, EvalBatches] = field(default_factory=dict)
    join: Join = _alone  # every batch's parts, in order, from those of this rank's batches
    largest: Callable[[int], int] = _own  # of the ranks' numbers, each asked at the same place


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
    saver: Saver | None = None,
    durable_step: int | None = None,
    best: Keeps | None = None,
    owed: Sequence[str] = (),
    autopsy: Autopsy | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[Event]:
    """Steps `start_step + 1 … stop_step` of an initialised or loaded program; the last event is Finished or Stopped.

    `saver` writes checkpoints of the program as it stands (None: no location); `durable_step` is the step that one
    holds already; an evaluation that improves `best` is followed by a save. `owed`: evaluations of `start_step` that a
    signal cut off, made first. Raises E-RUN-001 (exit 3) at a step that is not finite: that step changed nothing.
    """
    controls = controls or NoControls()
    saves = _Saves(saver, best, durable_step)
    evals = _Evals(program, run, feeds, controls, saver is not None, best, clock)
    flights = Flights(program, run, feeds.train, start_step, stop_step, saver is not None, clock, feeds.largest)
    try:
        yield from _loop(program, run, feeds, start_step, stop_step, controls, saver, saves, evals, flights, owed, autopsy)
    finally:
        flights.leave()


def _loop(program: Program, run: Run, feeds: Feeds, step: int, stop_step: int, controls: Controls, saver: Saver | None, saves: _Saves, evals: _Evals,
          flights: Flights, owed: Sequence[str], autopsy: Autopsy | None) -> Iterator[Event]:
    meter = _Meter()
    asked = False  # for a save
    yield PhaseChanged("running", step)
    yield from evals.make(step, [e for e in run.evals if e.name in owed])
    if evals.better and not evals.left:
        yield from saves.begin(step)
    while step < stop_step and not evals.left:
        yield from saves.poll()
        if controls.stopping() is None and not asked:
            flights.fill()
        if not flights:
            if flights.trouble is not None and not isinstance(flights.trouble, Halted):
                raise flights.trouble
            break
        for made in flights.collect():
            settle()
            if not made.result.finite:
                flights.drop()
                if made.result.fell == "index":
                    program.blame(feeds.train.batch(step), made.logged)  # type: ignore[attr-defined]
                told = autopsy(made.step, made.result) if autopsy is not None else ()
                yield NotFinite(made.step, stop_step, made.result, told)
                raise _not_finite(run, made.step, made.result, told)
            step = made.step
            meter.add(made.seconds, run.data.batch, run.data.tokens if made.result.tokens is None else made.result.tokens)
            yield StepDone(step, stop_step, made.logged, made.result, meter.seconds, meter.steps, meter.samples, meter.tokens)
            if made.logged:
                meter = _Meter()
        last = step == stop_step
        flying = bool(flights)
        if not flying:
            yield from evals.make(step, [e for e in run.evals if _divides(e.every, step) or (last and e.every)])
        asked = controls.take_save_request() or asked
        if asked and saver is None:
            yield Warned(note_warning(
                "E-RUN-003", "SIGUSR1 asks for a checkpoint, but this run has no location for one",
                help="give --checkpoint-dir"))
            asked = False
        if flying:  # no boundary yet
            continue
        if last or asked or evals.better or _divides(run.checkpoint_every, step):
            yield from saves.begin(step, evals.left)
            asked = False
    flights.close()
    yield from saves.end(step, evals.left)
    if step >= stop_step and not evals.left:  # also when a signal fell in the last step: nothing is left to do
        yield Finished(step)
    else:
        yield Stopped(step, controls.stopping() or signal.SIGTERM, saver is not None)


class _Evals:
    """Makes the evaluations of a step. A stop that is asked for cuts them off where a checkpoint can say what is owed.

    `left`: those of the latest step that were not made; `better`: whether one of them improved the best.
    """

    def __init__(self, program: Program, run: Run, feeds: Feeds, controls: Controls, may_stop: bool, best: Keeps | None, clock: Any):
        self._program, self._feeds, self._best, self._clock = program, feeds, best, clock
        self._stopping = controls.stopping if may_stop else NoControls().stopping
        self.left: tuple[str, ...] = ()
        self.better = False

    def make(self, step: int, due: Sequence[Eval]) -> Iterator[Event]:
        self.better = False
        for i, evaluation in enumerate(due):
            yield PhaseChanged("evaluating", step)
            try:
                done = evaluate(self._program, evaluation, self._feeds.evals[evaluation.name], step, self._clock, self._stopping, self._feeds.join)
            except Halted:
                done = None
            if done is None:
                self.left = tuple(e.name for e in due[i:])
                return
            self.better = (self._best is not None and self._best.take(done)) or self.better
            yield done
            yield PhaseChanged("running", step)


class _Saves:
    """What the loop knows of its checkpoints. `covered`: the newest step that one holds or is being written with."""

    def __init__(self, saver: Saver | None, best: Keeps | None, durable_step: int | None):
        self._saver, self._best, self._covered = saver, best, durable_step

    def begin(self, step: int, owed: tuple[str, ...] = ()) -> Iterator[Event]:
        if self._saver is None:
            return
        yield PhaseChanged("saving", step)
        ended = self._saver.begin(step, owed)
        self._covered = step
        yield from self._told(ended)
        yield PhaseChanged("running", step)

    def poll(self) -> Iterator[Event]:
        if self._saver is not None:
            yield from self._told(self._saver.poll())

    def end(self, step: int, owed: tuple[str, ...]) -> Iterator[Event]:
        """The last step is durable when this ends, or its error is raised (exit 3)."""
        if self._saver is None:
            return
        if self._covered != step:
            yield from self.begin(step, owed)
        yield PhaseChanged("saving", step)
        yield from self._told(self._saver.finish(), must=step)
        yield PhaseChanged("running", step)

    def _told(self, outcomes: Sequence[Outcome], must: int | None = None) -> Iterator[Event]:
        """A checkpoint that fails is a warning, except the one that a run may not end without."""
        for outcome in outcomes:
            if outcome.saved is not None:
                if self._best is not None:
                    self._best.kept(outcome.step)
                yield outcome.saved
                continue
            assert outcome.error is not None
            if self._best is not None:
                self._best.lost(outcome.step)
            if outcome.step == self._covered:
                self._covered = None
            if outcome.step == must:
                raise outcome.error
            d = outcome.error.diagnostic
            yield Warned(note_warning(d.code, d.message, d.span, notes=d.notes, help=d.help))


def evaluate(program: Program, evaluation: Eval, feed: EvalBatches, step: int, clock: Callable[[], float] = time.perf_counter,
             stopping: Callable[[], int | None] = lambda: None, join: Join = _alone) -> EvalDone | None:
    """All batches once, in order; a metric is the sum of sums over the sum of counts (NaN over no samples).

    None if `stopping` gave a signal before the last batch.
    """
    start = clock()
    sums: dict[str, list[float]] = {}
    parts: list[Parts] = []
    for batch in feed:
        if stopping() is not None:
            return None
        parts.append({} if batch is None else program.evaluate(evaluation.name, batch))
    for part in join(evaluation, parts):
        for name, (total, count) in part.items():
            pair = sums.setdefault(name, [0.0, 0.0])
            pair[0] += total
            pair[1] += count
    metrics = {name: total / count if count else math.nan for name, (total, count) in sums.items()}
    return EvalDone(step, evaluation.name, evaluation.data.split, metrics, clock() - start)


def _divides(every: int | None, step: int) -> bool:
    """`every` None or 0 is never."""
    return every is not None and every > 0 and step % every == 0


def _not_finite(run: Run, step: int, result: StepResult, told: tuple[str, ...]) -> SexpError:
    fell = result.fell or ("loss" if not math.isfinite(result.loss) else "gradient norm")
    value = result.loss if fell == "loss" else result.gradient_norm
    return problem(
        "E-RUN-001",
        f"step {step}: the {fell} is {value:g}; the step changed nothing and the run stops",
        run.loss.span or run.span,
        notes=(f"loss {result.loss:g}, gradient norm {result.gradient_norm:g}, "
               f"updates made before: {step - 1}", *told),
        help=("a smaller learning rate or `:clip-norm 1.0` in the run often mends this" if step > 1 else
              "no update was made yet, so the learning rate is no cause: look at the first offending op and its operands",),
        exit_code=3,
    )
