"""Knobs: collected from all files before anything else, then chosen: `--set` over the variant over the default.

A variant's values see defaults that were computed from defaults alone; a knob's default sees the final
values of earlier knobs (language.md, Forms).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from sexpgpu.diagnostics import Diagnostic, Related, SexpError, SexpErrors, fail, one_or_all, problem, suggestion
from sexpgpu.experiment.model import Knob
from sexpgpu.experiment.schema import Key, datum, parse_keys
from sexpgpu.forms import Form, Keyword, ListForm, Literal, Symbol
from sexpgpu.lisp.values import Callable, plain, show, with_knobs
from sexpgpu.read.reader import read_datum

NAME = re.compile(r"[A-Za-z0-9._+*!?<>=-]+\Z")
KNOB_KEYS = {
    "min": Key("number", "the smallest value allowed"),
    "max": Key("number", "the largest value allowed"),
    "one-of": Key("any", "the values allowed, a list of data", evaluated=False),
}


@dataclass
class Declared:
    name: str
    form: ListForm
    default: Form
    doc: str
    keys: tuple[Form, ...]


@dataclass
class Variant:
    name: str
    form: ListForm
    extends: str | None
    values: dict[str, Form] = field(default_factory=dict)
    keys: dict[str, Keyword] = field(default_factory=dict)


def collect(ev: Any, files: list[list[Form]]) -> tuple[dict[str, Declared], dict[str, Variant]]:
    """Every top-level `defknob` and `defvariant` of the files, imports first."""
    knobs: dict[str, Declared] = {}
    variants: dict[str, Variant] = {}
    errors: list[Diagnostic] = []
    lost: set[str] = set()  # knobs whose form is wrong: that a variant sets one is no second mistake
    for forms in files:
        for form in forms:
            head = form.head() if isinstance(form, ListForm) else None
            try:
                if head == "defknob":
                    knob = _declared(ev, form)
                    _once(ev, "knobs", knob, knobs)
                elif head == "defvariant":
                    _once(ev, "variants", _variant(ev, form), variants)
            except SexpError as mistake:
                errors += mistake.diagnostics
                lost |= {item.name for item in form.items[1:2] if isinstance(item, Symbol)}
    for variant in variants.values():
        for name in variant.values:
            if name not in knobs and name not in lost:
                errors += ev.error(
                    "E-KNOB-001", f"variant `{variant.name}` sets `{name}`, and there is no such knob", variant.keys[name],
                    help=suggestion(name, knobs, "knobs"),
                ).diagnostics
    if errors:
        raise one_or_all(errors)
    return knobs, variants


def _once(ev: Any, what: str, made: Any, table: dict[str, Any]) -> None:
    if made.name in table:
        raise ev.error("E-KNOB-004", f"two {what} are named `{made.name}`", made.form, help="rename or remove one of them",
                       related=[Related(table[made.name].form.span, "first defined here")])
    table[made.name] = made


def _declared(ev: Any, form: ListForm) -> Declared:
    items = form.items
    if len(items) < 3 or not isinstance(items[1], Symbol):
        raise ev.error("E-EVAL-104", 'a knob is (defknob name default "doc" :min … :max … :one-of (…))', form)
    name = items[1].name
    if not NAME.match(name):
        raise ev.error("E-KNOB-008", f"`{name}` cannot name a knob: use letters, digits and . _ + -", items[1],
                       help=f"for example {re.sub(r'[^A-Za-z0-9._+-]+', '-', name)[:40]}; names with / are reserved for overrides")
    rest = items[3:]
    doc = ""
    if rest and isinstance(rest[0], Literal) and isinstance(rest[0].value, str):
        doc, rest = rest[0].value, rest[1:]
    return Declared(name, form, items[2], doc, rest)


def _variant(ev: Any, form: ListForm) -> Variant:
    items = form.items
    if len(items) < 2 or not isinstance(items[1], Symbol) or len(items) % 2:
        raise ev.error("E-EVAL-104", "a variant is (defvariant name :knob value …)", form)
    variant = Variant(items[1].name, form, None)
    for key, value in zip(items[2::2], items[3::2], strict=True):
        if not isinstance(key, Keyword):
            raise ev.error("E-EVAL-104", "a variant is (defvariant name :knob value …)", key)
        if key.name == "extends":
            if not isinstance(value, Symbol):
                raise ev.error("E-EVAL-104", ":extends takes the name of a variant", value)
            variant.extends = value.name
        elif key.name in variant.values:
            raise ev.error("E-KNOB-004", f"variant `{variant.name}` sets `{key.name}` twice", key)
        else:
            variant.values[key.name], variant.keys[key.name] = value, key
    return variant


def parse_sets(sets: list[str]) -> dict[str, str]:
    """`name=value` texts of `--set`, in order."""
    parsed: dict[str, str] = {}
    for text in sets:
        name, equals, value = text.partition("=")
        if not equals or not name:
            fail("E-KNOB-007", f"--set {text}: expected name=value", help="for example --set lr=1e-3")
        if name in parsed:
            fail("E-KNOB-006", f"--set {name}=… is given twice", help=f"keep one of --set {name}={parsed[name]} and --set {name}={value}")
        parsed[name] = value
    return parsed


def resolve(ev: Any, knobs: dict[str, Declared], variants: dict[str, Variant], chosen: str | None, sets: dict[str, str], env: Any) -> dict[str, Knob]:
    """The final knobs, in order of definition; several independent mistakes are reported in one go."""
    errors: list[SexpError] = []
    for name in sets:
        if name not in knobs:
            errors.append(_error("E-KNOB-001", f"--set {name}=…: there is no knob `{name}`", None, help=suggestion(name, knobs, "knobs")))
    if chosen is not None and chosen not in variants:
        errors.append(_error("E-KNOB-005", f"--variant {chosen}: there is no variant `{chosen}`", None, help=suggestion(chosen, variants, "variants")))
    if errors:
        raise SexpErrors(d for e in errors for d in e.diagnostics)
    defaults: dict[str, Any] = {}
    alone = env.child({})
    for declared in knobs.values():
        try:
            defaults[declared.name] = ev.eval(declared.default, alone)
        except SexpError as mistake:
            errors += [SexpError(_sooner(d, declared, knobs)) for d in ev.news(mistake)]
            ev.lost.add(declared.name)
            continue
        alone.define(declared.name, defaults[declared.name], declared.form.span)
    if errors:
        raise one_or_all(d for e in errors for d in e.diagnostics)
    from_variant = _variant_values(ev, variants, chosen, alone)
    result: dict[str, Knob] = {}
    final = env.child({})
    for declared in knobs.values():
        try:
            knob = _choose(ev, declared, sets, from_variant, chosen, final)
        except SexpError as e:
            errors.append(e)
            knob = Knob(declared.name, defaults[declared.name], "default", defaults[declared.name], "")
        result[declared.name] = knob
        final.define(declared.name, with_knobs(knob.value, frozenset([declared.name])), declared.form.span)
    if errors:
        raise SexpErrors(d for e in errors for d in e.diagnostics)
    return result


def _sooner(d: Diagnostic, declared: Declared, knobs: dict[str, Declared]) -> Diagnostic:
    """An unknown name that is a knob of a later line: what is missing is the order."""
    later = knobs.get(d.about) if d.code == "E-EVAL-001" else None
    span = later.form.span if later is not None else None
    if later is None or span is None:
        return d
    what = "itself" if later is declared else f"`{later.name}`, which is defined later, at line {span.source.line_column(span.start)[0]}"
    help_ = "give it a value" if later is declared else f"move (defknob {later.name} …) before (defknob {declared.name} …)"
    return problem("E-KNOB-010", f"the default of knob `{declared.name}` reads {what}", d.span, about=d.about, help=help_,
                   related=[] if later is declared else [Related(span, f"`{later.name}` is defined here")]).diagnostic


def _error(code: str, message: str, span: Any, **facts: Any) -> SexpError:
    try:
        fail(code, message, span, **facts)
    except SexpError as e:
        return e


def _variant_values(ev: Any, variants: dict[str, Variant], chosen: str | None, env: Any) -> dict[str, tuple[Any, Form]]:
    chain: list[Variant] = []
    name = chosen
    while name is not None:
        variant = variants.get(name)
        if variant is None:
            raise ev.error("E-KNOB-005", f"variant `{chain[-1].name}` extends `{name}`, which is not defined", chain[-1].form, help=suggestion(name, variants, "variants"))
        if variant in chain:
            raise ev.error("E-KNOB-009", f"variant `{name}` extends itself: " + " -> ".join([*(v.name for v in chain), name]), variant.form, help="take the :extends out of one of them")
        chain.append(variant)
        name = variant.extends
    values: dict[str, tuple[Any, Form]] = {}
    for variant in reversed(chain):
        for key, form in variant.values.items():
            values[key] = (ev.eval(form, env), form)
    return values


def _choose(ev: Any, declared: Declared, sets: dict[str, str], variant: dict[str, tuple[Any, Form]], chosen: str | None, env: Any) -> Knob:
    keys = parse_keys(ev, f"knob {declared.name}", declared.form, declared.keys, KNOB_KEYS, env)
    default = plain(ev.eval(declared.default, env))
    one_of = _one_of(ev, declared, keys["one-of"]) if "one-of" in keys else None
    minimum, maximum = (keys[k].value if k in keys else None for k in ("min", "max"))
    if minimum is not None and maximum is not None and not minimum <= maximum:
        raise ev.error("E-KNOB-011", f"knob {declared.name}: :min {_text(minimum)} is above :max {_text(maximum)}, so no value fits",
                       keys["min"].form, help=f"exchange them: :min {_text(maximum)} :max {_text(minimum)}")
    value, source, via, at = default, "default", "", declared.form.span
    if declared.name in variant:
        raw, form = variant[declared.name]
        value, source, via, at = _fits(declared, default, plain(raw), form.span), "variant", str(chosen), form.span
    if declared.name in sets:
        value, source, via, at = _from_text(declared, default, sets[declared.name]), "set", "--set", None
    place = at.place if at is not None else f"--set {declared.name}"
    knob = Knob(declared.name, value, source, default, place, declared.doc, minimum, maximum, one_of, via=via, span=declared.form.span)
    _check_bounds(knob, at)
    return knob


def _one_of(ev: Any, declared: Declared, given: Any) -> tuple[Any, ...]:
    if not isinstance(given.value, tuple) or not given.value:
        raise ev.error("E-EVAL-103", f"knob {declared.name}: :one-of needs a list of values", given.form, help="for example :one-of (relu gelu)")
    return given.value


def _from_text(declared: Declared, default: Any, text: str) -> Any:
    """A `--set` text as a datum of the knob's kind; string and symbol knobs take the raw text."""
    if isinstance(default, str):
        return text
    if isinstance(default, Symbol):
        return Symbol(text)
    try:
        form = read_datum(text, f"--set {declared.name}")
    except SexpError as e:
        fail("E-KNOB-007", f"--set {declared.name}={text}: the value is not one datum", None, notes=[e.diagnostic.message], help=f"its default is {_text(default)}; write one number, name, string or list of that kind, quoted for the shell: --set '{declared.name}=…'")
    return _fits(declared, default, datum(None, form, None), form.span)


