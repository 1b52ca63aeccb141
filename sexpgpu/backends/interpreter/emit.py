"""Straight-line Python for a graph: the lines of `lines`, and the namespace in which they run.

No text of a user's enters the source: names are numbered, attributes are numbers or lie in the namespace. Common ops
become direct calls of torch, some of them several ops at once (`fuse`); the rest call their definition's reference. All
mean the same, which a test checks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from sexpgpu.backends.interpreter import kernels
from sexpgpu.backends.interpreter.draws import Mask, draw
from sexpgpu.backends.interpreter.dtypes import TORCH
from sexpgpu.backends.interpreter.lines import write
from sexpgpu.backends.interpreter.repeat import Repeat
from sexpgpu.backends.interpreter.shapes import dtype_of
from sexpgpu.backends.interpreter.steps import FUNCTIONS
from sexpgpu.ir import Node
from sexpgpu.ops import table

_KERNELS = (
    *("attend", "attend_grad", "entropy", "entropy_grad", "minus_ones", "max_pool", "pool_backward"),
    *("layer_norm_backward", "convolution_backward", "threshold_backward", "gelu_backward"),
)


def namespace() -> dict[str, Any]:
    """What the source calls by name."""
    names: dict[str, Any] = {name: getattr(torch, name) for name in FUNCTIONS}
    names |= {name: getattr(kernels, name) for name in _KERNELS}
    names |= {f"dtype_{name}": dtype for name, dtype in TORCH.items()}
    return names | {"torch": torch, "total": torch.sum, "draw": draw}


def emit(
    results: Mapping[str, Node],
    leaves: Sequence[Node],
    into: Mapping[str, Node | None] | None = None,
    scratch: Iterable[Node] = (),
    first: Sequence[str] = (),
    fused: bool = True,
    again: Repeat | None = None,
) -> tuple[str, dict[str, Any]]:
    """The source of `program(leaves, context, outs) -> tuple of the results that are not in `into``, and its namespace.

    into: result -> the leaf whose memory takes it (None: memory of its own); `outs` are those tensors, in this order.
    scratch: leaves whose memory may be written over once they were read last. first: results to compute before all
    others; when there are any, nothing but scratch is written unless `context.passes` is true of them.
    fused: false has every op by itself, in the order of the graph's own rounding. again: see `repeat.repeating`.
    """
    written = write(results, leaves, into, scratch, first, fused, again)
    space = namespace()
    for name, node in written.constants.items():  # computed once
        space[name] = table()[node.op].reference(torch, node, [])
    for step in written.steps:
        if step.needs[:1] == ("mask",):
            _, number, drawn, factor = step.needs
            space[f"m{number}"] = Mask(drawn) if factor is None else Mask(drawn, factor, dtype_of(step.outputs[0]))
        elif step.needs:
            _, number, node = step.needs
            space[f"f{number}"], space[f"n{number}"] = table()[node.op].reference, node
    return "\n".join(written.text), space
