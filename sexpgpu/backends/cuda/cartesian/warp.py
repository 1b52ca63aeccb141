"""What kernels of warps call: tensors have one element a thread, so that a program is written thread by thread.

Two neighbouring channels of a thread travel as one word. `mma` and `quad` are PTX on a GPU; under Triton's interpreter they are written
out in NumPy, by the fragments that the PTX manual states for mma.m16n8k16.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from sexpgpu.backends.cuda.prelude import INTERPRETED, to_bf16


@triton.jit
def low(word):
    """The first f32 of an i64."""
    return word.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def high(word):
    """The second f32 of an i64."""
    return (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def both(a, b):
    """Two f32 as an i64."""
    return (b.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (a.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def low_bf16(word):
    """The first bf16 of an i32, as f32."""
    return (word << 16).to(tl.float32, bitcast=True)


@triton.jit
def high_bf16(word):
    """The second bf16 of an i32, as f32."""
    return (word & -65536).to(tl.float32, bitcast=True)


@triton.jit
def both_bf16(a, b):
    """Two f32, rounded to bf16, as an i32."""
    first = to_bf16(a).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return (to_bf16(b).to(tl.int16, bitcast=True).to(tl.int32) << 16) | first


if INTERPRETED:
    import numpy as np

    def _tensor(array: Any, element: Any) -> Any:
        from triton.runtime.interpreter import TensorHandle

        return tl.tensor(TensorHandle(array, element), tl.block_type(element, list(array.shape)))

    def _halves(words: list[Any]) -> Any:
        """i32 of each thread [warps 32] -> the bf16 in them as f32 [warps 32 words 2], first half first."""
        bits = np.stack(words, -1).astype(np.uint32)
        return np.stack([bits << 16, bits & 0xFFFF0000], -1).astype(np.uint32).view(np.float32)

    _G, _T = np.arange(32) // 4, np.arange(32) % 4

    def mma(a0: Any, a1: Any, a2: Any, a3: Any, b0: Any, b1: Any, c0: Any, c1: Any, c2: Any, c3: Any) -> Any:
        """c + a b for each warp: a [16 16] bf16, b [16 8] bf16, c [16 8] f32, as fragments."""
        shape = a0.handle.data.shape
        words = [x.handle.data.reshape(-1, 32) for x in (a0, a1, a2, a3, b0, b1)]
        sums = [x.handle.data.reshape(-1, 32) for x in (c0, c1, c2, c3)]
        left, right = _halves(words[:4]), _halves(words[4:])
        a, b = np.zeros((len(left), 16, 16), np.float32), np.zeros((len(left), 16, 8), np.float32)
        for half in range(2):
            for word, (row, column) in enumerate(((0, 0), (8, 0), (0, 8), (8, 8))):
                a[:, _G + row, 2 * _T + column + half] = left[:, :, word, half]
            for word in range(2):
                b[:, 2 * _T + 8 * word + half, _G] = right[:, :, word, half]
        product = a @ b
        places = ((0, 0), (0, 1), (8, 0), (8, 1))
        return tuple(_tensor((s + product[:, _G + row, 2 * _T + column]).astype(np.float32).reshape(shape), tl.float32)
                     for s, (row, column) in zip(sums, places, strict=True))

    def from_lane(x: Any, apart: Any) -> Any:
        """The value of the lane whose number differs by the bits of `apart`."""
        data = x.handle.data.reshape(-1, 32)
        return _tensor(np.ascontiguousarray(data[:, np.arange(32) ^ getattr(apart, "value", apart)]).reshape(-1), tl.float32)

    @triton.jit
    def quad(place):
        """Four i32 that lie side by side."""
        return tl.load(place), tl.load(place + 1), tl.load(place + 2), tl.load(place + 3)

    def of_lane(x: Any, number: Any, lanes: Any) -> Any:
        """The value of the lane of this number among `lanes` neighbours."""
        data = x.handle.data.reshape(-1, 32)
        number, lanes = (getattr(n, "value", n) for n in (number, lanes))
        return _tensor(np.ascontiguousarray(data[:, np.arange(32) // lanes * lanes + number]).reshape(-1), tl.float32)

    def at_lane(x: Any, lane: Any) -> Any:
        """The value of the lane of this number, 0 to 31."""
        return _tensor(np.take_along_axis(x.handle.data.reshape(-1, 32), lane.handle.data.reshape(-1, 32), 1).reshape(-1), tl.float32)
else:

    @triton.jit
    def mma(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3):
        """c + a b for each warp: a [16 16] bf16, b [16 8] bf16, c [16 8] f32, as fragments."""
        return tl.inline_asm_elementwise(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
            "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", [a0, a1, a2, a3, b0, b1, c0, c1, c2, c3],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )

    @triton.jit
    def from_lane(x, apart: tl.constexpr):
        """The value of the lane whose number differs by the bits of `apart`."""
        return tl.inline_asm_elementwise("shfl.sync.bfly.b32 $0, $1, $2, 0x1f, 0xffffffff;", "=f,f,r", [x, apart], dtype=tl.float32, is_pure=True, pack=1)

    @triton.jit
    def quad(place):
        """Four i32 that lie side by side; not to be moved out of a loop, where they would crowd the registers."""
        return tl.inline_asm_elementwise("ld.global.v4.b32 {$0,$1,$2,$3}, [$4];", "=r,=r,=r,=r,l", [place.to(tl.int64)],
                                         dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1)

    @triton.jit
    def of_lane(x, number: tl.constexpr, lanes: tl.constexpr):
        """The value of the lane of this number among `lanes` neighbours."""
        return tl.inline_asm_elementwise("shfl.sync.idx.b32 $0, $1, $2, $3, 0xffffffff;", "=f,f,r,r", [x, number, (32 - lanes) * 256 + 31],
                                         dtype=tl.float32, is_pure=True, pack=1)

    @triton.jit
    def at_lane(x, lane):
        """The value of the lane of this number, 0 to 31."""
        return tl.inline_asm_elementwise("shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;", "=f,f,r", [x, lane], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def with_lane(x, apart: tl.constexpr):
    """The sum with the lane whose number differs by the bits of `apart`."""
    return x + from_lane(x, apart)


@triton.jit
def joined(a, b):
    """Two i32 as an i64."""
    return (b.to(tl.int64) << 32) | (a.to(tl.int64) & 0xFFFFFFFF)
