"""The reference backend: runs each op of the IR through torch on the CPU (architecture.md, "The interpreter")."""

from sexpgpu.backends.interpreter.dtypes import NUMPY, TORCH, from_numpy, to_tensor
from sexpgpu.backends.interpreter.executable import Executable, compile_graph

__all__ = ["NUMPY", "TORCH", "Executable", "compile_graph", "from_numpy", "to_tensor"]
