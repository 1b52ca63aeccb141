"""FILE itself: every run of it read, traced and differentiated, short of its data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from sexpgpu import compiler
from sexpgpu.backends.interpreter.plan import run_plan
from sexpgpu.diagnostics import Diagnostic, SexpError, note_warning, problem
from sexpgpu.doctor import Ask, Check, Fact
from sexpgpu.doctor.machine import memory
from sexpgpu.doctor.storage import sources
from sexpgpu.run import storage
from sexpgpu.run.data.cache import size
from sexpgpu.run.measure import measured
from sexpgpu.run.ranks.layout import layout_of


def run(ask: Ask) -> Iterator[Fact | Diagnostic]:
    """The mistakes of the file, and of the buckets that its sources lie in. Leaves `loaded` and, by name, `runs` and `traced`."""
    assert ask.file is not None
    in_scratch(ask)
    loaded = compiler.load(ask.file, ask.selection)
    ask.known["loaded"] = loaded
    experiment = loaded.experiment
    counts = {"run": len(experiment.runs), "evaluation": sum(len(r.evals) for r in experiment.runs.values()), "source": len(experiment.data)}
    yield "program", ", ".join(f"{n} {what}{'' if n == 1 else 's'}" for what, n in counts.items())
    yield from sources(ask)
    if not experiment.runs:
        compiler.choose_run(experiment, None)  # E-RUN-103
    ask.known["runs"], ask.known["traced"] = {}, {}
    ranks = ranks_of(ask)
    for name, found in experiment.runs.items():
        try:
            chosen = compiler.choose_run(experiment, name)
            compiler.check_divides(chosen, ranks)
            whole = measured(chosen)
            traced = compiler.train_graph(loaded, whole)
            compiler.check_evals(loaded, whole, traced)
        except SexpError as error:
            yield from error.diagnostics
            continue
        ask.known["runs"][name], ask.known["traced"][name] = whole, traced
        yield f"run {name}", f"{found.steps} steps of a batch of {found.data.batch}, {len(traced.params)} parameters"
        if ask.settings.device == "cpu":
            yield from planned(ask, name, compiler.stages(loaded, whole, ranks=ranks))


def ranks_of(ask: Ask) -> int:
    """How many ranks a run with these settings has; of settings that name none together, which are findings elsewhere, 1."""
    try:
        layout = layout_of(ask.settings, ask.environ)
    except SexpError:
        return 1
    return 1 if layout is None else layout.posts * layout.here


def planned(ask: Ask, name: str, staged: Any) -> Iterator[Fact | Diagnostic]:
    """What the run takes of memory on the interpreter: E-MEM-002 over SEXPGPU_MEMORY, and a warning over what is free."""
    plan = run_plan(staged)
    need = sum(plan.kept.values()) + max(plan.batch + plan.step, *plan.evaluations.values(), 0)
    yield f"memory of run {name}", f"{size(need)} at its peak"
    budget, (_, free) = ask.settings.memory, memory()
    mend = f"sexpgpu explain {ask.file} says the largest batch that fits, under the same SEXPGPU_MEMORY"
    if budget is not None and need > budget * 2**30:
        yield problem("E-MEM-002", f"the run {name} takes {size(need)} of memory, and SEXPGPU_MEMORY allows {size(int(budget * 2**30))}", help=mend).diagnostic
    elif free and need > free:
        yield note_warning("E-MEM-002", f"the run {name} takes {size(need)} of memory, and {size(free)} is free on this machine", help=mend)


def in_scratch(ask: Ask) -> None:
    """From here on parsed data goes to the scratch folder: neither the user's cache nor the times in it change."""
    values: dict[str, Any] = dict(ask.settings.values)
    values["xdg_cache_home"] = replace(values["xdg_cache_home"], value=str(ask.scratch / "xdg_cache_home"))
    storage.grant(replace(ask.settings, values=values))


CHECK = Check("program", "program", "error", 600, run)
