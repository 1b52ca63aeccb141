"""One call of `sexpgpu run`: every mistake found before step 1, the loop, its listeners, and the exit code."""

from __future__ import annotations

import contextlib
import hashlib
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sexpgpu.diagnostics import Diagnostic, SexpError, SexpErrors, note_warning, out_of_memory
from sexpgpu.run.autopsy.examine import Case, examine
from sexpgpu.run.best import Best
from sexpgpu.run.bind import BoundData, bind
from sexpgpu.run.checkpoints.compare import Comparison, Identity, compare, refuse, same_trajectory
from sexpgpu.run.checkpoints.find import Choice, Wanted, absolute, choose, last_stamp, moved_on, refuse_taken
from sexpgpu.run.checkpoints.header import saved_schema
from sexpgpu.run.checkpoints.manifest import Manifest, trajectory_hash
from sexpgpu.run.checkpoints.store import Store, load
from sexpgpu.run.checkpoints.tensors import HostCopy
from sexpgpu.run.checkpoints.writer import Cancel, Writer
from sexpgpu.run.data.feed import Feed
from sexpgpu.run.disk import check_disk
from sexpgpu.run.events import Annotation, Failed, Finished, Listener, PhaseChanged, Saved, Started, Stopped, Warned
from sexpgpu.run.initial import Weights, component, fit, open_weights, start
from sexpgpu.run.loop import train
from sexpgpu.run.metrics import TargetSpec, open_targets, parse_targets
from sexpgpu.run.metrics.listener import MetricsListener
from sexpgpu.run.metrics.record import THROUGHPUT, lineage
from sexpgpu.run.metrics.target import Resume
from sexpgpu.run.options import RunOptions, RunPlan
from sexpgpu.run.plain import plain_knobs
from sexpgpu.run.program import Program, StepResult
from sexpgpu.run.progress import Tally, progress_for, say
from sexpgpu.run.ranks.follow import data_facts
from sexpgpu.run.signals import Halted, Interrupted, Signals, parse_duration
from sexpgpu.run.slug import head_of, new_run_id, new_slug, seconds_of, slug_head, stamp_of
from sexpgpu.run.status import StatusFile, spoken


def execute(options: RunOptions, plan: RunPlan, signals: Signals | None = None, status: StatusFile | None = None) -> int:
    """Runs `plan` to its end and returns the exit code: 0, 4, 130, 143, or 3 under `strict_metrics`.

    Raises SexpError for a mistake, whose `exit_code` is 2 before the first step and 3 after it; the caller renders
    it. `signals`: installed ones, where the caller took the signals over earlier; else this call does. `status`: the file,
    where the caller opened it earlier; it is closed here.
    """
    own = signals is None
    signals = Signals().install() if signals is None else signals
    session = _Session(options, plan, signals, status)
    try:
        return session.run()
    except Interrupted as stop:
        session.abandon()
        session.emit(Stopped(session.tally.step, stop.signum, False))
        if session.metrics is not None:
            session.metrics.hurry()
        return 128 + stop.signum
    except SexpError as error:
        raise session.failed(error) from None
    except Exception as error:
        if (memory := out_of_memory(error)) is not None:
            raise session.failed(memory) from None
        session.emit(Failed(session.tally.step, "", f"a bug of sexpgpu: {type(error).__name__}"))
        raise
    finally:
        session.close()
        if own:
            signals.restore()


