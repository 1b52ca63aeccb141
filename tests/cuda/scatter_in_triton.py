"""Rows added at sorted indices, by Triton's interpreter, against a sum in float64: `python scatter_in_triton.py`."""

from __future__ import annotations

from harness import DEVICE, compare, tell  # first: it chooses the interpreter

# isort: split
import itertools

import torch

from sexpgpu.backends.cuda import library
from sexpgpu.backends.cuda.executable import Compiled
from sexpgpu.ops import build
from sexpgpu.passes.autodiff import grad

#: updates, places, columns, how often one place is named: fewer than a program takes, keys across several, one key for all, odd widths
CASES = [(1, 3, 128, 0), (5, 4, 130, 0), (33, 7, 300, 0), (70, 40, 257, 0), (64, 9, 128, 64), (300, 5, 129, 280), (129, 500, 128, 33), (97, 1, 140, 0)]


def tied() -> list[str]:
    """A table that is both embedding and head: its gradient is the head's with the embedding's added where it stands."""
    table = build("param", path="t", shape=(9, 128), dtype="f32")
    tokens, labels = (build("input", name=n, shape=(2, 5), dtype="i32", batch=True) for n in ("tokens", "labels"))
    x = build("sin", build("embed", table, tokens))
    logits = build("matmul", x, build("transpose", table, permutation=(1, 0)))
    loss = build("mean", build("softmax-cross-entropy", logits, labels), axis=(0, 1))
    results = {"loss": loss, "gradient": grad(loss, [table])[0]}
    random = torch.Generator().manual_seed(0)
    bindings = {table: torch.randn(9, 128, generator=random)}
    bindings |= {n: torch.randint(0, 9, (2, 5), generator=random, dtype=torch.int32) for n in (tokens, labels)}
    failures = [text for placed in (True, False) for text in compare(results, bindings, 2e-6, placed)]
    compiled = Compiled(results, dict.fromkeys(results), DEVICE)
    if list(compiled.lent.values()) != ["gradient"] or Compiled(results, None, DEVICE).lent:
        failures.append(f"made in the place of {list(compiled.lent.values())}")
    return failures


def main() -> tuple[list[str], int]:
    failures = []
    for (count, places, columns, often), dtype in itertools.product(CASES, (torch.float32, torch.float64)):
        random = torch.Generator().manual_seed(count)
        indices = torch.randint(0, places, (count,), generator=random, dtype=torch.int32)
        indices[:often] = places // 2
        indices = indices[torch.randperm(count, generator=random)]
        rows, base = (torch.randn(n, columns, generator=random, dtype=dtype) for n in (count, places))
        expected = base.double().index_add(0, indices, rows.double())
        found = []
        for _ in range(2):
            room = torch.full((places + 2, columns), float("nan"), dtype=dtype)  # a row of NaN on either side
            room[1:-1] = base
            room = room.to(DEVICE)
            library.add_rows(room[1:-1], rows.to(DEVICE), indices.to(DEVICE))
            found.append(room.cpu())
        apart = (found[0][1:-1].double() - expected).abs().max().item()
        name = f"{count} onto {places} by {columns} of {dtype}"
        if not apart < (1e-15 if dtype == torch.float64 else 1e-6) * max(10, count):
            failures.append(f"{name}: off by {apart:.1e}")
        if not torch.equal(found[0][1:-1], found[1][1:-1]):
            failures.append(f"{name}: two runs differ")
        if not (found[0][0].isnan().all() and found[0][-1].isnan().all()):
            failures.append(f"{name}: wrote beside")
    outside = torch.zeros(3, 128, device=DEVICE)
    library.add_rows(outside, torch.ones(4, 128, device=DEVICE), torch.tensor([-1, 3, 1, 70], dtype=torch.int32, device=DEVICE))
    if outside.cpu().sum(1).tolist() != [0.0, 128.0, 0.0]:
        failures.append(f"indices outside: {outside.sum(1).tolist()}")
    return failures + tied(), 2 * len(CASES) + 2


if __name__ == "__main__":
    tell(*main())
