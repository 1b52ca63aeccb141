"""GPT-2 124M: a training step of examples/gpt2.lisp beside torch.compile, from our initial weights and on the same batches. Each side
is a process; blocks of steps take turns, long enough to be steady under the power cap. JSON lines: tokens a second, ms, peak memory
beside the plan, ratios, and what is asked for besides. Needs a GPU.

    python benchmarks/gpt2.py --batch 32 --both-modes --loss        # about three minutes
    python benchmarks/gpt2.py --batch 64 --both-modes --profile

On a CPU, as a check of this script: TRITON_INTERPRET=1 python benchmarks/gpt2.py --device cpu --tiny --mode eager --steps 2 --rounds 1
"""

from __future__ import annotations

import argparse
import re
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
from torch_models import Gpt2

from sexpgpu.backends.cuda.profile import profile

GIB = 2**30
BARS = {"ours": 1.10, "memory": 0.65, "loss": 0.01, "deterministic": 0.92}
#: kind of work -> names of kernels; the first that fits counts (as ../shared/bench has it)
KINDS = (
    ("attention", r"flash|fmha|sdpa|attention|cudnn_generated"), ("products", r"gemm|nvjet|cutlass|xmma|cublas|splitk|triton_tem|_mm_"),
    ("optimizer", r"adam|multi_tensor|foreach"), ("cross-entropy", r"log_softmax|nll_loss|cross_entropy|softmax"),
    ("layer norm", r"layer_norm|layernorm|var_mean|rsqrt"), ("gelu", r"gelu|tanh"), ("copies", r"memset|memcpy|copy|cast"),
)


class Sizes:
    """The model's sizes, and the knobs that say them."""

    def __init__(self, given: argparse.Namespace):
        sizes: tuple[int, int, int, int, int] = (2, 2, 32, 32, 512) if given.tiny else (given.layers, 12, 768, 1024, 50304)
        self.layers, self.heads, self.d, self.context, self.vocabulary = sizes
        self.batch = 4 if given.tiny else given.batch
        knobs = {"layers": self.layers, "heads": self.heads, "d-model": self.d, "context": self.context, "vocabulary": self.vocabulary, "batch": self.batch}
        self.sets = (*(f"{name}={value}" for name, value in knobs.items()), "warmup=0", "lr=1e-4", "steps=1000000000")
        self.tokens = self.batch * self.context

    def batches(self, count: int) -> list[Batch]:
        return tokens(count, self.batch, self.context, self.vocabulary)


# --- PyTorch ------------


