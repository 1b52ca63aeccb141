"""How long is a CPU step here, and in eager PyTorch? One JSON line a case: medians and the paired ratio ours / eager.

Cases: the digits perceptron (64-128-10, batch 64), char_lm.lisp in f32 without dropout and with 0.1, the convolutional net
on digits. Both sides fetch their batch, go forward and backward, take the gradient's norm (char LM: clipped to 1) and step
AdamW, eager's fused; every tenth step both compute the file's metrics and taps and read loss, norm and metrics, as our log
does. One process a side, alternating in slices of the same number of steps; a side's number of threads is the one that its
own trial found fastest. The ratio of a slice is taken with the other side's slice beside it, and their median is given;
`work_ratio` is the same of processor time, which others on a busy machine disturb less.

    python benchmarks/cpu_step.py [--case digits …] [--rounds 15] [--threads 1 2] [--table]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parent.parent / "examples"
LOG_EVERY = 10
Step = Callable[[int, bool], None]  # (step, logged)


@dataclass(frozen=True)
class Case:
    """file and knobs of a program; steps of a slice; the ratio that it must not exceed."""

    file: str
    sets: tuple[str, ...]
    slice: int
    most: float


CASES = {
    "digits": Case("digits.lisp", (), 400, 1.00),
    "conv": Case("conv_digits.lisp", (), 150, 1.10),
    "char-lm": Case("char_lm.lisp", ("precision=f32", "drop-rate=0"), 2, 1.10),
    "char-lm-dropout": Case("char_lm.lisp", ("precision=f32", "drop-rate=0.1"), 2, 1.20),
}


def loaded(case: Case) -> tuple[Any, Any, Any]:
    """(loaded file, its run, its training feed)."""
    from sexpgpu.compiler import Selection, choose_run, load
    from sexpgpu.run.bind import bind

    found = load(str(EXAMPLES / case.file), Selection(sets=case.sets))
    run = choose_run(found.experiment, None)
    return found, run, bind(run).feeds.train


def ours(case: Case, threads: int) -> Step:
    """A step of the compiled program."""
    from sexpgpu.compiler import program, stages

    found, run, feed = loaded(case)
    made = program(stages(found, run), "cpu", threads)
    made.initialise()

    def step(number: int, logged: bool) -> None:
        made.step(feed.batch(number), logged)

    return step


def eager(case: Case, threads: int) -> Step:
    """The same in eager PyTorch, data in memory as tensors."""
    import torch

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    found, _, feed = loaded(case)
    knobs = {name: knob.value for name, knob in found.experiment.knobs.items()}
    fields = feed.samples.take(torch.arange(len(feed.samples)).numpy())
    data = {name: torch.from_numpy(values) for name, values in fields.items()}
    data = {name: t if t.is_floating_point() else t.long() for name, t in data.items()}
    return eager_lm(data, knobs) if "tokens" in data else eager_digits(data, knobs, case.file == "conv_digits.lisp")


def orders(count: int, batch: int) -> Iterator[Any]:
    """Rows of a batch without end, each epoch in a new order."""
    import torch

    while True:
        yield from torch.randperm(count)[: count // batch * batch].view(-1, batch)


def eager_digits(data: dict[str, Any], knobs: dict[str, Any], convolutional: bool) -> Step:
    from torch import nn, no_grad, optim
    from torch.nn.functional import cross_entropy

    if convolutional:
        c = knobs["channels"]
        first = [nn.Conv2d(1, c, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        second = [nn.Conv2d(c, 2 * c, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        model = nn.Sequential(nn.Unflatten(1, (1, 8, 8)), *first, *second, nn.Flatten(), nn.Linear(8 * c, 10))
    else:
        model = nn.Sequential(nn.Linear(64, knobs["hidden"]), nn.ReLU(), nn.Linear(knobs["hidden"], 10))
    optimizer = optim.AdamW(model.parameters(), lr=knobs["lr"], weight_decay=1e-2, fused=True)
    order = orders(len(data["label"]), knobs["batch"])

    def step(number: int, logged: bool) -> None:
        rows = next(order)
        image, label = data["image"][rows], data["label"][rows]
        if convolutional:
            optimizer.param_groups[0]["lr"] = rate_at(number, knobs["lr"], 20, knobs["steps"])
        if logged:
            with no_grad():
                accuracy = (model(image).argmax(-1) == label).float().mean()
        loss = cross_entropy(model(image), label)
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
        optimizer.step()
        if logged:
            loss.item(), norm.item(), accuracy.item()

    return step


def eager_lm(data: dict[str, Any], knobs: dict[str, Any]) -> Step:
    from char_lm_parity import Transformer
    from torch import nn, optim

    model = Transformer(knobs["layers"], knobs["heads"], knobs["d-model"], knobs["context"], float(knobs["drop-rate"]))
    optimizer = optim.AdamW(model.parameters(), lr=knobs["lr"], betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    order = orders(len(data["tokens"]), knobs["batch"])
    seen: list[Any] = []
    for block in model.blocks:  # the taps of the file: the norm of what `out` is given
        block.out.register_forward_hook(lambda module, inputs, out: seen.append(inputs[0].detach()))

    def step(number: int, logged: bool) -> None:
        rows = next(order)
        seen.clear()
        optimizer.param_groups[0]["lr"] = rate_at(number, knobs["lr"], 100, knobs["steps"])
        loss = model(data["tokens"][rows], data["targets"][rows])
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if logged:
            loss.item(), norm.item(), [y.square().mean().sqrt().item() for y in seen]

    return step


def rate_at(done: int, peak: float, warmup: int, steps: int) -> float:
    """`warmup-cosine` after `done` updates."""
    from math import cos, pi

    if done < warmup:
        return peak * (done + 1) / warmup
    return peak / 2 * (1 + cos(pi * min(1.0, (done - warmup) / (steps - warmup))))


def serve(side: str, case: Case, threads: int) -> None:
    """Does the number of steps that each line of stdin names, and prints the seconds of one of them,
    and those of all its threads together."""
    step, done = {"ours": ours, "eager": eager}[side](case, threads), 0
    for line in sys.stdin:
        count = int(line)
        start, used = time.perf_counter(), time.process_time()
        for number in range(done, done + count):
            step(number, number % LOG_EVERY == LOG_EVERY - 1)
        done += count
        print((time.perf_counter() - start) / count, (time.process_time() - used) / count, flush=True)


class Side:
    """A process that makes steps of one side."""

    def __init__(self, side: str, name: str, threads: int):
        self.threads = threads
        environ = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"}
        command = [sys.executable, __file__, "--side", side, "--case", name, "--threads", str(threads)]
        self.process = subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def seconds(self, steps: int) -> tuple[float, float]:
        """Of one step: by the clock, and by the work of all its threads."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        clock, work = self.process.stdout.readline().split()
        return float(clock), float(work)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def best(side: str, name: str, threads: list[int]) -> Side:
    """The side at the number of threads that is fastest in five slices after a first one."""
    sides = [Side(side, name, n) for n in threads]
    steps = CASES[name].slice
    times: list[list[float]] = [[] for _ in sides]
    for turn in range(6 if len(sides) > 1 else 1):
        for one, seen in zip(sides, times, strict=True):
            seconds = one.seconds(steps)
            if turn:
                seen.append(seconds[0])
    found = min(range(len(sides)), key=lambda i: statistics.median(times[i] or [0.0]))
    for i, one in enumerate(sides):
        if i != found:
            one.close()
    return sides[found]


