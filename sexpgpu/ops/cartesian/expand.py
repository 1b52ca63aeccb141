"""Edge directions to direction tensors of ranks 0 … l: polynomials of the unit vector, whose derivatives are polynomials."""

from __future__ import annotations

from functools import cache
from typing import Any

from sexpgpu.ir import Node, TensorType
from sexpgpu.ops.cartesian.algebra import Exponents, Polynomial, derivative, expansion, monomials, width
from sexpgpu.ops.definition import Lowering, Op, OpProblem, Parameter, build
from sexpgpu.ops.helpers import Attrs, Types, is_int, mul, require_float, total, traffic

L_MAX = Parameter("l-max", "int", None, required=True)
AXES = ((1, 0, 0), (0, 1, 0), (0, 0, 1))


def _infer(name: str, types: Types, attrs: Attrs) -> TensorType:
    (vectors,) = types
    require_float(name, vectors)
    if not is_int(attrs["l-max"]) or attrs["l-max"] < 0:
        raise OpProblem("E-SHAPE-015", f"{name}: :l-max must be an integer of 0 or more, got {attrs['l-max']}")
    if vectors.rank < 1 or vectors.shape[-1] != 3:
        raise OpProblem("E-SHAPE-030", f"{name}: directions need a last axis of 3, got {vectors}")
    return TensorType(vectors.dtype, (*vectors.shape[:-1], width(attrs["l-max"])), vectors.batch and vectors.rank > 1)


def polynomials(l_max: int, by: Exponents) -> tuple[Polynomial, ...]:
    """Every component of ranks 0 … l_max, differentiated by the vector's coordinates so many times."""
    return tuple(derivative(p, by) for rank in range(l_max + 1) for p in expansion(rank))


@cache
def _plan(l_max: int, by: Exponents) -> tuple[tuple[tuple[list[int], list[int]], ...], list[list[float]]]:
    """How to build the monomials degree by degree, (parent, coordinate) each, and the coefficients over all of them."""
    wanted = polynomials(l_max, by)
    degree = max((sum(e) for p in wanted for e in p), default=0)
    places: dict[Exponents, int] = {(0, 0, 0): 0}
    order, levels = [(0, 0, 0)], []
    for d in range(1, degree + 1):
        parents, axes = [], []
        lower = {e: i for i, e in enumerate(monomials(d - 1))}
        for e in monomials(d):
            axis = next(i for i in range(3) if e[i])
            parents.append(lower[e[0] - (axis == 0), e[1] - (axis == 1), e[2] - (axis == 2)])
            axes.append(axis)
            places[e] = len(order)
            order.append(e)
        levels.append((parents, axes))
    coefficients = [[0.0] * len(wanted) for _ in order]
    for column, p in enumerate(wanted):
        for e, value in p.items():
            coefficients[places[e]][column] = float(value)
    return tuple(levels), coefficients


@cache
def _tensors(torch: Any, l_max: int, by: Exponents, dtype: Any, device: Any) -> tuple[Any, Any]:
    """On a named device: whoever asks first may stand in a context whose default is another, torch's `meta` for one."""
    levels, coefficients = _plan(l_max, by)
    return [(torch.tensor(p, device=device), torch.tensor(a, device=device)) for p, a in levels], torch.tensor(coefficients, dtype=dtype, device=device)


def _evaluate(torch: Any, node: Node, args: list[Any], by: Exponents) -> Any:
    """bf16 and f16 are computed in f32 and rounded once."""
    (vectors,) = args
    dtype = torch.float32 if node.type.dtype in ("bf16", "f16") else vectors.dtype
    levels, coefficients = _tensors(torch, node.attrs["l-max"], by, dtype, vectors.device)
    flat = vectors.to(dtype).reshape(-1, 3)
    block = torch.ones(len(flat), 1, dtype=dtype, device=vectors.device)
    blocks = [block]
    for parents, axes in levels:
        block = block[:, parents] * flat[:, axes]
        blocks.append(block)
    return torch.matmul(torch.cat(blocks, 1), coefficients).reshape(node.type.shape).to(vectors.dtype)


def _back(node: Node, ct: Node, by: Exponents) -> tuple[Node | None, ...]:
    """One sum over the components for each coordinate; the derivatives are ops of the same kind."""
    (vectors,) = node.inputs
    columns = []
    for axis in AXES:
        order = tuple(a + b for a, b in zip(by, axis, strict=True))
        d = build("cartesian-expand-derivative", vectors, by=order, **{"l-max": node.attrs["l-max"]})
        columns.append(total(mul(ct, d), (ct.type.rank - 1,), keep=True))
    return (build("concat", *columns, axis=-1),)


def _cost(node: Node) -> tuple[int, int]:
    by = node.attrs.get("by", (0, 0, 0))
    terms = sum(len(p) for p in polynomials(node.attrs["l-max"], by))
    return 2 * terms * (node.inputs[0].type.size // 3), traffic(node)


OPS = (
    Op(
        "cartesian-expand",
        "Unit vectors [… 3] as the irreducible Cartesian tensors of their direction, ranks 0 … :l-max one after another: "
        "[… (l-max+1)²]. Rank l is symmetric and traceless, and its contraction with a unit vector q is the Legendre "
        "polynomial P_l(n·q). Divide a vector by its length first.",
        ("directions",),
        lambda types, attrs: _infer("cartesian-expand", types, attrs),
        lambda torch, node, args: _evaluate(torch, node, args, (0, 0, 0)),
        _cost,
        Lowering("template", "cartesian-expand"),
        vjp=lambda node, ct: _back(node, ct, (0, 0, 0)),
        attributes=(L_MAX,),
        example="(cartesian-expand directions :l-max 2)",
    ),
    Op(
        "cartesian-expand-derivative",
        "cartesian-expand differentiated :by so many times by x, y and z.",
        ("directions",),
        lambda types, attrs: _infer("cartesian-expand", types, attrs),
        lambda torch, node, args: _evaluate(torch, node, args, node.attrs["by"]),
        _cost,
        Lowering("template", "cartesian-expand"),
        vjp=lambda node, ct: _back(node, ct, node.attrs["by"]),
        attributes=(L_MAX, Parameter("by", "shape", None, required=True)),
        lisp=False,
    ),
)
