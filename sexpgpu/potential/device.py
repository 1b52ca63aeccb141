"""A potential's graph on a GPU: fields that stay where they are, and one CUDA graph that is replayed for every structure."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from sexpgpu.backends.cuda.device import interpreted, memory_errors, open_device
from sexpgpu.backends.cuda.executable import Bound, Compiled
from sexpgpu.backends.cuda.program import Replay
from sexpgpu.backends.interpreter.program import source_of
from sexpgpu.ir import Node, Origins
from sexpgpu.settings import load


def opened() -> torch.device:
    """The GPU that SEXPGPU_DEVICES names, or the only one; the CPU under Triton's interpreter. Raises E-DEV-…"""
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    open_device(load(os.environ).devices)
    return torch.device("cpu" if interpreted() else "cuda")


class OnDevice:
    """`results` over tensors of the device: `known` by (kind, name), and fields [shape of their inputs] that `run` fills.

    The graph is compiled, launched once to set up the libraries, and captured in the constructor. Sums have a fixed order.
    """

    def __init__(self, results: Mapping[str, Node], known: Mapping[tuple[str, str], torch.Tensor], device: torch.device, origins: Origins, dtype: torch.dtype):
        self.device = device
        self.compiled = Compiled(results, None, device.type, origins)
        self.fields: dict[str, torch.Tensor] = {}
        leaves = {}
        for leaf in self.compiled.leaves:
            kind, name = source_of(leaf)
            if kind == "input":
                made = torch.zeros(leaf.type.shape, dtype=torch.int32 if leaf.type.dtype == "i32" else dtype, device=device)
                self.fields[name] = made
                leaves[leaf] = made
            else:
                leaves[leaf] = known[kind, name].to(device)
        with memory_errors(), torch.no_grad(), _full_precision():
            self.bound = Bound(self.compiled, leaves, {}, None, _no_draws, True)
            self.replay = Replay(self.bound.launch, device, None)

    def fill(self, values: Mapping[str, torch.Tensor]) -> None:
        """New fields; those that the graph does not read are left out."""
        for name, tensor in self.fields.items():
            tensor.copy_(values[name])

    def run(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The results for these fields, on the host."""
        with torch.no_grad():
            self.fill(values)
            self.replay.run()
            return {name: self.bound.result(name).cpu() for name in self.compiled.results}


@contextmanager
def _full_precision() -> Iterator[None]:
    """torch's switch as a potential has it, while its launches are made: no product rounds its operands."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _no_draws(what: str, parts: tuple) -> torch.Tensor:
    raise LookupError("a potential draws nothing")
