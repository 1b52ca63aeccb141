"""The kernel of `row-chain`: a program takes tiles of rows, and computes every value of the chain on the tile it holds.

Sums over the rows are added up in registers over a program's tiles; a second launch adds those of the programs in order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch

from sexpgpu.backends.cuda import modules
from sexpgpu.backends.cuda.rank_maps import PROGRAMS, cut, power, precise, sums_kernel, takes
from sexpgpu.backends.cuda.references import reference
from sexpgpu.ir import Node
from sexpgpu.ops import build, table

TILE = 32  # rows
MOST = 32  # tiles of a program that sums: what tensor cores cut off, an addition at a time, stays below 1e-5 (docs/decisions/0059)


def _sums(node: Node) -> list[tuple[int, Any, tuple[int, int]]]:
    """(number, pairs, shape) of the outputs that are sums over rows."""
    return [(i, kind[1], shape) for i, (kind, shape) in enumerate(node.attrs["outputs"]) if kind[0] == "sum"]


def _programs(node: Node) -> int:
    tiles = cut(node.inputs[0].type.shape[0], TILE)
    return min(tiles, max(PROGRAMS, cut(tiles, MOST))) if _sums(node) else tiles


def chain_scratch(node: Node) -> int:
    """Bytes of the partial sums."""
    return 4 * _programs(node) * sum(k * n for _, _, (k, n) in _sums(node))


def row_chain(node: Node, operands: Sequence[torch.Tensor], outs: Mapping[int, torch.Tensor], scratch: torch.Tensor) -> None:
    """The outputs `outs` by number."""
    if not all(takes(node, out) for out in outs.values()) or not node.inputs[0].type.shape[0]:
        for of, out in outs.items():
            single = build(node.op, *node.inputs, program=node.attrs["program"], outputs=node.attrs["outputs"], of=of)
            out.copy_(reference(single, operands))
        return
    function, options, finish, last, wanted = _functions(node, tuple(sorted(outs)))
    programs, room = _programs(node), scratch.view(torch.float32)
    written = [outs[i] for i in sorted(outs) if i not in wanted]
    function[(programs,)](*(x.contiguous() for x in operands), *written, room, programs, **options)
    if wanted:
        finish[(last,)](room, *(outs[i] for i in wanted), num_warps=4)


def _functions(node: Node, present: tuple[int, ...]) -> tuple[Any, dict[str, int], Any, int, list[int]]:
    """(kernel, its options, what adds its parts or None, programs of that, numbers of the sums) for these outputs."""
    function = _kernel(node.attrs["program"], node.attrs["outputs"], present, tuple(x.type.shape for x in node.inputs), precise())
    wanted = [(i, shape) for i, _, shape in _sums(node) if i in present]
    options = {"num_warps": 8 if wanted else 4, "num_stages": 1}
    if not wanted:
        return function, options, None, 0, []
    scales = tuple(node.attrs["outputs"][i][0][2] for i, _ in wanted)
    finish, last = sums_kernel(tuple(k * n for _, (k, n) in wanted), scales, _programs(node))
    return function, options, finish, last, [i for i, _ in wanted]


def chain_ahead(node: Node) -> list[modules.Wanted]:
    """What it launches where all of its outputs are asked for, to be compiled with others."""
    if node.type.dtype != "f32" or not node.inputs[0].type.shape[0]:
        return []
    every = tuple(range(len(node.attrs["outputs"])))
    function, options, finish, _, wanted = _functions(node, every)
    f32 = torch.float32
    found: list[modules.Wanted] = [(function, [f32] * (len(node.inputs) + len(every) - len(wanted) + 1) + [_programs(node)], options)]
    return found + ([(finish, [f32] * (1 + len(wanted)), {"num_warps": 4})] if finish is not None else [])


@cache
def _kernel(program: tuple[Any, ...], outputs: tuple[Any, ...], wanted: tuple[int, ...], shapes: tuple[tuple[int, int], ...], precision: str) -> Any:
    """The function of a chain whose operands have these shapes."""
    rows = shapes[0][0]
    whole = rows % TILE == 0
    sums = [(i, outputs[i][0][1], outputs[i][1]) for i in wanted if outputs[i][0][0] == "sum"]
    values = [i for i in wanted if outputs[i][0][0] == "value"]
    names = [f"i{i}" for i in range(len(shapes))] + [f"o{i}" for i in values]
    text = ["@triton.jit", f"def row_chain({', '.join(names)}, parts, programs):"]
    for i, _, (k, n) in sums:
        text.append(f"    s{i} = tl.zeros(({power(k, 128)}, {power(n, 128)}), tl.float32)")
    loop = f"    for start in range(tl.program_id(0) * {TILE}, {rows}, programs * {TILE}):"
    body = [f"r = (start + tl.arange(0, {TILE})[:, None]).to(tl.int64)"]
    widths: list[int] = []
    for width in sorted({n for _, n in shapes} | {shape[1] for _, shape in outputs} | {k for _, _, (k, _) in sums}):
        body.append(f"c{width} = tl.arange(0, {power(width, 128)})[None, :]")
    inside = lambda n: " & ".join(([] if whole else [f"(r < {rows})"]) + ([] if power(n, 128) == n else [f"(c{n} < {n})"])) or None  # noqa: E731
    for number, (kind, *rest) in enumerate(program):
        if kind == "load":
            n = shapes[rest[0]][1]
            masked = f", mask={inside(n)}, other=0.0" if inside(n) else ""
            body.append(f"v{number} = tl.load(i{rest[0]} + r * {n} + c{n}{masked})")
        elif kind == "point":
            n = widths[next(x for x in rest[1] if not isinstance(x, tuple))]
            words = [f"tl.full((), {x[1]!r}, tl.float32)" if isinstance(x, tuple) else f"v{x}" for x in rest[1]]
            body.append(f"v{number} = {table()[rest[0]].lowering.expression.format(*words)}")
        else:
            value, place, turned, scale = rest
            first, second = shapes[place]
            k, n = (second, first) if turned else (first, second)
            kp, np = power(k, 128), power(n, 128)
            at = f"tl.arange(0, {kp})[:, None] + tl.arange(0, {np})[None, :] * {k}" if turned else f"tl.arange(0, {kp})[:, None] * {n} + tl.arange(0, {np})[None, :]"
            near = " & ".join(([f"(tl.arange(0, {kp})[:, None] < {k})"] if kp != k else []) + ([f"(tl.arange(0, {np})[None, :] < {n})"] if np != n else []))
            body.append(f"w = tl.load(i{place} + {at}{f', mask={near}, other=0.0' if near else ''})")
            left = f"v{value}" if kp == k else f"tl.where(c{k} < {k}, v{value}, 0.0)"
            if kp != k:
                body.insert(1, f"c{k} = tl.arange(0, {kp})[None, :]")
            body.append(f"v{number} = tl.dot({left}, w, input_precision=\"{precision}\") * {scale!r}")
        widths.append(n)
        for i in values:  # what is not needed any more leaves its registers
            if outputs[i][0][1] == number:
                body.append(f"tl.store(o{i} + r * {n} + c{n}, v{number}{f', mask={inside(n)}' if inside(n) else ''})")
        for i, pairs, _ in sums:
            for a, b in pairs:
                if max(a, b) == number:
                    x, y = (f"v{v}" if whole else f"tl.where(r < {rows}, v{v}, 0.0)" for v in (a, b))
                    body.append(f"s{i} = tl.dot(tl.trans({x}), {y}, s{i}, input_precision=\"{precision}\")")
    text += [loop, *(f"        {line}" for line in body)]
    offset, total = 0, sum(k * n for _, _, (k, n) in sums)
    for i, _, (k, n) in sums:
        kp, np = power(k, 128), power(n, 128)
        text += [
            f"    at = tl.arange(0, {kp})[:, None] * {n} + tl.arange(0, {np})[None, :]",
            f"    tl.store(parts + tl.program_id(0) * {total} + {offset} + at, s{i}, mask=(tl.arange(0, {kp})[:, None] < {k}) & (tl.arange(0, {np})[None, :] < {n}))",
        ]
        offset += k * n
    return modules.load("\n".join(text) + "\n", "row_chain")
