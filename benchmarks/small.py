"""Models so small that launches are their time, beside PyTorch's best: the torch.compile'd step, captured whole by hand, ten
steps a replay, its batches on the device. Ours: launches of as many steps, and the run's own loop. Each side is a process; blocks of
steps take turns. JSON lines: ms a step (median, least, most), nodes a step, losses of the same 50 steps. Needs a GPU.

    python benchmarks/small.py

On a CPU, as a check of this script: TRITON_INTERPRET=1 python benchmarks/small.py --device cpu --only perceptron --steps 20 --rounds 1
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sides import (
    Answers,
    Batch,
    Side,
    Sides,
    initial,
    launches,
    program_of,
    ratios,
    say,
    serve,
    staged_of,
    summary,
    timed,
    tokens,
)
from torch_models import Perceptron, Transformer

from sexpgpu.run.events import StepDone
from sexpgpu.run.loop import Feeds, train

TOGETHER = 10
COMPARED = 50  # steps after which losses are compared


@dataclass(frozen=True)
class Case:
    file: str
    precision: str
    bar: float  # theirs over ours, at least


CASES = {
    "perceptron-tf32": Case("perceptron", "tf32", 1.5),
    "perceptron-f32": Case("perceptron", "f32", 1.5),
    "transformer-bf16": Case("transformer", "bf16", 1.3),
    "transformer-tf32": Case("transformer", "tf32", 1.3),
}


def batches_of(case: Case) -> list[Batch]:
    """TOGETHER batches, seen again and again by both sides in this order."""
    if case.file == "transformer":
        return tokens(TOGETHER, 16, 128, 256)
    rng = np.random.default_rng(0)
    means = rng.standard_normal((10, 784)).astype(np.float32)
    labels = [rng.integers(0, 10, 128).astype(np.int32) for _ in range(TOGETHER)]
    return [{"x": 0.5 * (0.1 * means[y] + rng.standard_normal((128, 784)).astype(np.float32)), "label": y} for y in labels]


# --- PyTorch ------------


def theirs(case: Case, device: str, mode: str) -> tuple[dict[str, Any], Answers]:
    """The step of the compiled model; on a GPU TOGETHER of them in one CUDA graph, whose batches are copied in before each replay."""
    torch.set_float32_matmul_precision("highest" if case.precision == "f32" else "high")
    torch.manual_seed(0)
    batches, cuda = batches_of(case), device == "cuda"
    model = Perceptron() if case.file == "perceptron" else Transformer()
    model.take(initial(staged_of(f"benchmarks/programs/{case.file}.lisp", (f"precision={case.precision}",))))
    model.to(device)
    saved = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=cuda, capturable=cuda)

    def loss_of(*values: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=case.precision == "bf16", cache_enabled=not cuda):
            return model(*values)

    fast = loss_of if mode == "eager" else torch.compile(loss_of)
    source = {n: torch.from_numpy(np.stack([b[n] for b in batches])) for n in batches[0]}
    source = {n: (t.long() if t.dtype == torch.int32 else t).to(device) for n, t in source.items()}
    fields = {n: t.clone() for n, t in source.items()}

    def step(i: int) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = fast(*(t[i] for t in fields.values()))
        loss.backward()
        optimizer.step()
        return loss

    first = step(0).item()  # compiled on the stream that everything else uses
    if cuda:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for i in range(3):
                step(i)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph, last = torch.cuda.CUDAGraph(), torch.zeros((), device=device)
        optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph):
            for i in range(TOGETHER):
                loss = step(i)
            last.copy_(loss.detach())

    def replay() -> torch.Tensor:
        if not cuda:
            return [step(i) for i in range(TOGETHER)][-1].detach()
        for n, tensor in fields.items():
            tensor.copy_(source[n])
        graph.replay()
        return last

    def restart() -> None:
        with torch.no_grad():
            for p, kept in zip(model.parameters(), saved, strict=True):
                p.copy_(kept)
            for slots in optimizer.state.values():
                for tensor in slots.values():
                    tensor.zero_()

    def losses() -> dict[str, Any]:
        restart()
        return {"losses": [float(replay()) for _ in range(COMPARED // TOGETHER)]}

    def steps(count: int) -> dict[str, Any]:
        return timed(lambda n: [replay() for _ in range(n // TOGETHER)], count)

    return {"first_loss": first}, {"losses": losses, "steps": steps, "nodes": lambda: launches(lambda: [replay() for _ in range(5)], 5 * TOGETHER)}


# --- ours ------------


class Memory:
    """Batches that are there: a run's feed."""

    def __init__(self, batches: Sequence[Batch]):
        self.batches = batches

    def batch(self, step: int) -> Batch:
        return self.batches[step % len(self.batches)]

    def cursor(self, step: int) -> tuple[int, int]:
        return 0, step

    def ready(self, step: int) -> None:
        pass