def theirs(given: argparse.Namespace, mode: str) -> tuple[dict[str, Any], Answers]:
    """bf16 autocast over f32 weights, fused AdamW as our file has it, clipping included."""
    torch.set_float32_matmul_precision("high")
    sizes, cuda = Sizes(given), given.device == "cuda"
    start = initial(staged_of("examples/gpt2.lisp", sizes.sets))
    model = Gpt2(sizes.layers, sizes.heads, sizes.d, sizes.context, sizes.vocabulary).to(given.device)
    model.take(start)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=cuda)
    fields: list[dict[str, torch.Tensor]] = []

    def see(count: int) -> None:
        fields[:] = [{n: torch.from_numpy(a).long().to(given.device) for n, a in batch.items()} for batch in sizes.batches(count)]

    def loss_of(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast(given.device, torch.bfloat16):
            return model(tokens, targets)

    fast = loss_of if mode == "eager" else torch.compile(loss_of, mode=None if mode == "default" else mode)
    made = 0

    def step() -> torch.Tensor:
        nonlocal made
        batch = fields[made % len(fields)]
        made += 1
        loss = fast(batch["tokens"], batch["targets"])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def losses(count: int) -> dict[str, Any]:
        nonlocal made
        made = 0
        model.take(start)
        for slots in optimizer.state.values():
            for tensor in slots.values():
                tensor.zero_()
        see(count)
        found = [float(step()) for _ in range(count)]
        see(4)
        return {"losses": found}

    def peak() -> dict[str, Any]:
        return {"allocated": torch.cuda.max_memory_allocated() / GIB, "reserved": torch.cuda.max_memory_reserved() / GIB} if cuda else {}

    def seen() -> dict[str, Any]:
        return launches(lambda: [step() for _ in range(3)], 3, 60)

    see(4)
    first = float(step())
    for _ in range(2):
        step()
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return {"first_loss": first}, {"losses": losses, "steps": lambda count: timed(lambda n: [step() for _ in range(n)], count), "peak": peak, "profile": seen}


# --- ours ------------


def ours(given: argparse.Namespace, deterministic: bool) -> tuple[dict[str, Any], Answers]:
    sizes, cuda = Sizes(given), given.device == "cuda"
    program = program_of("examples/gpt2.lisp", sizes.sets, deterministic, None if cuda else "cpu")
    batches = sizes.batches(4)
    made = 0

    def run(count: int, source: list[Batch]) -> list[float]:
        """Steps, two in flight as the loop has it."""
        nonlocal made
        found: list[float] = []
        before = None
        for _ in range(count):
            flight = program.launch([source[made % len(source)]], False)
            made += 1
            if before is not None:
                found.append(program.collect(before)[0].loss)
            before = flight
        return [*found, program.collect(before)[0].loss] if before is not None else found

    def losses(count: int) -> dict[str, Any]:
        nonlocal made
        program.initialise()
        made = 0
        return {"losses": run(count, sizes.batches(count))}

    def peak() -> dict[str, Any]:
        found = {"planned": program.plan.total / GIB}
        if cuda:
            found |= {"allocated": torch.cuda.max_memory_allocated() / GIB, "reserved": torch.cuda.max_memory_reserved() / GIB}
        return found

    def seen() -> dict[str, Any]:
        found = launches(lambda: run(3, batches), 3, 60)
        made_of = profile(program, batches[0])
        rows = [[round(1e3 * x.seconds, 3), x.calls, f"{x.name} {x.path} {x.phase}", round(x.bytes_per_second / 1e9), round(x.operations_per_second / 1e12), round(x.of_ceiling, 2)]
                for x in made_of.lines]
        return found | {"launch_ms": 1e3 * made_of.launch_seconds, "step_ms": 1e3 * made_of.step_seconds, "lines": rows}

    first = run(3, batches)[0]
    return {"first_loss": first}, {"losses": losses, "steps": lambda count: timed(lambda n: run(n, batches), count), "peak": peak, "profile": seen}


# --- the parent ------------


def compare(sides: Sides, given: argparse.Namespace, slow: int) -> None:
    """Mean losses of the last 50 of so many steps, from the initial weights."""
    found = {side: answer["losses"] for side, answer in sides.each("losses", 120 * slow, count=given.compared)}
    means = {side: float(np.mean(values[-50:])) for side, values in found.items()}
    base = next((mean for side, mean in means.items() if side.startswith("torch")), None)
    for side, mean in means.items():
        more = {} if base is None or side.startswith("torch") else {"off": round(mean - base, 5), "bar": BARS["loss"]}
        say(f"{sides.case} {side} loss", steps=f"last 50 of {given.compared}", mean=round(mean, 5), first=found[side][0], **more)


def kinds(top: list[list[Any]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for us, _, name in top:
        kind = next((k for k, pattern in KINDS if re.search(pattern, name.lower())), "other")
        found[kind] = round(found.get(kind, 0.0) + us / 1e3, 3)
    return found


def report(sides: Sides, times: dict[str, list[float]], told: dict[str, Any], given: argparse.Namespace, slow: int) -> None:
    peaks = {side: {k: round(v, 3) for k, v in answer.items()} for side, answer in sides.each("peak", 30 * slow)}
    best = min((side for side in times if side.startswith("torch")), key=lambda side: summary(times[side])["median"], default=None)
    for side, found in times.items():
        step, more = summary(found), {}
        if best is not None and not side.startswith("torch"):
            more = {"torch_over_ours": ratios(found, times[best]), "bar": BARS["ours"]}
            if "allocated" in peaks.get(side, {}) and "allocated" in peaks.get(best, {}):
                more["memory_over_torch"] = round(peaks[side]["allocated"] / peaks[best]["allocated"], 3)
        if side == "ours-deterministic" and "ours" in times:
            more["of_fast"] = ratios(found, times["ours"])
        say(f"{sides.case} {side}", step=step, tokens_per_second=round(Sizes(given).tokens / step["median"] * 1e3), peak_gib=peaks.get(side), start=told[side]["start_seconds"], **more)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mode", default="default", help="of torch.compile, several with commas: default, reduce-overhead, eager")
    parser.add_argument("--both-modes", action="store_true", help="ours with the deterministic default too")
    parser.add_argument("--loss", action="store_true", help="mean loss of steps 151-200 of each, from the same weights on the same batches")
    parser.add_argument("--compared", type=int, default=200, help="steps of --loss")
    parser.add_argument("--profile", action="store_true", help="what each side's step is made of")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="two layers of width 32, to try the script")
    parser.add_argument("--limit", type=float, default=120, help="seconds that the preparation of a side may take")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--answers", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side is not None:
        serve(given.answers, lambda: theirs(given, given.side.removeprefix("torch-")) if given.side.startswith("torch-") else ours(given, given.side != "ours"))
        return
    slow = 1 if given.device == "cuda" else 10
    words = ["--batch", str(given.batch), "--layers", str(given.layers), "--device", given.device, *(["--tiny"] if given.tiny else [])]
    expandable = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}  # as our commands have it
    sides: dict[str, Side] = {"ours": Side("ours", words, given.limit, expandable)}
    if given.both_modes:
        sides["ours-deterministic"] = Side("ours-deterministic", words, given.limit, expandable | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"})
    for mode in given.mode.split(","):
        sides[f"torch-{mode}"] = Side(f"torch-{mode}", words, given.limit)
    every = Sides(f"gpt2 b{Sizes(given).batch}", sides)
    told = every.prepare()
    times = every.alternate(given.steps, given.rounds, 60 * slow)
    report(every, times, told, given, slow)
    if given.loss:
        compare(every, given, slow)
    if given.profile:
        for side, answer in every.each("profile", 120 * slow):
            say(f"{every.case} {side} profile", kinds_ms=kinds(answer["top"]), nodes=answer["nodes"], device_ms=round(answer["device_us"] / 1e3, 3), top=answer["top"][:10])
            if "lines" in answer:
                say(f"{every.case} {side} launches", launch_ms=round(answer["launch_ms"], 3), ms_calls_name_gbs_tflops_of_ceiling=answer["lines"][:24])
    every.close()


if __name__ == "__main__":
    main()
