"""What the leaves of a run's graphs stand for, the types of its state, and its update over vectors: without torch, so that what a
run will be can be told without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sexpgpu.experiment.traced import AVERAGE, TracedRun
from sexpgpu.ir import Node
from sexpgpu.passes.flatten import Flat, flatten

Source = tuple[str, str]
Schema = dict[str, tuple[str, tuple[int, ...]]]


def source_of(node: Node) -> Source:
    """What a leaf stands for: its kind and name."""
    if node.op == "input":
        return "input", node.attrs["name"]
    if node.op == "slot" and node.attrs["slot"] == AVERAGE:
        return "ema", node.attrs["path"]
    if node.op == "slot":
        return "opt", f"{node.attrs['slot']}/{node.attrs['path']}"
    return node.op, node.attrs.get("path", node.attrs.get("name", ""))


def sources(traced: TracedRun) -> dict[str, Source]:
    """State name (`param/<p>` …) -> what its leaf stands for."""
    found: dict[str, Source] = {f"param/{n}": ("param", str(s.node.attrs["path"])) for n, s in traced.params.items()}
    found |= {f"state/{n}": ("state", str(s.node.attrs["path"])) for n, s in traced.states.items()}
    found |= {f"opt/{n}": ("opt", n) for n in traced.slots}
    return found | {f"ema/{n}": ("ema", n) for n in traced.averages}


def schema(traced: TracedRun, precision: str) -> Schema:
    """State name -> (dtype, shape); under f64 every f32 is f64."""
    retyped = {"f32": "f64"} if precision == "f64" else {}
    specs = {f"param/{n}": s for n, s in traced.params.items()} | {f"state/{n}": s for n, s in traced.states.items()}
    found = {name: (retyped.get(s.dtype, s.dtype), s.shape) for name, s in specs.items()}
    for name, slot in traced.slots.items():
        found[f"opt/{name}"] = (retyped.get(slot.leaf.type.dtype, slot.leaf.type.dtype), slot.leaf.type.shape)
    for name, leaf in traced.averages.items():
        found[f"ema/{name}"] = (retyped.get(leaf.type.dtype, leaf.type.dtype), leaf.type.shape)
    return found


def flat_update(staged: Any, parts: int = 1, shares: int = 1, apart: Callable[[str], str] = lambda name: "") -> Flat:
    """The update's graph over vectors. `parts`: micro-batches of a step over all ranks; `shares`: of each vector, one a rank; `apart`: a
    parameter's kind, which shares no vector with another."""
    traced = staged.traced
    owners: dict[Source, Source] = {("gradient", n): ("gradient", n) for n in traced.gradients}
    for name, (role, path) in sources(traced).items():
        if role in ("param", "opt", "ema"):
            slot, _, rest = name.removeprefix("opt/").partition("/")
            owners[role, path] = (f"opt/{slot}", rest) if role == "opt" else (role, name.partition("/")[2])
    divided = traced.loss.count is not None or parts > 1
    return flatten(staged.update(divided), list(traced.gradients), owners, source_of, shares, apart)
