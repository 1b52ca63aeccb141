"""A manifest against the program that wants to go on from it: harmless, trajectory-changing or impossible, all named."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from sexpgpu.diagnostics import fail, printable
from sexpgpu.run.checkpoints.manifest import Manifest

Schema = Mapping[str, tuple[str, tuple[int, ...]]]
LINES = 6  # changed lines of a text shown
_ABSENT = "absent"


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
    data: Mapping[str, Any] = field(default_factory=dict)  # as `Manifest.data`
    sources: Mapping[str, str] = field(default_factory=dict)  # name -> text
    shard: str | None = None  # as in a manifest; None: not of interest


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
    harmless = _knob_differences(manifest, now) + _text_differences(manifest, now)
    if manifest.steps is not None and now.steps is not None and manifest.steps != now.steps:
        harmless.append(f":steps was {manifest.steps}, is {now.steps}")
    return Comparison(tuple(harmless), tuple(_changes(manifest, now.trajectory, now.data)), tuple(impossible), tuple(_inexact(manifest, now)))


def same_trajectory(manifest: Manifest, trajectory: Mapping[str, str], data: Mapping[str, Any]) -> bool:
    """Whether a program with this trajectory goes on as the one that wrote the checkpoint would have; by value."""
    return next(_changes(manifest, trajectory, data), None) is None


def _changes(manifest: Manifest, trajectory: Mapping[str, str], data: Mapping[str, Any]) -> Iterator[str]:
    """A line for each value of the trajectory that differs; values are compared, not their spelling."""
    for name in sorted(set(manifest.trajectory) | set(trajectory)):
        old, new = manifest.trajectory.get(name), trajectory.get(name)
        source = name.removeprefix("data ")
        if old == new:
            continue
        if name.startswith("data ") and old is not None and new is not None:
            yield from _contents(name, manifest.data.get(source), data.get(source), old, new)
        elif old is None or new is None:
            yield f"{name}: the {'program' if old is None else 'checkpoint'} has it, the {'checkpoint' if old is None else 'program'} has not"
        else:
            yield from _values(name, _read(old), _read(new))


def _values(name: str, old: Any, new: Any) -> Iterator[str]:
    """Differences of two JSON values, by key."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(set(old) | set(new)):
            yield from _values(f"{name}: {key}", old.get(key, _ABSENT), new.get(key, _ABSENT))
    elif _hash(old) and _hash(new) and old != new:
        yield f"{name}: differs from the checkpoint's (hash {old[:12]} was, {new[:12]} is)"
    elif not equal(old, new):
        yield f"{name}: was {_show(old)}, is {_show(new)}"


def _contents(name: str, old: Any, new: Any, old_digest: str, new_digest: str) -> Iterator[str]:
    """What differs in the content of a source: its digest, its count, and each statistic of each column."""
    lines = [f"{name}: the content's digest was {old_digest[:12]}…, is {new_digest[:12]}…"]
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in ("location", "count", "statistics"):
            lines += _values(f"{name}: {key}", _plain(old.get(key)), _plain(new.get(key)))
    yield from lines


def _plain(value: Any) -> Any:
    """As a manifest would give it back, so that a tuple equals its list."""
    return json.loads(json.dumps(value, default=str))


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _hash(value: Any) -> bool:
    return isinstance(value, str) and len(value) == 64 and all(c in "0123456789abcdef" for c in value)


def equal(old: Any, new: Any) -> bool:
    """Whether two values of a manifest are the same number, or the same anything: 1/16 is 0.0625."""
    if old == new:
        return type(old) is not bool and type(new) is not bool or type(old) is type(new)
    a, b = _number(old), _number(new)
    if a is None or b is None:
        return False
    return a == b or ((isinstance(old, float) or isinstance(new, float)) and float(a) == float(b))


def _number(value: Any) -> Fraction | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        if isinstance(value, str):
            top, mark, bottom = value.partition("/")
            return Fraction(int(top), int(bottom)) if mark else None
        return Fraction(value)
    except (ValueError, ZeroDivisionError, OverflowError):
        return None


def _show(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return printable(text if len(text) <= 120 else text[:119] + "…")


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
        old, new = (knobs.get(name, {}).get("value", _ABSENT) for knobs in (manifest.knobs, now.knobs))
        if not equal(old, new):
            lines.append(f"knob {name}: was {old}, is {new}")
    return lines


def _text_differences(manifest: Manifest, now: Identity) -> list[str]:
    """Each changed text, with its changed lines; which of them matter, the trajectory says."""
    lines: list[str] = []
    old_texts = {text["name"]: text for text in manifest.program}
    for name in sorted(set(old_texts) | set(now.texts)):
        if name in old_texts and old_texts[name]["sha256"] == now.texts.get(name):
            continue
        lines.append(f"the text of {name} has changed")
        if name in old_texts and name in now.sources:
            lines += _changed_lines(name, old_texts[name].get("text", ""), now.sources[name])
    return lines


def _changed_lines(name: str, old: str, new: str) -> list[str]:
    before, after = old.splitlines(), new.splitlines()
    lines: list[str] = []
    for kind, a, b, c, d in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if kind != "equal":
            lines += [f"{name}:{i + 1} was `{_show(before[i].strip())}`" for i in range(a, b) if before[i].strip()]
            lines += [f"{name}:{i + 1} is  `{_show(after[i].strip())}`" for i in range(c, d) if after[i].strip()]
    return lines[:LINES] + ([f"{name}: and {len(lines) - LINES} more lines"] if len(lines) > LINES else [])


def _inexact(manifest: Manifest, now: Identity) -> list[str]:
    lines = [f"{what} was {old}, is {new}"
             for what, old, new in (("device", manifest.device, now.device), ("ranks", manifest.ranks, now.ranks),
                                    ("threads", manifest.threads, now.threads)) if old != new]
    if now.shard is not None and manifest.shard != now.shard:
        lines.append(f":shard was {manifest.shard or 'none'}, is {now.shard or 'none'}")
    for name in sorted(set(manifest.versions) | set(now.versions)):
        old_version, new_version = manifest.versions.get(name), now.versions.get(name)
        if old_version != new_version:
            lines.append(f"{name} was {old_version}, is {new_version}")
    return lines


def refuse(comparison: Comparison, where: str, accept: bool) -> None:
    """E-CKPT-020 for what can never be, E-CKPT-021 for what needs `--accept`."""
    if comparison.impossible:
        fail("E-CKPT-020", f"the checkpoint {where} is of another program",
             notes=comparison.impossible + comparison.changing + comparison.harmless,
             help="resume with the program that wrote it, or start anew in another location")
    if comparison.changing and not accept:
        fail("E-CKPT-021", f"going on from {where} would change the run's trajectory",
             notes=comparison.changing + comparison.harmless,
             help="if that is what you want, add --accept; the metrics then say where the change begins")
