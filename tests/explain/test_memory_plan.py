"""The planned memory of a run against what torch's allocator reports for it: of whole runs, and step by step."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from sexpgpu import compiler
from sexpgpu.backends.interpreter import Executable
from sexpgpu.backends.interpreter.dtypes import TORCH
from sexpgpu.backends.interpreter.lines import write
from sexpgpu.backends.interpreter.plan import Storages, forward_program, held, place, update_program
from sexpgpu.backends.interpreter.scratch import scratch
from sexpgpu.backends.interpreter.shapes import contiguous, dense, viewed
from sexpgpu.backends.leaves import flat_update
from sexpgpu.experiment.load import Selection
from sexpgpu.ops import build, table
from sexpgpu.ops.definition import OpProblem
from sexpgpu.run.bind import bind

ROOT = Path(__file__).resolve().parents[2]


def _benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_cpu_memory", ROOT / "benchmarks/cpu_memory.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


benchmark = _benchmark()
SMALL_CHAR_LM = ("layers=2", "d-model=64", "batch=16")


@pytest.mark.parametrize(("case", "sets", "within"), [
    ("digits", (), 0.002), ("vae", (), 0.001), ("pinn", (), 0.001), ("own_optimizer", (), 0.001), ("conv_digits", (), 0.01),
    ("char LM at default knobs", SMALL_CHAR_LM, 0.001), ("char LM, f32", SMALL_CHAR_LM, 0.001), ("conv net", (), 0.01), ("conv net, bf16", (), 0.01),
    ("conv net", ("stride=2",), 0.02), ("conv net", ("k=5", "parts=4"), 0.02), ("conv net", ("batch=1",), 0.02),
    ("a perceptron of 1.2 GB", ("wide=1024",), 0.001), ("a perceptron of 0.3 GB in 2 parts", ("wide=512",), 0.001),
])  # fmt: skip
def test_the_plan_is_what_the_allocator_says(tmp_path: Path, case: str, sets: tuple[str, ...], within: float) -> None:
    known = benchmark.CASES[case]
    merged = dict(text.split("=") for text in (*known.sets, *sets))
    plan, measured = benchmark.planned_and_measured(benchmark.place(known, tmp_path), tuple(f"{k}={v}" for k, v in merged.items()))
    assert measured > 0 and benchmark.total(plan) == pytest.approx(measured, rel=within)


MARK = 555_000_000  # bytes of blocks that no program asks for: they lie between the blocks of two steps


@pytest.mark.parametrize(("case", "sets"), [
    ("digits", ()), ("vae", ()), ("char LM at default knobs", ("layers=1", "d-model=64", "batch=8")),
    ("char LM, f32", ("precision=f32", "layers=1", "d-model=64", "batch=8")), ("conv net", ("batch=8",)),
])  # fmt: skip
def test_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, sets: tuple[str, ...]) -> None:
    """What lies there before each step is planned to the byte; what a call takes for itself, to a part in fifty."""
    monkeypatch.setattr("sexpgpu.backends.interpreter.draws.LEAST", 10**12)  # masks are drawn in their step
    loaded = compiler.load(benchmark.place(benchmark.CASES[case], tmp_path), Selection(sets=sets))
    run = compiler.choose_run(loaded.experiment, None)
    staged = compiler.stages(loaded, run)
    program = compiler.program(staged, "cpu", 1)
    program.initialise()
    feed = bind(run).feeds.train
    program.step(feed.batch(0), False)
    written = [forward_program(staged.micro(False)), update_program(flat_update(staged))]
    for bound, lines in zip((program._forward[False], program._update), written, strict=True):
        space = dict(bound.executable._program.__globals__)
        space["mark"] = lambda number: torch.empty(MARK + number, dtype=torch.uint8)
        exec(compile(_marked(lines.text), "marked", "exec"), space)  # noqa: S102 - our own text
        bound.executable._program = space["program"]
    batch = feed.batch(1)
    program.step(batch, False)
    graphs = _cut(benchmark.blocks(lambda: program.step(batch, False)))
    program.close()
    assert len(graphs) == 2
    for steps, lines in zip(graphs, written, strict=True):
        memory = Storages({}, {}, {}, {})
        base = steps[0][0]
        for line, (before, peak) in zip(lines.lines, steps, strict=True):
            assert before - base == memory.now, line.source
            taken = scratch(line.step, memory.at, 1)
            for output in line.step.outputs:
                place(output, line.step, line.over, line.home, memory)
            assert peak - base == pytest.approx(memory.now + taken, rel=0.01, abs=4096), line.source
            for value in [o for o in line.step.outputs if o not in lines.needed] + list(line.dead):
                memory.drop(value)


def _marked(text: list[str]) -> str:
    """A program with a block of its own size before each step."""
    found, number = [], 0
    for line in text:
        if re.match(r" [v_]\w*(, [v_]\w*)* = ", line) and "leaves[" not in line and ".clone()" not in line:
            found.append(f" mark({number})")
            number += 1
        found.append(line)
    return "\n".join(found)


def _cut(found: list[int]) -> list[list[tuple[int, int]]]:
    """Of each program: (bytes before a step, the most until the next) of its steps."""
    graphs: list[list[tuple[int, int]]] = []
    now = 0
    for count in found:
        number = abs(count) - MARK
        if 0 <= number < 1_000_000:
            if count > 0:
                if number == 0:
                    graphs.append([])
                graphs[-1].append((now, now))
            continue
        now += count
        if graphs:
            before, peak = graphs[-1][-1]
            graphs[-1][-1] = before, max(peak, now)
    return graphs


def test_strides_are_torch_s() -> None:
    for shape, order, new in (((2, 3, 4), (0, 1, 2), (6, 4)), ((2, 3, 4), (1, 0, 2), (6, 4)), ((2, 3, 4), (0, 2, 1), (2, 12)), ((2, 1, 4), (1, 0, 2), (2, 4)),
                              ((4, 6), (0, 1), (4, 2, 3)), ((4, 6), (1, 0), (2, 3, 4)), ((4, 6), (1, 0), (24,)), ((1,), (0,), ())):  # fmt: skip
        x = torch.empty(shape).permute(order)
        known = viewed(tuple(x.shape), x.stride(), new)
        copied = x.reshape(new).data_ptr() != x.data_ptr()
        assert (known is None) == copied, (shape, order, new)
        assert copied or known == x.reshape(new).stride()
        assert dense(tuple(x.shape), x.stride()) == x.is_non_overlapping_and_dense() if hasattr(x, "is_non_overlapping_and_dense") else True
        assert contiguous(shape) == torch.empty(shape).stride()


SQUARE = ((128, 128), "f32")
LABELS = ((128,), "i32")
OTHERS = [
    ("softmax-cross-entropy", (SQUARE, LABELS), {}), ("softmax-cross-entropy-grad", (SQUARE, LABELS, ((128,), "f32")), {}),
    ("normalize", (SQUARE,), {"axis": 0}), ("normalize", (SQUARE,), {"center": False}), ("normalize-grad", (SQUARE, SQUARE), {}),
    ("normalize-grad", (SQUARE, SQUARE), {"axis": 0}), ("normalize-grad", (SQUARE, SQUARE), {"center": False}), ("softmax-grad", (SQUARE, SQUARE), {}),
    ("embed", (SQUARE, ((256,), "i32")), {}), ("gather", (SQUARE, ((256,), "i32")), {"axis": 0}), ("scatter-add", (SQUARE, LABELS), {"axis": 0, "count": 128}),
    ("take-along", (SQUARE, ((128, 64), "i32")), {"axis": -1}), ("one-hot", (((256,), "i32"),), {"count": 128}), ("concat", (SQUARE, SQUARE), {"axis": 0}),
    ("sort-along", (SQUARE,), {}), ("argsort", (SQUARE,), {}), ("top-k", (SQUARE,), {"k": 4}), ("max-pool", (((4, 8, 32, 32), "f32"),), {"window": 2}),
    ("average-pool", (((4, 8, 32, 32), "f32"),), {"window": 2}), ("linear-cross-entropy", (SQUARE, SQUARE, LABELS), {}),
    ("attend", (((4, 4, 128, 32), "f32"),) * 3, {"causal": True}), ("einsum", (SQUARE, SQUARE), {"equation": "ij,jk->ik"}), ("matmul", (((4, 64, 32), "f32"), ((4, 32, 64), "f32")), {}),
    ("matmul", (((64, 64), "bf16"), ((64, 256), "bf16")), {}), ("matmul-bias", (((256, 64), "f32"), ((64, 64), "f32"), ((64,), "f32")), {}),
]
OPS = [(name, (SQUARE,) * len(op.operands), {}) for name, op in table().items()
       if op.lowering.kind == "pointwise" and op.operands and not name.startswith("random") and name not in ("one-hot", "where", "cast")]  # fmt: skip
OPS += [(name, (SQUARE,), {"axis": axis}) for name in ("sum", "mean", "logsumexp", "variance", "softmax", "reduce-max", "cumsum", "argmax") for axis in (0, -1)]


@pytest.mark.parametrize("case", [*OPS, *OTHERS], ids=lambda case: case[0])
def test_each_op_takes_what_is_known_of_it(case: tuple[str, tuple[tuple[tuple[int, ...], str], ...], dict[str, Any]]) -> None:
    name, operands, attrs = case
    torch.manual_seed(0)
    try:
        leaves = [build("input", name=f"x{i}", dtype=dtype, shape=shape, batch=False) for i, (shape, dtype) in enumerate(operands)]
        node = build(name, *leaves, **attrs)
    except OpProblem:  # one of booleans or integers: it moves no floats to speak of
        return
    values = {leaf: (torch.rand(leaf.type.shape) * 0.8 + 0.1).to(TORCH[leaf.type.dtype]) if leaf.type.is_float
              else torch.randint(0, 100, leaf.type.shape, dtype=torch.int32) for leaf in leaves}  # fmt: skip
    executable = Executable({"y": node}, fused=False)
    executable.run(values)
    now = most = 0
    for count in benchmark.blocks(lambda: executable.run(values)):
        now += count
        most = max(most, now)
    lines = write({"y": node}, executable.leaves, fused=False)
    assert held(lines).bytes == pytest.approx(most, rel=0.1, abs=4096)


def test_a_chain() -> None:
    x = build("input", name="x", dtype="f32", shape=(256,), batch=False)
    a = build("softmax", x, axis=-1)  # which writes over nothing
    b = build("softmax", a, axis=-1)
    d = build("sum", build("reshape", b, shape=(16, 16)))
    found = held(forward_program({"d": d}))
    assert found.bytes == 2 * 1024, "a and b live together; the view and the leaf add nothing"
    assert [value for _, value in found.values] == [a, b]
    assert held(forward_program({"gradient/b": b})).bytes == 2 * 1024, "an op that cannot write elsewhere has its value until it is copied"
    e = build("exp", a)
    assert held(forward_program({"e": e})).bytes == 1024, "exp writes over its operand"
    assert held(forward_program({"gradient/e": e})).bytes == 1024, "or to where it belongs"
    assert held(forward_program({"sum": build("+", a, b)})).bytes == 2 * 1024, "over one of its operands"
