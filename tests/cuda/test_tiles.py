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


@pytest.mark.parametrize(("columns", "more", "warps", "programs", "stages"), [(768, 0, 1, 8, 1), (768, 3, 1, 8, 1), (768, 4, 2, 6, 1), (640, 0, 1, 8, 1), (1024, 0, 4, 4, 3), (1024, 4, 4, 4, 3), (1024, 5, 4, 6, 1),
                                                                            (1280, 0, 4, 4, 3), (2048, 0, 8, 4, 3), (2048, 1, 8, 6, 1)])
def test_a_warp_takes_a_row_while_its_registers_hold_it(columns: int, more: int, warps: int, programs: int, stages: int) -> None:
    """Two sums over rows, two operands and `more`: seven rows of 768 at most. Where several warps take one, rows come by copies ahead while shared memory has
    room for three, and else what is read is all read first."""
    x, ct = leaf("x", 4096, columns), leaf("ct", 4096, columns)
    by_x = build("normalize-grad", x, ct, axis=(1,))
    for number in range(more):
        by_x = build("+", by_x, leaf(f"b{number}", 4096, columns))
    results = {"x": by_x, "weight": build("sum", build("*", ct, build("normalize", x, axis=(1,))), axis=(0,)), "bias": build("sum", ct, axis=(0,))}
    assert cut(results, "rows") == Blocks(1, 128 * warps, 132 * programs, warps, stages, -(-columns // (128 * warps)), warps > 1 and stages == 1)


@pytest.mark.parametrize(("columns", "more", "warps"), [(768, 4, 1), (1024, 0, 1), (1024, 2, 1), (1024, 3, 2), (2048, 0, 2), (3072, 2, 4)])
def test_rows_without_sums_take_few_warps(columns: int, more: int, warps: int) -> None:
    x = leaf("x", 4096, columns)
    for number in range(more):
        x = build("+", x, leaf(f"b{number}", 4096, columns))
    assert cut({"y": build("softmax", x)}, "rows") == Blocks(1, 128 * warps, 1, warps, 1, -(-columns // (128 * warps)))


def lines(results: dict[str, Node]) -> list[str]:
    (emitted,) = Compiled(results, dict.fromkeys(results), "cuda").emitted.values()
    return emitted.source.splitlines()


@pytest.mark.parametrize("columns", [100, 1024, 3000])
def test_what_is_read_of_a_row_once_is_read_before_a_reduction(columns: int) -> None:
    """A label, what it names, and the row's factor; what is found by another value behind all that is not."""
    x, labels, ct = leaf("x", 4096, columns), build("input", name="labels", shape=(4096,), dtype="i32", batch=False), leaf("ct", 4096)
    for results, loads in (({"y": build("softmax-cross-entropy", x, labels)}, 1), ({"y": build("softmax-cross-entropy-grad", x, labels, ct)}, 2)):
        source = lines(results)
        reduction = next(i for i, line in enumerate(source) if "row_" in line)
        reads = [i for i, line in enumerate(source) if "tl.load(" in line]
        assert len(reads) > loads
        assert max(reads) < reduction
    source = lines({"y": build("softmax-cross-entropy", x, labels)})
    (index,) = [line.split(" = ")[0].strip() for line in source if "as_index(" in line]
    (picked,) = [i for i, line in enumerate(source) if "tl.load(" in line and index in line]
    assert picked == max(i for i, line in enumerate(source) if "tl.load(" in line)


def test_tiles_of_several_warps_are_read_before_a_reduction() -> None:
    """Of two operands, the second of which is needed behind the sums of the first, in a kernel that sums over rows too."""
    x, ct = leaf("x", 4096, 4096), leaf("ct", 4096, 4096)
    source = lines({"x": build("normalize-grad", x, ct, axis=(1,)), "bias": build("sum", ct, axis=(0,))})
    loop = next(i for i, line in enumerate(source) if line.strip().startswith("for "))
    reduction = next(i for i, line in enumerate(source) if "row_" in line)
    assert loop < min(i for i, line in enumerate(source) if "tl.load(" in line)
    assert max(i for i, line in enumerate(source) if "tl.load(" in line) < reduction


def test_sums_over_rows_beside_stored_values_have_fewer_programs() -> None:
    x = leaf("x", 4096, 3072)
    y = build("sin", x)
    sums = {"sums": build("sum", y, axis=(0,))}
    assert cut(sums, "columns") == Blocks(2, 1024, 352, 4, 3)
    assert cut({**sums, "y": y}, "columns") == Blocks(8, 256, 66, 4, 1)
