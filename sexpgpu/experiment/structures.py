"""Atomic structures: the keys of `extxyz` and `graphs`, units, and the form `(statistic source "name")`. Opens nothing."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from sexpgpu.diagnostics import suggestion
from sexpgpu.experiment.model import DataSource
from sexpgpu.experiment.schema import Given, Key, value_of
from sexpgpu.forms import ListForm, Symbol
from sexpgpu.lisp.tensors import origin
from sexpgpu.lisp.values import Tensor
from sexpgpu.ops import build

ELEMENTS = (
    "H He Li Be B C N O F Ne Na Mg Al Si P S Cl Ar K Ca Sc Ti V Cr Mn Fe Co Ni Cu Zn Ga Ge As Se Br Kr Rb Sr Y Zr Nb Mo Tc Ru Rh "
    "Pd Ag Cd In Sn Sb Te I Xe Cs Ba La Ce Pr Nd Pm Sm Eu Gd Tb Dy Ho Er Tm Yb Lu Hf Ta W Re Os Ir Pt Au Hg Tl Pb Bi Po At Rn Fr "
    "Ra Ac Th Pa U Np Pu Am Cm Bk Cf Es Fm Md No Lr Rf Db Sg Bh Hs Mt Ds Rg Cn Nh Fl Mc Lv Ts Og"
).split()
#: unit -> Å, and -> eV (CODATA 2018)
LENGTHS = {"angstrom": 1.0, "bohr": 0.529177210903, "nm": 10.0}
ENERGIES = {"eV": 1.0, "meV": 1e-3, "hartree": 27.211386245988, "rydberg": 13.605693122994, "kcal/mol": 4.184 * 0.010364269656262175,
            "kJ/mol": 0.010364269656262175}
LABELS = ("energy", "forces", "stress")

EXTXYZ_KEYS = {
    "elements": Key("names", "the elements, in the order of their numbers in `species`", required=True, evaluated=False),
    "cutoff": Key("number", "radius within which atoms are neighbours, in Å", required=True),
    "energy-key": Key("string", "the key of a frame's energy", "energy"),
    "forces-key": Key("string", "the property of an atom's forces", "forces"),
    "stress-key": Key("string", "the key of a frame's stress", "stress"),
    "length-unit": Key("symbol", "angstrom, bohr or nm", "angstrom", evaluated=False),
    "energy-unit": Key("symbol", "eV, meV, hartree, rydberg, kcal/mol or kJ/mol", "eV", evaluated=False),
    "required": Key("names", "labels that every frame has: energy, forces, stress", ("energy", "forces"), evaluated=False),
}
#: statistic -> whether it has a number for each element
STATISTICS = {"neighbours": False, "force-rms": False, "shifts": True}


def extxyz_options(ev: Any, given: dict[str, Given]) -> dict[str, Any]:
    """Plain values of the keys, checked."""
    options = {name: value_of(given, EXTXYZ_KEYS, name) for name in EXTXYZ_KEYS}
    for name in options["elements"]:
        if name not in ELEMENTS:
            raise ev.error("E-EVAL-103", f"extxyz: :elements: there is no element `{name}`", given["elements"].form, help=suggestion(name, ELEMENTS, "elements"))
    if not options["elements"] or len(set(options["elements"])) != len(options["elements"]):
        raise ev.error("E-EVAL-103", "extxyz: :elements names each element once, one at least", given["elements"].form)
    for key, table in (("length-unit", LENGTHS), ("energy-unit", ENERGIES)):
        if options[key] not in table:
            raise ev.error("E-EVAL-103", f"extxyz: :{key} `{options[key]}` is none of {', '.join(table)}", given[key].form, help=suggestion(options[key], table, "units"))
    for name in options["required"]:
        if name not in LABELS:
            raise ev.error("E-EVAL-103", f"extxyz: :required: there is no label `{name}`", given["required"].form, help=suggestion(name, LABELS, "labels"))
    if not options["cutoff"] > 0:
        raise ev.error("E-EVAL-103", "extxyz: :cutoff is a length above 0", given["cutoff"].form)
    plain = {k: list(v) if isinstance(v, tuple) else str(v) if isinstance(v, str) else v for k, v in options.items()}
    cutoff = options["cutoff"]
    return plain | {"cutoff": float(Fraction(cutoff) if isinstance(cutoff, Fraction) else cutoff)}


def statistic(ev: Any, form: ListForm, env: Any, sources: dict[str, DataSource]) -> Any:
    """`(statistic source "name")`: a number of the data, or one an element; kept in the checkpoint."""
    if len(form.items) != 3 or not isinstance(form.items[1], Symbol):
        raise ev.error("E-EVAL-104", '`statistic` is called as (statistic source "name")', form)
    source = form.items[1].name
    if source not in sources:
        raise ev.error("E-EVAL-107", f"there is no data source `{source}`", form.items[1], help=suggestion(source, sources, "sources"))
    name = ev.eval(form.items[2], env)
    if sources[source].format == "manifest":  # which there are is known when it is read
        if not isinstance(name, str) or not name:
            raise ev.error("E-EVAL-104", f'a statistic of a manifest is a number of a stage: (statistic {source} "easy/records")', form.items[2])
        with ev.provenance.origins.at(origin(ev, form.span)):
            return Tensor(build("statistic", name=f"{source}/{name}", data=source, shape=()))
    known = STATISTICS if sources[source].format == "extxyz" else {}
    if not isinstance(name, str) or name not in known:
        what = f"the source `{source}` has no statistic `{name}`" if known else f"`{sources[source].format}` has no statistics in this version"
        raise ev.error("E-EVAL-107", what, form.items[2], help=suggestion(str(name), known, "statistics"))
    shape = (len(sources[source].options["elements"]),) if known[name] else ()
    with ev.provenance.origins.at(origin(ev, form.span)):
        return Tensor(build("statistic", name=f"{source}/{name}", data=source, shape=shape))
