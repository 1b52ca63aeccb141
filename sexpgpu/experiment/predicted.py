"""Traces one function of a file as an entry that is not the loss: what `predict` and the Python modules compute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sexpgpu.diagnostics import problem, suggestion
from sexpgpu.experiment.trace import Registry, Trace
from sexpgpu.ir import Node
from sexpgpu.lisp.values import Callable, Tensor
from sexpgpu.ops import build


def find_function(ev: Any, name: str) -> Any:
    """The file's function or layer of this name; E-CKPT-034."""
    value = ev.main.env.lookup(name)
    if isinstance(value, Callable) and hasattr(value, "parameters"):
        return value
    own = [n for n, v in ev.main.env.vars.items() if isinstance(v, Callable)]
    what = f"there is no function `{name}`" if value is None else f"`{name}` is no function of fields"
    raise problem("E-CKPT-034", what, help=suggestion(name, own, "functions"))


def trace_function(
    ev: Any, function: Any, fields: Mapping[str, tuple[str, tuple[int, ...]]], samples: int, registry: Registry
) -> tuple[Node, ...]:
    """The tensors that it returns for `samples` rows. `fields`: parameter -> (dtype, shape of a row), all of them."""
    args = [
        Tensor(build("input", name=name, dtype=fields[name][0], shape=(samples, *fields[name][1]), batch=True))
        for name in function.parameters.required
    ]
    value, _ = trace_call(ev, function, args, {}, registry, False)
    found = value if isinstance(value, tuple) else (value,)
    for item in found:
        if not isinstance(item, Tensor) or item.node.type.shape[:1] != (samples,):
            shown = f"a {item.node.type} for {samples} rows" if isinstance(item, Tensor) else "what is no tensor"
            raise problem("E-CKPT-034", f"`{function.name}` returned {shown}", function.span,
                          help="return a tensor, or a list of tensors, whose axis 0 is the row")  # fmt: skip
    if not found:
        raise problem("E-CKPT-034", f"`{function.name}` returned nothing", function.span)
    return tuple(item.node for item in found)


def trace_call(
    ev: Any, function: Any, args: list[Any], kwargs: dict[str, Any], registry: Registry, training: bool
) -> tuple[Any, dict[str, Node]]:
    """The value of one call, and full path -> new value of the states that it writes (in training only)."""
    trace = Trace(function.name, registry, training, False)
    before, ev.trace = ev.trace, trace
    try:
        value = ev.call(function, args, kwargs, function.span)
        trace.close()
    finally:
        ev.trace = before
    return value, trace.updates
