"""A product as the text of one Triton kernel: straight-line arithmetic on tiles [rows channels].

Three ways through the rows (`mode`): `rows` and `edge` take a tile of them a program, `receiver` and `sender` walk the edges of one
node, whose features are then read once and whose sums stay in registers. Rows of a tile lie in different warps, channels in
different threads. Where an operand has one channel, each path's coupling matrix M[k, i] = Σ_j K[i, j, k] x[j] is made once for
all channels of a thread; gradients share N[i, j] = Σ_k K[i, j, k] c[k].
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache

from sexpgpu.backends.cuda.cartesian.product import Output, Product
from sexpgpu.ops.cartesian.algebra import Path, Term, terms

NAME = "product"
AHEAD = 2  # paths whose loads stand before the stores of an earlier one; 1 where many operands crowd the registers
AT_NODE = {"receiver": "result", "sender": "a"}
WALK = ["begins", "ends", "nodes", "order", "others"]  # of each walk: its edges' places in order, and its node; places of edges, and their other ends


@dataclass(frozen=True)
class Kernel:
    """A kernel's text, and how it takes its arguments: operands by number, outputs by place in the product."""

    source: str
    operands: tuple[int, ...]
    outputs: tuple[int, ...]


@cache
def generate(product: Product, mode: str, numbers: tuple[int, ...], whole: bool = False) -> Kernel:
    """The kernel that makes the product's outputs from the paths of these numbers. whole: its tiles divide the channels."""
    return _Writer(product, mode, numbers, whole).write()


def coefficient(value: Fraction, name: str) -> str:
    if value == 1:
        return name
    return f"-{name}" if value == -1 else f"{float(value)!r} * {name}"


def total(parts: Iterable[str]) -> str:
    return " + ".join(parts).replace("+ -", "- ")


