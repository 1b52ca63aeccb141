"""Every op case of tests/ops as a GPU would run it, on tensors that have a device and no memory: `python without_device.py DTYPE`; with `examples`, the
step, the update and the evaluations of example programs, as they are and in f64.

Calls of libraries run on fake tensors, which refuse operands of two devices; whatever touches a tensor of the CPU is told. Each launch of a kernel, and
each that is to be compiled ahead, becomes Triton's IR for sm_90, where its types are checked. Neither is seen on the CPU: there, calls are the references
of the same device, and the interpreter takes any types. `planted` in place of a type: a fault of either kind, to try this script.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

os.environ["TESTED_DEVICE"] = "cuda"  # no interpreter
os.environ.pop("TRITON_INTERPRET", None)
os.environ["TRITON_ALWAYS_COMPILE"] = "1"  # what Triton finds in its cache, of another test, it does not check

from harness import tell  # first: it chooses the interpreter

# isort: split
import torch
import triton
import triton.language as tl
from op_cases import CASES
from ops_in_triton import graph_of
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import JITFunction, MockTensor

from sexpgpu import compiler
from sexpgpu.backends.cuda import library, rank_maps
from sexpgpu.backends.cuda.cartesian.launch import runner
from sexpgpu.backends.cuda.executable import Bound, Compiled
from sexpgpu.backends.interpreter.dtypes import TORCH
from sexpgpu.ir import Node
from sexpgpu.ops import table
from sexpgpu.ops.definition import OpProblem
from sexpgpu.passes.schedule.fuse import Call

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = {"digits": (), "char_lm": ("layers=1", "d-model=64", "heads=2", "context=64", "batch=4"), "potential": ("channels=8", "batch=4")}
FAKE = torch.device("meta")  # torch without CUDA indexes no tensor of `cuda`


class Checked(Exception):
    """The types of a kernel are checked, and no more of it is compiled."""


class Watch(TorchDispatchMode):
    """Keeps the calls of torch's ops that have to do with a tensor of the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.wrong: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if any(isinstance(x, torch.Tensor) and x.device.type == "cpu" for x in tree_leaves((args, kwargs, found))):
            self.wrong.append(f"{func} with a tensor of the CPU")
        return found


class Launches:
    """What stands for Triton's launch: each form of a kernel once."""

    def __init__(self) -> None:
        self.seen: set[Any] = set()
        self.wrong: list[str] = []
        self._run = JITFunction.run

    def run(self, function: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        given = [x.dtype if isinstance(x, torch.Tensor) else x for x in arguments]
        key = (function, *map(repr, given), *sorted(options.items()))
        if key in self.seen:
            return
        self.seen.add(key)
        try:
            self._run(function, *(MockTensor(x) if isinstance(x, torch.dtype) else x for x in given), grid=(1,), warmup=True, **options)
        except Checked:
            return
        except Exception as error:  # noqa: BLE001 - reported as a failure of the kernel
            self.wrong.append(f"{function.__name__} of {given}: {type(error).__name__}: {str(error)[-300:]}")
        else:
            self.wrong.append(f"{function.__name__}: was not checked")


def stop(backend: Any, stages: dict[str, Any], *rest: Any) -> None:
    def checked(*words: Any) -> None:
        raise Checked

    stages["ttir"] = checked


def empty(shape: Any, dtype: str) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=TORCH[dtype], device=FAKE)


def draws(what: str, parts: tuple[Any, ...]) -> torch.Tensor:
    return empty((2,) if what == "key" else (), "i64")


def case(results: dict[str, Any], launches: Launches, watch: Watch) -> None:
    """Runs a graph. Its tensors are made under the modes of the caller."""
    compiled = Compiled(results, dict.fromkeys(results), "cuda")
    compiled.device = FAKE
    for launch in compiled.schedule.launches:
        if isinstance(launch, Call) and launch.node.op in library.AHEAD:
            for function, arguments, options in library.AHEAD[launch.node.op](launch.node):
                launches.run(function, tuple(arguments), dict(options))
    leaves = {leaf: empty(leaf.type.shape, leaf.type.dtype) for leaf in compiled.leaves}
    into = {name: empty(node.type.shape, node.type.dtype) for name, node in results.items()}
    arena = torch.empty(compiled.plan.size, dtype=torch.uint8, device=FAKE)
    bound = Bound(compiled, leaves, into, arena, draws)
    watch.wrong.clear()  # constants are copied from the CPU before the first launch
    bound.launch()


@triton.jit
def narrow_total(x):
    total = tl.zeros((8,), tl.float32)
    for _ in range(3):
        total += tl.load(x + tl.arange(0, 8))
    tl.store(x + tl.arange(0, 8), total)


def planted(node: Any, operands: Any) -> torch.Tensor:
    """A reference that makes its tensors on the CPU, beside a kernel that adds f64 in f32."""
    narrow_total[(1,)](operands[0])
    found: torch.Tensor = table()[node.op].reference(torch, node, operands)
    return found


def of_ops(dtype: str) -> Iterator[tuple[str, dict[str, Node]]]:
    """Each op case, its value and gradients."""
    for one in CASES:
        if dtype != "planted" or one.op == "rank-map":
            with suppress(OpProblem):  # not an op of this type
                yield str(one), graph_of(one, "f64" if dtype == "planted" else dtype)[0]


def of_examples() -> Iterator[tuple[str, dict[str, Node]]]:
    for file, sets in EXAMPLES.items():
        loaded = compiler.load(str(ROOT / "examples" / f"{file}.lisp"), compiler.Selection(sets=sets))
        chosen = next(iter(loaded.experiment.runs.values()))
        for run in (chosen, replace(chosen, precision="f64")):
            staged, name = compiler.stages(loaded, run, "cuda"), f"{file} in {run.precision}"
            yield f"{name}: forward and backward", dict(staged.micro(True))
            yield f"{name}: update", dict(staged.update(True))
            for e in run.evals:
                size = e.data.capacity if e.data.source.structures else e.data.batch
                yield f"{name}: evaluation {e.name}", dict(staged.evaluation(e.name, size)[1])


def main(what: str) -> tuple[list[str], int]:
    if what == "planted":
        rank_maps.reference = planted  # type: ignore[assignment]
    failures, launches = [], Launches()
    target = SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0, get_current_stream=lambda device: 0)
    triton.runtime.driver.set_active(target)
    with (
        patch.object(JITFunction, "run", lambda function, *arguments, grid, warmup, **options: launches.run(function, arguments, options)),
        patch.object(CUDABackend, "add_stages", stop),
        patch.object(library, "on_device", lambda: runner(False, "none")),  # no measurement chose its tiles
        torch.no_grad(),
    ):
        for one, results in of_examples() if what == "examples" else of_ops(what):
            watch, launches.wrong = Watch(), []
            with FakeTensorMode(allow_non_fake_inputs=True), watch:
                try:
                    case(results, launches, watch)
                except Exception as error:  # noqa: BLE001 - reported as a failure of the case
                    launches.wrong.append(f"{type(error).__name__}: {error}"[:300])
            failures += [f"{one}: {text}" for text in dict.fromkeys([*launches.wrong, *watch.wrong])]
    return failures, len(launches.seen)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        tell(*main(sys.argv[1]))
