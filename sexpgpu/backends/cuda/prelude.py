"""What generated kernels call. On a GPU these are Triton; under TRITON_INTERPRET=1 the parts that its interpreter lacks, or gets
wrong (bf16), are written out by bits or through NumPy (docs/decisions: Triton's interpreter).

max, min and their reductions propagate NaN, which Triton's own do not.
"""

from __future__ import annotations

import os
from typing import Any

import triton
import triton.language as tl

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")

if INTERPRETED:
    import numpy as np

    np.seterr(all="ignore")  # a GPU says nothing of the logarithm of 0 either

    def _numpy(function: Any) -> Any:
        """A function of NumPy on the interpreter's tensors, element by element."""

        def call(*xs: Any) -> Any:
            from triton.runtime.interpreter import TensorHandle

            first = next(x for x in xs if hasattr(x, "handle"))
            arrays = [x.handle.data if hasattr(x, "handle") else np.asarray(getattr(x, "value", x)) for x in xs]
            kind = arrays[[i for i, x in enumerate(xs) if x is first][0]].dtype
            with np.errstate(all="ignore"):
                out = np.asarray(function(*arrays), kind)
            element = first.type.scalar
            return tl.tensor(TensorHandle(out, element), tl.block_type(element, list(out.shape)) if out.shape else element)

        return call

    tanh, log1p, expm1 = _numpy(np.tanh), _numpy(np.log1p), _numpy(np.expm1)
    tan, asin, acos, atan, sinh, cosh = (_numpy(f) for f in (np.tan, np.arcsin, np.arccos, np.arctan, np.sinh, np.cosh))
    asinh, acosh, atanh = (_numpy(f) for f in (np.arcsinh, np.arccosh, np.arctanh))
    atan2, hypot, power = _numpy(np.arctan2), _numpy(np.hypot), _numpy(np.power)
    round = _numpy(np.rint)  # noqa: A001 - the op's name

    @triton.jit
    def from_bf16(x):
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)

    @triton.jit
    def to_bf16(x):
        u = x.to(tl.uint32, bitcast=True)
        r = (u + 0x7FFF + ((u >> 16) & 1)) >> 16
        return tl.where(x != x, 0x7FC0, r).to(tl.uint16).to(tl.bfloat16, bitcast=True)

    @triton.jit
    def round_bf16(x):
        return from_bf16(to_bf16(x))

    @triton.jit
    def rsqrt(x):
        return 1.0 / tl.sqrt(x)

    @triton.jit
    def logistic2(x):
        return 1.0 / (1.0 + tl.exp2(x))

    @triton.jit
    def power_of_2(exponent):
        return tl.exp2(exponent)

    @triton.jit
    def _bits_of_bf16(x):
        u = x.to(tl.int32, bitcast=True)
        return tl.where(x != x, 0x7FC0, ((u + 0x7FFF + ((u >> 16) & 1)) >> 16) & 0xFFFF)

    @triton.jit
    def pair_of(first, second):
        return _bits_of_bf16(first) | (_bits_of_bf16(second) << 16)

    @triton.jit
    def anew(pair):
        return pair

    @triton.jit
    def pair_max(one, other):
        return pair_of(tl.maximum(first_of(one), first_of(other)), tl.maximum(second_of(one), second_of(other)))
