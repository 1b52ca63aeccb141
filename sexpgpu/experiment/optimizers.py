"""`defoptimizer`: an optimizer written in Lisp, and its update traced for one parameter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sexpgpu.diagnostics import Related, problem
from sexpgpu.experiment.globs import matches
from sexpgpu.experiment.layers import Initial, as_initial, sizes_of
from sexpgpu.forms import Form, Keyword, ListForm, Literal, Symbol
from sexpgpu.ir import Node
from sexpgpu.lisp.tensors import as_node
from sexpgpu.lisp.values import Callable, Tensor
from sexpgpu.ops import build
from sexpgpu.source import Span


@dataclass(frozen=True)
class Slot:
    """One tensor of optimizer state a parameter. `shape` is a form evaluated per parameter, or None: the parameter's."""

    name: str
    init: Initial
    shape: Form | None


class Definition(Callable):
    """An optimizer by name; calling it with settings gives an `Optimizer`."""

    def __init__(self, name: str, doc: str, closure: Any, slots: tuple[Slot, ...], env: Any, span: Span | None):
        self.name, self.doc, self.closure, self.slots, self.env, self.span = name, doc, closure, slots, env, span
        self.parameters = closure.parameters

    def call(self, ev: Any, args: list[Any], kwargs: dict[str, Any], span: Span | None) -> Optimizer:
        if args:
            raise problem("E-EVAL-104", f"optimizer `{self.name}` takes settings by key: ({self.name} :lr 1e-3)", span)
        return Optimizer(self, dict(kwargs), span)


@dataclass(frozen=True)
class Optimizer:
    definition: Definition
    settings: dict[str, Any]
    span: Span | None


@dataclass(frozen=True)
class ByPath:
    """`(by-path ("**/bias" (adamw …)) (else (muon …)))`: the first group whose globs match a parameter updates it."""

    groups: tuple[tuple[str, tuple[str, ...], Optimizer], ...]  # (name, globs; none: all, optimizer)
    span: Span | None


def group_of(optimizer: Optimizer | ByPath, path: str) -> tuple[str, Optimizer] | None:
    """(group, optimizer) of a parameter's outward path; a lone optimizer is the group ""."""
    if isinstance(optimizer, Optimizer):
        return "", optimizer
    for name, globs, one in optimizer.groups:
        if not globs or any(matches(g, path) for g in globs):
            return name, one
    return None


def by_path(ev: Any, form: ListForm, env: Any) -> ByPath:
    """The special form; patterns are strings and not evaluated, optimizers are."""
    usage = 'by-path is (by-path ("**/bias" (adamw :lr 1e-3)) (else (sgd :lr 0.1)))'
    groups: dict[str, tuple[str, tuple[str, ...], Optimizer]] = {}
    for item in form.items[1:]:
        parts = item.items if isinstance(item, ListForm) else ()
        last = item is form.items[-1]
        other = len(parts) == 2 and isinstance(parts[0], Symbol) and parts[0].name == "else"
        globs = tuple(p.value for p in parts[:-1] if isinstance(p, Literal) and isinstance(p.value, str))
        if len(parts) < 2 or (other and not last) or not (other or len(globs) == len(parts) - 1):
            raise ev.error("E-EVAL-104", usage, item, help="`else` comes last" if other else ())
        optimizer = ev.eval(parts[-1], env)
        if not isinstance(optimizer, Optimizer):
            raise ev.error("E-EVAL-103", "by-path: a group needs an optimizer with its settings", parts[-1], help="for example (adamw :lr 1e-3)")
        name = "else" if other else ",".join(globs)
        if name in groups:
            raise ev.error("E-EVAL-104", f"by-path has two groups `{name}`", item)
        groups[name] = (name, () if other else globs, optimizer)
    if not groups:
        raise ev.error("E-EVAL-104", usage, form)
    return ByPath(tuple(groups.values()), form.span)


