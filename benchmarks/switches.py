"""What each way of making matrix products is worth in a whole step: the same model with one switch of `backends/cuda/choice.py` changed,
in one process, blocks of steps that take turns. Checked first: losses, and bits where they must be equal. Needs a GPU.

    python benchmarks/switches.py                      # perceptron, transformer and GPT-2 at batch 32
    python benchmarks/switches.py --only gpt2 --batch 64

JSON lines. `over_all`: the time of a setting over that of `all`; above 1, what the setting lacks is worth having.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from sides import program_of, ratios, say, summary, tokens

from sexpgpu.backends.cuda import choice
from sexpgpu.backends.cuda.choice import Switch
from sexpgpu.backends.cuda.program import CudaProgram
from sexpgpu.passes.epilogues import KINDS

MOST = frozenset(KINDS) - {"residual"}
SETTINGS = {
    "all": Switch(),
    "again": Switch(),
    "nothing aside": Switch(aside=False),
    "nothing stored over": Switch(over=False),
    "gelu's gradient in products": Switch(passes=False),
    "head's rows read once": Switch(once=True),
    "products by torch": Switch(products=False),
    "no epilogues": Switch(epilogues=frozenset()),
    **{f"no {kind}": Switch(epilogues=MOST - {kind}) for kind in sorted(MOST)},
    "residual too": Switch(epilogues=frozenset(KINDS)),
}
FEW = ("all", "gelu's gradient in products", "head's rows read once", "products by torch", "no epilogues", "residual too")  # of GPT-2 above batch 32: every setting's program stays in memory
STEPS = 20  # whose losses are compared


def ours(program: CudaProgram, batches: Sequence[Mapping[str, np.ndarray]], together: int) -> Callable[[int], None]:
    """A function that makes so many steps, `together` of them a replay, one replay in flight."""

    def steps(count: int) -> None:
        before = None
        for start in range(0, count, together):
            flight = program.launch([batches[(start + i) % len(batches)] for i in range(together)], False)
            if before is not None:
                program.collect(before)
            before = flight
        if before is not None:
            program.collect(before)

    return steps


def alternate(sides: Mapping[str, Callable[[int], None]], steps: int, rounds: int) -> dict[str, list[float]]:
    """ms a step of each side, in blocks that take turns."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for run in sides.values():
        run(max(10, steps // 6))
    for number in range(rounds):
        for name in list(sides) if number % 2 == 0 else list(sides)[::-1]:
            torch.cuda.synchronize()
            start = time.perf_counter()
            sides[name](steps)
            torch.cuda.synchronize()
            times[name].append((time.perf_counter() - start) * 1e3 / steps)
    return times


def points() -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    means = rng.standard_normal((10, 784)).astype(np.float32)
    labels = [rng.integers(0, 10, 128).astype(np.int32) for _ in range(16)]
    return [{"x": means[y] + rng.standard_normal((128, 784)).astype(np.float32), "label": y} for y in labels]


def case(name: str, file: str, sets: tuple[str, ...], batches: list[dict[str, np.ndarray]], together: int, steps: int, rounds: int, chosen: Collection[str]) -> None:
    """These settings of one model; "all" first."""
    sides: dict[str, Callable[[int], None]] = {}
    losses: dict[str, list[float]] = {}
    states: dict[str, torch.Tensor] = {}
    for setting, switch in SETTINGS.items():
        if setting not in chosen:
            continue
        choice.SWITCH = switch
        try:
            begin = time.perf_counter()
            program = program_of(file, sets)
            found = [r.loss for start in range(0, STEPS, together) for r in program.collect(program.launch([batches[(start + i) % len(batches)] for i in range(together)], False))]
            losses[setting] = found
            states[setting] = torch.cat([t.flatten().double() for t in program.state().values()])[:: max(1, len(SETTINGS))].clone()
            launches = sum(len(c.schedule.launches) for c in program._graphs(False))
            aside = sum(len(c.aside) for c in program._graphs(False))
            sides[setting] = ours(program, batches, together)
            say(f"{name}: {setting}", seconds=time.perf_counter() - begin, loss=found[-1], launches=launches, aside=aside, arena=max(c.plan.size for c in program._graphs(False)),
                off=max(abs(a - b) / abs(b) for a, b in zip(found, losses["all"], strict=True)), same_bits=torch.equal(states[setting], states["all"]))
        except Exception as error:  # noqa: BLE001 - one setting's failure shall not cost the others
            say(f"{name}: {setting}", failed=f"{type(error).__name__}: {error}"[:400])
    for setting in ("again", "nothing aside", "nothing stored over"):
        if setting in states and "all" in states:
            say(f"{name}: {setting} has the bits of all", right=losses[setting] == losses["all"] and torch.equal(states[setting], states["all"]))
    times = alternate(sides, steps, rounds)
    for setting, blocks in times.items():
        more: dict[str, Any] = {} if "all" not in times else {"over_all": ratios(times["all"], blocks)}
        say(f"{name}: {setting}", step=summary(blocks), **more)
    say(f"{name}: products", lines=choice.lines())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="models whose name holds this")
    parser.add_argument("--batch", type=int, default=32, help="of GPT-2")
    parser.add_argument("--steps", type=int, default=0, help="steps of a block; 0: 2000 of a small model, 20 of GPT-2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--settings", default="", help="with semicolons; none is all of them, of GPT-2 above batch 32 a few: " + "; ".join(SETTINGS))
    given = parser.parse_args()
    settings = [one.strip() for one in given.settings.split(";") if one.strip()]
    if unknown := set(settings) - SETTINGS.keys():
        parser.error(f"no such setting: {', '.join(sorted(unknown))}")
    here = "benchmarks/programs/"
    cases = {
        "perceptron f32": lambda: (here + "perceptron.lisp", ("precision=f32",), points(), 10, 2000),
        "perceptron tf32": lambda: (here + "perceptron.lisp", ("precision=tf32",), points(), 10, 2000),
        "transformer bf16": lambda: (here + "transformer.lisp", (), tokens(16, 16, 128, 256), 10, 1000),
        "gpt2": lambda: ("examples/gpt2.lisp", (f"batch={given.batch}", "warmup=0", "lr=1e-4", "steps=1000000000"), tokens(4, given.batch, 1024, 50304), 1, 20),
    }
    for name, make in cases.items():
        if given.only not in name:
            continue
        try:
            file, sets, batches, together, steps = make()
            case(name, file, sets, batches, together, given.steps or steps, given.rounds, settings or (FEW if name == "gpt2" and given.batch > 32 else SETTINGS))
        except Exception as error:  # noqa: BLE001 - one model's failure shall not cost the others
            say(name, failed=f"{type(error).__name__}: {error}"[:400])
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
