"""The process that compiles kernels and compares them with the interpreter: `python -m sexpgpu.doctor.kernels`, a question on stdin.

Without a file it asks each device for one small graph, in value and gradient. With one, first a graph of every form of kernel at odd
sizes; then each graph of each run (a step's forward and backward, the update, every evaluation) over a few samples of its own data:
launch by launch beside the interpreter at the same precision, so that the first wrong kernel is named, and the results beside the
interpreter in float64; and forward and backward again over odd numbers of samples, as long as that is no great work.

Launches write into memory of NaN, so that an element which none of them writes is seen.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from sexpgpu import compiler
from sexpgpu.backends import state
from sexpgpu.backends.cuda.device import interpreted, open_device
from sexpgpu.backends.cuda.executable import Bound, Compiled
from sexpgpu.backends.interpreter import compile_graph
from sexpgpu.backends.interpreter.dtypes import TORCH
from sexpgpu.backends.leaves import source_of
from sexpgpu.diagnostics import Diagnostic, SexpError, problem
from sexpgpu.ir import Node, Origins, postorder
from sexpgpu.ops import build, constant, table
from sexpgpu.ops.philox import draw_key
from sexpgpu.ops.random import DRAWS, draw_kind
from sexpgpu.passes.autodiff import grad
from sexpgpu.passes.expand import expand_gradients
from sexpgpu.passes.schedule.fuse import Kernel
from sexpgpu.run.bind import bind
from sexpgpu.run.measure import measured

SAMPLES = 4  # of a micro-batch
LARGE = 40_000_000  # elements that launches under Triton's interpreter may go over, all together: some minutes
ODD = (1, 3, 127, 129)  # samples of a micro-batch, and sizes of axes, besides
LITTLE = 2_000_000, 400_000_000  # elements that the launches over an odd number of samples may go over: under the interpreter, on a GPU
FEW_OPERATIONS = 2e10, 3e11  # of that graph's products, which the CPU computes three times, once in float64: some seconds
STEP = 3  # the update whose draws are taken
#: precision -> what a launch may be off from the interpreter at the same precision, and a result from float64, relative to the largest
#: value of its tensor; a kernel that is wrong is off by more than its tensor's tenth, and sums in another order by far less than this
NEAR = {"f64": (1e-9, 1e-8), "f32": (1e-3, 1e-2), "tf32": (1e-2, 5e-2), "bf16": (6e-2, 3e-1)}
FEW = 0.02  # share of integers and truth values that may differ: comparisons of numbers that differ in the last bit

Results = Mapping[str, Node]
Values = dict[str, torch.Tensor]


def main() -> int:
    """Answers the question; 0 unless something broke that is no finding."""
    question = json.loads(sys.stdin.read())
    torch.set_num_threads(1 if interpreted() else min(8, torch.get_num_threads()))  # of what a GPU is compared with; no more than the environment says
    try:
        devices = targets(question)
        if question.get("file") is None:
            each_device(devices)
        else:
            device = devices[0].partition(":")[0]
            odd_sizes(device)
            of_file(question, device)
    except SexpError as error:
        for diagnostic in error.diagnostics:
            tell(diagnostic)
    return 0


def say(fact: str, text: str) -> None:
    print(json.dumps({"fact": fact, "text": text}), flush=True)


def doing(what: str) -> None:
    """What follows, for whoever waits for it in vain."""
    print(json.dumps({"doing": what}), flush=True)


def tell(found: Diagnostic) -> None:
    message = found.message + (f" ({found.span.place})" if found.span is not None else "")
    print(json.dumps({"code": found.code, "message": message, "notes": list(found.notes), "help": list(found.help)}), flush=True)


def targets(question: Mapping[str, Any]) -> list[str]:
    """torch's names of the devices that are asked for, or of all; raises E-DEV-001 … 008 where a run needs one and there is none."""
    if interpreted():
        return ["cpu"]
    chosen = question.get("devices") or None
    try:
        for ordinals in [[i] for i in chosen] if chosen else [None]:  # each that is named, so that one which is not there has its code
            open_device(ordinals)
    except SexpError as error:
        if question.get("asked") and error.diagnostic.code != "E-DEV-005":
            raise
        if error.diagnostic.code != "E-DEV-005":
            say("GPUs", f"not usable: {error.diagnostic.message}")
            return []
        if question.get("asked"):
            tell(error.diagnostic)
    return [f"cuda:{i}" for i in chosen or range(torch.cuda.device_count())]


