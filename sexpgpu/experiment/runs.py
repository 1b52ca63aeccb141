"""`defrun` and `defeval`, read after the whole file is evaluated, so that their order does not matter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sexpgpu.diagnostics import suggestion
from sexpgpu.experiment.data import batches
from sexpgpu.experiment.model import DataSource, Eval, Init, KeepBest, Metric, Run
from sexpgpu.experiment.optimizers import ByPath, Optimizer
from sexpgpu.experiment.schema import Given, Key, datum, parse_keys, value_of
from sexpgpu.forms import Form, Keyword, ListForm, Symbol
from sexpgpu.lisp.values import Callable, plain

PRECISIONS = ("f32", "tf32", "bf16", "f64")
#: names of a train record that a user's metric may not take (contracts.md, "A run")
RESERVED = ("loss", "learning-rate", "gradient-norm", "step-seconds", "samples-per-second", "tokens-per-second")

RUN_KEYS = {
    "data": Key("form", "the batches of a step", required=True, evaluated=False),
    "loss": Key("function", "a function of fields that returns a scalar, or (list sum count)", required=True),
    "optimizer": Key("any", "an optimizer with its settings", required=True),
    "steps": Key("integer", "updates of the run", required=True, minimum=0),
    "seed": Key("integer", "seed of initial values, draws and order", 0, minimum=0),
    "precision": Key("symbol", "f32, tf32, bf16 or f64", "f32"),
    "accumulate": Key("integer", "micro-batches of one step", 1, minimum=1),
    "clip-norm": Key("number", "largest norm of the whole gradient", minimum=0),
    "deterministic": Key("boolean", "bit-for-bit repeatable kernels", True),
    "checkpoint-every": Key("integer", "steps between checkpoints", minimum=1),
    "keep": Key("integer", "checkpoints kept", 3, minimum=1),
    "log-every": Key("integer", "steps between train records", 10, minimum=1),
    "evals": Key("names", "the evaluations to run; without it, all", evaluated=False),
    "diagnostics": Key("names", "globs of taps", (), evaluated=False),
    "metrics": Key("form", "((name function) …) of a training batch", evaluated=False),
    "ema": Key("number", "decay of averaged weights, at least 0 and below 1", minimum=0),
    "remat": Key("any", "layers whose values the backward pass computes again: true, false or (name …)", evaluated=False),
    "shard": Key("symbol", "optimizer: its state is divided over the ranks", evaluated=False),
    "keep-best": Key("names", "the best checkpoint by a metric: (eval metric), or (eval metric max)", evaluated=False),
    "frozen": Key("names", "globs of parameters that are not trained", (), evaluated=False),
    "init": Key("form", "weights to start from", evaluated=False),
}
EVAL_KEYS = {
    "data": Key("form", "the batches of an evaluation", required=True, evaluated=False),
    "every": Key("integer", "steps between evaluations; 0 is never", required=True, minimum=0),
    "metrics": Key("form", "((name function) …)", required=True, evaluated=False),
    "weights": Key("symbol", "raw, or ema: the averaged weights", "raw", evaluated=False),
}


def read_metrics(ev: Any, form: Form, env: Any, reserved: tuple[str, ...]) -> tuple[Metric, ...]:
    metrics: dict[str, Metric] = {}
    for item in form.items if isinstance(form, ListForm) else ():
        if not isinstance(item, ListForm) or len(item.items) != 2 or not isinstance(item.items[0], Symbol):
            raise ev.error("E-EVAL-104", ":metrics is a list of (name function)", item)
        name = item.items[0].name
        if name in reserved:
            raise ev.error("E-EVAL-103", f"every train record has a `{name}` of its own", item.items[0], help="give the metric another name")
        if not name.isascii() or not name.isprintable() or len(name) > 256:
            raise ev.error("E-EVAL-103", "a metric's name is at most 256 printable ASCII characters", item.items[0])
        if name in metrics:
            raise ev.error("E-EVAL-104", f"two metrics are named `{name}`", item.items[0])
        function = ev.eval(item.items[1], env)
        if not isinstance(function, Callable):
            raise ev.error("E-EVAL-103", f"metric `{name}` needs a function of fields", item.items[1])
        metrics[name] = Metric(name, function, item.items[1].span)
    if not isinstance(form, ListForm):
        raise ev.error("E-EVAL-104", ":metrics is a list of (name function)", form)
    return tuple(metrics.values())


def read_eval(ev: Any, form: ListForm, env: Any, sources: dict[str, DataSource], every: int | None) -> Eval:
    """One evaluation; `every` is the flag's override."""
    given = _given(ev, "defeval", form, EVAL_KEYS, env)
    weights = value_of(given, EVAL_KEYS, "weights")
    if isinstance(given["metrics"].form, ListForm) and not given["metrics"].form.items:
        raise ev.error("E-EVAL-103", f"evaluation `{form.items[1].name}` has no metric to compute", given["metrics"].form, help="for example :metrics ((loss my-loss)); leave the defeval out to evaluate nothing")
    if weights not in ("raw", "ema"):
        raise ev.error("E-EVAL-103", f"there are no weights `{weights}`", given["weights"].form, help=suggestion(weights, ("raw", "ema"), "weights"))
    return Eval(
        form.items[1].name,
        batches(ev, given["data"].form, env, sources, training=False),
        value_of(given, EVAL_KEYS, "every") if every is None else every,
        read_metrics(ev, given["metrics"].form, env, ()),
        weights,
        form.span,
    )


