"""FILE itself: every run of it read, traced and differentiated, short of its data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from sexpgpu import compiler
from sexpgpu.diagnostics import Diagnostic, SexpError
from sexpgpu.doctor import Ask, Check, Fact
from sexpgpu.doctor.storage import sources
from sexpgpu.run import storage
from sexpgpu.run.measure import measured


def run(ask: Ask) -> Iterator[Fact | Diagnostic]:
    """The mistakes of the file, and of the buckets that its sources lie in. Leaves `loaded` and, by name, `runs` and `traced`."""
    assert ask.file is not None
    in_scratch(ask)
    loaded = compiler.load(ask.file, ask.selection)
    ask.known["loaded"] = loaded
    experiment = loaded.experiment
    yield "program", f"{len(experiment.runs)} runs, {sum(len(r.evals) for r in experiment.runs.values())} evaluations, {len(experiment.data)} sources"
    yield from sources(ask)
    ask.known["runs"], ask.known["traced"] = {}, {}
    for name, found in experiment.runs.items():
        try:
            chosen = compiler.choose_run(experiment, name)
            compiler.check_divides(chosen, 1)
            whole = measured(chosen)
            traced = compiler.train_graph(loaded, whole)
            compiler.check_evals(loaded, whole, traced)
        except SexpError as error:
            yield from error.diagnostics
            continue
        ask.known["runs"][name], ask.known["traced"][name] = whole, traced
        yield f"run {name}", f"{found.steps} steps of a batch of {found.data.batch}, {len(traced.params)} parameters"


def in_scratch(ask: Ask) -> None:
    """From here on parsed data goes to the scratch folder: neither the user's cache nor the times in it change."""
    values: dict[str, Any] = dict(ask.settings.values)
    values["xdg_cache_home"] = replace(values["xdg_cache_home"], value=str(ask.scratch / "xdg_cache_home"))
    storage.grant(replace(ask.settings, values=values))


CHECK = Check("program", "program", "error", 600, run)
