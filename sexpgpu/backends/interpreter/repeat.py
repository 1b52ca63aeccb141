"""Steps of layers that run again (`passes/remat.py`) in a program of the interpreter: the same calls of torch, once more. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from sexpgpu.backends.interpreter.fuse import Step, Value
from sexpgpu.backends.interpreter.shapes import bytes_of
from sexpgpu.ir import Node, Origins
from sexpgpu.passes.remat import Calls, Item, second, turns
from sexpgpu.passes.schedule.memory import in_turn

#: the steps of a program in their order, and its results -> what it runs
Repeat = Callable[[Sequence[Step], Iterable[Node]], list[Step]]


def repeating(paths: Sequence[str], origins: Origins) -> Repeat | None:
    """What runs the calls of layers at `paths` again; None where there are none."""
    if not paths:
        return None
    calls = Calls(paths, origins)

    def again(steps: Sequence[Step], results: Iterable[Node]) -> list[Step]:
        kept = set(results)
        steps = _in_turn(steps, kept)
        items = [_item(step, calls) for step in steps]
        return [_renamed(steps[turn.number], turn.again) for turn in turns(items, kept, second)]

    return again


def _item(step: Step, calls: Calls) -> Item:
    call, backward = calls.of(o if isinstance(o, Node) else o[1] for o in step.outputs)  # type: ignore[index]
    return Item(step.inputs, step.outputs, call, backward, fixed=step.needs[:1] == ("mask",))  # a mask is drawn once


def _renamed(step: Step, again: Mapping[Value, Value]) -> Step:
    if not again:
        return step
    return replace(step, inputs=tuple(again.get(v, v) for v in step.inputs), outputs=tuple(again.get(v, v) for v in step.outputs))


def _in_turn(steps: Sequence[Step], results: set[Node]) -> list[Step]:
    """The steps so that what is large goes soon: a weight's gradient follows what it is made of, and a view comes before its first reader."""
    maker = {o: step for step in steps for o in step.outputs}
    home: dict[Value, Value] = {}  # value -> the one in whose memory it lies
    views: set[Value] = set()
    for step in steps:
        for output in step.outputs:
            view = not step.fresh and len(step.inputs) == len(step.outputs) == 1
            home[output] = home.get(step.inputs[0], step.inputs[0]) if view else output
            views.update((output,) if view else ())
    work = [step for step in steps if step.outputs[0] not in views]
    number = {o: i for i, step in enumerate(work) for o in step.outputs}
    held = {home.get(r, r) for r in results}
    reads = [list(dict.fromkeys(home.get(v, v) for v in step.inputs)) for step in work]
    needs = [{number[v] for v in values if v in number} for values in reads]
    goes = [[v for v in values if v in number and v not in held] for values in reads]
    order = in_turn(needs, goes, [[o for o in step.outputs if o not in held] for step in work], bytes_of, range(len(work)))
    out: list[Step] = []
    done: set[Value] = set()

    def put(values: Iterable[Value]) -> None:
        """The views that these are, each after what it views."""
        stack = [v for v in values if v in views]
        while stack:
            value = stack[-1]
            below = maker[value].inputs[0]
            if value in done:
                stack.pop()
            elif below in views and below not in done:
                stack.append(below)
            else:
                done.add(value)
                out.append(maker[value])

    for i in order:
        put(work[i].inputs)
        out.append(work[i])
    put(results)
    return out
