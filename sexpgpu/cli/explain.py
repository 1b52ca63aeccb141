"""`sexpgpu explain`: what an experiment means, without running it and without torch; or the page of an error code."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from fractions import Fraction
from importlib import import_module
from typing import Any

import click

from sexpgpu.cli import output
from sexpgpu.cli.run import selection
from sexpgpu.diagnostics import SexpErrors, entry, fail, printable, suggestion
from sexpgpu.diagnostics.core import CATALOGUE
from sexpgpu.experiment.model import Batches, Eval, Knob, Run
from sexpgpu.experiment.report import ParameterRow, Report, RunReport
from sexpgpu.read.printer import print_value
from sexpgpu.settings import Settings, load, not_yet

#: family of a code -> the page that describes what it is about
SEE = {
    "READ": "docs/lisp.md", "EVAL": "docs/lisp.md", "SHAPE": "docs/ops.md", "KNOB": "docs/knobs.md", "ENV": "docs/environment.md",
    "DATA": "docs/data.md", "MEM": "docs/devices.md", "DEV": "docs/devices.md", "CKPT": "docs/checkpoints.md", "NET": "docs/data.md",
    "RUN": "docs/run.md",
}  # fmt: skip

#: the compiler's side: (file, run, selection) -> Report
EXPLAIN = "sexpgpu.compiler:explain"


@click.command()
@click.argument("subject", metavar="FILE|E-CODE")
@click.argument("run", required=False)
@click.option("--variant", metavar="NAME", help="Knob values of a defvariant.")
@click.option("--set", "sets", metavar="NAME=VALUE", multiple=True, help="A knob's value; may be given several times.")
@click.option("--ir", is_flag=True, help="Also print the graph of each run.")
def command(subject: str, run: str | None, variant: str | None, sets: tuple[str, ...], ir: bool) -> int:
    """Say what FILE means, or what the error code E-CODE means."""
    if re.fullmatch(r"[EeWw]-[A-Za-z]+-[0-9]+", subject):
        output.show(page(subject.upper()))
        return 0
    settings = load(os.environ)
    output.report(settings.warnings)
    if settings.explain is not None:
        raise SexpErrors([d for d in not_yet(settings) if "SEXPGPU_EXPLAIN" in d.message])
    report = compiled(subject, run, variant, sets, settings)
    output.report(report.experiment.warnings)
    for traced in report.runs:
        output.report(traced.warnings)
    output.show("\n".join(lines(report, ir)))
    return 0


def compiled(file: str, run: str | None, variant: str | None, sets: tuple[str, ...], settings: Settings) -> Report:
    """The compiler's report; imported here by name, so that `explain E-CODE` needs no compiler."""
    module, attribute = EXPLAIN.split(":")
    explain: Callable[..., Report] = getattr(import_module(module), attribute)
    return explain(file, run, selection(settings, variant, sets))


def codes() -> list[str]:
    """Every code of the catalogue."""
    return sorted(code for module in CATALOGUE.values() for code in import_module(module).CODES)


def page(code: str) -> str:
    """The page of a code."""
    found = entry(code)
    if found is None:
        fail(
            "E-ENV-007",
            f"there is no code {code}",
            help=(*suggestion(code, codes(), "codes"), "docs/errors.md lists all"),
        )
    return f"{code}: {found.title}\n\n{found.page.strip()}\n\nSee also: {SEE[code.split('-')[1]]}"


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
    if isinstance(value, list | tuple):
        return "[" + " ".join(datum(v) for v in value) + "]"
    if isinstance(value, bool | int | float | str | Fraction):
        return printable(print_value(value))
    return printable(str(getattr(value, "name", value)))


def _run(run: Run, traced: RunReport) -> list[str]:
    trained = [p for p in traced.parameters if not p.state]
    states = [p for p in traced.parameters if p.state]
    facts = [
        ("steps", str(run.steps)),
        ("data", _data(run.data) + _cut(run.accumulate)),
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
    if run.ema is not None:
        facts.append(("averages", f"decay {run.ema:g}"))
    if run.frozen:
        facts.append(("frozen", ", ".join(run.frozen)))
    if run.keep_best is not None:
        best = run.keep_best
        facts.append(("keeps best", f"{best.eval} {best.metric}, the {'largest' if best.largest else 'least'}"))
    if run.init is not None:
        rules = "".join(f", {new} from {old}" for new, old in run.init.renames)
        facts.append(("starts from", printable(run.init.path + rules)))
    if traced.taps:
        facts.append(("taps", ", ".join(traced.taps)))
    out = _section(f"run {run.name}", output.table(facts))
    out += _section(f"parameters of {run.name}: {sum(p.count for p in trained):,} values", _tensors(trained))
    return out + (_section(f"states of {run.name}", _tensors(states)) if states else [])


def _data(data: Batches) -> str:
    """The source and how it is cut into samples."""
    windows = "" if data.context is None else f", windows of {data.context} tokens, {data.stride} from one to the next"
    return f"{data.source.name}{_split(data.split)}{windows}, batch {data.batch}"


def _split(split: str | None) -> str:
    return f" ({split})" if split else ""


def _cut(accumulate: int) -> str:
    return f" in {accumulate} micro-batches" if accumulate > 1 else ""


def _tensors(rows: Iterable[ParameterRow]) -> list[str]:
    return output.table(
        (p.path, f"{p.dtype}[{' '.join(map(str, p.shape))}]", f"{p.count:,}", p.init, p.place) for p in rows
    )


def _eval(e: Eval) -> list[str]:
    facts = [
        (
            "data",
            _data(e.data) + (f", at most {e.data.limit} batches" if e.data.limit else ""),
        ),
        ("every", f"{e.every} steps" if e.every else "never"),
        ("metrics", ", ".join(m.name for m in e.metrics)),
    ]
    return _section(f"eval {e.name}", output.table(facts))
