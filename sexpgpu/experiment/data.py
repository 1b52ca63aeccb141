"""`defdata`, `batches` and `windows`: what a file says of its data. Opens nothing; `run/data/` has the readers."""

from __future__ import annotations

import os
from fractions import Fraction
from typing import Any

from sexpgpu.diagnostics import suggestion
from sexpgpu.experiment.model import Batches, DataSource, Field
from sexpgpu.experiment.schema import Given, Key, datum, parse_keys, value_of
from sexpgpu.experiment.structures import EXTXYZ_KEYS, extxyz_options
from sexpgpu.forms import Form, Keyword, ListForm, Symbol
from sexpgpu.ir import DTYPES

FIELDS = Key("any", "((name dtype [shape] :scale s :pad p) …)", evaluated=False, required=True)
#: format -> keys of its form; the reader of the same name is in run/data/
FORMATS: dict[str, dict[str, Key]] = {
    "csv": {"fields": FIELDS},
    "jsonl": {"fields": FIELDS},
    "npy": {"fields": FIELDS},
    "text": {"tokens": Key("any", 'how text becomes tokens: bytes, or (bpe "tokenizer.json")', "bytes", evaluated=False)},
    "tokens": {"dtype": Key("symbol", "u16 or u32, little-endian", "u16", evaluated=False)},
    "manifest": {
        "fields": FIELDS,
        "split": Key("text", "the manifest's split, where `batches` names none", evaluated=False),
        "stages": Key("any", "(easy hard), or by step: ((easy :until 1000) (hard))", evaluated=False),
    },
    "extxyz": EXTXYZ_KEYS,
}
PADDED = ("jsonl", "manifest")  # formats with lists of any length
DATA_KEYS = {"split": Key("any", "((part share) …), shares sum to 1", evaluated=False)}
BATCH_KEYS = {
    "split": Key("symbol", "a part of the source's :split, or a split of its manifest", evaluated=False),
    "batch": Key("integer", "samples of one optimizer step, or of one evaluation batch", required=True, minimum=1),
    "shuffle": Key("boolean", "a permutation of its own for every epoch", False),
    "limit": Key("integer", "at most this many batches of an evaluation", minimum=1),
}
WINDOW_KEYS = BATCH_KEYS | {
    "context": Key("integer", "tokens of one window", required=True, minimum=1),
    "stride": Key("integer", "tokens from one window to the next; without it, :context", minimum=1),
}
GRAPH_KEYS = BATCH_KEYS | {
    "buckets": Key("integer", "sizes of packed batches, each a graph of its own", 3, minimum=1),
}
#: head of a run's or evaluation's :data -> its keys
WAYS = {"batches": BATCH_KEYS, "windows": WINDOW_KEYS, "graphs": GRAPH_KEYS}
#: what a source gives -> its name, and the way to make batches of it
KINDS = {"rows": ("rows of fields", "batches"), "stream": ("one sequence of tokens", "windows"), "structures": ("atomic structures", "graphs")}


def defdata(ev: Any, form: ListForm, env: Any, folder: str) -> DataSource:
    """The source that `(defdata name (format location …) :split …)` describes."""
    items = form.items
    usage = 'a source is (defdata name (csv "file.csv" :fields …) :split ((train 9/10) (valid 1/10)))'
    if len(items) < 3 or not isinstance(items[1], Symbol) or not isinstance(items[2], ListForm):
        raise ev.error("E-EVAL-104", usage, form)
    source = items[2]
    name = source.head() or ""
    if name not in FORMATS:
        raise ev.error("E-EVAL-107", f"there is no data format `{name}`", source, help=suggestion(name, FORMATS, "formats"))
    if len(source.items) < 2 or isinstance(source.items[1], Keyword):
        raise ev.error("E-EVAL-104", f"`{name}` needs the location of its file first: ({name} \"file\" …)", source)
    location = ev.eval(source.items[1], env)
    if not isinstance(location, str) or not location or "\0" in location:
        raise ev.error("E-EVAL-103", f"`{name}`: the location must be a string", source.items[1])
    given = parse_keys(ev, name, source, source.items[2:], FORMATS[name], env)
    keys = parse_keys(ev, "defdata", form, items[3:], DATA_KEYS, env)
    split = _split(ev, keys["split"].form, env) if "split" in keys else ()
    if split and name == "manifest":
        raise ev.error("E-EVAL-103", "a manifest has its splits already; :split of defdata would divide them again", keys["split"].form,
                       help='(manifest "…" :split train …), or (batches … :split train …)')
    fields = _fields(ev, given["fields"].form, env) if "fields" in given else ()
    for field in fields:
        if field.pad is not None and name not in PADDED:
            raise ev.error("E-EVAL-103", f"field `{field.name}`: every row of {name} has one length; :pad is for {' and '.join(PADDED)}", given["fields"].form)
    options = OPTIONS[name](ev, given) if name in OPTIONS else {}
    return DataSource(items[1].name, name, str(location), folder, fields, options, split, form.span, source.items[1].span)


