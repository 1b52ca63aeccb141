"""What a program became on a device, as rows and text: its launches with shapes, bytes and operations, why each value is kept in
memory, the plan, and the kernels' sources. Needs no GPU: a program on torch's `meta` device has all of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sexpgpu.backends.cuda import choice, library
from sexpgpu.backends.cuda.emit import kernel_name
from sexpgpu.backends.cuda.executable import Compiled
from sexpgpu.backends.cuda.memory import size
from sexpgpu.backends.cuda.program import CudaProgram
from sexpgpu.backends.ranks import Assumed
from sexpgpu.diagnostics import printable
from sexpgpu.ir import Node, Origins
from sexpgpu.ops import table
from sexpgpu.passes.schedule.fuse import Call, Kernel, Launch, original
from sexpgpu.passes.schedule.views import PLAIN, data


@dataclass(frozen=True)
class Row:
    """A launch. `kind`: kernel or library; `path`: of the layer whose value it computes; bytes: read and written once each;
    `fused`: values that are computed inside and never stored; `kept`: why what it stores is in memory."""

    number: int
    kind: str
    name: str
    path: str
    phase: str
    shape: str
    grid: str
    bytes: int
    flops: int
    fused: int
    kept: tuple[str, ...]


def lowered(staged: Any, ranks: int = 1) -> CudaProgram:
    """The program without a device: everything but its tensors' memory; of several ranks the first one's."""
    return CudaProgram(staged, 1, device="meta", team=Assumed(ranks) if ranks > 1 else None)


def rows(compiled: Compiled, origins: Origins) -> list[Row]:
    """Every launch in its order."""
    readers: dict[Node, list[int]] = {}
    for i, launch in enumerate(compiled.schedule.launches):
        for base in launch.reads:
            readers.setdefault(base, []).append(i)
    names: dict[Node, list[str]] = {}
    for name, node in compiled.results.items():
        names.setdefault(node, []).append(name)
    shared: set[Any] = set()
    return [_row(i, launch, compiled, origins, readers, names, _again(launch, shared)) for i, launch in enumerate(compiled.schedule.launches)]


def _again(launch: Launch, seen: set[Any]) -> bool:
    """Whether it is a further output of a call before it, whose operands are read once for all of them."""
    if not isinstance(launch, Call) or "of" not in launch.node.attrs:
        return False
    node = launch.node
    key = node.op, node.inputs, tuple((k, v) for k, v in sorted(node.attrs.items()) if k != "of")
    known = key in seen
    seen.add(key)
    return known


def _row(i: int, launch: Launch, compiled: Compiled, origins: Origins, readers: dict[Node, list[int]], names: dict[Node, list[str]], again: bool) -> Row:
    stored = launch.stores
    moved = sum(n.type.bytes for n in stored) + (0 if again else sum(n.type.bytes for n in launch.reads))
    kept = tuple(_why(node, i, compiled, readers, names) for node in stored)
    last = launch.node if isinstance(launch, Call) else launch.units[-1]
    origin = origins.of(last)
    path = origin.paths[0] if origin.paths else ""
    if isinstance(launch, Call):
        moved += sum(2 * 4 * count * elements for node in stored for count, elements in library.partials(node))
        flops = table()[last.op].cost(last)[0]
        return Row(i, "library", last.op, path, origin.phase, str(last.type), "", moved, flops, 0, kept)
    inside = list(_inside(launch))
    flops = sum(table()[n.op].cost(n)[0] for n in inside)
    emitted = compiled.emitted.get(launch)
    grid = "x".join(map(str, emitted.grid)) if emitted is not None else "0"
    moved += sum(2 * programs * elements * 4 for programs, elements in emitted.partials.values() if programs > 1) if emitted is not None else 0
    return Row(i, "kernel", kernel_name(launch, origins), path, origin.phase, f"[{launch.rows} {launch.columns}]", grid, moved, flops, len(inside) - len(stored), kept)


def _inside(launch: Kernel) -> Iterator[Node]:
    """Values that the kernel computes, each once; views and what it reads are none."""
    seen: set[Node] = set()
    stack = list(launch.units)
    outside = set(launch.reads)
    while stack:
        node = stack.pop()
        if node in seen or node in outside or not node.inputs and node.op not in ("iota",):
            continue
        seen.add(node)
        stack += data(node)
        if node.op not in PLAIN:
            yield node


def _why(node: Node, i: int, compiled: Compiled, readers: dict[Node, list[int]], names: dict[Node, list[str]]) -> str:
    """What keeps a value in memory."""
    reasons = [f"is the result {name}" for name in names.get(node, ())[:2]]
    for number in readers.get(node, ()):
        other = compiled.schedule.launches[number]
        if isinstance(other, Call):
            reasons.append(f"{other.node.op} of launch {number} reads it")
        elif number != i:
            own = compiled.schedule.launches[i]
            spaces = isinstance(own, Kernel) and (own.rows, own.columns) == (other.rows, other.columns)
            cause = "at other elements, or after other launches" if spaces else f"over [{other.rows} {other.columns}]"
            reasons.append(f"launch {number} reads it {cause}")
    more = f" and {len(reasons) - 3} more" if len(reasons) > 3 else ""
    return f"{node.op} {node.type}: {'; '.join(reasons[:3])}{more}"


def graphs(program: CudaProgram, logged: bool = False) -> list[tuple[str, Compiled]]:
    """The graphs of a step: their names and launches."""
    forward, update = program._graphs(logged)
    return [("micro-batch" if program.config.accumulate > 1 else "forward and backward", forward), ("update", update)]


def table_lines(found: list[Row]) -> list[str]:
    """Rows for people; every text of a user's is escaped."""
    cells = [("", "launch", "over", "programs", "moved", "operations", "inside", "path")]
    cells += [
        (str(r.number), r.name if r.kind == "kernel" else f"library {r.name}", r.shape, r.grid, size(r.bytes), f"{r.flops:,}", str(r.fused), printable(r.path))
        for r in found
    ]
    widths = [max(len(c[i]) for c in cells) for i in range(len(cells[0]))]
    return ["  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells]


def program_lines(program: CudaProgram) -> list[str]:
    """`SEXPGPU_EXPLAIN=kernels`: every launch of the step's graphs, and the plan."""
    out: list[str] = []
    for name, compiled in graphs(program):
        found = rows(compiled, program.traced.origins)
        kernels = {e.source for e in compiled.emitted.values()}
        libraries = sum(r.kind == "library" for r in found)
        out += [f"{name}: {len(found)} launches, {len(kernels)} kernels to compile, {libraries} library calls, {size(sum(r.bytes for r in found))} moved"]
        head, *lines = table_lines(found)
        out.append(head)
        for line, row in zip(lines, found, strict=True):
            out += [line, *(f"        {printable(text)}" for text in row.kept)]
        out += product_lines(compiled, program.traced.origins)
    return out + program.plan.lines() + choice.lines()


def documents(program: CudaProgram) -> list[dict[str, Any]]:
    """The launches for `--json`: by graph, each row's fields."""
    return [{"graph": name, "launches": [vars(row) | {"kept": list(row.kept)} for row in rows(compiled, program.traced.origins)]}
            for name, compiled in graphs(program)]  # fmt: skip


def product_lines(compiled: Compiled, origins: Origins) -> list[str]:
    """What was decided of products that something follows, equal decisions of equal layers once."""
    groups: dict[tuple[str, bool, str, str], int] = {}
    for decision in compiled.decisions:
        paths = origins.of(decision.node).paths
        key = decision.kind, decision.taken, decision.why, re.sub(r"/\d+(?=/|$)", "", paths[0]) if paths else ""
        groups[key] = groups.get(key, 0) + 1
    return [f"  {kind}{' of ' + printable(path) if path else ''}, {count} times: {why if taken else 'apart: ' + why}" for (kind, taken, why, path), count in groups.items()]


# --- stages of `explain --after` ---


def fused_text(program: CudaProgram) -> str:
    """Launches, and below each why its values are kept."""
    out: list[str] = []
    for name, compiled in graphs(program):
        found = rows(compiled, program.traced.origins)
        out.append(f"{name}: {len(found)} launches")
        for line, row in zip(table_lines(found)[1:], found, strict=True):
            out += [line, *(f"        {printable(text)}" for text in row.kept)]
        out += product_lines(compiled, program.traced.origins) + again_lines(compiled, program.traced.origins)
    return "\n".join(out)


def again_lines(compiled: Compiled, origins: Origins) -> list[str]:
    """What is computed again for the backward pass instead of kept, what that saves and costs, and what is kept though it could be;
    equal layers share a line. Then the launches that `:remat` runs again."""
    found, out = compiled.recomputed, []
    groups: dict[str, list[tuple[int, float]]] = {}
    for choice_ in found.choices:
        groups.setdefault(_named(choice_.node, origins), []).append((choice_.saved, choice_.seconds))
    for what, members in groups.items():
        saved, seconds = (sum(m[i] for m in members) for i in (0, 1))
        out.append(f"  computed again, not kept: {len(members)} x {what}: {size(int(saved))} less at the peak for about {seconds * 1e6:,.0f} µs a step")
    chosen = {choice_.node for choice_ in found.choices}
    refused: dict[tuple[str, str], int] = {}
    for node, why in found.refused.items():
        if node not in chosen:
            refused[_named(node, origins), why] = refused.get((_named(node, origins), why), 0) + 1
    out += [f"  kept: {count} x {what}: {why}" for (what, why), count in refused.items()]
    second = sum(any(original(node) is not node for node in launch.stores) for launch in compiled.schedule.launches)
    return out + ([f"  :remat runs {second} launches again, in the order of the backward pass"] if second else [])


def _named(node: Node, origins: Origins) -> str:
    paths = origins.of(node).paths
    return f"{node.op} {node.type}" + (f" in {printable(re.sub(r'/[0-9]+(?=/|$)', '', paths[0]))}" if paths else "")


def plan_text(program: CudaProgram) -> str:
    """The memory plan, and where each value lies in the arena from which launch to which."""
    out = program.plan.lines()
    for name, compiled in graphs(program):
        out += again_lines(compiled, program.traced.origins)
        out.append(f"{name}: arena of {size(compiled.plan.size)}, of which at most {size(compiled.plan.peak)} are in use at once")
        lives = compiled._lives()
        for key, start in sorted(compiled.plan.offsets.items(), key=lambda item: (item[1], lives[item[0]].first)):
            life = lives[key]
            node = key if isinstance(key, Node) else key[1]  # type: ignore[index]
            again, node = original(node) is not node, original(node)
            what = f"{node.op} {node.type}" if isinstance(key, Node) else f"{'logits of' if key[0] == 'scratch' and node.op.startswith('linear-cross') else 'partial sums of'} {node.op} {node.type}"  # type: ignore[index]
            what += ", made again" if again else ""
            paths = program.traced.origins.of(node).paths
            out.append(f"  {start:>14,} … {start + life.size:>14,}  launches {life.first} … {life.last}  {what}{'  ' + printable(paths[0]) if paths else ''}")
    return "\n".join(out + exchange_lines(program))


def exchange_lines(program: CudaProgram) -> list[str]:
    """Of several ranks: the sums of gradients, and the launch after which each begins; what is later than the last launch is summed or
    copied at the end."""
    if program.exchange is None:
        return []
    forward, _ = program._graphs(False)
    last, found = len(forward.schedule.launches) - 1, program.exchange.buckets
    lines = [program.exchange.arena.lines[b.line] for b in found]
    total = sum((b.stop - b.start) * line.vector.element_size() for b, line in zip(found, lines, strict=True))
    out = [f"sums over {program.team.ranks} ranks: {len(found)} of gradients, {size(total)}"]
    for bucket, line in zip(found, lines, strict=True):
        when = f"after launch {bucket.ready} of 0 … {last}" if bucket.ready <= last else "at the end"
        where = "" if bucket.owner is None else f", to rank {bucket.owner}"
        names = ", ".join(bucket.names[:3]) + (f" and {len(bucket.names) - 3} more" if len(bucket.names) > 3 else "")
        out.append(f"  {size((bucket.stop - bucket.start) * line.vector.element_size()):>12}  {when}{where}  {printable(names)}")
    return out


def triton_text(program: CudaProgram) -> str:
    """The source of every kernel, once, below the launches that run it."""
    out: list[str] = []
    for name, compiled in graphs(program):
        users: dict[str, list[int]] = {}
        for i, launch in enumerate(compiled.schedule.launches):
            if launch in compiled.emitted:  # type: ignore[comparison-overlap]
                users.setdefault(compiled.emitted[launch].source, []).append(i)
        by_source = {e.source: (launch, e) for launch, e in compiled.emitted.items()}
        out.append(f"# {name}: {len(users)} kernels")
        for source, numbers in users.items():
            launch, emitted = by_source[source]
            out += ["", f"# launches {', '.join(map(str, numbers))}: {emitted.grid[0]}x{emitted.grid[1]} programs of {emitted.warps} warps"]
            out += [f"# p{i}: {_argument(what)}" for i, what in enumerate(emitted.arguments)]
            out.append(source.rstrip("\n"))
    return "\n".join(out)


def _argument(what: tuple[Any, ...]) -> str:
    if what[0] in ("read", "store", "partial", "parts"):
        node = what[1]
        return f"{what[0]} {node.op} {node.type}" + (f" {printable(str(node.attrs.get('path', node.attrs.get('name', ''))))}".rstrip())
    return "the step" if what[0] == "draw" else "key of a draw and its first element"


__all__ = ["Row", "fused_text", "lowered", "plan_text", "program_lines", "rows", "triton_text"]
