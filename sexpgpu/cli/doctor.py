"""`sexpgpu doctor`: versions and settings, each with its source, and on request a try of the stores. Exit 1 when it
finds something to mend."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import click

from sexpgpu import __version__
from sexpgpu.cli import output, threads
from sexpgpu.cli.run import Words, selection, stage
from sexpgpu.diagnostics import Diagnostic, SexpError, SexpErrors, fail, note_warning, render
from sexpgpu.settings import FOUR, ROLES, VARIABLES, Secret, Settings, Value, not_yet, read, shown

PACKAGES = ("torch", "triton", "numpy", "lark", "safetensors", "click", "rich", "boto3", "requests")
NEEDED = frozenset(PACKAGES) - {"triton"}


@click.command(cls=Words)
@click.argument("file", required=False)
@click.option("--resume", "checkpoint", metavar="CHECKPOINT", help="Of FILE: the folder of the weights to check; without it, the initial ones.")
@click.option("--set", "sets", metavar="NAME=VALUE", multiple=True, help="Of FILE: a knob's value; may be repeated.")
@click.option("--variant", metavar="NAME", help="Of FILE: knob values of a defvariant.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
@click.option("--distributed", is_flag=True, help="Start the ranks that the variables name; measure their links, and whether they see the same FILE and data.")
@click.option("--probe-data", metavar="LOCATION", help="Read the first bytes of a source, as the data role.")
@click.option("--probe-checkpoints", metavar="LOCATION", help="Write, read and remove an object there, as the checkpoint role.")
def command(
    file: str | None, checkpoint: str | None, sets: tuple[str, ...], variant: str | None, as_json: bool,
    distributed: bool, probe_data: str | None, probe_checkpoints: str | None,
) -> int:  # fmt: skip
    """Show versions, settings and where each came from; of a FILE with an interatomic potential, whether it obeys its laws."""
    place = stage("place")(os.environ)
    settings = read(os.environ)
    if distributed:
        return links(settings, place, file, sets, variant, as_json)
    if file is not None:
        return laws(settings, file, checkpoint, sets, variant, as_json)
    found = [*settings.problems, *not_yet(settings), *settings.warnings, *_absent()]
    said, failed = probes(settings, {"data": probe_data, "checkpoints": probe_checkpoints})
    found += failed
    if as_json:
        output.show_json(document(settings, found, said))
    else:
        output.show("\n".join(lines(settings, found, said)))
    return 1 if found else 0


def links(settings: Settings, place: Any, file: str | None, sets: tuple[str, ...], variant: str | None, as_json: bool) -> int:
    """`--distributed`: as supervisor, or as one of the ranks."""
    if place is not None:
        return _links_of(stage("member")(place), settings, file, sets, variant, as_json)
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
    team = stage("join")(member.place, member, facts, settings.device, settings.node_gradients)
    found = parts.probe(team)
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


def laws(settings: Settings, file: str, checkpoint: str | None, sets: tuple[str, ...], variant: str | None, as_json: bool) -> int:
    """Symmetries and derivatives of the file's potential on random structures; its data is not opened."""
    threads.prepare(os.environ, 0, None)
    potential = import_module("sexpgpu.potential")
    found = potential.check(lambda precision: potential.Potential(file, checkpoint, sets=sets, variant=variant, precision=precision))
    if as_json:
        output.show_json({"laws": [{"law": f.law, "deviation": f.deviation, "bound": f.bound, "holds": f.holds} for f in found]})
    else:
        rows = [(f.law, f"{f.deviation:.1e}", f"below {f.bound:.0e}", "" if f.holds else "broken") for f in found]
        held = sum(f.holds for f in found)
        output.show("\n".join([f"{file}: {held} of {len(found)} laws hold", *output.table(rows)]))
    return 0 if all(f.holds for f in found) else 1


def probes(settings: Settings, locations: dict[str, str | None]) -> tuple[list[str], list[Diagnostic]]:
    """What was tried at the locations given, and what failed there. Only this goes over the network."""
    said: list[str] = []
    failed: list[Diagnostic] = []
    for name, location in locations.items():
        if location is None:
            continue
        import_module("sexpgpu.run.storage").grant(settings)
        probe: Callable[[str, str], list[str]] = getattr(import_module("sexpgpu.run.storage.probe"), name)
        try:
            said += probe(location, os.getcwd())
        except SexpError as error:
            failed += error.diagnostics
    return said, failed


def roles(settings: Settings) -> list[tuple[str, str, str]]:
    """(role, value, the variable that gives it) of each S3 role that has any value."""
    out = []
    for role in ROLES:
        found = settings.credentials(role).via
        names = (*FOUR, "SESSION_TOKEN") if "SESSION_TOKEN" in found else FOUR
        out += [(role, name.lower().replace("_", " "), found.get(name, "missing")) for name in names if found]
    return out


def versions() -> dict[str, str | None]:
    """Versions of us, Python and the libraries, none of which is imported."""
    named: dict[str, str | None] = {"sexpgpu": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            named[name] = version(name)
        except PackageNotFoundError:
            named[name] = None
    return named


def _absent() -> list[Diagnostic]:
    return [
        note_warning(
            "E-ENV-011", f"the package {name} is not installed", help=f"{sys.executable} -m pip install {name}"
        )
        for name, number in versions().items()
        if number is None and (name in NEEDED or (name == "triton" and sys.platform == "linux"))
    ]


def rows(settings: Settings) -> list[tuple[str, Value]]:
    """Every setting by the name of its variable."""
    values = list(settings.values.values())
    return [(v.name, value) for v, value in zip(VARIABLES, values, strict=True)]


def lines(settings: Settings, found: list[Diagnostic], said: list[str]) -> list[str]:
    """The report as text."""
    out = ["versions", *output.table((name, number or "not installed") for name, number in versions().items())]
    out += ["", "machine", *output.table([("system", platform.platform()), ("cores", str(threads.cores()))])]
    out += ["", "settings"]
    defaults = {v.name: v.shown_default for v in VARIABLES}
    table = []
    for name, value in rows(settings):
        text = defaults[name] if value.source == "default" else shown(value.value)
        table.append((name, text, value.source if value.source == "default" else f"{value.source} {value.via}"))
    out += output.table(table)
    if resolved := roles(settings):
        out += ["", "S3 roles", *output.table(resolved)]
    if said:
        out += ["", "probes", *(f"  {line}" for line in said)]
    out += ["", "findings" if found else "nothing to mend"]
    for diagnostic in found:
        out += ["  " + line for line in render(diagnostic).split("\n")]
    return out


def document(settings: Settings, found: list[Diagnostic], said: list[str]) -> dict[str, Any]:
    """The report as JSON."""
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
        "probes": said,
        "findings": [
            {"code": d.code, "severity": d.severity, "message": d.message, "help": list(d.help)} for d in found
        ],
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Secret):
        return "***"
    if isinstance(value, tuple):
        return list(value)
    return shown(value) if isinstance(value, str) else value
