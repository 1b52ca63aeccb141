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

from sexpgpu.backends.cuda import library
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
    arena = program._activations
    program.collect(program.launch(batches[:2], False))  # two steps of one replay, and an evaluation, in the memory that is there
    for evaluation in pair.run.evals[:1]:
        program.evaluate(evaluation.name, pair.batch(evaluation.data.batch))
    if program._activations is not arena or len(arena) != program.plan.arena:
        wrong.append(f"an arena of {len(arena)} bytes where {program.plan.arena} are planned, or another one")
    forward, _ = program._graphs(False)
    more = len(program._graphs(True)[0].schedule.launches) - len(forward.schedule.launches)
    if more > 4:
        wrong.append(f"a logged step has {more} launches more")  # what is watched is there already, whatever is computed again
    return kept(program), forward.plan.peak, len(forward.recomputed.choices)


def heads() -> list[str]:
    """The head's losses and gradients in parts of its logits, beside the whole at once; a weight as it is and turned."""
    def multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, added: bool = False) -> None:
        out.copy_(a.float() @ b.float() + (out if added else 0))

    library.multiply, library.LEAST = multiply, 1  # type: ignore[assignment]
    wrong, generator = [], torch.Generator().manual_seed(1)
    for rows, classes, turned, wanted in ((13, 50, True, (0, 1, 2)), (13, 50, False, (0, 1, 2)), (12, 7, True, (2,)), (5, 130, False, (1,)), (1, 3, True, (0, 2))):
        x = torch.randn((rows, 6), generator=generator, requires_grad=True)
        weight = torch.randn((6, classes), generator=generator, requires_grad=True)
        labels, ct = torch.randint(0, classes, (rows,), generator=generator, dtype=torch.int32), torch.randn(rows, generator=generator)
        losses = torch.nn.functional.cross_entropy(x @ weight, labels.long(), reduction="none")
        (losses * ct).sum().backward()
        given = weight.detach().T.contiguous().T if turned else weight.detach()
        expected = {0: x.grad, 1: weight.grad.T if turned else weight.grad, 2: losses.detach()}
        outs = {of: torch.full(expected[of].shape, float("nan")) for of in wanted}
        step = library.logits_rows(rows, classes, 4)
        operands = [x.detach(), given, labels] + ([ct] if wanted != (2,) else [])
        library.heads_in_parts(operands, outs, torch.full((step * classes * 4,), 0xFF, dtype=torch.uint8))
        wrong += [f"{rows} x {classes}, result {of}" for of in wanted if not torch.allclose(outs[of], expected[of], atol=1e-5, rtol=1e-5)]
        if rows > 6 and -(-rows // step) < 4:
            wrong.append(f"{rows} rows stand in parts of {step}")
    return wrong


def main(name: str) -> None:
    if name == "heads":
        tell(heads(), 5)
        return
    what, _, case = name.partition("-")
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        watched = ":metrics ((m lm-loss))" if what == "watched" else ""
        pair = Pair(dataclasses.replace(CASES[case], more=watched), Path(folder))
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
