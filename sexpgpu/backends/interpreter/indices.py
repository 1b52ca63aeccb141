"""Which index of a step was out of range: found by running its graph once more, op by op."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sexpgpu.diagnostics import problem
from sexpgpu.ir import Node, Origins
from sexpgpu.ops.bounds import indexed
from sexpgpu.ops.random import DrawContext


def refuse_index(executable: Any, bindings: Mapping[Node, Any], context: DrawContext, origins: Origins) -> None:
    """Raises E-RUN-031 (exit 3) for the first index that is out of range; returns where none is."""
    walk = executable.walk(bindings, context.seed, context.step, context.offset, look=lambda *at: _look(origins, *at))
    for _ in walk:
        pass


def _look(origins: Origins, node: Node, operands: list[Any]) -> None:
    for place, count in indexed(node):
        _refuse(origins, node, operands[place].reshape(-1), count)


def _refuse(origins: Origins, node: Node, index: Any, count: int) -> None:
    wrong = (index < 0) | (index >= count)
    if not bool(wrong.any()):
        return
    first = int(wrong.nonzero()[0])
    origin = origins.of(node)
    path = next(iter(origin.paths), "")
    where = f" in {path}" if path else ""
    raise problem(
        "E-RUN-031",
        f"{node.op}{where}: index {int(index[first])} is outside 0 … {count - 1} (size {count})",
        origin.spans[0] if origin.spans else None,
        notes=(f"element {first} of {index.numel()} indices; {int(wrong.sum())} are outside",),
        help=("clamp it: (clamp i :low 0 :high " f"{count - 1}), or mend what computes it",),
        exit_code=3,
    )
