"""Kernels written by hand, where no fusion of ops makes them."""

from __future__ import annotations

import triton
import triton.language as tl

from sexpgpu.backends.cuda.prelude import finite_or_zero, from_bf16, to_bf16


@triton.jit
def finish(table, PARTS: tl.constexpr, WIDE: tl.constexpr):
    """Sums of partial results: a row of the table [n 6] is (address of partials [p e], p, e, first column, address of the
    sums [e], unused); a program adds one block of columns, in the order of the partials."""
    row = table + tl.program_id(0) * 6
    source = tl.load(row).to(tl.pointer_type(tl.float32))
    parts = tl.load(row + 1).to(tl.int32)
    elements = tl.load(row + 2).to(tl.int32)
    c = tl.load(row + 3).to(tl.int32) + tl.arange(0, WIDE)[None, :]
    target = tl.load(row + 4).to(tl.pointer_type(tl.float32))
    total = tl.zeros((PARTS, WIDE), tl.float32)
    for start in range(0, parts, PARTS):
        r = start + tl.arange(0, PARTS)[:, None]
        total += tl.load(source + r * elements + c, mask=(r < parts) & (c < elements), other=0.0)
    tl.store(target + c, tl.sum(total, axis=0, keep_dims=True), mask=c < elements)


@triton.jit
def entropy_rows(logits, labels, ct, losses, CLASSES: tl.constexpr, WIDE: tl.constexpr, LOW: tl.constexpr, GRAD: tl.constexpr, STAGES: tl.constexpr):
    """A row of logits [n classes] a program: its loss, and over the logits their gradient times ct. `LOW`: bf16.

    One pass for the maximum and the sum below it, one (from the cache) for the gradient.
    """
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * CLASSES
    label = tl.load(labels + row)
    top = tl.full((1, 1), float("-inf"), tl.float32)
    total = tl.zeros((1, WIDE), tl.float32)
    for start in tl.range(0, CLASSES, WIDE, num_stages=STAGES):
        c = start + tl.arange(0, WIDE)[None, :]
        x = tl.load(base + c, mask=c < CLASSES, other=float("-inf"))
        if LOW:
            x = from_bf16(x)
        new = tl.maximum(top, tl.max(x, axis=1, keep_dims=True))  # a NaN reaches the sum
        shift = finite_or_zero(new)
        total = total * tl.exp(finite_or_zero(top) - shift) * (top > float("-inf")).to(tl.float32) + tl.exp(x - shift)
        top = new
    shift = finite_or_zero(top)
    lse = shift + tl.log(tl.sum(total, axis=1, keep_dims=True))
    one = tl.zeros((1, 1), tl.int32)
    picked = tl.load(base + label + one)
    if LOW:
        picked = from_bf16(picked)
    tl.store(losses + row + one, lse - picked)
    if GRAD:
        scale = tl.load(ct + row + one)
        for start in tl.range(0, CLASSES, WIDE, num_stages=STAGES):
            c = start + tl.arange(0, WIDE)[None, :]
            x = tl.load(base + c, mask=c < CLASSES, other=0.0)
            if LOW:
                x = from_bf16(x)
            g = (tl.exp(x - lse) - (c == label).to(tl.float32)) * scale
            if LOW:
                g = to_bf16(g)
            tl.store(base + c, g, mask=c < CLASSES)
