"""Rows of a table by index."""

from __future__ import annotations

from typing import Any

from sexpgpu.ir import Node, TensorType
from sexpgpu.ops.definition import Lowering, Op, OpProblem, build
from sexpgpu.ops.helpers import Attrs, Types, per_element, require_float, require_indices


def _infer(types: Types, attrs: Attrs) -> TensorType:
    table, indices = types
    require_float("embed", table)
    require_indices("embed", indices)
    if table.rank < 1:
        raise OpProblem("E-SHAPE-007", "embed: the table needs 1 axis or more, got a scalar")
    return TensorType(table.dtype, (*indices.shape, *table.shape[1:]), indices.batch)


def _embed(torch: Any, node: Node, args: list[Any]) -> Any:
    table, indices = args
    if table.dim() == 2:
        return torch.nn.functional.embedding(indices, table)
    return torch.index_select(table, 0, indices.reshape(-1)).reshape(node.type.shape)


def _vjp(node: Node, ct: Node) -> tuple[Node | None, ...]:
    table, indices = node.inputs
    return (build("scatter-add", ct, indices, axis=0, count=table.type.shape[0], batch=table.type.batch), None)


OPS = (
    Op(
        "embed",
        "The rows of the table that the indices name: table [rows …], indices […] i32; result [… …]. A row that is "
        "named often gets the sum of the gradients, added in order.",
        ("table", "indices"),
        _infer,
        _embed,
        per_element(0),
        Lowering("view", "gather"),
        vjp=_vjp,
        example="(embed table tokens)",
    ),
)
