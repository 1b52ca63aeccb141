"""`sexpgpu status PATH…`: how runs stand, live on a terminal. The exit code says the state."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import click

from sexpgpu.cli import output
from sexpgpu.diagnostics import SexpError, printable

#: state -> exit code; several files: the first of WORST that one of them has
CODES = {"done": 0, "failed": 3, "stopped": 4, "dead": 1, "silent": 1}
GOING_ON = 5
WORST = (3, 1, 4, GOING_ON, 0)
REFRESH = 0.5  # seconds
COLUMNS = ("run", "state", "step", "loss", "steps/s", "left", "checkpoint", "age")


@click.command()
@click.argument("paths", metavar="PATH…", nargs=-1, required=True)
@click.option("--once", is_flag=True, help="Show it once; the default where the output is no terminal.")
@click.option("--json", "as_json", is_flag=True, help="Print the files' objects, with how they are judged, once.")
def command(paths: tuple[str, ...], once: bool, as_json: bool) -> int:
    """Show the status files of runs until they have ended.

    Exit code: 0 done, 3 failed, 4 stopped, 1 dead or silent, 5 still going on, 2 no status file.
    """
    seen = _read(paths)
    if as_json:
        objects = [{"path": s.path, "judged": s.state, "why": s.why or None, **s.facts} for s in seen]
        output.show_json(objects[0] if len(objects) == 1 else objects)
    elif once or not sys.stdout.isatty():
        output.show("\n".join(lines(seen, time.time())))
    else:
        seen = _live(paths, seen)
    return exit_code(seen)


def exit_code(seen: Sequence[Any]) -> int:
    """The worst of the states' codes."""
    found = {CODES.get(s.state, GOING_ON) for s in seen}
    return next(code for code in WORST if code in found)


def lines(seen: Sequence[Any], now: float) -> list[str]:
    """A table, and below it what needs a sentence."""
    table = output.table([COLUMNS, *(row(s, now) for s in seen)], indent="")
    return table + [f"{name(s)}: {text}" for s in seen for text in remarks(s)]


def name(seen: Any) -> str:
    return printable(str(seen.facts.get("slug") or seen.facts.get("run") or seen.path))


def row(seen: Any, now: float) -> list[str]:
    """The cells of one run; `-` for what is not known."""
    facts = seen.facts
    step = f"{_number(facts.get('step'), '.0f')}/{_number(facts.get('steps'), '.0f')}"
    saved = facts.get("checkpoint")
    saved = f"step-{saved['step']}" if isinstance(saved, dict) and saved.get("durable") else "-"
    updated = facts.get("updated")
    age = _duration(now - updated) if isinstance(updated, int | float) else "-"
    left = "-" if seen.ended else _duration(facts.get("eta_seconds"))
    return [name(seen), printable(seen.state), step, _number(facts.get("loss"), ".4g"), _number(facts.get("rate"), ".3g"), left, saved, age]


def remarks(seen: Any) -> list[str]:
    """Why a run failed, died or is late."""
    found = [printable(seen.why)] if seen.why else []
    error = seen.facts.get("error")
    if isinstance(error, dict):
        place = f" ({error.get('place')})" if error.get("place") else ""
        code = f"{error.get('code')}: " if error.get("code") else ""
        found.append(printable(f"{code}{error.get('message')}{place}"))
    return found


def _read(paths: Sequence[str]) -> list[Any]:
    read = import_module("sexpgpu.run.status").read_status
    return [read(path) for path in paths]


def _live(paths: Sequence[str], seen: list[Any]) -> list[Any]:
    """Redraws until every run has ended; Ctrl-C leaves with what there is. A file that vanishes keeps its last words."""
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

    def drawn() -> Any:
        table = Table(*COLUMNS, box=None, pad_edge=False)
        now = time.time()
        for s in seen:
            table.add_row(*(Text(cell) for cell in row(s, now)))
        below = [f"{name(s)}: {text}" for s in seen for text in remarks(s)]
        grid = Table.grid()
        grid.add_row(table)
        for line in below:
            grid.add_row(Text(line))
        return grid

    with Live(drawn(), auto_refresh=False) as live:
        try:
            while not all(s.ended for s in seen):
                time.sleep(REFRESH)
                seen = [_again(path, s) for path, s in zip(paths, seen, strict=True)]
                live.update(drawn(), refresh=True)
        except KeyboardInterrupt:
            pass
    return seen


def _again(path: str, before: Any) -> Any:
    try:
        return _read([path])[0]
    except SexpError:
        return before


def _number(value: Any, form: str) -> str:
    return format(value, form) if isinstance(value, int | float) else "-"


def _duration(seconds: Any) -> str:
    """`3 s`, `4:05`, `1:02:03`."""
    if not isinstance(seconds, int | float):
        return "-"
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes}:{rest:02}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