# --- each device ------------


def small_graph() -> tuple[dict[str, Node], dict[Node, torch.Tensor]]:
    """tanh(xw) squared and summed, with its gradient: a library's product, fused kernels, a reduction over parts."""
    x = build("input", name="x", dtype="f32", shape=(64, 96), batch=False)
    w = build("input", name="w", dtype="f32", shape=(96, 48), batch=False)
    hidden = build("tanh", build("matmul", x, w))
    loss = build("sum", build("*", hidden, hidden))
    origins = Origins()
    gradients = grad(loss, [x, w], origins)
    random = torch.Generator().manual_seed(1)
    values = {x: torch.randn(64, 96, generator=random), w: torch.randn(96, 48, generator=random) * 0.1}
    return expand_gradients({"value": loss, "gradient x": gradients[0], "gradient w": gradients[1]}, origins), values


def each_device(devices: list[str]) -> None:
    """E-DEV-010 where a device differs from the CPU, or from the first device in any bit."""
    results, bindings = small_graph()
    expected = compile_graph(results).run(bindings)
    first: Values | None = None
    for device in devices:
        if device != "cpu":
            torch.cuda.set_device(device)
        found = {name: value.cpu() for name, value in run_poisoned(results, bindings, device.partition(":")[0]).items()}
        name = device if device == "cpu" else f"{device} ({torch.cuda.get_device_name(device)})"
        wrong = [w for n in results if (w := differs(found[n], expected[n], NEAR["f32"][0]))]
        if wrong:
            tell(problem("E-DEV-010", f"{name} computes tanh, a product and sums {wrong[0]} from the CPU",
                         help=("look at the GPU's state: nvidia-smi -q", "--device cpu runs without it")).diagnostic)
        else:
            room = "" if device == "cpu" else "; {1} of {0} free".format(*(f"{n / 2**30:.1f} GiB" for n in reversed(torch.cuda.mem_get_info(device))))
            say(name, f"a kernel compiled; value and gradient agree with the CPU{room}")
        kind = None if device == "cpu" else torch.cuda.get_device_name(device)
        if first is not None and kind == torch.cuda.get_device_name(devices[0]) and not all(torch.equal(found[n], first[n]) for n in results):
            tell(problem("E-DEV-010", f"{name} gives other bits than {devices[0]}, which is of the same model",
                         help=("look at the GPU's state: nvidia-smi -q", "leave it out: export SEXPGPU_DEVICES=…")).diagnostic)
        first = found if first is None else first


# --- a file's graphs ------------


def run_poisoned(results: Results, bindings: Mapping[Node, torch.Tensor], device: str, draws: Any = None) -> Values:
    """The results of a graph over an arena of NaN (integers -1, truth values true)."""
    compiled = Compiled(results, None, device)
    arena = torch.full((compiled.plan.size,), 0xFF, dtype=torch.uint8, device=device)
    bound = Bound(compiled, {leaf: tensor.to(device) for leaf, tensor in bindings.items()}, {}, arena, draws or drawn(0, device))
    bound.launch()
    return {name: bound.result(name) for name in results}


