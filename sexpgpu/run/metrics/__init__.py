"""Where numbers go: the syntax of `--metrics` / SEXPGPU_METRICS and the table of targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from sexpgpu.diagnostics import fail, suggestion
from sexpgpu.run.metrics.target import Resume, Target

#: name -> class(argument, …); each module is one target
TARGETS = {"jsonl": "sexpgpu.run.metrics.jsonl:JsonlTarget", "stdout": "sexpgpu.run.metrics.stdout:StdoutTarget"}
LATER = ("syvain",)


@dataclass(frozen=True)
class TargetSpec:
    """One target as asked for: `jsonl` with the whole path, `stdout` with none."""

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
        if spec in specs:
            fail("E-RUN-012", f"the metrics target `{spec.text}` is named twice")
        specs.append(spec)
    return tuple(specs)


def open_targets(specs: Sequence[TargetSpec], run_id: str, resume: Resume | None) -> list[Target]:
    """Every target, open; if one cannot be, those before it are closed again."""
    opened: list[Target] = []
    try:
        for spec in specs:
            module, name = TARGETS[spec.name].split(":")
            opened.append(getattr(import_module(module), name)(spec.argument, run_id, resume))
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
    if name in LATER:
        fail("E-NET-003", f"the metrics target `{name}` is not available in this version",
             help="write to a file: --metrics jsonl:metrics.jsonl")
    if name not in TARGETS:
        fail("E-RUN-011", f"`{item}` is not a metrics target", help=suggestion(name, [*TARGETS, *LATER], "targets"))
    if name == "jsonl" and not argument:
        fail("E-RUN-011", "the metrics target `jsonl` needs a path", help="write jsonl:metrics.jsonl")
    if name == "stdout" and colon:
        fail("E-RUN-011", f"the metrics target `stdout` takes no argument, here `{argument}`", help="write stdout")
    return TargetSpec(name, str((folder / argument).absolute()) if argument else "")
