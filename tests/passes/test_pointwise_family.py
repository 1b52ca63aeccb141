"""Every op that is lowered pointwise is simplified as one, in whichever family it stands."""

import pytest

from sexpgpu.ir import postorder
from sexpgpu.ops import build, constant, table
from sexpgpu.passes.simplify import simplify

TWO = [op.name for op in table().values() if op.lowering.kind == "pointwise" and len(op.operands) == 2 and not op.operands[-1].endswith("*")]


@pytest.mark.parametrize("name", TWO)
def test_a_broadcast_operand_is_not_spread(name: str) -> None:
    dtype = "bool" if name.startswith("logical-") else "f32"
    x = build("input", name="x", shape=(3, 4), dtype=dtype, batch=False)
    spread = build("broadcast", constant(True if dtype == "bool" else 0.5, dtype), shape=(3, 4), batch=False)
    found = simplify({"y": build(name, x, spread)})["y"]
    assert found.type == build(name, x, spread).type and not any(n.op == "broadcast" for n in postorder([found]))
    assert "atan2" in TWO and "hypot" in TWO