@contextmanager
def products(precision: str) -> Iterator[None]:
    """torch's switches as a run of this precision has them."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32, matmul.allow_bf16_reduced_precision_reduction
    matmul.allow_tf32 = cudnn.allow_tf32 = precision in ("tf32", "bf16")
    matmul.allow_bf16_reduced_precision_reduction = False
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32, matmul.allow_bf16_reduced_precision_reduction = before


def odd_graph(rows: int, columns: int) -> tuple[dict[str, Node], dict[Node, torch.Tensor]]:
    """Every form of kernel over x [rows columns]: pointwise, views, sums over each axis and over both, whole rows, a product; and gradients."""
    x = build("input", name="x", dtype="f32", shape=(rows, columns), batch=False)
    w = build("input", name="w", dtype="f32", shape=(columns, 3), batch=False)
    normal = build("normalize", x, axis=(1,), eps=1e-2)
    y = build("+", build("gelu", normal), build("*", build("softmax", x), build("sin", x)))
    product = build("matmul", y, w)
    loss = build("+", build("sum", build("*", y, y)), build("sum", build("*", product, product)))
    origins = Origins()
    gradients = grad(loss, [x, w], origins)
    results = {
        "y": y, "loss": loss, "product": product, "rows": build("sum", y, axis=(1,)), "columns": build("sum", y, axis=(0,)),
        "top": build("reduce-max", x, axis=(1,)), "low": build("reduce-min", x, axis=(0,)), "turned": build("+", build("transpose", x), constant(1.0, "f32")),
        "joined": build("concat", x, y, axis=1), "half": build("cast", y, dtype="bf16"), "gradient x": gradients[0], "gradient w": gradients[1],
    }  # fmt: skip
    random = torch.Generator().manual_seed(rows * 1000 + columns)
    values = {x: torch.randn(rows, columns, generator=random), w: torch.randn(columns, 3, generator=random)}
    return expand_gradients(results, origins), values


def odd_sizes(device: str) -> None:
    """E-DEV-010 for the first result that is wrong at a size that no block divides."""
    shapes = [(1, 1), (3, 129), (127, 3), (129, 127), (1, 127), (129, 1)]
    for rows, columns in shapes[:: 2 if interpreted() else 1]:
        doing(f"kernels of every form over [{rows} {columns}]")
        results, bindings = odd_graph(rows, columns)
        expected = compile_graph(results).run(bindings)
        with products("f32"):
            found = {n: v.cpu() for n, v in run_poisoned(results, bindings, device).items()}
        for name, value in found.items():
            if wrong := differs(value, expected[name], NEAR["bf16" if name == "half" else "f32"][0]):
                tell(problem("E-DEV-010", f"`{name}` over [{rows} {columns}] is {wrong} from the interpreter", help="please report it").diagnostic)
                return
    say("odd sizes", f"kernels of every form over axes of {', '.join(map(str, ODD))} agree with the interpreter")


def of_file(question: Mapping[str, Any], device: str) -> None:
    """Each run's graphs."""
    selection = compiler.Selection(variant=question.get("variant"), sets=tuple(question.get("sets", ())))
    loaded = compiler.load(question["file"], selection)
    for name in loaded.experiment.runs:
        doing(f"{name}: its graphs and data")
        chosen = compiler.choose_run(loaded.experiment, name)
        size = min(SAMPLES, chosen.data.batch // chosen.accumulate)
        run, batches = batches_of(chosen, size)
        cuda, exact = compiler.stages(loaded, run, "cuda"), compiler.stages(loaded, replace(run, precision="f64"), "cuda")
        fine = True
        for what, batch, results, doubled in graphs(run, cuda, exact, batches):
            text = one_graph(f"{name}: {what}", results, doubled, run, cuda, batch, device)
            fine = fine and bool(text)
            if text:
                say(f"{name}: {what}", text)
        if fine and not run.data.source.structures:
            odd_samples(name, loaded, chosen, size, device)


def batches_of(chosen: Any, size: int) -> tuple[Any, dict[str, Any]]:
    """The run over micro-batches of so many samples; its first batch, and the first of each evaluation by name."""
    run = measured(replace(chosen, data=replace(chosen.data, batch=size * chosen.accumulate)))
    data = bind(run)
    try:
        return run, {"": data.feeds.train.batch(0)} | {e.name: next(iter(data.feeds.evals[e.name])) for e in run.evals}
    finally:
        data.close()


def odd_samples(name: str, loaded: Any, chosen: Any, done: int, device: str) -> None:
    """Forward and backward again, over odd numbers of samples."""
    seen = []
    for size in (n for n in ODD if n != done):
        try:
            run, batches = batches_of(chosen, size)
            cuda, exact = compiler.stages(loaded, run, "cuda"), compiler.stages(loaded, replace(run, precision="f64"), "cuda")
        except SexpError:  # data or a model that cannot have so many
            continue
        what, batch, results, doubled = next(graphs(run, cuda, exact, batches))
        where = 0 if interpreted() else 1
        if operations_of(results) > FEW_OPERATIONS[where] or work_of(Compiled(results, None, device)) > LITTLE[where]:
            break
        if not one_graph(f"{name}: {what} of {size} samples", results, doubled, run, cuda, batch, device):
            return
        seen.append(size)
    if seen:
        say(f"{name}: batches of {', '.join(map(str, seen))}", "forward and backward agree with the interpreter")


def graphs(run: Any, cuda: Any, exact: Any, batches: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any], Results, Results]]:
    """(what, its batch, its results, the same in float64)."""
    yield "forward and backward", batches[""], cuda.micro(True), exact.micro(True)
    yield "update", {}, cuda.update(), exact.update()
    for e in run.evals:
        batch = batches[e.name]
        size = e.data.capacity if e.data.source.structures else len(next(iter(batch.values())))
        yield f"evaluation {e.name}", batch, cuda.evaluation(e.name, size)[1], exact.evaluation(e.name, size)[1]


