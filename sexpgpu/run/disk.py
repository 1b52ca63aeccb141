"""The disk that a run's checkpoints take, looked at before the first step: a full disk hours later helps nobody.

Parsed data is written before the run starts and checked where that happens (run/data).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from sexpgpu.diagnostics import Diagnostic, fail, note_warning, render
from sexpgpu.run.data.cache import size
from sexpgpu.run.storage.file import step_folders

BYTES = {"f64": 8, "i64": 8, "f32": 4, "i32": 4, "u32": 4, "bf16": 2, "f16": 2, "i16": 2, "u16": 2}  # others: 1


def state_bytes(schema: Mapping[str, tuple[str, tuple[int, ...]]]) -> int:
    """Bytes of one checkpoint's tensors."""
    total = 0
    for dtype, shape in schema.values():
        count = 1
        for n in shape:
            count *= n
        total += count * BYTES.get(dtype, 1)
    return total


def check_disk(location: str, schema: Mapping[str, tuple[str, tuple[int, ...]]], keep: int, best: bool, say: Callable[[str], None]) -> None:
    """`need`, its warning said."""
    warning = need(location, schema, keep, best)
    if warning is not None:
        say(render(warning))


def need(location: str, schema: Mapping[str, tuple[str, tuple[int, ...]]], keep: int, best: bool) -> Diagnostic | None:
    """E-DATA-016 where not even one checkpoint fits; a warning with the numbers where not all that are kept will.

    A new checkpoint is whole before an old one goes: `keep`, one more, and the best one. Buckets have no disk to look at.
    """
    if "://" in location:
        return None
    root = Path(location)
    try:
        there = len(step_folders(root))
        while not root.exists():
            root = root.parent
        free = shutil.disk_usage(root).free
    except OSError:
        return None  # what is wrong with the location is told when it is opened
    one = state_bytes(schema)
    if one > free:
        fail("E-DATA-016", f"a checkpoint takes {size(one)}, and {root} has {size(free)} free",
             help=("free some space, or name a folder on another disk: --checkpoint-dir",))
    most = keep + 1 + best
    if one * max(1, most - there) <= free:
        return None
    return note_warning(
        "E-DATA-016", f"the {most} checkpoints that lie there at most take {size(one * most)}, {there} of them are there, and {root} has "
        f"{size(free)} free", help="a smaller :keep, or --checkpoint-dir on another disk")
