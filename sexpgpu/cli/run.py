"""`sexpgpu run`: flags into settings and options, then `start` hands over to the compiler and the run loop."""

from __future__ import annotations

import os
import shlex
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from sexpgpu.cli import device, output, threads
from sexpgpu.diagnostics import SexpError, fail, out_of_memory
from sexpgpu.settings import Settings, load, natural, positive, require

#: what a run calls -> where it is: imported when the run begins, and `session`, which brings torch, last of all
STAGES = {
    "compiler": "sexpgpu.compiler",
    "selection": "sexpgpu.experiment.load:Selection",
    "duration": "sexpgpu.run.signals:parse_duration",
    "signals": "sexpgpu.run.signals:Signals",
    "interrupted": "sexpgpu.run.signals:Interrupted",
    "head": "sexpgpu.run.slug:slug_head",
    "wanted": "sexpgpu.run.checkpoints.find:Wanted",
    "stored threads": "sexpgpu.run.checkpoints.find:stored_threads",
    "grant": "sexpgpu.run.storage:grant",
    "warm": "sexpgpu.run.storage:warm",
    "options": "sexpgpu.run.options:RunOptions",
    "plan": "sexpgpu.run.options:RunPlan",
    "bound": "sexpgpu.run.data.dataset:FieldBound",
    "service": "sexpgpu.run.metrics.target:service_of",
    "measured": "sexpgpu.run.measure:measured",
    "status": "sexpgpu.run.status:StatusFile",
    "failed": "sexpgpu.run.status:failed_event",
    "execute": "sexpgpu.run.session:execute",
    "kernels": "sexpgpu.backends.cuda.report:program_lines",
    "calls": "sexpgpu.backends.interpreter.report:report_lines",
    "memory": "sexpgpu.explain.memory",
    "place": "sexpgpu.run.ranks.layout:taken_place",
    "layout": "sexpgpu.run.ranks.layout:layout_of",
    "refuse_both": "sexpgpu.run.ranks.layout:refuse_both",
    "member": "sexpgpu.run.ranks.member:Member",
    "deadlines": "sexpgpu.run.ranks.judge:deadlines",
    "job": "sexpgpu.run.ranks.supervisor:Job",
    "supervise": "sexpgpu.run.ranks.supervisor:supervise",
    "settle": "sexpgpu.run.collector:settle",
    "facts": "sexpgpu.run.ranks.team:facts_of",
    "join": "sexpgpu.run.ranks.team:join",
    "texts": "sexpgpu.run.ranks.team:text_facts",
    "follow": "sexpgpu.run.ranks.follow:follow",
}


@dataclass(frozen=True)
class Arguments:
    """A command line of `run`, checked. `sets` and `max_time` as written."""

    file: str
    run: str | None
    variant: str | None
    sets: tuple[str, ...]
    steps: int | None
    eval_every: int | None
    max_time: str | None
    accept: bool
    strict_metrics: bool
    settings: Settings
    dry_run: bool = False
    with_data: bool = False
    member: Any = None  # of a rank among several: its line to the supervisor

    @property
    def ranks(self) -> int:
        return 1 if self.member is None else int(self.member.place.ranks)


def stage(name: str) -> Any:
    """A stage by its name in the table."""
    module, _, attribute = STAGES[name].partition(":")
    found = import_module(module)
    return getattr(found, attribute) if attribute else found


def selection(
    settings: Settings,
    variant: str | None,
    sets: tuple[str, ...],
    steps: int | None = None,
    eval_every: int | None = None,
) -> Any:
    """What the command line chose of a file, as the compiler takes it."""
    return stage("selection")(
        variant=variant,
        sets=sets,
        steps=steps,
        eval_every=eval_every,
        diagnostics=settings.diagnostics,
        diagnostics_via=settings.of("diagnostics").via,
        limit=settings.eval_limit,
    )


def start(arguments: Arguments) -> int:
    """Compile, choose threads, import torch, train. The exit code. Signals are ours from here on, in every phase."""
    if arguments.max_time is not None:
        stage("duration")(arguments.max_time)
    signals = stage("signals")().install()
    try:
        return rehearse(arguments, signals) if arguments.dry_run else _start(arguments, signals)
    except stage("interrupted") as stop:
        return 128 + int(stop.signum)
    finally:
        signals.restore()