def defoptimizer(ev: Any, form: ListForm, env: Any) -> Any:
    items = form.items
    usage = "an optimizer is (defoptimizer name (param grad &key …) :state ((slot zeros) …) body)"
    if len(items) < 4 or not isinstance(items[1], Symbol) or not isinstance(items[2], ListForm) or len(items[2].items) < 2:
        raise ev.error("E-EVAL-104", usage, form)
    name, parameters, rest = items[1].name, items[2], items[3:]
    slot_forms: tuple[Form, ...] = ()
    if isinstance(rest[0], Keyword):
        if rest[0].name != "state" or len(rest) < 3 or not isinstance(rest[1], ListForm):
            raise ev.error("E-EVAL-104", usage, rest[0])
        slot_forms, rest = rest[1].items, rest[2:]
    doc = rest[0].value if len(rest) > 1 and isinstance(rest[0], Literal) and isinstance(rest[0].value, str) else ""
    slots = tuple(_slot(ev, s, env) for s in slot_forms)
    names = tuple(Symbol(s.name, span=f.span) for s, f in zip(slots, slot_forms, strict=True))
    full = ListForm((*parameters.items[:2], *names, *parameters.items[2:]), span=parameters.span)
    closure = ev.make_closure(name, full, rest[1:] if doc else rest, env, form.span)
    definition = Definition(name, str(doc), closure, slots, env, form.span)
    env.define(name, definition, items[1].span)
    return definition


def _slot(ev: Any, form: Form, env: Any) -> Slot:
    parts = form.items if isinstance(form, ListForm) else ()
    if len(parts) not in (2, 3) or not isinstance(parts[0], Symbol):
        raise ev.error("E-EVAL-104", "a slot is (name initial-value [shape])", form)
    init = as_initial(ev.eval(parts[1], env), parts[1].span)
    return Slot(parts[0].name, init, parts[2] if len(parts) == 3 else None)


@dataclass(frozen=True)
class Update:
    """The traced update of one parameter: the new value, and (slot, leaf, new value, initial value) of its state."""

    param: Node
    slots: tuple[tuple[str, Node, Node, Initial], ...]


def trace_update(ev: Any, optimizer: Optimizer, param: Node, gradient: Node, path: str) -> Update:
    """Calls the optimizer's body on one parameter. `path` is the parameter's outward name."""
    definition = optimizer.definition
    leaves = []
    for slot in definition.slots:
        shape = param.type.shape
        if slot.shape is not None:
            scope = definition.env.child({})
            names = [p if isinstance(p, str) else p.name for p in definition.parameters.required[:1]]
            scope.define(names[0], Tensor(param), None)
            value = ev.eval(slot.shape, scope)
            shape = sizes_of(value, f"the shape of slot `{slot.name}`", slot.shape.span)
        leaves.append(build("slot", path=path, slot=slot.name, shape=shape, dtype="f32"))
    args = [Tensor(param), Tensor(gradient), *(Tensor(leaf) for leaf in leaves)]
    result = ev.call(definition.closure, args, optimizer.settings, optimizer.span)
    wanted = 1 + len(leaves)
    if not isinstance(result, tuple) or len(result) != wanted:
        got = len(result) if isinstance(result, tuple) else "no list"
        names = " ".join(["new-param", *(f"new-{s.name}" for s in definition.slots)])
        raise problem(
            "E-EVAL-112", f"optimizer `{definition.name}` must return (list {names}), and returned {got}", optimizer.span,
            related=[Related(definition.span, "defined here")],
        )
    new = []
    for leaf, value in zip([param, *leaves], result, strict=True):
        node = as_node(value, "f32", definition.name, optimizer.span)
        if node.type.shape != leaf.type.shape and not node.type.shape:
            node = build("broadcast", node, shape=leaf.type.shape)
        if (node.type.shape, node.type.dtype) != (leaf.type.shape, leaf.type.dtype):
            raise problem(
                "E-EVAL-112", f"optimizer `{definition.name}`: {leaf.type} of `{path}` would become {node.type}", optimizer.span,
                related=[Related(definition.span, "defined here")],
            )
        new.append(node)
    slots = tuple((s.name, leaf, node, s.init) for s, leaf, node in zip(definition.slots, leaves, new[1:], strict=True))
    return Update(new[0], slots)



