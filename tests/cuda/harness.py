"""Runs graphs through the CUDA backend on the CPU, in memory that tells on a kernel which writes or reads where it must not.

For processes of their own: Triton's interpreter is chosen before Triton is imported, is not thread-safe, and a store out of bounds may
end the process. `TESTED_DEVICE=cuda` runs them on a GPU instead (benchmarks/on_gpu.py, part `ops`).
"""

from __future__ import annotations

import os

os.environ.update({} if os.environ.get("TESTED_DEVICE") == "cuda" else {"TRITON_INTERPRET": "1"})
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import json
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

warnings.simplefilter("ignore")
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "ops")]

from sexpgpu.backends.cuda.executable import Bound, Compiled  # noqa: E402
from sexpgpu.backends.interpreter import compile_graph  # noqa: E402
from sexpgpu.backends.interpreter.dtypes import TORCH  # noqa: E402
from sexpgpu.ir import Node  # noqa: E402
from sexpgpu.ops.philox import draw_key  # noqa: E402
from sexpgpu.ops.random import draw_kind  # noqa: E402

BAND = 256  # elements of a guard band
DEVICE = os.environ.get("TESTED_DEVICE", "cpu")
torch.set_num_threads(1)
torch.backends.cudnn.allow_tf32 = False


def poison(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Bytes 0xFF: NaN, -1 or the largest number."""
    size = count * torch.empty((), dtype=dtype).element_size()
    return torch.full((size,), 0xFF, dtype=torch.uint8, device=DEVICE).view(dtype) if size else torch.empty(0, dtype=dtype, device=DEVICE)


def draws(seed: int = 0, step: int = 0, offset: int = 0, samples: int = 0) -> Any:
    """The draws of one step, as a program gives them."""
    at = torch.tensor(step, dtype=torch.int64, device=DEVICE)

    def find(what: str, parts: tuple) -> torch.Tensor:
        if what == "draw":
            return at
        op, path, number, batch, size = parts[0]
        key = draw_key(seed, path, number, draw_kind(op))
        first = offset * (size // max(1, samples)) if batch else 0
        return torch.tensor([key - (1 << 64) if key >= 1 << 63 else key, first], dtype=torch.int64, device=DEVICE)

    return find


def run(results: Mapping[str, Node], bindings: Mapping[Node, torch.Tensor], draw: Any = None, placed: bool = True) -> dict[str, torch.Tensor]:
    """The results, each in memory of NaN between guard bands, over an arena of NaN. Raises AssertionError for a band that was written.

    placed: the caller gives the results their memory; else they lie in the arena.
    """
    compiled = Compiled(results, dict.fromkeys(results) if placed else None, DEVICE)
    bindings = {leaf: tensor.to(DEVICE) for leaf, tensor in bindings.items()}
    whole, into = {}, {}
    for name, node in results.items():
        if not placed:
            break
        dtype = TORCH[node.type.dtype]
        whole[name] = poison(node.type.size + 2 * BAND, dtype if dtype != torch.bool else torch.uint8)
        view = whole[name][BAND : BAND + node.type.size]
        into[name] = (view.view(torch.bool) if dtype == torch.bool else view).view(node.type.shape)
    arena = torch.full((compiled.plan.size + BAND,), 0xFF, dtype=torch.uint8, device=DEVICE)
    before = {leaf: tensor.clone() for leaf, tensor in bindings.items()}
    bound = Bound(compiled, dict(bindings), into, arena, draw or draws())
    bound.launch()
    out = {name: bound.result(name).to("cpu", copy=True) for name in results}
    assert bool((arena[compiled.plan.size :] == 0xFF).all()), "a kernel wrote behind the arena"
    for name, memory in whole.items():
        size = results[name].type.size
        bands = torch.cat([memory[:BAND], memory[BAND + size :]])
        assert bool((bands.view(torch.uint8) == 0xFF).all()), f"a kernel wrote beside {name}"
    for leaf, tensor in bindings.items():
        assert same(tensor, before[leaf]), f"a kernel wrote over the leaf {leaf.attrs}"
    return out


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal, NaN to NaN."""
    return torch.equal(a, b) or (a.is_floating_point() and bool(((a == b) | (a.isnan() & b.isnan())).all()))


def compare(results: Mapping[str, Node], bindings: Mapping[Node, torch.Tensor], tolerance: float, placed: bool = True) -> list[str]:
    """What differs from the interpreter by more than `tolerance` (relative to 1 + |value|)."""
    expected = compile_graph(results).run(bindings)
    try:
        found = run(results, bindings, placed=placed)
    except Exception as error:  # noqa: BLE001 - reported as a failure of the case
        return [f"{type(error).__name__}: {error}"[:300]]
    wrong = []
    for name in results:
        a, b = expected[name], found[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            wrong.append(f"{name}: {b.dtype}{list(b.shape)} for {a.dtype}{list(a.shape)}")
            continue
        x, y = a.double(), b.double()
        if tolerance == 0 and not same(a, b):
            wrong.append(f"{name}: not equal, {int((x != y).sum())} elements")
        elif not torch.allclose(x, y, rtol=tolerance, atol=tolerance, equal_nan=True):
            wrong.append(f"{name}: off by {(x - y).abs().max().item():.2e}")
    return wrong


def tell(failures: list[str], count: int) -> None:
    """What the test that started this process reads."""
    print(json.dumps({"failures": failures, "count": count}))
