"""The reference values of FlashCart 0.1.0 (tests/data/flashcart_oracle.json) and how they are compared."""

import json
from functools import cache
from pathlib import Path

import numpy as np

from sexpgpu.backends.interpreter import Executable, from_numpy
from sexpgpu.ir import Node
from sexpgpu.ops import build
from sexpgpu.ops.verify import verify
from sexpgpu.passes.autodiff import grad
from sexpgpu.passes.simplify import simplify

FILE = Path(__file__).parent.parent / "data" / "flashcart_oracle.json"


@cache
def oracle() -> dict:
    return json.loads(FILE.read_text())


def close(got, expected, tolerance=1e-12):
    """Within 1e-12 max(1, |value|), the issue's bound."""
    got, expected = np.asarray(got, float).reshape(-1), np.asarray(expected, float).reshape(-1)
    assert got.shape == expected.shape, (got.shape, expected.shape)
    worst = np.max(np.abs(got - expected) / np.maximum(1.0, np.abs(expected)), initial=0.0)
    assert worst <= tolerance, worst


def checks(got, entry, tolerance=1e-12):
    """Sum, sum of squares and ramp of a flattened array."""
    x = np.asarray(got, float).reshape(-1)
    assert x.size == entry["shape_flat"]
    ramp = np.sum(x * (np.arange(x.size) + 1) / x.size)
    close([x.sum(), (x * x).sum(), ramp], [entry["sum"], entry["sumsq"], entry["ramp"]], tolerance)


class Bench:
    """Leaves with their values, and results of graphs over them."""

    def __init__(self, dtype: str = "f64"):
        self.dtype, self.bindings = dtype, {}

    def leaf(self, name: str, array, dtype: str | None = None) -> Node:
        array = np.asarray(array)
        node = build("input", name=name, dtype=dtype or self.dtype, shape=array.shape, batch=False)
        self.bindings[node] = from_numpy(np.array(array), node.type.dtype)
        return node

    def run(self, **results: Node) -> dict[str, np.ndarray]:
        verify(results)
        lowered = simplify(results)
        verify(lowered)
        values = Executable(lowered).run(self.bindings)
        return {name: value.double().numpy() for name, value in values.items()}


def dot(a: Node, b: Node) -> Node:
    return build("sum", build("*", a, b))


def derivatives(out: Node, wrt: list[Node], c: Node, tangents: list[Node]) -> tuple[list[Node], list[Node]]:
    """(g1 g2 gw) of Σ c·out, and (dc d1 d2 dw) of Σ tangents · those; an operand given twice counts once."""
    first = grad(dot(c, out), wrt)
    scalar = None
    for g, v in zip(first, tangents, strict=True):
        part = dot(v, g)
        scalar = part if scalar is None else build("+", scalar, part)
    return first, grad(scalar, [c, *wrt])
