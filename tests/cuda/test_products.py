"""Calls of matrix products as a device makes them, both by the vendor's epilogues and apart, against the ops' references."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vendor import Library, Vendor

from sexpgpu.backends.cuda import choice, cublaslt, library
from sexpgpu.backends.interpreter.dtypes import TORCH
from sexpgpu.ir import Node
from sexpgpu.ops import build, table

REAL = torch.mm


def mm(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
    """torch.mm with the `out_dtype` that a device has."""
    assert out is not None
    return out.copy_(REAL(a.float(), b.float())) if out_dtype is not None else REAL(a, b, out=out)


class Ways:
    """Runs calls one way, and counts them."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def apart(self, make: Callable[[], Any], apart: Callable[[], Any], outputs: Sequence[torch.Tensor]) -> None:
        self.calls.append("apart")
        for out in outputs:
            out.fill_(float("nan"))
        apart()
        apart()  # twice gives the same

    def vendor(self, make: Callable[[], Any], apart: Callable[[], Any], outputs: Sequence[torch.Tensor]) -> None:
        product = make()
        self.calls.append(product.epilogue)
        assert [out.data_ptr() for out in outputs][0] == product.operands[3].data_ptr()
        product.run(product.candidates(1)[0], torch.empty(64, dtype=torch.uint8))


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> Ways:
    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(library, "_reference", lambda *_: False)
    lt = Library(Vendor())
    monkeypatch.setattr(cublaslt, "library", lambda: lt)
    return Ways()


def leaves(*given: tuple[tuple[int, ...], str]) -> tuple[list[Node], list[torch.Tensor]]:
    g = torch.Generator().manual_seed(0)
    nodes = [build("input", name=f"x{i}", shape=shape, dtype=dtype, batch=False) for i, (shape, dtype) in enumerate(given)]
    return nodes, [torch.randn(shape, generator=g).to(TORCH[dtype]) for shape, dtype in given]


BF, F = "bf16", "f32"
CASES = {
    "matmul": (((2, 5, 16), BF), ((16, 24), BF)),
    "matmul-f32": (((2, 5, 16), BF), ((16, 24), BF)),
    "matmul-bias": (((2, 5, 16), BF), ((16, 24), BF), ((24,), BF)),
    "matmul-gelu": (((2, 5, 16), BF), ((16, 24), BF), ((24,), BF)),
    "matmul-gelu-grad": (((2, 5, 16), BF), ((16, 24), BF), ((2, 5, 24), BF)),
    "matmul-rows": (((10, 16), BF), ((16, 24), BF)),
    "matmul-add": (((2, 5, 16), BF), ((16, 24), BF), ((24,), F), ((2, 5, 24), F)),
}
EPILOGUE = {"matmul": "", "matmul-f32": "", "matmul-bias": "bias", "matmul-gelu": "gelu-kept", "matmul-gelu-grad": "gelu-grad", "matmul-rows": "sum-of-b", "matmul-add": "bias"}


def outcome(op: str, wanted: Sequence[int]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(found, expected) of the results `wanted` of an op."""
    nodes, operands = leaves(*CASES[op])
    joint = op in library.JOINT
    made = [build(op, *nodes, of=of) if joint else build(op, *nodes) for of in wanted]
    outs = [torch.full(n.type.shape, float("nan"), dtype=TORCH[n.type.dtype]) for n in made]
    if joint:
        library.JOINT[op](made[0], operands, dict(zip(wanted, outs, strict=True)))
    else:
        library.OUT[op](made[0], *operands, outs[0])
    return outs, [table()[op].reference(torch, n, list(operands)) for n in made]


@pytest.mark.parametrize("way", ["apart", "vendor"])
@pytest.mark.parametrize("op", CASES)
def test_a_call_gives_what_the_op_means(ways: Ways, monkeypatch: pytest.MonkeyPatch, op: str, way: str):
    monkeypatch.setattr(library, "_run", getattr(ways, way))
    sets = ((0,), (1,), (0, 1)) if op in library.JOINT else ((0,),)
    for wanted in sets:
        found, expected = outcome(op, wanted)
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x.float(), y.float(), rtol=2e-2, atol=2e-2)
    assert ways.calls and (way == "apart" or ways.calls[-1] == EPILOGUE[op])


def test_a_head_adds_its_parts_in_place(ways: Ways, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(library, "_run", ways.vendor)
    _, (a, b) = leaves(((8, 6), BF), ((6, 4), BF))
    out = torch.ones(8, 4)
    library.multiply(a, b, out, added=True)
    library.multiply(a, b, out, added=True)
    torch.testing.assert_close(out, 1 + 2 * (a.float() @ b.float()), rtol=1e-4, atol=1e-4)


def test_batches_of_products_and_operands_that_no_view_flattens(ways: Ways, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(library, "_run", ways.vendor)
    nodes, (a, b) = leaves(((3, 5, 4), F), ((3, 4, 6), F))
    out = torch.empty(3, 5, 6)
    library.matmul(build("matmul", *nodes), a, b, out)
    torch.testing.assert_close(out, a @ b, rtol=1e-5, atol=1e-5)
    nodes, (x, w, bias) = leaves(((5, 2, 16), BF), ((16, 24), BF), ((24,), BF))
    turned = x.transpose(0, 1)  # [2 5 16], in no order that flattens
    out = torch.empty(2, 5, 24, dtype=torch.bfloat16)
    node = build("matmul-bias", build("transpose", nodes[0], permutation=(1, 0, 2)), *nodes[1:])
    library.matmul_bias(node, turned, w, bias, out)
    torch.testing.assert_close(out.float(), turned.float() @ w.float() + bias.float(), rtol=2e-2, atol=2e-2)


def test_doubles_are_torchs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(choice, "run", lambda *_: pytest.fail("cuBLASLt has no products of f64 here"))
    nodes, (a, b) = leaves(((5, 4), "f64"), ((4, 6), "f64"))
    out = torch.empty(5, 6, dtype=torch.float64)
    library.matmul(build("matmul", *nodes), a, b, out)
    torch.testing.assert_close(out, a @ b)
