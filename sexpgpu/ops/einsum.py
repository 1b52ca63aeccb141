"""Sums of products by index letters. The gradient of an einsum is einsums, so it differentiates to any order."""

from __future__ import annotations

from math import prod
from typing import Any

from sexpgpu.ir import Node, TensorType
from sexpgpu.ops.definition import Lowering, Op, OpProblem, Parameter, build
from sexpgpu.ops.helpers import Attrs, Types, require_float, same_dtype, spread, traffic

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
Canonical = tuple[tuple[Node, ...], Attrs]


def _problem(words: str) -> OpProblem:
    return OpProblem("E-SHAPE-023", f"einsum: {words}", help='an equation is such as "bij,bjk->bik"')


def _parts(equation: str) -> tuple[list[str], str]:
    left, _, right = equation.partition("->")
    return left.split(","), right


def _spell(parts: list[str], names: dict[str, str]) -> list[str]:
    return ["".join(names.setdefault(c, LETTERS[len(names)]) for c in part) for part in parts]


def _canonical(inputs: tuple[Node, ...], attrs: Attrs) -> Canonical:
    """Explicit result, `...` as letters, letters a, b, c … in the order they appear."""
    equation = attrs["equation"].replace(" ", "")
    left, arrow, right = equation.partition("->")
    parts = left.split(",")
    if len(parts) != len(inputs):
        raise _problem(f"the equation has {len(parts)} operands, the call {len(inputs)}")
    wanted = [right] if arrow else []
    for part in (*parts, *wanted):
        if set(part.replace("...", "", 1)) - set(LETTERS):
            raise _problem(f"{part} is not letters with at most one ...")
    used = set(equation) - {".", ",", "-", ">"}
    spare = [c for c in LETTERS if c not in used]
    extra = [x.type.rank - len(p.replace("...", "")) for p, x in zip(parts, inputs, strict=True)]
    for part, more, x in zip(parts, extra, inputs, strict=True):
        if more < 0 or (more and "..." not in part):
            raise OpProblem("E-SHAPE-007", f"einsum: {part or 'no letters'} for a tensor of {x.type.rank} axes")
    most = max((m for p, m in zip(parts, extra, strict=True) if "..." in p), default=0)
    if len(used) + most > len(LETTERS):
        raise _problem("more axes than letters")
    dots = "".join(spare[:most])
    if not arrow:
        joined = "".join(parts).replace("...", "")
        once = "".join(sorted(c for c in used if joined.count(c) == 1))
        wanted = [("..." if most else "") + once]
    parts = [p.replace("...", dots[most - m :]) for p, m in zip(parts, extra, strict=True)]
    result = wanted[0].replace("...", dots)
    if len(set(result)) != len(result) or not set(result) <= set("".join(parts)):
        raise _problem(f"the result {wanted[0] or 'of no letters'} must name letters of the operands, each once")
    *parts, result = _spell([*parts, result], {})
    return inputs, {"equation": f"{','.join(parts)}->{result}"}


def _sizes(parts: list[str], types: Types) -> dict[str, int]:
    sizes: dict[str, tuple[int, int, int]] = {}
    for number, (part, t) in enumerate(zip(parts, types, strict=True)):
        for axis, letter in enumerate(part):
            size, *place = sizes.setdefault(letter, (t.shape[axis], number, axis))
            if size != t.shape[axis]:
                clash = ((place[0], place[1]), (number, axis))
                words = f"einsum: letter {letter} of {','.join(parts)} has sizes {size} and {t.shape[axis]}"
                raise OpProblem("E-SHAPE-001", words, clash)
    return {letter: size for letter, (size, *_) in sizes.items()}


def _infer(types: Types, attrs: Attrs) -> TensorType:
    dtype = same_dtype("einsum", types)
    require_float("einsum", *types)
    parts, result = _parts(attrs["equation"])
    sizes = _sizes(parts, types)
    mark = any(t.batch and p[:1] == result[:1] for p, t in zip(parts, types, strict=True) if p and result)
    return TensorType(dtype, tuple(sizes[c] for c in result), mark)


def _reference(torch: Any, node: Node, args: list[Any]) -> Any:
    """bf16 and f16 products are summed in f32 and rounded once."""
    if node.type.dtype in ("bf16", "f16"):
        return torch.einsum(node.attrs["equation"], *(x.float() for x in args)).to(args[0].dtype)
    return torch.einsum(node.attrs["equation"], *args)


def _eye(size: int, dtype: str) -> Node:
    return build("one-hot", build("iota", count=size), count=size, dtype=dtype)


def _vjp(node: Node, ct: Node) -> tuple[Node | None, ...]:
    return tuple(_by(node, ct, number) for number in range(len(node.inputs)))


def _by(node: Node, ct: Node, number: int) -> Node:
    """The others times ct; an axis that only this operand has is repeated, a letter twice in it is a diagonal."""
    parts, result = _parts(node.attrs["equation"])
    x, own = node.inputs[number], parts[number]
    terms = [(result, ct), *((p, i) for k, (p, i) in enumerate(zip(parts, node.inputs, strict=True)) if k != number)]
    spare = iter(c for c in LETTERS if c not in node.attrs["equation"])
    target = ""
    for letter, size in zip(own, x.type.shape, strict=True):
        fresh = next(spare) if letter in target else letter
        if fresh != letter:
            terms.append((letter + fresh, _eye(size, x.type.dtype)))
        target += fresh
    known = set("".join(p for p, _ in terms))
    found = "".join(c for c in target if c in known)
    g = build("einsum", *(i for _, i in terms), equation=f"{','.join(p for p, _ in terms)}->{found}")
    if found == target:
        return g
    shape = tuple(s if c in known else 1 for c, s in zip(target, x.type.shape, strict=True))
    return spread(build("reshape", g, shape=shape), x.type)


def _cost(node: Node) -> tuple[int, int]:
    parts, _ = _parts(node.attrs["equation"])
    sizes = _sizes(parts, tuple(i.type for i in node.inputs))
    return (max(1, len(parts)) * prod(sizes.values()), traffic(node))


OPS = (
    Op(
        "einsum",
        "The sum of products that :equation names: a letter an axis, letters that the result lacks are summed. A "
        "letter twice in one operand is its diagonal; ... stands for the leading axes; without -> the result has "
        "the letters that occur once, in alphabetical order.",
        ("xs*",),
        _infer,
        _reference,
        _cost,
        Lowering("external", "einsum"),
        vjp=_vjp,
        attributes=(Parameter("equation", "string", None, required=True),),
        example='(einsum x y :equation "ij,ij->i")',
        canonical=_canonical,
    ),
)
