"""One call of `sexpgpu run`: every mistake found before step 1, the loop, its listeners, and the exit code."""

from __future__ import annotations

import contextlib
import hashlib
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from sexpgpu.diagnostics import Diagnostic, SexpError, SexpErrors, problem
from sexpgpu.run.best import Best
from sexpgpu.run.bind import BoundData, bind
from sexpgpu.run.checkpoints.compare import Comparison, Identity, compare, refuse
from sexpgpu.run.checkpoints.find import Choice, Wanted, choose
from sexpgpu.run.checkpoints.manifest import Manifest, trajectory_hash
from sexpgpu.run.checkpoints.store import load, save, saved_schema
from sexpgpu.run.events import Annotation, Failed, Finished, Listener, PhaseChanged, Saved, Started, Stopped
from sexpgpu.run.initial import Weights, component, fit, open_weights, start
from sexpgpu.run.loop import train
from sexpgpu.run.metrics import TargetSpec, open_targets, parse_targets
from sexpgpu.run.metrics.listener import MetricsListener
from sexpgpu.run.metrics.target import Resume
from sexpgpu.run.options import RunOptions, RunPlan
from sexpgpu.run.plain import plain_knobs
from sexpgpu.run.program import Program
from sexpgpu.run.progress import Tally, progress_for, say
from sexpgpu.run.signals import Interrupted, Signals, parse_duration
from sexpgpu.run.slug import head_of, new_run_id, new_slug, slug_head
from sexpgpu.run.status import StatusFile
from sexpgpu.run.storage import open_store
from sexpgpu.run.storage.file import FileStore


def execute(options: RunOptions, plan: RunPlan, signals: Signals | None = None) -> int:
    """Runs `plan` to its end and returns the exit code: 0, 4, 130, 143, or 3 under `strict_metrics`.

    Raises SexpError for a mistake, whose `exit_code` is 2 before the first step and 3 after it; the caller renders
    it. `signals`: installed ones, where the caller took the signals over earlier; else this call does.
    """
    own = signals is None
    signals = Signals().install() if signals is None else signals
    session = _Session(options, plan, signals)
    try:
        return session.run()
    except Interrupted as stop:
        session.emit(Stopped(session.tally.step, stop.signum, False))
        return 128 + stop.signum
    except SexpError as error:
        raise session.failed(error) from None
    except Exception as error:
        if _is_memory(error):
            raise session.failed(problem("E-RUN-030", "the machine's memory is used up")) from None
        session.emit(Failed(session.tally.step, "", f"a bug of sexpgpu: {type(error).__name__}"))
        raise
    finally:
        session.close()
        if own:
            signals.restore()


