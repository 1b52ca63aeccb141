"""The product of irreducible Cartesian tensors, by rows or as a convolution over the edges of a graph.

Over operands a (node features), b (edge attributes), w (weights) and a cotangent c of the result, all of the product's
derivatives come from one scalar that is linear in each of the four,

    Φ(a, b, w, c) = Σ_rows Σ_paths Σ_channels  w[path] Σ_terms K[i, j, k] a[i] b[j] c[path, k]

The product is ∂Φ/∂c; `tensor-product-grad` is ∂Φ by one of the others, so that differentiating either, any number of times,
gives these two ops again. In a convolution a lies at the senders and c at the receivers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from sexpgpu.ir import Node, TensorType
from sexpgpu.ops.cartesian.algebra import Path, allowed, paths, rank_of, terms, width
from sexpgpu.ops.definition import Lowering, Op, OpProblem, Parameter, build
from sexpgpu.ops.helpers import Attrs, Types, is_int, require_float, require_indices, same_dtype, traffic

Canonical = tuple[tuple[Node, ...], Attrs]
RULE = "a product of ranks l1 and l2 has the ranks |l1-l2| … l1+l2 for which l1+l2+l3 is even"
SLOTS = ("a", "b", "weights", "result")
TOGETHER = 1 << 26  # bytes of the paths that the reference holds at once


@dataclass(frozen=True)
class Form:
    """Φ for given operands: ranks, channels and paths. Rows of a path-resolved result go by output rank, component, path."""

    first: int  # highest rank of a
    second: int  # highest rank of b
    channels_a: int
    channels_b: int
    paths: tuple[Path, ...]
    reduced: bool

    @property
    def channels(self) -> int:
        return max(self.channels_a, self.channels_b)

    @cached_property
    def top(self) -> int:
        """The highest rank of the result."""
        return max(p.result for p in self.paths)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Paths of each result rank."""
        return tuple(sum(p.result == rank for p in self.paths) for rank in range(self.top + 1))

    @property
    def resolved(self) -> int:
        """Components of a result that keeps its paths."""
        return sum((2 * rank + 1) * n for rank, n in enumerate(self.counts))

    @cached_property
    def rows(self) -> tuple[tuple[int, int], ...]:
        """(path number, component) of each row of a path-resolved result."""
        numbers = [[n for n, p in enumerate(self.paths) if p.result == rank] for rank in range(self.top + 1)]
        return tuple((n, k) for rank, own in enumerate(numbers) for k in range(2 * rank + 1) for n in own)

    def result_shape(self, count: int) -> tuple[int, ...]:
        if self.reduced:
            return (count, width(self.top), self.channels)
        return (count, self.resolved * self.channels)


def _features(what: str, t: TensorType) -> tuple[int, int]:
    """(highest rank, channels) of [rows (l+1)² channels], or of [rows (l+1)²] with one channel."""
    rank = rank_of(t.shape[1]) if t.rank in (2, 3) else None
    if rank is None:
        words = f"{what} needs the shape [rows (l+1)² channels], or [rows (l+1)²] for one channel, got {t}"
        raise OpProblem("E-SHAPE-030", f"tensor-product: {words}", help="(l+1)² is 1, 4, 9, 16 … for ranks up to 0, 1, 2, 3 …")
    return rank, t.shape[2] if t.rank == 3 else 1


def _chosen(given: Any, first: int, second: int, top: int, symmetric: bool) -> tuple[Path, ...]:
    """The paths that are asked for, each checked by the rule."""
    every = paths(first, second, top, symmetric)
    if given is None:
        return every
    found = []
    for triple in given:
        if not isinstance(triple, tuple) or len(triple) != 3 or not all(is_int(n) and n >= 0 for n in triple):
            raise OpProblem("E-SHAPE-031", f"tensor-product: a path is [l1 l2 l3], got {_words(triple)}")
        path = Path(*triple)
        if not allowed(path):
            odd = sum(path) % 2
            why = (f"{path.first}+{path.second}+{path.result} is odd: parity (-1)^{path.result} is not the product of "
                   f"(-1)^{path.first} and (-1)^{path.second}" if odd else "its ranks make no triangle")
            raise OpProblem("E-SHAPE-031", f"tensor-product: there is no path {_words(path)}: {why}", help=RULE)
        if path not in every:
            why = "a symmetric product keeps the paths with l1 >= l2" if symmetric and path.first < path.second else (
                f"the operands have ranks up to {first} and {second}, and :l-max is {top}")
            raise OpProblem("E-SHAPE-031", f"tensor-product: the path {_words(path)} is outside: {why}")
        if path in found:
            raise OpProblem("E-SHAPE-031", f"tensor-product: the path {_words(path)} is given twice")
        found.append(path)
    if not found:
        raise OpProblem("E-SHAPE-031", "tensor-product: :paths names no path", help=RULE)
    missing = set(range(max(p.result for p in found))) - {p.result for p in found}
    if missing:
        raise OpProblem("E-SHAPE-031", f"tensor-product: no path of :paths gives rank {min(missing)}",
                        help="a result has every rank up to its highest: add a path for it, or lower the highest")
    return tuple(p for p in every if p in found)


