"""Rows added at sorted indices, by Triton's interpreter, against a sum in float64: `python scatter_in_triton.py`."""

from __future__ import annotations

from harness import DEVICE, tell  # first: it chooses the interpreter

# isort: split
import torch

from sexpgpu.backends.cuda import library

#: updates, places, columns, how often one place is named: fewer than a program takes, keys across several, one key for all, odd widths
CASES = [(1, 3, 128, 0), (5, 4, 130, 0), (33, 7, 300, 0), (70, 40, 257, 0), (64, 9, 128, 64), (300, 5, 129, 280), (129, 500, 128, 33), (97, 1, 140, 0)]


def main() -> tuple[list[str], int]:
    failures = []
    for count, places, columns, often in CASES:
        random = torch.Generator().manual_seed(count)
        indices = torch.randint(0, places, (count,), generator=random, dtype=torch.int32)
        indices[:often] = places // 2
        indices = indices[torch.randperm(count, generator=random)]
        rows, base = torch.randn(count, columns, generator=random), torch.randn(places, columns, generator=random)
        expected = base.double().index_add(0, indices, rows.double())
        found = []
        for _ in range(2):
            room = torch.full((places + 2, columns), float("nan"))  # a row of NaN on either side
            room[1:-1] = base
            room = room.to(DEVICE)
            library.add_rows(room[1:-1], rows.to(DEVICE), indices.to(DEVICE))
            found.append(room.cpu())
        apart = (found[0][1:-1].double() - expected).abs().max().item()
        name = f"{count} onto {places} by {columns}"
        if not apart < 1e-6 * max(10, count):
            failures.append(f"{name}: off by {apart:.1e}")
        if not torch.equal(found[0][1:-1], found[1][1:-1]):
            failures.append(f"{name}: two runs differ")
        if not (found[0][0].isnan().all() and found[0][-1].isnan().all()):
            failures.append(f"{name}: wrote beside")
    outside = torch.zeros(3, 128, device=DEVICE)
    library.add_rows(outside, torch.ones(4, 128, device=DEVICE), torch.tensor([-1, 3, 1, 70], dtype=torch.int32, device=DEVICE))
    if outside.cpu().sum(1).tolist() != [0.0, 128.0, 0.0]:
        failures.append(f"indices outside: {outside.sum(1).tolist()}")
    return failures, len(CASES) + 1


if __name__ == "__main__":
    tell(*main())