class _Writer:
    def __init__(self, product: Product, mode: str, numbers: tuple[int, ...], whole: bool):
        self.p, self.mode, self.whole = product, mode, whole
        self.paths = [(n, product.form.paths[n]) for n in numbers]
        self.head: list[str] = []  # before the loop
        self.body: list[str] = []  # a row of edges
        self.tail: list[str] = []  # after it
        self.count = 0
        self.c = product.form.channels
        self.narrow = product.narrow
        self.wide = {"b": "a", "a": "b", None: ""}[self.narrow]
        used = {number for o in product.outputs for use in o.uses for number in use}
        self.used = tuple(sorted(used))
        self.lines = self.body

    # --- text ---

    def put(self, text: str, lines: list[str] | None = None) -> None:
        (self.lines if lines is None else lines).append(text)

    def name(self, expression: str) -> str:
        self.count += 1
        found = f"t{self.count}"
        self.put(f"{found} = {expression}")
        return found

    @property
    def looped(self) -> bool:
        return self.mode in AT_NODE

    def single(self, slot: str) -> bool:
        """Whether a slot's tensors have one channel for the kernel's many."""
        return slot == self.narrow

    def write(self) -> Kernel:
        self.loads: dict[tuple[int, int], str] = {}
        self._open()
        self._accumulators()
        needs = [self._needs(n, path) for n, path in self.paths]
        pending = [sorted(need) for need in needs]
        reach = AHEAD if len(self.used) <= 4 else 1
        for at, (n, path) in enumerate(self.paths):
            for ahead in range(at, min(at + reach + 1, len(pending))):
                for key in pending[ahead]:
                    self._load(*key)
                pending[ahead] = []
            self._path(n, path)
        self._close()
        return Kernel(self._text(), self.used, tuple(range(len(self.p.outputs))))

    def _text(self) -> str:
        operands = [f"x{n}" for n in self.used]
        outputs = [f"o{i}" for i in range(len(self.p.outputs))]
        lows = [f"LOW{i}: tl.constexpr" for i in range(len(outputs))]
        runtime = WALK if self.looped else ["senders", "receivers"] if self.p.edges else []
        sizes = ["count", "edges", "slots"]
        tiles = ["ROWS: tl.constexpr", "CHANNELS: tl.constexpr", "ACC: tl.constexpr"]
        arguments = ", ".join(operands + outputs + runtime + sizes + tiles + lows)
        lines = [f"@triton.jit(do_not_specialize={sizes!r})", f"def {NAME}({arguments}):"]
        lines += ["    " + line for line in self.head]
        if self.looped:
            lines.append("    for at in range(begin, end, ROWS):")
            lines += ["        " + line for line in self.body]
        else:
            lines += ["    " + line for line in self.body]
        lines += ["    " + line for line in self.tail]
        return "\n".join(lines) + "\n"

    # --- rows, loads and stores ---

    def _open(self) -> None:
        head = self.head
        head += [
            "walk = tl.program_id(0)",
            "block = tl.program_id(1)",
            "slot = tl.program_id(2)",
            "ch = block * CHANNELS + tl.arange(0, CHANNELS)[None, :]",
            *(() if self.whole else (f"inside = ch < {self.c}",)),
            "line = tl.arange(0, ROWS)[:, None]",
        ]
        if self.looped:
            other = "receiver" if self.mode == "sender" else "sender"
            own = "sender" if self.mode == "sender" else "receiver"
            head += [
                "begin = tl.load(begins + walk)",
                "end = tl.load(ends + walk)",
                "used = (walk + 0 * ch < count) | (begin + 0 * ch < end)",
                "span = (end - begin + slots - 1) // slots",
                "begin += slot * span",
                "end = tl.minimum(begin + span, end)",
                f"{own} = tl.load(nodes + walk).to(tl.int64)",
                "place = tl.minimum(begin + line, end - 1)",
                "next_edge = tl.load(order + place, mask=place >= begin, other=0).to(tl.int64)",
                "next_other = tl.load(others + place, mask=place >= begin, other=0).to(tl.int64)",
            ]
            self.body += [
                "live = at + line < end",
                "edge = next_edge",
                f"{other} = next_other",
                "place = tl.minimum(at + ROWS + line, end - 1)",
                "next_edge = tl.load(order + place).to(tl.int64)",
                "next_other = tl.load(others + place).to(tl.int64)",
            ]
        else:
            self.body += ["edge = walk.to(tl.int64) * ROWS + line", "live = edge < edges"]
            if self.p.edges:
                for what in ("sender", "receiver"):
                    self.body.append(f"{what} = tl.load({what}s + edge, mask=live, other=0).to(tl.int64)")
                    self.body.append(f"{what} = tl.minimum(tl.maximum({what}, 0), count - 1)")
            else:
                self.body += ["sender = edge", "receiver = edge"]
        self.body.append("full = live" if self.whole else "full = live & inside")
        for number in self.used:
            slot = self.p.slots[number]
            lines = self.head if self._hoisted(slot) else self.body
            step = "" if self.single(slot) else " + ch"
            if slot == "weights" and self.p.shared:
                self.put(f"p{number} = x{number} + ch", lines)
            else:
                size = self.p.components(slot) * self.p.channels(slot)
                self.put(f"p{number} = x{number} + {self._row(slot)} * {size}{step}", lines)

    def _row(self, slot: str) -> str:
        return {"a": "sender", "result": "receiver"}.get(slot, "edge")

    def _hoisted(self, slot: str) -> bool:
        """Whether a slot is the same for all rows of a program."""
        return AT_NODE.get(self.mode) == slot or (slot == "weights" and self.p.shared)

    def _load(self, number: int, component: int) -> None:
        """Component of an operand, as a variable; f32 or f64."""
        if (number, component) in self.loads:
            return
        slot = self.p.slots[number]
        hoisted = self._hoisted(slot)
        mask = self._mask(slot, hoisted)
        policy = ', eviction_policy="evict_first"' if slot == "weights" and not self.p.shared else ""
        place = f"p{number} + {component * self.p.channels(slot)}"
        text = f"tl.load({place}, mask={mask}, other=0.0{policy})" if mask else f"tl.load({place})"
        if self.p.dtype == "bf16":
            text = f"from_bf16({text})"
        name = f"x{number}_{component}"
        self.put(f"{name} = {text}", self.head if hoisted and self.looped else self.body)
        self.loads[number, component] = name

    def _mask(self, slot: str, hoisted: bool) -> str:
        """What keeps a load within its tensor and its tile. Rows past a node's last edge have weights of 0 and read that
        edge again for the rest, so that only the weights need the test; shared weights cannot be 0 for some rows."""
        inside = "" if self.single(slot) or self.whole else "inside"
        if hoisted or (self.looped and slot != "weights" and not self.p.shared):
            return inside
        return "full" if inside else "live"

    def _value(self, number: int, component: int) -> str:
        self._load(number, component)
        return self.loads[number, component]

    def _needs(self, n: int, path: Path) -> set[tuple[int, int]]:
        """(operand, component) that a path reads."""
        found: set[tuple[int, int]] = set()
        rows = {"a": range(path.first**2, (path.first + 1) ** 2), "b": range(path.second**2, (path.second + 1) ** 2), "weights": (n,),
                "result": [self.p.place(n, k) for k in range(2 * path.result + 1)]}
        for o in self.p.outputs:
            for use in o.uses:
                found |= {(number, i) for number in use for i in rows[self.p.slots[number]]}
        return found

    def _store(self, number: int, row: str, component: int, value: str, mask: str, lines: list[str], atomic: bool = False) -> None:
        o = self.p.outputs[number]
        slot = o.target
        size = self.p.components(slot) * self.p.channels(slot)
        step = "" if self.single(slot) else " + ch"
        place = f"o{number} + {row} * {size} + {component * self.p.channels(slot)}{step}"
        mask = f", mask={mask}" if mask else ""
        if atomic:
            self.put(f'tl.atomic_add({place}, {value}{mask}, sem="relaxed")', lines)
            return
        if self.p.dtype == "bf16":
            self.put(f"if LOW{number}:", lines)
            self.put(f"    tl.store({place}, to_bf16({value}){mask})", lines)
            self.put("else:", lines)
            self.put(f"    tl.store({place}, {value}{mask})", lines)
            return
        self.put(f"tl.store({place}, {value}{mask})", lines)

    # --- sums ---

    def _grouped(self, o: Output) -> bool:
        """Whether an output is summed over the rows of a program."""
        return AT_NODE.get(self.mode) == o.target or (o.target == "weights" and self.p.shared)

    def _touched(self, o: Output) -> list[int]:
        """The components of an output that this launch's paths reach."""
        found: set[int] = set()
        for n, path in self.paths:
            if o.target == "weights":
                found.add(n)
            elif o.target == "result":
                found |= {self.p.place(n, k) for k in range(2 * path.result + 1)}
        if o.target in ("a", "b"):
            return list(range(self.p.components(o.target)))
        return sorted(found)

    def _accumulators(self) -> None:
        for number, o in enumerate(self.p.outputs):
            lines = self.head if self._grouped(o) and self.looped else self.body
            if o.target == "weights" and not self._grouped(o):
                continue
            for i in self._touched(o):
                self.put(f"s{number}_{i} = tl.zeros((ROWS, CHANNELS), ACC)", lines)

    def _add(self, number: int, component: int, value: str) -> None:
        self.put(f"s{number}_{component} += {value}")

    def _close(self) -> None:
        for number, o in enumerate(self.p.outputs):
            if o.target == "weights" and not self._grouped(o):
                continue
            grouped, atomic = self._grouped(o), False
            lines = self.tail if grouped else self.body
            if grouped:
                row, mask = "program", "" if self.whole else "inside"
            else:
                row, mask = self._row(o.target) if not self.looped else "edge", "full"
                atomic = self.mode == "edge" and o.target in ("a", "result")
            narrow = self.single(o.target)
            if narrow:
                mask = "live" if not grouped else "line < 1"
            if grouped:
                where = "slot * tl.num_programs(1) + block" if narrow else "slot"
                self.put(f"program = ({where}).to(tl.int64) * tl.num_programs(0) + walk", lines)
                row = "program"
                if self.looped and not narrow and o.target == AT_NODE[self.mode]:
                    mask = f"{mask} & used" if mask else "used"
            elif narrow and not atomic:
                self._rows_of_sums(number, o)
                continue
            for i in self._touched(o):
                value = f"s{number}_{i}"
                if grouped:
                    value = f"tl.sum({value}, axis=0, keep_dims=True)"
                if narrow:
                    value = f"tl.sum({value}, axis=1, keep_dims=True)"
                if grouped and narrow:
                    self.put(f"tl.store(o{number} + program * {self.p.components(o.target)} + {i} + tl.zeros((1, 1), tl.int32), {value})", lines)
                    continue
                self._store(number, row, i, value, mask, lines, atomic)

    def _rows_of_sums(self, number: int, o: Output) -> None:
        """An operand of one channel, by edge: its sums over the channels side by side, stored as one row a tile row."""
        size, width = self.p.components(o.target), self._lanes
        self.put(f"narrow{number} = o{number} + (block.to(tl.int64) * edges + edge) * {size}")
        self.put(f"if CHANNELS >= {width}:")
        self.put("    lane = tl.arange(0, CHANNELS)[None, :]")
        self.put("    side = tl.zeros((ROWS, CHANNELS), ACC)")
        for i in range(size):
            self.put(f"    side = tl.where(lane == {i}, tl.sum(s{number}_{i}, axis=1, keep_dims=True), side)")
        place, mask = f"narrow{number} + lane", f"live & (lane < {size})"
        if self.p.dtype == "bf16":
            self.put(f"    if LOW{number}:")
            self.put(f"        tl.store({place}, to_bf16(side), mask={mask})")
            self.put("    else:")
            self.put(f"        tl.store({place}, side, mask={mask})")
        else:
            self.put(f"    tl.store({place}, side, mask={mask})")
        self.put("else:")
        for i in range(size):
            value = f"tl.sum(s{number}_{i}, axis=1, keep_dims=True)"
            if self.p.dtype == "bf16":
                self.put(f"    if LOW{number}:")
                self.put(f"        tl.store(narrow{number} + {i}, to_bf16({value}), mask=live)")
                self.put("    else:")
                self.put(f"        tl.store(narrow{number} + {i}, {value}, mask=live)")
            else:
                self.put(f"    tl.store(narrow{number} + {i}, {value}, mask=live)")

    @property
    def _lanes(self) -> int:
        """Components of the operand of one channel."""
        assert self.narrow is not None
        return self.p.components(self.narrow)

    # --- the arithmetic of a path ---

    def _path(self, n: int, path: Path) -> None:
        if self.narrow:
            self._narrow_path(n, path)
        else:
            self._wide_path(n, path)

    def _entry(self, n: int, path: Path, t: Term) -> dict[str, int]:
        """The components of each slot that a term joins."""
        return {"a": path.first**2 + t.i, "b": path.second**2 + t.j, "result": self.p.place(n, t.k)}

    def _narrow_path(self, n: int, path: Path) -> None:
        x_slot, y_slot = self.narrow, self.wide
        assert x_slot is not None
        entries = [(self._entry(n, path, t), t.coefficient) for t in terms(path)]
        pairs = sorted({(e["result"], e[y_slot]) for e, _ in entries})
        matrices: dict[tuple[int, int, int], str] = {}
        by_cell: dict[tuple[int, int], list[tuple[int, Fraction]]] = defaultdict(list)
        for e, value in entries:
            by_cell[e["result"], e[y_slot]].append((e[x_slot], value))

        def matrix(x: int, k: int, i: int) -> str:
            """M[k, i], made where it is first used: few of them live at once."""
            if (x, k, i) not in matrices:
                matrices[x, k, i] = self.name(total(coefficient(value, self._value(x, j)) for j, value in by_cell[k, i]))
            return matrices[x, k, i]

        gradients: dict[int, list[tuple[int, dict[str, int]]]] = defaultdict(list)  # cotangent -> (output, filling)
        for number, o in enumerate(self.p.outputs):
            fills = [o.filled(use) for use in o.uses]
            if o.target != "result":
                for f in fills:
                    gradients[f["result"]].append((number, f))
                continue
            xs, ws = (list(dict.fromkeys(f[s] for f in fills)) for s in (x_slot, "weights"))
            rows, columns = sorted({k for k, _ in pairs}), sorted({i for _, i in pairs})
            if len(fills) * len(pairs) + len(ws) * len(rows) <= len(xs) * len(pairs) + len(fills) * len(columns):
                for w in ws:
                    for k in rows:
                        parts = [f"{matrix(f[x_slot], k, i)} * {self._value(f[y_slot], i)}" for f in fills if f["weights"] == w for at, i in pairs if at == k]
                        self._add(number, k, f"{self._value(w, n)} * ({total(parts)})")
                continue
            for x in xs:
                scaled = self._scaled(n, [f for f in fills if f[x_slot] == x], columns)
                for k in rows:
                    self._add(number, k, total(f"{matrix(x, k, i)} * {scaled[i]}" for at, i in pairs if at == k))
        dots: dict[int, list[str]] = defaultdict(list)
        for c, wanted in gradients.items():
            self._pulled(n, c, wanted, entries, dots)
        for number, found in dots.items():
            self._weights(number, n, total(found))

    def _scaled(self, n: int, fills: list[dict[str, int]], columns: Iterable[int]) -> dict[int, str]:
        """Σ w y[i] over fillings: the weights drawn into the operand of all channels."""
        y_slot = self.wide
        return {i: self.name(total(f"{self._value(f['weights'], n)} * {self._value(f[y_slot], i)}" for f in fills)) for i in columns}

    def _pulled(self, n: int, c: int, wanted: list[tuple[int, dict[str, int]]], entries: list[tuple[dict[str, int], Fraction]],
                dots: dict[int, list[str]]) -> None:
        """Gradients over cotangent c by way of N[i, j] = Σ_k K[i, j, k] c[k], a row of i at a time: by x it is summed with w y[i], and
        Σ_j x[j] N[i, j] serves the gradients by y and by the weights, whose parts go to `dots`."""
        x_slot, y_slot = self.narrow, self.wide
        assert x_slot is not None
        by_cell: dict[int, dict[int, list[tuple[int, Fraction]]]] = defaultdict(lambda: defaultdict(list))
        for e, value in entries:
            by_cell[e[y_slot]][e[x_slot]].append((e["result"], value))
        outputs = self.p.outputs
        by_x: dict[int, list[dict[str, int]]] = defaultdict(list)
        for number, f in wanted:
            if outputs[number].target == x_slot:
                by_x[number].append(f)
        for i, row in sorted(by_cell.items()):
            drawn = {j: self.name(total(coefficient(v, self._value(c, k)) for k, v in found)) for j, found in row.items()}
            joined: dict[int, str] = {}
            for number, f in wanted:
                target = outputs[number].target
                if target == x_slot:
                    continue
                x = f[x_slot]
                if x not in joined:
                    joined[x] = self.name(total(f"{self._value(x, j)} * {cell}" for j, cell in drawn.items()))
                if target == "weights":
                    dots[number].append(f"{self._value(f[y_slot], i)} * {joined[x]}")
                else:
                    self._add(number, i, f"{self._value(f['weights'], n)} * {joined[x]}")
            for number, fills in by_x.items():
                scaled = self._scaled(n, fills, (i,))[i]
                for j, cell in drawn.items():
                    self._add(number, j, f"{scaled} * {cell}")

    def _weights(self, number: int, n: int, value: str) -> None:
        if self._grouped(self.p.outputs[number]):
            self._add(number, n, value)
        else:
            self._store(number, "edge", n, self.name(value), "full", self.body)

    def _wide_path(self, n: int, path: Path) -> None:
        entries = [(self._entry(n, path, t), t.coefficient) for t in terms(path)]
        cells = sorted({(e["a"], e["b"]) for e, _ in entries})
        drawn: dict[int, dict[tuple[int, int], str]] = {}
        sides: dict[tuple[str, int, int], dict[int, str]] = {}

        def joined(c: int) -> dict[tuple[int, int], str]:
            """N[i, j] = Σ_k K[i, j, k] c[k]."""
            if c not in drawn:
                parts = defaultdict(list)
                for e, value in entries:
                    parts[e["a"], e["b"]].append(coefficient(value, self._value(c, e["result"])))
                drawn[c] = {cell: self.name(total(p)) for cell, p in parts.items()}
            return drawn[c]

        def side(slot: str, x: int, c: int) -> dict[int, str]:
            """Σ over the components of operand x, which fills `slot`, of N: what stands at the other slot."""
            if (slot, x, c) not in sides:
                cell, parts = joined(c), defaultdict(list)
                for i, j in cells:
                    here, there = (i, j) if slot == "a" else (j, i)
                    parts[there].append(f"{self._value(x, here)} * {cell[i, j]}")
                sides[slot, x, c] = {at: self.name(total(p)) for at, p in parts.items()}
            return sides[slot, x, c]

        for number, o in enumerate(self.p.outputs):
            fills = [o.filled(use) for use in o.uses]
            if o.target == "result":
                for w in dict.fromkeys(f["weights"] for f in fills):
                    own = [f for f in fills if f["weights"] == w]
                    outer = {}
                    for i, j in cells:
                        key = (i, j, *((f["a"], f["b"]) for f in own))
                        if key not in self.outer:
                            self.outer[key] = self.name(total(f"{self._value(f['a'], i)} * {self._value(f['b'], j)}" for f in own))
                        outer[i, j] = self.outer[key]
                    by_row = defaultdict(list)
                    for e, factor in entries:
                        by_row[e["result"]].append(coefficient(factor, outer[e["a"], e["b"]]))
                    for k, parts in by_row.items():
                        self._add(number, k, f"{self._value(w, n)} * ({total(parts)})")
            elif o.target in ("a", "b"):
                other = "b" if o.target == "a" else "a"
                for f in fills:
                    for at, value in side(other, f[other], f["result"]).items():
                        self._add(number, at, f"{self._value(f['weights'], n)} * {value}")
            else:
                parts = []
                for f in fills:
                    parts += [f"{self._value(f['a'], i)} * {u}" for i, u in side("b", f["b"], f["result"]).items()]
                self._weights(number, n, total(parts))

    @property
    def outer(self) -> dict:
        """Products of two operands' components that an earlier path made."""
        return self.__dict__.setdefault("_outer", {})