def _words(triple: Any) -> str:
    return f"[{' '.join(map(str, triple))}]" if isinstance(triple, tuple) else str(triple)


def _canonical(inputs: tuple[Node, ...], attrs: Attrs) -> Canonical:
    a, b = inputs[0], inputs[1]
    first, second = _features("the first operand", a.type)[0], _features("the second operand", b.type)[0]
    top, symmetric = attrs["l-max"], bool(attrs["symmetric"])
    top = max(first, second) if top is None else top
    if not is_int(top) or top < 0:
        raise OpProblem("E-SHAPE-015", f"tensor-product: :l-max must be an integer of 0 or more, got {top}")
    if top > first + second:
        words = f"tensor-product: no path makes rank {top} of ranks up to {first} and {second}"
        raise OpProblem("E-SHAPE-031", words, help=RULE)
    if symmetric and a is not b:
        raise OpProblem("E-SHAPE-032", "tensor-product: :symmetric true needs the same tensor twice",
                        help="a symmetric product is (tensor-product x x weights :symmetric true)")
    chosen = _chosen(attrs["paths"], first, second, top, symmetric)
    return inputs, {"l-max": max(p.result for p in chosen), "paths": tuple(tuple(p) for p in chosen),
                    "reduce-paths": bool(attrs["reduce-paths"]), "symmetric": symmetric}


def form_of(a: TensorType, b: TensorType, attrs: Attrs) -> Form:
    """The form of operands of these types, or E-SHAPE-033 for channels that do not pair."""
    return _form(a, b, attrs["paths"], attrs["reduce-paths"])


@lru_cache(maxsize=1024)
def _form(a: TensorType, b: TensorType, chosen: tuple[tuple[int, int, int], ...], reduced: bool) -> Form:
    (first, left), (second, right) = _features("the first operand", a), _features("the second operand", b)
    if left != right and 1 not in (left, right):
        raise OpProblem("E-SHAPE-033", f"tensor-product: {left} channels do not pair with {right}", ((0, 2), (1, 2)),
                        "channels are equal, or one operand has a single one")
    return Form(first, second, left, right, tuple(Path(*p) for p in chosen), reduced)


def _check_rows(form: Form, a: TensorType, b: TensorType, w: TensorType, edges: Types) -> None:
    """Every tensor has the rows that the others ask for."""
    need = len(form.paths) * form.channels
    if w.rank not in (1, 2) or w.shape[-1] != need:
        words = f"weights need [rows {need}] or, shared by all rows, [{need}]: {len(form.paths)} paths of {form.channels} channels"
        raise OpProblem("E-SHAPE-034", f"tensor-product: {words}; got {w}", ((2, w.rank - 1),) if w.rank else ())
    if len(edges) == 1 or len(edges) > 2:
        raise OpProblem("E-SHAPE-035", f"tensor-product: takes senders and receivers together, got {len(edges)} tensors of indices",
                        help="(tensor-product x attributes weights senders receivers), or by rows without either")
    rows, what = (a.shape[0], "rows of the first operand")
    if edges:
        for t in edges:
            require_indices("tensor-product", t)
            if t.rank != 1:
                raise OpProblem("E-SHAPE-035", f"tensor-product: indices need one axis, got {t}")
        if edges[0].shape != edges[1].shape:
            words = f"senders and receivers differ: {edges[0].shape[0]} and {edges[1].shape[0]} edges"
            raise OpProblem("E-SHAPE-035", f"tensor-product: {words}", ((3, 0), (4, 0)))
        rows, what = edges[0].shape[0], "edges"
    for number, t, name in ((1, b, "the second operand"), (2, w, "weights")):
        if (t is not w or w.rank == 2) and t.shape[0] != rows:
            words = f"tensor-product: {name} has {t.shape[0]} rows, and there are {rows} {what}"
            raise OpProblem("E-SHAPE-035", words, ((number, 0), (3 if edges else 0, 0)))


