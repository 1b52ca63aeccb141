"""The kernel by hand beside the generated ones: rows added by group."""

from __future__ import annotations

import triton
import triton.language as tl

from sexpgpu.backends.cuda.prelude import to_bf16


@triton.jit(do_not_specialize=["columns"])
def segment(rows, starts, order, out, columns, WIDE: tl.constexpr, ACC: tl.constexpr, LOW: tl.constexpr):
    """out[n] = Σ rows[order[e]] over e of starts[n] … starts[n+1], in that order; rows [edges columns] of ACC."""
    node = tl.program_id(0)
    c = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    begin = tl.load(starts + node)
    end = tl.load(starts + node + 1)
    total = tl.zeros((WIDE,), ACC)
    for at in range(begin, end):
        row = tl.load(order + at).to(tl.int64)
        total += tl.load(rows + row * columns + c, mask=c < columns, other=0.0)
    place = out + node.to(tl.int64) * columns + c
    if LOW:
        tl.store(place, to_bf16(total), mask=c < columns)
    else:
        tl.store(place, total, mask=c < columns)
