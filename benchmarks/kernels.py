"""Memory-bound kernels that the compiler makes, on tensors of 256 MB, against the device's copy speed and torch.compile's of the same
functions. JSON lines. Needs a GPU.

A case is a graph; its floor is every operand read once and every result written once at the speed of a copy. Values are compared first.
A head's rows of logits, of which no graph stands alone, are those of a part of GPT-2's at batch 32: by the kernel that reads a row once, and by that which reads it twice.

    python benchmarks/kernels.py
"""

from __future__ import annotations

import argparse
import statistics
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from sides import last_lines, say, summary

from sexpgpu.backends.cuda import choice, library
from sexpgpu.backends.cuda.choice import Switch
from sexpgpu.backends.cuda.executable import Bound, Compiled
from sexpgpu.backends.interpreter.dtypes import TORCH
from sexpgpu.ir import Node, postorder
from sexpgpu.ops import build, constant
from sexpgpu.ops.leaves import BOUND
from sexpgpu.passes.slopes import derivative

ROWS, COLUMNS = 65536, 1024  # of f32: 256 MB
BAR = 0.8  # of a copy's speed


def leaf(name: str, *shape: int, dtype: str = "f32") -> Node:
    return build("input", name=name, shape=shape, dtype=dtype, batch=False)


def cases() -> dict[str, dict[str, Node]]:
    x, ct = leaf("x", ROWS, COLUMNS), leaf("ct", ROWS, COLUMNS)
    weight, bias = leaf("weight", COLUMNS), leaf("bias", COLUMNS)
    labels, row_ct = leaf("labels", ROWS, dtype="i32"), leaf("row-ct", ROWS)
    scaled = build("*", ct, weight)
    y = build("normalize", x, axis=(1,))
    m, v, g = leaf("m", ROWS * COLUMNS), leaf("v", ROWS * COLUMNS), leaf("g", ROWS * COLUMNS)
    p = leaf("p", ROWS * COLUMNS)

    def number(value: float) -> Node:
        return constant(value, "f32")

    new_m = build("+", build("*", number(0.9), m), build("*", number(0.1), g))
    new_v = build("+", build("*", number(0.95), v), build("*", number(0.05), build("*", g, g)))
    step = build("/", new_m, build("+", build("sqrt", new_v), number(1e-8)))
    low, low_bias = leaf("low", 2 * ROWS, COLUMNS, dtype="bf16"), leaf("bias", COLUMNS)
    wide = build("+", build("cast", low, dtype="f32"), low_bias)
    gelu, behind = build("gelu-tanh", build("cast", low, dtype="f32")), build("cast", leaf("behind", 2 * ROWS, COLUMNS, dtype="bf16"), dtype="f32")
    slope = derivative(gelu, behind)
    mask = build("random-bernoulli", shape=(ROWS, COLUMNS), p=0.9)
    dropped = build("*", build("*", x, number(1 / 0.9)), build("cast", mask, dtype="f32"))
    return {
        "layer norm forward": {"y": build("+", build("*", y, weight), bias)},
        "layer norm backward": {
            "x": build("normalize-grad", x, scaled, axis=(1,)),
            "weight": build("sum", build("*", ct, y), axis=(0,)),
            "bias": build("sum", ct, axis=(0,)),
        },
        "softmax": {"y": build("softmax", x)},
        "cross-entropy": {"y": build("softmax-cross-entropy", x, labels)},
        "cross-entropy gradient": {"y": build("softmax-cross-entropy-grad", x, labels, row_ct)},
        "gelu with bias, bf16": {"y": build("cast", build("gelu-tanh", wide), dtype="bf16")},
        "gelu again, its gradient and the bias's, bf16": {
            "gelu": build("cast", gelu, dtype="bf16"), "x": build("cast", slope, dtype="bf16"), "bias": build("sum", slope, axis=(0,)),
        },
        "sums over rows, bf16": {"y": build("sum", build("cast", low, dtype="f32"), axis=(0,))},
        "adamw": {"p": build("-", build("*", p, number(0.9999)), build("*", number(1e-3), step)), "m": new_m, "v": new_v},
        "dropout with residual": {"y": build("+", ct, dropped)},
    }


