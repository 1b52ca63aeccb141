"""Which launches make the outputs of a product.

A walk by receivers sums the result in registers and holds its cotangents there; a walk by senders holds node features and sums their
gradients, and takes cotangents as they come. A budget bounds the components of the result that are live in a launch at once: sums
of the result, and cotangents that are held. Launches of walks by senders hold neither, so no budget splits them. A product by rows takes one
launch, or the result one and gradients another where a thread has no room for both; beyond rank 4 it is divided by ranks of the result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from sexpgpu.backends.cuda.cartesian.config import Config
from sexpgpu.backends.cuda.cartesian.lanes import suits
from sexpgpu.backends.cuda.cartesian.product import Output, Product
from sexpgpu.ops.cartesian.product import Form

PAIRS = 40  # sums of the result, for two channels each, that leave room for the rest of a thread's values
WALKED, FACTORED = 32, 20  # the same of features held and their gradient's sums; and beside fragments of hidden rows
REGISTERS = 125  # values that may live through a loop, a thread, before ptxas spills (f64: half); docs/decisions/0042
ROWWISE = 140  # values that a launch of a product by rows holds a channel before it spills: 109 of rank 3 do not, 162 of rank 4 do
LARGEST = 250  # components of a product by rows in one kernel: all of rank 4, while those of rank 5 would take minutes to compile
HELD = 40  # components of cotangents that a walk by receivers holds without want of registers


@dataclass(frozen=True)
class Launch:
    """Outputs by their place in the product, made by one kernel from the paths into `ranks`, and of features of ranks `firsts` unless ()."""

    mode: str  # rows edge receiver sender
    outputs: tuple[int, ...]
    ranks: tuple[int, ...]
    firsts: tuple[int, ...] = ()

    def paths(self, form: Form) -> tuple[int, ...]:
        """The numbers of its paths."""
        return tuple(n for n, p in enumerate(form.paths) if p.result in self.ranks and (not self.firsts or p.first in self.firsts))


def groups(costs: list[int], budget: int, peak_aware: bool) -> list[tuple[int, ...]]:
    """Ranks in groups, upward: a group ends where the next rank would pass the budget. A rank is never split; one without
    cost joins the group before it."""
    if peak_aware:
        budget = max(budget, *costs)
    found: list[list[int]] = [[]]
    total = 0
    for rank, cost in enumerate(costs):
        if total and cost and total + cost > budget:
            found.append([])
            total = 0
        found[-1].append(rank)
        total += cost
    return [tuple(g) for g in found]


def rank_costs(product: Product) -> list[int]:
    """Components of each rank of the result."""
    counts = [1 if n else 0 for n in product.form.counts] if product.form.reduced else list(product.form.counts)
    return [(2 * rank + 1) * n for rank, n in enumerate(counts)]


def room(product: Product, numbers: list[int]) -> int:
    """Sums of these outputs that fit beside the operands that a launch holds: a small operand's components, a row of the others'."""
    read = {number for n in numbers for use in product.outputs[n].uses for number in use}
    held = 0
    for number in read:
        slot = product.slots[number]
        if slot in ("a", "b"):
            top = product.form.first if slot == "a" else product.form.second
            held += product.components(slot) if slot == product.narrow else 2 * top + 1
    return REGISTERS // (2 if product.dtype == "f64" else 1) - held


def held_by_rows(product: Product, numbers: Iterable[int]) -> int:
    """Values of a channel that live through a block of paths of a product by rows (`blocks.Block`): of `a` those of one rank, of `b` all, as of a
    reduced result; and the block's sums and weighted cotangents."""
    form, outputs = product.form, [product.outputs[n] for n in numbers]
    slots = [product.slots[n] for n in {n for o in outputs for use in o.uses for n in use}] + [o.target for o in outputs]
    rows: Counter[tuple[int, int]] = Counter()
    for path in form.paths:
        rows[path.first, path.second] += 2 * path.result + 1
    targets = {o.target for o in outputs}
    kinds = bool(targets & {"result", "weights"}) + bool(targets & {"a", "b"})
    held = slots.count("a") * (2 * form.first + 1) + slots.count("b") * product.components("b")
    held += slots.count("result") * product.components("result") * form.reduced + max(rows.values()) * kinds * (1 + product.second)
    return held * (2 if product.dtype == "f64" else 1)


