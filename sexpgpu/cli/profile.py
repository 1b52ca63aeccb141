"""`sexpgpu profile FILE`: what each launch of a training step takes on the GPU, and how near it is to what the GPU can do; with
`--phases`, inference and training by phase, on the CPU too, and under several settings."""

from __future__ import annotations

import json
import os
import re
import subprocess
from importlib import import_module
from typing import Any

import click

from sexpgpu.cli import device, output, threads
from sexpgpu.cli.run import plan, selection
from sexpgpu.diagnostics import fail
from sexpgpu.run.children import python
from sexpgpu.settings import load, require

#: what a profile calls -> where it is; the last two bring torch
STAGES = {
    "compiler": "sexpgpu.compiler",
    "measured": "sexpgpu.run.measure:measured",
    "grant": "sexpgpu.run.storage:grant",
    "bind": "sexpgpu.run.bind:bind",
    "profile": "sexpgpu.backends.cuda.profile",
    "phases": "sexpgpu.backends.phases",
    "cuda": "sexpgpu.backends.cuda.phases",
    "cpu": "sexpgpu.backends.interpreter.phases",
    "potential": "sexpgpu.potential",
    "inference": "sexpgpu.potential.phases:inference",
}
INFERENCE = "energy-forces"  # the function of a file that is timed as inference, where there is one
SHOWN = 40  # lines of the table without --all


def stage(name: str) -> Any:
    """A stage by its name in the table."""
    module, _, attribute = STAGES[name].partition(":")
    found = import_module(module)
    return getattr(found, attribute) if attribute else found


@click.command()
@click.argument("file")
@click.argument("run", required=False)
@click.option("--variant", metavar="NAME", help="Knob values of a defvariant.")
@click.option("--set", "sets", metavar="NAME=VALUE", multiple=True, help="A knob's value; may be repeated.")
@click.option("--phases", "by_phase", is_flag=True, help="Inference, and training with its gradients, by phase.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", help="With --phases: where; the CPU's ops are timed one by one.")
@click.option("--try", "tries", metavar="NAME=VALUE[,…]", multiple=True, help="With --phases: the same under these variables; may be repeated.")
@click.option("--all", "every", is_flag=True, help="Every line of the table.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def command(file: str, run: str | None, variant: str | None, sets: tuple[str, ...], by_phase: bool, device: str, tries: tuple[str, ...], every: bool, as_json: bool) -> int:
    """Time the launches of a training step of FILE on the GPU, from its first batch and its initial weights."""
    if not by_phase and (tries or device == "cpu"):
        fail("E-ENV-001", f"{'--try' if tries else '--device cpu'} is for --phases, which is not given", help="sexpgpu profile FILE --phases")
    for pair in (p for words in tries for p in words.split(",")):
        if not re.fullmatch(r"[A-Z][A-Z0-9_]*=.*", pair):
            fail("E-ENV-001", f"--try is `{pair}`; it takes NAME=VALUE", help="--try FLASHCART_TP_BWD_SPLIT=full,FLASHCART_TP_BWD_GROUP_BUDGET=50")
    found = _profiled(file, run, variant, sets, by_phase, device)
    shown = None if every else SHOWN
    if tries:
        documents = [found.document(), *(_tried(words, file, run, variant, sets, device) for words in tries)]
        if as_json:
            output.show_json({"profiles": documents})
        else:
            output.show("\n".join([*stage("phases").lines(found, 0 if shown else None), "", *stage("phases").compared(documents)]))
    elif as_json:
        output.show_json(found.document())
    else:
        output.show("\n".join(stage("phases" if by_phase else "profile").lines(found, shown)))
    return 0


def _profiled(file: str, run: str | None, variant: str | None, sets: tuple[str, ...], by_phase: bool, place: str) -> Any:
    """A `Profile`, or `Phases`."""
    settings, compiler = load(os.environ, {"device": place}), stage("compiler")
    output.report(settings.warnings)
    require(settings)
    stage("grant")(settings)
    loaded = compiler.load(file, selection(settings, variant, sets))
    output.report(loaded.experiment.warnings)
    chosen = stage("measured")(compiler.choose_run(loaded.experiment, run), output.say)
    traced = compiler.train_graph(loaded, chosen)
    count = threads.prepare(os.environ, None, None)
    opened = device.begin(settings, chosen.deterministic)
    planned = plan(loaded, chosen, traced, 1 if opened is not None else count, settings, sets, opened)
    data = stage("bind")(planned.run, planned.bounds, output.say)
    program = planned.compile()
    try:
        program.initialise()
        batch = data.feeds.train.batch(0)
        if not by_phase:
            return stage("profile").profile(program, batch)
        training = stage("cuda").training(program, batch) if opened is not None else stage("cpu").training(program, compiler.stages(loaded, chosen), batch)
        parts = (*_inference(loaded, chosen, file, variant, sets, place, batch), training)
        mine = {name: value for name, value in sorted(os.environ.items()) if name.startswith("FLASHCART_") and name != "FLASHCART_CACHE_DIR"}
        return stage("phases").Phases(program.device if opened is not None else "cpu", mine, parts)
    finally:
        program.close()


def _inference(loaded: Any, chosen: Any, file: str, variant: str | None, sets: tuple[str, ...], place: str, batch: Any) -> tuple[Any, ...]:
    """The part of a file that has energies and forces of packed structures."""
    if not chosen.data.source.structures or loaded.ev.main.env.lookup(INFERENCE) is None:
        return ()
    made = stage("potential").Potential(file, None, run=chosen.name, variant=variant, sets=sets, function=INFERENCE, device=place)
    return (stage("inference")(made, batch),)


def _tried(words: str, file: str, run: str | None, variant: str | None, sets: tuple[str, ...], place: str) -> dict[str, Any]:
    """The document of the same profile in a process with these variables: they are read once a process."""
    command = [*python(), "-m", "sexpgpu", "profile", file, *((run,) if run else ()), "--phases", "--device", place, "--json"]
    command += ["--variant", variant] if variant else []
    command += [word for pair in sets for word in ("--set", pair)]
    done = subprocess.run(command, env=os.environ | dict(pair.split("=", 1) for pair in words.split(",")), stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.returncode)  # its message stands above
    found: dict[str, Any] = json.loads(done.stdout)
    return found
