"""The IR: types, interned nodes, graphs, text."""

from sexpgpu.ir.node import Graph, Node, Origin, Origins, intern, postorder, recording
from sexpgpu.ir.types import DTYPES, FLOATS, INTEGERS, TensorType

__all__ = ["DTYPES", "FLOATS", "INTEGERS", "Graph", "Node", "Origin", "Origins", "TensorType", "intern", "postorder", "recording"]
