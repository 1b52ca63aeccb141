"""Matrix products of GPT-2 124M with what follows them: torch's way and cuBLASLt's algorithms, checked and then timed. Needs a GPU.

    python benchmarks/products.py                      # every part, below two minutes
    python benchmarks/products.py --batches 32 --only up

JSON lines, times in ms. `apart`: torch's product and what follows it as passes of their own; `alone`: torch's product by itself; the others
are algorithms by their configuration, in the library's order. `burst`: ten calls from idle; `sustained`: back to back for 0.25 s of
`apart`, `alone` and the best three. `error`: the largest difference from float64 on 128 rows, over the largest value there.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from sides import say

from sexpgpu.backends.cuda import choice, cublaslt
from sexpgpu.backends.cuda.cublaslt import EPILOGUES, Product, Unavailable

D, HEAD = 768, 50304
ROWS = 64  # at each end of a result that are checked
IDLE = 0.03  # seconds before a burst
LOADED = 0.25  # seconds of a sustained block
Low, Wide = torch.bfloat16, torch.float32


@dataclass
class Case:
    """A product [m k] · [k n]. left, right: whether the operand lies transposed; out: its dtype; added: onto what is there."""

    name: str
    m: int
    n: int
    k: int
    epilogue: str = ""
    left: bool = False
    right: bool = False
    out: torch.dtype = Low
    added: bool = False
    dtype: torch.dtype = Low
    tf32: bool = False


def gpt2(batch: int) -> Iterator[Case]:
    """Every product of a step. A head's part is the rows whose logits fill 1 GiB."""
    m, part = batch * 1024, min(batch * 1024, (1 << 30) // (2 * HEAD))
    for name, k, n in (("qkv", D, 3 * D), ("proj", D, D), ("up", D, 4 * D), ("down", 4 * D, D)):
        follow = {"qkv": ("bias",), "up": ("gelu-kept", "gelu"), "proj": ("", "residual"), "down": ("", "residual")}[name]
        for epilogue in follow:
            wide = epilogue == "residual"
            yield Case(f"{name} forward", m, n, k, "bias" if wide else epilogue, out=Wide if wide else Low, added=wide)
        back = ("", "gelu-grad", "gelu-grad-sum") if name == "down" else ("",)
        for epilogue in back:
            yield Case(f"{name} by input", m, k, n, epilogue, right=True)
        for epilogue in ("", "sum-of-b") if name in ("qkv", "up") else ("",):
            yield Case(f"{name} by weight", k, n, m, epilogue, left=True, out=Wide)
    yield Case("head forward", part, HEAD, D, right=True)
    yield Case("head by input", part, D, HEAD)
    yield Case("head by weight", HEAD, D, part, left=True, out=Wide, added=True)


def small() -> Iterator[Case]:
    """The perceptron 784-512-512-10 at batch 128, and the transformer of width 128 over 2,048 tokens."""
    for tf32 in (False, True):
        for n, k in ((512, 784), (512, 512), (10, 512)):
            yield Case("perceptron forward", 128, n, k, "relu", out=Wide, dtype=Wide, tf32=tf32)
            yield Case("perceptron by weight", k, n, 128, "sum-of-b", left=True, out=Wide, dtype=Wide, tf32=tf32)
    for epilogue, n, k in (("bias", 384, 128), ("", 128, 128), ("gelu-kept", 512, 128), ("", 128, 512)):
        yield Case("transformer forward", 2048, n, k, epilogue)
        yield Case("transformer by weight", k, n, 2048, "sum-of-b" if epilogue else "", left=True, out=Wide)


class Made:
    """A case's tensors, its ways and its values in float64."""

    def __init__(self, case: Case, seed: int = 0):
        self.case = case
        make = torch.Generator("cuda").manual_seed(seed)
        random = lambda *s: torch.randn(*s, device="cuda", generator=make)  # noqa: E731
        a = random(case.k, case.m).to(case.dtype).T if case.left else random(case.m, case.k).to(case.dtype)
        b = (random(case.n, case.k) if case.right else random(case.k, case.n)) / case.k**0.5
        self.a, self.b = a, b.to(case.dtype).T if case.right else b.to(case.dtype)
        self.out = torch.empty(case.m, case.n, device="cuda", dtype=case.out)
        self.c = random(case.m, case.n).to(case.out) if case.added else None
        e = case.epilogue
        self.bias = random(case.n).to(case.out) if e in ("bias", "relu", "gelu", "gelu-kept") else None
        self.sums = torch.empty(case.n, device="cuda", dtype=case.out) if e in ("sum-of-b", "gelu-grad-sum") else None
        self.aux = random(case.m, case.n).to(case.out) if e.startswith("gelu-") else None

    def product(self) -> Product:
        row = self.bias if self.bias is not None else self.sums
        return Product(self.a, self.b, self.out, self.case.epilogue, row, self.aux, self.c, self.case.tf32)

    def alone(self) -> None:
        if self.out.dtype == self.a.dtype:
            torch.mm(self.a, self.b, out=self.out)
        else:
            torch.mm(self.a, self.b, out_dtype=self.out.dtype, out=self.out)

    def apart(self) -> None:
        e, aten = self.case.epilogue, torch.ops.aten
        if self.bias is not None and self.out.dtype == self.a.dtype:
            torch.addmm(self.bias, self.a, self.b, out=self.aux if self.aux is not None else self.out)
        else:
            self.alone()
            if self.bias is not None:
                self.out.add_(self.bias)
        if self.c is not None:
            self.out.add_(self.c)
        if e == "relu":
            self.out.relu_()
        elif e in ("gelu", "gelu-kept"):
            aten.gelu.out(self.out if self.aux is None else self.aux, approximate="tanh", out=self.out)
        elif e.startswith("gelu-grad"):
            aten.gelu_backward.grad_input(self.out, self.aux, approximate="tanh", grad_input=self.out)
        if self.sums is not None:
            torch.sum(self.b if e == "sum-of-b" else self.out, 0, dtype=self.sums.dtype, out=self.sums)

    def expected(self) -> list[torch.Tensor]:
        """The compared rows in float64: of the result, then what GELU is applied to or the sums."""
        e = self.case.epilogue
        rows = torch.cat([self.a[:ROWS], self.a[-ROWS:]]).double()
        found = rows @ self.b.double()
        if self.bias is not None:
            found += self.bias.double()
        if self.c is not None:
            found += torch.cat([self.c[:ROWS], self.c[-ROWS:]]).double()
        if e == "relu":
            return [found.relu()]
        if e in ("gelu", "gelu-kept"):
            more = [found] if e == "gelu-kept" else []
            return [torch.nn.functional.gelu(found, approximate="tanh"), *more]
        if e.startswith("gelu-grad"):
            assert self.aux is not None
            at = torch.cat([self.aux[:ROWS], self.aux[-ROWS:]]).double()
            return [torch.ops.aten.gelu_backward(found, at, approximate="tanh")]
        return [found] + ([self.b.double().sum(0)] if e == "sum-of-b" else [])

    def found(self, way: Callable[[], None]) -> list[torch.Tensor]:
        for tensor in (self.out, self.sums, self.aux if self.case.epilogue == "gelu-kept" else None):
            if tensor is not None:
                tensor.fill_(float("nan"))
        way()
        ends = [torch.cat([x[:ROWS], x[-ROWS:]]) for x in (self.out, self.aux if self.case.epilogue == "gelu-kept" else None) if x is not None]
        return [x.clone() for x in (*ends, self.sums) if x is not None]


def off(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    return max(float((x.double() - y).abs().max() / y.abs().max()) for x, y in zip(found, expected, strict=False))


def burst(way: Callable[[], None], calls: int = 10) -> float:
    """ms a call of so many calls from idle, replayed so that no launch from Python shows."""
    way()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(SIDE):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for _ in range(calls):
                way()
        finally:
            graph.capture_end()
    torch.cuda.synchronize()
    time.sleep(IDLE)
    return replay(graph) / calls


def replay(graph: torch.cuda.CUDAGraph) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop)


def sustained(way: Callable[[], None], one: float) -> float:
    """ms a call over the second half of a block under load; `one`: about a call's ms."""
    torch.cuda.synchronize()
    count = max(4, int(LOADED * 1e3 / max(one, 0.01)))
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for i in range(count):
        if i == count // 2:
            start.record()
        way()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / (count - count // 2)


def measure(case: Case, most: int, loaded: bool, **labels: Any) -> None:
    made = Made(case)
    space = choice.workspace(made.out.device)
    ways: dict[str, Callable[[], None]] = {"apart": made.apart, "alone": made.alone}
    torch.backends.cuda.matmul.allow_tf32 = case.tf32
    row: dict[str, Any] = {**labels, "m": case.m, "n": case.n, "k": case.k, "epilogue": case.epilogue, "added": case.added, "tf32": case.tf32}
    try:
        product = made.product()
        candidates = product.candidates(most)
        ways |= {c.name: lambda c=c: product.run(c, space) for c in candidates}  # type: ignore[misc]
        row["workspace"] = {c.name: c.workspace for c in candidates}
    except Unavailable as error:
        row["refused"] = str(error)
    expected = made.expected()
    with torch.cuda.stream(SIDE):
        checks: dict[str, Any] = {}
        for name, way in list(ways.items()):
            if name == "alone":
                continue
            try:
                first, second = made.found(way), made.found(way)
            except (Unavailable, RuntimeError) as error:
                checks[name] = str(error)[:200]
                del ways[name]
                continue
            checks[name] = {"error": off(first, expected), "repeats": all(torch.equal(x, y) for x, y in zip(first, second, strict=True))}
        row["checks"] = checks
        times = {name: burst(way) for name, way in ways.items()}
        row["burst"] = times
        if loaded:
            best = sorted((n for n in times if n not in ("apart", "alone")), key=lambda n: times[n])[:3]
            row["sustained"] = {n: sustained(ways[n], times[n]) for n in ("apart", "alone", *best)}
        fair = row.get("sustained", times)
        ours = [fair[n] for n in fair if n not in ("apart", "alone")]
        if ours:
            row["apart_over_best"] = fair["apart"] / min(ours)
            row["tflops"] = 2e-9 * case.m * case.n * case.k / min(ours)
    say(f"product {case.name}", **row)


def nan(epilogue: str) -> None:
    """What an epilogue makes of NaN: a run's check of its loss needs NaN to stay NaN."""
    a, b = torch.ones(256, 256, device="cuda", dtype=Low), torch.ones(256, 256, device="cuda", dtype=Low)
    a[3] = float("nan")
    out, bias = torch.empty_like(a), torch.zeros(256, device="cuda", dtype=Low)
    aux = torch.ones_like(a) if epilogue.startswith("gelu-") else None
    product = Product(a, b, out, epilogue, bias if epilogue != "gelu-grad" else None, aux)
    product.run(product.candidates(1)[0], choice.workspace(out.device))
    say(f"nan through {epilogue}", stays=bool(out[3].isnan().all()), elsewhere=bool(out[4:].isfinite().all()))


def support() -> None:
    """Which epilogues the library proposes an algorithm for, by types of operands and result."""
    for dtype, out in ((Low, Low), (Low, Wide), (torch.float16, torch.float16), (torch.float16, Wide), (Wide, Wide)):
        a, b = (torch.zeros(256, 256, device="cuda", dtype=dtype) for _ in range(2))
        d = torch.zeros(256, 256, device="cuda", dtype=out)
        answers = {}
        for epilogue in EPILOGUES:
            for left, right in ((False, False), (False, True), (True, False)):
                for row in (out, Wide) if epilogue.endswith("sum") or "sum-of" in epilogue or "bias" in epilogue else (out,):
                    x = torch.zeros(256, 32, dtype=torch.uint8, device="cuda") if epilogue.startswith("relu-") else d.clone() if epilogue.startswith("gelu-") else None
                    line = torch.zeros(256, dtype=row, device="cuda") if epilogue not in ("", "gelu-grad") else None
                    try:
                        found = len(Product(a.T if left else a, b.T if right else b, d, epilogue, line, x).candidates(8))
                    except Unavailable as error:
                        found = str(error)[:60]  # type: ignore[assignment]
                    answers[f"{epilogue or 'none'} {'t' if left else 'n'}{'t' if right else 'n'} {cublaslt.NAMES[row]}"] = found
        say(f"support {cublaslt.NAMES[dtype]} to {cublaslt.NAMES[out]}", **answers)


def chosen(batch: int) -> None:
    """The module of choice itself, as a step uses it: what it takes, how long that takes, and what it says."""
    start = time.perf_counter()
    for case in gpt2(batch):
        made = Made(case)
        if case.epilogue == "gelu-grad-sum":
            continue
        outputs = [x for x in (made.out, made.sums, made.aux if case.epilogue == "gelu-kept" else None) if x is not None]
        choice.run(made.product, made.apart, outputs)
    torch.cuda.synchronize()
    known = choice.choices()
    say("choice", batch=batch, seconds=time.perf_counter() - start, used=known.used, notes=known.notes, kept=str(known.path))


def main() -> None:
    global SIDE
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", default="32,64")
    parser.add_argument("--only", default="", help="products whose name holds this")
    parser.add_argument("--most", type=int, default=8, help="algorithms of each product")
    given = parser.parse_args()
    SIDE = torch.cuda.Stream()
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    begin = time.perf_counter()
    parts: list[tuple[str, Callable[[], None]]] = [("support", support)]
    parts += [(f"nan through {e}", lambda e=e: nan(e)) for e in ("relu", "gelu", "gelu-kept", "gelu-grad", "bias")]  # type: ignore[misc]
    for batch in map(int, given.batches.split(",")):
        parts += [(c.name, lambda c=c, batch=batch: measure(c, given.most, True, batch=batch)) for c in gpt2(batch)]  # type: ignore[misc]
    parts += [(c.name, lambda c=c: measure(c, given.most, False)) for c in small()]  # type: ignore[misc]
    parts.append(("choice", lambda: chosen(int(given.batches.split(",")[0]))))
    for name, part in parts:
        if given.only not in name:
            continue
        try:
            part()
        except Exception as error:  # noqa: BLE001 - one part's failure shall not cost the others
            say(name, failed=f"{type(error).__name__}: {error}"[:400])
        torch.cuda.synchronize()
    say("products", seconds=time.perf_counter() - begin, library=cublaslt.library().version, device=torch.cuda.get_device_name())


SIDE: torch.cuda.Stream

if __name__ == "__main__":
    main()
