"""Functions of a file on a program's weights, on the device: as `interpreter.prediction`, with launches instead of ops."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from sexpgpu.backends.cuda.executable import Bound, Compiled
from sexpgpu.backends.cuda.indices import raise_bad_index
from sexpgpu.backends.cuda.program import CudaProgram
from sexpgpu.ir import Node
from sexpgpu.passes.bounds import BAD, guard_indices
from sexpgpu.passes.expand import expand_gradients
from sexpgpu.passes.precision import apply_precision
from sexpgpu.passes.simplify import simplify


class Predictor:
    """`trace`: rows -> the function's results for so many; a number of rows is a graph of its own."""

    def __init__(self, program: CudaProgram, trace: Callable[[int], tuple[Node, ...]]):
        self.program, self.trace = program, trace
        self._graphs: dict[int, tuple[dict[str, Node], Compiled]] = {}

    def graph(self, samples: int) -> tuple[dict[str, Node], Compiled]:
        """The function of `samples` rows: its graph, and that compiled with its indices guarded."""
        if samples not in self._graphs:
            origins = self.program.traced.origins
            results = {f"output/{i}": node for i, node in enumerate(self.trace(samples))}
            plain = simplify(apply_precision(expand_gradients(results, origins), self.program.config.precision))
            self._graphs[samples] = plain, Compiled(guard_indices(plain, (), origins), None, self.program.target, origins)
        return self._graphs[samples]

    def run(self, batch: Mapping[str, Any], offset: int) -> list[np.ndarray]:
        """The results of one batch whose first row is row `offset`; bf16 comes as float32."""
        program = self.program
        plain, compiled = self.graph(len(next(iter(batch.values()))))
        fields = {name: program._host(array).to(program.place) for name, array in batch.items()}

        def value(leaf: Node) -> torch.Tensor:
            return program._leaf(leaf, fields)

        with torch.no_grad(), program._modes():
            leaves = {leaf: value(leaf) for leaf in compiled.leaves}
            bound = Bound(compiled, leaves, {}, None, program._draw(offset), program.config.deterministic)
            bound.launch()
            out = {name: bound.result(name).cpu() for name in compiled.results}
        if BAD in out and out[BAD] != 0:
            raise_bad_index(plain, value, (program.config.seed, program.updates, offset), program.traced.origins)
        tensors = [out[name] for name in plain]
        return [(t.float() if t.dtype == torch.bfloat16 else t).numpy().copy() for t in tensors]
