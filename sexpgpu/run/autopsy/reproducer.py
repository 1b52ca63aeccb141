"""The folder of a step that was not finite: the program's texts, its knobs, step, seed, and parameters and states.

    reproducer.json  program/<texts>  state.safetensors  [batch.safetensors]

Nothing of the data is in it unless that was asked for. What the library wrote is not in it either: the installed one is used.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sexpgpu.diagnostics import fail
from sexpgpu.run.checkpoints.manifest import Torn
from sexpgpu.run.checkpoints.tensors import decode, encode

NAME = "reproducer.json"
FORMAT = 1
MAX_BYTES = 64 << 20
LIBRARY = "lisp-stdlib/"
_STEP = re.compile(r"[A-Za-z0-9._-]+-not-finite-step-\d+", re.ASCII)


@dataclass(frozen=True)
class Facts:
    """`file`: the main text's name. `folder`: where the data's relative paths went from. `said`: what the autopsy found."""

    file: str
    run: str
    step: int
    seed: int
    precision: str
    variant: str | None
    sets: tuple[str, ...]
    knobs: Mapping[str, Any]
    ir_hash: str
    versions: Mapping[str, str]
    folder: str
    said: tuple[str, ...]
    format: int = FORMAT


@dataclass(frozen=True)
class Reproducer:
    """`program`: the path of the main file. `batch` is None where the data must be read again."""

    facts: Facts
    program: Path
    state: dict[str, torch.Tensor]
    batch: dict[str, np.ndarray] | None


def state_folder() -> Path:
    """Where reproducers go when a run has no folder of its own."""
    home = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return Path(home) / "sexpgpu" / "autopsies"


def write(folder: Path, facts: Facts, texts: Mapping[str, str], state: Mapping[str, torch.Tensor],
          batch: Mapping[str, np.ndarray] | None) -> None:
    """Makes the folder, whole or not at all; one of that name that an earlier attempt left is replaced. Raises OSError."""
    stage = folder.with_name(f".{folder.name}.tmp-{os.getpid()}")
    shutil.rmtree(stage, ignore_errors=True)
    try:
        (stage / "program").mkdir(parents=True)
        for name, text in texts.items():
            if not name.startswith(LIBRARY):
                path = stage / "program" / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
        _tensors(stage / "state.safetensors", {n: t.detach().cpu().contiguous() for n, t in state.items()})
        if batch is not None:
            _tensors(stage / "batch.safetensors", {n: torch.from_numpy(np.ascontiguousarray(v)) for n, v in batch.items()})
        (stage / NAME).write_text(json.dumps(asdict(facts), indent=1, sort_keys=True) + "\n", encoding="utf-8")
        if (folder / NAME).exists() and _STEP.fullmatch(folder.name):
            shutil.rmtree(folder)
        os.rename(stage, folder)
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def read(folder: Path) -> Reproducer:
    """E-RUN-040 where it is no reproducer, or not a whole one."""
    try:
        raw = json.loads(_bytes(folder / NAME))
        if raw.get("format") != FORMAT:
            fail("E-RUN-040", f"{folder / NAME} has format {raw.get('format')!r}; this version reads format {FORMAT}")
        values: dict[str, Any] = {f.name: raw[f.name] for f in fields(Facts)}
        facts = Facts(**values | {"sets": tuple(map(str, raw["sets"])), "said": tuple(map(str, raw["said"]))})
        program = (folder / "program" / facts.file).resolve()
        if not program.is_relative_to((folder / "program").resolve()) or not program.is_file():
            raise Torn("it has no program")
        state = dict(decode(bytearray((folder / "state.safetensors").read_bytes())))
        path, batch = folder / "batch.safetensors", None
        if path.exists():
            batch = {name: tensor.numpy() for name, tensor in decode(bytearray(path.read_bytes()))}
        if not isinstance(facts.step, int) or facts.step < 1:
            raise Torn("its step is no step")
    except OSError as error:
        fail("E-RUN-040", f"{folder} is no reproducer: {error.strerror or error}", help="name the folder that E-RUN-001 named")
    except (Torn, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        fail("E-RUN-040", f"{folder} is no whole reproducer: {error}", help="name the folder that E-RUN-001 named")
    return Reproducer(facts, program, state, batch)


def _bytes(path: Path) -> bytes:
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise Torn(f"{NAME} is larger than 64 MiB")
    return data


def _tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    with path.open("wb") as file:
        for piece in encode(tensors):
            file.write(piece)
