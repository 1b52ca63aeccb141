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

from sexpgpu.backends.cuda.cartesian.blocks import Block, Numbered, blocks, coefficient, total
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
def generate(product: Product, mode: str, numbers: tuple[int, ...], whole: bool = False, single: bool = False) -> Kernel:
    """The kernel that makes the product's outputs from the paths of these numbers. whole: its tiles divide the channels; single: they have one row."""
    return _Writer(product, mode, numbers, whole, single).write()


class _Writer:
    def __init__(self, product: Product, mode: str, numbers: tuple[int, ...], whole: bool, single: bool):
        self.p, self.mode, self.whole = product, mode, whole
        self.exact = single and mode == "rows" and product.narrow is None  # no tile reaches beyond the rows, so that loads need no masks
        numbered = [(n, product.form.paths[n]) for n in numbers]
        self.groups: list[list[Numbered]] = [[pair] for pair in numbered] if product.narrow else blocks(numbered)
        self.paths = [pair for group in self.groups for pair in group]
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

    @property
    def turned(self) -> bool:
        """Whether a program takes tile after tile of rows: it leaves one row of the gradient by weights that all rows share."""
        return self.mode == "rows" and self.p.shared and any(o.target == "weights" for o in self.p.outputs)

    def single(self, slot: str) -> bool:
        """Whether a slot's tensors have one channel for the kernel's many."""
        return slot == self.narrow

    def write(self) -> Kernel:
        self.loads: dict[tuple[int, int], str] = {}
        self.begun: set[tuple[int, int]] = set()  # sums that have a first term
        self.stored: set[tuple[int, int]] = set()
        self._open()
        self._accumulators()
        pending = [sorted(set().union(*(self._needs(*pair) for pair in group))) for group in self.groups]
        reach = AHEAD if len(self.used) <= 4 else 1
        for at, group in enumerate(self.groups):
            for ahead in range(at, min(at + reach + 1, len(pending))):
                for key in pending[ahead]:
                    self._load(*key)
                pending[ahead] = []
            if self.narrow:
                self._narrow_path(*group[0])
            else:
                Block(self, group).write()
            self._done(at)
        self._close()
        return Kernel(self._text(), self.used, tuple(range(len(self.p.outputs))))

    def _text(self) -> str:
        operands = [f"x{n}" for n in self.used]
        outputs = [f"o{i}" for i in range(len(self.p.outputs))]
        lows = [f"LOW{i}: tl.constexpr" for i in range(len(outputs))]
        runtime = WALK if self.looped else ["senders", "receivers"] if self.p.edges else []
        sizes = ["count", "edges", "slots", *["span"] * self.turned]
        tiles = ["ROWS: tl.constexpr", "CHANNELS: tl.constexpr", "ACC: tl.constexpr"]
        arguments = ", ".join(operands + outputs + runtime + sizes + tiles + lows)
        lines = [f"@triton.jit(do_not_specialize={sizes!r})", f"def {NAME}({arguments}):"]
        lines += ["    " + line for line in self.head]
        if self.looped or self.turned:
            lines.append(f"    for at in range({'begin, end' if self.looped else 'walk * span, tl.minimum(walk * span + span, edges)'}, ROWS):")
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
            *((f"column = tl.minimum(ch, {self.c - 1})",) if self.exact and not self.whole else ()),
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
            self.body += [f"edge = ({'at' if self.turned else 'walk * ROWS'} + line).to(tl.int64)", "live = edge < edges"]
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
            step = "" if self.single(slot) else " + column" if self.exact and not self.whole else " + ch"
            if slot == "weights" and self.p.shared:
                self.put(f"p{number} = x{number}{step}", lines)
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
        if self.exact:
            return ""
        inside = "" if self.single(slot) or self.whole else "inside"
        if hoisted or (self.looped and slot != "weights" and not self.p.shared):
            return inside
        return "full" if inside else "live"

    def value(self, number: int, component: int) -> str:
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
        """The components of an output that this launch stores: those that its paths reach, and all of an operand."""
        if o.target in ("a", "b"):
            return list(range(self.p.components(o.target)))
        return sorted(self._reached(o, self.paths))

    def _reached(self, o: Output, paths: Iterable[Numbered]) -> set[int]:
        """The components of an output that paths add to."""
        found: set[int] = set()
        for n, path in paths:
            rank = {"a": path.first, "b": path.second, "result": path.result}.get(o.target, 0)
            found |= {n} if o.target == "weights" else {self.p.place(n, k) for k in range(2 * rank + 1)} if o.target == "result" else set(range(rank**2, (rank + 1) ** 2))
        return found

    def _accumulators(self) -> None:
        for number, o in enumerate(self.p.outputs):
            lines = self.head if self._grouped(o) and (self.looped or self.turned) else self.body
            if o.target == "weights" and not self._grouped(o) or self._sooner(o):
                continue
            for i in self._touched(o):
                self.put(f"s{number}_{i} = tl.zeros((ROWS, CHANNELS), ACC)", lines)

    def add(self, number: int, component: int, value: str) -> None:
        first = self._sooner(self.p.outputs[number]) and (number, component) not in self.begun
        self.begun.add((number, component))
        self.put(f"s{number}_{component} {'' if first else '+'}= {value}")

    def _sooner(self, o: Output) -> bool:
        """Whether a component of an output is stored as soon as its last path is done."""
        return (self.narrow is None or self.mode == "rows") and not self._grouped(o) and o.target != "weights" and not self.single(o.target)

    def _done(self, at: int) -> None:
        """Stores what no later block adds to."""
        later = [pair for group in self.groups[at + 1 :] for pair in group]
        for number, o in enumerate(self.p.outputs):
            if self._sooner(o):
                for i in sorted(self._reached(o, self.paths) - self._reached(o, later)):
                    if (number, i) not in self.stored:
                        self.stored.add((number, i))
                        row, mask = self._where(o)
                        self._store(number, row, i, f"s{number}_{i}", mask, self.body, self._atomic(o))

    def _where(self, o: Output) -> tuple[str, str]:
        """Row and mask of what is stored by row of edges."""
        mask = "full" if not self.exact else "" if self.whole else "inside"
        return ("edge" if self.looped else self._row(o.target)), mask

    def _atomic(self, o: Output) -> bool:
        return self.mode == "edge" and o.target in ("a", "result")

    def _close(self) -> None:
        for number, o in enumerate(self.p.outputs):
            if o.target == "weights" and not self._grouped(o):
                continue
            if self._sooner(o):
                row, mask = self._where(o)
                for i in sorted(set(self._touched(o)) - {i for at, i in self.stored if at == number}):  # no path reaches it
                    self._store(number, row, i, "tl.zeros((ROWS, CHANNELS), ACC)", mask, self.body, self._atomic(o))
                continue
            grouped, atomic = self._grouped(o), False
            lines = self.tail if grouped else self.body
            if grouped:
                row, mask = "program", "" if self.whole else "inside"
            else:
                (row, mask), atomic = self._where(o), self._atomic(o)
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
                matrices[x, k, i] = self.name(total(coefficient(value, self.value(x, j)) for j, value in by_cell[k, i]))
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
                        parts = [f"{matrix(f[x_slot], k, i)} * {self.value(f[y_slot], i)}" for f in fills if f["weights"] == w for at, i in pairs if at == k]
                        self.add(number, k, f"{self.value(w, n)} * ({total(parts)})")
                continue
            for x in xs:
                scaled = self._scaled(n, [f for f in fills if f[x_slot] == x], columns)
                for k in rows:
                    self.add(number, k, total(f"{matrix(x, k, i)} * {scaled[i]}" for at, i in pairs if at == k))
        dots: dict[int, list[str]] = defaultdict(list)
        for c, wanted in gradients.items():
            self._pulled(n, c, wanted, entries, dots)
        for number, found in dots.items():
            self.weights(number, n, total(found))

    def _scaled(self, n: int, fills: list[dict[str, int]], columns: Iterable[int]) -> dict[int, str]:
        """Σ w y[i] over fillings: the weights drawn into the operand of all channels."""
        y_slot = self.wide
        return {i: self.name(total(f"{self.value(f['weights'], n)} * {self.value(f[y_slot], i)}" for f in fills)) for i in columns}

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
            drawn = {j: self.name(total(coefficient(v, self.value(c, k)) for k, v in found)) for j, found in row.items()}
            joined: dict[int, str] = {}
            for number, f in wanted:
                target = outputs[number].target
                if target == x_slot:
                    continue
                x = f[x_slot]
                if x not in joined:
                    joined[x] = self.name(total(f"{self.value(x, j)} * {cell}" for j, cell in drawn.items()))
                if target == "weights":
                    dots[number].append(f"{self.value(f[y_slot], i)} * {joined[x]}")
                else:
                    self.add(number, i, f"{self.value(f['weights'], n)} * {joined[x]}")
            for number, fills in by_x.items():
                scaled = self._scaled(n, fills, (i,))[i]
                for j, cell in drawn.items():
                    self.add(number, j, f"{scaled} * {cell}")

    def weights(self, number: int, n: int, value: str) -> None:
        if self._grouped(self.p.outputs[number]):
            self.add(number, n, value)
        else:
            self._store(number, "edge", n, self.name(value), "full", self.body)
