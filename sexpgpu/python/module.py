"""The functions and layers of an experiment as torch modules, over parameters that they share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sexpgpu.backends.interpreter.differentiable import Context, Differentiable
from sexpgpu.backends.interpreter.dtypes import TORCH
from sexpgpu.diagnostics import fail
from sexpgpu.experiment.globs import matches
from sexpgpu.experiment.layers import LayerFunction
from sexpgpu.experiment.load import Loaded
from sexpgpu.experiment.predicted import find_function, trace_call
from sexpgpu.experiment.traced import TracedRun
from sexpgpu.ir import Node, postorder
from sexpgpu.python.arguments import Arguments, gather, unpack
from sexpgpu.python.mistakes import NoSuchName, mistakes
from sexpgpu.run.measure import unmeasured

#: op that takes rows of its first operand by its second -> the axis that it takes them along
_ROWS: dict[str, Callable[[Node], int]] = {
    "embed": lambda node: 0, "gather": lambda node: node.attrs["axis"], "softmax-cross-entropy": lambda node: -1,
}


@dataclass(frozen=True)
class _Graph:
    """A traced call: its graph over (inputs, parameters and states), what it returns, the states that it writes."""

    graph: Differentiable
    names: tuple[str, ...]  # outward names of parameters and states among the leaves, after the inputs
    value: Callable[[Sequence[torch.Tensor]], Any]
    written: tuple[str, ...]  # outward names of states, whose new values are the last results
    rows: tuple[tuple[str, int, str], ...]  # (input, count, op): an op takes one of `count` rows by this input


class _Tensors(torch.nn.Module):
    """A module whose parameters and buffers are named by paths, in which a `.` may stand."""

    def _load_from_state_dict(self, state: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state, prefix, *rest)
        own, unexpected = {prefix + name for name in (*self._parameters, *self._buffers)}, rest[3]
        unexpected[:] = [name for name in unexpected if name not in own]


class Model(_Tensors):
    """A run of an experiment: its parameters and states by path, its functions and layers as modules.

    `model.perceptron`, or `model["digit-loss"]` (as an attribute, `_` stands for `-`), is a module over the same
    parameters; `model(*fields)` is the run's loss. It begins in `eval()`: `train()` switches dropout and the states'
    updates on, whose draws are those of update number `updates`, which the training loop counts.
    """

    def __init__(self, loaded: Loaded, traced: TracedRun, values: Mapping[str, torch.Tensor], updates: int, threads: int | None, statistics: Mapping[str, Any]):
        super().__init__()
        self.updates = updates
        self._loaded, self._traced, self._threads = loaded, traced, threads
        self._fields = {f.name: f for f in traced.run.data.fields}
        self._full = {spec.node: name for name, spec in (traced.params | traced.states).items()}
        dtype = dtype_of("f32", traced.run.precision)
        known = unmeasured(loaded.experiment.data.values()) | dict(statistics)
        self._statistics = {name: torch.tensor(value, dtype=dtype) for name, value in known.items()}
        self._one = torch.ones((), dtype=dtype)  # a number of a manifest that was not read
        self._graphs: dict[Any, _Graph] = {}
        self._functions: dict[str, Function] = {}
        for name in traced.params:
            trained = not any(matches(glob, name) for glob in traced.run.frozen)
            self._parameters[name] = torch.nn.Parameter(values[name], requires_grad=trained)
        for name in traced.states:
            self._buffers[name] = values[name]
        self.eval()
        self.__dict__["loss"] = Function(self, traced.run.loss.function)  # no child: its parameters are the model's

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The run's loss of the fields that it takes, a scalar; of a loss `(list sum count)` it is their quotient."""
        value = self.loss(*args, **kwargs)
        return value[0] / value[1] if isinstance(value, tuple) else value

    def __getitem__(self, name: str) -> Function:
        """The function or layer of this name, as the file writes it."""
        if name not in self._functions:
            with mistakes(NoSuchName):
                function = find_function(self._loaded.ev, name)
            self._functions[name] = Function(self, function)
        return self._functions[name]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "_functions" not in self.__dict__ or name in self._parameters or name in self._buffers:
            return super().__getattr__(name)
        known = self.functions()
        return self[name if name in known else name.replace("_", "-")]

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *(name.replace("-", "_") for name in self.functions())]

    def extra_repr(self) -> str:
        run, count = self._traced.run, sum(p.numel() for p in self.parameters())
        return f"{self._loaded.experiment.file}, run {run.name}: {count:,} values; functions {', '.join(self.functions())}"

    def functions(self) -> tuple[str, ...]:
        """Names of the file's own functions and layers, as it writes them."""
        found = self._loaded.ev.main.env.vars.items()
        return tuple(name for name, value in found if hasattr(value, "parameters") and hasattr(value, "call"))

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("a model shares its experiment's compiler: load the file again for a second one")

    def _call(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        run = self._traced.run
        given = gather(function, args, kwargs, run.precision, self._fields)
        key = (function, self.training, given.signature)
        if key not in self._graphs:
            self._graphs[key] = self._trace(function, given)
        found = self._graphs[key]
        _check_rows(found, given)
        values = [*given.tensors, *(self._tensor(name) for name in found.names)]
        out = found.graph.call(values, Context(run.seed, self.updates, self._threads))
        states: dict[str, Any] = dict(self._buffers)
        with torch.no_grad():
            for name, value in zip(found.written, out[len(out) - len(found.written) :], strict=True):
                states[name].copy_(value)
        return found.value(out)

    def _tensor(self, name: str) -> torch.Tensor:
        """The parameter or state as the graph takes it; raises E-RUN-052 where somebody made another of it."""
        if name.startswith("statistic "):
            return self._statistics.get(name.removeprefix("statistic "), self._one)
        value = self._parameters[name] if name in self._parameters else self._buffers[name]
        spec = self._traced.params.get(name) or self._traced.states[name]
        wanted = dtype_of(spec.dtype, self._traced.run.precision)
        if value is None or value.dtype != wanted or tuple(value.shape) != spec.shape or value.device.type != "cpu":
            got = "gone" if value is None else f"{value.dtype} {list(value.shape)} on {value.device}"
            fail("E-RUN-052", f"`{name}` is {got}, and the program has {wanted} {list(spec.shape)} on the CPU", spec.span,
                 help="choose the arithmetic where you load: set={'precision': 'f64'}, if the file has such a knob")
        return value.clone() if name in self._buffers else value  # a later call writes the states in place

    def _trace(self, function: Any, given: Arguments) -> _Graph:
        ev, registry = self._loaded.ev, self._traced.registry
        ev.budget.left = ev.budget.limit  # the bound is on one evaluation, and a module may be called for ever
        value, updates = trace_call(ev, function, given.args, given.kwargs, registry, self.training)
        results: list[Node] = []
        unpacked = unpack(value, results, function.name, function.span)
        outward = {key: registry.outward(spec.path) for key, spec in registry.specs.items()}
        written = tuple(outward[key] for key in updates)
        results += updates.values()
        self._full |= {node: f"statistic {node.attrs['name']}" for node in postorder(results) if node.op == "statistic"}
        leaves = [node for node in postorder(results) if node in self._full]
        graph = Differentiable(results, [*given.leaves, *leaves], self._traced.run.precision, self._traced.origins)
        return _Graph(graph, tuple(self._full[leaf] for leaf in leaves), unpacked, written, _rows(results))


class Function(_Tensors):
    """One function or layer of a `Model`; a call with tensors of other shapes is a graph of its own.

    A layer has the parameters and states below its path, another function all of the run's; they are the model's.
    """

    _model: Any  # no child of this module, or its parameters would be listed twice
    _function: Any

    def __init__(self, model: Model, function: Any):
        super().__init__()
        self.__dict__["_model"], self.__dict__["_function"] = model, function
        self.name, self.__doc__ = function.name, function.doc
        below = f"{function.name}/" if isinstance(function, LayerFunction) else ""
        for kind in ("_parameters", "_buffers"):
            getattr(self, kind).update({n: t for n, t in getattr(model, kind).items() if n.startswith(below)})

    @property
    def training(self) -> bool:
        """The mode of the model: one switch for all its functions."""
        return self.__dict__["_model"].training if "_model" in self.__dict__ else False

    @training.setter
    def training(self, mode: bool) -> None:
        if "_model" in self.__dict__:
            self._model.training = mode

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The function's value: tensors for tensors, a tuple for a list."""
        with mistakes():
            return self._model._call(self._function, args, kwargs)

    def extra_repr(self) -> str:
        return f"{self.name}: {sum(p.numel() for p in self.parameters()):,} values"


def dtype_of(dtype: str, precision: str) -> torch.dtype:
    """The dtype in which a program of this precision keeps a tensor that is traced as `dtype`."""
    return TORCH["f64" if precision == "f64" and dtype == "f32" else dtype]


def _rows(results: Sequence[Node]) -> tuple[tuple[str, int, str], ...]:
    found = (n for n in postorder(results) if n.op in _ROWS and n.inputs[1].op == "input")
    return tuple((n.inputs[1].attrs["name"], n.inputs[0].type.shape[_ROWS[n.op](n)], n.op) for n in found)


def _check_rows(found: _Graph, given: Arguments) -> None:
    """E-RUN-053 for an input that an op takes rows by, with a number that is no row."""
    tensors = {leaf.attrs["name"]: t for leaf, t in zip(given.leaves, given.tensors, strict=True)}
    for name, count, op in found.rows:
        low, high = (int(f(tensors[name])) for f in (torch.min, torch.max)) if tensors[name].numel() else (0, 0)
        if low < 0 or high >= count:
            fail("E-RUN-053", f"`{name}` has values {low}…{high}, and `{op}` takes 0…{count - 1}")