def _fits(declared: Declared, default: Any, value: Any, span: Any) -> Any:
    """`value` in the kind of the knob's default: int promotes to float, a float knob takes ratios, never the reverse."""
    number = isinstance(value, int | float | Fraction) and not isinstance(value, bool)
    if isinstance(default, bool):
        ok, wanted = isinstance(value, bool), "true or false"
    elif isinstance(default, int):
        ok, wanted = number and value == value and abs(value) != float("inf") and value == int(value), "an integer"
        value = int(value) if ok else value
    elif isinstance(default, float | Fraction):
        ok, wanted = number, "a number"
        value = float(value) if ok and isinstance(default, float) else value
    elif isinstance(default, str):
        ok, wanted = isinstance(value, str), "a string"
    elif isinstance(default, Symbol):
        ok, wanted = isinstance(value, Symbol), "a name"
    elif isinstance(default, tuple):
        ok, wanted = isinstance(value, tuple), "a list such as [1 2]"
    else:
        ok, wanted = True, ""
    if not ok:
        fail("E-KNOB-003", f"knob `{declared.name}` is {wanted}, and {_text(value)} is not", span, related=[Related(declared.form.span, "defined here")],
             help=f"its default is {_text(default)}: the kind of a knob is that of its default")
    return value


def _text(value: Any) -> str:
    return show(value)


