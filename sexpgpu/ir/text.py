"""The text form of a graph: prints, reads back as the same nodes, and has a stable hash.

    sexpgpu-ir 1
    %0 f32[*64 64] = input :batch true :dtype "f32" :name "image" :shape [64 64]
    %1 f32[64 10] = param …
    %2 f32[*64 10] = matmul %0 %1
    result "loss" %2

Lines that begin with `;` are comments: `document` puts knobs, overrides and the places of nodes there, outside the hash.
A node is numbered by its place in the postorder of the results, which are sorted by name: neither the order in which
nodes were made nor interning shows. Floats are printed in hexadecimal, so they are exact; `*` is the batch mark.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from hashlib import sha256
from math import inf, nan
from typing import Any

from sexpgpu.ir.node import Graph, Node, Origins, intern, postorder
from sexpgpu.ir.types import DTYPES, TensorType

HEADER = "sexpgpu-ir 1"


class TextProblem(ValueError):
    """A text that is no graph: the line and what is wrong with it."""


def _value(value: Any) -> str:
    if value is None:
        return "nil"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return value.hex() if value - value == 0 else f"#{value}"  # "#inf", "#-inf", "#nan"
    if isinstance(value, str):
        return json.dumps(value)
    assert isinstance(value, tuple), f"an attribute must be a number, string, bool or tuple, not {type(value).__name__}"
    return f"[{' '.join(map(_value, value))}]"


def graph_text(results: Graph | Mapping[str, Node]) -> str:
    """The text form, with a newline at its end."""
    named = results.results if isinstance(results, Graph) else results
    names = sorted(named)
    number: dict[Node, int] = {}
    lines = [HEADER]
    for node in postorder(named[name] for name in names):
        number[node] = len(number)
        parts = [f"%{number[node]} {node.type} = {node.op}"]
        parts += [f"%{number[i]}" for i in node.inputs]
        parts += [f":{key} {_value(node.attrs[key])}" for key in sorted(node.attrs)]
        lines.append(" ".join(parts))
    lines += [f"result {json.dumps(name)} %{number[named[name]]}" for name in names]
    return "\n".join(lines) + "\n"


def document(results: Mapping[str, Node], origins: Origins, notes: Iterable[str]) -> str:
    """The text form under a header of notes and of the place each node comes from; reads back as the same graph."""
    first, *graph = graph_text(results).splitlines()
    order = postorder(results[name] for name in sorted(results))
    places = [f"%{i} {spans[0].place}" for i, n in enumerate(order) if (spans := origins.of(n).spans)]
    return "\n".join([first, *(f"; {_ascii(line)}" for line in [*notes, *places]), *graph]) + "\n"


def _ascii(text: str) -> str:
    """One line of printable ASCII."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text).encode("ascii", "backslashreplace").decode()


def graph_hash(results: Graph | Mapping[str, Node]) -> str:
    """SHA-256 of the text form, in hexadecimal."""
    return sha256(graph_text(results).encode()).hexdigest()


_TYPE = re.compile(r"(\w+)\[(\*?)((?:\d+(?: \d+)*)?)\]")
_LINE = re.compile(r"%(\d+) (\w+\[[^\]]*\]) = (\S+)(.*)")
_RESULT = re.compile(r'result ("(?:[^"\\]|\\.)*") %(\d+)')
_TOKEN = re.compile(r' *(?:(%\d+)|:([^\s\[\]"]+)|("(?:[^"\\]|\\.)*")|([\[\]])|([^\s\[\]"]+))')


def _type(text: str) -> TensorType:
    found = _TYPE.fullmatch(text)
    if not found or found[1] not in DTYPES:
        raise TextProblem(f"no type: {text}")
    return TensorType(found[1], tuple(map(int, found[3].split())), bool(found[2]))


def _atom(text: str) -> Any:
    if text in ("nil", "true", "false"):
        return {"nil": None, "true": True, "false": False}[text]
    if text.startswith("#"):
        return {"#inf": inf, "#-inf": -inf, "#nan": nan}[text]
    return float.fromhex(text) if "x" in text else int(text)


def _operands(text: str) -> tuple[list[int], dict[str, Any]]:
    """The numbers of the operands and the attributes of one line; lists nest by a stack."""
    operands: list[int] = []
    attrs: dict[str, Any] = {}
    open_lists: list[list[Any]] = []
    key, at = "", 0
    while at < len(text):
        token = _TOKEN.match(text, at)
        if token is None:
            raise TextProblem(f"cannot read: {text[at:]}")
        at = token.end()
        if token[1]:
            operands.append(int(token[1][1:]))
            continue
        if token[2]:
            key = token[2]
            continue
        if token[4] == "[":
            open_lists.append([])
            continue
        value = tuple(open_lists.pop()) if token[4] == "]" else json.loads(token[3]) if token[3] else _atom(token[5])
        if open_lists:
            open_lists[-1].append(value)
        else:
            attrs[key] = value
    return operands, attrs


def read_graph(text: str) -> dict[str, Node]:
    """The results of a text form, as interned nodes of the printed types (`ops.verify` checks those)."""
    nodes: dict[int, Node] = {}
    results: dict[str, Node] = {}
    lines = text.splitlines()
    if not lines or lines[0] != HEADER:
        raise TextProblem(f"the first line must be {HEADER!r}")
    for count, line in enumerate(lines[1:], 2):
        try:
            if found := _RESULT.fullmatch(line):
                results[json.loads(found[1])] = nodes[int(found[2])]
            elif found := _LINE.fullmatch(line):
                operands, attrs = _operands(found[4])
                nodes[int(found[1])] = intern(found[3], [nodes[o] for o in operands], attrs, _type(found[2]))
            elif line.strip() and not line.startswith(";"):
                raise TextProblem("neither a node nor a result")
        except (KeyError, ValueError, IndexError, OverflowError) as error:
            raise TextProblem(f"line {count}: {error}") from None
    return results
