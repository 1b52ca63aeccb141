"""Initial values made where the tensor lies, by torch: the bits of `ops.initial`, which makes them on the host.

An operation is a launch of its own, so nothing contracts a product and a sum, and IEEE 754 fixes + - * / and sqrt of float64 to the last
bit on a GPU as on a CPU. Every value takes both ways of a branch, as waiting for a count would cost more than it saves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from sexpgpu.ops import initial
from sexpgpu.ops.philox import M0, M1, W0, W1

DRAWN = ("normal", "uniform")  # kinds that are drawn value by value
CHUNK = 1 << 21  # values at a time: each chunk is some 200 launches, and takes some 200 MB of the device's memory
LOW = 0xFFFFFFFF


def drawn(kind: str, settings: Mapping[str, Any], key: int, out: torch.Tensor) -> None:
    """Writes an initial value of one of `DRAWN`, float64 rounded to float32, into `out`, of any float type. `key`: `draw_key(…)`."""
    a = {name: float(settings.get(name, default)) for name, default in initial.KINDS[kind].items()}
    add, scale = (a["mean"], a["std"]) if kind == "normal" else (a["low"], a["high"] - a["low"])
    whole = out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
    flat = whole.view(-1)
    for start in range(0, flat.numel(), CHUNK):
        part = flat[start : start + CHUNK]
        values = _uniforms(key, start, part.numel(), out.device)
        if kind == "normal":
            values = _quantiles(values)
        values *= scale
        values += add
        part.copy_(values.to(torch.float32))
    if whole is not out:
        out.copy_(whole)


def _philox(block: torch.Tensor, key: int) -> tuple[torch.Tensor, ...]:
    """The four words, each an int64 below 2^32, of these blocks at step 0."""
    k0, k1 = key & LOW, key >> 32
    low, high = (block & LOW) * int(M0), torch.zeros_like(block)  # products modulo 2^64: of c0 and of c2, which is 0 at first
    c0, c2 = (block >> 32) ^ k0, ((low >> 32) ^ k1) & LOW
    for _ in range(9):
        k0, k1 = (k0 + W0) & LOW, (k1 + W1) & LOW
        before, low, high = (low, high), c0 * int(M0), c2 * int(M1)
        c0 = _word(high, before[1], k0)
        c2 = _word(low, before[0], k1)
    return c0, high & LOW, c2, low & LOW


def _word(product: torch.Tensor, before: torch.Tensor, key: int) -> torch.Tensor:
    """The upper word of a product, with the lower one of another and a key: what is above 32 bits, a sign too, is masked away."""
    word = product >> 32
    word ^= before
    word ^= key
    word &= LOW
    return word


def _uniforms(key: int, first: int, count: int, device: torch.device) -> torch.Tensor:
    """52-bit uniforms strictly between 0 and 1, numbers `first` (even) … of the stream: float64 [count]."""
    half = (count + 1) // 2
    words = _philox(torch.arange(first // 2, first // 2 + half, dtype=torch.int64, device=device), key)
    pairs = [(((words[i] >> 6) << 26) | (words[i + 1] >> 6) | (0x4330 << 48)).view(torch.float64) for i in (0, 2)]
    out = torch.stack(pairs, 1).view(-1)[:count]
    out -= 2.0**52 - 0.5
    out *= 2.0**-52
    return out


def _polynomial(coefficients: Sequence[float], x: torch.Tensor) -> torch.Tensor:
    out = x * coefficients[-1]
    for c in reversed(coefficients[1:-1]):
        out += c
        out *= x
    out += coefficients[0]
    return out


def _log(x: torch.Tensor) -> torch.Tensor:
    bits = x.view(torch.int64)
    power = (bits - initial.SQRT_HALF) >> 52
    m, k = (bits - (power << 52)).view(torch.float64), power.to(torch.float64)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    series = _polynomial(initial.ATANH, z)
    series *= z
    s = s * 2.0
    series *= s
    series += k * initial.LN2_LOW
    s += series
    k *= initial.LN2_HIGH
    k += s
    return k


def _root(x: torch.Tensor) -> torch.Tensor:
    """The root, rounded as IEEE 754 says: a GPU's is, torch's on a CPU (a vector library's) is off by a bit at times."""
    return torch.from_numpy(np.sqrt(x.numpy())) if x.device.type == "cpu" else torch.sqrt(x)


def _quantiles(p: torch.Tensor) -> torch.Tensor:
    q = p - 0.5
    r = 0.180625 - q * q
    middle = q * _polynomial(initial.A, r)
    middle /= _polynomial(initial.B, r)
    r = _root(-_log(torch.minimum(p, 1.0 - p)))
    a = r - 1.6
    tails = _polynomial(initial.C, a)
    tails /= _polynomial(initial.D, a)
    b = r - 5.0
    far = _polynomial(initial.E, b)
    far /= _polynomial(initial.F, b)
    tails = torch.where(r > 5.0, far, tails)
    return torch.where(q.abs() > 0.425, torch.copysign(tails, q), middle)
