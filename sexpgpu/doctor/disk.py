"""Room for the checkpoints of FILE's runs, and whether their location takes a new run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from sexpgpu.backends import state
from sexpgpu.diagnostics import Diagnostic, SexpError
from sexpgpu.doctor import Ask, Check, Fact
from sexpgpu.run.checkpoints.find import Wanted, absolute, choose, refuse_taken
from sexpgpu.run.data.cache import size
from sexpgpu.run.disk import need, state_bytes
from sexpgpu.run.slug import slug_head


def run(ask: Ask) -> Iterator[Fact | Diagnostic]:
    """E-DATA-016 where a checkpoint does not fit, or not all that are kept; E-CKPT-… where others lie there already."""
    location = ask.settings.checkpoint_dir
    for name, whole in ask.known.get("runs", {}).items():
        schema = state.schema(ask.known["traced"][name], whole.precision)
        kept = whole.keep + 1 + (whole.keep_best is not None)
        yield f"run {name}", f"a checkpoint takes {size(state_bytes(schema))}, and {kept} of them lie there at most"
        if location:
            try:
                warning = need(absolute(location.partition("{slug}")[0] if "{slug}" in location else location, ask.folder), schema, whole.keep, whole.keep_best is not None)
                if warning is not None:
                    yield warning
            except SexpError as error:
                yield from error.diagnostics
    if ask.settings.resume and len(ask.known.get("runs", {})) == 1:
        yield from chosen(ask, next(iter(ask.known["runs"])))
    if location and "{slug}" not in location and not ask.settings.resume:
        refuse_taken(absolute(location, ask.folder))


def chosen(ask: Ask, name: str) -> Iterator[Fact]:
    """The checkpoint that a run would go on from, read and verified; E-CKPT-… where there is none."""
    base = ask.settings.run_slug or Path(ask.file or "").stem
    heads = tuple(slug_head(base, name, several) for several in (False, True))
    choice = choose(Wanted(ask.settings.resume, ask.settings.checkpoint_dir, ask.folder, heads, name))
    yield from ((f"run {name}", note) for note in choice.notes)
    yield f"run {name}", "begins at step 0" if choice.found is None else f"goes on from step {choice.found.manifest.step} of {choice.found.location}"


CHECK = Check("disk", "disk", "error", 60, run)
