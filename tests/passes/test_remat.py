"""`:remat`: the order in which calls run again, and runs on the CPU beside those that keep everything."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from sexpgpu import compiler
from sexpgpu.backends.interpreter.plan import run_plan
from sexpgpu.backends.interpreter.program import InterpreterProgram
from sexpgpu.compiler import Selection, Stages, load, trajectory
from sexpgpu.ir import postorder
from sexpgpu.passes.remat import Item, turns
from sexpgpu.passes.schedule.memory import in_turn

ROOT = Path(__file__).resolve().parents[2]


def second(value: object) -> str:
    return f"{value}'"


# a -> [b c] -> d, of which the call gives d to others; the backward pass reads c and b
CALL = [
    Item((), ("a",)), Item(("a",), ("b",), "f"), Item(("b",), ("c",), "f"), Item(("c",), ("d",), "f"), Item(("d",), ("loss",), "g"),
    Item(("loss", "c"), ("dc",), backward=True), Item(("dc", "b", "d"), ("db",), backward=True), Item(("db", "a"), ("da",)),
]  # fmt: skip


def test_a_call_runs_again_before_its_values_are_read() -> None:
    found = turns(CALL, ["loss", "da"], second)
    assert [(t.number, t.second) for t in found] == [(0, False), (1, False), (2, False), (3, False), (4, False), (1, True), (2, True), (5, False), (6, False), (7, False)]
    assert [dict(t.again) for t in found[5:]] == [{"b": "b'"}, {"b": "b'", "c": "c'"}, {"c": "c'"}, {"b": "b'"}, {}]


@pytest.mark.parametrize(("change", "repeated"), [
    ({}, [1, 2]),
    ({1: {"call": "h"}}, [2]),  # b is of one call and read by another: it is kept
    ({2: {"fixed": True}}, [1]),  # c was drawn
    ({4: {"call": ""}}, [1, 2, 3]),  # d is read by what does not run again
    ({5: {"reads": ("loss",)}, 6: {"reads": ("dc",)}}, []),  # nothing is wanted again
    ({1: {"whole": "w"}, 2: {"whole": "w"}, 6: {"reads": ("dc",)}}, [1, 2]),  # parts of one piece of work
])  # fmt: skip
def test_what_runs_again(change: dict[int, dict], repeated: list[int]) -> None:
    items = [replace(item, **change.get(i, {})) for i, item in enumerate(CALL)]
    assert [t.number for t in turns(items, ["loss", "da"], second) if t.second] == repeated


def test_a_result_is_kept() -> None:
    assert [t.number for t in turns(CALL, ["loss", "da", "c"], second) if t.second] == [1]


def test_work_that_frees_memory_comes_first() -> None:
    """1 and 2 both may follow 0; 2 is the last reader of what 0 made but for 1, whose own value is large."""
    order = in_turn([set(), {0}, {0}, {1}], [[], ["x"], ["x"], ["y"]], [["x"], ["y"], [], []], lambda v: {"x": 8, "y": 64}[v], [0, 1, 2, 3])
    assert order == [0, 2, 1, 3]
    kept = in_turn([set(), {0}, {0}], [[], [], []], [["x"], ["y"], ["z"]], lambda v: 1, [0, 2, 1], ["a", None, "a"])
    assert kept == [0, 2, 1]  # parts of one call follow one another


# --- runs ---

SMALL = {
    "gpt2": ("layers=3", "heads=2", "d-model=16", "context=16", "vocabulary=64", "batch=4", "precision=f32"),
    "char_lm": ("layers=3", "heads=2", "d-model=16", "context=16", "batch=4"),
    "conv_digits": ("channels=4", "batch=8"),
}


def staged(name: str, folder: Path, more: str = "") -> Stages:
    text = (ROOT / f"examples/{name}.lisp").read_text("utf-8").replace("  :seed seed", f"  :seed seed {more}")
    assert more in text
    file = folder / "p.lisp"
    file.write_text(text, "utf-8")
    loaded = load(str(file), Selection(sets=SMALL[name]))
    return compiler.stages(loaded, next(iter(loaded.experiment.runs.values())))


def trained(stages: Stages) -> tuple[dict[str, torch.Tensor], list[float]]:
    program = InterpreterProgram(stages, 1)
    program.initialise()
    fields = {n.attrs["name"]: n.type for n in postorder(stages.micro(True).values()) if n.op == "input"}
    random, losses = np.random.default_rng(1), []
    for i in range(3):
        batch = {n: (random.random(t.shape) if t.dtype.startswith("f") else random.integers(0, 10, t.shape)) for n, t in fields.items()}
        batch = {n: a.astype({"f32": np.float32, "u8": np.uint8}.get(fields[n].dtype, np.int32)) for n, a in batch.items()}
        losses.append(program.step(batch, i == 0).loss)
    state = {name: tensor.clone() for name, tensor in program.state().items()}
    program.close()
    return state, losses


@pytest.mark.parametrize(("name", "names", "saved"), [("gpt2", "true", 0.5), ("gpt2", "(feed-forward)", 0.8), ("char_lm", "(block)", 0.6), ("conv_digits", "true", 0.95)])
def test_a_run_on_the_cpu_is_the_same(name: str, names: str, saved: float, tmp_path: Path) -> None:
    plain, again = staged(name, tmp_path), staged(name, tmp_path, f":remat {names}")
    assert not plain.traced.remat and again.traced.remat
    assert run_plan(again).step <= saved * run_plan(plain).step
    (state, losses), (other, theirs) = trained(plain), trained(again)
    assert losses == theirs and all(torch.equal(state[n], other[n]) for n in state)


def test_it_is_no_part_of_what_a_resume_compares(tmp_path: Path) -> None:
    plain, again = staged("gpt2", tmp_path), staged("gpt2", tmp_path, ":remat true")
    assert trajectory(plain.traced, plain.run) == trajectory(again.traced, again.run)


def test_which_calls(tmp_path: Path) -> None:
    assert staged("gpt2", tmp_path, ":remat true").traced.remat == ("gpt2/0/block/0", "gpt2/0/block/1", "gpt2/0/block/2", "gpt2/0/layer-norm/0")
    assert staged("gpt2", tmp_path, ":remat (feed-forward)").traced.remat == tuple(f"gpt2/0/block/{i}/feed-forward/0" for i in range(3))
    assert staged("gpt2", tmp_path, ":remat (dense feed-forward)").traced.remat[:2] == ("gpt2/0/block/0/self-attention/0/qkv", "gpt2/0/block/0/self-attention/0/out")
    assert staged("gpt2", tmp_path, ":remat false").traced.remat == ()
