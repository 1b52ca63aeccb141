"""Symmetries and derivatives of FILE's potential, where it has one, on random structures; its data is not opened."""

from __future__ import annotations

from collections.abc import Iterator

from sexpgpu.diagnostics import Diagnostic, fail, problem
from sexpgpu.doctor import Ask, Check, Fact
from sexpgpu.potential import Potential, check
from sexpgpu.potential.model import FUNCTIONS
from sexpgpu.potential.symmetry import BEYOND

HELP = {BEYOND: ":cutoff of the source is below the radius at which the file's radial functions end: one knob for both, as in examples/potential.lisp"}


def run(ask: Ask) -> Iterator[Fact | Diagnostic]:
    """E-RUN-056 for each law that is broken. Leaves `laws`."""
    assert ask.file is not None and ask.selection is not None
    file = ask.file
    loaded = ask.known.get("loaded")
    if loaded is None:
        return
    trained = next((r.name for r in loaded.experiment.runs.values() if r.data.source.structures), None)
    if trained is None or not any(loaded.ev.main.env.lookup(name) is not None for name in FUNCTIONS):
        if ask.weights is not None:
            fail("E-ENV-006", f"--weights is of an interatomic potential, and {file} has none", help="leave out --weights; `sexpgpu eval` tries the weights of any model")
        return
    made: list[Potential] = []

    def make(precision: str) -> Potential:
        made.append(Potential(file, ask.weights, run=trained, sets=ask.selection.sets, variant=ask.selection.variant, precision=precision))
        return made[-1]

    found = check(make)
    for line in made[0].warnings if made else ():
        yield "weights", line
    ask.known["laws"] = found
    yield "laws", f"{sum(f.holds for f in found)} of {len(found)} laws hold"
    for law in found:
        yield law.law, f"{law.deviation:.1e}, below {law.bound:.0e}{'' if law.holds else ': broken'}"
        if not law.holds:
            yield problem("E-RUN-056", f"the potential of {ask.file} breaks a law: {law.law} is off by {law.deviation:.1e}, and {law.bound:.0e} is allowed",
                          help=HELP.get(law.law, "look for what depends on an axis, a position or the order of atoms: sexpgpu explain FILE --after expanded")).diagnostic


CHECK = Check("laws", "laws", "error", 900, run)
