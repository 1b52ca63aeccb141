"""Programs that take several tiles side by side, or walk over rows, give what the interpreter gives: under Triton's interpreter."""

from __future__ import annotations

import pytest
from support_cuda import interpreted

from sexpgpu.backends.cuda.emit import Blocks, choose_blocks, shape_kind
from sexpgpu.backends.cuda.executable import Compiled
from sexpgpu.ir import Node
from sexpgpu.ops import build

pytest.importorskip("triton")

#: part of tiles_in_triton.py -> the least that it compares
PARTS = {"of the device": 12, "one row": 10, "walks": 10, "several rows": 10, "not numbers": 3, "text": 2}


@pytest.mark.parametrize("part", PARTS)
def test_tiles_side_by_side_agree_with_the_interpreter(part: str) -> None:
    failures, count = interpreted("tiles_in_triton.py", part)
    assert not failures, "\n".join(failures)
    assert count >= PARTS[part]


def leaf(name: str, *shape: int) -> Node:
    return build("input", name=name, shape=shape, dtype="f32", batch=False)


def cut(results: dict[str, Node], kind: str) -> Blocks:
    """Of the one kernel of this kind."""
    (kernel,) = [k for k in Compiled(results, dict.fromkeys(results), "cuda").emitted if shape_kind(k) == kind]
    return choose_blocks(kernel, "cuda")


@pytest.mark.parametrize(("columns", "more", "warps", "programs"), [(768, 0, 1, 8), (768, 3, 1, 8), (768, 4, 2, 6), (640, 0, 1, 8), (1024, 0, 4, 6)])
def test_a_warp_takes_a_row_while_its_registers_hold_it(columns: int, more: int, warps: int, programs: int) -> None:
    """Two sums over rows, two operands and `more`: seven rows at most."""
    x, ct = leaf("x", 4096, columns), leaf("ct", 4096, columns)
    by_x = build("normalize-grad", x, ct, axis=(1,))
    for number in range(more):
        by_x = build("+", by_x, leaf(f"b{number}", 4096, columns))
    results = {"x": by_x, "weight": build("sum", build("*", ct, build("normalize", x, axis=(1,))), axis=(0,)), "bias": build("sum", ct, axis=(0,))}
    assert cut(results, "rows") == Blocks(1, 128 * warps, 132 * programs, warps, 1, -(-columns // (128 * warps)))


def test_sums_over_rows_beside_stored_values_have_fewer_programs() -> None:
    x = leaf("x", 4096, 3072)
    y = build("sin", x)
    sums = {"sums": build("sum", y, axis=(0,))}
    assert cut(sums, "columns") == Blocks(8, 256, 88, 4, 3)
    assert cut({**sums, "y": y}, "columns") == Blocks(8, 256, 66, 4, 1)
