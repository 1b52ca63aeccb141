"""An index that was out of range on the device, named by the interpreter: it runs the graph again and looks."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from sexpgpu.backends.interpreter.executable import Executable
from sexpgpu.backends.interpreter.indices import refuse_index
from sexpgpu.diagnostics import problem
from sexpgpu.ir import Node, Origins
from sexpgpu.ops.random import DrawContext


def raise_bad_index(
    results: Mapping[str, Node], value: Callable[[Node], torch.Tensor], place: tuple[int, int, int], origins: Origins, last: bool = True
) -> None:
    """Raises E-RUN-031 for the first index of the graph that is out of range. place: seed, step, and number of the first
    sample; `last`: raise it without a name where none is found, else return."""
    executable = Executable(results, fused=False)
    bindings = {leaf: value(leaf).cpu() for leaf in executable.leaves}
    refuse_index(executable, bindings, DrawContext(*place, executable.samples), origins)
    if last:
        raise problem(
            "E-RUN-031", "an index of this step was out of range on the device, and is in range on the CPU",
            help="an index that follows from a value near a bound differs by rounding: clamp it", exit_code=3,
        )