def ours(case: Case, device: str, deterministic: bool) -> tuple[dict[str, Any], Answers]:
    batches = batches_of(case)
    program = program_of(f"benchmarks/programs/{case.file}.lisp", (f"precision={case.precision}",), deterministic, None if device == "cuda" else "cpu")

    def launched(count: int, replays: Callable[[Any], None] = lambda result: None) -> None:
        """Launches of TOGETHER steps, two in flight; their batches are in the host memory that launches are taken from."""
        before = None
        for _ in range(0, count, TOGETHER):
            room = program.room(TOGETHER)
            if room is not None and id(room) not in filled:
                room.stack(batches)  # type: ignore[attr-defined]
                filled[id(room)] = room
            flight = program.launch(room if room is not None else batches, False)
            if before is not None:
                replays(program.collect(before)[-1])
            before = flight
        if before is not None:
            replays(program.collect(before)[-1])

    def losses() -> dict[str, Any]:
        program.initialise()
        found: list[float] = []
        launched(COMPARED, lambda result: found.append(result.loss))
        return {"losses": found}

    def loop(count: int) -> dict[str, Any]:
        """The run's own loop: it chooses how many steps a launch has, and makes batches ahead."""
        program.initialise()
        done: dict[int, float] = {}
        for event in train(program, program.config, Feeds(Memory(batches)), 0, count):  # type: ignore[arg-type]
            if isinstance(event, StepDone):
                done[event.step] = time.perf_counter()
        begin = min((n for n in done if n >= count // 3), key=lambda n: n)
        program.initialise()
        return {"ms": (done[count] - done[begin]) * 1e3 / max(1, count - begin)}

    filled: dict[int, Any] = {}
    launched(2 * TOGETHER)
    answers: Answers = {
        "losses": losses, "steps": lambda count: timed(launched, count), "loop": loop,
        "nodes": lambda: launches(lambda: launched(5 * TOGETHER), 5 * TOGETHER),
    }
    return {}, answers


# --- the parent ------------


def measure(name: str, sides: Sides, told: dict[str, dict[str, Any]], given: argparse.Namespace) -> None:
    """Losses first, from the initial weights; then blocks in turn; what the device did last. `told`: what each side said first."""
    slow = 1 if given.device == "cuda" else 10  # an interpreter of kernels
    losses = {side: answer["losses"] for side, answer in sides.each("losses", 60 * slow)}
    times = sides.alternate(given.steps, given.rounds, 60 * slow)
    loops: dict[str, list[float]] = {}
    for side in [s for s in sides.sides if s.startswith("ours")]:
        one = Sides(name, {side: sides.sides[side]})
        loops[side] = [answer["ms"] for _ in range(min(3, given.rounds)) for _, answer in one.each("loop", 60 * slow, count=given.steps)]
    nodes = dict(sides.each("nodes", 60)) if given.device == "cuda" else {}
    theirs = times.get("torch", [])
    for side, found in times.items():
        more: dict[str, Any] = {}
        if side != "torch" and theirs:
            more = {"torch_over_ours": ratios(found, theirs), "bar": CASES[name].bar}
        if loops.get(side):
            more["loop"] = summary(loops[side])
        seen = nodes.get(side, {})
        say(f"{name} {side}", step=summary(found), **more, loss_50=losses.get(side, [None])[-1], losses=losses.get(side), start=told[side]["start_seconds"],
            nodes=seen.get("nodes"), device_us=seen.get("device_us"))
        if seen:
            say(f"{name} {side} nodes", top=seen["top"])
    sides.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2000, help="of a block; of a transformer a quarter")
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--deterministic", action="store_true", help="beside the fast kernels, those that repeat bit for bit")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--mode", default="default", choices=("default", "eager"), help="of PyTorch's side")
    parser.add_argument("--limit", type=float, default=150, help="seconds that the preparation of a side may take")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--answers", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side is not None:
        case = CASES[given.case]
        serve(given.answers, lambda: theirs(case, given.device, given.mode) if given.side == "torch" else ours(case, given.device, given.side != "ours"))
        return
    names = ["torch", "ours", *(["ours-deterministic"] if given.deterministic else [])]
    words = ["--device", given.device, "--mode", given.mode]
    chosen = [name for name in CASES if given.only in name]
    every = {name: Sides(name, {side: Side(side, [*words, "--case", name], given.limit) for side in names}) for name in chosen}
    told = {name: sides.prepare_ours() for name, sides in every.items()}
    for sides in every.values():
        sides.begin_theirs()
    told = {name: told[name] | sides.theirs_ready() for name, sides in every.items()}
    for name, sides in every.items():
        short = argparse.Namespace(**vars(given))
        if CASES[name].file == "transformer":
            short.steps = max(TOGETHER, given.steps // 4 // TOGETHER * TOGETHER)
        measure(name, sides, told[name], short)


if __name__ == "__main__":
    main()