def read_run(ev: Any, form: ListForm, env: Any, sources: dict[str, DataSource], evals: dict[str, Eval], steps: int | None, diagnostics: tuple[str, ...] | None) -> Run:
    """One run; `steps` and `diagnostics` are the flags' overrides."""
    given = _given(ev, "defrun", form, RUN_KEYS, env)
    value = {key: value_of(given, RUN_KEYS, key) for key in RUN_KEYS}
    if value["precision"] not in PRECISIONS:
        raise ev.error("E-EVAL-103", f"there is no precision `{value['precision']}`", given["precision"].form, help=suggestion(value["precision"], PRECISIONS, "precisions"))
    if not isinstance(value["optimizer"], Optimizer | ByPath):
        raise ev.error("E-EVAL-103", "defrun: :optimizer needs an optimizer with its settings", given["optimizer"].form, help="for example (adamw :lr 1e-3)")
    data = batches(ev, given["data"].form, env, sources, training=True)
    if data.batch % value["accumulate"]:
        raise ev.error("E-RUN-104", f":accumulate {value['accumulate']} does not divide :batch {data.batch}", given["accumulate"].form, help="choose a divisor of the batch")
    data = replace(data, parts=value["accumulate"])
    chosen = tuple(evals.values())
    if value["evals"] is not None:
        for name in value["evals"]:
            if name not in evals:
                raise ev.error("E-EVAL-107", f"there is no defeval `{name}`", given["evals"].form, about=name, help=suggestion(name, evals, "evaluations"))
            if value["evals"].count(name) > 1:
                raise ev.error("E-EVAL-104", f":evals names `{name}` twice", given["evals"].form, help="name each evaluation once")
        chosen = tuple(evals[name] for name in value["evals"])
    metrics = read_metrics(ev, given["metrics"].form, env, RESERVED) if "metrics" in given else ()
    if value["ema"] is not None and value["ema"] >= 1:
        raise ev.error("E-EVAL-103", "defrun: :ema is a decay below 1", given["ema"].form, help="for example :ema 0.999")
    for evaluation in chosen:
        if evaluation.weights == "ema" and value["ema"] is None:
            raise ev.error(
                "E-EVAL-103", f"evaluation `{evaluation.name}` takes averaged weights, and the run `{form.items[1].name}` keeps none", form,
                help="add :ema 0.999 to the run, or say :weights raw",
            )
    clip = value["clip-norm"]
    if clip is not None and not clip > 0:
        raise ev.error("E-EVAL-103", f"defrun {form.items[1].name}: :clip-norm is {clip}, and every gradient would become 0", given["clip-norm"].form, help="leave :clip-norm out to clip nothing")
    return Run(
        name=form.items[1].name,
        data=data,
        loss=Metric("loss", value["loss"], given["loss"].form.span),
        optimizer=value["optimizer"],
        steps=value["steps"] if steps is None else steps,
        seed=value["seed"],
        precision=value["precision"],
        accumulate=value["accumulate"],
        clip_norm=None if clip is None else float(clip),
        checkpoint_every=value["checkpoint-every"],
        keep=value["keep"],
        log_every=value["log-every"],
        deterministic=value["deterministic"],
        deterministic_at=given["deterministic"].form.span if "deterministic" in given and value["deterministic"] else None,
        diagnostics=value["diagnostics"] if diagnostics is None else diagnostics,
        metrics=metrics,
        evals=chosen,
        ema=None if value["ema"] is None else float(value["ema"]),
        frozen=value["frozen"],
        keep_best=_keep_best(ev, given["keep-best"], chosen) if "keep-best" in given else None,
        init=_init(ev, given["init"].form, env, data.source.folder) if "init" in given else None,
        shard=_shard(ev, given["shard"]) if "shard" in given else False,
        remat=_remat(ev, given["remat"], env) if "remat" in given else False,
        span=form.span,
    )


