"""The oracle's tests once more, each graph also in f32 by the CUDA backend: within 2e-5 of the largest entry of the f64 that the test holds against the
oracle. A sum whose terms cancel (one potential's stress is 8e-5, of energies of 2; one G is 0.6, of forces of 21) is farther off in f32, on the interpreter too: it is
named (`small`), and may be eight times as far off as there.

For processes of their own, as `tests/cuda/harness.py` says. `python oracle_in_triton.py [HIGHEST]`: graphs with ranks up to this one, all if it is left
out. `TESTED_DEVICE=cuda` takes a GPU (benchmarks/on_gpu.py, part `oracle`), `TESTED_PART=1/4` every fourth test.
"""

from __future__ import annotations

import inspect
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "cuda")]

import harness  # noqa: E402, I001 - first of all, as it chooses Triton's interpreter
import numpy as np  # noqa: E402
import oracle  # noqa: E402
import torch  # noqa: E402

import test_cartesian_oracle  # noqa: E402
import test_potential_oracle  # noqa: E402

from sexpgpu.backends.cuda import library  # noqa: E402
from sexpgpu.backends.cuda.cartesian.launch import runner  # noqa: E402
from sexpgpu.backends.interpreter import compile_graph  # noqa: E402
from sexpgpu.ir import Node, postorder  # noqa: E402
from sexpgpu.ops import build  # noqa: E402
from sexpgpu.passes.rewrite import rewrite  # noqa: E402
from sexpgpu.passes.simplify import simplify  # noqa: E402

BOUND = 2e-5


def with_kernels() -> None:
    """Products by their kernels on the CPU too, where graphs take the reference."""
    own = library.call
    run = cache(lambda: runner(True, "interpreted"))
    library.on_device = run  # type: ignore[assignment]

    def call(node: Node, operands: list[Any], device: torch.device, kept: library.Library) -> torch.Tensor:
        by_kernels = node.op.startswith("tensor-product") or node.op == "scatter-add"
        return own(node, operands, torch.device("meta") if by_kernels else device, kept)

    library.call = call


def narrow(node: Node, inputs: tuple[Node, ...]) -> Node | None:
    """The node in f32."""
    return build(node.op, *inputs, **{**node.attrs, "dtype": "f32"}) if node.attrs.get("dtype") == "f64" else None


def rank(graph: dict[str, Node]) -> int:
    """The highest of any operand or result of its products and expansions."""
    found = 0
    for node in postorder(graph.values()):
        if node.op.startswith("tensor-product"):
            found = max(found, int(node.attrs["l-max"]), *(max(map(int, path)) for path in node.attrs.get("paths") or [[0]]))
        if node.op == "cartesian-expand":
            found = max(found, int(node.attrs["l-max"]))
    return found


def off(got: torch.Tensor, expected: np.ndarray) -> float:
    """The largest difference over the largest entry; 0 of none."""
    return float(np.max(np.abs(got.double().numpy() - expected)) / max(1e-30, float(np.max(np.abs(expected))))) if expected.size else 0.0


class Checked:
    """What `Bench.run` does from now on: its own work, and the same on the device."""

    def __init__(self, highest: int):
        self.highest, self.own = highest, oracle.Bench.run
        self.name, self.count, self.worst = "", 0, 0.0
        self.failures: list[str] = []
        self.small: list[str] = []  # sums far smaller than their terms

    def __call__(self, bench: oracle.Bench, **results: Node) -> dict[str, np.ndarray]:
        expected = self.own(bench, **results)
        graph = simplify(results)
        if rank(graph) > self.highest:
            return expected
        low = rewrite(graph, narrow)
        leaves = {narrow(leaf, ()) or leaf: value.float() if value.dtype == torch.float64 else value for leaf, value in bench.bindings.items()}
        got = harness.run(low, leaves)
        interpreted = compile_graph(low).run(leaves)
        for key, value in expected.items():
            error, own = (off(x[key], value) for x in (got, interpreted))
            self.count += 1
            if not error <= max(BOUND, 8 * own):
                self.failures.append(f"{self.name} {key}: off by {error:.1e} of the largest, on the interpreter by {own:.1e}")
            elif error > BOUND:
                self.small.append(f"{self.name} {key} {error:.1e} ({own:.1e})")
            else:
                self.worst = max(self.worst, error)
        return expected


def tests() -> Iterator[tuple[str, Any]]:
    """Every test that evaluates a graph in f64, with each of its parameters."""
    for module in (test_cartesian_oracle, test_potential_oracle):
        for name, function in vars(module).items():
            if not name.startswith("test_") or name == "test_variant_in_float32" or not inspect.isfunction(function):
                continue
            marks = [mark for mark in getattr(function, "pytestmark", ()) if mark.name == "parametrize"]
            for values in itertools.product(*(mark.args[1] for mark in marks)):
                given = dict(zip((mark.args[0] for mark in marks), values, strict=True))
                said = [v if isinstance(v, str) else str(v.get("path_index", v.get("dir", ""))) for v in given.values()]
                yield " ".join([name, *said]), partial(function, **given)


def main(highest: int) -> None:
    checked = Checked(highest)
    if harness.DEVICE == "cpu":
        with_kernels()
    oracle.Bench.run = lambda self, **results: checked(self, **results)  # type: ignore[method-assign]
    part, parts = map(int, os.environ.get("TESTED_PART", "0/1").split("/"))
    for name, test in list(tests())[part::parts]:
        checked.name = name
        with tempfile.TemporaryDirectory() as folder:
            more = {"tmp_path": Path(folder)} if "tmp_path" in inspect.signature(test).parameters else {}
            try:
                test(**more)
            except Exception as error:  # noqa: BLE001 - reported as a failure of the entry
                checked.failures.append(f"{name}: {type(error).__name__}: {error}"[:300])
    print(json.dumps({"worst": checked.worst, "small": checked.small}))
    harness.tell(checked.failures, checked.count)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 9)
