"""Writing and reading the tensors of a checkpoint: safetensors parts, then the manifest, then the rename."""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from sexpgpu.diagnostics import problem
from sexpgpu.run.checkpoints.find import Found, whole
from sexpgpu.run.checkpoints.manifest import NAME, Manifest, Torn
from sexpgpu.run.storage.file import FileStore, sync_file

PART_BYTES = 2 << 30
HEADER_BYTES = 64 << 20
#: the word of the IR <- the word of a safetensors header
DTYPES = {"F64": "f64", "F32": "f32", "F16": "f16", "BF16": "bf16", "I64": "i64", "I32": "i32", "I16": "i16",
          "I8": "i8", "U8": "u8", "U16": "u16", "BOOL": "bool"}


def save(store: FileStore, state: Mapping[str, torch.Tensor], manifest: Manifest, keep: int) -> str:
    """Writes `<location>/step-<n>` durably and prunes to `keep`; returns its health.

    `digest`, `health` and `files` of the manifest are filled in here. Raises E-CKPT-012 (exit 3); then nothing that
    was there before has changed.
    """
    stage = None
    try:
        stage = store.stage(manifest.step)
        tensors = {name: state[name].detach().cpu().contiguous() for name in sorted(state)}
        filled = replace(manifest, digest=state_digest(tensors), health=health(tensors), files=_parts(stage, tensors))
        path = stage / NAME
        path.write_text(filled.to_json(), encoding="utf-8")
        sync_file(path)
        store.publish(stage, manifest.step)
    except (OSError, SafetensorError) as error:
        if stage is not None:
            shutil.rmtree(stage, ignore_errors=True)
        raise problem("E-CKPT-012", f"the checkpoint of step {manifest.step} in {store.root} could not be written: "
                      f"{getattr(error, 'strerror', None) or error}", exit_code=3) from None
    prune(store, manifest.run_id, keep, None if manifest.best is None else manifest.best["step"])
    return filled.health


def prune(store: FileStore, run_id: str, keep: int, best: int | None = None) -> None:
    """Leaves the newest `keep` of this run, and the newest healthy one and the one of step `best` whatever their age."""
    ours = [found for found in whole(store.root)[0] if found.manifest.run_id == run_id]
    stays = {found.manifest.step for found in ours[: max(1, keep)]}
    healthy = [found.manifest.step for found in ours if found.manifest.health == "healthy"]
    for found in ours:
        if found.manifest.step not in stays | set(healthy[:1]) | {best}:
            try:
                store.remove(found.manifest.step)
            except OSError:
                return  # only disk space: the next save tries again


def state_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 over name, dtype, shape and bytes of every tensor, in name order."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def health(tensors: Mapping[str, torch.Tensor]) -> str:
    finite = all(bool(torch.isfinite(t).all()) for t in tensors.values() if t.is_floating_point())
    return "healthy" if finite else "suspect"


def _groups(tensors: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Cut at PART_BYTES in name order; a tensor is never divided."""
    groups: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name in sorted(tensors):
        more = tensors[name].numel() * tensors[name].element_size()
        if groups[-1] and size + more > PART_BYTES:
            groups.append({})
            size = 0
        # a view into an arena shares its storage with others, which the format has no word for
        groups[-1][name] = tensors[name].clone()
        size += more
    return groups


def _parts(stage: Path, tensors: Mapping[str, torch.Tensor]) -> list[dict[str, object]]:
    groups = _groups(tensors)
    entries: list[dict[str, object]] = []
    for i, group in enumerate(groups, 1):
        path = stage / f"part-{i:05d}-of-{len(groups):05d}.safetensors"
        save_file(group, path)
        sync_file(path)
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        entries.append({"name": path.name, "size": path.stat().st_size, "sha256": digest})
    return entries


def saved_schema(found: Found) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> (dtype, shape) from the headers alone; nothing of a tensor's size is allocated. Raises E-CKPT-002."""
    schema: dict[str, tuple[str, tuple[int, ...]]] = {}
    for path in _paths(found):
        try:
            schema |= file_schema(path)
        except (Torn, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise problem("E-CKPT-002", f"the checkpoint file {path} cannot be read: {error}") from None
    return schema


def file_schema(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Of one safetensors file. Raises Torn, OSError, ValueError, KeyError, TypeError or RecursionError."""
    schema = {}
    for name, entry in _header(path).items():
        if name != "__metadata__":
            dtype = DTYPES.get(entry["dtype"], str(entry["dtype"]))
            schema[name] = (dtype, tuple(int(size) for size in entry["shape"]))
    return schema


def _header(path: Path) -> dict:
    with open(path, "rb") as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else -1
        if not 2 <= length <= HEADER_BYTES:
            raise Torn("its header is not of a size that can be")
        header = json.loads(file.read(length))
    if not isinstance(header, dict):
        raise Torn("its header is no object")
    return header


def load(found: Found) -> dict[str, torch.Tensor]:
    """Every tensor of a verified checkpoint whose schema was compared; raises E-CKPT-002."""
    return dict(_tensors(found))


def _tensors(found: Found) -> Iterator[tuple[str, torch.Tensor]]:
    for path in _paths(found):
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    yield name, file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise problem("E-CKPT-002", f"the checkpoint file {path} cannot be read: {error}") from None


def _paths(found: Found) -> list[Path]:
    return [found.folder / entry["name"] for entry in found.manifest.files]
