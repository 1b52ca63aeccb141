"""Functions of a file on a program's weights: forward graphs beside those of its steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from sexpgpu.backends.interpreter.program import Compiled, InterpreterProgram
from sexpgpu.ir import Node
from sexpgpu.passes.expand import expand_gradients
from sexpgpu.passes.precision import apply_precision
from sexpgpu.passes.simplify import simplify


class Predictor:
    """`trace`: rows -> the function's results for so many; a number of rows is a graph of its own."""

    def __init__(self, program: InterpreterProgram, trace: Callable[[int], tuple[Node, ...]]):
        self.program, self.trace = program, trace
        self._graphs: dict[int, Compiled] = {}

    def graph(self, samples: int) -> Compiled:
        """The compiled function of `samples` rows."""
        if samples not in self._graphs:
            results = {f"output/{i}": node for i, node in enumerate(self.trace(samples))}
            expanded = expand_gradients(results, self.program.traced.origins)
            self._graphs[samples] = Compiled(simplify(apply_precision(expanded, self.program.config.precision)))
        return self._graphs[samples]

    def run(self, batch: Mapping[str, Any], offset: int) -> list[np.ndarray]:
        """The results of one batch whose first row is row `offset`; bf16 comes as float32."""
        compiled = self.graph(len(next(iter(batch.values()))))
        with torch.no_grad():
            leaves = self.program._leaves(batch)
            out = compiled.run(leaves, self.program.config.seed, self.program.updates, offset)
        tensors = [out[f"output/{i}"] for i in range(len(out))]
        return [(t.float() if t.dtype == torch.bfloat16 else t).cpu().numpy().copy() for t in tensors]
