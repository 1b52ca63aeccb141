"""The weights of a checkpoint as one safetensors file, under outward paths and without the optimizer."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from sexpgpu.diagnostics import fail, problem
from sexpgpu.run.checkpoints.find import Found
from sexpgpu.run.checkpoints.header import saved_schema
from sexpgpu.run.checkpoints.store import tensors
from sexpgpu.run.storage.file import sync_file

#: what an export takes of a checkpoint; `opt/` stays behind
KINDS = ("param/", "state/")


@dataclass(frozen=True)
class Exported:
    """What was written. `values`: numbers in all tensors together."""

    path: Path
    tensors: int
    values: int


def export(found: Found, out: Path, force: bool = False, averaged: bool = False) -> Exported:
    """Parameters and states of a verified checkpoint in `out`, which is whole or not there.

    Raises E-CKPT-030 where `out` exists and `force` is false, E-CKPT-031 where it cannot be written.
    """
    refuse_taken(out, force)
    taken = weights(found, averaged)
    write_whole(out, force, lambda stage: save_file(taken, stage, metadata={"sexpgpu": _provenance(found, averaged)}))
    return Exported(out, len(taken), sum(t.numel() for t in taken.values()))


def weights(found: Found, averaged: bool = False) -> dict[str, torch.Tensor]:
    """Outward path -> tensor, in the order of names; raises E-CKPT-002.

    `averaged`: moving averages in place of the parameters that have one; E-CKPT-036 where none has.
    """
    names = _outward(found, saved_schema(found))
    if averaged:
        names = _averages(found, names, saved_schema(found))
    return dict(sorted((names[full], tensor) for full, tensor in _read(found, names)))


def _outward(found: Found, full: Mapping[str, object]) -> dict[str, str]:
    names = {name: name.partition("/")[2] for name in full if name.startswith(KINDS)}
    if len(set(names.values())) != len(names) or not all(names.values()):
        fail("E-CKPT-002", f"the checkpoint {found.folder} names its tensors in an odd way")
    return names


def _averages(found: Found, names: Mapping[str, str], full: Mapping[str, object]) -> dict[str, str]:
    averages = {name: name.removeprefix("ema/") for name in full if name.startswith("ema/")}
    if not averages:
        fail("E-CKPT-036", f"the checkpoint {found.folder} has no averaged weights", help="leave --weights ema out")
    taken = {f"param/{path}" for path in averages.values()}
    return {name: path for name, path in names.items() if name not in taken} | averages


def _read(found: Found, names: Mapping[str, str]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of these names; those of the optimizer are let go."""
    return ((name, tensor) for name, tensor in tensors(found) if name in names)


def _provenance(found: Found, averaged: bool) -> str:
    """Where the weights come from: one key, because the format keeps several in no fixed order."""
    m = found.manifest
    said = {"run": m.run, "run_id": m.run_id, "slug": m.slug, "step": m.step, "weights": "ema" if averaged else "raw"}
    return json.dumps(said, sort_keys=True)


def refuse_taken(out: Path, force: bool) -> None:
    """E-CKPT-030 where `out` exists and `force` is false, E-CKPT-031 where it cannot be a file: before any work."""
    if out.is_dir():
        fail("E-CKPT-031", f"{out} is a folder", help=f"name a file in it: {out / 'out'}{out.suffix}")
    if not out.parent.is_dir():
        fail("E-CKPT-031", f"the folder {out.parent} does not exist", help=f"mkdir -p {out.parent}")
    if os.path.lexists(out) and not force:
        fail("E-CKPT-030", f"{out} exists", help=("--force replaces it", "or name another file"))


def write_whole(out: Path, force: bool, write: Callable[[Path], None]) -> None:
    """`write` fills a file beside `out`, which then takes its name; raises E-CKPT-031 (exit 3)."""
    stage = out.with_name(f".{out.name}.tmp-{os.getpid()}")
    try:
        with _orderly_end():
            write(stage)
            sync_file(stage)
            _publish(stage, out, force)
            sync_file(out.parent)
    except (OSError, SafetensorError) as error:
        raise problem("E-CKPT-031", f"{out} could not be written: {getattr(error, 'strerror', None) or error}",
                      help="name a file in a folder that you may write to", exit_code=3) from None
    finally:
        with contextlib.suppress(OSError):
            stage.unlink()


@contextlib.contextmanager
def _orderly_end() -> Iterator[None]:
    """SIGTERM ends the process by an exception (exit code 143), so that nothing half-written is left behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _publish(stage: Path, out: Path, force: bool) -> None:
    """A link fails where the name was taken meanwhile; a rename would replace it."""
    if force:
        os.replace(stage, out)
        return
    try:
        os.link(stage, out)
    except FileExistsError:
        refuse_taken(out, force)
    except OSError:  # a file system without links
        os.replace(stage, out)
