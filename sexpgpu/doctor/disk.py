"""Room for the checkpoints of FILE's runs, and whether their location takes a new run."""

from __future__ import annotations

from collections.abc import Iterator

from sexpgpu.backends import state
from sexpgpu.diagnostics import Diagnostic, SexpError
from sexpgpu.doctor import Ask, Check, Fact
from sexpgpu.run.checkpoints.find import absolute, refuse_taken
from sexpgpu.run.data.cache import size
from sexpgpu.run.disk import need, state_bytes


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
    if location and "{slug}" not in location and not ask.settings.resume:
        refuse_taken(absolute(location, ask.folder))


CHECK = Check("disk", "disk", "error", 60, run)
