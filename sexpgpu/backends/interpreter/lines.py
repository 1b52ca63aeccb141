"""The lines of a graph's program, and what each of them does with memory: one assignment a step, a `del` where a value was used
last. A step writes over an operand of its own shape that nothing reads any more, or where its result belongs. Without torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from sexpgpu.backends.interpreter.fuse import Step, Value
from sexpgpu.backends.interpreter.repeat import Repeat
from sexpgpu.backends.interpreter.steps import ordered
from sexpgpu.ir import Node

#: ops whose value may lie in their operand's memory, as it lies there: dense if the operand is
_DENSE_VIEWS = ("reshape", "squeeze", "expand-dims", "transpose", "variable", "stop-gradient")




@dataclass
class _Memory:
    """Which values share memory, and until which step each memory is read."""

    group: dict[Value, Value] = field(default_factory=dict)
    last: dict[Value, float] = field(default_factory=dict)
    dense: set[Value] = field(default_factory=set)  # values that fill their memory, so that it can be written over

    def root(self, value: Value) -> Value:
        while self.group.get(value, value) is not value:
            value = self.group[value]
        return value

    def join(self, value: Value, other: Value) -> None:
        a, b = self.root(value), self.root(other)
        if a is not b:
            self.group[a] = b
            self.last[b] = max(self.last.get(a, -1.0), self.last.get(b, -1.0))

    def read(self, value: Value, at: float) -> None:
        root = self.root(value)
        self.last[root] = max(self.last.get(root, -1.0), at)


@dataclass(frozen=True)
class Line:
    """A step as it was written. over: the operand that it writes over; home: it writes where its result belongs; dead: values that
    nothing reads after it."""

    step: Step
    source: str
    over: int | None = None
    home: bool = False
    dead: tuple[Value, ...] = ()


class Writer:
    """The lines of one program, step by step."""

    def __init__(
        self, results: Mapping[str, Node], leaves: Sequence[Node], into: Mapping[str, Node | None],
        scratch: set[Node], first: Sequence[str], fused: bool, again: Repeat | None = None,
    ):
        self.results, self.into = results, into
        graph = ordered(results, first, fused)
        self.steps, self.early = graph.steps if again is None else again(graph.steps, results.values()), graph.early
        self.constants: dict[str, Node] = {}
        self.homes = {leaf for leaf in into.values() if leaf is not None}
        self.places = {name: place for place, name in enumerate(into)}
        self.targets: dict[Value, str] = {}
        for name in into:
            self.targets.setdefault(results[name], name)
        self.needed: set[Value] = {i for step in self.steps for i in step.inputs} | set(results.values())
        self.names: dict[Value, str] = {}
        self.memory, self.text, self.done = _Memory(), ["def program(leaves, context, outs=()):"], set[str]()
        self.lines: list[Line] = []
        self.copied: list[Node] = []  # results that had to be copied before they went where they belong
        self.lies: dict[Value, Node] = {}  # value -> the leaf whose memory it has
        self._start(graph.nodes, leaves, scratch)
        _lifetimes(self.steps, results, self.memory)
        self.last = {value: at for at, step in enumerate(self.steps) for value in step.inputs}
        self.kept: set[Value] = set(results.values())

    def _start(self, order: Sequence[Node], leaves: Sequence[Node], scratch: set[Node]) -> None:
        for node in order:
            if node in self.needed and node.op in ("constant", "iota"):  # computed once, never freed
                self.names[node] = f"c{len(self.names)}"
                self.constants[self.names[node]] = node
                self.memory.read(node, inf)
        for place, leaf in enumerate(leaves):
            if leaf not in self.needed:
                continue
            self.names[leaf] = f"v{len(self.names)}"
            self.text.append(f" {self.names[leaf]} = leaves[{place}]")
            self.lies[leaf] = leaf
            self.memory.read(leaf, -1.0 if leaf in scratch else inf)
            if leaf in scratch:
                self.memory.dense.add(leaf)

    def write(self, at: int) -> None:
        """One step, and the end of what it read last."""
        step = self.steps[at]
        for output in step.outputs:
            self.names[output] = f"v{len(self.names)}"
        operands = [self.names[i] for i in step.inputs]
        output, over, home = step.outputs[0], _over(step, at, self.memory), False
        early = at < self.early  # nothing may be lost yet
        if early and over is not None and self.lies.get(step.inputs[over[0]]) in self.homes:
            over = None
        target = None if early else self.targets.get(output)
        if over is not None:
            number, source = over
            if step.inputs[number] in self.lies:
                self.lies[output] = self.lies[step.inputs[number]]
        elif target is not None and step.into and self._vacant(target, step, at):
            source = step.into.replace("{out}", f"outs[{self.places[target]}]")
            self.done.add(target)
            home = True
        else:
            source = step.source
        if not step.fresh:
            for value in step.inputs:
                if value in self.lies:
                    self.lies[output] = self.lies[value]
        if target is not None and self.into[target] is not None and self.lies.get(output) is self.into[target]:
            self.done.add(target)
        named = ", ".join(self.names[o] if o in self.needed else "_" for o in step.outputs)
        self.text.append(f" {named} = {source.format(*operands)}")
        gone = tuple(i for i in dict.fromkeys(step.inputs) if self.last[i] == at and i not in self.kept)
        dead = [name for name in (self.names[i] for i in gone) if name[0] == "v"] + ["_"] * ("_" in named.split(", "))
        if dead:
            self.text.append(f" del {', '.join(dead)}")
        self.lines.append(Line(step, source, None if over is None else over[0], home, gone))

    def _vacant(self, target: str, step: Step, at: int) -> bool:
        """Whether the memory that a result is to lie in holds nothing that is read from here on."""
        home = self.into[target]
        if home is None:  # memory of its own
            return True
        tenants = [value for value, leaf in self.lies.items() if leaf is home]
        return all(self.memory.last[self.memory.root(v)] < at for v in tenants)

    def finish(self) -> None:
        """Copies the results that do not lie where they belong."""
        left = [name for name in self.into if name not in self.done and self.results[name] is not self.into[name]]
        for name in left:
            value = self.results[name]
            if self.lies.get(value) is not None and len(left) > 1:  # its memory may be another's home
                self.text.append(f" {self.names[value]} = {self.names[value]}.clone()")
                self.copied.append(value)
                self.lies.pop(value)
        for name in left:
            self.text.append(f" outs[{self.places[name]}].copy_({self.names[self.results[name]]})")

    def give(self, names: Iterable[str]) -> str:
        return f"return ({''.join(self.names[self.results[n]] + ', ' for n in names)})"


def write(
    results: Mapping[str, Node],
    leaves: Sequence[Node],
    into: Mapping[str, Node | None] | None = None,
    scratch: Iterable[Node] = (),
    first: Sequence[str] = (),
    fused: bool = True,
    again: Repeat | None = None,
) -> Writer:
    """The whole program of a graph, written; the parameters are those of `emit.emit`."""
    into = into or {}
    writer = Writer(results, leaves, into, set(scratch), first, fused, again)
    for at in range(len(writer.steps) + 1):
        if first and at == writer.early:
            writer.text.append(f" if not context.passes({', '.join(writer.names[results[n]] for n in first)}):")
            writer.text.append(f"  {writer.give([name for name in results if name in set(first)])}")  # as `names` has them
        if at < len(writer.steps):
            writer.write(at)
    writer.finish()
    writer.text.append(" " + writer.give(name for name in results if name not in into))
    return writer


def _lifetimes(steps: Sequence[Step], results: Mapping[str, Node], memory: _Memory) -> None:
    """Joins what shares memory and notes until when each is read; results are read for ever."""
    for step in steps:
        for output in step.outputs:
            memory.last.setdefault(output, -1.0)
        if step.fresh:
            memory.dense.add(step.outputs[0])
            continue
        view = isinstance(step.outputs[0], Node) and step.outputs[0].op in _DENSE_VIEWS
        if view and step.inputs[0] in memory.dense:
            memory.dense.add(step.outputs[0])
        for value in step.inputs:  # a value of unknown make may lie in any operand's memory
            memory.join(step.outputs[0], value)
    for at, step in enumerate(steps):
        for value in step.inputs:
            memory.read(value, at)
    for node in results.values():
        memory.read(node, inf)


def _over(step: Step, at: int, memory: _Memory) -> tuple[int, str] | None:
    """(operand, source that writes over it) of one which nothing else reads at this step or later."""
    for number, source in step.over.items():
        value = step.inputs[number]
        root = memory.root(value)
        others = [i for n, i in enumerate(step.inputs) if n != number and i is not value]
        if value in memory.dense and memory.last[root] == at and all(memory.root(i) is not root for i in others):
            return number, source
    return None