def theirs(v: dict[str, torch.Tensor]) -> dict[str, Callable[[], dict[str, torch.Tensor]]]:
    """The same functions in PyTorch, of the same tensors by name."""
    none = torch.empty(0)  # of an operand that the case has not
    x, ct, weight, bias, labels = (v.get(n, none) for n in ("x", "ct", "weight", "bias", "labels"))

    def normal(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, variance = x.mean(1, keepdim=True), x.var(1, keepdim=True, unbiased=False)
        scale = (variance + 1e-5).rsqrt()
        return (x - mean) * scale, scale

    def backward() -> dict[str, torch.Tensor]:
        y, scale = normal(x)
        g = ct * weight
        return {
            "x": scale * (g - g.mean(1, keepdim=True) - y * (g * y).mean(1, keepdim=True)), "weight": (ct * y).sum(0), "bias": ct.sum(0)
        }

    def gradient() -> dict[str, torch.Tensor]:
        chosen = torch.arange(COLUMNS, device=x.device)[None, :] == labels[:, None]
        return {"y": (torch.softmax(x, 1) - chosen.to(x.dtype)) * v["row-ct"][:, None]}

    def gelu_gradient() -> dict[str, torch.Tensor]:
        u = v["low"].float()
        slope = torch.ops.aten.gelu_backward(v["behind"].float(), u, approximate="tanh")
        return {"gelu": F.gelu(u, approximate="tanh").to(torch.bfloat16), "x": slope.to(torch.bfloat16), "bias": slope.sum(0)}

    def adamw() -> dict[str, torch.Tensor]:
        m, s = 0.9 * v["m"] + 0.1 * v["g"], 0.95 * v["v"] + 0.05 * v["g"] * v["g"]
        return {"p": v["p"] * 0.9999 - 1e-3 * (m / (s.sqrt() + 1e-8)), "m": m, "v": s}

    return {
        "layer norm forward": lambda: {"y": F.layer_norm(x, (COLUMNS,), weight, bias, 1e-5)},
        "layer norm backward": backward,
        "softmax": lambda: {"y": torch.softmax(x, 1)},
        "cross-entropy": lambda: {"y": F.cross_entropy(x, labels.long(), reduction="none")},
        "cross-entropy gradient": gradient,
        "gelu with bias, bf16": lambda: {"y": F.gelu(v["low"].float() + bias, approximate="tanh").to(torch.bfloat16)},
        "gelu again, its gradient and the bias's, bf16": gelu_gradient,
        "sums over rows, bf16": lambda: {"y": v["low"].sum(0, dtype=torch.float32)},
        "adamw": adamw,
        "dropout with residual": lambda: {"y": ct + F.dropout(x, 0.1)},
    }


def milliseconds(work: Callable[[], Any], repeats: int) -> list[float]:
    """Each call with a cold cache, between two events. The device sleeps until cache, events and call are queued, so that no kernel waits for the
    host; a call during which the sleep ended does not count, and the next sleep is twice as long."""
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    for _ in range(2):
        work()
    torch.cuda.synchronize()
    times: list[float] = []
    cycles = 2_000_000  # about 1 ms
    while len(times) < repeats:
        awake, start, end = torch.cuda.Event(), torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(cycles)
        awake.record()
        flush.zero_()
        start.record()
        work()
        end.record()
        late = awake.query()
        torch.cuda.synchronize()
        if not late:
            times.append(start.elapsed_time(end))
        elif cycles > 1 << 30:
            raise RuntimeError("this call waits for the device: it cannot be queued before the device is at it")
        else:
            cycles *= 2
    return times


def copy_speed(repeats: int) -> float:
    """TB/s of a copy of 256 MB, read and written."""
    a, b = torch.rand(ROWS * COLUMNS, device="cuda"), torch.empty(ROWS * COLUMNS, device="cuda")
    return 2 * a.numel() * 4 / statistics.median(milliseconds(lambda: b.copy_(a), repeats)) / 1e9


def off(found: torch.Tensor, expected: torch.Tensor) -> float:
    """||found - expected|| / ||expected||, a part at a time."""
    above = below = 0.0
    for a, b in zip(found.flatten().split(1 << 26), expected.flatten().split(1 << 26), strict=True):
        above += float((a.double() - b.double()).square().sum())
        below += float(b.double().square().sum())
    return (above / max(below, 1e-300)) ** 0.5


def case(name: str, results: dict[str, Node], copy: float, given: argparse.Namespace) -> None:
    compiled = Compiled(results, device="cuda")
    leaves: dict[Node, torch.Tensor] = {}
    draws = {"key": torch.tensor([12345, 0], dtype=torch.int64, device="cuda"), "draw": torch.zeros((), dtype=torch.int64, device="cuda")}
    for node in postorder(results.values()):
        if node.op in BOUND:
            dtype = TORCH[node.type.dtype]
            leaves[node] = (
                torch.randint(0, COLUMNS, node.type.shape, dtype=dtype, device="cuda")
                if node.type.is_integer
                else torch.rand(node.type.shape, device="cuda").to(dtype)
            )
    bound = Bound(compiled, leaves, {}, None, lambda what, parts: draws[what])
    bytes_ = sum(n.type.bytes for n in leaves) + sum(n.type.bytes for n in results.values())
    bound.launch()
    found = {n: bound.result(n) for n in results}
    function = theirs({str(n.attrs["name"]): t for n, t in leaves.items()})[name]
    if name == "dropout with residual":  # other draws: the share that is kept, and what becomes of it
        x, ct = (next(t for n, t in leaves.items() if n.attrs["name"] == which) for which in ("x", "ct"))
        kept = (found["y"] - ct) / (x / 0.9)
        wrong = {"kept": float((kept > 0.5).float().mean()) - 0.9, "values": float(torch.minimum(kept.abs(), (kept - 1).abs()).nanquantile(0.5)) if kept.numel() < 1 << 24 else 0.0}
    else:
        expected = function()
        wrong = {n: off(found[n].reshape(expected[n].shape), expected[n]) for n in results}
        del expected
    fine = all(abs(w) < (1e-2 if "bf16" in name else 1e-3) for w in wrong.values())
    times = milliseconds(bound.launch, given.repeats)
    time = statistics.median(times)
    row: dict[str, Any] = {"ms": summary(times), "floor_ms": round(bytes_ / copy / 1e9, 4), "of_copy": round(bytes_ / time / 1e9 / copy, 3), "launches": len(bound.work)}
    if given.torch:
        try:
            fast = torch.compile(function, dynamic=False)
            row["torch_ms"] = summary(milliseconds(fast, given.repeats))
            row["torch_over_ours"] = round(row["torch_ms"]["median"] / time, 3)
        except Exception as error:
            row["torch_error"] = f"{type(error).__name__}: {error}"[:300]
    say(name, ok=fine and row["of_copy"] >= BAR, off={n: float(f"{w:.1e}") for n, w in wrong.items()}, bar=BAR, **row)


def head_rows(copy: float, given: argparse.Namespace) -> None:
    """Losses of rows of bf16 logits, and over them their gradient."""
    classes = 50304
    rows = library.logits_rows(32 * 1024, classes, 2)
    source = (torch.randn(rows, classes, device="cuda") * 2).bfloat16()
    labels = torch.randint(0, classes, (rows,), device="cuda", dtype=torch.int32)
    ct = torch.full((rows,), 1.0 / rows, device="cuda")
    losses, logits = torch.empty(rows, device="cuda"), source.clone()
    floor = 2 * source.nbytes / copy / 1e9
    for once in (True, False):
        choice.SWITCH = Switch(once=once)
        logits.copy_(source)
        library.entropy(logits, labels, ct, losses)
        wrong = {"losses": 0.0, "gradient": 0.0}
        for start in range(0, rows, 512):
            part = slice(start, start + 512)
            expected = _entropy(source[part], labels[part], ct[part])
            for name, found, right in zip(wrong, (losses, logits), expected, strict=True):
                wrong[name] = max(wrong[name], off(found[part], right))
        fine = wrong["losses"] < 1e-6 and wrong["gradient"] < 4e-3
        times = milliseconds(lambda: library.entropy(logits, labels, ct, losses), given.repeats)
        time = statistics.median(times)
        row: dict[str, Any] = {"ms": summary(times), "floor_ms": round(floor, 4), "of_copy": round(floor / time, 3)}
        if given.torch and once:
            try:
                row["torch_ms"] = summary(milliseconds(partial(torch.compile(_entropy, dynamic=False), source, labels, ct), given.repeats))
                row["torch_over_ours"] = round(row["torch_ms"]["median"] / time, 3)
            except Exception as error:
                row["torch_error"] = f"{type(error).__name__}: {error}"[:300]
        say(f"cross-entropy and gradient of a head's rows, bf16, read {'once' if once else 'twice'}", ok=fine and (not once or row["of_copy"] >= BAR),
            off={n: float(f"{w:.1e}") for n, w in wrong.items()}, bar=BAR, **row)
    choice.SWITCH = Switch()


def _entropy(x: torch.Tensor, labels: torch.Tensor, ct: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    wide = x.float()
    chosen = torch.arange(x.shape[1], device=x.device)[None, :] == labels[:, None]
    losses = F.cross_entropy(wide, labels.long(), reduction="none")
    return losses, ((torch.softmax(wide, 1) - chosen.float()) * ct[:, None]).to(x.dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--no-torch", dest="torch", action="store_false", help="ours alone")
    given = parser.parse_args()
    copy = copy_speed(given.repeats)
    say("copy of 256 MB", terabytes_per_second=round(copy, 3))
    for name, results in cases().items():
        try:
            case(name, results, copy, given)
        except Exception as error:
            say(name, ok=False, error=f"{type(error).__name__}: {error}"[:400], trace=last_lines(traceback.format_exc(), 5))
        torch.cuda.empty_cache()
    try:
        head_rows(copy, given)
    except Exception as error:
        say("cross-entropy of a head's rows", ok=False, error=f"{type(error).__name__}: {error}"[:400], trace=last_lines(traceback.format_exc(), 5))


if __name__ == "__main__":
    main()
