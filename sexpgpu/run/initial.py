"""`:init (from …)`: tensors of a safetensors file as the values that a run starts with.

`open_weights` binds the file, as data are bound; `fit` checks it against the program before anything is allocated;
`start` puts the tensors in. A resume does none of it: its manifest has the digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from sexpgpu.diagnostics import SexpError, SexpErrors, fail, printable, problem
from sexpgpu.experiment.model import Init, Run
from sexpgpu.run.checkpoints.compare import Schema, type_text
from sexpgpu.run.checkpoints.header import file_schema
from sexpgpu.run.checkpoints.manifest import Manifest, Torn
from sexpgpu.run.program import Program
from sexpgpu.run.storage import is_remote, local_copy, split

#: the component of the trajectory that holds the file's SHA-256
COMPONENT = "init file"
#: names of a program that a file may give; the optimizer's start at their own values
KINDS = ("param/", "state/")
SHOWN = 20


@dataclass(frozen=True)
class Weights:
    """A file that was found whole. `schema`: its own names."""

    init: Init
    path: Path
    digest: str
    schema: Schema


def open_weights(init: Init, say: Callable[[str], None]) -> Weights:
    """Reads the header and the digest; raises E-DATA-040 and E-DATA-041. `say` hears of a path outside the folder.

    A file in a bucket is copied first, with the credentials of the data role.
    """
    try:
        remote = is_remote(init.path)
        path = local_copy(init.path, "data") if remote else Path(split(init.path, init.folder)[1])
    except SexpError as error:
        raise SexpErrors([replace(d, span=d.span or init.span) for d in error.diagnostics]) from None
    if not remote and not path.resolve().is_relative_to(Path(init.folder).resolve()):
        say(f"init: opening {printable(str(path.resolve()))}, outside the experiment's folder")
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "is not there"
        fail("E-DATA-040", f"the weights {path} to start from: the file {what}", init.span,
             help="a relative path goes by the folder of the file")
    try:
        schema = file_schema(path)
        with safe_open(path, framework="pt", device="cpu"):  # its lengths agree with its header
            pass
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except PermissionError as error:
        raise problem("E-DATA-040", f"the weights {path} to start from: {error.strerror}", init.span) from None
    except (Torn, SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise problem("E-DATA-041", f"{path} is not a whole safetensors file: {error}", init.span) from None
    return Weights(init, path, digest, schema)


def component(run: Run, weights: Weights | None, manifest: Manifest | None) -> dict[str, str]:
    """The file's part of the trajectory: its own at a first start, the manifest's after it."""
    if weights is not None:
        return {COMPONENT: weights.digest}
    if run.init is not None and manifest is not None and COMPONENT in manifest.trajectory:
        return {COMPONENT: manifest.trajectory[COMPONENT]}
    return {}


def fit(weights: Weights, schema: Schema, say: Callable[[str], None]) -> dict[str, str]:
    """Name of the program -> name in the file. Raises E-DATA-042 with every mismatch; `say` hears what is absent."""
    names: dict[str, str] = {}
    absent, wrong = [], []
    for full in (name for name in schema if name.startswith(KINDS)):
        kind, _, outward = full.partition("/")
        old = weights.init.old_name(outward)
        found = next((name for name in (old, f"{kind}/{old}") if name in weights.schema), None)
        if found is None:
            absent.append(outward)
        elif weights.schema[found] != schema[full]:
            origin = "" if old == outward else f" ({old})"
            wrong.append(f"{outward}{origin}: {type_text(weights.schema[found])} in the file, {type_text(schema[full])} in the program")
        else:
            names[full] = found
    if wrong:
        fail("E-DATA-042", f"the weights {weights.path} do not fit the program", weights.init.span, notes=wrong,
             help="give the layer another name, or make the model as it was when the file was written")
    if not names:
        fail("E-DATA-043", f"no parameter of the program is in {weights.path}", weights.init.span,
             notes=("the program has " + _list(absent), "the file has " + _list(sorted(weights.schema))),
             help='say which is which: :map (("new/**" "old/**"))')
    say(f"init: {len(names)} of {len(names) + len(absent)} tensors start from {printable(str(weights.path))}")
    if absent:
        say(f"init: not in the file, so with their own initial values: {_list(absent)}")
    return names


def start(program: Program, weights: Weights, names: Mapping[str, str]) -> None:
    """Puts the tensors into an initialised program; an average starts at its parameter."""
    state = dict(program.state())
    try:
        with safe_open(weights.path, framework="pt", device="cpu") as file:
            for full, name in names.items():
                state[full] = file.get_tensor(name).clone()
    except (SafetensorError, OSError) as error:
        raise problem("E-DATA-041", f"{weights.path} cannot be read: {error}", weights.init.span) from None
    for full in names:
        average = "ema/" + full.partition("/")[2]
        if full.startswith("param/") and average in state:
            state[average] = torch.clone(state[full])
    program.load(state, 0)


def _list(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return (", ".join(printable(name) for name in names[:SHOWN]) or "nothing") + more
