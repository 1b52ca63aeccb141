"""Names the part that an op lacks: the newcomer's guide to adding one."""

import pytest
from op_cases import CASES

from sexpgpu.diagnostics.catalogue import shape
from sexpgpu.ops import table
from sexpgpu.ops.leaves import BOUND
from sexpgpu.ops.random import DRAWS

KINDS = {"pointwise", "reduction", "view", "contraction", "external", "template", "leaf"}
PARAMETER_KINDS = {"int", "float", "number", "bool", "axis", "axes", "shape", "dtype", "string", "triples", "parts"}
MARKERS = {"grad"}  # expanded before anything runs


@pytest.mark.parametrize("op", table().values(), ids=lambda op: op.name)
def test_op_has_all_its_parts(op):
    assert op.doc.strip(), f"{op.name} has no doc"
    assert op.lowering.kind in KINDS, f"{op.name} has no lowering"
    assert callable(op.infer) and callable(op.reference) and callable(op.cost), (
        f"{op.name} lacks infer, reference or cost"
    )
    assert (op.vjp is not None) == op.differentiable, f"{op.name}: give a vjp, or say differentiable=False"
    assert op.example or not op.lisp, f"{op.name} has no example"
    assert set(op.positional) <= {p.name for p in op.attributes}
    assert all(p.kind in PARAMETER_KINDS for p in op.attributes), f"{op.name}: a parameter of an unknown kind"
    assert op.lowering.kind != "pointwise" or op.lowering.expression, f"{op.name}: pointwise without an expression"


def test_every_op_has_a_case():
    missing = set(table()) - {c.op for c in CASES} - set(BOUND) - DRAWS - MARKERS
    assert not missing, f"tests/ops/op_cases.py has no case of {sorted(missing)}"


def test_every_code_an_op_raises_is_in_the_catalogue():
    import re
    from pathlib import Path

    import sexpgpu.ops

    used = set()
    for file in Path(sexpgpu.ops.__file__).parent.glob("*.py"):
        used |= set(re.findall(r"E-SHAPE-\d+", file.read_text()))
    assert used and not used - set(shape.CODES)
