"""Values of tensors at the prompt: a graph over literals and parameters, run on the interpreter, and printed."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from sexpgpu.backends.interpreter.dtypes import TORCH
from sexpgpu.backends.interpreter.executable import Executable
from sexpgpu.diagnostics import problem
from sexpgpu.experiment.trace import Registry
from sexpgpu.ir import Node, Origins, postorder
from sexpgpu.ops.initial import initial_value
from sexpgpu.ops.philox import draw_key
from sexpgpu.passes.expand import expand_gradients
from sexpgpu.passes.simplify import simplify
from sexpgpu.repl.literals import Literals

SHOWN = 200  # elements of a tensor; of a larger one, three at each end of an axis


class Values:
    """What the leaves of an input's graph are bound to.

    A parameter has the value that the run of `,run` gives it, else its initial one of seed 0.
    """

    def __init__(self, literals: Literals, registry: Registry, trained: Callable[[str], Any], seed: int, step: int):
        self.literals, self.registry, self.trained, self.seed, self.step = literals, registry, trained, seed, step

    def of(self, node: Node) -> torch.Tensor:
        """The tensor of a leaf."""
        if node.op == "input" and node.attrs["name"] in self.literals.arrays:
            dtype, shape, numbers = self.literals.arrays[node.attrs["name"]]
            return torch.tensor(numbers, dtype=TORCH[dtype]).reshape(shape)
        if node.op in ("param", "state"):
            path = node.attrs["path"]
            found = self.trained(path)
            if found is not None:
                return found.to(TORCH[node.type.dtype])
            spec = self.registry.specs[path]
            key = draw_key(self.seed, path, 0, "init")
            value = initial_value(spec.init.kind, dict(spec.init.settings), spec.shape, key)
            return torch.from_numpy(np.array(value)).to(TORCH[node.type.dtype])
        name = node.attrs.get("name", node.attrs.get("path", node.op))
        raise problem("E-RUN-081", f"the {node.op} `{name}` has no value at the prompt", help="`,shape`, `,ir` and `,grad` need none; give a literal for it to see numbers")

    def compute(self, nodes: Sequence[Node], origins: Origins) -> list[torch.Tensor]:
        """The values of nodes."""
        return self.prepared(nodes, origins)()

    def prepared(self, nodes: Sequence[Node], origins: Origins) -> Callable[[], list[torch.Tensor]]:
        """The compiled graph over its bound leaves: call it as often as you like."""
        results = simplify(expand_gradients({str(i): n for i, n in enumerate(nodes)}, origins), origins)
        _fits(results)
        executable = Executable(results)
        bindings = {leaf: self.of(leaf) for leaf in executable.leaves}
        count = range(len(nodes))

        def run() -> list[torch.Tensor]:
            values: Mapping[str, torch.Tensor] = executable.run(bindings, self.seed, self.step)
            return [values[str(i)] for i in count]

        return run


def _fits(results: Mapping[str, Node]) -> None:
    """A tensor larger than the memory that is free is refused: asking for it could end the process."""
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return
    largest = max(postorder(results.values()), key=lambda node: node.type.bytes)
    if largest.type.bytes > free:
        raise problem("E-MEM-001", f"{largest.op} makes a {largest.type} of {largest.type.bytes / 2**30:,.1f} GiB, and {free / 2**30:,.1f} GiB are free",
                      help="choose smaller sizes; `,shape` and `,ir` compute nothing")


def text(value: torch.Tensor, kind: str) -> str:
    """A tensor as the language would write it, and its type: `[1.0 2.0]  f32[2]`."""
    array = value.detach().to(torch.float64 if value.dtype in (torch.bfloat16, torch.float16) else value.dtype).numpy()
    formats: Any = {"bool": lambda b: "true" if b else "false", "float_kind": number}
    shown = np.array2string(array, separator=" ", threshold=SHOWN, edgeitems=3, precision=6, max_line_width=100, formatter=formats)
    lines = shown.split("\n")
    return f"{shown}  {kind}" if len(lines) == 1 else "\n".join([*lines, kind])


def number(value: float) -> str:
    """Six digits, with the mark of a float."""
    if not np.isfinite(value):
        return "+nan" if value != value else "+inf" if value > 0 else "-inf"
    shown = f"{value:.6g}"
    return shown if any(c in shown for c in ".e") else shown + ".0"