else:
    from triton.language.extra import libdevice

    @triton.jit
    def rsqrt(x):
        return tl.rsqrt(x)

    @triton.jit
    def power_of_2(exponent):
        """2^exponent of f32, to 2 ulp, 0 where that is not normal: one instruction."""
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [exponent], dtype=tl.float32, is_pure=True, pack=1)

    @triton.jit
    def pair_of(first, second):
        """Two of f32 as bf16 in an i32, the first in its low half: one instruction."""
        return tl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [first, second], dtype=tl.int32, is_pure=True, pack=1)

    @triton.jit
    def anew(pair):
        """An i32 of which the compiler knows nothing, so that what was made of it is not kept in registers but made once more."""
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [pair], dtype=tl.int32, is_pure=False, pack=1)

    @triton.jit
    def pair_max(one, other):
        """The maxima of two pairs; of a NaN and a number the number: one instruction."""
        return tl.inline_asm_elementwise("max.bf16x2 $0, $1, $2;", "=r,r,r", [one, other], dtype=tl.int32, is_pure=True, pack=1)

    @triton.jit
    def _inverse(x):
        """1 / x of f32, to 1 ulp, 0 where that is not normal: one instruction."""
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)

    @triton.jit
    def logistic2(x):
        """1 / (1 + 2^x). Both ways are branches: what stands behind a return is compiled too, and these instructions take no float64."""
        if x.dtype == tl.float64:
            y = 1.0 / (1.0 + tl.exp2(x))
        else:
            y = _inverse(1.0 + power_of_2(x))
        return y

    @triton.jit
    def tanh(x):
        """By exp for f32, by its series below 0.15, to 2e-7 relative: the library's is several times slower."""
        if x.dtype == tl.float64:
            return libdevice.tanh(x)
        y = tl.abs(x)
        far = 1.0 - 2.0 / (tl.exp(2.0 * y) + 1.0)
        z = x * x
        near = y * (1.0 + z * (-0.3333333333 + z * (0.1333333333 + z * (-0.0539682540 + z * 0.0218694885))))
        found = tl.where(y < 0.15, near, far)
        return tl.where(x < 0, -found, found)

    @triton.jit
    def log1p(x):
        return libdevice.log1p(x)

    @triton.jit
    def expm1(x):
        return libdevice.expm1(x)

    @triton.jit
    def tan(x):
        return libdevice.tan(x)

    @triton.jit
    def asin(x):
        return libdevice.asin(x)

    @triton.jit
    def acos(x):
        return libdevice.acos(x)

    @triton.jit
    def atan(x):
        return libdevice.atan(x)

    @triton.jit
    def sinh(x):
        return libdevice.sinh(x)

    @triton.jit
    def cosh(x):
        return libdevice.cosh(x)

    @triton.jit
    def asinh(x):
        return libdevice.asinh(x)

    @triton.jit
    def acosh(x):
        return libdevice.acosh(x)

    @triton.jit
    def atanh(x):
        return libdevice.atanh(x)

    @triton.jit
    def atan2(y, x):
        return libdevice.atan2(y, x)

    @triton.jit
    def hypot(x, y):
        return libdevice.hypot(x, y)

    @triton.jit
    def power(x, y):
        return libdevice.pow(x, y)

    @triton.jit
    def round(x):  # noqa: A001 - the op's name
        return libdevice.rint(x)

    @triton.jit
    def from_bf16(x):
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)  # an instruction; Triton's cast takes 1.5

    @triton.jit
    def to_bf16(x):
        return x.to(tl.bfloat16)

    @triton.jit
    def round_bf16(x):
        return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def first_of(pair):
    """The bf16 in the low half of an i32, as f32."""
    return (pair << 16).to(tl.float32, bitcast=True)


@triton.jit
def second_of(pair):
    return (pair & -65536).to(tl.float32, bitcast=True)


@triton.jit
def from_f16(x):
    return x.to(tl.float32)


@triton.jit
def to_f16(x):
    return x.to(tl.float16)


@triton.jit
def round_f16(x):
    return x.to(tl.float16).to(tl.float32)


@triton.jit
def from_bool(x):
    return x != 0


@triton.jit
def to_bool(x):
    return (x != 0).to(tl.int8)


@triton.jit
def as_tensor(x):
    return x + tl.full((), 0, tl.int32)


@triton.jit
def as_index(x):
    return x + tl.full((), 0, tl.int32)


@triton.jit
def where(mask, x, y):
    return tl.where(mask, x, y)


@triton.jit
def plus(x, y):
    return x + y


@triton.jit
def times(x, y):
    return x * y


@triton.jit
def maximum(x, y):
    return tl.where(x > y, x, tl.where(x != x, x, y))


@triton.jit
def minimum(x, y):
    return tl.where(x < y, x, tl.where(x != x, x, y))


@triton.jit
def maximum_int(x, y):
    return tl.where(x > y, x, y)


@triton.jit
def minimum_int(x, y):
    return tl.where(x < y, x, y)


@triton.jit
def row_sum(x, axis: tl.constexpr):
    return tl.sum(x, axis=axis, keep_dims=True)


