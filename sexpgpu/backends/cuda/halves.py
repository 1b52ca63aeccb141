"""f32 products on tensor cores from bf16 halves: x is high + low, two bf16 numbers, and x y is high·low + low·high + high·high, within 2^-16 of
the product. Three instructions of bf16, where three products of TF32 parts are six times the work of them: tensor cores take TF32 at half the speed, and only
with both operands along their rows, so Triton turns the others round in shared memory first (docs/decisions/0061 has the times).

Under Triton's interpreter the halves stay f32 numbers: it multiplies bf16 wrongly.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sexpgpu.backends.cuda.prelude import INTERPRETED, round_bf16

if INTERPRETED:

    @triton.jit
    def _high(x):
        return round_bf16(x)

    @triton.jit
    def _low(x, high):
        return round_bf16(x - high)
else:

    @triton.jit
    def _high(x):
        return x.to(tl.bfloat16)

    @triton.jit
    def _low(x, high):
        return (x - high.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _added(xh, xl, yh, yl):
    some = tl.dot(xl, yh)
    some = tl.dot(xh, yl, some)
    return tl.dot(xh, yh, some)


@triton.jit
def product(x, y):
    """x y of f32 tiles [m k] and [k n]."""
    xh = _high(x)
    yh = _high(y)
    return _added(xh, _low(x, xh), yh, _low(y, yh))


@triton.jit
def turned_product(x, y):
    """xᵀ y of f32 tiles [k m] and [k n]; halved before they are turned."""
    xh = _high(x)
    yh = _high(y)
    return _added(tl.trans(xh), tl.trans(_low(x, xh)), yh, _low(y, yh))
