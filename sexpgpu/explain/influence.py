"""What each knob decides: sizes of parameters, structure, keys of runs, evaluations and data, numbers in the graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from sexpgpu.experiment.load import Loaded
from sexpgpu.experiment.traced import TracedRun
from sexpgpu.forms import Form, Keyword, ListForm, Symbol
from sexpgpu.ir import Node, postorder
from sexpgpu.lisp.values import knobs_of

SHOWN = 3  # names in a line


def influences(loaded: Loaded, traced: Mapping[str, TracedRun]) -> dict[str, tuple[str, ...]]:
    """Knob -> lines, in the order of the knobs."""
    found: dict[str, list[str]] = {name: [] for name in loaded.experiment.knobs}
    for knob, line in (*_keys(loaded), *_shapes(loaded, traced), *_initial(traced), *_other(loaded, found)):
        if knob in found and line not in found[knob]:
            found[knob].append(line)
    for name, lines in found.items():
        decides = loaded.decided.get(name, ())
        if decides:
            lines.append("structure at " + ", ".join(decides))
    return {name: tuple(lines) for name, lines in found.items()}


def _keys(loaded: Loaded) -> Iterator[tuple[str, str]]:
    """Keys of def-forms in whose values a knob stands, directly or through a `defparameter` of it."""
    names = aliases(loaded)
    for form in loaded.ev.loader.main.forms:
        head = form.head() if isinstance(form, ListForm) else None
        if not isinstance(form, ListForm) or head not in ("defrun", "defeval", "defdata") or len(form.items) < 2:
            continue
        what = f"{head.removeprefix('def')} {getattr(form.items[1], 'name', '')}"
        for key, value in zip(form.items, form.items[1:], strict=False):
            if isinstance(key, Keyword):
                for symbol in symbols(value):
                    for knob in names.get(symbol, ()):
                        yield knob, f":{key.name} of {what}"


def aliases(loaded: Loaded) -> dict[str, frozenset[str]]:
    """Name -> the knobs that its value carries: knobs themselves, and variables of the file made from them."""
    found = {name: frozenset([name]) for name in loaded.experiment.knobs}
    for name, value in loaded.ev.main.env.vars.items():
        found[name] = found.get(name, frozenset()) | knobs_of(value)
    return found


def symbols(form: Form) -> set[str]:
    """Every name in a form."""
    found, todo = set(), [form]
    while todo:
        one = todo.pop()
        if isinstance(one, Symbol):
            found.add(one.name)
        elif isinstance(one, ListForm):
            todo += one.items
    return found


def _shapes(loaded: Loaded, traced: Mapping[str, TracedRun]) -> Iterator[tuple[str, str]]:
    """Parameters with a size of a knob."""
    by_knob: dict[str, dict[str, None]] = {}
    ev: Any = loaded.ev  # `load` gave it its provenance
    axes = ev.provenance.axes
    for run in traced.values():
        for name, spec in (run.params | run.states).items():
            for axis in axes.get(spec.node, ()):
                for knob in axis:
                    by_knob.setdefault(knob, {})[name] = None
    for knob, names in by_knob.items():
        yield knob, f"sizes of {_some(names)}"


def _initial(traced: Mapping[str, TracedRun]) -> Iterator[tuple[str, str]]:
    by_knob: dict[str, dict[str, None]] = {}
    for run in traced.values():
        for name, spec in (run.params | run.states).items():
            for knob in getattr(spec.init, "knobs", ()):
                by_knob.setdefault(knob, {})[name] = None
    for knob, names in by_knob.items():
        yield knob, f"initial values of {_some(names)}"


def _other(loaded: Loaded, found: Mapping[str, list[str]]) -> Iterator[tuple[str, str]]:
    """Functions of the file that read a knob."""
    for form in loaded.ev.loader.main.forms:
        if isinstance(form, ListForm) and form.head() in ("defun", "deflayer", "defoptimizer", "defmacro") and len(form.items) > 1:
            for symbol in symbols(form) & set(found):
                yield symbol, f"read in {getattr(form.items[1], 'name', '?')}"


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:SHOWN]) + (f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else "")


def knobs_below(nodes: Iterable[Node], origins: Mapping[Node, object]) -> frozenset[str]:
    """The knobs of every node that some nodes are made from."""
    found: set[str] = set()
    for node in postorder(nodes):
        found |= set(getattr(origins.get(node), "knobs", ()))
    return frozenset(found)
