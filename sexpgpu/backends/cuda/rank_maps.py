"""Kernels of `rank-map` and `rank-weights`: the matrix products of all ranks of an equivariant linear map in one launch, on features as
they lie. A block of rank l [2l+1 inputs] of a row is 2l+1 rows of its product, found by arithmetic, so nothing is copied.

f32 operands go through tensor cores as three products of TF32 parts, whose error is that of f32 sums; where the run says `tf32`,
as one. Gradients by weights are sums over many rows: programs take parts of them, and a second launch adds the parts in order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from math import prod
from typing import Any

import torch

from sexpgpu.backends.cuda import modules
from sexpgpu.backends.cuda.device import interpreted
from sexpgpu.ir import Node
from sexpgpu.ops import build, table
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


@cache
def _map_kernel(inputs: tuple[tuple[int, int, int, int], ...], row: int, out_row: int, missing: tuple[tuple[int, int], ...], scales: tuple[float, ...],
                back: bool, precision: str) -> tuple[Any, int, int, tuple[int, ...]]:
    """(function, BN, column tiles, components of each block). inputs: of each rank (first column, inputs, first column of the result,
    columns); missing: (first, count) of columns that are 0. `row`, `out_row`: lengths of rows."""
    bn = max(power(n, 64) for _, _, _, n in inputs)
    text = [
        "@triton.jit",
        f"def rank_map(x, out, {', '.join(f'w{i}' for i in range(len(inputs)))}, rows):",
        "    tile = tl.program_id(0)",
        f"    n = tl.program_id(1) * {bn} + tl.arange(0, {bn})[None, :]",
    ]
    components = []
    for i, (start, k, out_start, n) in enumerate(inputs):
        m = 2 * i + 1
        components.append(m)
        weight = f"n * {k} + k[:, None]" if back else f"k[:, None] * {n} + n"
        text += [
            f"    if (tile >= 0) & (tile < tl.cdiv(rows * {m}, {ROWS})) & (tl.program_id(1) * {bn} < {n}):",
            f"        m = tile * {ROWS} + tl.arange(0, {ROWS})[:, None]",
            f"        row = (m // {m}).to(tl.int64)",
            f"        a = x + row * {row} + {start} + (m % {m}) * {k}",
            f"        total = tl.zeros(({ROWS}, {bn}), tl.float32)",
            f"        for first in range(0, {k}, {STEP}):",
            f"            k = first + tl.arange(0, {STEP})",
            f"            left = tl.load(a + k[None, :], mask=(row < rows) & (k[None, :] < {k}), other=0.0)",
            f"            right = tl.load(w{i} + {weight}, mask=(k[:, None] < {k}) & (n < {n}), other=0.0)",
            f"            total = tl.dot(left, right, total, input_precision=\"{precision}\")",
            f"        tl.store(out + row * {out_row} + {out_start} + (m % {m}) * {n} + n, total * {scales[i]!r}, mask=(row < rows) & (n < {n}))",
            f"    tile -= tl.cdiv(rows * {m}, {ROWS})",
        ]
    for start, count in missing:
        text += [
            f"    if (tile >= 0) & (tl.program_id(1) * {bn} < {count}):",
            f"        m = tile * {ROWS} + tl.arange(0, {ROWS})[:, None]",
            f"        tl.store(out + m.to(tl.int64) * {out_row} + {start} + n, tl.zeros(({ROWS}, {bn}), tl.float32), mask=(m < rows) & (n < {count}))",
            f"    tile -= tl.cdiv(rows, {ROWS})",
        ]
    tiles = max([cut(n, bn) for _, _, _, n in inputs] + [cut(count, bn) for _, count in missing])
    return modules.load("\n".join(text) + "\n", "rank_map"), bn, tiles, tuple(components)


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


def rank_map(node: Node, x: torch.Tensor, *rest: torch.Tensor) -> None:
    """Weights, then where the result goes."""
    *weights, out = rest
    if not takes(node, out):
        out.copy_(table()[node.op].reference(torch, node, [x, *weights]))
        return
    rows = node.type.shape[0]
    if not rows:
        return
    blocks, missing = _map_of(node)
    back = node.attrs["back"]
    function, _, tiles, components = _map_kernel(blocks, prod(node.inputs[0].type.shape[1:]), prod(node.type.shape[1:]), missing,
                                                 node.attrs["scales"], back, precise())
    programs = sum(cut(rows * m, ROWS) for m in components) + len(missing) * cut(rows, ROWS)
    function[(programs, tiles)](x.contiguous(), out, *(w.contiguous() for w in weights[: len(blocks)]), rows, num_warps=4)


# --- gradients by weights ---


@cache
def _weights_kernels(blocks: tuple[tuple[int, int, int, float], ...], outputs: int, count: int, row: int, ct_row: int, splits: int,
                     precision: str) -> tuple[Any, Any, int, int]:
    """(parts, their sum, programs of each); blocks as in the op; `count` pairs; the parts are [splits elements]."""
    bo = power(outputs, 64)
    tiles_o = cut(outputs, bo)
    operands = ", ".join(f"x{p}, c{p}" for p in range(count))
    text = ["@triton.jit", f"def rank_parts(out, {operands}, rows):", "    tile = tl.program_id(0)", "    part = tl.program_id(1)"]
    total = sum(inputs * outputs for _, _, inputs, _ in blocks)
    offset = programs = 0
    for rank, start, inputs, _ in blocks:
        m, bq = 2 * rank + 1, power(inputs, 64)
        tiles = cut(inputs, bq) * tiles_o
        text += [
            f"    if (tile >= 0) & (tile < {tiles}):",
            f"        q = (tile // {tiles_o}) * {bq} + tl.arange(0, {bq})[:, None]",
            f"        o = (tile % {tiles_o}) * {bo} + tl.arange(0, {bo})[None, :]",
            f"        chunk = tl.cdiv(tl.cdiv(rows * {m}, {STEP}), {splits}) * {STEP}",
            f"        stop = tl.minimum((part + 1) * chunk, rows * {m})",
            f"        total = tl.zeros(({bq}, {bo}), tl.float32)",
        ]
        for p in range(count):
            text += [
                "        for first in range(part * chunk, stop, " + str(STEP) + "):",
                f"            m = first + tl.arange(0, {STEP})",
                f"            row = (m // {m}).to(tl.int64)",
                f"            inside = m < rows * {m}",
                f"            left = tl.load(x{p} + row[None, :] * {row} + {start} + (m[None, :] % {m}) * {inputs} + q, mask=inside[None, :] & (q < {inputs}), other=0.0)",
                f"            right = tl.load(c{p} + row[:, None] * {ct_row} + {rank * rank * outputs} + (m[:, None] % {m}) * {outputs} + o,"
                f" mask=inside[:, None] & (o < {outputs}), other=0.0)",
                f"            total = tl.dot(left, right, total, input_precision=\"{precision}\")",
            ]
        text += [
            f"        tl.store(out + part * {total} + {offset} + q * {outputs} + o, total, mask=(q < {inputs}) & (o < {outputs}))",
            f"    tile -= {tiles}",
        ]
        offset += inputs * outputs
        programs += tiles
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
    tiles = sum(cut(inputs, power(inputs, 64)) * cut(outputs, power(outputs, 64)) for _, _, inputs, _ in blocks)
    return max(1, min(cut(PROGRAMS, tiles), cut(rows, STEP)))


def weights_scratch(node: Node) -> int:
    """Bytes of its partial sums."""
    return 4 * _splits(node) * sum(inputs * node.inputs[1].type.shape[2] for _, _, inputs, _ in node.attrs["blocks"])


def rank_weights(node: Node, operands: Sequence[torch.Tensor], outs: Mapping[int, torch.Tensor], scratch: torch.Tensor) -> None:
    """The gradients `outs` by number, all that the blocks of the node have."""
    blocks, first = node.attrs["blocks"], node.inputs[1]
    if not all(takes(node, out) for out in outs.values()) or len(outs) != len(blocks):
        for of, out in outs.items():
            single = node if node.attrs["of"] == of else _other(node, of)
            out.copy_(table()[node.op].reference(torch, single, list(operands)))
        return
    outputs, rows, splits = first.type.shape[2], first.type.shape[0], _splits(node)
    parts, sums, programs, last = _weights_kernels(blocks, outputs, len(pairs(node)), prod(node.inputs[0].type.shape[1:]), prod(first.type.shape[1:]),
                                                   splits, precise())
    room = scratch.view(torch.float32)
    parts[(programs, splits)](room, *(x.contiguous() for x in operands), rows, num_warps=4)
    sums[(last,)](room, *(outs[i] for i in range(len(blocks))), num_warps=4)


def _other(node: Node, of: int) -> Node:
    """The node of another block of the same launch."""
    return build(node.op, *node.inputs, blocks=node.attrs["blocks"], of=of)


def takes(node: Node, out: torch.Tensor) -> bool:
    """Whether a kernel makes it: f32, on a GPU or under Triton's interpreter."""
    return node.type.dtype == "f32" and out.is_contiguous() and (out.device.type == "cuda" or interpreted())
