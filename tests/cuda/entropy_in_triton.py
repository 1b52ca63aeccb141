"""The kernels of a head's rows of logits, the one that reads a row once and the one that reads it twice, by Triton's interpreter, against
float64: `python entropy_in_triton.py PART`, `rows`, `parts` or `types`."""

from __future__ import annotations

import sys

from harness import BAND, DEVICE, poison, tell  # first: it chooses the interpreter

# isort: split
import torch

from sexpgpu.backends.cuda import choice, library
from sexpgpu.backends.cuda.choice import Switch
from sexpgpu.backends.interpreter.dtypes import TORCH
from sexpgpu.ir import Node
from sexpgpu.ops import build, table

#: tiles of 4,096 classes without a rest, with one, rows of 4 bytes' alignment, GPT-2's classes, the most there are
CLASSES = (16384, 16386, 20002, 50304, 65536)
LARGEST = torch.finfo(torch.bfloat16).max
INFINITE = float("inf")


def rows(classes: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, labels and ct: rows of all that is not usual, and one that is."""
    random = torch.Generator().manual_seed(classes)
    last, made = classes - 1, []

    def row(label: int, ct: float = 1.5, **at: float) -> torch.Tensor:
        made.append((x := (torch.randn(classes, generator=random) * 3).bfloat16(), label, ct))
        return x

    row(classes // 3)
    row(0)
    row(last, -1.0)
    row(last - 1)[0] = 11.0
    row(7)[7] = float("nan")
    row(3)[last] = float("nan")
    row(5).fill_(float("nan"))
    row(5).fill_(-INFINITE)
    one = row(6)
    one.fill_(-INFINITE)
    one[6] = 2.0
    few = row(2)
    few[: classes // 2] = -INFINITE  # the label's too
    row(1)[9] = INFINITE
    row(9)[9] = INFINITE
    row(last)[last] = 60.0  # its probability is 1, for f32
    row(4)[last] = -60.0
    row(4)[8] = 60.0
    row(last)[: last // 2] += 1000.0
    row(11, 0.25)[11] = LARGEST
    row(12)[11] = LARGEST
    row(13)[13] = -LARGEST
    row(14, 0.0)
    row(15, 0.0)[15] = 60.0
    row(-1)
    row(classes, 2.0)
    row(classes + 40)
    row(0).fill_(3.0)
    row(last, 1e-6)
    return torch.stack([x for x, _, _ in made]), torch.tensor([y for _, y, _ in made], dtype=torch.int32), torch.tensor([c for _, _, c in made])


def expected(x: torch.Tensor, labels: torch.Tensor, ct: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Losses, gradients, and where the labels are, in float64."""
    z = x.double()
    sums = torch.logsumexp(z, 1)
    inside = (labels >= 0) & (labels < x.shape[1])
    hot = torch.zeros(x.shape, dtype=torch.bool)
    hot[inside, labels[inside].long()] = True
    picked = z.gather(1, labels.clamp(0, x.shape[1] - 1).long()[:, None])[:, 0]
    return sums - picked, (torch.exp(z - sums[:, None]) - hot.double()) * ct.double()[:, None], hot


def near(a: torch.Tensor, b: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    return (a == b) | (a.isnan() & b.isnan()) | ((a - b).abs() <= allowed)


def differs(name: str, x: torch.Tensor, labels: torch.Tensor, ct: torch.Tensor) -> list[str]:
    """What the kernel of choice makes of them, in memory of NaN."""
    count, classes = x.shape
    room = poison(x.numel() + 2 * BAND, torch.bfloat16)
    logits = room[BAND:-BAND].view(count, classes)
    logits.copy_(x)
    before = room[:BAND].cpu().view(torch.int16).clone(), room[-BAND:].cpu().view(torch.int16).clone()
    losses = torch.full((count + 2,), 7.0, device=DEVICE)
    library.entropy(logits, labels.to(DEVICE), ct.to(DEVICE), losses[1:])
    found, lost, given = logits.cpu().double(), losses.cpu()[1:-1].double(), losses.cpu()
    by_loss, by_logits, hot = expected(x, labels, ct)
    inside = hot.any(1)
    wrong = []
    good = near(lost, by_loss, 5e-6 * (1 + by_loss.abs())) | ~inside  # a label outside has no loss
    wrong += [f"{name}: loss of row {i} is {lost[i]} for {by_loss[i]}" for i in (~good).nonzero()[:, 0].tolist()]
    scale = ct.double().abs()[:, None]
    good = near(found, by_logits, 2**-8 * by_logits.abs() + torch.where(hot, 1e-6, 1e-9) * scale)
    wrong += [f"{name}: gradient of row {i} at {j} is {found[i, j]} for {by_logits[i, j]}" for i, j in (~good).nonzero().tolist()[:5]]
    after = room[:BAND].cpu().view(torch.int16), room[-BAND:].cpu().view(torch.int16)
    if not all(map(torch.equal, before, after)) or given[0] != 7 or given[-1] != 7:
        wrong.append(f"{name}: wrote beside")
    return wrong


def of_rows() -> tuple[list[str], int]:
    failures, count = [], 0
    for classes in CLASSES:
        for once in (True, False):
            choice.SWITCH = Switch(once=once)
            if (library._row_kernel(torch.bfloat16, classes, True)[0] == "entropy_once") != once:
                failures.append(f"{classes} classes are not read once")
            failures += differs(f"{classes} classes, {'once' if once else 'twice'}", *rows(classes))
            count += 1
    return failures, count


def head(dtype: str, classes: int, near: tuple[float, float]) -> tuple[list[str], list[Node]]:
    """A head's losses and gradients, some rows at a time, beside its references: what differs by more than `near`, of gradients and of losses, relative."""
    def multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, added: bool = False) -> None:
        wide = torch.float64 if dtype == "f64" else torch.float32
        out.copy_(a.to(wide) @ b.to(wide) + (out if added else 0))

    library.multiply, library.LEAST = multiply, 1  # type: ignore[assignment]
    failures, count, wide = [], 11, "f64" if dtype == "f64" else "f32"
    random = torch.Generator().manual_seed(3)
    x, weight = (torch.randn(shape, generator=random, dtype=TORCH[wide]).to(TORCH[dtype]) for shape in ((count, 8), (8, classes)))
    labels = torch.randint(0, classes, (count,), generator=random, dtype=torch.int32)
    ct = torch.randn(count, generator=random, dtype=TORCH[wide])
    leaves = [build("input", name=n, shape=shape, dtype=kind, batch=False)
              for n, shape, kind in (("x", (count, 8), dtype), ("w", (8, classes), dtype), ("y", (count,), "i32"), ("ct", (count,), wide))]
    nodes = [build("linear-cross-entropy-grad", *leaves, of=of) for of in range(3)]
    outs = {of: torch.full(node.type.shape, float("nan"), dtype=TORCH[node.type.dtype], device=DEVICE) for of, node in enumerate(nodes)}
    operands = [t.to(DEVICE) for t in (x, weight, labels, ct)]
    library.heads_in_parts(operands, outs, torch.full((library.heads_scratch(nodes[0]),), 0xFF, dtype=torch.uint8, device=DEVICE))
    for of, node in enumerate(nodes):
        wanted = table()[node.op].reference(torch, node, [x, weight, labels, ct]).double()
        apart = (outs[of].cpu().double() - wanted).norm() / wanted.norm()
        if not apart < near[of == 2]:
            failures.append(f"result {of} of {dtype}: off by {apart:.1e}")
    if library.logits_rows(count, classes, x.element_size()) >= count:
        failures.append("all rows stand at once")
    return failures, nodes


def of_types() -> tuple[list[str], int]:
    """The other types: sums of f64 are in f64."""
    cases = {"f64": (1e-13, 1e-13), "f32": (2e-6, 1e-6), "f16": (1e-3, 1e-6)}
    return [text for dtype, near in cases.items() for text in head(dtype, 5003, near)[0]], len(cases)


def of_parts() -> tuple[list[str], int]:
    """A head of bf16."""
    failures, nodes = head("bf16", 16390, (4e-3, 1e-6))
    choice.SWITCH = Switch(once=True)
    function, arguments, options = library.heads_ahead(nodes[0])[0]
    if len(arguments) != len(function.arg_names) or arguments[:4] != (torch.int32, torch.int32, torch.float32, torch.float32) or options != {"num_warps": 16}:
        failures.append(f"compiled ahead: {arguments}, {options}")
    return failures, len(nodes)


if __name__ == "__main__":
    tell(*{"rows": of_rows, "parts": of_parts, "types": of_types}[sys.argv[1]]())
