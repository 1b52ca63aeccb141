"""The launches of a run's step on `cuda`, from the passes that make them: without torch, a GPU, or the kernels' sources.

In: the stages of a run. Out: schedules of forward and backward and of the update, whose launches are those of `CudaProgram` (a test
compares them). The sources and the exact places in memory need torch and Triton (`explain --after plan`, `--after triton`).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from sexpgpu.backends.cuda.cartesian.join import join
from sexpgpu.backends.leaves import flat_update
from sexpgpu.ir import Node
from sexpgpu.ops import build, constant
from sexpgpu.passes.bounds import bounded_fields, guard_indices
from sexpgpu.passes.chains import chains
from sexpgpu.passes.epilogues import KINDS, epilogues
from sexpgpu.passes.flatten import Flat
from sexpgpu.passes.onto import onto
from sexpgpu.passes.products import products
from sexpgpu.passes.rank_maps import rank_maps
from sexpgpu.passes.rewrite import rewrite
from sexpgpu.passes.schedule.decompose import decompose
from sexpgpu.passes.schedule.fuse import Call, Launch, Schedule
from sexpgpu.passes.schedule.memory import Life, plan
from sexpgpu.passes.schedule.over import stored_over
from sexpgpu.passes.schedule.recompute import lives_of, recompute
from sexpgpu.passes.schedule.repeat import repeat
from sexpgpu.passes.schedule.views import layout
from sexpgpu.passes.slopes import slopes

EPILOGUES = frozenset(KINDS) - {"residual"}  # as `backends.cuda.choice.Switch` has them
SHADOW = "//bf16/"


@dataclass(frozen=True)
class Lowered:
    """A graph as launches: `times` in a step; results that have memory elsewhere are not in the arena. copied: paths of parameters of
    which it reads nothing but their bf16 copies."""

    name: str
    times: int
    schedule: Schedule
    elsewhere: frozenset[Node]
    copied: frozenset[str] = frozenset()

    @property
    def arena(self) -> int:
        """Bytes of the values between launches, as they are packed, and of what library calls take inside: near those of
        `backends.cuda.memory`, without the partial sums of kernels."""
        lives: dict[Hashable, Life] = {node: life for node, life in lives_of(self.schedule, set(self.elsewhere)).items()}  # noqa: C416 - other keys come
        for i, launch in enumerate(self.schedule.launches):
            inside = _inside(launch.node) if isinstance(launch, Call) else 0
            if inside:
                lives["inside", i] = Life(inside, i, i)
        return plan(lives, stored_over(self.schedule.launches, lives)).size


def _inside(node: Node) -> int:
    """Bytes that a call takes for itself: the logits of a head that stand at once, copies for a gradient of attention, a convolution's
    workspace."""
    if node.op.startswith("linear-cross-entropy"):
        x, weight = (i.type for i in node.inputs[:2])
        rows, row = x.size // max(1, x.shape[-1]), weight.shape[1] * (x.bytes // max(1, x.size))
        most = min(1 << 30, max(1 << 28, -(-rows // 6) * row))
        return min(rows, max(1, most // row)) * row if not node.attrs.get("of", 0) else 0
    if node.op == "attend-grad":
        return (2 if node.type.dtype in ("bf16", "f16") else 8) * node.type.bytes
    return 64 << 20 if node.op.startswith("convolve") else 0


def lowered(staged: Any, ranks: int = 1) -> tuple[Lowered, Lowered]:
    """Forward and backward of a micro-batch, and the update."""
    run, traced = staged.run, staged.traced
    flat = flat_update(staged, run.accumulate * ranks, ranks if run.shard else 1)
    origins = traced.origins
    plain = staged.micro(False)
    wide = "f64" if run.precision == "f64" else "f32"
    guarded = guard_indices(plain, bounded_fields(plain), origins)
    micro = {n: node if n.startswith(("gradient/", "state/")) else _as(node, wide) for n, node in guarded.items()}
    shadowed = {str(traced.params[n].node.attrs["path"]) for g in flat.groups for n in g.names} if run.precision == "bf16" else set()

    def shadow(node: Node, inputs: tuple[Node, ...]) -> Node | None:
        x = node.inputs[0] if node.op == "cast" else None
        if x is None or x.op != "param" or node.type.dtype != "bf16" or x.attrs["path"] not in shadowed:
            return None
        return build("param", path=SHADOW + x.attrs["path"], shape=x.type.shape, dtype="bf16")

    forward = recompute(rewrite(_lower(micro, origins), shadow, origins), micro, origins, bool(traced.remat)).schedule
    if traced.remat:
        forward = repeat(forward, traced.remat, origins)[0]
    results = _update(flat, bool(shadowed), wide)
    update = recompute(_lower(results, origins), results, origins).schedule
    name = "micro-batch" if run.accumulate > 1 else "forward and backward"
    read = {str(leaf.attrs["path"]) for launch in forward.launches for leaf in launch.reads if leaf.op == "param"}
    return Lowered(name, run.accumulate, forward, _placed(forward), frozenset(shadowed - read)), Lowered("update", 1, update, _placed(update))


def _as(node: Node, dtype: str) -> Node:
    return node if node.type.dtype == dtype else build("cast", node, dtype=dtype)


def _lower(results: Mapping[str, Node], origins: Any) -> dict[str, Node]:
    """What `backends.cuda.executable` makes of a graph before it is cut into launches."""
    found = chains(products(rank_maps(join(decompose(results, origins), origins), origins), origins), origins)
    return slopes(epilogues(onto(found, origins), EPILOGUES, origins)[0], origins)


def _update(flat: Flat, shadows: bool, wide: str) -> dict[str, Node]:
    """The update with the flag that gates its writes, and the bf16 copies of parameters."""
    loss = build("input", name="loss total", dtype=wide, shape=(), batch=False)
    alive = build("state", path="//alive", shape=(), dtype="bool")
    wrong = build("input", name="bad-index", dtype=wide, shape=(), batch=False)
    finite = build("logical-and", build("is-finite", loss), build("is-finite", flat.results["gradient-norm"]))
    ok = build("logical-and", build("logical-and", alive, finite), build("=", wrong, constant(0.0, wide)))
    results: dict[str, Node] = {}
    for name, node in flat.results.items():
        if name.startswith(("param/", "opt/", "ema/")):
            kept = build("state", path=f"//home/{name}", shape=node.type.shape, dtype=node.type.dtype)
            results[name] = build("where", ok, node, flat.homes.get(name) or kept)
        else:
            results[name] = _as(node, wide)
    for group in flat.groups if shadows else ():
        results[SHADOW + str(group.number)] = build("cast", results[group.vector("param")], dtype="bf16")
    return {**results, "loss": loss, "ok": _as(ok, wide), "//alive": ok}


def _placed(schedule: Schedule) -> frozenset[Node]:
    """Results that a launch writes where they belong."""
    return frozenset(node for node in schedule.results.values() if node in schedule.kept and layout(node) is None)


def last_of(launch: Launch) -> Node:
    """The value for which a launch is there."""
    return launch.node if isinstance(launch, Call) else launch.units[-1]
