"""`deflayer param state set-state! tap training step variable` and the initial values."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from math import isfinite
from typing import Any

from sexpgpu.diagnostics import problem, suggestion
from sexpgpu.experiment.trace import NAME, TAP_NAME, Trace, text
from sexpgpu.forms import ListForm, Symbol
from sexpgpu.ir import DTYPES
from sexpgpu.lisp.parameters import check_keys
from sexpgpu.lisp.tensors import NODE_UNITS, origin, real
from sexpgpu.lisp.values import Callable, Tensor, knobs_of, show, truthy
from sexpgpu.ops import build
from sexpgpu.source import Span

#: initial value -> its settings and their defaults
INITIALS = {"normal": {"mean": 0.0, "std": 1.0}, "uniform": {"low": -1.0, "high": 1.0}, "zeros": {}, "ones": {}, "constant": {"value": 0.0},
            "orthogonal": {"gain": 1.0}}


@dataclass(frozen=True)
class Initial:
    """How a parameter, state or slot starts: a kind of `INITIALS` and its settings."""

    kind: str
    settings: tuple[tuple[str, float], ...] = ()
    knobs: frozenset[str] = field(default=frozenset(), compare=False)  # that its settings came from

    def __str__(self) -> str:
        return " ".join([self.kind, *(f":{k} {v:g}" for k, v in self.settings)])


class InitialFunction(Callable):
    """`(normal :std 0.02)`; a bare `zeros` means `(zeros)`."""

    def __init__(self, name: str):
        self.name = name
        self.signature = "&key " + " ".join(INITIALS[name]) if INITIALS[name] else ""
        self.doc = f"The initial value `{name}`" + ("".join(f" :{k} {v:g}" for k, v in INITIALS[name].items())) + "."

    def call(self, ev: Any, args: list[Any], kwargs: dict[str, Any], span: Span | None) -> Initial:
        settings, knobs = dict(INITIALS[self.name]), knobs_of((*args, *kwargs.values()))
        for key, value in zip(settings, args, strict=False):
            kwargs = {key: value, **kwargs}
        if len(args) > len(settings):
            raise problem("E-EVAL-104", f"`{self.name}` takes {' '.join(':' + k for k in settings) or 'nothing'}", span)
        for key, value in kwargs.items():
            if key not in settings:
                raise problem("E-EVAL-101", f"`{self.name}` has no key :{key}", span, help=suggestion(key, settings, "keys"))
            if not isinstance(value, int | float | Fraction) or isinstance(value, bool):
                raise problem("E-EVAL-103", f"`{self.name}`: :{key} needs a number", span)
            settings[key] = real(value, f"`{self.name}`: :{key}", span)
            if not isfinite(settings[key]):
                raise problem("E-EVAL-103", f"`{self.name}`: :{key} is {settings[key]:g}, and an initial value is finite", span)
        if settings.get("std", 0) < 0:
            raise problem("E-EVAL-103", f"`normal`: :std is {settings['std']:g}, and a deviation is 0 or more", span, help=f"(normal :std {-settings['std']:g})")
        if self.name == "uniform" and settings["low"] > settings["high"]:
            low, high = settings["low"], settings["high"]
            raise problem("E-EVAL-103", f"`uniform`: :low {low:g} is above :high {high:g}", span, help=f"(uniform :low {high:g} :high {low:g})")
        return Initial(self.name, tuple(settings.items()), knobs)


def as_initial(value: Any, span: Span | None) -> Initial:
    if isinstance(value, InitialFunction):
        return Initial(value.name, tuple(INITIALS[value.name].items()))
    if isinstance(value, Initial):
        return value
    raise problem("E-EVAL-103", "an initial value is one of " + ", ".join(f"({n})" for n in INITIALS), span, help="for example :init (normal :std 0.02)")


class LayerFunction(Callable):
    """A function that opens a scope of the model path; every call takes `:name` and `:share`."""

    def __init__(self, closure: Any):
        self.closure = closure
        self.name = closure.name
        self.doc = getattr(closure, "doc", "")
        self.span = getattr(closure, "span", None)
        self.parameters = closure.parameters
        self.signature = closure.signature

    def call(self, ev: Any, args: list[Any], kwargs: dict[str, Any], span: Span | None) -> Any:
        trace = tracing(ev, f"the layer `{self.name}`", span)
        kwargs = dict(kwargs)
        if not self.closure.parameters.rest:
            check_keys(self, kwargs, (*(key for key, _ in self.closure.parameters.keys), "name", "share"))
        name, share = kwargs.pop("name", None), kwargs.pop("share", False)
        with trace.layer(self.name, name if name != () else None, truthy(share), span):
            return ev.call(self.closure, args, kwargs, span)


def tracing(ev: Any, what: str, span: Span | None) -> Trace:
    if ev.trace is None:
        raise problem(
            "E-EVAL-106", f"{what} can only be used while a loss, a metric or an evaluation is traced", span,
            help="call it from the function that a defrun names as its :loss",
        )
    return ev.trace


def sizes_of(value: Any, what: str, span: Span | None) -> tuple[int, ...]:
    sizes = value if isinstance(value, tuple) else (value,)
    for size in sizes:
        if not isinstance(size, int) or isinstance(size, bool) or size < 0:
            knobs = ", ".join(sorted(knobs_of(size)))
            shown = show(size, 40)
            raise problem("E-SHAPE-013", f"{what}: {shown} is no size of an axis" + (f" (from knob {knobs})" if knobs else ""), span,
                          help=f"choose another value of {knobs}, or round the size: (floor a b)" if knobs else "a size is a whole number of 0 or more")
    return tuple(int(s) for s in sizes)


class Declare(Callable):
    """`(param name shape :init i :dtype f32)` and `(state …)`."""

    signature = "name shape &key init dtype"

    def __init__(self, kind: str, doc: str):
        self.name, self.doc = kind, doc

    def call(self, ev: Any, args: list[Any], kwargs: dict[str, Any], span: Span | None) -> Tensor:
        kind = self.name
        trace = tracing(ev, f"`{kind}`", span)
        if len(args) != 2 or not isinstance(args[0], str):
            raise problem("E-EVAL-104", f'a {kind} is ({kind} "name" [sizes] :init (normal :std 0.02))', span)
        for key in kwargs:
            if key not in ("init", "dtype"):
                raise problem("E-EVAL-101", f"`{kind}` has no key :{key}", span, help=suggestion(key, ("init", "dtype"), "keys"))
        if kind == "param" and "init" not in kwargs:
            raise problem("E-EVAL-102", f'param "{args[0]}" needs :init', span, help="for example :init (normal :std 0.02), or zeros")
        init = as_initial(kwargs.get("init", Initial("zeros")), span)
        dtype = kwargs.get("dtype", Symbol("f32"))
        dtype = dtype.name if isinstance(dtype, Symbol) else str(dtype)
        if dtype not in DTYPES or (kind == "param" and dtype != "f32"):
            raise problem("E-EVAL-103", f"{kind}: :dtype {dtype} is not possible", span, help="parameters are f32; :precision decides the arithmetic")
        shape = sizes_of(args[1], f'{kind} "{args[0]}"', span)
        if init.kind == "orthogonal" and len(shape) < 2:
            raise problem("E-EVAL-103", f'{kind} "{args[0]}": `orthogonal` starts a matrix or a kernel, and the shape is {list(shape)}', span,
                          help="start a vector by zeros, ones or normal")

        def make(path: str) -> Any:
            with ev.provenance.origins.at(origin(ev, span)):
                return build(kind, path=path, shape=shape, dtype=dtype)

        spec = trace.declare(ev, kind, str(args[0]), shape, dtype, init, make, span)
        sizes = args[1] if isinstance(args[1], tuple) else (args[1],)
        ev.provenance.axes.setdefault(spec.node, tuple(knobs_of(n) for n in sizes))
        return Tensor(spec.node)


class SetState(Callable):
    signature = "name tensor"
    name, doc = "set-state!", "The value a state of the current path has after this step."

    def call(self, ev: Any, args: list[Any], kwargs: dict[str, Any], span: Span | None) -> Any:
        trace = tracing(ev, "`set-state!`", span)
        if len(args) != 2 or kwargs or not isinstance(args[0], str) or not isinstance(args[1], Tensor):
            raise problem("E-EVAL-104", '(set-state! "name" tensor)', span)
        key = "/".join(filter(None, [text(trace.path), str(args[0])]))
        spec = trace.registry.specs.get(key)
        if spec is None or spec.kind != "state":
            states = [p for p, s in trace.registry.specs.items() if s.kind == "state"]
            raise problem("E-EVAL-107", f"there is no state `{key}`", span, help=suggestion(key, states, "states"))
        if args[1].node.type.shape != spec.shape or args[1].node.type.dtype != spec.dtype:
            raise problem("E-EVAL-103", f"set-state!: `{key}` is {spec.node.type}, and the new value is {args[1].node.type}", span)
        if not trace.training:
            return args[1]
        if key in trace.updates:
            raise problem("E-EVAL-108", f"the state `{key}` is written twice in one step", span)
        trace.updates[key] = args[1].node
        return args[1]


class Tap(Callable):
    signature = "name scalar"
    name, doc = "tap", "A diagnostic at the current path; returns its value."

    def call(self, ev: Any, args: list[Any], kwargs: dict[str, Any], span: Span | None) -> Any:
        trace = tracing(ev, "`tap`", span)
        if len(args) != 2 or kwargs or not isinstance(args[0], str) or not TAP_NAME.match(args[0]):
            raise problem("E-EVAL-104", '(tap "name" scalar), the name of letters, digits and . _ + - /', span)
        value = args[1]
        if not isinstance(value, Tensor) or value.node.type.shape:
            what = value.node.type if isinstance(value, Tensor) else "no tensor"
            raise problem("E-EVAL-103", f'tap "{args[0]}" needs a scalar tensor, and got {what}', span, help="reduce it: (mean …), (reduce-max …)")
        trace.tap(str(args[0]), value.node, span)
        return value


class Training(Callable):
    name, doc = "training", "True while a run's loss is traced; false for metrics and evaluations."

    def call(self, ev: Any, args: list[Any], kwargs: dict[str, Any], span: Span | None) -> bool:
        return tracing(ev, "`training`", span).training


class Variable(Callable):
    signature = "tensor"
    name, doc = "variable", "A copy of a tensor to differentiate by; never joined with an equal one."

    def __init__(self) -> None:
        self.count = 0

    def call(self, ev: Any, args: list[Any], kwargs: dict[str, Any], span: Span | None) -> Tensor:
        if len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
            raise problem("E-EVAL-104", "(variable tensor)", span)
        ev.spend(NODE_UNITS, "graph nodes")
        path = ev.trace.path_text() if ev.trace is not None else ""
        key = ("variable", path, ev.trace.entry if ev.trace is not None else "")
        number = ev.trace.draws[key] if ev.trace is not None else self.count
        self.count += 1
        if ev.trace is not None:
            ev.trace.draws[key] += 1
        with ev.provenance.origins.at(origin(ev, span)):
            return Tensor(build("variable", args[0].node, id=number, path=path))


class StepNumber(Callable):
    name, doc = "step", "The number of updates done so far: a device i32, so that a schedule never recompiles."

    def call(self, ev: Any, args: list[Any], kwargs: dict[str, Any], span: Span | None) -> Tensor:
        if args or kwargs:
            raise problem("E-EVAL-104", "(step)", span)
        ev.spend(NODE_UNITS, "graph nodes")
        with ev.provenance.origins.at(origin(ev, span)):
            return Tensor(build("step"))


class Draw(Callable):
    """`random-normal …`: an op whose key is the path and the number of the draw there."""

    def __init__(self, inner: Any):
        self.inner, self.name, self.doc = inner, inner.op.name, inner.op.doc
        self.visible = [p for p in inner.op.attributes if p.name not in ("path", "number")]
        self.signature = " ".join([*inner.op.operands, *(["&key"] if self.visible else []), *(p.name for p in self.visible)])

    def call(self, ev: Any, args: list[Any], kwargs: dict[str, Any], span: Span | None) -> Tensor:
        trace = tracing(ev, f"`{self.name}`", span)
        for key in ("path", "number"):
            if key in kwargs:
                raise problem("E-EVAL-101", f"`{self.name}` has no key :{key}", span)
        path = trace.path_text()
        number = trace.draws[path]
        trace.draws[path] += 1
        return self.inner.call(ev, args, {**kwargs, "path": path, "number": number}, span)


def deflayer(ev: Any, form: ListForm, env: Any) -> Any:
    items = form.items
    if len(items) < 4 or not isinstance(items[1], Symbol) or not isinstance(items[2], ListForm):
        raise ev.error("E-EVAL-104", "a layer is (deflayer name (parameters) body)", form)
    if not NAME.match(items[1].name):
        raise ev.error("E-EVAL-104", "a layer's name is part of model paths: letters, digits and . _ + -", items[1])
    closure = ev.make_closure(items[1].name, items[2], items[3:], env, form.span)
    layer = LayerFunction(closure)
    env.define(items[1].name, layer, items[1].span)
    return layer


def natives(op_natives: dict[str, Any]) -> dict[str, Callable]:
    """The functions of this module by name; draws wrap the ops of the same name."""
    functions: dict[str, Callable] = {name: InitialFunction(name) for name in INITIALS}
    functions["param"] = Declare("param", "A trained tensor at the current path.")
    functions["state"] = Declare("state", "An untrained tensor at the current path, that the step updates.")
    for function in (SetState(), StepNumber(), Tap(), Training(), Variable()):
        functions[function.name] = function
    for name, native in op_natives.items():
        if name.startswith("random-"):
            functions[name] = Draw(native)
    return functions
