"""A file's potential with the weights of a checkpoint: energies, forces and stress of a structure.

The file has a function `energy-forces-stress` or `energy-forces` of the fields of a packed batch (docs/flashcart.md). Its graph
is compiled for a capacity, and reused while structures fit it.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any, NoReturn

import numpy as np
import torch

from sexpgpu.backends.interpreter.program import Compiled
from sexpgpu.compiler import Selection, choose_run, load, train_graph
from sexpgpu.diagnostics import fail, suggestion
from sexpgpu.experiment.model import GRAPH_FIELDS
from sexpgpu.experiment.predicted import find_function, trace_call
from sexpgpu.experiment.structures import LABELS
from sexpgpu.ir import Node
from sexpgpu.lisp.values import Tensor
from sexpgpu.ops import build
from sexpgpu.ops.initial import initial_value
from sexpgpu.ops.philox import draw_key
from sexpgpu.passes.expand import expand_gradients
from sexpgpu.passes.precision import apply_precision
from sexpgpu.passes.simplify import simplify
from sexpgpu.potential.unlike import unlike
from sexpgpu.run.checkpoints.find import absolute, at_path
from sexpgpu.run.checkpoints.header import saved_schema
from sexpgpu.run.checkpoints.store import load as load_state
from sexpgpu.run.data.extxyz import Edges, at_one_place, edges_of, scattered, whole_cell
from sexpgpu.run.data.structures import Capacity, Structures, pack
from sexpgpu.run.measure import remembered, unmeasured

DEVICES = ("cpu", "cuda")
ON_DEVICE = "sexpgpu.potential.device"  # brings Triton
FUNCTIONS = ("energy-forces-stress", "energy-forces")
RESULTS = ("energy", "forces", "stress")
Bound = dict[tuple[str, str], torch.Tensor]


def _not_finite(data: Structures, what: list[str]) -> NoReturn:
    """E-RUN-057, with the atoms that are to blame where two of them have no direction between them."""
    pair = at_one_place(data.positions, (data.receivers, data.senders, data.offsets))
    if pair is not None:
        fail("E-RUN-057", f"atoms {pair[0]} and {pair[1]} stand at one place", help="atoms are counted from 0")
    fail("E-RUN-057", f"the potential's {' and '.join(what)} are not finite", help="a root, a logarithm or a quotient in the file, or weights that are not finite: a step of `sexpgpu run` names the first op to blame")


class Potential:
    """`run`, `variant` and `sets` choose as the command line does; `weights` is ema (where the run keeps it) or raw.

    precision: f32 or f64. device: cpu or cuda. Without a checkpoint the parameters are the initial ones, and the statistics 1 and 0.
    `builds` counts the graphs that were compiled.
    """

    def __init__(
        self, file: str, checkpoint: str | None, *, run: str | None = None, variant: str | None = None,
        sets: tuple[str, ...] = (), function: str | None = None, weights: str | None = None, precision: str = "f32",
        device: str = "cpu",
    ):  # fmt: skip
        if device not in DEVICES:
            fail("E-RUN-055", f"a potential's device is cpu or cuda, and not `{device}`", help=suggestion(device, DEVICES, "devices"))
        if precision not in ("f32", "f64"):
            fail("E-RUN-055", f"a potential's precision is f32 or f64, and not `{precision}`", help=suggestion(precision, ("f32", "f64"), "precisions"))
        self.loaded = load(file, Selection(variant=variant, sets=tuple(sets)))
        self.config = choose_run(self.loaded.experiment, run)
        if not self.config.data.source.structures:
            fail("E-RUN-055", f"the run `{self.config.name}` does not train on atomic structures", self.config.data.span,
                 help="its :data is (graphs source …) of an extxyz source")  # fmt: skip
        self.traced = train_graph(self.loaded, self.config)
        self.function = self._function(function)
        self.precision, options = precision, self.config.data.source.options
        self.cutoff: float = options["cutoff"]
        self.elements: list[str] = options["elements"]
        self.dtype = torch.float64 if precision == "f64" else torch.float32
        self.warnings: tuple[str, ...] = ()  # in what the checkpoint's program was another
        if weights not in (None, "ema", "raw"):
            fail("E-RUN-055", f"a potential's weights are ema or raw, and not `{weights}`", help=suggestion(str(weights), ("ema", "raw"), "weights"))
        if weights == "ema" and not self.traced.averages:
            fail("E-RUN-055", f"the run `{self.config.name}` keeps no averaged weights", self.config.span, help="leave weights= out, or give the run :ema")
        self.known = self._initial() if checkpoint is None else self._weights(checkpoint, weights)
        self.compiled: Any = None  # of the capacity: interpreter.Compiled, or device.OnDevice
        self.capacity: Capacity = (2, 0, 0)
        self.builds = 0
        self.place = import_module(ON_DEVICE).opened() if device == "cuda" else None

    def _function(self, name: str | None) -> Any:
        have = [f for f in FUNCTIONS if self.loaded.ev.main.env.lookup(f) is not None]
        if name is None and not have:
            fail("E-RUN-055", f"{self.loaded.experiment.file} has no function `{FUNCTIONS[0]}` or `{FUNCTIONS[1]}`",
                 help="define one of fields of a packed batch, or name another by function=")  # fmt: skip
        found = find_function(self.loaded.ev, name or have[0])
        for field in found.parameters.required:
            if field not in GRAPH_FIELDS or field in LABELS:
                fail("E-RUN-055", f"`{found.name}` takes `{field}`, which atoms without labels do not have", found.span,
                     help=suggestion(field, [f for f in GRAPH_FIELDS if f not in LABELS], "fields"))  # fmt: skip
        return found

    def _initial(self) -> Bound:
        bound: Bound = {}
        for kind, specs in (("param", self.traced.params), ("state", self.traced.states)):
            for spec in specs.values():
                path = str(spec.node.attrs["path"])
                value = initial_value(spec.init.kind, dict(spec.init.settings), spec.shape, draw_key(self.config.seed, path, 0, "init"))
                bound[kind, path] = torch.from_numpy(np.array(value)).to(self.dtype)
        for name, start in unmeasured(self.loaded.experiment.data.values()).items():
            bound["statistic", name] = torch.tensor(start, dtype=self.dtype)
        return bound

    def _weights(self, checkpoint: str, weights: str | None) -> Bound:
        """What the graph's leaves are bound to: parameters, states and statistics of the checkpoint."""
        found = at_path(absolute(checkpoint, os.getcwd()))
        saved = saved_schema(found)
        averages = self.traced.averages if weights in (None, "ema") else {}
        wanted = {}
        for kind, specs in (("param", self.traced.params), ("state", self.traced.states)):
            for name, spec in specs.items():
                key = f"ema/{name}" if kind == "param" and name in averages else f"{kind}/{name}"
                if saved.get(key, ("", None))[1] != spec.shape:
                    fail("E-CKPT-021", f"{found.folder} has no `{key}` of the shape {list(spec.shape)}",
                         help="name the variant and the knobs that it was trained with")  # fmt: skip
                wanted[kind, str(spec.node.attrs["path"])] = key
        self.warnings = unlike(self.loaded, self.traced, found)
        state = load_state(found)
        bound = {leaf: state[key].to(self.dtype) if state[key].is_floating_point() else state[key] for leaf, key in wanted.items()}
        for name, value in remembered(self.config, found.manifest.data).statistics.items():
            bound["statistic", name] = torch.tensor(value, dtype=self.dtype)
        return bound

    # --- a calculation

    def species(self, symbols: list[str]) -> np.ndarray:
        """Places in the potential's elements; E-RUN-055 for one that it does not know."""
        for symbol in symbols:
            if symbol not in self.elements:
                fail("E-RUN-055", f"the potential does not know the element {symbol}: it was trained for {' '.join(self.elements)}")
        return np.array([self.elements.index(symbol) for symbol in symbols], np.int32)

    def neighbours(self, positions: np.ndarray, cell: np.ndarray, periodic: Any, reach: float) -> Edges:
        """The edges up to `reach` Å; E-RUN-057 for atoms that stand nowhere, or a cell that does not repeat."""
        lost = np.flatnonzero(~np.isfinite(positions).all(axis=1))
        if len(lost):
            fail("E-RUN-057", f"the position of atom {lost[0]} is not finite: {positions[lost[0]]}", help="atoms are counted from 0")
        if not np.isfinite(cell).all():
            fail("E-RUN-057", "the cell is not finite")
        if any(periodic) and not abs(np.linalg.det(whole_cell(cell, periodic))) > 1e-12:
            fail("E-RUN-057", "the atoms are periodic, and their cell has no volume", help="a cell, or pbc=False")
        if scattered(positions, cell, periodic, reach):
            fail("E-RUN-057", "the atoms, or their cell, are spread over hundreds of cutoffs", help="a trajectory that has exploded, or a length in another unit than Å")
        return edges_of(positions, cell, periodic, reach)

    def structure(self, species: np.ndarray, positions: np.ndarray, cell: np.ndarray, edges: Any) -> Structures:
        """Atoms with their edges, (receivers, senders, offsets)."""
        atoms, pairs = np.array([0, len(species)]), np.array([0, len(edges[0])])
        receivers, senders, offsets = edges
        return Structures(self.config.data.source, atoms, pairs, species, positions, cell[None], receivers, senders, offsets, {})

    def __call__(self, species: np.ndarray, positions: np.ndarray, cell: np.ndarray | None = None, periodic: Any = (False,) * 3) -> dict[str, np.ndarray]:
        """energy (a number, eV), forces [atoms 3] (eV/Å), and where the function gives it stress [6] (eV/Å³)."""
        box = np.zeros((3, 3)) if cell is None else np.asarray(cell, float)
        return self.evaluate(self.structure(species, positions, box, self.neighbours(positions, box, periodic, self.cutoff)))

    def evaluate(self, data: Structures) -> dict[str, np.ndarray]:
        """Of one structure whose edges may reach beyond the cutoff."""
        reach = np.abs(data.offsets).max(initial=self.cutoff)
        batch = pack(data, np.array([0]), self._room(data), float(reach))
        if self.compiled is None:
            self.compiled, self.builds = self._compiled(), self.builds + 1
        values: dict[str, torch.Tensor] = {}
        exact = {"positions": data.positions, "offsets": data.offsets, "cell": data.cells}  # before rounding to f32
        for name, array in batch.items():
            tensor = torch.from_numpy(array)
            tensor = tensor.to(self.dtype) if tensor.is_floating_point() else tensor
            if name in exact and self.precision == "f64":
                tensor[: len(exact[name])] = torch.from_numpy(exact[name])
            values[name] = tensor
        if self.place is None:
            out = self.compiled.run(self.known | {("input", name): tensor for name, tensor in values.items()}, 0, 0)
        else:
            out = self.compiled.run(values)
        found = {name: value.double().numpy() for name, value in out.items()}
        result = {"energy": found["energy"][0], "forces": found["forces"][: len(data.species)]} | (
            {"stress": found["stress"][0]} if "stress" in found else {})
        if not all(np.isfinite(value).all() for value in result.values()):
            _not_finite(data, [name for name, value in result.items() if not np.isfinite(value).all()])
        return result

    def _room(self, data: Structures) -> Capacity:
        """The capacity, grown by a tenth where the atoms do not fit."""
        needs = (len(data.species) + 1, max(1, len(data.receivers)))
        if needs[0] > self.capacity[1] or needs[1] > self.capacity[2]:
            sizes = [old if need <= old else -(-int(1.1 * need) // step) * step for old, need, step in zip(self.capacity[1:], needs, (8, 64), strict=True)]
            self.capacity, self.compiled = (2, max(sizes[0], needs[0]), max(sizes[1], needs[1])), None
        return self.capacity

    def _compiled(self) -> Any:
        graph = self.graph(self.capacity)
        if self.place is None:
            return Compiled(graph)
        return import_module(ON_DEVICE).OnDevice(graph, self.known, self.place, self.traced.origins, self.dtype)

    def graph(self, capacity: Capacity) -> dict[str, Node]:
        """The function's results over the fields of a packed batch of this capacity, ready for a backend."""
        rows = dict(zip(("structures", "atoms", "edges"), capacity, strict=True))
        args = []
        for name in self.function.parameters.required:
            dtype, shape, of = GRAPH_FIELDS[name]
            args.append(Tensor(build("input", name=name, dtype=dtype, shape=(rows[of], *shape), batch=False)))
        value, _ = trace_call(self.loaded.ev, self.function, args, {}, self.traced.registry, False)
        if not isinstance(value, tuple) or len(value) not in (2, 3) or not all(isinstance(v, Tensor) for v in value):
            fail("E-RUN-055", f"`{self.function.name}` must return (list energy forces) or (list energy forces stress)", self.function.span)
        results = {name: v.node for name, v in zip(RESULTS, value, strict=False)}
        expanded = expand_gradients(results, self.traced.origins)
        return simplify(apply_precision(expanded, self.precision, self.traced.origins), self.traced.origins)

