"""Kernels of `rank-map` and `rank-weights`: the matrix products of all ranks of an equivariant linear map in one launch, on features as
they lie. A block of rank l [2l+1 inputs] of a row is 2l+1 rows of its product, found by arithmetic, so nothing is copied.

f32 operands go through tensor cores as three products of TF32 parts, whose error is that of f32 sums; where the run says `tf32`,
as one. Gradients by weights are sums over many rows: programs take parts of them, and a second launch adds the parts in order. A step's
products are added to the rest outside the tensor cores (`tall.py` says why): times `one`, a 1 that Triton does not know, or it would put them in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from math import prod
from typing import Any

import torch

from sexpgpu.backends.cuda import modules
from sexpgpu.backends.cuda.device import interpreted
from sexpgpu.backends.cuda.references import reference
from sexpgpu.ir import Node
from sexpgpu.ops import build
from sexpgpu.ops.cartesian.algebra import width
from sexpgpu.ops.cartesian.maps import pairs

ROWS, STEP = 64, 32  # rows of a program's tile, and inputs that it takes at once
PROGRAMS = 264  # two a processor of an H200: as many parts as it takes to reach them
FINISH = 256


def power(n: int, most: int) -> int:
    """The least tile, 16 or more, that holds n; at most `most`."""
    return max(16, min(most, 1 << max(0, n - 1).bit_length()))


def cut(total: int, by: int) -> int:
    return -(-total // by)


def precise() -> str:
    """How products of f32 are made; torch's switch is set by the program."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "tf32x3"


# --- the map ---


def _chosen(cases: Sequence[tuple[str, Mapping[str, str]]]) -> list[str]:
    """Source that takes the case of a program's `tile`: (how many tiles, name -> value) of each, in order. One body then serves all of them,
    and compiles in the time of one."""
    text = []
    for i, (count, values) in enumerate(cases):
        indent = "    " * (i + 1)
        text += [f"{indent}if tile < {count}:"] if i < len(cases) - 1 else [f"{indent}if True:"]
        text += [f"{indent}    {name} = {value}" for name, value in values.items()]
        if i < len(cases) - 1:
            text += [f"{indent}else:", f"{indent}    tile -= {count}"]
    return text


def _whole(n: int) -> str:
    """A number as a value that a branch may choose."""
    return f"tl.full((), {n}, tl.int32)"


@cache
def _map_kernel(inputs: tuple[tuple[int, int, int, int], ...], row: int, out_row: int, missing: tuple[tuple[int, int], ...], scales: tuple[float, ...],
                back: bool, precision: str) -> tuple[Any, int, int, tuple[int, ...]]:
    """(function, BN, column tiles, components of each block). inputs: of each rank (first column, inputs, first column of the result,
    columns); missing: (first, count) of columns that are 0. `row`, `out_row`: lengths of rows."""
    bn = max(power(n, 64) for _, _, _, n in inputs)
    blocks = [(2 * i + 1, *block, scales[i], f"w{i}") for i, block in enumerate(inputs)]
    blocks += [(1, 0, 0, start, count, 1.0, "w0") for start, count in missing]  # no inputs: a sum of nothing
    cases = [(f"tl.cdiv(rows * {m}, {ROWS})", {"size": _whole(m), "start": _whole(start), "inputs": _whole(k), "place": _whole(first), "columns": _whole(n),
                                               "scale": f"tl.full((), {scale!r}, tl.float32)", "w": weight})
             for m, start, k, first, n, scale, weight in blocks]
    weight = "n * inputs + k[:, None]" if back else "k[:, None] * columns + n"
    text = [
        "@triton.jit",
        f"def rank_map(x, out, {', '.join(f'w{i}' for i in range(len(inputs)))}, rows):",
        "    tile = tl.program_id(0)",
        *_chosen(cases),
        f"    n = tl.program_id(1) * {bn} + tl.arange(0, {bn})[None, :]",
        f"    if tl.program_id(1) * {bn} < columns:",
        f"        m = tile * {ROWS} + tl.arange(0, {ROWS})[:, None]",
        "        row = (m // size).to(tl.int64)",
        f"        a = x + row * {row} + start + (m % size) * inputs",
        f"        total = tl.zeros(({ROWS}, {bn}), tl.float32)",
        f"        for first in range(0, inputs, {STEP}):",
        f"            k = first + tl.arange(0, {STEP})",
        "            left = tl.load(a + k[None, :], mask=(row < rows) & (k[None, :] < inputs), other=0.0)",
        f"            right = tl.load(w + {weight}, mask=(k[:, None] < inputs) & (n < columns), other=0.0)",
        f"            total = tl.dot(left, right, total, input_precision=\"{precision}\")",
        f"        tl.store(out + row * {out_row} + place + (m % size) * columns + n, total * scale, mask=(row < rows) & (n < columns))",
    ]
    tiles = max(cut(block[4], bn) for block in blocks)
    return modules.load("\n".join(text) + "\n", "rank_map"), bn, tiles, tuple(block[0] for block in blocks)