def _infer(types: Types, attrs: Attrs) -> TensorType:
    if len(types) < 3:
        raise OpProblem("E-SHAPE-014", f"tensor-product: needs two operands and weights, got {len(types)} tensors")
    a, b, w, *edges = types
    require_float("tensor-product", a, b, w)
    dtype = same_dtype("tensor-product", (a, b, w))
    form = form_of(a, b, attrs)
    _check_rows(form, a, b, w, tuple(edges))
    return TensorType(dtype, form.result_shape(a.shape[0]), a.batch or (b.batch and not edges))


def _infer_grad(types: Types, attrs: Attrs) -> TensorType:
    return TensorType(types[0].dtype, attrs["shape"], attrs["batch"])


def _slots(node: Node) -> tuple[dict[str, Node], tuple[Node, ...]]:
    """What fills each slot of Φ but the node's own, and the indices."""
    own = "result" if node.op == "tensor-product" else node.attrs["target"]
    names = [s for s in SLOTS if s != own]
    return dict(zip(names, node.inputs[:3], strict=True)), node.inputs[3:]


def _vjp(node: Node, ct: Node) -> tuple[Node | None, ...]:
    """∂Φ by each filled slot, with ct in the node's own."""
    filled, edges = _slots(node)
    own = "result" if node.op == "tensor-product" else node.attrs["target"]
    out: list[Node | None] = []
    for target, x in filled.items():
        others = {**filled, own: ct}
        inputs = [others[s] for s in SLOTS if s != target]
        keep = {k: node.attrs[k] for k in ("l-max", "paths", "reduce-paths")}
        if target == "result":
            out.append(build("tensor-product", *inputs, *edges, symmetric=False, **keep))
        else:
            shape = {"target": target, "shape": x.type.shape, "batch": x.type.batch}
            out.append(build("tensor-product-grad", *inputs, *edges, **keep, **shape))
    return (*out, *(None for _ in edges))


# --- the reference: dense small matrices and batched products, in any float dtype ---


