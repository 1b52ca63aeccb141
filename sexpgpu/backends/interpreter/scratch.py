"""What torch takes for itself inside a call, in bytes, beside the call's outputs: copies of operands whose elements lie in another
order, blocks of attention's scores, a convolution's tensors in its library's own order.

Of torch 2.13 and oneDNN with 512-bit vectors, found by tracing the allocator; tests/explain/test_memory_plan.py compares every step.
An op without a rule takes nothing, or, of a tensor product's parts, something that is not known here. Nothing imports torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from math import prod
from typing import Any

from sexpgpu.backends.interpreter.fuse import Step, Value
from sexpgpu.backends.interpreter.shapes import Shape, Strides, bytes_of, shape_of, viewed
from sexpgpu.ir import Node

At = Callable[[Value], Strides]


def scratch(step: Step, at: At, threads: int) -> int:
    """Bytes that a call takes for itself at the moment at which it holds the most, beside its outputs. `at`: a value's strides."""
    if step.needs[:1] == ("reference",):
        node = step.needs[2]
        if node.op not in _REFERENCES:
            results, operands = _TEMPORARIES.get(node.op, (0.0, 0.0))
            return int(results * node.type.bytes + operands * node.inputs[0].type.bytes) if results or operands else 0
        return max(0, _REFERENCES[node.op](node, at, threads))
    rule = _CALLS.get(call_of(step))
    return rule(step, at, threads) if rule is not None else 0


def call_of(step: Step) -> str:
    """The function that a step calls, also as a method."""
    found = re.match(r"(?:[{(][^)}]*[)}][^(]*\.)?([a-z_]+)\(", step.source)
    return found[1].rstrip("_") if found else ""


def _size(value: Value, width: int = 4) -> int:
    return prod(shape_of(value)) * width


def _unlike_matrix(rows: int, columns: int, strides: Strides) -> bool:
    """Whether the library of matrix products needs a copy of an operand: neither its rows nor its columns lie in order."""
    along, across = strides[-1], strides[-2]
    return not (along == 1 and across >= max(1, columns) or across == 1 and along >= max(1, rows))


def _as_rows(value: Value, at: At) -> int:
    """Bytes of the copy that an operand needs to be one matrix of all its rows."""
    shape, strides = shape_of(value), at(value)
    if len(shape) != 2:
        flat = (prod(shape[:-1]), shape[-1])
        seen = viewed(shape, strides, flat)
        if seen is None:
            return bytes_of(value)
        shape, strides = flat, seen
    return bytes_of(value) if _unlike_matrix(shape[0], shape[1], strides) else 0


def _product(step: Step, at: At, threads: int) -> int:
    """mm and addmm."""
    return sum(_as_rows(value, at) for value in step.inputs[-2:])