def _map_of(node: Node) -> tuple[tuple[tuple[int, int, int, int], ...], tuple[tuple[int, int], ...]]:
    """Blocks and missing columns of a `rank-map`, as `_map_kernel` takes them."""
    x, *weights = node.inputs
    columns = prod(node.type.shape[1:])
    blocks, start, reached = [], 0, 0
    for rank, w in enumerate(weights):
        k, n = w.type.shape
        size, square = 2 * rank + 1, rank * rank
        if node.attrs["back"]:
            if square + size <= x.type.shape[1]:
                blocks.append((square * n, n, start, k))
                reached = start + size * k
        elif square + size <= node.type.shape[1]:
            blocks.append((start, k, square * n, n))
            reached = width(rank) * n
        start += size * k
    return tuple(blocks), ((reached, columns - reached),) if reached < columns else ()


def _map_function(node: Node) -> tuple[Any, int, tuple[int, ...], int]:
    """(function, column tiles, components of each block, weights that it takes)."""
    blocks, missing = _map_of(node)
    function, _, tiles, components = _map_kernel(blocks, prod(node.inputs[0].type.shape[1:]), prod(node.type.shape[1:]), missing,
                                                 node.attrs["scales"], node.attrs["back"], precise())
    return function, tiles, components, len(blocks)


def rank_map(node: Node, x: torch.Tensor, *rest: torch.Tensor) -> None:
    """Weights, then where the result goes."""
    *weights, out = rest
    if not takes(node, out):
        out.copy_(reference(node, [x, *weights]))
        return
    rows = node.type.shape[0]
    if not rows:
        return
    function, tiles, components, count = _map_function(node)
    programs = sum(cut(rows * m, ROWS) for m in components)
    function[(programs, tiles)](x.contiguous(), out, *(w.contiguous() for w in weights[:count]), rows, num_warps=4)


def map_ahead(node: Node) -> list[modules.Wanted]:
    """What it launches, to be compiled with others."""
    if node.type.dtype != "f32" or not node.type.shape[0]:
        return []
    function, _, _, count = _map_function(node)
    return [(function, [torch.float32] * (2 + count) + [node.type.shape[0]], {"num_warps": 4})]


# --- gradients by weights ---


@cache
def _weights_kernels(blocks: tuple[tuple[int, int, int, float], ...], outputs: int, count: int, row: int, ct_row: int, splits: int,
                     precision: str) -> tuple[Any, Any, int, int]:
    """(parts, their sum, programs of each); blocks as in the op; `count` pairs; the parts are [splits elements]."""
    bo, bq = power(outputs, 64), max(power(inputs, 64) for _, _, inputs, _ in blocks)
    tiles_o = cut(outputs, bo)
    total = sum(inputs * outputs for _, _, inputs, _ in blocks)
    cases, offset, programs = [], 0, 0
    for rank, start, inputs, _ in blocks:
        tiles = cut(inputs, bq) * tiles_o
        cases.append((str(tiles), {"size": _whole(2 * rank + 1), "start": _whole(start), "inputs": _whole(inputs), "place": _whole(rank * rank * outputs),
                                   "offset": _whole(offset)}))
        offset += inputs * outputs
        programs += tiles
    text = [
        "@triton.jit",
        f"def rank_parts(out, {', '.join(f'x{p}, c{p}' for p in range(count))}, rows, one):",
        "    tile = tl.program_id(0)",
        "    part = tl.program_id(1)",
        *_chosen(cases),
        f"    q = (tile // {tiles_o}) * {bq} + tl.arange(0, {bq})[:, None]",
        f"    o = (tile % {tiles_o}) * {bo} + tl.arange(0, {bo})[None, :]",
        f"    chunk = tl.cdiv(tl.cdiv(rows * size, {STEP}), {splits}) * {STEP}",
        "    stop = tl.minimum((part + 1) * chunk, rows * size)",
        f"    total = tl.zeros(({bq}, {bo}), tl.float32)",
    ]
    for p in range(count):
        text += [
            f"    for first in range(part * chunk, stop, {STEP}):",
            f"        m = first + tl.arange(0, {STEP})",
            "        row = (m // size).to(tl.int64)",
            "        inside = m < rows * size",
            f"        left = tl.load(x{p} + row[None, :] * {row} + start + (m[None, :] % size) * inputs + q, mask=inside[None, :] & (q < inputs), other=0.0)",
            f"        right = tl.load(c{p} + row[:, None] * {ct_row} + place + (m[:, None] % size) * {outputs} + o, mask=inside[:, None] & (o < {outputs}), other=0.0)",
            f"        total += tl.dot(left, right, input_precision=\"{precision}\") * one",
        ]
    text.append(f"    tl.store(out + part * {total} + offset + q * {outputs} + o, total, mask=(q < inputs) & (o < {outputs}))")
    parts = modules.load("\n".join(text) + "\n", "rank_parts")
    sizes = tuple(inputs * outputs for _, _, inputs, _ in blocks)
    last, blocks_of_sums = sums_kernel(sizes, tuple(scale for _, _, _, scale in blocks), splits)
    return parts, last, programs, blocks_of_sums