def plan(product: Product, config: Config, walk: str | None = None) -> list[Launch]:
    """The launches in order. walk: `sender` or `receiver`, of the gradients; None chooses."""
    form = product.form
    every = tuple(range(form.top + 1))
    numbers = range(len(product.outputs))
    results = [n for n in numbers if product.outputs[n].target == "result"]
    rest = [n for n in numbers if n not in results]
    split = config.split(product.second, form.top)
    if not product.edges:
        if split == "full" and (config.dbwd_split if product.second else config.bwd_split) is not None:
            return [Launch("rows", (n,), every) for n in numbers]
        apart = bool(results and rest) and held_by_rows(product, numbers) > ROWWISE
        return [Launch("rows", tuple(part), ranks) for part in ((results, rest) if apart else (numbers,)) for ranks in groups(rank_costs(product), LARGEST, True)]
    parts = _parts(product, rest, split)
    if config.scatter == "edge":
        return [Launch("edge", tuple(p), every) for p in ([results] if results else []) + parts]
    costs = rank_costs(product)
    found = []
    given = config.dbwd_budget if product.second and split == "fused" else None
    if results:
        sums = [c * len(results) for c in costs]
        budget = config.csr_budget if given is None else given
        by_thread = suits(product)
        if not by_thread:
            budget = min(budget, max(room(product, results), max(sums)))
        for ranks in groups(sums, budget, config.peak_aware and given is None):
            parts_of = by_features(form, ranks, PAIRS // len(results)) if by_thread and not form.reduced else [()]
            found += [Launch("receiver", tuple(results), ranks, firsts) for firsts in parts_of]
    for part in parts:
        mode = walk or _walk(product, [product.outputs[n] for n in part], sum(costs))
        if mode == "sender":
            parts_of = by_sums(product, [product.outputs[n] for n in part]) if suits(product) else [()]
            found += [Launch("sender", tuple(part), every, firsts) for firsts in parts_of]
            continue
        held = len({use[-1] for n in part for use in product.outputs[n].uses})
        live = [c * held for c in costs]
        budget = config.bwd_budget if given is None else given
        found += [Launch("receiver", tuple(part), ranks) for ranks in groups(live, budget, config.peak_aware and given is None)]
    return found


def by_features(form: Form, ranks: tuple[int, ...], budget: int) -> list[tuple[int, ...]]:
    """Ranks of features in groups, whose paths into these ranks make up to `budget` components. A launch then reads each component of an
    atom's features once, where a division by ranks of the result would read most of them again."""
    costs = [sum(2 * p.result + 1 for p in form.paths if p.first == rank and p.result in ranks) for rank in range(form.first + 1)]
    return _several(groups(costs, budget, False))


def by_sums(product: Product, outputs: list[Output]) -> list[tuple[int, ...]]:
    """Ranks of features in groups, as many as a walk by senders has registers for: features that it holds and sums of their gradient, and the
    cotangents of an edge, which are loaded a step early. Every cotangent belongs to one group; what an edge has besides is read by each."""
    held = len({number for o in outputs for use in o.uses for number in use if product.slots[number] == "a"}) + sum(o.target == "a" for o in outputs)
    room = (FACTORED if any(product.inner) else WALKED) // max(1, held)
    by_held = groups([2 * rank + 1 for rank in range(product.form.first + 1)], room, False)
    by_cotangents = by_features(product.form, tuple(range(product.form.top + 1)), PAIRS)
    return max(_several(by_held), by_cotangents, key=len)


def _several(found: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    return [()] if len(found) == 1 else found


def _parts(product: Product, rest: list[int], split: str) -> list[list[int]]:
    if split == "fused" or not rest:
        return [rest] if rest else []
    if not product.second:
        return [[n] for n in rest]
    weights = [n for n in rest if product.outputs[n].target == "weights"]
    operands = [n for n in rest if n not in weights]
    return [p for p in (operands, weights) if p]


def _walk(product: Product, outputs: list[Output], held: int) -> str:
    if all(o.target != "a" for o in outputs) and held <= HELD:
        return "receiver"
    return "sender"