@triton.jit
def row_max(x, axis: tl.constexpr):
    nans = tl.sum((x != x).to(tl.int32), axis=axis, keep_dims=True)
    top = tl.max(tl.where(x != x, float("-inf"), x), axis=axis, keep_dims=True)
    return tl.where(nans > 0, float("nan"), top)


@triton.jit
def row_min(x, axis: tl.constexpr):
    nans = tl.sum((x != x).to(tl.int32), axis=axis, keep_dims=True)
    top = tl.min(tl.where(x != x, float("inf"), x), axis=axis, keep_dims=True)
    return tl.where(nans > 0, float("nan"), top)


@triton.jit
def row_max_int(x, axis: tl.constexpr):
    return tl.max(x, axis=axis, keep_dims=True)


@triton.jit
def row_min_int(x, axis: tl.constexpr):
    return tl.min(x, axis=axis, keep_dims=True)


@triton.jit
def _multiply(a, b):
    return a * b


@triton.jit
def row_prod(x, axis: tl.constexpr):
    return tl.reduce(x, axis, _multiply, keep_dims=True)


@triton.jit
def neg(x):
    return -x


@triton.jit
def not_(x):
    return x == 0


@triton.jit
def abs(x):  # noqa: A001 - the op's name
    return tl.abs(x)


@triton.jit
def sign(x):
    return (x > 0).to(x.dtype) - (x < 0).to(x.dtype)


@triton.jit
def exp(x):
    return tl.exp(x)


@triton.jit
def log(x):
    return tl.log(x)


@triton.jit
def exp2(x):
    return tl.exp2(x)


@triton.jit
def log2(x):
    return tl.log2(x)


@triton.jit
def sqrt(x):
    return tl.sqrt(x)


@triton.jit
def reciprocal(x):
    return 1.0 / x


@triton.jit
def sin(x):
    return tl.sin(x)


@triton.jit
def cos(x):
    return tl.cos(x)


@triton.jit
def sigmoid(x):
    return logistic2(x * -1.4426950408889634)


@triton.jit
def erf(x):
    return tl.erf(x)


@triton.jit
def square(x):
    return x * x


@triton.jit
def floor(x):
    return tl.floor(x)


@triton.jit
def ceil(x):
    return tl.ceil(x)


@triton.jit
def mod(x, y):
    r = x - y * tl.floor(x / y)
    return tl.where(r == y, tl.where(y != 0, x * 0, r), r)


@triton.jit
def mod_int(x, y):
    r = x % y
    return tl.where(r != 0, tl.where((r < 0) != (y < 0), r + y, r), r)


@triton.jit
def softplus(x):
    return tl.where(x > 20, x, log1p(tl.exp(tl.where(x > 20, 0.0, x))))


@triton.jit
def gelu(x):
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def gelu_grad(x, ct):
    cdf = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    return ct * (cdf + x * 0.3989422804014327 * tl.exp(-0.5 * x * x))


@triton.jit
def gelu_tanh(x):
    """x · sigmoid(√(8/π) (x + 0.044715 x³)), the exponent times log₂ e."""
    return x * logistic2(x * (-2.302208198144325 - 0.1029432395800235 * (x * x)))


@triton.jit
def gelu_tanh_grad(x, ct):
    """With s, the logistic function of gelu_tanh: ct · (s + x · s (1 - s) · √(8/π) (1 + 0.134145 x²)). A kernel that has both makes s once."""
    s = logistic2(x * (-2.302208198144325 - 0.1029432395800235 * (x * x)))
    return ct * (s + x * (1.5957691216057308 + 0.21406444881780074 * (x * x)) * (s - s * s))


@triton.jit
def silu(x):
    return x * sigmoid(x)


@triton.jit
def mish(x):
    return x * tanh(softplus(x))


@triton.jit
def selu(x):
    return 1.0507009873554805 * tl.where(x > 0, x, 1.6732632423543772 * expm1(tl.where(x > 0, 0.0, x)))


@triton.jit
def is_finite(x):
    return (x - x) == 0


@triton.jit
def finite_or_zero(x):
    return tl.where((x - x) == 0, x, 0.0)


@triton.jit
def clamp(x, low, high):
    if low is not None:
        x = tl.where(x < low, low, x)
    if high is not None:
        x = tl.where(x > high, high, x)
    return x


