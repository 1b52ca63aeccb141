"""What `sexpgpu doctor` looks at: one small module a check, found by name; the command only prints.

Such a module has `CHECK`, a `Check`. A check yields facts (what it saw, for people) and findings (diagnostics: code, severity, mend).
It changes nothing that it did not create: what it writes lies in `Ask.scratch`, or is removed by it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from sexpgpu.diagnostics import Diagnostic, SexpError, problem
from sexpgpu.settings import Settings

#: name -> module with its `CHECK`: of every call, and of a FILE in the order in which each needs the one before
MACHINE = {name: f"sexpgpu.doctor.{name}" for name in ("settings", "machine", "devices", "caches", "storage", "clocks", "metrics")}
PROGRAM = {name: f"sexpgpu.doctor.{name}" for name in ("program", "data", "disk", "laws")}
ASKED = {name: f"sexpgpu.doctor.{name}" for name in ("numerics", "resume")}
CHECKS: Mapping[str, str] = MACHINE | PROGRAM | ASKED

Fact = tuple[str, str]


@dataclass(frozen=True)
class Ask:
    """What is looked at. `words`: the options that choose of FILE, as a child process takes them. `probes`: role -> a location that was
    asked for. `scratch`: a temporary folder that goes at the end. `known`: what an earlier check leaves for a later one."""

    settings: Settings
    environ: Mapping[str, str]
    folder: str
    scratch: Path
    file: str | None = None
    selection: Any = None
    words: tuple[str, ...] = ()
    weights: str | None = None
    probes: Mapping[str, str | None] = field(default_factory=dict)
    known: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Check:
    """`severity`: of not having ended within `seconds`: an error where a run would then not work either."""

    name: str
    title: str
    severity: str
    seconds: float
    run: Callable[[Ask], Iterator[Fact | Diagnostic]]


@dataclass
class Report:
    """What a check said, in order, and how long it took."""

    check: Check
    facts: list[Fact] = field(default_factory=list)
    findings: list[Diagnostic] = field(default_factory=list)
    seconds: float = 0.0


def check_of(name: str) -> Check:
    """The check of that name."""
    return import_module(CHECKS[name]).CHECK


def examine(ask: Ask, names: Iterable[str]) -> list[Report]:
    """Each check by itself, within its time. One that fails for a bug of ours raises it."""
    return [perform(check_of(name), ask) for name in names]


def perform(check: Check, ask: Ask) -> Report:
    """One check on a thread of its own, which is left behind if it does not end: E-ENV-020."""
    report, failure = Report(check), []

    def work() -> None:
        try:
            for said in check.run(ask):
                if isinstance(said, Diagnostic):
                    report.findings.append(with_mend(said))
                else:
                    report.facts.append(said)
        except SexpError as error:
            report.findings += map(with_mend, error.diagnostics)
        except Exception as error:  # handed to the caller's thread
            failure.append(error)

    begin = time.monotonic()
    thread = threading.Thread(target=work, name=f"doctor-{check.name}", daemon=True)
    thread.start()
    thread.join(check.seconds)
    if thread.is_alive():
        late = problem("E-ENV-020", f"the check `{check.name}` did not end within {check.seconds:.0f} s", help="look at what it reads: a disk or a server that hangs").diagnostic
        report = Report(check, list(report.facts), [*report.findings, replace(late, severity=check.severity)])
    if failure:
        raise failure[0]
    report.seconds = time.monotonic() - begin
    return report


def with_mend(found: Diagnostic) -> Diagnostic:
    """A finding without a line on what to do gets the page that says it."""
    return found if found.help else replace(found, help=(f"sexpgpu explain {found.code}",))
