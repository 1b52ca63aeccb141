"""Whether a checkpoint is of the program at hand, for those who compute with its weights: potentials, and `sexpgpu.load`."""

from __future__ import annotations

import hashlib

from sexpgpu.compiler import Loaded, train_graph, trajectory, versions
from sexpgpu.experiment.traced import TracedRun
from sexpgpu.run.checkpoints.compare import Identity, compare
from sexpgpu.run.checkpoints.find import Found
from sexpgpu.run.initial import COMPONENT
from sexpgpu.run.measure import remembered
from sexpgpu.run.plain import plain_knobs


def unlike(loaded: Loaded, traced: TracedRun, found: Found) -> tuple[str, ...]:
    """In what the program differs from the one that a checkpoint was trained with, and whether it is healthy; nothing if it is the same."""
    manifest = found.manifest
    run = remembered(traced.run, manifest.data)
    now = trajectory(traced if run is traced.run else train_graph(loaded, run), run)
    now |= {name: digest for name, digest in manifest.trajectory.items() if name.startswith("data ") or name == COMPONENT}
    texts = {text.name: hashlib.sha256(text.text.encode()).hexdigest() for text in loaded.experiment.texts}
    identity = Identity(traced.run.name, now, plain_knobs(loaded.experiment.knobs), texts, versions(), manifest.device,
                        manifest.ranks, manifest.threads)
    found_differences = compare(manifest, identity, {}, {})
    lines = (*found_differences.impossible, *found_differences.changing)
    said = [f"{found.folder}: {'; '.join([*lines, *found_differences.harmless])}"] if lines else []
    if manifest.health != "healthy":
        said.append(f"{found.folder} is suspect: not every number in it is finite")
    return tuple(said)
