"""Assembles the graphs of a training step from a traced run: forward, backward, clipping, update.

Assumes a verified trace. Leaves a graph without `grad` markers and without `gradient` leaves (`whole_step`),
or a pair of graphs that meet at the `gradient` leaves (`micro_step`, `update_step`) when a batch is cut into
micro-batches. Result names: `loss count gradient-norm learning-rate/<group> param/<p> opt/<slot>/<p> state/<s>
metric/<m>/total metric/<m>/count tap/<path> gradient/<p>`.
"""

from __future__ import annotations

from sexpgpu.experiment.traced import Entry, TracedRun
from sexpgpu.ir import Node, Origin, Origins
from sexpgpu.ops import build, constant
from sexpgpu.passes.autodiff import grad
from sexpgpu.passes.expand import expand_gradients
from sexpgpu.passes.rewrite import substitute

Results = dict[str, Node]


def forward_results(traced: TracedRun, logged: bool) -> Results:
    """Loss, count and state updates; with `logged` also metrics and taps."""
    results: Results = {"loss": traced.loss.total}
    if traced.loss.count is not None:
        results["count"] = traced.loss.count
    results |= {f"state/{name}": node for name, node in traced.state_updates.items()}
    if logged:
        results |= entry_results(traced.metrics)
        results |= {f"tap/{tap.path}": tap.node for tap in traced.taps}
    return results


def entry_results(entries: tuple[Entry, ...]) -> Results:
    """`metric/<name>/total` and, for `(list sum count)`, `metric/<name>/count`."""
    results: Results = {}
    for entry in entries:
        results[f"metric/{entry.name}/total"] = entry.total
        if entry.count is not None:
            results[f"metric/{entry.name}/count"] = entry.count
    return results


def micro_step(traced: TracedRun, logged: bool) -> Results:
    """Forward and backward of one micro-batch; `gradient/<p>` is that of the loss's sum."""
    results = expand_gradients(forward_results(traced, logged), traced.origins)
    gradients = grad(results["loss"], [traced.params[name].node for name in traced.gradients], traced.origins)
    return results | {f"gradient/{name}": node for name, node in zip(traced.gradients, gradients, strict=True)}


def update_step(traced: TracedRun, divided: bool) -> Results:
    """From `gradient` leaves (sums over micro-batches) to new parameters; `divided`: by the scalar input `count`."""
    leaves: dict[str, Node] = dict(traced.gradients)
    total = build("input", name="count", dtype="f32", shape=(), batch=False)
    means = {name: build("/", leaf, total) if divided else leaf for name, leaf in leaves.items()}
    norm = _norm(means, traced.origins)
    clip = traced.run.clip_norm
    if clip is not None:
        limit = constant(clip, "f32")
        scale = build("where", build(">", norm, limit), build("/", limit, norm), constant(1.0, "f32"))
        means = {name: build("*", node, scale) for name, node in means.items()}
    new = {f"param/{name}": node for name, node in traced.new_params.items()}
    new |= {f"opt/{name}": node for name, node in traced.new_slots.items()}
    new |= {f"ema/{name}": node for name, node in traced.new_averages.items()}
    new |= {f"learning-rate/{name}": node for name, node in traced.learning_rates.items()}
    mapping = {leaf: means[name] for name, leaf in leaves.items() if means[name] is not leaf}
    return {**substitute(new, mapping, traced.origins), "gradient-norm": norm}


def whole_step(traced: TracedRun, logged: bool) -> Results:
    """The step of an uncut batch as one graph."""
    forward = micro_step(traced, logged)
    update = update_step(traced, divided=False)
    if "count" in forward:
        update = update_step(traced, divided=True)
        total = build("input", name="count", dtype="f32", shape=(), batch=False)
        update = substitute(update, {total: forward["count"]}, traced.origins)
    mapping = {leaf: forward[f"gradient/{name}"] for name, leaf in traced.gradients.items()}
    update = substitute(update, mapping, traced.origins)
    return {name: node for name, node in forward.items() if not name.startswith("gradient/")} | update


def _norm(gradients: dict[str, Node], origins: Origins) -> Node:
    """√Σg² over all parameters, as torch's clip_grad_norm_ takes it; its nodes come from the parameters' paths."""
    total = None
    for name, g in gradients.items():
        with origins.at(Origin(paths=(name,), phase="gradient norm")):
            square = build("sum", build("*", g, g))
            total = square if total is None else build("+", total, square)
    assert total is not None
    return build("sqrt", total)