def _text_options(ev: Any, given: dict[str, Given]) -> dict[str, Any]:
    """`bytes` or `(bpe "tokenizer.json")`; the path is relative to the file, as the text's is."""
    if "tokens" not in given:
        return {"tokens": "bytes"}
    value, form = given["tokens"].value, given["tokens"].form
    if isinstance(value, Symbol) and value.name == "bytes":
        return {"tokens": "bytes"}
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], Symbol) and value[0].name == "bpe" and isinstance(value[1], str):
        return {"tokens": "bpe", "tokenizer": value[1]}
    shown = value.name if isinstance(value, Symbol) else "this"
    raise ev.error("E-EVAL-103", f'text: :tokens is bytes or (bpe "tokenizer.json"), and not {shown}', form,
                   help=suggestion(shown, ("bytes",), "values"))


def _tokens_options(ev: Any, given: dict[str, Given]) -> dict[str, Any]:
    value, choices = value_of(given, FORMATS["tokens"], "dtype"), ("u16", "u32")
    if value not in choices:
        raise ev.error("E-EVAL-103", f"tokens: :dtype `{value}` is none of {', '.join(choices)}", given["dtype"].form,
                       help=suggestion(value, choices, "values"))
    return {"dtype": value}


def _manifest_options(ev: Any, given: dict[str, Given]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if "split" in given:
        options["split"] = given["split"].value
    if "stages" in given:
        options["stages"] = _stages(ev, given["stages"].value, given["stages"].form)
    return options


def _stages(ev: Any, value: Any, form: Form) -> list[list[Any]]:
    """[[names, last step or None], …]: one phase of joined stages, or phases that follow one another by step."""
    usage = ":stages is a list of stages to join, (easy hard), or of such lists by step, ((easy :until 1000) (hard))"
    if not isinstance(value, tuple) or not value:
        raise ev.error("E-EVAL-103", usage, form)
    phases = value if isinstance(value[0], tuple) else (value,)
    found: list[list[Any]] = []
    for i, phase in enumerate(phases):
        names = [item.name if isinstance(item, Symbol) else item for item in phase] if isinstance(phase, tuple) else []
        until = None
        if len(phase) > 2 and isinstance(phase[-2], Keyword):
            names, until = names[:-2], phase[-1]
            after = found[-1][1] if found else 0
            if phase[-2].name != "until" or not isinstance(until, int) or isinstance(until, bool) or until <= after:
                raise ev.error("E-EVAL-103", f"{usage}; the steps of :until grow", form)
        if not names or not all(isinstance(name, str) for name in names) or (until is None) != (i == len(phases) - 1):
            raise ev.error("E-EVAL-103", f"{usage}; every phase but the last has :until", form)
        found.append([names, until])
    return found


#: format -> what it makes of its own keys: plain values, which a checkpoint keeps
OPTIONS = {"text": _text_options, "tokens": _tokens_options, "manifest": _manifest_options, "extxyz": extxyz_options}


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
    usage = "a field is (name dtype [shape] :scale number :pad number)"
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
    numbers: dict[str, Any] = {"scale": None, "pad": None}
    while rest:
        if len(rest) < 2 or not isinstance(rest[0], Keyword) or rest[0].name not in numbers or numbers[rest[0].name] is not None:
            raise ev.error("E-EVAL-104", usage, rest[0])
        key, value = rest[0].name, datum(ev, rest[1], env)
        if not isinstance(value, int | float | Fraction) or isinstance(value, bool):
            raise ev.error("E-EVAL-103", f"field `{name}`: :{key} needs a number", rest[1])
        if key == "pad":
            _check_pad(ev, name, dtype, shape, value, rest[1])
        numbers[key], rest = value, rest[2:]
    return Field(name, dtype, shape, numbers["scale"], numbers["pad"], form.span)


def _check_pad(ev: Any, name: str, dtype: str, shape: tuple[int, ...], value: Any, form: Form) -> None:
    """The field takes lists, and the number has a place in its dtype."""
    if not shape:
        raise ev.error("E-EVAL-103", f"field `{name}` is one number; :pad fills up lists: ({name} {dtype} [128] :pad 0)", form)
    sign, bits = dtype[0], dtype[1:]
    if sign in "iu" and bits.isdigit():
        low, high = (0, 2 ** int(bits) - 1) if sign == "u" else (-(2 ** (int(bits) - 1)), 2 ** (int(bits) - 1) - 1)
        if not isinstance(value, int) or not low <= value <= high:
            raise ev.error("E-EVAL-103", f"field `{name}`: :pad {value} is no {dtype} ({low}…{high})", form)
    elif dtype == "bool" and value not in (0, 1):
        raise ev.error("E-EVAL-103", f"field `{name}`: :pad of a bool is 0 or 1", form)
    elif isinstance(value, Fraction):
        raise ev.error("E-EVAL-103", f"field `{name}`: :pad is a whole number or a decimal one", form)


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
    if way not in WAYS:
        raise ev.error("E-EVAL-107", f"there is no way `{way}` to make batches", form, help=suggestion(way, WAYS, "ways"))
    if len(form.items) < 2 or not isinstance(form.items[1], Symbol):
        example = {"batches": "(batches digits :batch 64)", "windows": "(windows corpus :context 128 :batch 32)"}.get(way, "(graphs ethanol :batch 16)")
        raise ev.error("E-EVAL-104", f"{way} needs the name of a source first: {example}", form)
    name = form.items[1].name
    if name not in sources:
        raise ev.error("E-EVAL-107", f"there is no data source `{name}`", form.items[1], about=name, help=suggestion(name, sources, "sources"))
    source = sources[name]
    kind, other = KINDS["structures" if source.structures else "stream" if source.stream else "rows"]
    if way != other:
        raise ev.error("E-DATA-030", f"`{way}` cannot use the source `{name}`: `{source.format}` gives {kind}", form.items[1],
                       help=f"({other} {name} {':context 128 ' if source.stream else ''}:batch 32 …)")
    keys = WAYS[way]
    given = parse_keys(ev, way, form, form.items[2:], keys, env)
    split = value_of(given, keys, "split")
    if source.format == "manifest":
        _check_manifest(ev, source, split, given, form, training)
    elif split is not None and split not in dict(source.split):
        raise ev.error("E-EVAL-107", f"the source `{name}` has no part `{split}`", given["split"].form, help=suggestion(split, dict(source.split), f"parts of {name}"))
    if "limit" in given and training:
        raise ev.error("E-EVAL-103", ":limit counts the batches of an evaluation, and this is a run's :data", given["limit"].form, help="use :steps of the run")
    values = {key: value_of(given, keys, key) for key in keys if key != "split"}
    if way == "windows" and values["stride"] is None:
        values["stride"] = values["context"]
    return Batches(source, split, span=form.span, knobs={key: found.knobs for key, found in given.items() if found.knobs}, **values)


def _check_manifest(ev: Any, source: DataSource, split: str | None, given: dict[str, Given], form: Form, training: bool) -> None:
    """Which splits and stages there are is known when the manifest is read; what cannot be meant is refused here."""
    if split is not None and "split" in source.options:
        raise ev.error("E-EVAL-103", f"the source `{source.name}` is the split `{source.options['split']}` of its manifest already",
                       given["split"].form, help="leave :split out here, or in the manifest form")
    if not training and len(source.options.get("stages", ())) > 1:
        raise ev.error("E-EVAL-103", f"the stages of `{source.name}` switch by step, and an evaluation has no steps", form,
                       help="evaluate on a source of its own, with :stages (easy hard)")


def folder_of(path: str) -> str:
    return os.path.dirname(os.path.abspath(path))
