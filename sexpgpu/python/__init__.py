"""Using an experiment from Python: `sexpgpu.load` gives its functions and layers as torch modules (docs/python.md)."""

from sexpgpu.python.load import load
from sexpgpu.python.module import Function, Model

__all__ = ["Function", "Model", "load"]
