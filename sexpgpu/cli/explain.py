"""`sexpgpu explain`: what an experiment means, without running it and without torch; or the page of an error code."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import click

from sexpgpu.cli import output
from sexpgpu.cli.run import assignment
from sexpgpu.diagnostics import entry, fail, printable, suggestion
from sexpgpu.diagnostics.core import CATALOGUE
from sexpgpu.experiment.model import Eval, Experiment, Knob, Run
from sexpgpu.settings import Settings, load

#: the compiler's side: (file, run, variant, sets, settings) -> Report
EXPLAIN = "sexpgpu.compiler:explain"


@dataclass(frozen=True)
class ParameterRow:
    """A tensor of the model: its outward path, shape and dtype."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    state: bool = False

    @property
    def count(self) -> int:
        n = 1
        for size in self.shape:
            n *= size
        return n


@dataclass(frozen=True)
class RunReport:
    """What tracing a run gives. `flops`: floating operations of one train step; `hash`: of the train graph."""

    run: str
    parameters: tuple[ParameterRow, ...]
    flops: int
    nodes: int
    hash: str
    text: str
    taps: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """An experiment and its traced runs."""

    experiment: Experiment
    runs: tuple[RunReport, ...]


@click.command()
@click.argument("subject", metavar="FILE|E-CODE")
@click.argument("run", required=False)
@click.option("--variant", metavar="NAME", help="Knob values of a defvariant.")
@click.option("--set", "sets", metavar="NAME=VALUE", multiple=True, help="A knob's value; may be given several times.")
@click.option("--ir", is_flag=True, help="Also print the graph of each run.")
def command(subject: str, run: str | None, variant: str | None, sets: tuple[str, ...], ir: bool) -> int:
    """Say what FILE means, or what the error code E-CODE means."""
    if re.fullmatch(r"[Ee]-[A-Za-z]+-[0-9]+", subject):
        output.show(page(subject.upper()))
        return 0
    settings = load(os.environ)
    output.report(settings.warnings)
    report = compiled(subject, run, variant, tuple(assignment(text) for text in sets), settings)
    output.report(w for w in report.experiment.warnings)
    output.show("\n".join(lines(report, ir)))
    return 0


def compiled(
    file: str, run: str | None, variant: str | None, sets: tuple[tuple[str, str], ...], settings: Settings
) -> Report:
    """The compiler's report; imported here by name, so that `explain E-CODE` needs no compiler."""
    module, attribute = EXPLAIN.split(":")
    explain: Callable[..., Report] = getattr(import_module(module), attribute)
    return explain(file, run=run, variant=variant, sets=sets, settings=settings)


def codes() -> list[str]:
    """Every code of the catalogue."""
    return sorted(code for module in CATALOGUE.values() for code in import_module(module).CODES)


def page(code: str) -> str:
    """The page of a code."""
    found = entry(code)
    if found is None:
        fail(
            "E-ENV-001",
            f"there is no code {code}",
            help=(*suggestion(code, codes(), "codes"), "docs/errors.md lists all"),
        )
    return f"{code}: {found.title}\n\n{found.page.strip()}"


# --- the report as text ------------------------------------------------------------


def lines(report: Report, ir: bool) -> list[str]:
    """The whole report."""
    experiment = report.experiment
    out = [experiment.file + (f"  (variant {experiment.variant})" if experiment.variant else "")]
    out += _section("knobs", output.table(_knob(k) for k in experiment.knobs.values()))
    for traced in report.runs:
        out += _run(experiment.runs[traced.run], traced)
    for e in experiment.evals.values():
        out += _eval(e)
    if ir:
        for traced in report.runs:
            out += ["", f"graph of {traced.run}", traced.text.rstrip("\n")]
    return out


def _section(title: str, body: list[str]) -> list[str]:
    return ["", title, *(body or ["  none"])]


def _knob(k: Knob) -> tuple[str, ...]:
    origin = k.source + (f" {k.via}" if k.via else "")
    changed = f", file {datum(k.file_value)}" if k.source == "override" and k.file_value is not None else ""
    changed = f", default {datum(k.default)}" if k.source in ("variant", "set") else changed
    remarks = [k.doc] if k.doc else []
    remarks += ["decides structure at " + ", ".join(k.decides)] if k.decides else []
    remarks += [] if k.used or k.source == "override" else ["never read"]
    return (k.name, datum(k.value), f"({origin}{changed})", k.place, printable("; ".join(remarks)))


def datum(value: Any) -> str:
    """A knob's value as the file would write it."""
    if value is None:
        return "nil"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return "[" + " ".join(datum(v) for v in value) + "]"
    return printable(str(value))


def _run(run: Run, traced: RunReport) -> list[str]:
    trained = [p for p in traced.parameters if not p.state]
    states = [p for p in traced.parameters if p.state]
    facts = [
        ("steps", str(run.steps)),
        ("data", f"{run.data.source.name}{_split(run.data.split)}, batch {run.data.batch}" + _cut(run.accumulate)),
        ("seed", str(run.seed)),
        ("precision", run.precision),
        ("loss", run.loss.name),
        ("metrics", ", ".join(m.name for m in run.metrics) or "none"),
        ("evals", ", ".join(e.name for e in run.evals) or "none"),
        ("checkpoints", f"every {run.checkpoint_every} steps" if run.checkpoint_every else "at the end only"),
        ("graph", f"{traced.nodes:,} nodes, {traced.flops:,} FLOPs a step, hash {traced.hash}"),
    ]
    if run.clip_norm is not None:
        facts.append(("clip norm", str(run.clip_norm)))
    if traced.taps:
        facts.append(("taps", ", ".join(traced.taps)))
    out = _section(f"run {run.name}", output.table(facts))
    out += _section(f"parameters of {run.name}: {sum(p.count for p in trained):,} values", _tensors(trained))
    return out + (_section(f"states of {run.name}", _tensors(states)) if states else [])


def _split(split: str | None) -> str:
    return f" ({split})" if split else ""


def _cut(accumulate: int) -> str:
    return f" in {accumulate} micro-batches" if accumulate > 1 else ""


def _tensors(rows: Iterable[ParameterRow]) -> list[str]:
    return output.table((p.path, f"{p.dtype}[{' '.join(map(str, p.shape))}]", f"{p.count:,}") for p in rows)


def _eval(e: Eval) -> list[str]:
    facts = [
        (
            "data",
            f"{e.data.source.name}{_split(e.data.split)}, batch {e.data.batch}"
            + (f", at most {e.data.limit} batches" if e.data.limit else ""),
        ),
        ("every", f"{e.every} steps" if e.every else "never"),
        ("metrics", ", ".join(m.name for m in e.metrics)),
    ]
    return _section(f"eval {e.name}", output.table(facts))
