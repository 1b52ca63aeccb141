"""Products of f32 matrices of many rows, which a vendor computes without tensor cores: a tall matrix by one of few columns or few rows, and the
sum of products xᵀ y over many rows, with a number and over several pairs.

They are what stands around the tensor product of a potential: the weights of all edges from the last radial layer, their cotangents by its
matrix, and that matrix's gradient. There bf16 halves make a product (`halves.py`, errors up to 7e-6 of the largest entry); elsewhere three TF32
products do (4e-7). What a step of a loop adds up is added to the rest apart, rounded to nearest, because the sums inside tensor cores are cut off:
over thousands of them that alone would be 5e-5 (docs/decisions/0059, 0061). Sums over rows are made in parts, which a second launch adds in order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch

from sexpgpu.backends.cuda import choice, modules
from sexpgpu.backends.cuda.rank_maps import PROGRAMS, cut, power, precise, sums_kernel, takes
from sexpgpu.ir import Node
from sexpgpu.passes import products

LEAST, COLUMNS = products.TALL, products.NARROW
#: rows, inner numbers a step, warps of a product by few columns; columns, rows a step, warps of a sum over rows
ROWS, SUMS = (128, 32, 8), (64, 64, 4)
#: rows, inner numbers a step, warps of a product from bf16 halves: of few columns, and of a wide result
ROWS_HALVES, WIDE_HALVES = (128, 32, 4), (64, 64, 4)
IMPORT = "from sexpgpu.backends.cuda.halves import product, turned_product\n\n"


def kind(node: Node) -> str | None:
    """`rows`: all left factors are tall, and the result has few columns, or is the weights of edges from few; `sums`: they are tall and
    transposed, and the result has few rows. None: neither, or not of f32."""
    if node.op != "matmul-sum" or node.type.dtype != "f32":
        return None
    lefts = node.inputs[::2]
    if any(x.type.rank != 2 for x in lefts):
        return None
    if products.tall(node.type.shape, [x.type.shape[1] for x in lefts]) and (node.type.shape[1] <= COLUMNS or node.attrs["again"]):
        return "rows"
    if node.type.shape[0] <= COLUMNS and all(x.op == "transpose" and x.type.shape[1] >= LEAST for x in lefts):
        return "sums"
    return None


def _halved(node: Node) -> bool:
    """Whether bf16 halves make it: weights of edges, and what their cotangents go to. `tf32x3` elsewhere."""
    return precise() == "tf32x3" and (node.attrs["again"] > 0 or any(_bare(x).op.startswith(products.PRODUCT) for x in node.inputs))


def _bare(x: Node) -> Node:
    while x.op in ("reshape", "transpose"):
        (x,) = x.inputs
    return x


def _wanted() -> bool:
    """Not where a run says `tf32`: the vendor has that."""
    return choice.SWITCH.tall and precise() != "tf32"


def _rows_tile(node: Node) -> tuple[int, int, int]:
    return ROWS if not _halved(node) else ROWS_HALVES if node.type.shape[1] <= COLUMNS else WIDE_HALVES


def _splits(node: Node) -> int:
    """Parts of the rows that programs add apart: of bf16 halves twice as many run at once."""
    width, step, _ = SUMS
    programs = PROGRAMS * (2 if _halved(node) else 1)
    return max(1, min(cut(programs, cut(node.type.shape[1], min(width, power(node.type.shape[1], width)))), cut(node.inputs[1].type.shape[0], step)))


def tall_scratch(node: Node) -> int:
    """Bytes of the partial sums."""
    return sums_room(node, 1)


def tall(node: Node, operands: Sequence[torch.Tensor], out: torch.Tensor, scratch: torch.Tensor) -> bool:
    """Makes a `matmul-sum`, and says whether it did."""
    what = kind(node)
    if what is None or not _wanted() or not takes(node, out):
        return False
    m, n = node.type.shape
    if what == "rows":
        rights, tile = [_flat(x) for x in operands[1::2]], _rows_tile(node)
        function = _rows_kernel(tuple(x.shape[1] for x in operands[::2]), n, tuple(turned for _, turned in rights), tile, "" if _halved(node) else precise())
        lefts = [x.contiguous() for x in operands[::2]]
        grid = (cut(m, tile[0]) * cut(n, COLUMNS),)
        function[grid](*(x for a, (b, _) in zip(lefts, rights, strict=True) for x in (a, b)), out, m, node.attrs["scale"], num_warps=tile[2])
        return True
    _add(node, operands, out, scratch.view(torch.float32), 0, 1)
    return True


def sums_room(node: Node, parts: int) -> int:
    """Bytes of the partial sums of a sum over rows that come in so many parts; `node` is of the largest."""
    return 4 * parts * _splits(node) * node.type.size if kind(node) == "sums" else 0


def sums_part(node: Node, operands: Sequence[torch.Tensor], out: torch.Tensor, room: torch.Tensor, number: int, parts: int) -> None:
    """The rows of part `number` of a sum xᵀ y over rows: their sums are left in `room`, and after the last part all are added, to `out`."""
    if kind(node) != "sums" or not _wanted() or not takes(node, out):
        torch.addmm(out, operands[0], operands[1], beta=1.0 if number else 0.0, alpha=node.attrs["scale"], out=out)
        return
    _add(node, operands, out, room, number, parts)


def _add(node: Node, operands: Sequence[torch.Tensor], out: torch.Tensor, room: torch.Tensor, number: int, parts: int) -> None:
    """Partial sums of one part of the rows, and after the last part all of them added."""
    splits = _splits(node)
    function, finish, tiles, last = _sums_of(node, parts)
    pairs = [x for a, b in zip(operands[::2], operands[1::2], strict=True) for x in (a.t().contiguous(), b.contiguous())]
    function[(tiles, splits)](*pairs, room[number * splits * node.type.size :], pairs[0].shape[0], 1.0, num_warps=SUMS[2])
    if number == parts - 1:
        finish[(last,)](room, out, num_warps=4)


def _sums_of(node: Node, parts: int) -> tuple[Any, Any, int, int]:
    return _sums_kernels(*node.type.shape, len(node.inputs) // 2, _splits(node), node.attrs["scale"], "" if _halved(node) else precise(), parts)


def sums_ahead(node: Node, parts: int) -> list[modules.Wanted]:
    """What `sums_part` launches, to be compiled with others."""
    if kind(node) != "sums" or not _wanted():
        return []
    function, finish, _, _ = _sums_of(node, parts)
    f32 = torch.float32
    return [(function, [f32] * (len(node.inputs) + 1) + [node.inputs[1].type.shape[0], 1.0], {"num_warps": SUMS[2]}), (finish, [f32, f32], {"num_warps": 4})]


def tall_ahead(node: Node) -> list[modules.Wanted]:
    """What it launches, to be compiled with others; right factors are as the graph says."""
    what, f32 = kind(node), torch.float32
    if what is None or not _wanted():
        return []
    m, n = node.type.shape
    precision = "" if _halved(node) else precise()
    if what == "rows":
        tile = _rows_tile(node)
        function = _rows_kernel(tuple(x.type.shape[1] for x in node.inputs[::2]), n, tuple(x.op == "transpose" for x in node.inputs[1::2]), tile, precision)
        return [(function, [f32] * (len(node.inputs) + 1) + [m, 1.0], {"num_warps": tile[2]})]
    return sums_ahead(node, 1)


def _flat(x: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """A matrix as it lies in memory, and whether that is transposed."""
    if x.is_contiguous():
        return x, False
    return x.t().contiguous(), True


def _dot(left: str, right: str, precision: str) -> str:
    return f'tl.dot({left}, {right}, input_precision="{precision}")' if precision else f"product({left}, {right})"


@cache
def _rows_kernel(inner: tuple[int, ...], columns: int, turned: tuple[bool, ...], tile: tuple[int, int, int], precision: str) -> Any:
    """out [rows columns] = scale Σ a [rows inner] b [inner columns]; precision: of `tl.dot`, or "" for bf16 halves. Programs of the same rows come one after another, so that rows are read once."""
    high, step, _ = tile
    wide, across = power(columns, COLUMNS), cut(columns, COLUMNS)
    whole = columns % wide == 0
    text = [
        "@triton.jit(do_not_specialize=['rows'])",
        f"def tall_rows({', '.join(f'a{i}, b{i}' for i in range(len(inner)))}, out, rows, scale):",
        f"    m = (tl.program_id(0) // {across} * {high} + tl.arange(0, {high})[:, None]).to(tl.int64)",
        f"    n = tl.program_id(0) % {across} * {wide} + tl.arange(0, {wide})[None, :]",
        f"    total = tl.zeros(({high}, {wide}), tl.float32)",
    ]
    for i, (size, flip) in enumerate(zip(inner, turned, strict=True)):
        ragged = "" if size % step == 0 else f" & (k[None, :] < {size})"
        near = [*([] if size % step == 0 else [f"(k[:, None] < {size})"]), *([] if whole else [f"(n < {columns})"])]
        place = f"k[:, None] + n * {size}" if flip else f"k[:, None] * {columns} + n"
        mask = f", mask={' & '.join(near)}, other=0.0" if near else ""
        text += [
            f"    for first in range(0, {size}, {step}):",
            f"        k = first + tl.arange(0, {step})",
            f"        left = tl.load(a{i} + m * {size} + k[None, :], mask=(m < rows){ragged}, other=0.0)",
            f"        right = tl.load(b{i} + {place}{mask})",
            f"        total += {_dot('left', 'right', precision)} * scale",
        ]
    text.append(f"    tl.store(out + m * {columns} + n, total, mask=(m < rows){'' if whole else f' & (n < {columns})'})")
    return modules.load(("" if precision else IMPORT) + "\n".join(text) + "\n", "tall_rows")


@cache
def _sums_kernels(size: int, columns: int, count: int, splits: int, scale: float, precision: str, times: int = 1) -> tuple[Any, Any, int, int]:
    """(parts, their sum, programs of each): out [size columns] = scale Σ xᵀ y over rows and `count` pairs; the sum is over the parts of so many launches. The kernel's own `scale` is 1, but
    Triton must not know: it would add inside the tensor cores."""
    width, step, _ = SUMS
    high, wide = power(size, COLUMNS), power(columns, width)
    text = [
        "@triton.jit(do_not_specialize=['rows'])",
        f"def tall_sums({', '.join(f'x{i}, y{i}' for i in range(count))}, out, rows, scale):",
        f"    n = tl.program_id(0) * {wide} + tl.arange(0, {wide})[None, :]",
        "    part = tl.program_id(1)",
        f"    k = tl.arange(0, {high})",
        f"    chunk = tl.cdiv(tl.cdiv(rows, {step}), {splits}) * {step}",
        "    stop = tl.minimum((part + 1) * chunk, rows)",
        f"    total = tl.zeros(({high}, {wide}), tl.float32)",
    ]
    for i in range(count):
        text += [
            f"    for first in range(part * chunk, stop, {step}):",
            f"        e = (first + tl.arange(0, {step})[:, None]).to(tl.int64)",
            f"        x = tl.load(x{i} + e * {size} + k[None, :], mask=(e < stop){'' if high == size else f' & (k[None, :] < {size})'}, other=0.0)",
            f"        y = tl.load(y{i} + e * {columns} + n, mask=(e < stop) & (n < {columns}), other=0.0)",
            f"        total += {_dot('tl.trans(x)', 'y', precision) if precision else 'turned_product(x, y)'} * scale",
        ]
    near = f"(k[:, None] < {size}) & (n < {columns})"
    text.append(f"    tl.store(out + part * {size * columns} + k[:, None] * {columns} + n, total, mask={near})")
    finish, last = sums_kernel((size * columns,), (scale,), splits * times)
    return modules.load(("" if precision else IMPORT) + "\n".join(text) + "\n", "tall_sums"), finish, cut(columns, wide), last


def matmul_sum(node: Node, operands: Sequence[torch.Tensor], outs: Mapping[int, torch.Tensor], scratch: torch.Tensor) -> None:
    """A `matmul-sum` into the only tensor of `outs`: by these kernels, or product by product."""
    (out,) = outs.values()
    if not tall(node, operands, out, scratch):
        for i in range(0, len(operands), 2):
            torch.addmm(out, operands[i], operands[i + 1], beta=1.0 if i else 0.0, alpha=node.attrs["scale"], out=out)