class _Tables:
    """The tensors of one form: coupling matrices, and the order of rows inside the reference.

    Internally the rows of a path-resolved result go by rank of a, then rank of the result, component, path, so that each
    of those blocks is contiguous; `outward` maps them to the rows of the definition.
    """

    def __init__(self, torch: Any, form: Form, dtype: Any):
        self.form = form
        groups = [[(n, p) for n, p in enumerate(form.paths) if p.first == rank] for rank in range(form.first + 1)]
        rows: list[tuple[int, int]] = []
        self.order: list[int] = []  # path number by place in weights as used here
        self.blocks: list[tuple[int, int, int, int, int]] = []  # first row, components, first weight, paths, of each block
        self.groups: list[tuple[int, int, int, int]] = []  # first row, last row, first component of a, last
        for rank, own in enumerate(groups):
            start = len(rows)
            for result in range(form.top + 1):
                numbers = [n for n, p in own if p.result == result]
                if numbers:
                    self.blocks.append((len(rows), 2 * result + 1, len(self.order), len(numbers), rank))
                    self.order += numbers
                    rows += [(n, k) for k in range(2 * result + 1) for n in numbers]
            self.groups.append((start, len(rows), rank * rank, (rank + 1) ** 2))
        place = {row: i for i, row in enumerate(rows)}
        self.size = len(rows)
        self.outward = torch.tensor([place[row] for row in form.rows])
        self.inward = torch.argsort(self.outward)
        self.weight_order = torch.tensor(self.order)
        self.weight_back = torch.argsort(self.weight_order)
        if form.reduced:  # which result component a row adds to
            self.sums = torch.zeros(width(form.top), self.size, dtype=dtype)
            for i, (n, k) in enumerate(rows):
                self.sums[form.paths[n].result ** 2 + k, i] = 1
        self.narrow = []  # per rank of a: [components of b, rows · components of a]
        for start, stop, low, high in self.groups:
            coupling = torch.zeros(width(form.second), stop - start, high - low, dtype=torch.float64)
            for row in range(start, stop):
                n, k = rows[row]
                for t in terms(form.paths[n]):
                    if t.k == k:
                        coupling[form.paths[n].second ** 2 + t.j, row - start, t.i] = float(t.coefficient)
            self.narrow.append(coupling.reshape(width(form.second), -1).to(dtype))
        self.wide = []  # per ranks of a and b: rows, and [rows, components of a · components of b]
        for rank in range(form.first + 1):
            for other in range(form.second + 1):
                having = [i for i, (n, _) in enumerate(rows) if form.paths[n].first == rank and form.paths[n].second == other]
                if having:
                    matrix = torch.zeros(len(having), 2 * rank + 1, 2 * other + 1, dtype=torch.float64)
                    for at, row in enumerate(having):
                        n, k = rows[row]
                        for t in terms(form.paths[n]):
                            if t.k == k:
                                matrix[at, t.i, t.j] = float(t.coefficient)
                    self.wide.append((rank, other, torch.tensor(having), matrix.reshape(len(having), -1).to(dtype)))

    def inner(self, torch: Any, c: Any) -> Any:
        """A cotangent of the result [n …] as rows [n size F]."""
        if self.form.reduced:
            return torch.matmul(self.sums.t(), c)
        return c.reshape(len(c), self.size, self.form.channels).index_select(1, self.inward)

    def outer(self, torch: Any, rows: Any) -> Any:
        """Rows [n size F] as a result."""
        if self.form.reduced:
            return torch.matmul(self.sums, rows)
        return rows.index_select(1, self.outward).reshape(len(rows), self.size * self.form.channels)

    def weighted(self, torch: Any, rows: Any, w: Any) -> Any:
        """rows [e size F] times the weight of each row's path; w [e or 1, paths, F], ordered. A new tensor."""
        out = torch.empty(rows.shape, dtype=rows.dtype)
        for row, parts, weight, count, _ in self.blocks:
            shape = (len(rows), parts, count, rows.shape[2])
            torch.mul(rows[:, row : row + parts * count].reshape(shape), w[:, weight : weight + count].unsqueeze(1),
                      out=out[:, row : row + parts * count].view(shape))
        return out

    def by_path(self, torch: Any, rows: Any) -> Any:
        """Rows [e size F] summed over the components of each path: [e paths F], ordered."""
        sums = [rows[:, row : row + parts * count].reshape(len(rows), parts, count, rows.shape[2]).sum(1)
                for row, parts, _, count, _ in self.blocks]
        return torch.cat(sums, 1)


@lru_cache(maxsize=256)
def _tables(torch: Any, form: Form, dtype: Any, device: Any) -> _Tables:
    """The tables of a form on a device."""
    with torch.device(device):
        return _Tables(torch, form, dtype)


class _Narrow:
    """b has one channel: its coupling matrix is made once a row and applied to all channels."""

    def __init__(self, torch: Any, tables: _Tables, b: Any):
        self.torch, self.tables, flat = torch, tables, b.squeeze(2)
        self.matrices = [torch.matmul(flat, k).reshape(len(b), stop - start, high - low)
                         for k, (start, stop, low, high) in zip(tables.narrow, tables.groups, strict=True)]

    def result(self, a: Any) -> Any:
        torch = self.torch
        parts = [torch.bmm(m, a[:, low:high]) for m, (_, _, low, high) in zip(self.matrices, self.tables.groups, strict=True)]
        return torch.cat(parts, 1)

    def first(self, rows: Any) -> Any:
        torch = self.torch
        parts = [torch.bmm(m.transpose(1, 2), rows[:, start:stop])
                 for m, (start, stop, _, _) in zip(self.matrices, self.tables.groups, strict=True)]
        return torch.cat(parts, 1)


def _narrow_second(torch: Any, tables: _Tables, a: Any, rows: Any) -> Any:
    total: Any = None
    for k, (start, stop, low, high) in zip(tables.narrow, tables.groups, strict=True):
        outer = torch.bmm(rows[:, start:stop], a[:, low:high].transpose(1, 2)).reshape(len(a), (stop - start) * (high - low))
        part = torch.matmul(outer, k.t())
        total = part if total is None else total + part
    return total.unsqueeze(2)