@cache
def sums_kernel(sizes: tuple[int, ...], scales: tuple[float, ...], splits: int) -> tuple[Any, int]:
    """(function, programs): partial sums [splits elements] added in order, times a number, and written to one tensor for each of the sizes."""
    whole = sum(sizes)
    text = ["@triton.jit", f"def sums(parts, {', '.join(f'o{i}' for i in range(len(sizes)))}):", "    tile = tl.program_id(0)"]
    offset = programs = 0
    for i, (size, scale) in enumerate(zip(sizes, scales, strict=True)):
        text += [
            f"    if (tile >= 0) & (tile < {cut(size, FINISH)}):",
            f"        e = tile * {FINISH} + tl.arange(0, {FINISH})",
            f"        total = tl.zeros(({FINISH},), tl.float32)",
            f"        for part in range(0, {splits}):",
            f"            total += tl.load(parts + part * {whole} + {offset} + e, mask=e < {size}, other=0.0)",
            f"        tl.store(o{i} + e, total * {scale!r}, mask=e < {size})",
            f"    tile -= {cut(size, FINISH)}",
        ]
        offset += size
        programs += cut(size, FINISH)
    return modules.load("\n".join(text) + "\n", "sums"), programs


def _splits(node: Node) -> int:
    """Parts of the rows that programs add apart."""
    blocks, first = node.attrs["blocks"], node.inputs[1]
    outputs, rows = first.type.shape[2], first.type.shape[0]
    widest = max(power(inputs, 64) for _, _, inputs, _ in blocks)
    tiles = sum(cut(inputs, widest) * cut(outputs, power(outputs, 64)) for _, _, inputs, _ in blocks)
    return max(1, min(cut(PROGRAMS, tiles), cut(rows, STEP)))


def weights_scratch(node: Node) -> int:
    """Bytes of its partial sums."""
    return 4 * _splits(node) * sum(inputs * node.inputs[1].type.shape[2] for _, _, inputs, _ in node.attrs["blocks"])


def _weights_functions(node: Node) -> tuple[Any, Any, int, int]:
    first = node.inputs[1]
    return _weights_kernels(node.attrs["blocks"], first.type.shape[2], len(pairs(node)), prod(node.inputs[0].type.shape[1:]), prod(first.type.shape[1:]),
                            _splits(node), precise())


def rank_weights(node: Node, operands: Sequence[torch.Tensor], outs: Mapping[int, torch.Tensor], scratch: torch.Tensor) -> None:
    """The gradients `outs` by number, all that the blocks of the node have."""
    blocks = node.attrs["blocks"]
    if not all(takes(node, out) for out in outs.values()) or len(outs) != len(blocks):
        for of, out in outs.items():
            single = node if node.attrs["of"] == of else _other(node, of)
            out.copy_(reference(single, operands))
        return
    parts, sums, programs, last = _weights_functions(node)
    room = scratch.view(torch.float32)
    parts[(programs, _splits(node))](room, *(x.contiguous() for x in operands), node.inputs[1].type.shape[0], 1.0, num_warps=4)
    sums[(last,)](room, *(outs[i] for i in range(len(blocks))), num_warps=4)


def weights_ahead(node: Node) -> list[modules.Wanted]:
    if node.type.dtype != "f32":
        return []
    parts, sums, _, _ = _weights_functions(node)
    return [(parts, [torch.float32] * (1 + len(node.inputs)) + [node.inputs[1].type.shape[0], 1.0], {"num_warps": 4}),
            (sums, [torch.float32] * (1 + len(node.attrs["blocks"])), {"num_warps": 4})]


def _other(node: Node, of: int) -> Node:
    """The node of another block of the same launch."""
    return build(node.op, *node.inputs, blocks=node.attrs["blocks"], of=of)


def takes(node: Node, out: torch.Tensor) -> bool:
    """Whether a kernel makes it: f32, on a GPU or under Triton's interpreter."""
    return node.type.dtype == "f32" and out.is_contiguous() and (out.device.type != "cpu" or interpreted())
