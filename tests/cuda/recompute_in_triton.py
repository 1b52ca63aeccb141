"""Steps with values computed again, and with layers of `:remat`, beside steps that keep everything: `python recompute_in_triton.py CASE`."""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from pathlib import Path

from harness import tell  # first: it chooses the interpreter

# isort: split
import torch
from steps_in_triton import Case, Pair, equal, kept

from sexpgpu.passes.schedule import recompute

SMALL = ("layers=3", "heads=2", "d-model=16", "context=12", "vocabulary=64", "batch=4", "warmup=1")
CASES = {
    "gpt2": Case("gpt2", sets=(*SMALL, "precision=f32"), ranges={"tokens": 64, "targets": 64}),
    "gpt2-bf16": Case("gpt2", sets=(*SMALL, "precision=bf16"), ranges={"tokens": 64, "targets": 64}),
    "char-lm": Case("char_lm", sets=("layers=2", "heads=2", "d-model=16", "context=12", "batch=4", "steps=40", "precision=f32")),
}  # fmt: skip


def eager(recipes: bool) -> None:
    """Everything that may be computed again is, whatever it costs; what is not made of the same values then, with `recipes` alone."""
    recompute.FLOOR, recompute.SHARE = 0, 1e9
    if not recipes:
        recompute.recipe = lambda node: None


def states(pair: Pair, batches: list, wrong: list[str]) -> tuple[dict[str, torch.Tensor], int, int]:
    """The state after some steps, the planned peak of the forward and backward pass, and how many values are computed again."""
    program = pair.cuda()
    for i, batch in enumerate(batches):
        if not program.step(batch, i == 0).finite:
            wrong.append(f"step {i + 1} is not finite")
    forward, _ = program._graphs(False)
    return kept(program), forward.plan.peak, len(forward.recomputed.choices)


def main(name: str) -> None:
    what, _, case = name.partition("-")
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        pair = Pair(CASES[case], Path(folder))
        batches = [pair.batch() for _ in range(3)]
        plain, most, none = states(pair, batches, wrong)
        if what == "remat":
            other = Pair(dataclasses.replace(CASES[case], more=":remat true"), Path(folder))
            some = 1 if other.staged.traced.remat else 0
            again, less, _ = states(other, batches, wrong)
        else:
            eager(what == "gelu")
            again, less, some = states(pair, batches, wrong)
        if none or not some:
            wrong.append(f"{none} and {some} values are computed again")
        if less >= most:
            wrong.append(f"the peak went from {most} to {less}")
        worst = max((float((plain[n].double() - again[n].double()).abs().max()), n) for n in plain)
        if not (equal(plain, again) if what != "gelu" else worst[0] < 5e-3):
            wrong.append(f"other bits: {worst}")
        print(f"{name}: {some} values, peak {most} -> {less}", file=sys.stderr)
    tell(wrong, len(batches))


if __name__ == "__main__":
    main(sys.argv[1])