class _Wide:
    """Both operands have all channels."""

    def __init__(self, torch: Any, tables: _Tables):
        self.torch, self.tables = torch, tables

    def result(self, a: Any, b: Any) -> Any:
        torch, out = self.torch, self.torch.empty(len(a), self.tables.size, a.shape[2], dtype=a.dtype)
        for first, second, rows, matrix in self.tables.wide:
            x, y = a[:, first**2 : (first + 1) ** 2], b[:, second**2 : (second + 1) ** 2]
            outer = (x.unsqueeze(2) * y.unsqueeze(1)).reshape(len(a), matrix.shape[1], a.shape[2])
            out.index_copy_(1, rows, torch.matmul(matrix, outer))
        return out

    def operand(self, other: Any, rows: Any, first: bool) -> Any:
        """The gradient by a (first) or b, from the other operand and the weighted rows."""
        torch, form = self.torch, self.tables.form
        out = torch.zeros(len(rows), width(form.first if first else form.second), rows.shape[2], dtype=rows.dtype)
        for one, two, own, matrix in self.tables.wide:
            pulled = torch.matmul(matrix.t(), rows.index_select(1, own))
            pulled = pulled.reshape(len(rows), 2 * one + 1, 2 * two + 1, rows.shape[2])
            if first:
                out[:, one**2 : (one + 1) ** 2] += (pulled * other[:, two**2 : (two + 1) ** 2].unsqueeze(1)).sum(2)
            else:
                out[:, two**2 : (two + 1) ** 2] += (pulled * other[:, one**2 : (one + 1) ** 2].unsqueeze(2)).sum(1)
        return out


def _swapped(form: Form) -> Form:
    return Form(form.second, form.first, form.channels_b, form.channels_a,
                tuple(Path(p.second, p.first, p.result) for p in form.paths), form.reduced)


def _derivative(torch: Any, tables: _Tables, target: str, a: Any, b: Any, w: Any, rows: Any) -> Any:
    """∂Φ by one slot over rows that are already gathered: a [e I Ca], b [e J Cb], w [e or 1, paths, F], rows [e size F].

    Gives [e size F] for the result, [e I F], [e J F] (one channel where b is narrow), or [e paths F].
    """
    narrow = tables.form.channels_b == 1
    if target in ("result", "weights"):
        product = _Narrow(torch, tables, b).result(a) if narrow else _Wide(torch, tables).result(a, b)
        if target == "result":
            return tables.weighted(torch, product, w)
        return tables.by_path(torch, product * rows)
    pulled = tables.weighted(torch, rows, w)
    if target == "a":
        return _Narrow(torch, tables, b).first(pulled) if narrow else _Wide(torch, tables).operand(b, pulled, True)
    return _narrow_second(torch, tables, a, pulled) if narrow else _Wide(torch, tables).operand(a, pulled, False)


