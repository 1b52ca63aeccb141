"""Applies `:precision` to a traced, differentiated graph (language.md, "Precision")."""

from __future__ import annotations

from collections.abc import Mapping

from sexpgpu.ir import Node, Origins
from sexpgpu.ops import build
from sexpgpu.passes.rewrite import rewrite

PRECISIONS = ("f32", "tf32", "bf16", "f64")
CONTRACTIONS = frozenset({"matmul", "attend", "attend-grad", "einsum", "convolve", "convolve-transpose", "convolve-weight-grad"})

#: contractions whose first two operands alone are rounded
HEADS = frozenset({"linear-cross-entropy", "linear-cross-entropy-grad"})


def apply_precision(results: Mapping[str, Node], precision: str, origins: Origins | None = None) -> dict[str, Node]:
    """The graph in this precision. Assumes it is typed as traced, and runs once, after every gradient is expanded.

    f32 and tf32 leave it as it is (tf32 is a mode of the device's matrix units). bf16 casts operands and results of
    contractions; leaves, sums, norms and the optimizer stay f32. f64 retypes every f32: leaves, constants and casts
    included, so the caller's bindings are f64 tensors, and so are the results that were f32.
    """
    if precision == "bf16":
        return rewrite(results, _bf16, origins)
    if precision == "f64":
        return rewrite(results, _f64, origins)
    assert precision in PRECISIONS, precision
    return dict(results)


def _bf16(node: Node, inputs: tuple[Node, ...]) -> Node | None:
    if node.op in HEADS:
        low = [build("cast", x, dtype="bf16") if x.type.dtype == "f32" else x for x in inputs[:2]]
        new = build(node.op, *low, *inputs[2:], **node.attrs)
        return new if new.type.dtype == node.type.dtype else build("cast", new, dtype=node.type.dtype)
    if node.op not in CONTRACTIONS or node.type.dtype != "f32":
        return None
    low = (build("cast", x, dtype="bf16") if x.type.dtype == "f32" else x for x in inputs)
    return build("cast", build(node.op, *low, **node.attrs), dtype="f32")


def _f64(node: Node, inputs: tuple[Node, ...]) -> Node | None:
    if node.attrs.get("dtype") != "f32":
        return None
    return build(node.op, *inputs, **{**node.attrs, "dtype": "f64"})
