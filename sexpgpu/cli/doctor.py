"""`sexpgpu doctor`: what `sexpgpu.doctor` finds of the machine, the settings and a file, printed. Exit 1 when there is something to mend."""

from __future__ import annotations

import os
import platform
import signal
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from sexpgpu.cli import device, output, threads
from sexpgpu.cli.run import Words, selection, stage
from sexpgpu.diagnostics import Diagnostic, SexpError, SexpErrors, fail, printable, render
from sexpgpu.doctor import ASKED, MACHINE, PROGRAM, Ask, Report, examine
from sexpgpu.doctor.child import end_all
from sexpgpu.doctor.settings import roles, rows, versions
from sexpgpu.settings import ROLES, VARIABLES, Secret, Settings, not_yet, read, shown


@click.command(cls=Words)
@click.argument("file", required=False)
@click.option("--variant", metavar="NAME", help="Of FILE: knob values of a defvariant.")
@click.option("--set", "sets", metavar="NAME=VALUE", multiple=True, help="Of FILE: a knob's value; may be repeated.")
@click.option("--numerics", is_flag=True, help="Of FILE: run every kernel beside the interpreter; without a GPU, under Triton's interpreter.")
@click.option("--resume", is_flag=True, help="Of FILE: prove that a run that is killed and resumed ends in the same bits.")
@click.option("--weights", metavar="CHECKPOINT", help="Of FILE's potential: the folder of the weights to check; without it, the initial ones.")
@click.option("--device", metavar="DEVICE", help="cpu (the default) or cuda: what a run would be started with.")
@click.option("--metrics", metavar="TARGETS", help="The targets that a run would be started with.")
@click.option("--checkpoint-dir", metavar="LOCATION", help="The location that a run would be started with.")
@click.option("--distributed", is_flag=True, help="Start the ranks that the variables name; measure their links, and whether they see the same FILE and data.")
@click.option("--probe-data", metavar="LOCATION", help="Read the first bytes of a source, as the data role.")
@click.option("--probe-checkpoints", metavar="LOCATION", help="Write, read and remove an object there, as the checkpoint role.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
def command(
    file: str | None, variant: str | None, sets: tuple[str, ...], numerics: bool, resume: bool, weights: str | None, distributed: bool,
    probe_data: str | None, probe_checkpoints: str | None, as_json: bool, **flags: str | None,
) -> int:  # fmt: skip
    """Find what is wrong with the machine, the settings, the servers and FILE before a run does. Changes nothing. Exit code 1 if there is
    anything to mend."""
    place = stage("place")(os.environ)
    settings = read(os.environ, flags)
    if distributed:
        return links(settings, place, file, sets, variant, as_json)
    if file is None and (numerics or resume or weights or variant or sets):
        fail("E-ENV-006", "--numerics, --resume, --weights, --variant and --set are about a FILE, and none is given", help="sexpgpu doctor FILE --numerics")
    names = [*MACHINE, *(PROGRAM if file is not None else ()), *(name for name, asked in zip(ASKED, (numerics, resume), strict=True) if asked)]
    with tempfile.TemporaryDirectory(prefix="sexpgpu-doctor-", ignore_cleanup_errors=True) as scratch:
        stage("grant")(settings)
        if file is not None:
            threads.prepare(os.environ, 0, None)
        chosen = None if file is None else selection(settings, variant, sets)
        words = (*(("--variant", variant) if variant else ()), *(word for text in sets for word in ("--set", text)))
        ask = Ask(settings, os.environ, os.getcwd(), Path(scratch), file, chosen, words, weights, {"data": probe_data, "checkpoints": probe_checkpoints})
        try:
            with stopping():
                reports = examine(ask, names)
        finally:
            end_all()
            stage("grant")(settings)
    findings = unique(finding for report in reports for finding in report.findings)
    if as_json:
        output.show_json(document(settings, reports, findings, ask))
    else:
        output.show("\n".join(lines(settings, reports, findings, file)))
    return 1 if findings else 0


@contextmanager
def stopping() -> Iterator[None]:
    """A SIGTERM ends the command as it ends any program, once what it made is removed."""

    def stop(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def unique(found: Iterable[Diagnostic]) -> list[Diagnostic]:
    """Each once: what a source says when it is probed and when it is read."""
    return list({(d.code, d.message): d for d in found}.values())


def links(settings: Settings, place: Any, file: str | None, sets: tuple[str, ...], variant: str | None, as_json: bool) -> int:
    """`--distributed`: as supervisor, or as one of the ranks."""
    if place is not None:
        return _links_of(stage("member")(place), settings, file, sets, variant, as_json)
    stage("refuse_both")(settings, os.environ)
    if settings.problems or not_yet(settings):
        raise SexpErrors([*settings.problems, *not_yet(settings)])
    layout = stage("layout")(settings, os.environ)
    if layout is None:
        fail("E-ENV-003", "--distributed needs more than one rank", help=("SEXPGPU_DEVICES=0,1 sexpgpu doctor --distributed", "or SEXPGPU_NODES=2, on every node"))
    words = ["doctor", *click.get_current_context().meta["words"]]
    try:
        return int(stage("supervise")(layout, stage("job")(words), output.say))
    except SexpError as error:  # what makes a run fail is a finding here
        output.report(error.diagnostics)
        return 1


def _links_of(member: Any, settings: Settings, file: str | None, sets: tuple[str, ...], variant: str | None, as_json: bool) -> int:
    threads.prepare(os.environ, 0, None)
    compiler, parts = stage("compiler"), import_module("sexpgpu.run.ranks.probe")
    facts = {f"the version of {name}": str(number) for name, number in versions().items()}
    try:
        if file is not None:
            experiment = compiler.load(file, selection(settings, variant, sets)).experiment
            facts |= stage("texts")(experiment.texts) | parts.data_facts(list(experiment.data.values()))
    except SexpError as error:
        member.failed(error)
        raise
    try:
        opened = device.begin(settings, True, ordinal=member.place.device)
    except SexpError as error:
        member.failed(error)
        raise
    team = stage("join")(member.place, member, facts, device.speaks(opened), settings.node_gradients)
    found = parts.probe(team, device.speaks(opened))
    team.collectives.wait_for_all()
    member.close()
    if member.place.rank:
        return 0
    findings = found.findings()
    same = f"every rank has the same versions{', file and data' if file is not None else ''}"
    if as_json:
        output.show_json({"ranks": found.ranks, "nodes": found.nodes, "latency_seconds": found.latency, "bytes_per_second": {str(k): v for k, v in found.bandwidth.items()},
                          "clocks_seconds": list(found.clocks), "same": sorted(facts), "findings": [{"code": d.code, "message": d.message} for d in findings]})
    else:
        rows = [("sum of one number", f"{found.latency * 1e6:,.0f} us")]
        rows += [(f"sum of {size >> 10:,} KiB", f"{rate / 1e9:.3g} GB/s sent by a rank") for size, rate in found.bandwidth.items()]
        rows += [("clocks", f"at most {max(map(abs, found.clocks)):.3f} s apart")]
        output.show("\n".join([f"{found.ranks} ranks on {found.nodes} node{'s' * (found.nodes > 1)} met; {same}", *output.table(rows)]))
        output.report(findings)
    return 1 if findings else 0

#: settings that a report about a file shows in any case; of the others, those that are set
SHOWN = ("SEXPGPU_DEVICE", "SEXPGPU_DEVICES", "SEXPGPU_METRICS", "SEXPGPU_CHECKPOINT_DIR", "SEXPGPU_RESUME", "SEXPGPU_MEMORY")


def lines(settings: Settings, reports: list[Report], findings: list[Diagnostic], file: str | None = None) -> list[str]:
    """The report as text; with a file, settings at their default are counted."""
    out = ["versions", *output.table((name, number or "not installed") for name, number in versions().items())]
    defaults = {v.name: v.shown_default for v in VARIABLES}
    table = []
    hidden = [name for name, value in rows(settings) if file is not None and value.source == "default" and name not in SHOWN]
    for name, value in rows(settings):
        if name in hidden:
            continue
        text = defaults[name] if value.source == "default" else shown(value.value)
        table.append((name, text, value.source if value.source == "default" else f"{value.source} {value.via}"))
    out += ["", "settings", *output.table(table)]
    out += [f"  and {len(hidden)} at their default: `sexpgpu doctor` without a file shows them"] if hidden else []
    if resolved := roles(settings):
        out += ["", "S3 roles", *output.table(resolved)]
    for report in reports:
        if report.facts:
            out += ["", report.check.title, *output.table((printable(a), printable(b)) for a, b in report.facts)]
    out += ["", f"findings: {len(findings)}" if findings else "nothing to mend"]
    for diagnostic in findings:
        page = diagnostic.help == (f"sexpgpu explain {diagnostic.code}",)  # which the last line says anyway
        out += ["  " + line for line in render(replace(diagnostic, help=()) if page else diagnostic).split("\n")]
    return out


def document(settings: Settings, reports: list[Report], findings: list[Diagnostic], ask: Ask) -> dict[str, Any]:
    """The report as JSON. `works`: no finding is an error."""
    laws = ask.known.get("laws")
    return {
        "versions": versions(),
        "machine": {"system": platform.platform(), "cores": threads.cores()},
        "settings": {
            name: {"value": _plain(value.value), "source": value.source, "via": value.via or None}
            for name, value in rows(settings)
        },
        "s3_roles": {
            role: {name: via for r, name, via in roles(settings) if r == role} for role in ROLES
        },
        "file": ask.file,
        "checks": {
            r.check.name: {"seconds": round(r.seconds, 3), "timeout": r.check.seconds, "facts": [list(fact) for fact in r.facts], "findings": [d.code for d in r.findings]}
            for r in reports
        },
        "probes": [text for r in reports if r.check.name == "storage" for _, text in r.facts],
        "works": not any(d.severity == "error" for d in findings),
        "findings": [
            {"code": d.code, "severity": d.severity, "message": d.message, "place": d.span.place if d.span else None, "help": list(d.help)} for d in findings
        ],
    } | ({} if laws is None else {"laws": [{"law": f.law, "deviation": f.deviation, "bound": f.bound, "holds": f.holds} for f in laws]})


def _plain(value: Any) -> Any:
    if isinstance(value, Secret):
        return "***"
    if isinstance(value, tuple):
        return list(value)
    return shown(value) if isinstance(value, str) else value
