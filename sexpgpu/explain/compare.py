"""`--diff A B` of two programs: files, variants, or a file and a checkpoint, judged as a resume judges them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from sexpgpu.backends.leaves import schema
from sexpgpu.compiler import train_graph, trajectory, versions
from sexpgpu.diagnostics import fail
from sexpgpu.experiment.load import Selection, choose_run, load
from sexpgpu.run.checkpoints.compare import Comparison, Identity, Schema, compare
from sexpgpu.run.checkpoints.find import absolute, at_path
from sexpgpu.run.checkpoints.header import saved_schema
from sexpgpu.run.checkpoints.manifest import Manifest
from sexpgpu.run.plain import plain_knobs

#: parts of a trajectory that come from content, which is not opened here
_CONTENT = ("data ", "init")


@dataclass(frozen=True)
class Side:
    """One of the two: what a manifest would say of it, and its tensors."""

    name: str
    manifest: Manifest
    schema: Schema
    checkpoint: bool = False


@dataclass(frozen=True)
class Verdict:
    """`word`: equal, harmless, trajectory-changing or impossible."""

    a: str
    b: str
    word: str
    comparison: Comparison


def of_file(name: str, file: str, run: str | None, selection: Selection) -> Side:
    """The side of a run of a file."""
    loaded = load(file, selection)
    chosen = choose_run(loaded.experiment, run)
    traced = train_graph(loaded, chosen)
    texts = [{"name": t.name, "text": t.text, "sha256": hashlib.sha256(t.text.encode()).hexdigest()} for t in loaded.experiment.texts]
    manifest = Manifest(
        run_id="", slug="", run=chosen.name, step=0, cursor={}, seed=chosen.seed, knobs=plain_knobs(loaded.experiment.knobs), ir_hash="",
        program=texts, data={}, versions=versions(), device="cpu", ranks=1, threads=1, kernels={}, trajectory=trajectory(traced, chosen),
        trajectory_hash="", digest="", health="healthy", files=[], steps=chosen.steps,
    )  # fmt: skip
    return Side(name, manifest, schema(traced, chosen.precision))


def of_checkpoint(path: str) -> Side:
    """The side of a checkpoint's folder or URL."""
    found = at_path(absolute(path))
    return Side(path, found.manifest, saved_schema(found), True)


def side(text: str, run: str | None, selection: Selection) -> Side:
    """`model.lisp`, `model.lisp@variant`, or a checkpoint."""
    file, at, variant = text.partition("@")
    if file.endswith(".lisp") and (at or not Path(text).is_dir()):
        return of_file(text, file, run, replace(selection, variant=variant) if at else selection)
    return of_checkpoint(text)


def judge(a: Side, b: Side) -> Verdict:
    """Whether a run of `a` could go on as `b`."""
    if b.checkpoint and not a.checkpoint:
        a, b = b, a
    if b.checkpoint:
        fail("E-ENV-006", "--diff compares a checkpoint with a file, and got two checkpoints", help="sexpgpu explain --diff model.lisp runs/…/step-100")
    was, now = a.manifest, b.manifest
    opened = a.checkpoint  # its manifest knows the data's content, which this command does not open
    kept = {k: v for k, v in was.trajectory.items() if not (opened and k.startswith(_CONTENT))}
    present = {k: v for k, v in now.trajectory.items() if not (opened and k.startswith(_CONTENT))}
    identity = Identity(now.run, present, now.knobs, {t["name"]: t["sha256"] for t in now.program}, now.versions, was.device, was.ranks,
                        was.threads, now.steps, {}, {t["name"]: t["text"] for t in now.program})  # fmt: skip
    found = compare(replace(was, trajectory=kept), identity, a.schema, b.schema)
    return Verdict(a.name, b.name, word(found), found)


def word(found: Comparison) -> str:
    """The worst of what was found."""
    if found.impossible:
        return "impossible"
    if found.changing:
        return "trajectory-changing"
    return "harmless" if found.harmless or found.inexact else "equal"


def as_document(found: Verdict) -> Mapping[str, object]:
    """For `--json`."""
    c = found.comparison
    return {"a": found.a, "b": found.b, "verdict": found.word, "impossible": list(c.impossible), "changing": list(c.changing),
            "harmless": list(c.harmless), "inexact": list(c.inexact)}  # fmt: skip
