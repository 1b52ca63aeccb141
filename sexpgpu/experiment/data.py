"""`defdata`, `batches` and `windows`: what a file says of its data. Opens nothing; `run/data/` has the readers."""

from __future__ import annotations

import os
from fractions import Fraction
from typing import Any

from sexpgpu.diagnostics import suggestion
from sexpgpu.experiment.model import Batches, DataSource, Field
from sexpgpu.experiment.schema import Given, Key, datum, parse_keys, value_of
from sexpgpu.forms import Form, Keyword, ListForm, Symbol
from sexpgpu.ir import DTYPES

FIELDS = Key("any", "((name dtype [shape] :scale s) …)", evaluated=False, required=True)
#: format -> keys of its form; the reader of the same name is in run/data/
FORMATS: dict[str, dict[str, Key]] = {
    "csv": {"fields": FIELDS},
    "jsonl": {"fields": FIELDS},
    "npy": {"fields": FIELDS},
    "text": {"tokens": Key("symbol", "how text becomes tokens: bytes", "bytes", evaluated=False)},
    "tokens": {"dtype": Key("symbol", "u16 or u32, little-endian", "u16", evaluated=False)},
}
#: (format, key) -> the values it takes
CHOICES = {("text", "tokens"): ("bytes",), ("tokens", "dtype"): ("u16", "u32")}
LATER = ("extxyz", "manifest")
DATA_KEYS = {"split": Key("any", "((part share) …), shares sum to 1", evaluated=False)}
BATCH_KEYS = {
    "split": Key("symbol", "a part of the source's :split", evaluated=False),
    "batch": Key("integer", "samples of one optimizer step, or of one evaluation batch", required=True, minimum=1),
    "shuffle": Key("boolean", "a permutation of its own for every epoch", False),
    "limit": Key("integer", "at most this many batches of an evaluation", minimum=1),
}
WINDOW_KEYS = BATCH_KEYS | {
    "context": Key("integer", "tokens of one window", required=True, minimum=1),
    "stride": Key("integer", "tokens from one window to the next; without it, :context", minimum=1),
}
#: head of a run's or evaluation's :data -> its keys
WAYS = {"batches": BATCH_KEYS, "windows": WINDOW_KEYS}


def defdata(ev: Any, form: ListForm, env: Any, folder: str) -> DataSource:
    """The source that `(defdata name (format location …) :split …)` describes."""
    items = form.items
    usage = 'a source is (defdata name (csv "file.csv" :fields …) :split ((train 9/10) (valid 1/10)))'
    if len(items) < 3 or not isinstance(items[1], Symbol) or not isinstance(items[2], ListForm):
        raise ev.error("E-EVAL-104", usage, form)
    source = items[2]
    name = source.head() or ""
    if name in LATER:
        raise ev.error("E-EVAL-115", f"the data format `{name}` is not in this version yet", source)
    if name not in FORMATS:
        raise ev.error("E-EVAL-107", f"there is no data format `{name}`", source, help=suggestion(name, FORMATS, "formats"))
    if len(source.items) < 2 or isinstance(source.items[1], Keyword):
        raise ev.error("E-EVAL-104", f"`{name}` needs the location of its file first: ({name} \"file\" …)", source)
    location = ev.eval(source.items[1], env)
    if not isinstance(location, str) or not location:
        raise ev.error("E-EVAL-103", f"`{name}`: the location must be a string", source.items[1])
    given = parse_keys(ev, name, source, source.items[2:], FORMATS[name], env)
    keys = parse_keys(ev, "defdata", form, items[3:], DATA_KEYS, env)
    split = _split(ev, keys["split"].form, env) if "split" in keys else ()
    fields = _fields(ev, given["fields"].form, env) if "fields" in given else ()
    options = {key: _option(ev, name, key, given) for key in FORMATS[name] if key != "fields"}
    return DataSource(items[1].name, name, str(location), folder, fields, options, split, form.span, source.items[1].span)


def _option(ev: Any, name: str, key: str, given: dict[str, Given]) -> Any:
    value, choices = value_of(given, FORMATS[name], key), CHOICES[name, key]
    if value not in choices:
        raise ev.error("E-EVAL-103", f"{name}: :{key} `{value}` is none of {', '.join(choices)}", given[key].form,
                       help=suggestion(value, choices, "values"))
    return value


def _fields(ev: Any, form: Form, env: Any) -> tuple[Field, ...]:
    if not isinstance(form, ListForm) or not form.items:
        raise ev.error("E-EVAL-103", ":fields is a list of fields: ((image f32 [64]) (label i32))", form)
    fields: dict[str, Field] = {}
    for item in form.items:
        field = _field(ev, item, env)
        if field.name in fields:
            raise ev.error("E-EVAL-104", f"two fields are named `{field.name}`", item)
        fields[field.name] = field
    return tuple(fields.values())