class _Session:
    """What one run holds open. The steps of `run` are in the order in which they may fail."""

    def __init__(self, options: RunOptions, plan: RunPlan, signals: Signals):
        self.options, self.plan, self.signals = options, plan, signals
        self.stream = options.stream if options.stream is not None else sys.stderr
        self.tally = Tally()
        self.listeners: list[Listener] = [self.tally]
        self.status: StatusFile | None = None
        self.metrics: MetricsListener | None = None
        self.store: FileStore | None = None
        self.program: Program | None = None
        self.weights: Weights | None = None
        self.best: Best | None = None
        self.specs: tuple[TargetSpec, ...] = ()
        self.started = False
        self.run_id = self.slug = ""

    def run(self) -> int:
        options, plan = self.options, self.plan
        self.signals.limit(parse_duration(options.max_time) if options.max_time else None)
        self.specs = parse_targets(options.metrics, options.folder)
        self._open_status()
        choice = self._choose()
        data = bind(plan.run, plan.bounds, self.note)
        if choice.found is not None and choice.found.manifest.step >= plan.run.steps:
            return self._nothing_to_do(choice)
        trajectory = dict(plan.trajectory) | {f"data {name}": d.digest for name, d in data.datasets.items()}
        manifest = choice.found.manifest if choice.found is not None else None
        if plan.run.init is not None and manifest is None:
            self.weights = open_weights(plan.run.init, self.note)
        trajectory |= component(plan.run, self.weights, manifest)
        if choice.location is not None:
            self.store = open_store(choice.location)
        self._open_metrics(choice, trajectory)
        if not options.quiet:
            self.listeners.append(progress_for(self.stream))
        comparison = self._compile(choice, trajectory)
        self._start(choice, comparison, trajectory)
        return self._loop(choice, data, trajectory)

    # -- before step 1

    def note(self, text: str) -> None:
        say(self.stream, text)

    def emit(self, event: Any) -> None:
        for listener in self.listeners:
            listener.on(event)

    def _open_status(self) -> None:
        if self.options.status:
            self.status = StatusFile(Path(self.options.folder) / self.options.status)
            self.listeners.append(self.status)
            self.status.set(run=self.plan.run.name, steps=self.plan.run.steps, step=0,
                            knobs=plain_knobs(self.plan.experiment.knobs))

    def _choose(self) -> Choice:
        """The checkpoint to go on from, the location with its slug filled in, and the run's names."""
        plan, options = self.plan, self.options
        base = options.slug_base or Path(plan.experiment.file).stem
        heads = tuple(slug_head(base, plan.run.name, several) for several in (False, True))
        choice = choose(Wanted(options.resume, options.checkpoint_dir, options.folder, heads, plan.run.name))
        for line in choice.notes:
            self.note(line)
        if choice.found is not None:
            manifest = choice.found.manifest
            self.run_id, self.slug = manifest.run_id, manifest.slug
            if head_of(self.slug) not in heads:
                self.note(f"the run keeps its name {self.slug}, although its base would now be {base}")
        else:
            self.run_id = new_run_id()
            self.slug = new_slug(base, plan.run.name, plan.several_runs)
        if choice.location is not None:
            choice = replace(choice, location=Path(str(choice.location).replace("{slug}", self.slug)))
        if self.status is not None:
            self.status.set(slug=self.slug, run_id=self.run_id, checkpoint=self._status_checkpoint(choice))
        return choice

    def _status_checkpoint(self, choice: Choice) -> dict[str, Any] | None:
        if choice.found is not None:
            return {"location": str(choice.found.location), "step": choice.found.manifest.step, "durable": True}
        if choice.location is not None:
            return {"location": str(choice.location), "step": None, "durable": False}
        return None

    def _nothing_to_do(self, choice: Choice) -> int:
        assert choice.found is not None
        step = choice.found.manifest.step
        self.note(f"{self.slug} has made {step} of {self.plan.run.steps} steps: nothing is left to do")
        self.emit(Finished(step))
        return 0

    def _open_metrics(self, choice: Choice, trajectory: dict[str, str]) -> None:
        if not self.specs:
            return
        resume = None
        if choice.found is not None:
            same = choice.found.manifest.trajectory_hash == trajectory_hash(trajectory)
            resume = Resume(choice.found.manifest.step, same)
        targets = open_targets(self.specs, self.run_id, resume)
        self.metrics = MetricsListener(targets, {
            "run_id": self.run_id, "slug": self.slug, "run": self.plan.run.name,
            "knobs": plain_knobs(self.plan.experiment.knobs), "ir_hash": self.plan.ir_hash,
            "versions": dict(self.plan.versions)})
        self.listeners.append(self.metrics)

    def _compile(self, choice: Choice, trajectory: dict[str, str]) -> Comparison:
        """The program with its first state; a checkpoint is compared with it before a tensor is read."""
        self.emit(PhaseChanged("compiling", choice.found.manifest.step if choice.found else 0))
        self.program = program = self.plan.compile()
        if self.status is not None:
            self.status.set(device=program.device)
        if choice.found is None:
            names = fit(self.weights, program.schema(), self.note) if self.weights is not None else {}
            program.initialise()
            if self.weights is not None:
                start(program, self.weights, names)
            return Comparison()
        found = choice.found
        comparison = compare(found.manifest, self._identity(program, trajectory), saved_schema(found), program.schema())
        refuse(comparison, str(found.folder), self.options.accept)
        program.load(load(found), found.manifest.step)
        return comparison

    def _identity(self, program: Program, trajectory: dict[str, str]) -> Identity:
        plan = self.plan
        return Identity(plan.run.name, trajectory, plain_knobs(plan.experiment.knobs),
                        {text["name"]: text["sha256"] for text in self._texts()}, plan.versions, program.device, 1,
                        program.threads, plan.run.steps)

    def _start(self, choice: Choice, comparison: Comparison, trajectory: dict[str, str]) -> None:
        step, resumed = 0, choice.found is not None
        if choice.found is not None:
            step = choice.found.manifest.step
            self.note(f"resuming {self.slug} after step {step}, from {choice.found.folder}")
        for line in comparison.harmless + comparison.changing:
            self.note(f"  {line}")
        self.emit(Started(step, self.plan.run.steps, resumed, step if comparison.changing else None))
        self.started = True
        if comparison.inexact:
            self.emit(Annotation(f"not bit-exact: {'; '.join(comparison.inexact)}", {"kind": "resume"}))

    # -- the loop and its end

    def _loop(self, choice: Choice, data: BoundData, trajectory: dict[str, str]) -> int:
        assert self.program is not None
        first = choice.found.manifest.step if choice.found else 0
        writer = None
        if self.store is not None:
            def writer(step: int) -> Saved:
                return self._save(step, data, trajectory)
            if self.plan.run.keep_best is not None:
                self.best = Best(self.plan.run.keep_best, choice.found.manifest.best if choice.found else None)
        durable = first if choice.found is not None and self.store is not None else None
        code = 0
        for event in train(self.program, self.plan.run, data.feeds, first, self.plan.run.steps,
                           controls=self.signals, save=writer, durable_step=durable, best=self.best):
            self.emit(event)
            if isinstance(event, Stopped):
                code = 4 if event.durable else 128 + event.signal
        self._summarise(code)
        return self._troubles(code)

    def _save(self, step: int, data: BoundData, trajectory: dict[str, str]) -> Saved:
        plan, program, begin = self.plan, self.program, time.monotonic()
        assert program is not None and self.store is not None
        epoch, index = data.feeds.train.cursor(step)
        manifest = Manifest(
            run_id=self.run_id, slug=self.slug, run=plan.run.name, step=step, cursor={"epoch": epoch, "index": index},
            seed=plan.run.seed, knobs=plain_knobs(plan.experiment.knobs), ir_hash=plan.ir_hash, program=self._texts(),
            data=data.digests(), versions=dict(plan.versions), device=program.device, ranks=1, threads=program.threads,
            kernels=dict(plan.kernels), trajectory=trajectory, trajectory_hash=trajectory_hash(trajectory), digest="",
            health="healthy", files=[], steps=plan.run.steps,
            best=self.best.record() if self.best is not None else None)
        health = save(self.store, program.state(), manifest, plan.run.keep)
        return Saved(step, str(self.store.root), health, time.monotonic() - begin)

    def _texts(self) -> list[dict[str, str]]:
        return [{"name": t.name, "text": t.text, "sha256": hashlib.sha256(t.text.encode()).hexdigest()}
                for t in self.plan.experiment.texts]

    def failed(self, error: SexpError) -> SexpError:
        """Tells the listeners; after the first step every mistake has exit code 3."""
        if self.started:
            error = _after_start(error)
        d = error.diagnostic
        self.emit(Failed(self.tally.step, d.code, d.message, d.span.place if d.span else None))
        return error

    def _summarise(self, code: int) -> None:
        if self.options.quiet:
            return
        word = "done" if code == 0 else "stopped"
        headline = f"{self.slug}: {word} at step {self.tally.step} of {self.plan.run.steps},"
        self._end_progress()
        self.note(self.tally.summary(headline, self._places(code)))

    def _places(self, code: int) -> list[tuple[str, str]]:
        options, places = self.options, []
        if self.tally.saved is not None:
            places.append(("checkpoint", f"{self.tally.saved.location}/step-{self.tally.saved.step}"))
            best = self.best.record() if self.best is not None else None
            if best is not None:
                places.append(("best", f"step-{best['step']} ({best['eval']} {best['metric']} {best['value']:.4g})"))
        elif self.store is None:
            places.append(("checkpoint", "none (give --checkpoint-dir to keep the weights)"))
        texts = [spec.text for spec in self.specs] or ["none (--metrics jsonl:metrics.jsonl)"]
        places += [("metrics", text) for text in texts]
        if self.status is not None:
            places.append(("status", str(self.status.path)))
        if code == 4:
            command = options.command or f"sexpgpu run {shlex.quote(self.plan.experiment.file)}"
            where = shlex.quote(options.checkpoint_dir or "")
            places.append(("resume", f"{command} --checkpoint-dir {where} --resume latest"))
        return places

    def _troubles(self, code: int) -> int:
        troubles = self.metrics.troubles() if self.metrics is not None else []
        for trouble in troubles:
            self.note(f"warning: not every metric was delivered: {trouble}")
        if self.status is not None and self.status.trouble:
            self.note(f"warning: the status file was not written at the end: {self.status.trouble}")
        return 3 if troubles and self.options.strict_metrics else code

    def _end_progress(self) -> None:
        for listener in self.listeners:
            if listener not in (self.status, self.metrics):
                listener.close()

    def close(self) -> None:
        """Whatever happened: a mistake in closing one thing does not keep the others open."""
        self._end_progress()
        for thing in (self.metrics, self.status, self.store, self.program):
            if thing is not None:
                with contextlib.suppress(OSError):
                    thing.close()


def _is_memory(error: Exception) -> bool:
    """torch's CPU allocator has no exception of its own: a RuntimeError that says so."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "allocate memory" in str(error))


def _after_start(error: SexpError) -> SexpError:
    changed: list[Diagnostic] = [replace(d, exit_code=3) for d in error.diagnostics]
    return SexpErrors(changed) if len(changed) > 1 else SexpError(changed[0])
