"""`SEXPGPU_EXPLAIN=kernels`: every launch or call of a step's graphs, with shape, dtype, model path, bytes, operations, and why it was
fused or was not. The CPU's needs no torch; that of `cuda` is of the program itself, which does, and Triton, but no GPU."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from sexpgpu.backends.interpreter.plan import run_plan
from sexpgpu.backends.interpreter.report import documents as call_documents
from sexpgpu.backends.interpreter.report import plan_lines, report_lines
from sexpgpu.diagnostics import fail
from sexpgpu.explain.cost import kind

CUDA = "sexpgpu.backends.cuda.report"


def cuda(name: str, staged: Any, ranks: int = 1) -> Any:
    """What a function of the other device's report says of the program, which is made for no device; of several ranks of the first's."""
    if find_spec("triton") is None:
        fail("E-DEV-008", "Triton is not installed, and the lowering for `cuda` writes for it", help="pip install triton, on Linux")
    module = import_module(CUDA)
    return getattr(module, name)(module.lowered(staged, ranks))


def lines(staged: Any, device: str) -> list[str]:
    """The report; `staged`: the stages of the run for the device's backend."""
    return report_lines(staged) if kind(device) == "cpu" else list(cuda("program_lines", staged))


def documents(staged: Any, device: str) -> list[Any]:
    """The same for `--json`: the graphs of a step, each with its calls or launches."""
    return call_documents(staged) if kind(device) == "cpu" else list(cuda("documents", staged))


def plan(staged: Any, threads: int = 1) -> list[str]:
    """The interpreter's memory plan: its parts, and what lies in memory at the peak of each graph."""
    return plan_lines(staged, run_plan(staged, threads), threads)
