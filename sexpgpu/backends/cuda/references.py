"""An op's reference, run where its operands lie."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sexpgpu.ir import Node
from sexpgpu.ops import table


def reference(node: Node, operands: Sequence[torch.Tensor], device: torch.device | None = None) -> torch.Tensor:
    """The op's value by its reference, whose own tensors are made on `device`, or that of the first operand; they name none themselves."""
    with torch.device(operands[0].device if device is None else device):
        found: torch.Tensor = table()[node.op].reference(torch, node, list(operands))
        return found
