"""Where numbers go: the syntax of `--metrics` / SEXPGPU_METRICS and the table of targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from sexpgpu.diagnostics import fail, suggestion
from sexpgpu.run.metrics.jsonl import JsonlTarget
from sexpgpu.run.metrics.target import Resume, Service, Target

#: name -> class(argument, run_id, resume, …); each module is one target
TARGETS = {
    "jsonl": "sexpgpu.run.metrics.jsonl:JsonlTarget",
    "stdout": "sexpgpu.run.metrics.stdout:StdoutTarget",
    "syvain": "sexpgpu.run.metrics.service:SyvainTarget",
}


@dataclass(frozen=True)
class TargetSpec:
    """One target as asked for: `jsonl` with the whole path, `stdout` with none, `syvain` with a folder id or none."""

    name: str
    argument: str = ""

    @property
    def text(self) -> str:
        return f"{self.name}:{self.argument}" if self.argument else self.name


def parse_targets(text: str | None, folder: str | Path = ".") -> tuple[TargetSpec, ...]:
    r"""Targets separated by commas (`\,` is a comma in a path); relative paths go by `folder`. Opens nothing."""
    if not text:
        return ()
    specs: list[TargetSpec] = []
    for item in _split(text):
        spec = _target(item.strip(), Path(folder))
        if spec in specs or (spec.name == "syvain" and "syvain" in [s.name for s in specs]):
            fail("E-RUN-012", f"the metrics target `{spec.text}` is named twice")
        specs.append(spec)
    return tuple(specs)


def open_targets(specs: Sequence[TargetSpec], run_id: str, resume: Resume | None, *, service: Service | None = None,
                 slug: str = "", rank: int = 0) -> list[Target]:
    """Every target, open, in the order in which records are handed to them; if one cannot be, the others are closed again.

    Only rank 0 of a run has numbers to tell: the others get no target. `syvain` comes last, since it reads the first
    regular file that a `jsonl:` target writes.
    """
    opened: list[Target] = []
    try:
        for spec in sorted(specs, key=lambda s: s.name == "syvain") if rank == 0 else ():
            module, name = TARGETS[spec.name].split(":")
            more: tuple[Any, ...] = ()
            if spec.name == "syvain":
                truth = next((t.path for t in opened if isinstance(t, JsonlTarget) and t.regular), None)
                more = (service or Service(), slug or run_id, truth)
            opened.append(getattr(import_module(module), name)(spec.argument, run_id, resume, *more))
    except BaseException:
        for target in opened:
            target.close()
        raise
    return opened


def _split(text: str) -> list[str]:
    items, current, i = [], "", 0
    while i < len(text):
        if text[i] == "\\" and text[i + 1 : i + 2] == ",":
            current += ","
            i += 1
        elif text[i] == ",":
            items.append(current)
            current = ""
        else:
            current += text[i]
        i += 1
    return [*items, current]


def _target(item: str, folder: Path) -> TargetSpec:
    name, colon, argument = item.partition(":")
    if name not in TARGETS:
        fail("E-RUN-011", f"`{item}` is not a metrics target", help=suggestion(name, TARGETS, "targets"))
    if name == "jsonl" and not argument:
        fail("E-RUN-011", "the metrics target `jsonl` needs a path", help="write jsonl:metrics.jsonl")
    if name == "stdout" and colon:
        fail("E-RUN-011", f"the metrics target `stdout` takes no argument, here `{argument}`", help="write stdout")
    if name == "syvain":
        if colon and not argument.strip():
            fail("E-RUN-011", "the metrics target `syvain:` lacks its folder id", help="write syvain, or syvain:<folder-id>")
        return TargetSpec(name, argument.strip())
    return TargetSpec(name, str((folder / argument).absolute()) if argument else "")
