"""Python arguments as values of the language: tensors become inputs of a graph, all else is known at compile time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from sexpgpu.diagnostics import fail
from sexpgpu.experiment.model import Field
from sexpgpu.ir import Node
from sexpgpu.lisp.values import Tensor, kind_of, plain
from sexpgpu.ops import build

#: torch's dtypes that an input may have, in the words of the IR
DTYPES = {torch.float32: "f32", torch.float64: "f64", torch.int32: "i32", torch.int64: "i64", torch.uint8: "u8", torch.bool: "bool"}
INTEGERS = {"i32": torch.int32, "i64": torch.int64, "u8": torch.uint8, "u16": torch.uint16}


@dataclass
class Arguments:
    """One call's arguments. `signature` says everything that its graph depends on; `tensors` are by order of leaves."""

    precision: str
    fields: Mapping[str, Field]
    args: list[Any] = field(default_factory=list)
    kwargs: dict[str, Any] = field(default_factory=dict)
    leaves: list[Node] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    rows: int | None = None

    @property
    def signature(self) -> tuple[Any, ...]:
        """Equal for calls that one graph serves."""
        return _key(self.args), tuple((name, _key(value)) for name, value in self.kwargs.items())

    def add(self, name: str, value: Any) -> Any:
        """The value in the language; a tensor is recorded as an input of this name."""
        if isinstance(value, np.ndarray):
            value = torch.from_numpy(value)
        if isinstance(value, torch.Tensor):
            return self._tensor(name, value)
        if value is None:
            return ()
        if isinstance(value, bool | int | float | Fraction | str):
            return value
        if isinstance(value, list | tuple):
            return tuple(self.add(f"{name} {i}", item) for i, item in enumerate(value))
        fail("E-RUN-050", f"`{name}` is a {type(value).__name__}, and a call takes tensors, numbers, strings and lists of them",
             help="make it a torch tensor")

    def _tensor(self, name: str, value: torch.Tensor) -> Tensor:
        known = self.fields.get(name)
        value = _fit(name, value, self.precision, known.dtype if known is not None else None)
        dtype = DTYPES.get(value.dtype, "u16")
        dtype = "f32" if value.is_floating_point() else dtype  # programs are typed f32; the precision retypes them
        if self.rows is None and value.dim():
            self.rows = value.shape[0]
        batch = value.dim() > 0 and value.shape[0] == self.rows
        leaf = build("input", name=name, dtype=dtype, shape=tuple(value.shape), batch=batch)
        self.leaves.append(leaf)
        self.tensors.append(value)
        return Tensor(leaf)


def gather(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], precision: str, fields: Mapping[str, Field]) -> Arguments:
    """The arguments of one call. A tensor is an input named as the parameter; keywords may write `_` for `-`."""
    parameters = function.parameters
    names = [*parameters.required, *(name for name, _ in parameters.optional)]
    own = {*names, *(name for name, _ in parameters.keys)}
    given = {key if key in own else key.replace("_", "-"): value for key, value in kwargs.items()}
    found = Arguments(precision, fields)
    for i, value in enumerate(args):
        found.args.append(found.add(names[i] if i < len(names) else f"argument {i}", value))
    for name in names[len(args) :]:
        if name not in given:
            break
        found.args.append(found.add(name, given.pop(name)))
    found.kwargs = {name: found.add(name, value) for name, value in given.items()}
    return found


def _fit(name: str, value: torch.Tensor, precision: str, dtype: str | None) -> torch.Tensor:
    """The tensor as a graph of this precision takes it; raises E-RUN-050."""
    if value.device.type != "cpu":
        fail("E-RUN-050", f"`{name}` is on {value.device}, and modules compute on the CPU", help=f"{name}.cpu()")
    if value.is_floating_point():
        wanted = torch.float64 if precision == "f64" else torch.float32
        if value.dtype not in (torch.float32, wanted):
            fail("E-RUN-050", f"`{name}` is {_word(value)}, and a program of precision {precision} takes {_word(wanted)}",
                 help=f"{name}.{'double' if precision == 'f64' else 'float'}()")
        return value.to(wanted)
    if value.dtype not in DTYPES and value.dtype != torch.uint16:
        fail("E-RUN-050", f"`{name}` is {_word(value)}, which no input can be", help=f"{name}.int(), or {name}.float()")
    whole = INTEGERS.get(dtype or "")
    if whole is None or value.dtype in (torch.bool, whole):
        return value
    limits = torch.iinfo(whole)
    if value.numel() and not limits.min <= int(value.min()) <= int(value.max()) <= limits.max:
        fail("E-RUN-050", f"`{name}` has values that do not fit {dtype}, the type of the field `{name}`")
    return value.to(whole)


def _word(value: torch.Tensor | torch.dtype) -> str:
    return str(value.dtype if isinstance(value, torch.Tensor) else value).removeprefix("torch.")


def _key(value: Any) -> Any:
    """What a graph depends on: of a tensor its leaf, of a number its value and kind."""
    if isinstance(value, Tensor):
        return value.node
    if isinstance(value, list | tuple):
        return tuple(_key(item) for item in value)
    return type(value).__name__, value.hex() if isinstance(value, float) else value


def unpack(value: Any, results: list[Node], name: str, span: Any) -> Callable[[Sequence[torch.Tensor]], Any]:
    """How a call's value is put together from the results, to which its tensors are added; raises E-RUN-051."""
    if isinstance(value, Tensor):
        number = len(results)
        results.append(value.node)
        return lambda tensors: tensors[number]
    if value == ():
        return lambda tensors: None
    if isinstance(value, tuple):
        parts = [unpack(item, results, name, span) for item in value]
        return lambda tensors: tuple(part(tensors) for part in parts)
    found = plain(value)
    if isinstance(found, bool | int | float | Fraction | str):
        return lambda tensors: found
    fail("E-RUN-051", f"`{name}` returned {kind_of(value)}, and a module returns tensors, numbers, strings and lists of them",
         span, help="return a tensor, or (list …) of tensors")