def measure(name: str, rounds: int, threads: list[int]) -> dict[str, Any]:
    case = CASES[name]
    sides = {side: best(side, name, threads) for side in ("ours", "eager")}
    rows: list[dict[str, tuple[float, float]]] = []
    for number in range(rounds):
        order = ("ours", "eager") if number % 2 else ("eager", "ours")
        rows.append({side: sides[side].seconds(case.slice) for side in order})
    for one in sides.values():
        one.close()
    ratios, work = (sorted(row["ours"][kind] / row["eager"][kind] for row in rows) for kind in (0, 1))
    median = {side: round(statistics.median(row[side][0] for row in rows) * 1e3, 3) for side in sides}
    ratio = statistics.median(ratios)
    return {
        "case": name, "median_ms": median, "threads": {side: one.threads for side, one in sides.items()},
        "ratio": round(ratio, 3), "quartiles": [round(ratios[len(ratios) // 4], 3), round(ratios[-1 - len(ratios) // 4], 3)],
        "work_ratio": round(statistics.median(work), 3), "most": case.most, "holds": ratio <= case.most, "rounds": rounds,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, len(os.sched_getaffinity(0))}))
    parser.add_argument("--table", action="store_true", help="a table of all cases at the end")
    parser.add_argument("--side", choices=("ours", "eager"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        serve(options.side, CASES[options.case[0]], options.threads[0])
        return 0
    found = []
    for name in options.case:
        found.append(measure(name, options.rounds, options.threads))
        print(json.dumps(found[-1]), flush=True)
    if options.table:
        print("case              ours ms  eager ms  threads  ratio  at most  of CPU time")
        for row in found:
            ms, threads = row["median_ms"], row["threads"]
            print(f"{row['case']:<16} {ms['ours']:>8.3f}  {ms['eager']:>8.3f}  {threads['ours']} / {threads['eager']}  {row['ratio']:>7.3f}  {row['most']:>7.2f}  {row['work_ratio']:>11.3f}")
    return 0 if all(row["holds"] for row in found) else 1


if __name__ == "__main__":
    sys.exit(main())