def operations_of(results: Results) -> int:
    """Of its matrix products, convolutions and what else is a contraction, counted before anything is computed."""
    return sum(table()[n.op].cost(n)[0] for n in postorder(results.values()) if table()[n.op].lowering.kind in ("contraction", "template"))


def work_of(compiled: Compiled) -> int:
    """Elements that its kernels go over."""
    return sum(k.rows * k.columns for k in compiled.schedule.launches if isinstance(k, Kernel))


def one_graph(what: str, results: Results, doubled: Results, run: Any, staged: Any, batch: Mapping[str, Any], device: str) -> str:
    """E-DEV-010 for the first launch that is wrong; where none is, for a result that is far from float64's. What to say where all is well."""
    with products(run.precision):
        return _one_graph(what, results, doubled, run, staged, batch, device)


def _one_graph(what: str, results: Results, doubled: Results, run: Any, staged: Any, batch: Mapping[str, Any], device: str) -> str:
    compiled = Compiled(results, None, device)
    work = work_of(compiled)
    if interpreted() and work > LARGE:
        return f"not looked at: {work:,} elements are too many for Triton's interpreter; choose smaller knobs by --set"
    bindings = values_of([*postorder(results.values()), *compiled.leaves], run, staged, batch)
    draws = drawn(run.seed, device)
    tolerance, far = NEAR.get(run.precision, NEAR["f32"])
    probes = {f"{i} {j}": node for i, launch in enumerate(compiled.schedule.launches) for j, node in enumerate(launch.stores)}
    doing(f"{what}: {len(compiled.schedule.launches)} launches, one by one")
    found = run_poisoned(probes | dict(results), bindings, device, draws)
    doing(f"{what}: the interpreter in {run.precision}")
    expected = compile_graph(probes | dict(results)).run(bindings, run.seed, STEP)
    for key, node in probes.items():
        launch = compiled.schedule.launches[int(key.split()[0])]
        if wrong := differs(found[key], expected[key], tolerance):
            place = staged.traced.origins.of(node)
            where = f" of {place.paths[0]}" if place.paths else ""
            tell(problem("E-DEV-010", f"{what}: the kernel of `{node.op}`{where} {node.type} is {wrong} from the interpreter", place.spans[0] if place.spans else None,
                         notes=[f"it computes {', '.join(dict.fromkeys(u.op for u in launch.units))}"] if isinstance(launch, Kernel) else ["a library's call"],
                         help=("please report it with the file", "--device cpu does not use it")).diagnostic)
            return ""
    doing(f"{what}: the launches as a step has them")
    whole = run_poisoned(results, bindings, device, draws)  # as a step has it: memory used again, sums at the end
    for name, value in whole.items():
        if wrong := differs(value, expected[name], tolerance):
            tell(problem("E-DEV-010", f"{what}: `{name}` is {wrong} from the interpreter, and each kernel alone is right", help="please report it with the file").diagnostic)
            return ""
    kernels = sum(isinstance(launch, Kernel) for launch in compiled.schedule.launches)
    text = f"{kernels} kernels and {len(compiled.schedule.launches) - kernels} library calls agree with the interpreter"
    if not any(n.op in DRAWS for n in postorder(results.values())):  # a draw's last bit may decide otherwise in float64
        doing(f"{what}: the interpreter in float64")
        again = compile_graph(doubled).run(values_of(postorder(doubled.values()), run, staged, batch), run.seed, STEP)
        worst = next(((n, w) for n in results if n in again and (w := differs(whole[n], again[n], far))), None)
        if worst is not None:
            tell(problem("E-DEV-010", f"{what}: `{worst[0]}` is {worst[1]} from the interpreter in float64", help=("is it a difference of large numbers? try :precision f64", "please report it with the file")).diagnostic)
            return ""
        text += ", its results with float64"
    return text