def _batched(a: Value, b: Value, at: At, width: int = 0) -> int:
    """Bytes of the copies that torch.matmul makes of operands of more than two axes: it wants one axis of matrices. `width`: of an
    element of the copies, where it is not the operand's."""
    copies, shapes = 0, (shape_of(a), shape_of(b))
    if len(shapes[1]) <= 2 or len(shapes[0]) <= 2:  # all rows of the one by the other
        copied = _as_rows(a, at) if len(shapes[0]) > 2 else 0
        return copied * width // max(1, bytes_of(a) // max(1, prod(shapes[0]))) if width else copied
    lead = max(len(s) for s in shapes) - 2
    batch = [max(s[-2 - lead + i] if len(s) - 2 >= lead - i else 1 for s in shapes) for i in range(lead)]
    for value, shape in zip((a, b), shapes, strict=True):
        strides = at(value)
        gaps = lead - (len(shape) - 2)
        wide = [0] * gaps + [0 if n == 1 and m != 1 else s for n, m, s in zip(shape[:-2], batch[gaps:], strides, strict=False)]
        whole = (*batch, *shape[-2:])
        seen = viewed(whole, (*wide, *strides[-2:]), (prod(batch), *shape[-2:]))
        if seen is None or _unlike_matrix(shape[-2], shape[-1], seen[-2:]):
            copies += prod(whole) * (width or bytes_of(value) // max(1, prod(shape)))
    return copies


def _blocks(t: int) -> tuple[int, int]:
    """Rows of queries and of keys that torch's flash kernel takes at once (FlashAttentionKernel.cpp, `cpu_flash_attention`)."""
    return (256 if t >= 768 else 64 if t >= 192 else 32), 512


def _flash(q: Value, k: Value, threads: int, width: int = 4) -> int:
    """The buffer of a thread: scores of a block, two rows' statistics, and sums."""
    t, d = shape_of(q)[-2:]
    keys = shape_of(k)[-2]
    rows, columns = _blocks(t)
    rows, columns = min(rows, t), min(columns, keys)
    return threads * (rows * columns + 2 * rows + rows * d) * width


def _attend(step: Step, at: At, threads: int) -> int:
    return _flash(step.inputs[0], step.inputs[1], threads, bytes_of(step.inputs[0]) // max(1, prod(shape_of(step.inputs[0]))))


def _attend_grad(step: Step, at: At, threads: int) -> int:
    """Two blocks of scores a thread, and the row sums of ct · out."""
    q, k = step.inputs[1:3]
    t, keys = shape_of(q)[-2], shape_of(k)[-2]
    rows, columns = _blocks(t)
    rows, columns = min(rows, t), min(columns, keys)
    return (threads * 2 * rows * columns + rows) * (bytes_of(q) // max(1, prod(shape_of(q))))


def _norm_grad(step: Step, at: At, threads: int) -> int:
    """Sums by scale and shift of each thread."""
    if len(step.outputs) == 1:
        return 0
    return 2 * threads * sum(bytes_of(o) for o in step.outputs[1:2])


# --- convolutions: oneDNN's, in blocks of 16 channels, or a matrix product over columns (Convolution.cpp, `use_mkldnn`)


class _Convolution:
    """One convolution: x [n c …], w [o c/groups k …], u of the result's shape. Sizes in bytes, `x_`, `w_`, `u_` in the library's order."""

    def __init__(self, x: Shape, w: Shape, u: Shape, attrs: Any, width: int, threads: int):
        self.x, self.w, self.u = (prod(s) * width for s in (x, w, u))
        groups, kernel = attrs["groups"], w[2:]
        strided, dilated = any(n > 1 for n in attrs["stride"]), any(n > 1 for n in attrs["dilation"])
        large = groups > 1 or all(k > 3 for k in kernel) or x[0] > 1 or prod(x) > 20480
        self.library = width == 4 and large and (strided or dilated or x[0] >= 16 or any(k != 1 for k in kernel) or threads > 1)
        self.columns = 0 if all(k == 1 for k in kernel) and not strided else x[0] * w[1] * groups * prod(kernel) * prod(u[2:]) * width
        depthwise = groups > 1 and groups == x[1]
        self.few = x[1] < 4  # these are read as they lie
        self.x_, self.u_ = (_blocked(s, width) for s in (x, u))
        self.w_ = self.w if self.few or depthwise else _up(w[0]) * _up(w[1]) * prod(kernel) * width
        self.wide = _up(w[0]) * _up(w[1]) * prod(kernel) * width
        self.twice = 3 if strided else 2  # a gradient that is brought into order by way of another one

    def forward(self) -> int:
        """The most at once, the result included."""
        if not self.library:
            return self.columns + self.u
        return max((0 if self.few else self.x_) + self.w_ + self.u_, self.u_ + self.u)

    def by_x(self) -> int:
        """Of the gradient by x, that included."""
        if not self.library:
            return self.x
        return max(self.u_ + self.wide + self.x_, self.x_ + (self.twice - 1) * self.x)

    def by_w(self) -> int:
        """Of the gradient by w, that included."""
        if not self.library:
            return self.w + self.columns
        return max(self.u_ + (0 if self.few else self.x_) + self.w_, self.w_ + self.w)


def _up(channels: int) -> int:
    return -(-channels // 16) * 16


def _blocked(shape: Shape, width: int) -> int:
    return shape[0] * _up(shape[1]) * prod(shape[2:]) * width


def _width(node: Node) -> int:
    return 8 if node.type.dtype == "f64" else 4


def _low(node: Node) -> bool:
    return node.type.dtype in ("bf16", "f16")


def _convolve(node: Node, threads: int) -> int:
    x, w = (i.type.shape for i in node.inputs[:2])
    found = _Convolution(x, w, node.type.shape, node.attrs, _width(node), threads)
    widened = sum(_size(i) for i in node.inputs) if _low(node) else 0
    return max(found.forward(), found.u + node.type.bytes if _low(node) else 0) + widened - node.type.bytes


def _convolve_transpose(node: Node, threads: int) -> int:
    """The gradient by x of the convolution that it turns around, and an x that only lends its shape."""
    u, w = (i.type.shape for i in node.inputs[:2])
    found = _Convolution(node.type.shape, w, u, node.attrs, _width(node), threads)
    widened = sum(_size(i) for i in node.inputs[:2]) if _low(node) else 0
    return found.x + max(found.by_x(), found.x + node.type.bytes if _low(node) else 0) + widened - node.type.bytes


def _convolve_weight(node: Node, threads: int) -> int:
    x, u = (i.type.shape for i in node.inputs[:2])
    found = _Convolution(x, node.type.shape, u, node.attrs, _width(node), threads)
    widened = sum(_size(i) for i in node.inputs[:2]) if _low(node) else 0
    return found.w + found.by_w() + widened - node.type.bytes


def _both_gradients(step: Step, threads: int) -> int:
    u, x, w = (shape_of(value) for value in step.inputs)
    node: Any = step.outputs[1]
    found = _Convolution(x, w, u, node.attrs, _width(node), threads)
    return max(found.by_x(), found.x + found.by_w()) - found.x - found.w


_CALLS: dict[str, Callable[[Step, At, int], int]] = {
    "mm": _product,
    "addmm": _product,
    "matmul": lambda step, at, threads: _batched(step.inputs[0], step.inputs[1], at),
    "attend": _attend,
    "attend_grad": _attend_grad,
    "layer_norm_backward": _norm_grad,
    "max_pool": lambda step, at, threads: bytes_of(step.inputs[0]),  # its channels last
    "convolution_backward": lambda step, at, threads: _both_gradients(step, threads),
}

Rule = Callable[[Node, At, int], int]


def _low_product(node: Node, at: At, threads: int) -> int:
    """A product of bf16 or f16: its operands and itself in f32."""
    a, b = node.inputs[:2]
    wide = _size(node)
    return max(_size(a) + _size(b) + _batched(a, b, at, 4) + wide - node.type.bytes, wide)


def _matmul(node: Node, at: At, threads: int) -> int:
    return _low_product(node, at, threads) if node.type.dtype in ("bf16", "f16") else _batched(node.inputs[0], node.inputs[1], at)


def _low_attend(node: Node, at: At, threads: int) -> int:
    """Attention of bf16 or f16: everything in f32, then its result once more."""
    q, k, v = node.inputs[:3]
    if node.type.dtype not in ("bf16", "f16"):
        return _flash(q, k, threads)
    return _size(q) + _size(k) + _size(v) + _size(node) + max(0, _flash(q, k, threads) - node.type.bytes)


def _normalized(node: Node, at: At, threads: int) -> int:
    """torch's own kernels take nothing but a result that is not wanted; where they do not go, a few tensors of the operand's size."""
    x, axes = node.inputs[0].type, node.attrs["axis"]
    last = node.attrs["center"] and axes and axes == tuple(range(x.rank - len(axes), x.rank))
    if node.op == "normalize":
        return 0 if last or not node.attrs["center"] else x.bytes
    return x.bytes * (1 if last else 4 if node.attrs["center"] else 2)


def _logits(node: Node, at: At, threads: int) -> int:
    """The logits of a head and what is made of them."""
    x, weight = (i.type for i in node.inputs[:2])
    return 2 * (x.size // max(1, x.shape[-1])) * weight.shape[-1] * _width(node)


#: op whose definition makes tensors that it lets go -> how many of its result's size, and how many of its first operand's
_TEMPORARIES: dict[str, tuple[float, float]] = {
    "softmax-cross-entropy": (0, 1), "softplus": (1, 0), "is-finite": (0, 1.5), "logsumexp": (0, 1), "take-along": (2, 0), "sort-along": (0, 2), "argsort": (0, 2),
    "top-k": (0, 3), "top-k-indices": (0, 3), "max-pool": (2, 0), "attend-grad": (8, 0), "attend-grad-packed": (0, 9), "one-hot": (0.25, 0),
}  # fmt: skip

_REFERENCES: dict[str, Rule] = {
    "normalize": _normalized,
    "normalize-grad": _normalized,
    "linear-cross-entropy": _logits,
    "linear-cross-entropy-grad": _logits,
    "matmul": _matmul,
    "matmul-f32": lambda node, at, threads: _batched(node.inputs[0], node.inputs[1], at, 4) + (_size(node.inputs[0]) + _size(node.inputs[1]) if _low(node.inputs[0]) else 0),
    "matmul-bias": lambda node, at, threads: _low_product(node, at, threads) + _size(node) if _low(node) else _matmul(node, at, threads) + node.type.bytes,
    "attend": _low_attend,
    "convolve": lambda node, at, threads: _convolve(node, threads),
    "convolve-transpose": lambda node, at, threads: _convolve_transpose(node, threads),
    "convolve-weight-grad": lambda node, at, threads: _convolve_weight(node, threads),
}