def _shard(ev: Any, given: Given) -> bool:
    if given.value != "optimizer":
        raise ev.error("E-EVAL-103", f"defrun: there is nothing `{given.value}` to divide over ranks", given.form,
                       help=suggestion(str(given.value), ("optimizer",), "values of :shard"))
    return True


def _remat(ev: Any, given: Given, env: Any) -> bool | tuple[str, ...]:
    """true, false, or names of layers; a symbol is a variable that says so."""
    value = plain(ev.eval(given.form, env)) if isinstance(given.form, Symbol) else given.value
    if isinstance(value, bool):
        return value
    if value == ():
        return False
    names = tuple(v.name if isinstance(v, Symbol) else v for v in value) if isinstance(value, tuple) else ()
    if not names or not all(isinstance(name, str) for name in names):
        raise ev.error("E-EVAL-103", ":remat is true, false or a list of layer names", given.form, help="for example :remat (block)")
    return names


def _keep_best(ev: Any, given: Given, evals: tuple[Eval, ...]) -> KeepBest:
    """The evaluation and its metric, both of which the run must have."""
    names, form = given.value, given.form
    if len(names) not in (2, 3) or (len(names) == 3 and names[2] not in ("min", "max")):
        raise ev.error("E-EVAL-104", ":keep-best is (eval metric), or (eval metric max)", form, help="for example :keep-best (valid loss)")
    table = {e.name: e for e in evals}
    if names[0] not in table:
        raise ev.error("E-EVAL-107", f":keep-best: the run has no evaluation `{names[0]}`", form, about=names[0], help=suggestion(names[0], table, "evaluations"))
    metrics = [m.name for m in table[names[0]].metrics]
    if names[1] not in metrics:
        raise ev.error("E-EVAL-107", f":keep-best: evaluation `{names[0]}` has no metric `{names[1]}`", form, help=suggestion(names[1], metrics, "metrics"))
    return KeepBest(names[0], names[1], names[2:] == ("max",))


def _init(ev: Any, form: Form, env: Any, folder: str) -> Init:
    """`(from path :map ((new old) …))`; the path is evaluated, the rules are data."""
    items = form.items if isinstance(form, ListForm) and form.head() == "from" else ()
    mapped = len(items) == 4 and isinstance(items[2], Keyword) and items[2].name == "map"
    if len(items) != 2 and not mapped:
        raise ev.error("E-EVAL-104", ':init is (from "w.safetensors"), or (from "w.safetensors" :map (("new/**" "old/**")))', form)
    path = ev.eval(items[1], env)
    if not isinstance(path, str) or not path or "\0" in path:
        raise ev.error("E-EVAL-103", ":init: the file's name is a string", items[1])
    rules = datum(ev, items[3], env) if mapped else ()
    if not isinstance(rules, tuple):
        raise ev.error("E-EVAL-104", ':map is a list of ("new" "old")', items[3])
    for rule in rules:
        if not isinstance(rule, tuple) or len(rule) != 2 or not all(isinstance(name, str) and _renamable(name) for name in rule) or (
            rule[0].endswith("**") != rule[1].endswith("**")
        ):
            raise ev.error(
                "E-EVAL-104", ':map is a list of ("new" "old"): two names, or two globs that end in `**` and have no other star', items[3],
                help='for example :map (("encoder/**" "old/encoder/**"))',
            )
    return Init(path, folder, rules, form.span)


def _renamable(name: str) -> bool:
    """A whole name, `**`, or `prefix/**`."""
    stem = name[:-2] if name.endswith("**") else name
    return "*" not in stem and "?" not in stem and (stem.endswith("/") or stem == "" if name.endswith("**") else bool(stem))


def stated(ev: Any, form: ListForm, env: Any, key: str) -> Any:
    """What the file itself states for `:steps`, `:every` or `:diagnostics`, for the record of an override."""
    keys = RUN_KEYS if form.head() == "defrun" else EVAL_KEYS
    return value_of(_given(ev, form.head() or "", form, keys, env), keys, key)


def _given(ev: Any, what: str, form: ListForm, keys: dict[str, Key], env: Any) -> dict[str, Given]:
    if len(form.items) < 2 or not isinstance(form.items[1], Symbol):
        raise ev.error("E-EVAL-104", f"{what} needs a name first: ({what} name :data …)", form)
    return parse_keys(ev, f"{what} {form.items[1].name}", form, form.items[2:], keys, env)