def _start(arguments: Arguments, signals: Any) -> int:
    """The status file, if there is to be one, says how it stands from here on: reading a large program takes its time."""
    path = arguments.settings.status
    if not path:
        return _compile_and_execute(arguments, signals, None)
    status = stage("status")(path)
    try:
        status.set(state="compiling")
        return _compile_and_execute(arguments, signals, status)
    except SexpError as error:
        status.on(stage("failed")(error))
        raise
    except stage("interrupted"):
        status.set(state="stopped")
        raise
    except Exception as error:
        bug = {"code": None, "message": f"a bug of sexpgpu: {type(error).__name__}", "place": None}
        status.set(state="failed", error=bug)
        raise
    finally:
        status.close()


def _compile_and_execute(arguments: Arguments, signals: Any, status: Any) -> int:
    settings, compiler = arguments.settings, stage("compiler")
    if arguments.member is not None:
        arguments.member.phase("compiling")
    place = None if arguments.member is None else arguments.member.place.device
    loaded = compiler.load(
        arguments.file,
        selection(settings, arguments.variant, arguments.sets, arguments.steps, arguments.eval_every),
    )
    output.report(loaded.experiment.warnings)
    chosen = compiler.choose_run(loaded.experiment, arguments.run)
    compiler.check_divides(chosen, arguments.ranks)
    waking = device.wake(settings, place)  # not for a file with a mistake, whose message would be there while the command waits for the driver
    if any(batches.source.location.startswith("s3://") for batches in (chosen.data, *(e.data for e in chosen.evals))):
        stage("warm")("data")
    with signals.at_once():
        run = stage("measured")(chosen, output.say)
    traced = compiler.train_graph(loaded, run)
    compiler.check_evals(loaded, run, traced)
    output.report(traced.warnings)
    operations = compiler.flops(compiler.whole_step(traced, logged=False))
    member, ranks = arguments.member, arguments.ranks
    known = None if member is not None and member.place.rank else stored(settings, loaded.experiment.file, run.name)
    count = threads.prepare(os.environ, operations // ranks, known, 1 if member is None else member.place.each)
    opened = device.begin(settings, run.deterministic, run.deterministic_at, place, waking)
    if member is None or not member.place.rank:
        check_memory(loaded, run, settings, count, ranks)
    planned = plan(loaded, run, traced, count, settings, arguments.sets, opened)
    output.report(compiler.mixes(traced, run, ranks))
    if ranks > 1:
        planned = among(planned, loaded, chosen, count, settings, member, opened)
        if member.place.rank:
            return stage("follow")(planned, signals)
    try:
        return stage("execute")(options(arguments), planned, signals, status)
    except SexpError as error:
        raise compiler.with_largest(error, traced) from None


def among(planned: Any, loaded: Any, chosen: Any, count: int, settings: Settings, member: Any, opened: Any = None) -> Any:
    """The plan as one of several ranks has it: met with the others, its program over a part of the batch."""
    compiler, ranks = stage("compiler"), member.place.ranks
    facts = stage("facts")(planned, member.place, settings.device, settings.node_gradients)
    team = stage("join")(member.place, member, facts, device.speaks(opened), settings.node_gradients, count)
    data = replace(chosen.data, parts=chosen.accumulate * ranks)
    run = stage("measured")(replace(chosen, data=data))
    graphs = None if data.source.structures else planned.step_graphs  # packed again for one rank, a batch is of other sizes
    more = {} if opened is None else at_device(settings, opened)

    def build() -> Any:
        program = compiler.program(compiler.stages(loaded, run, settings.device, ranks), settings.device, team.threads, team=team.collectives, **more)
        if not member.place.rank:
            show_kernels(program, settings, ranks)
        return program

    return replace(planned, run=run, team=team, step_graphs=graphs, compile=build)


def at_device(settings: Settings, opened: Any) -> dict[str, Any]:
    """What a GPU's program takes more than the CPU's."""
    return {"opened": opened, "budget": None if settings.memory is None else int(settings.memory * 2**30)}


def show_kernels(program: Any, settings: Settings, ranks: int = 1) -> None:
    """`SEXPGPU_EXPLAIN=kernels`: the launches of the program, or the interpreter's calls."""
    if settings.explain == "kernels":
        output.say("\n".join(stage("kernels")(program) if settings.device == "cuda" else stage("calls")(program.staged, ranks)))


def check_memory(loaded: Any, run: Any, settings: Settings, count: int, ranks: int) -> None:
    """E-MEM-002 where the interpreter's plan is over SEXPGPU_MEMORY; on a GPU the program itself says so."""
    if settings.memory is None or settings.device != "cpu":
        return
    memory = stage("memory")
    planned = lambda other: memory.planned(loaded, other, "cpu", count, ranks)  # noqa: E731
    found = planned(run)
    fitting = memory.fits(found, run, settings.memory * 2**30, planned, ranks)
    if not fitting.fits:
        raise memory.refuse(fitting, found, settings.of("memory").via)


REHEARSAL = 2  # steps: the second one has optimizer state


def rehearse(arguments: Arguments, signals: Any) -> int:
    """`--dry-run`: compile, two steps, the evaluations, one checkpoint; then nothing of it is left."""
    with tempfile.TemporaryDirectory(prefix="sexpgpu-dry-run-") as folder:
        dry = {"metrics": None, "status": None, "resume": None, "checkpoint_dir": folder}
        values = arguments.settings.values
        settings = replace(arguments.settings, values={**values, **{k: replace(values[k], value=v) for k, v in dry.items()}})
        steps = REHEARSAL if arguments.steps is None else min(arguments.steps, REHEARSAL)
        code = _start(replace(arguments, settings=settings, steps=steps), signals)
    output.say("dry run: the file compiles, steps, evaluates and saves; nothing of it is kept" if code == 0 else "dry run: stopped")
    return code


def stored(settings: Settings, file: str, run: str) -> int | None:
    """The thread count of the checkpoint that a resume will read."""
    if not settings.resume:
        return None
    base = settings.run_slug or Path(file).stem
    heads = tuple(stage("head")(base, run, several) for several in (False, True))
    wanted = stage("wanted")(settings.resume, settings.checkpoint_dir, os.getcwd(), heads, run)
    return stage("stored threads")(wanted)


def plan(loaded: Any, run: Any, traced: Any, count: int, settings: Settings, sets: tuple[str, ...] = (), opened: Any = None) -> Any:
    """What the run loop is handed: hashes, bounds, and a function that compiles. `opened`: the GPU, None on the CPU."""
    compiler = stage("compiler")

    def build() -> Any:
        more = {} if opened is None else at_device(settings, opened)
        program = compiler.program(compiler.stages(loaded, run, settings.device, traced=traced), settings.device, count, **more)
        show_kernels(program, settings)
        return program

    return stage("plan")(
        experiment=loaded.experiment,
        run=run,
        compile=build,
        ir_hash=compiler.graph_hash(compiler.graph_results(traced)),
        trajectory=compiler.trajectory(traced, run),
        versions=compiler.versions(),
        several_runs=len(loaded.experiment.runs) > 1,
        bounds=tuple(stage("bound")(*bound) for bound in compiler.label_bounds(traced)),
        step_graphs=lambda capacity=None: compiler.step_graphs(compiler.stages(loaded, run), capacity),
        selection={"variant": loaded.experiment.variant, "sets": sets},
    )


def options(arguments: Arguments) -> Any:
    """The run loop's options."""
    settings = arguments.settings
    return stage("options")(
        metrics=settings.metrics,
        status=settings.status,
        checkpoint_dir=settings.checkpoint_dir,
        resume=settings.resume,
        max_time=arguments.max_time,
        accept=arguments.accept,
        with_data=arguments.with_data,
        folder=os.getcwd(),
        slug_base=settings.run_slug,
        strict_metrics=arguments.strict_metrics,
        command=again(arguments),
        service=stage("service")(settings),
    )


def again(arguments: Arguments) -> str:
    """The command line that calls this run again, but for its checkpoint location and `--resume`."""
    settings = arguments.settings
    words = ["sexpgpu", "run", arguments.file, *([arguments.run] if arguments.run else [])]
    words += ["--variant", arguments.variant] if arguments.variant else []
    for text in arguments.sets:
        words += ["--set", text]
    given = {"device": settings.device, "metrics": settings.metrics, "status": settings.status}
    given["diagnostics"] = ",".join(settings.diagnostics or ())
    for key, value in given.items():
        if settings.of(key).source == "flag":
            words += [settings.of(key).via, value or ""]
    for flag, number in (("--steps", arguments.steps), ("--eval-every", arguments.eval_every)):
        words += [flag, str(number)] if number is not None else []
    return shlex.join(words)


class Words(click.Command):
    """Remembers its words, with which it starts itself again for each rank."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta["words"] = list(args)
        return super().parse_args(ctx, args)


@click.command(cls=Words)
@click.argument("file")
@click.argument("run", required=False)
@click.option("--variant", metavar="NAME", help="Knob values of a defvariant.")
@click.option("--set", "sets", metavar="NAME=VALUE", multiple=True, help="A knob's value; may be given several times.")
@click.option("--device", metavar="DEVICE", help="cpu (the default) or cuda.")
@click.option("--metrics", metavar="TARGETS", help="jsonl:PATH, stdout, syvain or syvain:FOLDER, several by comma.")
@click.option("--status", metavar="PATH", help="A JSON file that always says how the run stands.")
@click.option("--checkpoint-dir", metavar="LOCATION", help="A folder or s3://bucket/prefix for checkpoints; {slug} stands for the run's slug.")
@click.option("--resume", metavar="CHECKPOINT", help="A checkpoint's folder, s3://bucket/prefix/step-N, or latest.")
@click.option("--steps", metavar="N", help="Stop after step N; changes nothing else.")
@click.option("--eval-every", metavar="N", help="Evaluate every N steps; 0 is never.")
@click.option("--diagnostics", metavar="GLOBS", help="Taps to record, such as 'attention/*'.")
@click.option("--max-time", metavar="TIME", help="Stop with a checkpoint after this long: 90s, 30m, 3h.")
@click.option("--accept", is_flag=True, help="Resume although the program's numbers will change.")
@click.option("--with-data", is_flag=True, help="The reproducer of a step that is not finite holds its batch.")
@click.option("--dry-run", is_flag=True, help="Compile, make two steps, evaluate, save, and keep nothing.")
@click.option("--deadline", "deadlines", metavar="PHASE=TIME", multiple=True,
              help="Of several ranks: how long a rank may be silent, or make the others wait in a phase: silent=15s, running=5m, compiling=1h.")
@output.json_messages
@click.option("--strict-metrics", is_flag=True, help="Metrics that were not delivered make the exit code 3.")
def command(
    file: str,
    run: str | None,
    variant: str | None,
    sets: tuple[str, ...],
    steps: str | None,
    eval_every: str | None,
    max_time: str | None,
    accept: bool,
    strict_metrics: bool,
    dry_run: bool,
    with_data: bool,
    deadlines: tuple[str, ...],
    **flags: str | None,
) -> int:
    """Train the run RUN of FILE (RUN may be left out when there is one)."""
    place = stage("place")(os.environ)
    settings = load(os.environ, flags)
    if place is None:
        output.report(settings.warnings)
        stage("refuse_both")(settings, os.environ)
        require(settings)
        limits = stage("deadlines")(deadlines)
        layout = stage("layout")(settings, os.environ)
        if layout is not None:
            stage("settle")()  # its steps are made elsewhere
            words = ["run", *click.get_current_context().meta["words"]]
            return stage("supervise")(layout, stage("job")(words, None if dry_run else settings.status, limits), output.say)
    elif place.rank:
        values = settings.values
        settings = replace(settings, values={**values, **{k: replace(values[k], value=None) for k in ("metrics", "status")}})
    stage("grant")(settings)
    return ranked(
        None if place is None else stage("member")(place),
        Arguments(
            file,
            run,
            variant,
            sets,
            number("--steps", steps, positive),
            number("--eval-every", eval_every, natural),
            max_time,
            accept,
            strict_metrics,
            settings,
            dry_run,
            with_data,
        )
    )


def ranked(member: Any, arguments: Arguments) -> int:
    """`start`; of a rank among several, a mistake is told to its supervisor before the process ends."""
    if member is None:
        return start(arguments)
    try:
        return start(replace(arguments, member=member))
    except SexpError as error:
        member.failed(error)
        raise
    except Exception as error:
        if (memory := out_of_memory(error, exit_code=3)) is not None:
            member.failed(memory)
        raise


def number(flag: str, text: str | None, kind: Callable[[str], int]) -> int | None:
    if text is None:
        return None
    try:
        return kind(text)
    except ValueError as error:
        fail("E-ENV-001", f"{flag} is `{text}`; it takes {error}")
