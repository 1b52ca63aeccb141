"""`sexpgpu explain`: what an experiment means, without running it and without torch; or the page of an error code."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from typing import Any

import click

from sexpgpu.cli import output, threads
from sexpgpu.cli.run import number, selection
from sexpgpu.diagnostics import Diagnostic, SexpError, fail, one_or_all, suggestion
from sexpgpu.explain.pages import codes, is_code, page
from sexpgpu.settings import Settings, load, positive

#: what is imported when it is needed, so that `explain E-CODE` needs no compiler
PARTS = {
    "report": "sexpgpu.explain.report:explain",
    "assumptions": "sexpgpu.explain.cost:assumptions",
    "screen": "sexpgpu.explain.screen",
    "stages": "sexpgpu.explain.stages",
    "lines": "sexpgpu.explain.lines",
    "why": "sexpgpu.explain.why:why",
    "compare": "sexpgpu.explain.compare",
    "variants": "sexpgpu.experiment.check:variants_of",
    "runs": "sexpgpu.experiment.load:choose_run",
    "measured": "sexpgpu.run.measure:measured",
    "loaded": "sexpgpu.experiment.load:load",
    "staged": "sexpgpu.compiler:stages",
    "kind": "sexpgpu.explain.cost:kind",
    "launches": "sexpgpu.explain.launches",
}


def part(name: str) -> Any:
    """A part by its name in the table."""
    module, _, attribute = PARTS[name].partition(":")
    found = import_module(module)
    return getattr(found, attribute) if attribute else found


@dataclass(frozen=True)
class Asked:
    """A command line, checked."""

    file: str
    run: str | None
    selection: Any
    settings: Settings
    json: bool
    data: bool
    device: str
    assume: dict[str, float]
    ranks: int = 1


@click.command()
@click.argument("subject", metavar="FILE|FILE:LINE|E-CODE", required=False)
@click.argument("run", required=False)
@click.option("--variant", metavar="NAME", help="Knob values of a defvariant.")
@click.option("--set", "sets", metavar="NAME=VALUE", multiple=True, help="A knob's value; may be given several times.")
@click.option("--ir", is_flag=True, help="Also print the graph of each run.")
@click.option("--after", metavar="STAGE", help="Print a stage: forms, expanded, ir, differentiated, precision, simplified; of the device: fused, plan, triton.")
@click.option("--diff", nargs=2, metavar="A B", help="What differs between two stages or variants of FILE, or between two files, or a file and a checkpoint.")
@click.option("--why", metavar="PATH", help="Which knobs and lines decide this parameter.")
@click.option("--device", metavar="DEVICE", help="The device that memory, step time, fused, plan and calls are of: cpu (the default), cuda, or h200.")
@click.option("--assume", metavar="NAME=VALUE", multiple=True, help="A number of the device: flops, bandwidth, launch, memory.")
@click.option("--assume-ranks", metavar="N", help="Plan the run for N devices: memory of each, and the bytes that they exchange.")
@click.option("--data", is_flag=True, help="Open the data, where shapes depend on it.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def command(
    subject: str | None, run: str | None, variant: str | None, sets: tuple[str, ...], ir: bool, after: str | None,
    diff: tuple[str, str] | None, why: str | None, device: str | None, assume: tuple[str, ...], assume_ranks: str | None, data: bool,
    as_json: bool,
) -> int:  # fmt: skip
    """Say what FILE means, what became of a line of it, or what the error code E-CODE means."""
    ways = [name for name, given in (("--after", after), ("--diff", diff), ("--why", why), ("--ir", ir)) if given]
    if len(ways) > 1:
        fail("E-ENV-006", f"{' and '.join(ways)} are different questions, and one is answered at a time", help=f"leave out all but {ways[0]}")
    if subject is not None and is_code(subject):
        if ways:
            fail("E-ENV-006", f"{ways[0]} is a question about a file, and {subject.upper()} is a code", help=f"sexpgpu explain {subject.upper()}")
        if as_json:
            output.show_json({"code": subject.upper(), "page": page(subject.upper())})
        else:
            output.show(page(subject.upper()))
        return 0
    settings = load(os.environ, {"device": device} if device in ("cpu", "cuda") else {})
    output.report(settings.warnings)
    device = device or settings.device
    part("kind")(device)
    assumed = part("assumptions")(assume) if assume else {}
    chosen = selection(settings, variant, sets)
    if subject is None:
        if diff is None:
            fail("E-ENV-006", "explain needs a file, a line of one, or a code", help="sexpgpu explain --help")
        return _compare(diff, None, Asked("", run, chosen, settings, as_json, data, device, assumed))
    place = part("lines").split(subject)
    asked = Asked(place[0] if place else subject, run, chosen, settings, as_json, data, device, assumed, number("--assume-ranks", assume_ranks, positive) or 1)
    if diff is not None:
        return _difference(asked, diff)
    if place is not None:
        if ways:
            fail("E-ENV-006", f"{ways[0]} is a question about a file, and `{subject}` is a line of one", help=f"leave out {ways[0]}, or the line")
        return _line(asked, place[1])
    if after is not None:
        return _stage(asked, after)
    if why is not None:
        return _why(asked, why)
    return _screen(asked, ir)


def _screen(asked: Asked, ir: bool) -> int:
    """One screen."""
    memory = asked.settings.memory
    budget = memory * 2**30 if memory is not None else asked.assume.get("memory")
    measured: Callable[[Any], Any] = part("measured") if asked.data else lambda run: run
    count = lambda operations: threads.wanted(os.environ, operations)  # noqa: E731
    report = part("report")(asked.file, asked.run, asked.selection, asked.device, asked.assume, budget, measured, asked.ranks, count)
    output.report(report.experiment.warnings)
    for traced in report.runs:
        output.report(traced.warnings)
    kernels = asked.settings.explain == "kernels"
    if asked.json:
        document = part("screen").report_document(report)
        if kernels:
            for name, run in document["runs"].items():
                run["launches"] = part("launches").documents(_staged(asked, name), asked.device)
        output.show_json(document)
        return 0
    output.show("\n".join(part("screen").lines(report, ir)))
    if kernels:
        for traced in report.runs:
            kind = part("kind")(asked.device)
            output.show("\n".join(["", f"{'calls' if kind == 'cpu' else 'launches'} of {traced.run} on {kind}", *part("launches").lines(_staged(asked, traced.run), asked.device)]))
    return 0


def _staged(asked: Asked, name: str) -> Any:
    """The stages of a run for the device that is asked about."""
    loaded, run = _named(asked, name)
    return part("staged")(loaded, part("measured")(run) if asked.data else run, part("kind")(asked.device))


def _named(asked: Asked, name: str) -> tuple[Any, Any]:
    """What is loaded, and a run of it."""
    loaded = part("loaded")(asked.file, asked.selection)
    return loaded, part("runs")(loaded.experiment, name)


def _traced(asked: Asked) -> list[Any]:
    """The runs asked for, each as the stages see it."""
    stages = part("stages")
    loaded = stages.watched(asked.file, asked.selection)
    names = [asked.run] if asked.run is not None else list(loaded.experiment.runs) or [None]  # of none: E-RUN-103
    return [stages.Traced(loaded, part("runs")(loaded.experiment, name), part("kind")(asked.device)) for name in names]


def _one(asked: Asked) -> Any:
    """The run asked for, which must be named where there are several."""
    stages = part("stages")
    loaded = stages.watched(asked.file, asked.selection)
    return stages.Traced(loaded, part("runs")(loaded.experiment, asked.run), part("kind")(asked.device), asked.ranks)


def _stage(asked: Asked, stage: str) -> int:
    text = part("stages").after(_one(asked), stage)
    if asked.json:
        output.show_json({"file": asked.file, "stage": stage.lower(), "text": text})
    else:
        output.show(text.rstrip("\n"))
    return 0


def _difference(asked: Asked, diff: tuple[str, str]) -> int:
    """Two stages of a file, or two of its variants; `base` is the file without one."""
    known = part("stages").STAGES
    if all(name.lower() in known for name in diff):
        text = part("stages").changed(_one(asked), *diff)
        if asked.json:
            output.show_json({"file": asked.file, "before": diff[0], "after": diff[1], "text": text})
        else:
            output.show(text or f"nothing differs between {diff[0].lower()} and {diff[1].lower()}")
        return 0
    plain = [name for name in diff if not _is_place(name)]
    if plain:
        variants = ("base", *part("variants")(asked.file))
        wrong = next((name for name in plain if name not in variants), None)
        if wrong is not None:
            staged = wrong.lower() in known
            what = "is a stage, and is compared with another one" if staged else f"is no stage, and no variant of {asked.file}"
            fail("E-ENV-006", f"--diff: `{wrong}` {what}",
                 help=(*(() if staged else suggestion(wrong, (*known, *variants), "names")), f"stages: {', '.join(known)}", f"variants: {', '.join(variants)}"))
    return _compare(diff, asked.file, asked)


def _is_place(text: str) -> bool:
    """Whether a side of a comparison names a file, or a checkpoint, and no stage or variant."""
    return text.endswith(".lisp") or ".lisp@" in text or "/" in text


def _compare(diff: tuple[str, str], file: str | None, asked: Asked) -> int:
    compare = part("compare")
    sides: list[Any] = []
    wrong: list[Diagnostic] = []
    for text in dict.fromkeys(diff):
        try:
            if file is None or _is_place(text):
                sides.append(compare.side(text, asked.run, asked.selection))
            else:
                variant = None if text == "base" else text
                sides.append(compare.of_file(f"{file}@{text}", file, asked.run, replace(asked.selection, variant=variant)))
        except SexpError as mistake:
            wrong += mistake.diagnostics
    if wrong:
        raise one_or_all(wrong)
    sides = sides if len(sides) == 2 else sides * 2
    verdict = compare.judge(*sides)
    if asked.json:
        output.show_json(dict(compare.as_document(verdict)))
    else:
        output.show("\n".join(part("screen").verdict_lines(verdict)))
    return 0


def _line(asked: Asked, number: int) -> int:
    found = [part("lines").line(traced, number) for traced in _traced(asked)]
    if asked.json:
        output.show_json([part("screen").plain(asdict(one)) for one in found])
    else:
        output.show("\n".join(line for one in found for line in part("screen").line_lines(one)))
    return 0


def _why(asked: Asked, path: str) -> int:
    traced = _one(asked)
    found = part("why")(traced.loaded, traced.run, path)
    if asked.json:
        output.show_json(part("screen").plain(asdict(found)) | {"knobs": list(found.knobs)})
    else:
        output.show("\n".join(part("screen").why_lines(found)))
    return 0


__all__ = ["codes", "command", "page"]
