"""Every kernel of FILE beside the interpreter, in value and gradient; on a machine without a GPU under Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from sexpgpu.diagnostics import Diagnostic, problem
from sexpgpu.doctor import Ask, Check, Fact
from sexpgpu.doctor.child import kernels

SECONDS = 1800.0


def run(ask: Ask) -> Iterator[Fact | Diagnostic]:
    """E-DEV-010 for each kernel that gives other numbers, E-DEV-011 where they cannot be run."""
    if not ask.known.get("runs"):
        return
    if find_spec("triton") is None:
        yield problem("E-DEV-008", "Triton is not installed, and the kernels are written in it", help="pip install triton").diagnostic
        return
    chosen = ask.selection
    question = {"file": ask.file, "variant": chosen.variant, "sets": list(chosen.sets), "devices": list(ask.settings.devices or ()), "asked": ask.settings.device == "cuda"}
    environ = {} if ask.settings.device == "cuda" else {"TRITON_INTERPRET": "1"}
    yield from kernels(ask, question, SECONDS - 10, **environ)


CHECK = Check("numerics", "kernels", "error", SECONDS, run)
