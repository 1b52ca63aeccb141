"""A convolution as the text of one Triton kernel that is written thread by thread: tensors have one element a thread.

A warp walks the edges of one node. Its lanes stand in groups: `lanes` neighbouring lanes hold the channels of one edge, two each, and the
groups take edges of their own, so that sums over channels cross few lanes. The coupling matrix of an edge, M[k, i] = Σ_j K[i, j, k] b[j],
is made once for both channels of a thread. Groups are added at the end of a node, always in the same order.

Weights that are a product, hidden [edges inner] times a matrix [inner paths·channels], never reach memory: matrix instructions give each
thread the weights of its two channels on two edges, a path at a time, in three products of bf16 halves whose sum is within 2^-16.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from fractions import Fraction
from functools import cache
from itertools import zip_longest
from math import isqrt
from typing import NamedTuple

from sexpgpu.backends.cuda.cartesian.blocks import coefficient, total
from sexpgpu.backends.cuda.cartesian.product import Output, Product
from sexpgpu.backends.cuda.cartesian.source import AT_NODE, NAME, WALK, Kernel
from sexpgpu.ops.cartesian.algebra import Path, terms

IMPORT = "from sexpgpu.backends.cuda.cartesian.warp import at_lane, both, both_bf16, from_lane, high, high_bf16, joined, low, low_bf16, mma, of_lane, quad, with_lane\n\n"
DEEP = 16  # rows of a matrix instruction's inner dimension


class Lanes(NamedTuple):
    """`lanes` of a warp hold the channels of an edge, `wide` each; a thread takes `deep` edges at once; so many `warps`, and at most
    `registers` a thread unless 0. `early`: what an edge brings is loaded a step before it is worked on."""

    lanes: int
    wide: int
    deep: int
    warps: int
    registers: int = 0
    early: int = 0  # 1 or 0

    @property
    def channels(self) -> int:
        """Channels of a program."""
        return self.lanes * self.wide * self.warps


def suits(product: Product) -> bool:
    """Whether a product can be written so: a convolution with one channel of attributes, an even number of channels, f32 or bf16."""
    return (product.edges and product.narrow == "b" and not product.shared and product.form.channels % 2 == 0
            and product.dtype in ("f32", "bf16"))


def pieces(dtype: str) -> int:
    """bf16 numbers that stand for one of a factor."""
    return 1 if dtype == "bf16" else 2


def _masked(conditions: list[str]) -> str:
    """The mask of a load."""
    return f", mask={' & '.join(conditions)}, other=0" if conditions else ""


@cache
def generate(product: Product, mode: str, numbers: tuple[int, ...], shape: Lanes, onto: bool = False) -> Kernel:
    """The kernel that makes the product's outputs from the paths of these numbers. `onto`: of a part of the edges, whose sums at a node are added to
    those of the parts before where its state is 2, stored where it is 1, and left where it is 0."""
    return _Writer(product, mode, numbers, shape, onto).write()


class _Writer:
    def __init__(self, product: Product, mode: str, numbers: tuple[int, ...], shape: Lanes, onto: bool = False):
        self.p, self.mode, self.shape, self.onto = product, mode, shape, onto
        self.paths = [(n, product.form.paths[n]) for n in numbers]
        if mode == "receiver":  # one rank of features after another, so that few of their components live at once
            self.paths.sort(key=lambda found: found[1])
        self.head: list[str] = []
        self.body: list[str] = []
        self.tail: list[str] = []
        self.count = 0
        self.c = product.form.channels
        self.whole = self.c % shape.channels == 0
        self.used = tuple(sorted({number for o in product.outputs for use in o.uses for number in use}))
        self.edges = range(shape.deep)
        self.wide = range(shape.wide)
        self.values: dict[tuple[int, int, int], list[str]] = {}  # (operand, component, edge) -> names by channel
        self.opened: set[str] = set()  # sums by edge that have begun
        self.low = product.dtype == "bf16"

    def put(self, text: str, lines: list[str] | None = None) -> None:
        (self.body if lines is None else lines).append(text)

    def name(self, expression: str, lines: list[str] | None = None) -> str:
        self.count += 1
        self.put(f"t{self.count} = {expression}", lines)
        return f"t{self.count}"

    # --- the frame ---

    def write(self) -> Kernel:
        self._open()
        self._sums()
        units = [(n, path, e) for n, path in self.paths for e in self.edges]
        needs = [sorted(self._needs(n, path)) for n, path, _ in units]
        reach = self.shape.deep if len(self.used) > 4 else 2
        for at, (n, path, e) in enumerate(units):
            for ahead in range(at, min(at + reach + 1, len(units))):
                for number, component in needs[ahead]:
                    self._load(number, component, units[ahead][2])
            self._on_edge(n, path, e)
        self._close()
        return Kernel(self._text(), self.used, tuple(range(len(self.p.outputs))))

    def _text(self) -> str:
        operands = [a for n in self.used for a in ((f"h{n}", f"m{n}") if self.p.factored(n) else (f"x{n}",))]
        outputs = [f"o{i}" for i in range(len(self.p.outputs))]
        lows = [f"LOW{i}: tl.constexpr" for i in range(len(outputs))]
        sizes = ["count", "edges", "slots"]
        arguments = ", ".join([*operands, *outputs, *WALK, *["states"] * self.onto, *sizes, *lows])
        lines = [f"@triton.jit(do_not_specialize={sizes!r})", f"def {NAME}({arguments}):"]
        lines += ["    " + line for line in self.head]
        lines.append(f"    for at in range(begin, end, {self._stride}):")
        lines += ["        " + line for line in self.body]
        lines += ["    " + line for line in self.tail]
        return IMPORT + "\n".join(lines) + "\n"

    @property
    def _groups(self) -> int:
        return 32 // self.shape.lanes

    @property
    def _stride(self) -> int:
        """Edges of a step."""
        return self._groups * self.shape.deep

    def _open(self) -> None:
        s, other = self.shape, "receiver" if self.mode == "sender" else "sender"
        self.head += [
            "walk = tl.program_id(0)",
            "slot = tl.program_id(2)",
            f"thread = tl.arange(0, {32 * s.warps})",
            "lane = thread % 32",
            f"strand = lane % {s.lanes}",
            f"line = lane // {s.lanes}",
            *self._uneven(),
            f"warp = tl.program_id(1) * {s.warps} + thread // 32",
            f"ch = warp * {s.lanes * s.wide} + strand * {s.wide}",
            *(() if self.whole else (f"inside = ch < {self.c}",)),
            "begin = tl.load(begins + walk)",
            "end = tl.load(ends + walk)",
            *(("state = tl.load(states + walk) + 0 * line", "used = (line == 0) & (state > 0)", "more = (line == 0) & (state > 1)") if self.onto else
              ("used = (line == 0) & ((walk + 0 * line < count) | (begin + 0 * line < end))",)),
            "span = (end - begin + slots - 1) // slots",
            "begin += slot * span",
            "end = tl.minimum(begin + span, end)",
            f"{self.mode}_0 = tl.load(nodes + walk).to(tl.int64)",
        ]
        for e in self.edges:
            for step in range(s.early + 1):
                self.head += [
                    f"place = tl.minimum(begin + line + {e * self._groups + step * self._stride}, end - 1)",
                    f"next_edge_{e}_{step} = tl.load(order + place, mask=place >= begin, other=0)",
                    f"next_other_{e}_{step} = tl.load(others + place, mask=place >= begin, other=0)",
                ]
        for e in self.edges:
            self.body += [
                self._alive(f"live_{e}", f"at + line + {e * self._groups}"),
                f"edge_{e} = next_edge_{e}_0.to(tl.int64)",
                f"{other}_{e} = next_other_{e}_0.to(tl.int64)",
            ]
        for e in self.edges:
            for what in ("edge", "other") if s.early else ():
                self.body.append(f"next_{what}_{e}_0 = next_{what}_{e}_1")
            self.body += [
                f"place = tl.minimum(at + line + {(1 + s.early) * self._stride + e * self._groups}, end - 1)",
                f"next_edge_{e}_{s.early} = tl.load(order + place)",
                f"next_other_{e}_{s.early} = tl.load(others + place)",
            ]
        for e in self.edges:
            self.body.append(f"full_{e} = live_{e}" if self.whole else f"full_{e} = live_{e} & inside")
        for number in self.used:
            self._base(number)
        if s.early:
            for e in self.edges:
                self._ahead(e)

    # --- groups of lanes ---

    @property
    def _even(self) -> bool:
        """Whether groups fill a warp, which powers of two do: others leave lanes at the end without an edge."""
        return 32 % self.shape.lanes == 0

    def _uneven(self) -> list[str]:
        """Where groups do not fill a warp: which lanes have an edge, the first lane of a thread's group, and whom it exchanges sums with."""
        if self._even:
            return []
        lanes, power = self.shape.lanes, self._power
        return [f"member = lane < {self._groups * lanes}", "first = lane - strand",
                f"beyond = (first + (strand + {power}) % {lanes}) & 31", *(f"apart_{n} = (first + (strand ^ {n})) & 31" for n in self._strides(1, power))]

    @property
    def _power(self) -> int:
        """The greatest power of two up to the lanes of a group."""
        return 1 << (self.shape.lanes.bit_length() - 1)

    def _alive(self, name: str, place: str) -> str:
        """Whether a thread has an edge there."""
        return f"{name} = {place} < end" if self._even else f"{name} = ({place} < end) & member"

    def _of_strand(self, value: str, number: int) -> str:
        """The value of this thread among those of an edge."""
        return f"of_lane({value}, {number}, {self.shape.lanes})" if self._even else f"at_lane({value}, (first + {number}) & 31)"

    def _apart(self, value: str, apart: int) -> str:
        """The value of the thread of the same edge whose number differs by the bits of `apart`."""
        return f"from_lane({value}, {apart})" if self._even else f"at_lane({value}, apart_{apart})"

    def _over_groups(self, value: str) -> str:
        """A sum over the groups of a warp, for those of the first."""
        if not self._even:
            return total([value, *(f"at_lane({value}, (lane + {n * self.shape.lanes}) & 31)" for n in range(1, self._groups))])
        for apart in self._strides(self.shape.lanes, 32):
            value = f"with_lane({value}, {apart})"
        return value

    # --- loads a step ahead ---

    def _ahead(self, e: int) -> None:
        """What the next edge brings is loaded before this one is worked on, so that no warp waits for memory within a step. A row of attributes is
        loaded once by the lanes of an edge, side by side, and each takes its components from them."""
        s, first, taken = self.shape, len(self.body), []
        wanted = sorted({need for n, path in self.paths for need in self._needs(n, path)})
        for lines, step, at in ((self.head, 0, "begin"), (self.body, self._stride, "at")):
            some = ["coming"] if lines is self.head else []  # a graph may have no edge to read
            self.put(self._alive("coming", f"{at} + line + {step + e * self._groups}"), lines)
            self.put(f"coming_edge = next_edge_{e}_0.to(tl.int64)", lines)
            self.put(f"coming_other = next_other_{e}_0.to(tl.int64)", lines)
            for number in self.used:
                slot = self.p.slots[number]
                if self._hoisted(slot) or self.p.factored(number):
                    continue
                size = self.p.components(slot) * self.p.channels(slot)
                row = f"x{number} + {'coming_edge' if slot in ('b', 'weights') else 'coming_other'} * {size}"
                if slot == "b":
                    for k in range(0, size, s.lanes):
                        word = f"tl.load({row} + strand + {k}{_masked(some + [f'(strand < {size - k})'] * (k + s.lanes > size))})"
                        self.put(f"r{number}_{k}_{e} = {f'from_bf16({word})' if self.low else word}", lines)
                    continue
                self.put(f"q{number} = ({row} + ch).to(tl.pointer_type({self._word(True)}))", lines)
                for component in (i for of, i in wanted if of == number):
                    self.put(f"r{number}_{component}_{e} = tl.load(q{number} + {component * (self.p.channels(slot) // s.wide)}{self._options(slot, ['coming'] if slot == 'weights' else some)})", lines)
        for number in self.used:
            slot = self.p.slots[number]
            if self._hoisted(slot) or self.p.factored(number):
                continue
            for component in (i for of, i in wanted if of == number):
                tag = f"x{number}_{component}_{e}"
                if slot == "b":
                    k = component // s.lanes * s.lanes
                    taken.append(f"{tag} = {self._of_strand(f'r{number}_{k}_{e}', component - k)}")
                    self.values[number, component, e] = [tag] * s.wide
                else:
                    taken.append(f"{tag} = r{number}_{component}_{e}")
                    self.values[number, component, e] = self._halves(tag, taken)
        self.body[first:first] = taken

    def _options(self, slot: str, live: list[str]) -> str:
        """How a thread loads a word of a row: weights past a node's last edge are 0, and nobody reads them again."""
        conditions = live + ["inside"] * (slot != "b" and not self.whole)
        return _masked(conditions) + (', eviction_policy="evict_first"' if slot == "weights" else "")

    def _halves(self, word: str, lines: list[str]) -> list[str]:
        """The names of a thread's channels in a word."""
        if self.shape.wide == 1:
            return [word]
        ends = ("low_bf16", "high_bf16") if self.low else ("low", "high")
        if self.shape.wide == 4:
            lines += [f"{word}_l = {word}.to(tl.int32)", f"{word}_h = ({word} >> 32).to(tl.int32)"]
            names = [f"{word}_{v}" for v in self.wide]
            lines += [f"{name} = {ends[v % 2]}({word}_{'lh'[v // 2]})" for v, name in enumerate(names)]
            return names
        names = [f"{word}_{v}" for v in self.wide]
        lines += [f"{name} = {end}({word})" for name, end in zip(names, ends, strict=True)]
        return names

    def _word(self, wide: bool) -> str:
        """The type that a thread's channels travel as."""
        size = (2 if self.low else 4) * (self.shape.wide if wide else 1)
        return {2: "tl.bfloat16", 4: "tl.int32" if wide and self.low else "tl.float32", 8: "tl.int64"}[size]

    @property
    def _pairs(self) -> list[tuple[int, ...]]:
        """A thread's channels as they travel in f32: two a word."""
        return [tuple(self.wide)[v : v + 2] for v in range(0, self.shape.wide, 2)]

    def _hoisted(self, slot: str) -> bool:
        return AT_NODE[self.mode] == slot

    def _row(self, slot: str, e: int) -> str:
        if self._hoisted(slot):
            e = 0
        return {"a": f"sender_{e}", "result": f"receiver_{e}"}.get(slot, f"edge_{e}")

    def _base(self, number: int) -> None:
        """Pointers to the rows of an operand."""
        slot, inner = self.p.slots[number], self.p.factored(number)
        if inner:
            self._factors(number, inner)
            return
        wide = slot != "b"
        size = self.p.components(slot) * self.p.channels(slot)
        step = " + ch" if wide else ""
        for e in self.edges if not self._hoisted(slot) else range(1):
            text = f"(x{number} + {self._row(slot, e)} * {size}{step}).to(tl.pointer_type({self._word(wide)}))"
            self.put(f"p{number}_{e} = {text}", self.head if self._hoisted(slot) else self.body)

    # --- weights as a product ---

    def _factors(self, number: int, inner: int) -> None:
        """The fragments of the hidden rows, and where those of the matrix begin. Edges past the end take the row of zeros behind the last."""
        steps, words = -(-inner // DEEP), 2 * pieces(self.p.dtype)
        assert (self.shape.lanes, self.shape.wide, self.shape.deep) == (4, 2, 2)
        self.put(f"m{number}_0 = m{number} + (warp * {len(self.p.form.paths) * steps} * 32 + lane) * {words}", self.head)
        for e in self.edges:
            self.put(f"h{number}_{e} = h{number} + tl.where(live_{e}, edge_{e}, edges) * {steps * words * 4} + strand")
        for s in range(steps):
            for piece in range(words // 2):
                for half in range(2):
                    for e in self.edges:
                        self.put(f"f{number}_{s}_{piece}_{2 * half + e} = tl.load(h{number}_{e} + {((s * words // 2 + piece) * 2 + half) * 4})")

    def _drawn(self, number: int, path: int) -> None:
        """The weights of a path: products of the high halves, and beside them those of one high and one low half."""
        steps, words = -(-self.p.factored(number) // DEEP), 2 * pieces(self.p.dtype)
        tag = f"w{number}_{path}"
        self.put(f"zero = tl.zeros(({32 * self.shape.warps},), tl.float32)")
        for part in range(words // 2):
            for i in range(4):
                self.put(f"{tag}_{part}_{i} = zero")
        for s in range(steps):
            place = f"m{number}_0 + {(path * steps + s) * 32 * words}"
            matrix = [f"b{i}" for i in range(words)]
            if words == 4:
                self.put(f"{', '.join(matrix)} = quad({place})")
            else:
                self.put(f"pair = tl.load(({place}).to(tl.pointer_type(tl.int64)))")
                self.put("b0 = pair.to(tl.int32)")
                self.put("b1 = (pair >> 32).to(tl.int32)")
            for part, left, right in ((0, 0, 0), (1, 1, 0), (1, 0, 1))[: 3 if words == 4 else 1]:
                sums = ", ".join(f"{tag}_{part}_{i}" for i in range(4))
                rows = ", ".join(f"f{number}_{s}_{left}_{i}" for i in range(4))
                self.put(f"{sums} = mma({rows}, b{2 * right}, b{2 * right + 1}, {sums})")
        if words == 4:
            for i in range(4):
                self.put(f"{tag}_0_{i} += {tag}_1_{i}")
        for e in self.edges:
            self.values[number, path, e] = [f"{tag}_0_{2 * e + v}" for v in self.wide]

    # --- loads ---

    def _needs(self, n: int, path: Path) -> set[tuple[int, int]]:
        """(operand, component) that a path reads."""
        rows = {"a": range(path.first**2, (path.first + 1) ** 2), "b": range(path.second**2, (path.second + 1) ** 2), "weights": (n,),
                "result": [self.p.place(n, k) for k in range(2 * path.result + 1)]}
        return {(number, i) for o in self.p.outputs for use in o.uses for number in use for i in rows[self.p.slots[number]]}

    def _load(self, number: int, component: int, e: int) -> None:
        if (number, component, e) in self.values:
            return
        slot = self.p.slots[number]
        if slot == "weights" and self.p.factored(number):
            self._drawn(number, component)
            return
        hoisted, wide = self._hoisted(slot), slot != "b"
        if hoisted and e:
            self._load(number, component, 0)
            self.values[number, component, e] = self.values[number, component, 0]
            return
        lines = self.head if hoisted else self.body
        step = component * (self.p.channels(slot) // self.shape.wide if wide else 1)
        word, tag = f"tl.load(p{number}_{e} + {step}{self._options(slot, [f'live_{e}'] * (slot == 'weights'))})", f"x{number}_{component}_{e}"
        if not wide or self.shape.wide == 1:
            self.put(f"{tag} = {f'from_bf16({word})' if self.low else word}", lines)
            self.values[number, component, e] = [tag] * self.shape.wide
            return
        self.put(f"{tag} = {word}", lines)
        self.values[number, component, e] = self._halves(tag, lines)

    def _value(self, number: int, component: int, e: int, v: int = 0) -> str:
        self._load(number, component, e)
        return self.values[number, component, e][v]

    # --- sums and stores ---

    def _grouped(self, o: Output) -> bool:
        return AT_NODE[self.mode] == o.target

    def _touched(self, o: Output) -> list[int]:
        if o.target == "a":
            every = len(self.paths) == len(self.p.form.paths)
            return [i for i in range(self.p.components("a")) if every or isqrt(i) in {path.first for _, path in self.paths}]
        return sorted({self.p.place(n, k) for n, path in self.paths for k in range(2 * path.result + 1)})

    def _sum_names(self, number: int, component: int) -> list[list[str]]:
        """[edge][channel] names of a sum: over the edges of a node there is one for all, over the channels of an edge too."""
        o = self.p.outputs[number]
        return [[f"s{number}_{component}" + ("" if self._grouped(o) else f"_e{e}") + ("" if o.target == "b" else f"_v{v}") for v in self.wide] for e in self.edges]

    def _sums(self) -> None:
        for number, o in enumerate(self.p.outputs):
            if o.target in ("b", "weights"):
                continue
            for i in self._touched(o):
                for name in dict.fromkeys(n for row in self._sum_names(number, i) for n in row):
                    self.put(f"{name} = tl.zeros(({32 * self.shape.warps},), tl.float32)", self.head if self._grouped(o) else self.body)

    def _add(self, number: int, component: int, e: int, v: int, value: str) -> None:
        name = self._sum_names(number, component)[e][v]
        fresh = self.p.outputs[number].target == "b" and name not in self.opened
        self.opened.add(name)
        self.put(f"{name} {'=' if fresh else '+='} {value}")

    def _at(self, number: int, row: str, component: int) -> str:
        """Where a thread's channels of an output lie."""
        return f"o{number} + {row} * {self.p.components(self.p.outputs[number].target) * self.c} + {component * self.c} + ch"

    def _added(self, number: int, row: str, component: int, values: list[str]) -> list[str]:
        """Sums with those that an earlier part of the edges left in f32."""
        mask, word = "more" if self.whole else "more & inside", "tl.int64" if self.shape.wide > 1 else "tl.float32"
        found = []
        for pair in self._pairs:
            before = self.name(f"tl.load(({self._at(number, row, component)}{f' + {pair[0]}' if pair[0] else ''}).to(tl.pointer_type({word})), mask={mask}, other=0)", self.tail)
            parts = [before] if len(pair) == 1 else [f"low({before})", f"high({before})"]
            found += [self.name(f"{values[v]} + {part}", self.tail) for v, part in zip(pair, parts, strict=True)]
        return found

    def _store(self, number: int, row: str, component: int, values: list[str], mask: str, lines: list[str]) -> None:
        """A thread's channels of a component, side by side."""
        place = self._at(number, row, component)
        mask = f", mask={mask}" if mask else ""
        word = "tl.int64" if self.shape.wide > 1 else "tl.float32"
        wide = []
        for pair in self._pairs:
            value = values[0] if len(pair) == 1 else f"both({', '.join(values[v] for v in pair)})"
            wide.append(f"tl.store(({place}{f' + {pair[0]}' if pair[0] else ''}).to(tl.pointer_type({word})), {value}{mask})")
        if not self.low:
            self._puts(wide, lines)
            return
        halves = [f"both_bf16({', '.join(values[v] for v in pair)})" for pair in self._pairs] if self.shape.wide > 1 else [f"to_bf16({values[0]})"]
        narrow = halves[0] if len(halves) == 1 else f"joined({', '.join(halves)})"
        self.put(f"if LOW{number}:", lines)
        self.put(f"    tl.store(({place}).to(tl.pointer_type({self._word(True)})), {narrow}{mask})", lines)
        self.put("else:", lines)
        self._puts([f"    {text}" for text in wide], lines)

    def _puts(self, texts: list[str], lines: list[str]) -> None:
        for text in texts:
            self.put(text, lines)

    def _close(self) -> None:
        for number, o in enumerate(self.p.outputs):
            if o.target == "weights":
                continue
            if o.target == "b":
                for e in self.edges:
                    self._row_of_sums(number, e)
            elif self._grouped(o):
                mask = "used" if self.whole else "used & inside"
                for i in self._touched(o):
                    names = self._sum_names(number, i)[0]
                    for name in names:
                        self.put(f"{name} = {self._over_groups(name)}", self.tail)
                    row = "(slot.to(tl.int64) * tl.num_programs(0) + walk)"
                    self._store(number, row, i, self._added(number, row, i, names) if self.onto else names, mask, self.tail)
            else:
                for i in self._touched(o):
                    for e, names in enumerate(self._sum_names(number, i)):
                        self._store(number, f"edge_{e}", i, names, f"full_{e}", self.body)

    @staticmethod
    def _strides(first: int, end: int) -> list[int]:
        found = []
        while first < end:
            found.append(first)
            first *= 2
        return found

    def _row_of_sums(self, number: int, e: int) -> None:
        """The sums over channels of an edge's attributes: lanes exchange halves of the row until each has a part of it summed."""
        size = self.p.components("b")
        held = [f"s{number}_{i}_e{e}" for i in range(size)]
        for name in held:
            if name not in self.opened:  # no path reads its rank
                self.put(f"{name} = tl.zeros(({32 * self.shape.warps},), tl.float32)")
        if self._power < self.shape.lanes:  # those beyond a power of two hand over what they have
            held = [self.name(f"{name} + tl.where(strand < {self.shape.lanes - self._power}, at_lane({name}, beyond), 0.0)") for name in held]
        start = "0"
        room = ""
        for apart in self._strides(1, self._power):
            half = -(-len(held) // 2)
            upper = f"(({'lane' if self._even else 'strand'} & {apart}) != 0)"
            merged = []
            for a, b in zip_longest(held[:half], held[half:]):
                if b is None:
                    merged.append(self.name(f"with_lane({a}, {apart})" if self._even else f"{a} + {self._apart(a, apart)}"))
                    continue
                kept = self.name(f"tl.where({upper}, {b}, {a})")
                sent = self.name(f"tl.where({upper}, {a}, {b})")
                merged.append(self.name(f"{kept} + {self._apart(sent, apart)}"))
            start += f" + tl.where({upper}, {half}, 0)"
            room = f"tl.where({upper}, {len(held) - half}, {half})" if not room else f"tl.where({upper}, {room} - {half}, tl.minimum({room}, {half}))"
            held = merged
        if room:
            self.put(f"room = {room}")
        self.put(f"row{number} = o{number} + (warp.to(tl.int64) * edges + edge_{e}) * {size} + {start}")
        for i, name in enumerate(held):
            mask = f"live_{e}" + (f" & (room > {i})" if room else "") + (f" & (strand < {self._power})" if self._power < self.shape.lanes else "")
            if self.low:
                self.put(f"if LOW{number}:")
                self.put(f"    tl.store(row{number} + {i}, to_bf16({name}), mask={mask})")
                self.put("else:")
                self.put(f"    tl.store(row{number} + {i}, {name}, mask={mask})")
            else:
                self.put(f"tl.store(row{number} + {i}, {name}, mask={mask})")

    # --- the arithmetic of a path ---

    def _on_edge(self, n: int, path: Path, e: int) -> None:
        entries = [(path.first**2 + t.i, path.second**2 + t.j, self.p.place(n, t.k), t.coefficient) for t in terms(path)]
        cells: dict[tuple[int, int], list[tuple[int, Fraction]]] = defaultdict(list)
        for i, j, k, value in entries:
            cells[k, i].append((j, value))
        pairs, rows, columns = sorted(cells), sorted({k for k, _ in cells}), sorted({i for _, i in cells})
        matrices: dict[tuple[int, int, int], str] = {}

        def matrix(x: int, k: int, i: int) -> str:
            """M[k, i], made where it is first used."""
            if (x, k, i) not in matrices:
                parts = total(coefficient(value, self._value(x, j, e)) for j, value in cells[k, i])
                matrices[x, k, i] = self.name(parts) if " " in parts or "-" in parts else parts
            return matrices[x, k, i]

        gradients: dict[int, list[tuple[int, dict[str, int]]]] = defaultdict(list)  # cotangent -> (output, filling)
        for number, o in enumerate(self.p.outputs):
            fills = [o.filled(use) for use in o.uses]
            if o.target != "result":
                for f in fills:
                    gradients[f["result"]].append((number, f))
                continue
            xs, ws = (list(dict.fromkeys(f[s] for f in fills)) for s in ("b", "weights"))
            if len(fills) * len(pairs) + len(ws) * len(rows) <= len(xs) * len(pairs) + len(fills) * len(columns):
                for w in ws:
                    for k in rows:
                        own = [(f, i) for f in fills if f["weights"] == w for at, i in pairs if at == k]
                        made = [matrix(f["b"], k, i) for f, i in own]
                        for v in self.wide:
                            parts = total(f"{m} * {self._value(f['a'], i, e, v)}" for m, (f, i) in zip(made, own, strict=True))
                            self._add(number, k, e, v, f"{self._value(w, n, e, v)} * ({parts})")
                continue
            for x in xs:
                scaled = [self._scaled(n, [f for f in fills if f["b"] == x], columns, e, v) for v in self.wide]
                for k in rows:
                    cells_of = [(matrix(x, k, i), i) for at, i in pairs if at == k]
                    for v in self.wide:
                        self._add(number, k, e, v, total(f"{m} * {scaled[v][i]}" for m, i in cells_of))
        dots: dict[tuple[int, int], list[str]] = defaultdict(list)
        for c, wanted in gradients.items():
            self._pulled(n, c, wanted, entries, e, dots)
        for number in dict.fromkeys(number for number, _ in dots):
            values = [self.name(total(dots[number, v])) for v in self.wide]
            self._store(number, f"edge_{e}", n, values, f"full_{e}", self.body)

    def _scaled(self, n: int, fills: list[dict[str, int]], columns: Iterable[int], e: int, v: int) -> dict[int, str]:
        """Σ w a[i] over fillings."""
        return {i: self.name(total(f"{self._value(f['weights'], n, e, v)} * {self._value(f['a'], i, e, v)}" for f in fills)) for i in columns}

    def _pulled(self, n: int, c: int, wanted: list[tuple[int, dict[str, int]]], entries: list[tuple[int, int, int, Fraction]], e: int,
                dots: dict[tuple[int, int], list[str]]) -> None:
        """Gradients over cotangent c by way of N[i, j] = Σ_k K[i, j, k] c[k], a row of i at a time: by b it is summed with w a[i], and
        Σ_j b[j] N[i, j] serves the gradients by a and by the weights, whose parts go to `dots`."""
        by_cell: dict[int, dict[int, list[tuple[int, Fraction]]]] = defaultdict(lambda: defaultdict(list))
        for i, j, k, value in entries:
            by_cell[i][j].append((k, value))
        outputs = self.p.outputs
        by_b: dict[int, list[dict[str, int]]] = defaultdict(list)
        for number, f in wanted:
            if outputs[number].target == "b":
                by_b[number].append(f)
        for i, row in sorted(by_cell.items()):
            for v in self.wide:
                drawn = {j: self.name(total(coefficient(value, self._value(c, k, e, v)) for k, value in found)) for j, found in row.items()}
                made: dict[int, str] = {}
                for number, f in wanted:
                    target = outputs[number].target
                    if target == "b":
                        continue
                    x = f["b"]
                    if x not in made:
                        made[x] = self.name(total(f"{self._value(x, j, e)} * {cell}" for j, cell in drawn.items()))
                    if target == "weights":
                        dots[number, v].append(f"{self._value(f['a'], i, e, v)} * {made[x]}")
                    else:
                        self._add(number, i, e, v, f"{self._value(f['weights'], n, e, v)} * {made[x]}")
                for number, fills in by_b.items():
                    scaled = self._scaled(n, fills, (i,), e, v)[i]
                    for j, cell in drawn.items():
                        self._add(number, j, e, v, f"{scaled} * {cell}")
