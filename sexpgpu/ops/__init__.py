"""What each op means. `table()` finds a definition, `build` makes a node."""

from sexpgpu.ops.definition import Lowering, Op, OpProblem, Parameter, build, constant, table

__all__ = ["Lowering", "Op", "OpProblem", "Parameter", "build", "constant", "table"]
