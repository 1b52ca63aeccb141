"""A manifest against the program that wants to go on from it: harmless, trajectory-changing or impossible."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sexpgpu.diagnostics import fail
from sexpgpu.run.checkpoints.manifest import Manifest

Schema = Mapping[str, tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class Identity:
    """The present program, in the words of a manifest."""

    run: str
    trajectory: Mapping[str, str]
    knobs: Mapping[str, Any]
    texts: Mapping[str, str]  # name -> SHA-256
    versions: Mapping[str, str]
    device: str
    ranks: int
    threads: int
    steps: int | None = None


@dataclass(frozen=True)
class Comparison:
    """Lines for a person. `inexact`: what keeps the result from being the same bit for bit."""

    harmless: tuple[str, ...] = ()
    changing: tuple[str, ...] = ()
    impossible: tuple[str, ...] = ()
    inexact: tuple[str, ...] = ()


def compare(manifest: Manifest, now: Identity, saved: Schema, schema: Schema) -> Comparison:
    """`saved`: the tensors in the checkpoint's files; `schema`: those the program has."""
    impossible = _schema_differences(saved, schema)
    if manifest.run != now.run:
        impossible.insert(0, f"the checkpoint is of run `{manifest.run}`, not `{now.run}`")
    changing = [f"{name}: differs from the checkpoint's"
                for name in sorted(set(manifest.trajectory) | set(now.trajectory))
                if manifest.trajectory.get(name) != now.trajectory.get(name)]
    harmless = _knob_differences(manifest, now)
    old_texts = {text["name"]: text["sha256"] for text in manifest.program}
    for name in sorted(set(old_texts) | set(now.texts)):
        if old_texts.get(name) != now.texts.get(name):
            harmless.append(f"the text of {name} has changed")
    if manifest.steps is not None and now.steps is not None and manifest.steps != now.steps:
        harmless.append(f":steps was {manifest.steps}, is {now.steps}")
    return Comparison(tuple(harmless), tuple(changing), tuple(impossible), tuple(_inexact(manifest, now)))


def _schema_differences(saved: Schema, schema: Schema) -> list[str]:
    lines = []
    for name in sorted(set(saved) | set(schema)):
        if name not in saved:
            lines.append(f"{name}: the program has it, the checkpoint has not")
        elif name not in schema:
            lines.append(f"{name}: the checkpoint has it, the program has not")
        elif (saved[name][0], tuple(saved[name][1])) != (schema[name][0], tuple(schema[name][1])):
            lines.append(f"{name}: {type_text(saved[name])} in the checkpoint, {type_text(schema[name])} in the program")
    return lines


def type_text(kind: tuple[str, tuple[int, ...]]) -> str:
    return f"{kind[0]}[{' '.join(map(str, kind[1]))}]"


def _knob_differences(manifest: Manifest, now: Identity) -> list[str]:
    lines = []
    for name in sorted(set(manifest.knobs) | set(now.knobs)):
        if name in (f"run/{manifest.run}/steps", f"run/{now.run}/steps"):  # said as `:steps`
            continue
        old, new = (knobs.get(name, {}).get("value", "absent") for knobs in (manifest.knobs, now.knobs))
        if old != new:
            lines.append(f"knob {name}: was {old}, is {new}")
    return lines


def _inexact(manifest: Manifest, now: Identity) -> list[str]:
    lines = [f"{what} was {old}, is {new}"
             for what, old, new in (("device", manifest.device, now.device), ("ranks", manifest.ranks, now.ranks),
                                    ("threads", manifest.threads, now.threads)) if old != new]
    for name in sorted(set(manifest.versions) | set(now.versions)):
        old_version, new_version = manifest.versions.get(name), now.versions.get(name)
        if old_version != new_version:
            lines.append(f"{name} was {old_version}, is {new_version}")
    return lines


def refuse(comparison: Comparison, where: str, accept: bool) -> None:
    """E-CKPT-020 for what can never be, E-CKPT-021 for what needs `--accept`."""
    if comparison.impossible:
        fail("E-CKPT-020", f"the checkpoint {where} is of another program",
             notes=comparison.impossible + comparison.harmless,
             help="resume with the program that wrote it, or start anew in another location")
    if comparison.changing and not accept:
        fail("E-CKPT-021", f"going on from {where} would change the run's trajectory",
             notes=comparison.changing + comparison.harmless,
             help="if that is what you want, add --accept; the metrics then say where the change begins")