def values_of(nodes: list[Node], run: Any, staged: Any, batch: Mapping[str, Any]) -> dict[Node, torch.Tensor]:
    """Values for the leaves: data as it is; initial weights, off their zeros by a little; equal ones at every precision."""
    traced = staged.traced
    tensors = {n: torch.zeros(shape, dtype=TORCH[dtype]) for n, (dtype, shape) in state.schema(traced, run.precision).items()}
    state.initialise(traced, run.seed, tensors)
    random = torch.Generator().manual_seed(2)
    known: dict[tuple[str, str], torch.Tensor] = {}
    for name, source in state.sources(traced).items():
        moved = torch.randn(tensors[name].shape, generator=random) * 0.02
        floats = tensors[name].is_floating_point()
        known[source] = tensors[name] + (moved.abs() if source[0] == "opt" else moved) if floats else tensors[name]
    known |= {("statistic", name): torch.tensor(value, dtype=torch.float64) for name, value in run.statistics.items()}
    found: dict[Node, torch.Tensor] = {}
    for node in nodes:
        if node.op in ("input", "param", "state", "slot", "gradient", "statistic", "step") and node not in found:
            found[node] = _value(node, known, batch).to(TORCH[node.type.dtype]).reshape(node.type.shape).contiguous()
    return found


def _value(node: Node, known: Mapping[tuple[str, str], torch.Tensor], batch: Mapping[str, Any]) -> torch.Tensor:
    kind, name = source_of(node)
    if node.op == "step":
        return torch.tensor(STEP)
    if kind == "input" and name in batch:
        array = torch.from_numpy(np.array(batch[name]))
        return array[: node.type.shape[0]] if node.type.shape else array
    if kind == "input":  # the count that gradients are divided by
        return torch.ones(node.type.shape)
    if kind == "gradient":
        return torch.randn(node.type.shape, generator=torch.Generator().manual_seed(int(node.type.size) % 997)) * 0.1
    return known[kind, name]


def drawn(seed: int, device: str) -> Any:
    """What kernels ask for where they draw: the update's number, and each stream's key."""

    def find(what: str, parts: tuple) -> torch.Tensor:
        if what == "draw":
            return torch.tensor(STEP, dtype=torch.int64, device=device)
        op, path, number, _, _ = parts[0]
        key = draw_key(seed, path, number, draw_kind(op))
        return torch.tensor([key - (1 << 64) if key >= 1 << 63 else key, 0], dtype=torch.int64, device=device)

    return find


def differs(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> str:
    """How two values differ, beyond `tolerance` of the largest; empty where they do not. Compared where `found` lies: a GPU has done before a CPU has begun."""
    if found.shape != expected.shape:
        return f"of another shape, {list(found.shape)},"
    if not expected.numel():
        return ""
    expected = expected.to(found.device)
    if not expected.is_floating_point():
        share = float((found.to(torch.float64) != expected.to(torch.float64)).double().mean())
        return f"different in {share:.0%} of its elements" if share > FEW else ""
    a, b = found.double(), expected.double()
    off, largest = float((a - b).abs().max()), float(b.abs().max())
    if math.isfinite(off):  # nothing that is not finite in either
        return _off(off, largest, tolerance)
    odd = (a.isnan() != b.isnan()) | (a.isinf() != b.isinf()) | (b.isinf() & (a != b))
    if bool(odd.any()):
        return f"different in {int(odd.sum())} elements that are not finite"
    fine = b.isfinite()
    if not bool(fine.any()):
        return ""
    return _off(float((a - b)[fine].abs().max()), float(b[fine].abs().max()), tolerance)


def _off(off: float, largest: float, tolerance: float) -> str:
    return f"off by {off:.1e} (of values up to {largest:.1e})" if off > tolerance * max(largest, 1e-5) else ""


if __name__ == "__main__":
    sys.exit(main())
