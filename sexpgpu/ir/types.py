"""Types of the IR: dtype, static shape, batch mark. Nothing here knows torch."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

#: dtype -> bytes of one element
DTYPES = {"f32": 4, "f64": 8, "bf16": 2, "f16": 2, "i32": 4, "i64": 8, "u8": 1, "u16": 2, "bool": 1}
FLOATS = frozenset({"f32", "f64", "bf16", "f16"})
INTEGERS = frozenset({"i32", "i64", "u8", "u16"})


@dataclass(frozen=True, slots=True)
class TensorType:
    """dtype, shape, and whether axis 0 is the samples of the batch (language.md, "The batch")."""

    dtype: str
    shape: tuple[int, ...] = ()
    batch: bool = False

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def bytes(self) -> int:
        return self.size * DTYPES[self.dtype]

    @property
    def is_float(self) -> bool:
        return self.dtype in FLOATS

    @property
    def is_integer(self) -> bool:
        return self.dtype in INTEGERS

    def __str__(self) -> str:
        mark = "*" if self.batch else ""
        return f"{self.dtype}[{mark}{' '.join(map(str, self.shape))}]"
