"""The tensors that a model begins with: the run's initial values, a checkpoint's, or those of an exported file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from sexpgpu.compiler import Loaded
from sexpgpu.diagnostics import fail, problem
from sexpgpu.experiment.model import Init
from sexpgpu.experiment.trace import Spec
from sexpgpu.experiment.traced import TracedRun
from sexpgpu.ops.initial import initial_value
from sexpgpu.ops.philox import draw_key
from sexpgpu.potential.unlike import unlike
from sexpgpu.python.module import dtype_of
from sexpgpu.run.checkpoints.compare import Schema, type_text
from sexpgpu.run.checkpoints.export import weights
from sexpgpu.run.checkpoints.find import Found, absolute, at_path, whole
from sexpgpu.run.checkpoints.header import saved_schema
from sexpgpu.run.initial import open_weights
from sexpgpu.run.measure import remembered
from sexpgpu.run.storage import is_remote, local_copy, open_storage


@dataclass(frozen=True)
class Start:
    """Outward path -> tensor, the updates that made them, the checkpoint's thread count, and what a person should hear."""

    values: dict[str, torch.Tensor]
    updates: int = 0
    threads: int | None = None
    warnings: tuple[str, ...] = ()
    statistics: dict[str, Any] = field(default_factory=dict)  # of data, that the checkpoint remembers


def start(loaded: Loaded, traced: TracedRun, source: str | None, averaged: bool) -> Start:
    """`source`: a checkpoint step-N, a location with checkpoints, a safetensors file, or None: initial values."""
    if source is None:
        specs = traced.params | traced.states
        return Start({name: _initial(spec, traced) for name, spec in specs.items()})
    exported = is_remote(source) and source.endswith(".safetensors")
    path = local_copy(source, "checkpoint") if exported else Path.cwd() / source
    if (not exported and "://" in source) or path.is_dir() or path.suffix != ".safetensors":
        return _checkpoint(loaded, traced, _named(absolute(source)), averaged)
    if averaged:
        fail("E-CKPT-036", f"{source} has one set of weights", help="leave weights='ema' out: sexpgpu export --weights ema chose them")
    return Start(_file(path, traced))


def _initial(spec: Spec, traced: TracedRun) -> torch.Tensor:
    run, path = traced.run, str(spec.node.attrs["path"])
    value = initial_value(spec.init.kind, dict(spec.init.settings), spec.shape, draw_key(run.seed, path, 0, "init"))
    return torch.from_numpy(value.copy()).to(dtype_of(spec.dtype, run.precision))


def _schema(traced: TracedRun) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Outward path -> what the program has there."""
    retyped = {"f32": "f64"} if traced.run.precision == "f64" else {}
    return {name: (retyped.get(spec.dtype, spec.dtype), spec.shape) for name, spec in (traced.params | traced.states).items()}


def _named(place: str) -> Found:
    """The checkpoint at a path or address: of a location, its newest healthy one."""
    if open_storage(place, "checkpoint").head("manifest.json") is None:
        healthy = [found for found in whole(place)[0] if found.manifest.health == "healthy"]
        if healthy:
            return at_path(healthy[0].folder)
    return at_path(place)


def _checkpoint(loaded: Loaded, traced: TracedRun, found: Found, averaged: bool) -> Start:
    manifest = found.manifest
    full = saved_schema(found)
    saved = {name.partition("/")[2]: kind for name, kind in full.items() if name.startswith(("param/", "state/"))}
    _refuse(str(found.folder), saved, _schema(traced))
    said = unlike(loaded, traced, found)
    return Start(weights(found, averaged), manifest.step, manifest.threads, said, dict(remembered(traced.run, manifest.data).statistics))


def _file(path: Path, traced: TracedRun) -> dict[str, torch.Tensor]:
    """The tensors of an exported file, or of a checkpoint's part."""
    opened = open_weights(Init(str(path), str(path.parent)), lambda text: None)
    plain = {name: name.partition("/")[2] if name.startswith(("param/", "state/")) else name for name in opened.schema}
    wanted = {name: outward for name, outward in plain.items() if not name.startswith(("opt/", "ema/"))}
    schema = _schema(traced)
    _refuse(str(path), {outward: opened.schema[name] for name, outward in wanted.items()}, schema)
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return {outward: file.get_tensor(name) for name, outward in wanted.items()}
    except (SafetensorError, OSError) as error:
        raise problem("E-DATA-041", f"{path} cannot be read: {error}") from None


def _refuse(where: str, saved: Schema, schema: Schema) -> None:
    """E-CKPT-020 with every name, shape and dtype that differs, before a tensor is read."""
    lines = list(_differences(saved, schema))
    if lines:
        fail("E-CKPT-020", f"the weights of {where} are of another program", notes=lines,
             help="give the variant and the knobs (set=) that the run had")


def _differences(saved: Schema, schema: Mapping[str, tuple[str, tuple[int, ...]]]) -> Iterable[str]:
    for name in sorted(set(saved) | set(schema)):
        if name not in saved:
            yield f"{name}: the program has it, the weights have not"
        elif name not in schema:
            yield f"{name}: the weights have it, the program has not"
        elif (saved[name][0], tuple(saved[name][1])) != (schema[name][0], tuple(schema[name][1])):
            yield f"{name}: {type_text(saved[name])} in the weights, {type_text(schema[name])} in the program"