def _field(ev: Any, form: Form, env: Any) -> Field:
    usage = "a field is (name dtype [shape] :scale number)"
    if not isinstance(form, ListForm) or len(form.items) < 2 or not all(isinstance(i, Symbol) for i in form.items[:2]):
        raise ev.error("E-EVAL-104", usage, form)
    name, dtype = form.items[0].name, form.items[1].name
    if dtype not in DTYPES:
        raise ev.error("E-EVAL-103", f"field `{name}`: there is no dtype `{dtype}`", form.items[1], help=suggestion(dtype, DTYPES, "dtypes"))
    rest = form.items[2:]
    shape: tuple[int, ...] = ()
    if rest and not isinstance(rest[0], Keyword):
        value = datum(ev, rest[0], env)
        if not isinstance(value, tuple) or not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in value):
            raise ev.error("E-EVAL-103", f"field `{name}`: a shape is a list of positive integers, such as [64]", rest[0])
        shape, rest = tuple(int(n) for n in value), rest[1:]
    scale = None
    if rest:
        if len(rest) != 2 or not isinstance(rest[0], Keyword) or rest[0].name != "scale":
            raise ev.error("E-EVAL-104", usage, rest[0])
        scale = datum(ev, rest[1], env)
        if not isinstance(scale, int | float | Fraction) or isinstance(scale, bool):
            raise ev.error("E-EVAL-103", f"field `{name}`: :scale needs a number", rest[1])
    return Field(name, dtype, shape, scale, form.span)


def _split(ev: Any, form: Form, env: Any) -> tuple[tuple[str, Fraction], ...]:
    usage = ":split is a list of parts with shares that sum to 1: ((train 9/10) (valid 1/10))"
    value = datum(ev, form, env)
    if not isinstance(value, tuple) or not value:
        raise ev.error("E-EVAL-103", usage, form)
    parts: dict[str, Fraction] = {}
    for part in value:
        if not isinstance(part, tuple) or len(part) != 2 or not isinstance(part[0], Symbol):
            raise ev.error("E-EVAL-103", usage, form)
        name, share = part[0].name, part[1]
        if not isinstance(share, int | float | Fraction) or isinstance(share, bool) or not 0 < share <= 1:
            raise ev.error("E-EVAL-103", f"the share of `{name}` must be above 0 and at most 1", form)
        if name in parts:
            raise ev.error("E-EVAL-103", f"two parts are named `{name}`", form)
        parts[name] = Fraction(str(share)) if isinstance(share, float) else Fraction(share)
    if sum(parts.values()) != 1:
        raise ev.error("E-EVAL-103", f"the shares of :split sum to {sum(parts.values())}, not to 1", form)
    return tuple(parts.items())


def batches(ev: Any, form: Form, env: Any, sources: dict[str, DataSource], training: bool) -> Batches:
    """`(batches source :split s :batch b …)` or `(windows …)` as data; `training` refuses `:limit`."""
    if not isinstance(form, ListForm) or form.head() is None:
        raise ev.error("E-EVAL-103", ":data is a form such as (batches digits :split train :batch 64 :shuffle true)", form)
    way = form.head() or ""
    if way == "graphs":
        raise ev.error("E-EVAL-115", f"`{way}` is not in this version yet", form)
    if way not in WAYS:
        raise ev.error("E-EVAL-107", f"there is no way `{way}` to make batches", form, help=suggestion(way, WAYS, "ways"))
    if len(form.items) < 2 or not isinstance(form.items[1], Symbol):
        example = "(batches digits :batch 64)" if way == "batches" else "(windows corpus :context 128 :batch 32)"
        raise ev.error("E-EVAL-104", f"{way} needs the name of a source first: {example}", form)
    name = form.items[1].name
    if name not in sources:
        raise ev.error("E-EVAL-107", f"there is no data source `{name}`", form.items[1], help=suggestion(name, sources, "sources"))
    source = sources[name]
    if source.stream != (way == "windows"):
        kind, other = ("one sequence of tokens", "windows") if source.stream else ("rows of fields", "batches")
        raise ev.error("E-DATA-030", f"`{way}` cannot use the source `{name}`: `{source.format}` gives {kind}", form.items[1],
                       help=f"({other} {name} {':context 128 ' if source.stream else ''}:batch 32 …)")
    keys = WAYS[way]
    given = parse_keys(ev, way, form, form.items[2:], keys, env)
    split = value_of(given, keys, "split")
    if split is not None and split not in dict(source.split):
        raise ev.error("E-EVAL-107", f"the source `{name}` has no part `{split}`", given["split"].form, help=suggestion(split, dict(source.split), f"parts of {name}"))
    if "limit" in given and training:
        raise ev.error("E-EVAL-103", ":limit counts the batches of an evaluation, and this is a run's :data", given["limit"].form, help="use :steps of the run")
    values = {key: value_of(given, keys, key) for key in keys if key != "split"}
    if way == "windows" and values["stride"] is None:
        values["stride"] = values["context"]
    return Batches(source, split, span=form.span, **values)


def folder_of(path: str) -> str:
    return os.path.dirname(os.path.abspath(path))
