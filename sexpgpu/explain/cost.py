"""What a step costs before it is made: the time a device may need, and what ranks exchange; rates of devices.

In: the stages of a run, or its launches. Out: plain numbers. Times are a roofline: on a CPU each call of the interpreter takes the
longer of its arithmetic and its traffic, and a start; of a GPU, `roofline`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sexpgpu.backends.interpreter.report import Row
from sexpgpu.diagnostics import fail, suggestion
from sexpgpu.experiment.report import Estimate, Ranks
from sexpgpu.experiment.traced import TracedRun
from sexpgpu.explain.lowering import Lowered
from sexpgpu.explain.roofline import Gpu, step_time
from sexpgpu.ir import Node, postorder
from sexpgpu.ops import table


@dataclass(frozen=True)
class Cpu:
    """What one thread of a CPU reaches: flops of matrix products by dtype, of everything else (`plain`); bytes a second of tensors
    that a step reads and writes again; seconds of a call, and of a view; seconds of a step around its calls."""

    flops: Mapping[str, float]
    bandwidth: float
    launch: float
    memory: float
    plain: float = 2e10
    attention: float = 0.6  # of the rate of products, over all pairs of a query and a key
    view: float = 1e-6
    step: float = 6e-5
    draw: float = 2.5e-9  # seconds of an element of a mask


#: name -> what is assumed of it; `--assume NAME=VALUE` changes a number. Of one core of a server's processor, and of an H200
CPU = Cpu({"f32": 8e10, "f64": 4e10}, 3e10, 4e-6, 16e9)
H200 = Gpu({"f32": 5e13, "tf32": 3.9e14, "bf16": 7.83e14, "f16": 7.83e14, "f64": 5e13}, 4.2e12, 141e9, 1e-6)
DEVICES: dict[str, Cpu | Gpu] = {"cpu": CPU, "h200": H200}
#: call -> how many calls of torch it makes, or is worth; 1 of all others
CALLS = {"entropy": 6, "entropy_grad": 4, "attend": 4, "attend_grad": 4, "max_pool": 18, "mean": 2, "convolve": 20, "convolve-transpose": 20,
         "convolve-weight-grad": 25, "convolution_backward": 40, "embed": 2, "mm": 2, "addmm": 3}  # fmt: skip
WIDENED = 4  # times the traffic of a product of bf16 or f16: its operands and itself in f32, written and read
ALIASES = {"cuda": "h200"}
ASSUMED = ("flops", "bandwidth", "launch", "memory")


def kind(name: str) -> str:
    """The backend for which a device of this name is planned: `cpu` or `cuda`."""
    return "cpu" if isinstance(device(name, {}), Cpu) else "cuda"


def device(name: str, assume: Mapping[str, float]) -> Cpu | Gpu:
    """A device's numbers with those that were given instead."""
    name = ALIASES.get(name, name)
    if name not in DEVICES:
        fail("E-ENV-006", f"--device {name}: no such device", help=f"known devices: {', '.join((*DEVICES, *ALIASES))}")
    found = DEVICES[name]
    flops = dict.fromkeys(found.flops, assume["flops"]) if "flops" in assume else found.flops
    plain = {key: value for key, value in assume.items() if key != "flops"}
    return replace(found, flops=flops, **plain)  # type: ignore[arg-type]


def assumptions(texts: Iterable[str]) -> dict[str, float]:
    """`name=value` of each `--assume`."""
    found: dict[str, float] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if name not in ASSUMED:
            fail("E-ENV-006", f"--assume {text}: there is no number `{name}` to assume", help=(*suggestion(name, ASSUMED, "names"), "for example --assume bandwidth=2e10"))
        if not equals:
            fail("E-ENV-006", f"--assume {text}: expected name=value", help=f"for example --assume {name}=2e10")
        try:
            found[name] = float(value)
        except ValueError:
            fail("E-ENV-006", f"--assume {text}: `{value}` is no number", help=f"for example --assume {name}=2e10")
        if not 0 < found[name] < float("inf"):
            fail("E-ENV-006", f"--assume {text}: the number must be positive", help=f"for example --assume {name}=2e10")
    return found