def _reference(torch: Any, node: Node, args: list[Any]) -> Any:
    """Φ's derivative by the node's slot. Sums are in the operands' dtype, those of bf16 and f16 in f32, rounded once.

    A convolution adds in the order of the edges, so the result does not depend on threads. Edges, or rows, are taken as many at once as
    `TOGETHER` has room for: all paths of all edges at once would be gigabytes.
    """
    target = "result" if node.op == "tensor-product" else node.attrs["target"]
    dtype = torch.float32 if node.type.dtype in ("bf16", "f16") else args[0].dtype
    filled, edges = _slots(node)
    types = {slot: x.type for slot, x in filled.items()} | {target: node.type}
    slots = {slot: value.to(dtype) for slot, value in zip(filled, args[:3], strict=True)}
    form, indices = form_of(types["a"], types["b"], node.attrs), args[3:] if edges else None
    count = types["a"].shape[0]
    swap = form.channels_a == 1 and form.channels_b > 1  # the narrow operand stands second
    tables = _tables(torch, _swapped(form) if swap else form, dtype, args[0].device)
    channels = {"a": form.channels_a, "b": form.channels_b}
    a, b = (None if s == target else slots[s].reshape(*types[s].shape[:2], channels[s]) for s in ("a", "b"))
    w = None if target == "weights" else slots["weights"].reshape(
        types["weights"].shape[0] if types["weights"].rank == 2 else 1, len(form.paths), form.channels)
    rows = None if target == "result" else tables.inner(torch, slots["result"])
    inner = {"a": "b", "b": "a"}.get(target, target) if swap else target
    size = len(indices[0]) if indices is not None else count
    step = max(1, TOGETHER // max(1, tables.size * form.channels * dtype.itemsize))
    ends = dict(zip(("senders", "receivers"), indices or (), strict=False))
    shared = types["weights"].rank == 1
    parts = []
    total: Any = None  # of what is added over parts: [nodes …], or the weights that all rows share
    for start in range(0, max(1, size), step):
        stop = min(size, start + step)
        one = {name: index[start:stop] for name, index in ends.items()}
        x, y = None if a is None else a.index_select(0, one["senders"]) if ends else a[start:stop], None if b is None else b[start:stop]
        c = None if rows is None else rows.index_select(0, one["receivers"]) if ends else rows[start:stop]
        own = None if w is None else (w if shared else w[start:stop]).index_select(1, tables.weight_order)
        out = _derivative(torch, tables, inner, *((y, x) if swap else (x, y)), own, c)
        if target == "weights":
            out = out.index_select(1, tables.weight_back)
        elif target != "result" and (types[target].rank == 2 or types[target].shape[2] == 1):
            out = out.sum(2, keepdim=True)
        if target == "weights" and shared:
            total = out.sum(0) if total is None else total + out.sum(0)
        elif ends and target in ("a", "result"):
            total = torch.zeros(count, *out.shape[1:], dtype=out.dtype) if total is None else total
            total.index_add_(0, one["senders" if target == "a" else "receivers"], out)
        else:
            parts.append(out)
    whole = total if total is not None else parts[0] if len(parts) == 1 else torch.cat(parts, 0)
    if target == "result":
        return tables.outer(torch, whole).to(_dtype(torch, node))
    return whole.reshape(node.type.shape).to(_dtype(torch, node))


def _dtype(torch: Any, node: Node) -> Any:
    return {"bf16": torch.bfloat16, "f16": torch.float16, "f64": torch.float64}.get(node.type.dtype, torch.float32)


def _cost(node: Node) -> tuple[int, int]:
    filled, edges = _slots(node)
    types = {slot: x.type for slot, x in filled.items()}
    types["result" if node.op == "tensor-product" else node.attrs["target"]] = node.type
    form = form_of(types["a"], types["b"], node.attrs)
    each = sum(3 * len(terms(p)) + 2 * p.result + 1 for p in form.paths)
    return each * form.channels * types["b"].shape[0], traffic(node)


_SHARED = (
    Parameter("l-max", "int", None),
    Parameter("paths", "triples", None),
    Parameter("reduce-paths", "bool", False),
)

OPS = (
    Op(
        "tensor-product",
        "The equivariant product of features a [rows (l1+1)² channels] and b [rows (l2+1)² channels] into ranks up to :l-max "
        "(the higher of l1 and l2 unless given), with a weight for every path and channel: weights [rows paths·channels], or [paths·channels] "
        "shared by all rows. Channels pair one to one, or one operand has a single channel ([rows (l+1)²] will do). With "
        "senders and receivers it is a convolution: b and weights have a row an edge, a is taken at the senders, and the "
        "products are summed at the receivers, in any order of edges; a has the rows of the result. The result keeps its paths, "
        "[rows Σ(2l+1)·paths·channels] for equivariant-linear, or sums them by :reduce-paths true, [rows (l-max+1)² channels]. "
        ":symmetric true of (x, x) leaves out the swapped paths. :paths [[l1 l2 l3] …] chooses among them. " + RULE[0].upper() + RULE[1:] + ".",
        ("a", "b", "weights", "edges*"),
        _infer,
        _reference,
        _cost,
        Lowering("template", "tensor-product"),
        vjp=_vjp,
        attributes=(*_SHARED, Parameter("symmetric", "bool", False)),
        example="(tensor-product x attributes weights senders receivers :l-max 2)",
        canonical=lambda inputs, attrs: _checked(inputs, attrs),
    ),
    Op(
        "tensor-product-grad",
        "The gradient of a tensor-product by one of its slots, of the three others: a, b, weights, and a cotangent of the result.",
        ("x", "y", "z", "edges*"),
        _infer_grad,
        _reference,
        _cost,
        Lowering("template", "tensor-product"),
        vjp=_vjp,
        attributes=(*_SHARED, Parameter("target", "string", None), Parameter("shape", "shape", None), Parameter("batch", "bool", False)),
        lisp=False,
    ),
)


def _checked(inputs: tuple[Node, ...], attrs: Attrs) -> Canonical:
    """The number of tensors first: everything else reads the first two."""
    if len(inputs) < 3:
        raise OpProblem("E-SHAPE-014", f"tensor-product: needs two operands and weights, got {len(inputs)} tensors")
    return _canonical(inputs, attrs)
