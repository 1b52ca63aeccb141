"""A fused kernel as the source of a Triton function.

Every value is a tile [rows of the program, columns of the program], or has size 1 along an axis that it does not depend on; one
without rows is computed before the loop over rows. bf16 and f16 values are held as f32 that are already rounded.
No text of a user's enters: names are numbered, attributes are numbers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce

from sexpgpu.ir import DTYPES, Node, Origins
from sexpgpu.ops import table
from sexpgpu.ops.random import DRAWS
from sexpgpu.passes.schedule.fuse import PERSISTENT, REDUCTIONS, Kernel, element, form, joined, padded, reduced_shape
from sexpgpu.passes.schedule.index import Expr, Index, Var, lift, offset, render, unravel
from sexpgpu.passes.schedule.views import PLAIN, aligned, picked, place_of, through

TYPES = {
    "f32": "tl.float32", "f64": "tl.float64", "bf16": "tl.float32", "f16": "tl.float32", "i32": "tl.int32", "i64": "tl.int64",
    "u8": "tl.uint8", "u16": "tl.uint16", "bool": "tl.int1",
}
_NARROW = {"bf16": "round_bf16", "f16": "round_f16"}
_LOADS = {"bf16": "from_bf16", "f16": "from_f16", "bool": "from_bool"}
_STORES = {"bf16": "to_bf16", "f16": "to_f16", "bool": "to_bool"}


PROCESSORS = 132
APART = 512  # columns from which rows are cut into tiles side by side
LARGE = 1 << 22  # elements from which a kernel of sums over rows is cut for the memory's speed, and not to have many programs
HELD = 7  # rows of 768 columns that a warp has in registers: 255 of them a thread, of which 8 warps fit on a processor
COPIED = 8192  # numbers that a program which sums over rows has in registers at once, of which three times what it reads fits in shared memory: 96 KiB
READ = 3  # rows of operands beside which a warp that sums nothing over rows takes one of 1,024 columns
FEW = 2  # blocks of rows that one program sums, so that no other launch puts partial sums together


@dataclass(frozen=True)
class Blocks:
    """How a kernel is cut: rows and columns of a tile, programs that share the rows, warps; and how many tiles side by side a program
    takes (`pieces`). Tiles of 128 columns a warp give every thread four neighbours: f32 and bf16 then lie alike in registers, where
    wider ones make Triton bring what it stores into another order through shared memory. `early`: every tile that is read is on its way
    before any is reduced; else a tile that is needed behind a reduction is asked for there."""

    rows: int
    columns: int
    splits: int
    warps: int = 4
    stages: int = 1
    pieces: int = 1
    early: bool = False

    @property
    def across(self) -> int:
        """Columns of a program."""
        return self.columns * self.pieces


@dataclass
class Emitted:
    """A kernel's source and what its arguments are, in order.

    arguments: ("read", node) ("store", node) ("partial", node) ("parts", node) ("key", draw).
    grid: programs. aligned: tensors read only at the element that the program stores, so that it may be stored over them.
    """

    name: str
    source: str
    arguments: list[tuple]
    grid: tuple[int, int]
    warps: int
    aligned: frozenset[Node] = frozenset()
    partials: dict[Node, tuple[int, int]] = field(default_factory=dict)


def next_power(n: int) -> int:
    """The least power of two that is n or more."""
    return 1 << max(0, n - 1).bit_length()


def shape_kind(kernel: Kernel) -> str:
    """`flat`, `rows` (a program holds whole rows), `columns` (sums over rows only), or `long` (rows longer than a program)."""
    forms = {form(u, u.op not in REDUCTIONS or not _reduces(u)) for u in kernel.units}
    if "row" in forms or _has_row_points(kernel):
        return "rows" if kernel.columns <= PERSISTENT else "long"
    return "columns" if "column" in forms else "flat"


def _has_row_points(kernel: Kernel) -> bool:
    return any(_point(u) and u.type.size != kernel.rows * kernel.columns for u in kernel.units)


def _reduces(unit: Node) -> bool:
    return bool(reduced_shape(unit)[1])


def _point(unit: Node) -> bool:
    return unit.op not in REDUCTIONS or not _reduces(unit)


def choose_blocks(kernel: Kernel, device: str) -> Blocks:
    """Block sizes by rule: few huge programs under the interpreter, enough programs to fill the GPU on it."""
    kind, rows, columns = shape_kind(kernel), kernel.rows, kernel.columns
    sums = any(not _point(u) and form(u, False) in ("column", "total") for u in kernel.units)
    if device == "cpu":
        wide = next_power(columns) if kind == "rows" else min(next_power(columns), 1 << 16)
        if kind == "flat":
            size = rows * columns
            return Blocks(1, min(next_power(size), 1 << 16), 2 if sums and size > 1 << 16 else 1)
        high = 1 if kind == "long" else max(1, min(next_power(rows), (1 << 16) // wide))
        return Blocks(high, wide if kind != "long" else 4096, 2 if sums and rows > 2 * high else 1)
    if kind == "rows" and columns >= APART:
        totals = sum(not _point(u) and form(u, False) == "column" for u in kernel.units)
        return _wide_rows(rows, columns, sums, totals + sum(r.type.size == rows * columns for r in kernel.reads))
    if kind == "columns" and rows * columns >= LARGE:
        return _tall(rows, columns, any(b.type.size == rows * columns for b in kernel.stores))
    if kind == "flat" and not sums and rows * columns >= LARGE and len({DTYPES[b.type.dtype] for b in kernel.stores}) > 1:
        return Blocks(1, 512, 1, 4, 1, 2)  # values of 2 and of 4 bytes: four neighbours a thread, see `Blocks`
    return _gpu_blocks(kind, rows, columns, sums)


def _wide_rows(rows: int, columns: int, sums: bool, held: int) -> Blocks:
    """One row at a time, four neighbours a thread in each of some tiles side by side, and few warps: what is done once a row, in every
    thread, then weighs little, sums along a row stay within a warp or two, and no tile is wider than the row needs. held: rows that a
    program has in registers at once: what it reads, and its sums over rows. In one warp nothing stands between a sum and what is
    read behind it, so that ptxas brings that forward; over several there are barriers, and copies ahead of three rows are faster, where shared
    memory has room for them (1,024 columns of f32, two rows read: 1.01 of a copy's speed, against 0.96 in one warp and 0.85 without copies)."""
    alone = columns <= 768 and held * columns <= HELD * 768
    warps = _warps(columns, (1024 if alone else 384) if sums else 1024 if held <= READ else 768)
    wide = 128 * warps
    pieces = -(-columns // wide)
    if not sums:
        return Blocks(1, wide, 1, warps, 1, pieces)
    if columns > 768 and held * columns <= COPIED:
        return Blocks(1, wide, min(4 * PROCESSORS, rows) if rows > FEW else 1, warps, 3, pieces)
    return Blocks(1, wide, min((8 if warps == 1 else 6) * PROCESSORS, rows) if rows > FEW else 1, warps, 1, pieces, not alone)


def _gpu_blocks(kind: str, rows: int, columns: int, sums: bool) -> Blocks:
    processors = PROCESSORS
    if kind == "flat":
        size = rows * columns
        wide = min(1024, next_power(size))
        if not sums:
            return Blocks(1, wide, 1, 4 if wide > 256 else 1)
        if size <= 8192:
            return Blocks(1, next_power(size), 1, 8 if size > 2048 else 4)
        wide = 2048 if size > 1 << 20 else 1024
        return Blocks(1, wide, min(8 * processors, -(-size // wide)), 8 if wide > 1024 else 4)
    if kind == "rows":
        wide = next_power(columns)
        if sums:
            high = max(1, min(next_power(rows), 1024 // wide))
            blocks = -(-rows // high)
            return Blocks(high, wide, min(4 * processors, blocks) if blocks > FEW else 1, _warps(high * wide, 256), 3)
        high = max(1, min(next_power(rows), 2048 // wide))
        return Blocks(high, wide, 1, _warps(high * wide, 1024 if wide <= 2048 else 512))
    if kind == "long":  # few rows at once, so that the second pass finds its row in the cache
        return Blocks(1, min(4096, next_power(columns)), 1, 8)
    wide = min(64, next_power(columns))
    high = max(1, min(next_power(rows), 4096 // wide))
    across = -(-columns // wide)
    blocks = -(-rows // high)
    return Blocks(high, wide, max(1, min(blocks, -(-16 * processors // across))) if blocks > FEW else 1, 4, 3 if blocks > 4 else 1)


def _tall(rows: int, columns: int, stored: bool) -> Blocks:
    """Sums over many rows: tiles of 2,048 elements, sixteen a thread, so that 8 programs fit on a processor with what they keep in
    registers; as wide as columns allow, as a row of 256 is 512 bytes in one piece (of sums alone 1,024: 0.92 of a copy's speed against 0.82); and all programs at once. Where values of all elements
    are stored too, 6, and no copies to shared memory beside what is under way."""
    wide = next(w for w in ((1024, 256, 128, 64) if not stored else (256, 128, 64)) if columns % w == 0 or w == 64)
    high = 2048 // wide
    across, blocks = -(-columns // wide), -(-rows // high)
    programs, stages = (6, 1) if stored else (8, 3)
    return Blocks(high, wide, max(1, min(blocks, programs * PROCESSORS // across)), 4, stages)


def _warps(elements: int, each: int) -> int:
    """Warps that take `each` elements apiece: 1 to 16."""
    return max(1, min(16, next_power(-(-elements // each))))


def kernel_name(kernel: Kernel, origins: Origins | None) -> str:
    """Model path without call numbers, phase and what is computed last: equal layers give equal names."""
    if origins is None:
        return "kernel"
    found = [origins.of(unit) for unit in kernel.units]
    paths = [o.paths[0] for o in found if o.paths]
    path = re.sub(r"/\d+(?=/|$)", "", paths[0]) if paths else ""
    phase = next((o.phase for o in found if o.phase != "forward"), "forward")
    last = kernel.units[-1].op
    return "k_" + identifier(f"{path}_{phase}_{last}")


def identifier(text: str) -> str:
    """The only way that a user's text reaches generated code: letters, digits and underscores, 80 at most."""
    return re.sub(r"[^A-Za-z0-9_]+", "_", text.encode("ascii", "replace").decode())[:80]


class Emitter:
    """Source of one kernel."""

    def __init__(self, kernel: Kernel, blocks: Blocks, name: str = "kernel", parts: Mapping[Node, int] | None = None):
        """`parts`: totals that other kernels leave as so many partial sums, which this one adds up where it reads them."""
        self.parts = parts or {}
        self.kernel, self.blocks, self.name = kernel, blocks, name
        self.kind = shape_kind(kernel)
        self.rows, self.columns = kernel.rows, kernel.columns
        if self.kind == "flat":
            self.rows, self.columns = 1, kernel.rows * kernel.columns
        self.r, self.c = lift(Var("r", self.rows)), lift(Var("c", self.columns))
        self.own = set(kernel.units)
        self.arguments: list[tuple] = []
        self.parameters: dict[tuple, str] = {}
        self.head: list[str] = []  # before the loop over rows
        self.body: list[str] = []
        self.tail: list[str] = []
        self.names: dict[tuple, str] = {}
        self.axes: dict[str, tuple[bool, bool]] = {}  # name -> depends on (rows, columns)
        self.done: dict[Node, str] = {}
        self.places: dict[Node, set[Expr]] = {}  # what is read -> where
        self.loads: dict[Node, int] = {}  # and how often: a second time it may have been stored over
        self.count = 0
        self.eighths = False  # whether every eighth column is named too
        self.wide = any(n.type.size >= 1 << 31 for n in (*kernel.reads, *kernel.stores)) or self.rows * self.columns >= 1 << 31
        self.partials: dict[Node, tuple[int, int]] = {}
        self.masks = (self.rows % blocks.rows != 0, self.columns % blocks.across != 0)
        self.columned: set[str] = set()  # sums by columns, of which each piece has its own

    # --- arguments ---

    def parameter(self, *what: object) -> str:
        if what not in self.parameters:
            self.parameters[what] = f"p{len(self.arguments)}"
            self.arguments.append(what)
        return self.parameters[what]

    # --- lines ---

    def put(self, source: str, axes: tuple[bool, bool], key: tuple | None = None) -> str:
        """Assigns `source` to a new name, before the loop if it does not depend on rows."""
        name = f"v{self.count}"
        self.count += 1
        (self.body if axes[0] or self.kind == "long" else self.head).append(f"{name} = {source}")
        self.axes[name] = axes
        if key is not None:
            self.names[key] = name
        return name

    def var(self, v: Var) -> str:
        return self.names[("loaded", v)] if v.loaded is not None else v.name

    def expression(self, x: Expr) -> str:
        return render(x, self.var)

    def spread(self, x: Expr) -> tuple[bool, bool]:
        rows = columns = False
        for v in x.variables:
            if v.loaded is not None:
                a, b = self.axes[self.names[("loaded", v)]]
                rows, columns = rows or a, columns or b
            else:
                rows, columns = rows or v.name == "r", columns or v.name == "c"
        return rows, columns

    def join(self, names: list[str]) -> tuple[bool, bool]:
        return any(self.axes[n][0] for n in names), any(self.axes[n][1] for n in names)

    def mask(self, axes: tuple[bool, bool], extra: tuple[str, ...]) -> str:
        parts = [m for m, need, odd in (("rm", axes[0], self.masks[0]), ("cm", axes[1], self.masks[1])) if need and odd]
        parts += list(extra)
        return " & ".join(parts)

    # --- values ---

    def value(self, node: Node, index: Index, extra: tuple[str, ...] = (), top: bool = False) -> str:
        """The name of the value of `node` at `index`; `extra`: masks under which it is needed."""
        if not top and node in self.own and node in self.done and not (self.kind == "long" and _point(node)):
            return self.done[node]
        key = (node, index, extra)
        if key in self.names:
            return self.names[key]
        again = top or (self.kind == "long" and node in self.own and _point(node))
        if not again and (node in self.kernel.inline or table()[node.op].lowering.kind == "leaf") and node.op not in ("constant",):
            return self.load(node, index, extra, key)
        return self.compute(node, index, extra, key)

    def load(self, node: Node, index: Index, extra: tuple[str, ...], key: tuple) -> str:
        if node in self.parts:
            pointer, count = self.parameter("parts", node), self.parts[node]
            at = f"tl.arange(0, {next_power(count)})[None, :]"
            total = f"tl.sum(tl.load({pointer} + {at}, mask={at} < {count}, other=0.0), axis=1, keep_dims=True)"
            return self.put(total if self.kind == "rows" else f"tl.sum({total})", (False, False), key)
        place = place_of(node, index)
        self.places.setdefault(node, set()).add(place)
        self.loads[node] = self.loads.get(node, 0) + 1
        axes = self.spread(place)
        for mask in extra:
            axes = tuple(a or b for a, b in zip(axes, self.axes[mask], strict=True))  # type: ignore[assignment]
        pointer = self.parameter("read", node)
        mask = self.mask(self.spread(place), extra)
        at = self.expression(place)
        if self.kind == "rows" and axes == (False, False):  # a tile, as what stands once a row is: Triton's interpreter cannot join a bool with one
            at += " + tl.zeros((1, 1), tl.int32)"
        if axes != self.spread(place):  # a pointer is as wide as its mask
            at += f" + tl.zeros(({self.blocks.rows if axes[0] else 1}, {self.blocks.columns if axes[1] else 1}), tl.int32)"
        text = f"tl.load({pointer} + ({at})" + (f", mask={mask}, other=0)" if mask else ")")
        if node.type.dtype in _LOADS:
            text = f"{_LOADS[node.type.dtype]}({text})"
        return self.put(text, axes, key)

    def compute(self, node: Node, index: Index, extra: tuple[str, ...], key: tuple) -> str:
        op = node.op
        if op == "constant":
            return self.put(_literal(node), (False, False), key)
        if op in PLAIN:
            x, at = through(node, index)
            name = self.value(x, at, extra)
            self.names[key] = name
            return name
        if op in REDUCTIONS:  # over axes of size 1 only
            name = self.value(node.inputs[0], unravel(offset(index, node.type.shape), node.inputs[0].type.shape), extra)
            self.names[key] = name
            return name
        special = getattr(self, "_" + op.replace("-", "_"), None)
        if special is not None:
            return special(node, index, extra, key)
        if op in DRAWS:
            return self._draw(node, index, key)
        by = _divisor(node)
        if by is not None:
            name = self.value(node.inputs[0], aligned(index, node.inputs[0].type.shape), extra)
            return self.put(f"{name} * {1 / by!r}", self.axes[name], key)
        names = [self.value(x, aligned(index, x.type.shape), extra) for x in node.inputs]
        return self.put(self.pointwise(node, names), self.join(names), key)

    def pointwise(self, node: Node, names: list[str]) -> str:
        if node.op == "cast":
            return _cast(node.inputs[0].type.dtype, node.type.dtype, names[0])
        text = table()[node.op].lowering.expression
        for attribute in table()[node.op].attributes:
            text = re.sub(rf"\b{attribute.name}\b", _number(node.attrs[attribute.name]), text)
        text = text.format(*names)
        if node.type.dtype in _NARROW and node.op not in ("where", "neg", "abs", "max", "min", "relu"):
            text = f"{_NARROW[node.type.dtype]}({text})"
        return text

    # ops that need the index, or a mask

    def _iota(self, node: Node, index: Index, extra: tuple[str, ...], key: tuple) -> str:
        return self.put(f"as_tensor({self.expression(index[0])}).to({TYPES[node.type.dtype]})", self.spread(index[0]), key)

    def _one_hot(self, node: Node, index: Index, extra: tuple[str, ...], key: tuple) -> str:
        label = self.value(node.inputs[0], index[:-1], extra)
        axes = tuple(a or b for a, b in zip(self.axes[label], self.spread(index[-1]), strict=True))
        return self.put(f"({label} == ({self.expression(index[-1])})).to({TYPES[node.type.dtype]})", axes, key)  # type: ignore[arg-type]

    def _tril(self, node: Node, index: Index, extra: tuple[str, ...], key: tuple) -> str:
        x = self.value(node.inputs[0], index, extra)
        row, column = index[-2] + node.attrs["offset"], index[-1]
        axes = self.spread(row + column)
        inside = self.put(f"as_tensor({self.expression(column)}) <= ({self.expression(row)})", axes)
        return self.put(f"where({inside}, {x}, {_zero(node)})", self.join([inside, x]), key)

    def _pad(self, node: Node, index: Index, extra: tuple[str, ...], key: tuple) -> str:
        conditions = []
        axes = (False, False)
        a = node.attrs
        for i, size, before, interior in zip(index, node.inputs[0].type.shape, a["before"], a["interior"], strict=True):
            low, high = i.bounds
            text = self.expression(i)
            step = interior + 1
            if low < before:
                conditions.append(f"(({text}) >= {before})")
            if high > before + (size - 1) * step:
                conditions.append(f"(({text}) <= {before + (size - 1) * step})")
            if interior:
                conditions.append(f"((({text}) - {before}) % {step} == 0)")
            axes = tuple(p or q for p, q in zip(axes, self.spread(i), strict=True))  # type: ignore[assignment]
        if not conditions:
            name = self.value(node.inputs[0], padded(node, index), extra)
            self.names[key] = name
            return name
        inside = self.put(" & ".join(conditions), axes)
        x = self.value(node.inputs[0], padded(node, index), (*extra, inside))
        return self.put(f"where({inside}, {x}, {_literal_of(a['value'], node.type.dtype)})", self.join([inside, x]), key)

    def _concat(self, node: Node, index: Index, extra: tuple[str, ...], key: tuple) -> str:
        axis = node.attrs["axis"]
        text, axes = self.expression(index[axis]), self.spread(index[axis])
        low, high = index[axis].bounds
        first, reached = 0, []
        for x, at, end in joined(node, index):
            if x.type.size and first <= high and end > low:
                reached.append((x, at, first, end))
            first = end
        parts: list[tuple[str, str]] = []
        for x, at, first, end in reached:
            inside = self.put(f"(as_tensor({text}) >= {first}) & (as_tensor({text}) < {end})", axes) if len(reached) > 1 else ""
            parts.append((inside, self.value(x, at, (*extra, inside) if inside else extra)))
        found = parts[-1][1]
        for inside, name in reversed(parts[:-1]):
            found = self.put(f"where({inside}, {name}, {found})", self.join([inside, name, found]))
        self.names[key] = found
        return found

    def _picked(self, node: Node, index: Index, extra: tuple[str, ...], key: tuple) -> str:
        x, at, places, where = picked(node, index, extra)
        axis = node.attrs.get("axis", 0)
        variable = next(v for v in at[axis].variables if v.loaded is not None) if at[axis].variables else None
        if variable is not None and ("loaded", variable) not in self.names:
            read = self.value(places, where, extra)
            self.names[("loaded", variable)] = self.put(f"as_index({read})" + (".to(tl.int64)" if self.wide else ""), self.axes[read])
        name = self.value(x, at, extra)
        self.names[key] = name
        return name

    _gather = _embed = _take_along = _picked

    def _draw(self, node: Node, index: Index, key: tuple) -> str:
        place = offset(index, node.type.shape)
        pointer = self.parameter("key", (node.op, node.attrs["path"], node.attrs["number"], node.type.batch, node.type.size))
        if node.op == "random-bernoulli" and self._by_eight(node, place):
            self.eighths = True
            limit, rows = round(node.attrs["p"] * 65536), self.blocks.rows if self.spread(place)[0] else 1
            element = render(place, lambda v: "c8" if v.name == "c" else self.var(v))
            text = f"bernoulli_tile({pointer}, {self.parameter('draw')}, as_tensor({element}), {limit}, {rows}, {self.blocks.columns})"
            return self.put(text, self.spread(place), key)
        text = f"{node.op.replace('-', '_')}({pointer}, {self.parameter('draw')}, as_tensor({self.expression(place)})"
        if node.op == "random-bernoulli":
            text += f", {round(node.attrs['p'] * 65536)}"
        elif node.type.dtype == "f64":
            return self.put(f"{text}).to(tl.float64)", self.spread(place), key)
        return self.put(text + ")", self.spread(place), key)

    def _by_eight(self, node: Node, place: Expr) -> bool:
        """Whether each eight elements of a tile's row are one block of the draw."""
        if self.blocks.columns % 8 or place.const % 8 or (node.type.batch and (node.type.size // node.type.shape[0]) % 8):
            return False
        steps = {atom: k for atom, k in place.terms}
        inner = steps.pop(Var("c", self.columns), 0)
        return inner == 1 and all(k % 8 == 0 for k in steps.values())

    # --- units ---

    def full(self, name: str) -> str:
        """The value as a whole tile."""
        if self.axes[name] == (True, True) or (self.axes[name][1] and self.blocks.rows == 1) or (self.axes[name][0] and self.blocks.columns == 1):
            return name
        return f"tl.broadcast_to({name}, ({self.blocks.rows}, {self.blocks.columns}))"

    def masked(self, name: str, unit: Node) -> str:
        mask = self.mask((True, True), ())
        tile = self.full(name)
        return f"tl.where({mask}, {tile}, {_identity(unit)})" if mask else tile

    def unit(self, unit: Node) -> None:
        body, index = element(unit, _point(unit), self.rows, self.columns, self.r, self.c)
        if _point(unit):
            name = self.value(body, index, (), top=True)
            self.done[unit] = name
            if unit in self.kernel.stores:
                self.store(unit, name)
            return
        how = form(unit, False)
        name = self.value(body, index)
        if how == "row":
            tile = self.masked(name, unit)
            if unit.type.dtype == "bool":
                tile = f"({tile}).to(tl.int32)"
            found = self.put(_reduce(unit, _all_pieces(_combine(unit), tile), 1), (True, False))
            self.done[unit] = found
            if unit in self.kernel.stores:
                self.store(unit, found)
            return
        self.accumulate(unit, name, how)

    def store(self, unit: Node, name: str) -> None:
        place = self.r * self.columns + self.c if unit.type.size == self.rows * self.columns else self.r
        axes = self.spread(place)
        pointer = self.parameter("store", unit)
        value = name
        if unit.type.dtype in _STORES:
            value = f"{_STORES[unit.type.dtype]}({value})"
        text = self.expression(place)
        if not any(axes):  # one element: a pointer of tile shape [1, 1]
            text, mask = f"tl.zeros(({min(1, self.blocks.rows)}, 1), tl.int32)", ""
            value = f"tl.broadcast_to({value}, (1, 1))" if any(self.axes[name]) else f"{value} + tl.zeros((1, 1), {_store_type(unit)})"
        else:
            mask = self.mask(axes, ())
            high, wide = (self.blocks.rows if axes[0] else 1), (self.blocks.columns if axes[1] else 1)
            if self.axes[name] != axes:
                value = f"tl.broadcast_to({value}, ({high}, {wide}))"
        self.body.append(f"tl.store({pointer} + ({text}), {value}" + (f", mask={mask})" if mask else ")"))

    def accumulate(self, unit: Node, name: str, how: str) -> None:
        """A sum over rows: kept across the loop, given out as one partial a program."""
        acc = f"a{self.count}"
        self.count += 1
        if how == "column":
            self.columned.add(acc)
        self.head.append(f"{acc} = tl.full(({self.blocks.rows}, {self.blocks.columns}), {_identity(unit)}, {_accumulator(unit)})")
        self.body.append(f"{acc} = {_combine(unit)}({acc}, {self.masked(name, unit)}.to({_accumulator(unit)}))")
        elements = self.columns if how == "column" else 1
        programs = self.programs(how)
        self.partials[unit] = (programs, elements)
        pointer = self.parameter("partial", unit) if programs > 1 else self.parameter("store", unit)
        convert = f"{_STORES[unit.type.dtype]}(" if programs == 1 and unit.type.dtype in _STORES else "("
        if how == "column":
            place = f"split * {self.columns} + c" if programs > 1 else "c"
            mask = ", mask=cm" if self.masks[1] else ""
            sums = acc if self.blocks.rows == 1 else _reduce(unit, acc, 0)
            self.tail.append(f"tl.store({pointer} + ({place}), {convert}{sums}){mask})")
        else:
            number = "(split * tl.num_programs(0) + tl.program_id(0))" if self.kind == "columns" else "split"
            place = f"{number} + tl.zeros((1, 1), tl.int32)" if programs > 1 else "tl.zeros((1, 1), tl.int32)"
            both = _reduce(unit, _reduce(unit, acc, 1), 0)
            self.tail.append(f"tl.store({pointer} + ({place}), {convert}{both}))")

    def programs(self, how: str) -> int:
        if how == "total" and self.kind == "columns":
            return self.blocks.splits * -(-self.columns // self.blocks.across)
        return self.blocks.splits

    # --- the whole ---

    def emit(self) -> Emitted:
        if self.kind == "long":
            lines, grid = self._long()
        else:
            for unit in self.kernel.units:
                self.unit(unit)
            lines, grid = self._loop()
            lines = self._pieces(lines)
        parameters = ", ".join(f"p{i}" for i in range(len(self.arguments)))
        source = f"@triton.jit\ndef {self.name}({parameters}):\n" + "".join(f"    {line}\n" for line in lines)
        here = self.r * self.columns + self.c
        aligned = frozenset(node for node, places in self.places.items() if places == {here} and self.loads[node] == 1) if self.kind != "long" else frozenset()
        return Emitted(self.name, source, self.arguments, grid, self.blocks.warps, aligned, self.partials)

    def _loop(self) -> tuple[list[str], tuple[int, int]]:
        """One program of kinds flat, rows and columns."""
        b, wide = self.blocks, ".to(tl.int64)" if self.wide else ""
        row_blocks = -(-self.rows // b.rows)
        column_blocks = -(-self.columns // b.across)
        arange_r = f"tl.arange(0, {b.rows})[:, None]"
        arange_c = f"tl.arange(0, {b.columns})[None, :]{wide}"  # times a stride it may pass 2^31 too
        if b.pieces > 1:
            arange_c = f"{_PIECE} * {b.columns} + {arange_c}"
        lines: list[str] = []
        loop = ""
        if self.kind == "flat":
            if self.partials:
                lines.append("split = tl.program_id(0)")
                loop, steps = self._range(column_blocks), b.splits
                inner = [f"c = block{wide} * {b.across} + {arange_c}", *self._cm()]
                inner += self._hoisted()
            else:
                steps = column_blocks
                lines += [f"c = tl.program_id(0){wide} * {b.across} + {arange_c}", *self._cm(), *self.head]
                inner = []
            grid = (steps, 1)
        elif self.kind == "rows":
            lines += [f"c = {arange_c}", *self._cm()]
            self.body = self._loads_first()
            if self.partials or b.splits > 1:
                lines += ["split = tl.program_id(0)", *self.head]
                loop = self._range(row_blocks)
                inner = [f"r = block{wide} * {b.rows} + {arange_r}", *self._rm()]
                grid = (b.splits, 1)
            else:
                lines += [*self.head, f"r = tl.program_id(0){wide} * {b.rows} + {arange_r}", *self._rm()]
                inner, grid = [], (row_blocks, 1)
        else:
            lines += ["split = tl.program_id(1)", f"c = tl.program_id(0){wide} * {b.across} + {arange_c}", *self._cm(), *self.head]
            loop = self._range(row_blocks)
            inner = [f"r = block{wide} * {b.rows} + {arange_r}", *self._rm()]
            grid = (column_blocks, b.splits)
        if self.kind == "flat" and self.partials:
            accumulators = [line for line in self.head if line.startswith("a")]
            lines += accumulators
        content = [*inner, *self.body]
        if loop:
            lines += [loop, *(f"    {line}" for line in content)]
        else:
            lines += content
        return lines + self.tail, grid

    def _loads_first(self) -> list[str]:
        """The lines of a tile of rows with what is read of a row once (a label, what stands at it) in front, and all tiles if they are
        read `early`: a reduction is waited for, and what is read behind it would be waited for once more. What is found by a value that is
        read itself comes behind the others, as a thread waits for it where it is used."""
        made = [_MADE.match(line) for line in self.body]
        at = {m[1]: i for i, m in enumerate(made) if m}
        below = [[at[n] for n in _NAME.findall(line.partition(" = ")[2]) if n in at] for line in self.body]
        depths: list[int | None] = []  # how many loads a line waits for, one after the other; None behind a reduction
        for i, line in enumerate(self.body):
            waits = [depths[j] for j in below[i]]
            known = [d for d in waits if d is not None]
            free = made[i] is not None and len(known) == len(waits) and "row_" not in line
            depths.append(max(known, default=0) + ("tl.load(" in line) if free else None)
        tiles = self.blocks.early
        wanted: set[int] = set()
        todo = [i for i, m in enumerate(made) if m and depths[i] is not None and "tl.load(" in self.body[i]
                and (tiles or self.axes[m[1]] == (True, False) or all("tl.load(" in line for line in self.body[:i]))]  # fmt: skip
        while todo:
            i = todo.pop()
            if i not in wanted:
                wanted.add(i)
                todo += below[i]
        front = sorted(wanted, key=lambda i: (depths[i] or 0, i))
        return [self.body[i] for i in (*front, *(i for i in range(len(self.body)) if i not in wanted))]

    def _pieces(self, lines: list[str]) -> list[str]:
        """The lines with those that depend on columns once for each tile side by side, and reductions over all of these."""
        columned = {"c", "cm", "c8", *self.columned, *(name for name, axes in self.axes.items() if axes[1])}
        count = self.blocks.pieces

        def of(text: str, piece: int) -> str:
            if count == 1:
                return text
            return _NAME.sub(lambda m: f"{m[0]}_{piece}" if m[0] in columned else m[0], text).replace(_PIECE, str(piece))

        def together(found: re.Match[str]) -> str:
            return reduce(lambda a, b: f"{found[1]}({a}, {b})", (of(found[2], piece) for piece in range(count)))

        made: list[str] = []
        for line in lines:
            line = _TOGETHER.sub(together, line) if _OPEN in line else line
            many = count > 1 and any(name in columned for name in _NAME.findall(line))
            made += [of(line, piece) for piece in range(count)] if many else [line]
        return made

    def _range(self, blocks: int) -> str:
        if self.blocks.stages > 1:
            return f"for block in tl.range(split, {blocks}, {self.blocks.splits}, num_stages={self.blocks.stages}):"
        return f"for block in range(split, {blocks}, {self.blocks.splits}):"

    def _hoisted(self) -> list[str]:
        """In a flat kernel every value depends on the loop variable: nothing but accumulators stays before the loop."""
        return [line for line in self.head if not line.startswith("a")]

    def _rm(self) -> list[str]:
        return [f"rm = r < {self.rows}"] if self.masks[0] else []

    def _cm(self) -> list[str]:
        """What follows the columns `c`: their mask, and every eighth of them."""
        lines = [f"cm = c < {self.columns}"] if self.masks[1] else []
        if self.eighths:
            lines.append(f"c8 = tl.min(c, axis=1, keep_dims=True) + 8 * tl.arange(0, {self.blocks.columns // 8})[None, :]")
        return lines

    def _long(self) -> tuple[list[str], tuple[int, int]]:
        """A row a program, in passes over its columns: one for each level of reductions, and one that stores."""
        levels = self._levels()
        exponents = self._exponents()
        joined = set(exponents.values())
        wide = ".to(tl.int64)" if self.wide else ""
        lines = [f"r = tl.program_id(0){wide} + tl.zeros((1, 1), tl.int32)"]
        for level in sorted({v for u, v in levels.items() if not _point(u) and u not in joined}):
            units = [u for u in self.kernel.units if levels[u] == level and not _point(u) and u not in joined]
            lines += self._pass(units, exponents)
        points = [u for u in self.kernel.units if _point(u)]
        once = [u for u in points if u.type.size != self.rows * self.columns]
        self.names = {k: v for k, v in self.names.items() if k[0] == "loaded" and not self.axes[v][1]}
        self.body = []
        for unit in once:
            self.unit(unit)
        lines += self.body
        many = [u for u in points if u not in once]
        if many:
            self.body, self.names = [], {}
            for unit in many:
                self.unit(unit)
            lines += [f"for start in range(0, {self.columns}, {self.blocks.columns}):", f"    c = start + tl.arange(0, {self.blocks.columns})[None, :]{'.to(tl.int64)' if self.wide else ''}"]
            lines += [f"    {line}" for line in (*self._cm(), *self.body)]
        return lines, (self.rows, 1)

    def _pass(self, units: list[Node], exponents: Mapping[Node, Node]) -> list[str]:
        """One pass over the columns for these reductions. `exponents`: a maximum -> the sum of exponentials below it, which is kept
        beside it and scaled when the maximum grows (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018)."""
        self.body, self.names = [], {}
        head, ends = [], []
        for unit in units:
            body, index = element(unit, False, self.rows, self.columns, self.r, self.c)
            name = self.value(body, index)
            acc = f"a{self.count}"
            self.count += 1
            if unit in exponents:
                tile = self.masked(name, unit)
                head += [f"{acc} = tl.full((1, 1), float(\"-inf\"), {_accumulator(unit)})", f"{acc}s = tl.zeros((1, {self.blocks.columns}), {_accumulator(unit)})"]
                self.body += [
                    f"{acc}t = {tile}",
                    f"{acc}n = maximum({acc}, row_max({acc}t, 1))",
                    f"{acc}f = finite_or_zero({acc}n)",
                    f"{acc}s = {acc}s * exp(finite_or_zero({acc}) - {acc}f) * ({acc} > float(\"-inf\")).to({_accumulator(unit)}) + exp({acc}t - {acc}f)",
                    f"{acc} = {acc}n",
                ]
            else:
                head.append(f"{acc} = tl.full((1, {self.blocks.columns}), {_identity(unit)}, {_accumulator(unit)})")
                self.body.append(f"{acc} = {_combine(unit)}({acc}, {self.masked(name, unit)}.to({_accumulator(unit)}))")
            ends.append((unit, acc))
        lines = [*head, f"for start in range(0, {self.columns}, {self.blocks.columns}):", f"    c = start + tl.arange(0, {self.blocks.columns})[None, :]{'.to(tl.int64)' if self.wide else ''}"]
        lines += [f"    {line}" for line in (*self._cm(), *self.body)]
        self.body = []
        for unit, acc in ends:
            if unit in exponents:
                self.axes[acc] = (True, False)
                self._done(unit, acc)
                self._done(exponents[unit], self.put(_reduce(exponents[unit], f"{acc}s", 1), (True, False)))
            else:
                self._done(unit, self.put(_reduce(unit, acc, 1), (True, False)))
        return lines + self.body

    def _done(self, unit: Node, name: str) -> None:
        self.done[unit] = name
        if unit in self.kernel.stores:
            self.store(unit, name)

    def _exponents(self) -> dict[Node, Node]:
        """Maximum -> the sum of exp(x - maximum, or 0 where that is infinite) over the same x."""
        found = {}
        for unit in self.kernel.units:
            e = unit.inputs[0] if unit.op == "sum" else None
            if e is None or e.op != "exp" or e.inputs[0].op != "-":
                continue
            x, shift = e.inputs[0].inputs
            top = shift.inputs[1] if shift.op == "where" else shift
            if top.op == "reduce-max" and top in self.own and top.inputs[0] is x and top not in found and top.attrs["axis"] == unit.attrs["axis"]:
                found[top] = unit
        return found

    def _levels(self) -> dict[Node, int]:
        """Of each unit, how many reductions of this kernel must be whole before it."""
        levels: dict[Node, int] = {}
        memo: dict[Node, int] = {}

        def above(node: Node, first: bool) -> int:
            if not first and node in levels:
                return levels[node] + (0 if _point(node) else 1)
            if node in memo and not first:
                return memo[node]
            found = max((above(x, False) for x in node.inputs), default=0) if first or node not in self.kernel.inline else 0
            if not first:
                memo[node] = found
            return found

        for unit in self.kernel.units:
            levels[unit] = above(unit, True)
        return levels


_PIECE, _OPEN, _CLOSE = "PIECE", "⟦", "⟧"  # which of the tiles side by side; what is reduced over all of them
_NAME = re.compile(r"\b(?:[va]\d+|c8|cm|c)\b")
_MADE = re.compile(r"(v\d+) = ")
_TOGETHER = re.compile(f"{_OPEN}(\\w+) ([^{_CLOSE}]*){_CLOSE}")


def _all_pieces(combine: str, tile: str) -> str:
    """What `Emitter._pieces` makes one tile of, by the function `combine`."""
    return f"{_OPEN}{combine} {tile}{_CLOSE}"


def _reduce(unit: Node, tile: str, axis: int) -> str:
    function = {"sum": "row_sum", "reduce-max": "row_max", "reduce-min": "row_min", "reduce-all": "row_min", "reduce-any": "row_max", "prod": "row_prod"}[unit.op]
    if unit.type.is_float and unit.op in ("reduce-max", "reduce-min"):
        function = "row_largest" if unit.op == "reduce-max" else "row_smallest"
    if unit.op in ("reduce-max", "reduce-min") and not unit.type.is_float:
        function += "_int"
    if unit.op in ("reduce-all", "reduce-any"):
        return f"{function}_int(({tile}).to(tl.int32), {axis})" if axis == 1 else f"{function}_int({tile}, {axis})"
    return f"{function}({tile}, {axis})"


def _combine(unit: Node) -> str:
    kind = {"sum": "plus", "reduce-max": "maximum", "reduce-min": "minimum", "reduce-all": "minimum", "reduce-any": "maximum", "prod": "times"}[unit.op]
    if kind in ("plus", "times"):
        return kind
    return {"maximum": "larger", "minimum": "smaller"}[kind] if unit.type.is_float else kind + "_int"


def _identity(unit: Node) -> str:
    dtype = unit.type.dtype
    if unit.op == "sum":
        return "0.0" if unit.type.is_float else "0"
    if unit.op == "prod":
        return "1.0" if unit.type.is_float else "1"
    if dtype == "bool":
        return "1" if unit.op == "reduce-all" else "0"
    low = unit.op == "reduce-max"
    if unit.type.is_float:
        return 'float("-inf")' if low else 'float("inf")'
    bits = {"i32": 31, "i64": 63, "u8": 8, "u16": 16}[dtype]
    if dtype.startswith("u"):
        return "0" if low else str(2**bits - 1)
    return str(-(2**bits)) if low else str(2**bits - 1)


def _accumulator(unit: Node) -> str:
    return "tl.int32" if unit.type.dtype == "bool" else TYPES[unit.type.dtype]


def _store_type(unit: Node) -> str:
    return {"bf16": "tl.bfloat16", "f16": "tl.float16", "bool": "tl.int8"}.get(unit.type.dtype, TYPES[unit.type.dtype])


def _number(value: object) -> str:
    """An attribute as source; None (an absent bound of clamp) stays."""
    if value is None:
        return "None"
    return f'float("{value}")' if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))) else repr(value)


def _literal_of(value: float, dtype: str) -> str:
    if dtype == "bool":
        return f"(tl.full((), {int(value)}, tl.int32) != 0)"
    return f"tl.full((), {_number(value)}, {TYPES[dtype]})"


def _literal(node: Node) -> str:
    return _literal_of(node.attrs["value"], node.type.dtype)


def _divisor(node: Node) -> float | None:
    """The number by which an f32 value is divided, if its reciprocal may be taken instead: to 1.5 ulp, where the device's own division of
    f32 gives 2 and takes a dozen instructions."""
    if node.op != "/" or node.type.dtype != "f32":
        return None
    by = node.inputs[1]
    while by.op in PLAIN:
        by = by.inputs[0]
    value = by.attrs["value"] if by.op == "constant" else 0.0
    return float(value) if 2.0**-100 < abs(value) < 2.0**100 else None


def _zero(node: Node) -> str:
    return _literal_of(0.0 if node.type.is_float else 0, node.type.dtype)


def _cast(old: str, new: str, name: str) -> str:
    if new == old:
        return name
    if new == "bool":
        return f"({name} != 0)"
    if new in _NARROW:
        return f"{_NARROW[new]}({name}.to(tl.float32))"
    if old in ("f32", "f64", "bf16", "f16") and new in ("u8", "u16"):
        return f"{name}.to(tl.int64).to({TYPES[new]})"
    if TYPES[new] == TYPES[old]:
        return name
    return f"{name}.to({TYPES[new]})"