def traffic(results: Iterable[Mapping[str, Node]]) -> int:
    """Bytes read and written by graphs if nothing is cached."""
    ops = table()
    return sum(ops[node.op].cost(node)[1] for graph in results for node in postorder(graph.values()))


def on_gpu(graphs: Iterable[Lowered], name: str, assume: Mapping[str, float], precision: str) -> Estimate:
    """The time of a step from its launches."""
    of = device(name, assume)
    assert isinstance(of, Gpu)
    seconds, limits = step_time(graphs, of, precision)
    return _estimate(name, seconds, limits, of)


def on_cpu(graphs: Iterable[tuple[int, Iterable[Row]]], name: str, assume: Mapping[str, float], precision: str) -> Estimate:
    """The time of a step of the interpreter on one thread: each graph so many times, call by call."""
    of = device(name, assume)
    assert isinstance(of, Cpu)
    rate = of.flops["f64" if precision == "f64" else "f32"]
    limits = {"arithmetic": 0.0, "memory": 0.0, "launches": of.step}
    for times, rows in graphs:
        for row in rows:
            if row.where == "a view":
                limits["launches"] += times * of.view
                continue
            arithmetic = _arithmetic(row, of, rate)
            memory = row.bytes * (WIDENED if row.products and "16[" in row.gives else 1) / of.bandwidth
            seconds = arithmetic + memory if row.products else max(arithmetic, memory)  # a product reads and writes copies around it
            limits["arithmetic" if arithmetic > memory else "memory"] += times * seconds
            limits["launches"] += times * of.launch * CALLS.get(row.name, 1)
    return _estimate(name, sum(limits.values()), limits, of)


def _arithmetic(row: Row, of: Cpu, rate: float) -> float:
    """Seconds of a call's operations."""
    if row.name == "draw":
        return row.elements * of.draw
    if row.pairs:
        return row.pairs / (rate * of.attention)
    return row.products / rate + (row.flops - row.products) / of.plain


def _estimate(name: str, seconds: float, limits: Mapping[str, float], of: Cpu | Gpu) -> Estimate:
    assumed = {f"flops {d}": v for d, v in of.flops.items()} | {"bandwidth": of.bandwidth, "launch": of.launch, "memory": of.memory}
    return Estimate(ALIASES.get(name, name), seconds, {k: v / seconds if seconds else 0.0 for k, v in limits.items()}, assumed)


def ranks(traced: TracedRun, count: int, copied: Collection[str] = ()) -> Ranks:
    """What `count` ranks exchange in a step. A sum over ranks in a ring sends 2(n-1)/n of its bytes, a scatter or a gather half of it.
    copied: paths of parameters that are divided, so that their bf16 copies alone are gathered."""
    run, way = traced.run, (count - 1) / count
    gradients, averages = _bytes(traced.gradients.values()), _bytes(traced.averages.values())
    trained = [traced.params[name].node for name in traced.gradients]
    whole, halved = (_bytes(node for node in trained if (node.attrs["path"] in copied) is apart) for apart in (False, True))
    states = _bytes(spec.node for name, spec in traced.states.items() if name in traced.state_updates)
    if run.shard:
        sent = {"gradients, reduce-scatter": way * gradients, "parameters, all-gather": way * (whole + halved // 2), "averages, all-gather": way * averages}
    else:
        sent = {"gradients, all-reduce": 2 * way * gradients}
    sent["states, all-reduce"] = 2 * way * states
    return Ranks(count, run.data.batch // count, run.shard, {what: round(n) for what, n in sent.items() if n}, bool(copied))


def _bytes(nodes: Iterable[Any]) -> int:
    return sum(node.type.bytes for node in nodes)
