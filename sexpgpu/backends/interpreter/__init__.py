"""The reference backend: runs each op of the IR through torch on the CPU (architecture.md, "The interpreter")."""

from sexpgpu.backends.interpreter.dtypes import NUMPY, TORCH, from_numpy, to_tensor
from sexpgpu.backends.interpreter.executable import Executable, compile_graph
from sexpgpu.backends.interpreter.threads import choose_threads, graph_flops

__all__ = ["NUMPY", "TORCH", "Executable", "choose_threads", "compile_graph", "from_numpy", "graph_flops", "to_tensor"]