def _check_bounds(knob: Knob, at: Any) -> None:
    related = [Related(knob.span, "defined here")] if at != knob.span else []
    how = f" (by {knob.via})" if knob.source == "set" else ""
    if (knob.minimum is not None or knob.maximum is not None) and not isinstance(knob.value, int | float | Fraction):
        fail("E-KNOB-003", f"knob `{knob.name}` is {_text(knob.value)}; :min and :max go with numbers only", knob.span)
    if knob.minimum is not None and not knob.value >= knob.minimum:
        fail("E-KNOB-002", f"knob `{knob.name}` is {_text(knob.value)}{how}, and its :min is {_text(knob.minimum)}", at, related=related, help=f"take {_text(knob.minimum)} or more, or change the :min")
    if knob.maximum is not None and not knob.value <= knob.maximum:
        fail("E-KNOB-002", f"knob `{knob.name}` is {_text(knob.value)}{how}, and its :max is {_text(knob.maximum)}", at, related=related, help=f"take {_text(knob.maximum)} or less, or change the :max")
    if knob.one_of is not None and knob.value not in knob.one_of:
        known = [_text(v) for v in knob.one_of]
        fail(
            "E-KNOB-002", f"knob `{knob.name}` is {_text(knob.value)}{how}, and must be one of {', '.join(known)}", at,
            related=related, help=_meant(knob, known),
        )


def _meant(knob: Knob, known: list[str]) -> tuple[str, ...] | str:
    """`(defknob act relu … :one-of (relu tanh))`: the default is evaluated, so a name that means something needs a quote."""
    name = knob.value.name if isinstance(knob.value, Callable) else ""
    if name in known:
        return f"the default is evaluated; for the name itself write '{name}"
    return suggestion(_text(knob.value), known, "values")