@triton.jit
def philox_words(key, draw, block):
    """The four words of blocks of Philox 4x32-10 under the key at `key` (two u32 in an i64), step in the counter."""
    words = tl.load(key)
    k0 = (words & 0xFFFFFFFF).to(tl.uint32)
    k1 = ((words >> 32) & 0xFFFFFFFF).to(tl.uint32)
    step = tl.load(draw).to(tl.int64)
    block = block.to(tl.int64)
    c0 = (block & 0xFFFFFFFF).to(tl.uint32)
    c1 = ((block >> 32) & 0xFFFFFFFF).to(tl.uint32)
    c2 = (block * 0).to(tl.uint32) + (step & 0xFFFFFFFF).to(tl.uint32)
    c3 = (block * 0).to(tl.uint32) + ((step >> 32) & 0xFFFFFFFF).to(tl.uint32)
    for _ in tl.static_range(10):
        h0 = tl.umulhi(c0, (c0 * 0 + 0xD2511F53).to(tl.uint32))
        l0 = (c0 * 0xD2511F53).to(tl.uint32)
        h1 = tl.umulhi(c2, (c2 * 0 + 0xCD9E8D57).to(tl.uint32))
        l1 = (c2 * 0xCD9E8D57).to(tl.uint32)
        c0, c1, c2, c3 = h1 ^ c1 ^ k0, l1, h0 ^ c3 ^ k1, l0
        k0 = (k0 + 0x9E3779B9).to(tl.uint32)
        k1 = (k1 + 0xBB67AE85).to(tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def philox(key, draw, block, lane):
    """Word `lane` of each block."""
    c0, c1, c2, c3 = philox_words(key, draw, block)
    return tl.where(lane == 0, c0, tl.where(lane == 1, c1, tl.where(lane == 2, c2, c3)))


@triton.jit
def _word(key, draw, element):
    element = element.to(tl.int64) + tl.load(key + 1)
    return philox(key, draw, element // 4, element % 4)


@triton.jit
def random_uniform(key, draw, element):
    return (_word(key, draw, element) >> 8).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def random_categorical_uniform(key, draw, element):
    return random_uniform(key, draw, element)


@triton.jit
def random_normal(key, draw, element):
    element = element.to(tl.int64) + tl.load(key + 1)
    even = element - element % 2
    u = (philox(key, draw, even // 4, even % 4) >> 8).to(tl.float32) * 5.9604644775390625e-08
    w = (philox(key, draw, even // 4, even % 4 + 1) >> 8).to(tl.float32) * 5.9604644775390625e-08
    radius = tl.sqrt(-2.0 * log1p(-u))
    angle = 6.283185307179586 * w
    return radius * tl.where(element % 2 == 0, tl.cos(angle), tl.sin(angle))


@triton.jit
def random_bernoulli(key, draw, element, limit: tl.constexpr):
    element = element.to(tl.int64) + tl.load(key + 1)
    half = element % 8
    word = philox(key, draw, element // 8, half // 2)
    bits = tl.where(half % 2 == 0, word & 0xFFFF, word >> 16)
    return bits < limit


@triton.jit
def bernoulli_tile(key, draw, element, limit: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A tile of masks whose every eighth element is `element` [rows columns/8], a multiple of 8: a block of words for eight."""
    w0, w1, w2, w3 = philox_words(key, draw, (element.to(tl.int64) + tl.load(key + 1)) // 8)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    halves = tl.join(words & 0xFFFF, words >> 16)
    return tl.reshape(halves, (ROWS, COLUMNS)) < limit


if INTERPRETED:
    larger, smaller, row_largest, row_smallest = maximum, minimum, row_max, row_min
else:

    @triton.jit
    def larger(x, y):
        """`maximum` of floats, in one instruction."""
        return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)

    @triton.jit
    def smaller(x, y):
        return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)

    @triton.jit
    def row_largest(x, axis: tl.constexpr):
        """`row_max` of floats in one reduction."""
        return tl.reduce(x, axis, larger, keep_dims=True)

    @triton.jit
    def row_smallest(x, axis: tl.constexpr):
        return tl.reduce(x, axis, smaller, keep_dims=True)
