"""What a library computes on a device makes no tensor on the host and asks the host nothing: torch's `meta` device refuses both."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from op_cases_of_ops import CASES, Case, leaf, value

from sexpgpu.backends.cuda import library
from sexpgpu.backends.interpreter.dtypes import TORCH
from sexpgpu.ops import build
from sexpgpu.ops.random import DRAWS
from sexpgpu.passes.schedule.decompose import decompose
from sexpgpu.passes.schedule.fuse import Call, fuse

META = torch.device("meta")


def calls(case: Case) -> list[Call]:
    arrays = [value(s, k, i) for i, (s, k) in enumerate(case.operands)]
    node = build(case.op, *(leaf(i, np.asarray(a)) for i, a in enumerate(arrays)), **case.attrs)
    return [launch for launch in fuse(decompose({"y": node})).launches if isinstance(launch, Call)]


FOUND = [(case, call) for case in CASES if case.op not in DRAWS for call in calls(case)]


def test_there_are_calls_of_many_ops() -> None:
    assert len({call.node.op for _, call in FOUND}) >= 15


@pytest.mark.parametrize(("case", "call"), FOUND, ids=lambda x: str(x) if isinstance(x, Case) else x.node.op)
def test_a_call_stays_on_the_device(case: Case, call: Call) -> None:
    node = call.node
    operands = [torch.empty(o.shape, dtype=TORCH[o.base.type.dtype], device=META) for o in call.operands]
    kept = library.Library(True)
    if node.op in library.PUT or node.op in library.JOINT or node.op in ("rank-map", "scatter-onto"):  # their own kernels, or tests of their own
        return
    if node.op in library.OUT:
        out = torch.empty(node.type.shape, dtype=TORCH[node.type.dtype], device=META)
        library.OUT[node.op](node, *operands, out)
        return
    if node.op in kept.own:  # its own kernels, which meta does not have
        return
    found = library.call(node, operands, META, kept)
    assert found.device == META and found.dtype == TORCH[node.type.dtype]
    assert found.numel() == node.type.size
