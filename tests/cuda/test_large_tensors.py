"""Tensors of 2^31 elements and more: every index of a kernel that touches one is of 64 bits. Nothing of that size is allocated."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton")

from sexpgpu.backends.cuda.executable import Compiled
from sexpgpu.backends.cuda.library import CHUNK, heads_scratch, logits_rows
from sexpgpu.ir import Node
from sexpgpu.ops import build

ROWS, COLUMNS = 65536, 50304  # logits of GPT-2 at batch 64: 3.3e9


def leaf(*shape: int, dtype: str = "f32") -> Node:
    return build("input", name=f"x{shape}{dtype}", shape=shape, dtype=dtype, batch=False)


def kernels(*results: Node) -> list[str]:
    compiled = Compiled({str(i): node for i, node in enumerate(results)}, {str(i): None for i in range(len(results))}, "cuda")
    return [emitted.source for emitted in compiled.emitted.values()]


def indices(source: str) -> list[str]:
    """The lines that make the rows `r` and the columns `c` of a program, and indices that are read."""
    return [line for line in source.splitlines() if re.match(r"\s*[rc] = ", line) or "as_index(" in line]


large = leaf(ROWS, COLUMNS)
CASES = {
    "flat": build("exp", large),
    "rows": build("reduce-max", build("reshape", large, shape=(ROWS * COLUMNS // 8, 8)), axis=(1,), **{"keep-dims": False}),
    "long": build("sum", large, axis=(1,), **{"keep-dims": False}),
    "columns": build("sum", large, axis=(0,), **{"keep-dims": False}),
    "total": build("sum", large, axis=(0, 1), **{"keep-dims": False}),
    "turned": build("sum", build("transpose", large, permutation=(1, 0)), axis=(1,), **{"keep-dims": False}),
    "picked": build("gather", large, leaf(8, dtype="i32"), axis=0),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_indices_are_wide(name: str) -> None:
    sources = kernels(CASES[name])
    assert sources and ("as_index(" in "".join(sources)) == (name == "picked")
    for source in sources:
        lines = indices(source)
        assert lines and all(".to(tl.int64)" in line for line in lines), source


def test_indices_of_small_tensors_are_narrow() -> None:
    (source,) = kernels(build("exp", leaf(1024, 1024)))
    assert indices(source) and ".to(tl.int64)" not in "".join(indices(source))


def test_the_logits_of_a_head_stand_in_parts() -> None:
    """In equal parts of whole rows, none larger than `CHUNK`; a part fits what the plan keeps for it."""
    for batch in (1, 8, 32, 64, 512):
        rows = 1024 * batch
        step = logits_rows(rows, COLUMNS, 2)
        parts = -(-rows // step)
        assert step * COLUMNS * 2 <= CHUNK and step * (parts - 1) < rows <= step * parts
        x, weight, labels = leaf(rows, 768, dtype="bf16"), leaf(768, COLUMNS, dtype="bf16"), leaf(rows, dtype="i32")
        assert heads_scratch(build("linear-cross-entropy", x, weight, labels)) == step * COLUMNS * 2
    assert [-(-rows // logits_rows(rows, COLUMNS, 2)) for rows in (32768, 65536, 60000)] == [4, 4, 4]
    assert logits_rows(60000, COLUMNS, 2) % 256 == 0
    assert logits_rows(3, COLUMNS, 2) == 3