class _Session:
    """What one run holds open. The steps of `run` are in the order in which they may fail."""

    def __init__(self, options: RunOptions, plan: RunPlan, signals: Signals, status: StatusFile | None = None):
        self.options, self.plan, self.signals = options, plan, signals
        self.stream = options.stream if options.stream is not None else sys.stderr
        self.tally = Tally()
        self.listeners: list[Listener] = [self.tally]
        self.status = status
        self.metrics: MetricsListener | None = None
        self.store: Store | None = None
        self.writer: Writer | None = None
        self.copy = HostCopy()
        self.parent: dict[str, Any] | None = None
        self.data: BoundData | None = None
        self.program: Program | None = None
        self.weights: Weights | None = None
        self.best: Best | None = None
        self.specs: tuple[TargetSpec, ...] = ()
        self.started = self.told = False
        self.run_id = self.slug = ""
        self.accepted: list[int] = []  # as in a manifest

    def run(self) -> int:
        options, plan = self.options, self.plan
        self.signals.limit(parse_duration(options.max_time) if options.max_time else None)
        self.specs = parse_targets(options.metrics, options.folder)
        self._open_status()
        if plan.team is not None:
            self._join(plan.team.member)
        while True:
            choice = self._choose()
            try:
                with self.signals.at_once():
                    self.data = data = self._bind(choice)
            except (Halted, Interrupted) as stop:
                return self._stopped_early(choice, stop)
            if choice.found is not None and choice.found.manifest.step >= plan.run.steps and not choice.found.manifest.owed:
                return self._nothing_to_do(choice)
            if self._hold(choice):
                break
            data.close()
        trajectory = dict(plan.trajectory) | {f"data {name}": d.digest for name, d in data.datasets.items()}
        manifest = choice.found.manifest if choice.found is not None else None
        if plan.run.init is not None and manifest is None:
            self.weights = open_weights(plan.run.init, self.note)
        trajectory |= component(plan.run, self.weights, manifest)
        if manifest is not None:
            trajectory = self._lineage(manifest, choice.fork, trajectory, data)
        self._open_metrics(choice, trajectory)
        if plan.team is not None:
            plan.team.member.meet("data", data_facts(data))
        if not options.quiet:
            self.listeners.append(progress_for(self.stream))
        if self.status is not None and self.status.rival is not None:
            self.emit(Warned(note_warning(
                "W-RUN-005", f"process {self.status.rival} writes the status file {self.status.path} too", help="give each run a --status of its own")))
        comparison = self._compile(choice, trajectory)
        if self.store is not None and self.program is not None:
            check_disk(self.store.url, self.program.schema(), plan.run.keep, plan.run.keep_best is not None, self.note)
        self._start(choice, comparison, trajectory)
        return self._loop(choice, data, trajectory)

    # -- before step 1

    def note(self, text: str) -> None:
        say(self.stream, text)

    def emit(self, event: Any) -> None:
        for listener in self.listeners:
            listener.on(event)

    def _open_status(self) -> None:
        if self.options.status and self.status is None:
            self.status = StatusFile(Path(self.options.folder) / self.options.status)
        if self.status is not None:
            self.listeners.append(self.status)
            self.status.note = self.note
            self.status.set(state="starting", run=self.plan.run.name, steps=self.plan.run.steps, step=0,
                            knobs=plain_knobs(self.plan.experiment.knobs))

    def _join(self, member: Any) -> None:
        """Heartbeats say what the run does; the status file, how every rank does."""
        self.listeners.append(member)
        if self.status is not None:
            member.on_table = lambda table: self.status.set(ranks=table) if self.status is not None else None
        member.on_end = self._ended

    def _ended(self, verdict: Any) -> None:
        """Called from the heartbeat's thread, the process about to end: another rank failed, and this one hangs in a collective."""
        failed = Failed(self.tally.step, verdict["code"], verdict["message"])
        for listener in (self.status, self.metrics):
            if listener is not None:
                listener.on(failed)
        if self.metrics is not None:
            self.metrics.close()

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
            self.run_id, self.slug, self.parent = manifest.run_id, manifest.slug, dict(manifest.parent) if manifest.parent else None
            if choice.fork:
                self.parent = {"run_id": manifest.run_id, "step": manifest.step, "digest": manifest.digest}
                self.run_id, self.slug = new_run_id(), self._new_slug(base, heads)
                self.note(f"{self.slug} is a fork of {manifest.slug} at step {manifest.step}")
            elif head_of(self.slug) not in heads:
                self.note(f"the run keeps its name {self.slug}, although its base would now be {base}")
        else:
            self.run_id = new_run_id()
            self.slug = self._new_slug(base, heads)
        if choice.location is not None:
            choice = replace(choice, location=choice.location.replace("{slug}", self.slug))
        if self.status is not None:
            self.status.set(slug=self.slug, run_id=self.run_id, checkpoint=self._status_checkpoint(choice))
        return choice

    def _lineage(self, manifest: Manifest, fork: bool, trajectory: dict[str, str], data: BoundData) -> dict[str, str]:
        """The trajectory, in the checkpoint's words where it is that one; `accepted` gets the step where it is not."""
        same = same_trajectory(manifest, trajectory, data.digests())
        if not fork:
            self.accepted = [*manifest.accepted, *([] if same else [manifest.step])]
        return dict(manifest.trajectory) if same else trajectory

    def _hold(self, choice: Choice) -> bool:
        """Makes this process the location's only writer. False: another one wrote on there until now, so that a
        resume has to be chosen again."""
        if choice.location is None:
            return True
        self.store = store = Store(choice.location, {"run_id": self.run_id, "slug": self.slug}, self.note)
        if choice.fork or self.options.resume is None:
            refuse_taken(choice.location)  # again, now that nobody else can write there
        elif moved_on(choice):
            self.note(f"{choice.location} was written to until now: looking again")
            store.close()
            self.store = None
            return False
        return True

    def _first(self, choice: Choice) -> int:
        """Updates that are made already."""
        return choice.found.manifest.step if choice.found is not None else 0

    def _stopped_early(self, choice: Choice, stop: Halted | Interrupted) -> int:
        """Before the first step, while data were read: what a resume began from is as durable as it was."""
        signum = stop.signum if isinstance(stop, Interrupted) else self.signals.stopping() or signal.SIGTERM
        durable = choice.found is not None and not choice.fork and choice.location is not None
        self.note("stopped while data were read, before the first step")
        self.emit(Stopped(self._first(choice), signum, durable))
        return 4 if durable else 128 + signum

    def _new_slug(self, base: str, heads: tuple[str, ...]) -> str:
        """Of a run that begins: later than those that are there, so that `latest` never takes an older run for it."""
        location, plan = self.options.checkpoint_dir or "", self.plan
        after = last_stamp(absolute(location, self.options.folder), heads) if "{slug}" in location else ""
        slug = new_slug(base, plan.run.name, plan.several_runs, after=after)
        if after and (ahead := seconds_of(stamp_of(slug)) - time.time()) > 60:
            self.note(f"note: a run in {location} is named after a time {spoken(ahead)} from now; is this machine's clock right? "
                      f"This one is {slug}")
        return slug

    def _status_checkpoint(self, choice: Choice) -> dict[str, Any] | None:
        if choice.found is not None and not choice.fork:
            return {"location": choice.found.location, "step": choice.found.manifest.step, "durable": True}
        if choice.location is not None:
            return {"location": choice.location, "step": None, "durable": False}
        return None

    def _nothing_to_do(self, choice: Choice) -> int:
        assert choice.found is not None
        step, steps = choice.found.manifest.step, self.plan.run.steps
        made = f"all {steps} steps" if step == steps else f"{step} steps, and {steps} are asked for"
        self.note(f"{choice.found.manifest.slug} has made {made}: nothing is left to do")
        self.emit(Finished(step))
        return 0

    def _open_metrics(self, choice: Choice, trajectory: dict[str, str]) -> None:
        if not self.specs:
            return
        resume, digest = None, trajectory_hash(trajectory)
        if choice.found is not None and not choice.fork:
            resume = Resume(choice.found.manifest.step, lineage(digest, self.accepted))
        targets = open_targets(self.specs, self.run_id, resume, service=self.options.service, slug=self.slug)
        self.metrics = MetricsListener(targets, {
            "run_id": self.run_id, "slug": self.slug, "run": self.plan.run.name,
            "knobs": plain_knobs(self.plan.experiment.knobs), "ir_hash": self.plan.ir_hash,
            "versions": dict(self.plan.versions), "trajectory": digest, "accepted": self.accepted, "throughput": THROUGHPUT})
        self.listeners.append(self.metrics)

    def _compile(self, choice: Choice, trajectory: dict[str, str]) -> Comparison:
        """The program with its first state; a checkpoint is compared with it before a tensor is read."""
        self.emit(PhaseChanged("compiling", choice.found.manifest.step if choice.found else 0))
        self.program = program = self.plan.compile()
        if self.status is not None:
            self.status.set(device=program.device)
        if self.metrics is not None:
            self.metrics.know(device=program.device)
        if choice.found is None:
            names = fit(self.weights, program.schema(), self.note) if self.weights is not None else {}
            if self.plan.team is not None:
                self._meet(choice, self.weights is not None)
            program.initialise()
            if self.weights is not None:
                start(program, self.weights, names)
                if self.plan.team is not None:
                    program.share(program.state(), 0)
            return Comparison()
        found = choice.found
        if (take := getattr(program, "take_kernels", None)) is not None:  # a device's, before anything is measured
            take(found.manifest.kernels)
        comparison = compare(found.manifest, self._identity(program, trajectory), saved_schema(found), program.schema())
        refuse(comparison, found.folder, self.options.accept)
        if self.plan.team is not None:
            self._meet(choice, True)
            program.share(load(found), found.manifest.step)
            return comparison
        program.load(load(found), found.manifest.step)
        return comparison

    def _bind(self, choice: Choice) -> BoundData:
        plan, team = self.plan, self.plan.team
        if team is None:
            return bind(plan.run, plan.bounds, self.note, self._first(choice), self.signals.stopping)
        return bind(plan.run, plan.bounds, self.note, self._first(choice), self.signals.stopping, team.place.rank, plan.ranks)

    def _meet(self, choice: Choice, shared: bool) -> None:
        """Lets the other ranks know where the run begins and what it keeps. `shared`: they are to take this rank's state."""
        found = choice.found.manifest if choice.found is not None else None
        durable = None if found is None or choice.fork or self.store is None else found.step
        self.plan.team.member.meet("state", {
            "_step": self._first(choice), "_keeps": self.store is not None, "_shared": shared, "_gathers": shared and found is None,
            "_owed": list(found.owed) if found is not None else [], "_durable": durable,
            "_best": found.best if found is not None and not choice.fork else None})

    def _identity(self, program: Program, trajectory: dict[str, str]) -> Identity:
        plan = self.plan
        return Identity(plan.run.name, trajectory, plain_knobs(plan.experiment.knobs),
                        {text["name"]: text["sha256"] for text in self._texts()}, plan.versions, program.device, plan.ranks,
                        program.threads, plan.run.steps, self.data.digests() if self.data is not None else {},
                        {text["name"]: text["text"] for text in self._texts()}, self._shard())

    def _shard(self) -> str:
        """What is divided over ranks, in the word of a manifest."""
        return "optimizer" if self.plan.run.shard and self.plan.ranks > 1 else ""

    def _start(self, choice: Choice, comparison: Comparison, trajectory: dict[str, str]) -> None:
        step, resumed = 0, choice.found is not None
        if choice.found is not None:
            step = choice.found.manifest.step
            self.note(f"resuming {choice.found.manifest.slug} after step {step}, from {choice.found.folder}")
        for line in comparison.harmless + comparison.changing:
            self.note(f"  {line}")
        if choice.found is not None and not comparison.changing and max(choice.found.manifest.ranks, self.plan.ranks) > 1:
            self.note(f"  the numbers go on {'within float tolerance' if comparison.inexact else 'bit for bit'}")
        self.emit(Started(step, self.plan.run.steps, resumed, step if comparison.changing else None, comparison.changing))
        self.started = True
        if comparison.inexact:
            self.emit(Annotation(f"not bit-exact: {'; '.join(comparison.inexact)}", {"kind": "resume"}))

    # -- the loop and its end

    def _loop(self, choice: Choice, data: BoundData, trajectory: dict[str, str]) -> int:
        assert self.program is not None
        first = self._first(choice)
        owed: tuple[str, ...] = ()
        durable = None
        if self.store is not None:
            self.copy.prepare(self.program.state())
            self.writer = Writer(lambda step, left: self._saving(step, left, data, trajectory), self._durable)
            if self.plan.run.keep_best is not None:
                self.best = Best(self.plan.run.keep_best, choice.found.manifest.best if choice.found and not choice.fork else None)
        if choice.found is not None:
            owed = tuple(choice.found.manifest.owed)
            durable = None if choice.fork or self.store is None else first
        code, team = 0, self.plan.team
        feeds, controls, best = (data.feeds, self.signals, self.best) if team is None else (team.feeds(data.feeds, data.waits), team.controls(self.signals), team.best(self.best))
        for event in train(self.program, self.plan.run, feeds, first, self.plan.run.steps, controls=controls,
                           saver=self.writer, durable_step=durable, best=best, owed=owed, autopsy=self._autopsy):
            self.emit(event)
            if isinstance(event, Stopped):
                code = 4 if event.durable else 128 + event.signal
        if team is not None:
            controls.settle()
            team.collectives.wait_for_all()
        if self.metrics is not None:
            self.metrics.close()  # before the summary, which says where the experiment is
        self._summarise(code)
        return self._troubles(code)

    def _saving(self, step: int, owed: tuple[str, ...], data: BoundData, trajectory: dict[str, str]) -> Callable[[Cancel], Saved]:
        """Copies the state and fills in the manifest now; what it returns writes them, on another thread."""
        plan, program, store, begin = self.plan, self.program, self.store, time.monotonic()
        assert program is not None and store is not None
        epoch, index = data.feeds.train.cursor(step)
        state = self.copy.take(program.state())
        manifest = Manifest(
            run_id=self.run_id, slug=self.slug, run=plan.run.name, step=step, cursor={"epoch": epoch, "index": index},
            seed=plan.run.seed, knobs=plain_knobs(plan.experiment.knobs), ir_hash=plan.ir_hash, program=self._texts(),
            data=data.digests(), versions=dict(plan.versions), device=program.device, ranks=plan.ranks, threads=program.threads,
            kernels={**plan.kernels, **_choices(program)}, trajectory=trajectory, trajectory_hash=trajectory_hash(trajectory), digest="",
            health="healthy", files=[], parent=self.parent, steps=plan.run.steps,
            best=self.best.record() if self.best is not None else None, owed=list(owed), accepted=self.accepted,
            shard=self._shard())

        def write(cancel: Cancel) -> Saved:
            health = store.save(state, manifest, plan.run.keep, cancel)
            return Saved(step, store.url, health, time.monotonic() - begin)

        return write

    def _durable(self, saved: Saved) -> None:
        """The status file says so at once, not only at the next step."""
        if self.status is not None:
            self.status.on(saved)

    def _autopsy(self, step: int, result: StepResult) -> tuple[str, ...]:
        """What is known of a step that was not finite; on the way to another error, so nothing may come of its own."""
        if self.program is None or self.data is None:
            return ()
        team, feed, state = self.plan.team, self.data.feeds.train, self.program.state()
        if team is not None:
            team.member.phase("autopsy")
            feed = self.data.whole() if self.data.whole is not None else feed
        told = () if self.plan.step_graphs is None else self._replay(step, state, feed)
        if team is not None:
            team.collectives.wait_for_all()
        return told

    def _replay(self, step: int, state: Mapping[str, Any], feed: Feed) -> tuple[str, ...]:
        self.note(f"step {step} is not finite; replaying it op by op to see why")
        places = [] if self.status is None else [self.status.path.parent]
        if self.store is not None and "://" not in self.store.url:
            places.append(Path(self.store.url))
        return examine(Case(self.plan, self.slug, step, state, feed, self.options.with_data), places)

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
        places += [("experiment", page) for page in (self.metrics.pages() if self.metrics is not None else [])]
        if self.status is not None:
            places.append(("status", str(self.status.path)))
        if code == 4:
            command = options.command or f"sexpgpu run {shlex.quote(self.plan.experiment.file)}"
            where = shlex.quote(options.checkpoint_dir or "")
            places.append(("resume", f"{command} --checkpoint-dir {where} --resume latest"))
        return places

    def _tell_metrics(self) -> list[str]:
        """Ends the metrics, which is bounded, and says once, however the run ended, what was not delivered."""
        metrics = self.metrics
        if metrics is None or self.told:
            return []
        metrics.close()
        self.told = True
        for note in metrics.notes():
            self.note(f"note: {note}")
        for trouble in metrics.troubles():
            self.note(f"warning: not every metric was delivered: {trouble}")
        return metrics.troubles()

    def _troubles(self, code: int) -> int:
        troubles = self._tell_metrics()
        if self.status is not None and self.status.trouble:
            self.note(f"warning: the status file was not written at the end: {self.status.trouble}")
        return 3 if troubles and self.options.strict_metrics else code

    def _end_progress(self) -> None:
        for listener in self.listeners:
            if listener not in (self.status, self.metrics):
                listener.close()

    def abandon(self) -> None:
        """The process ends at once: a checkpoint in flight is not waited for, and commits nothing any more."""
        if self.writer is not None:
            self.writer.close(at_once=True)

    def close(self) -> None:
        """Whatever happened: a mistake in closing one thing does not keep the others open."""
        if self.writer is not None:
            self.writer.close()
        self._end_progress()
        with contextlib.suppress(OSError):
            self._tell_metrics()
        for thing in (self.data, self.status, self.store, self.program):
            if thing is not None:
                with contextlib.suppress(OSError):
                    thing.close()


def _choices(program: Program) -> dict[str, Any]:
    """What the program measured and chose, where it does."""
    found = getattr(program, "kernels", None)
    return dict(found()) if found is not None else {}


def _after_start(error: SexpError) -> SexpError:
    changed: list[Diagnostic] = [replace(d, exit_code=3) for d in error.diagnostics]
    return SexpErrors(changed) if len(changed) > 1 else SexpError(changed[0])
