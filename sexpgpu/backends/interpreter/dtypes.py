"""The dtypes of the IR as torch's and NumPy's: the one table of both."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from sexpgpu.ir import TensorType
from sexpgpu.ops.leaves import TORCH_NAMES

TORCH: dict[str, torch.dtype] = {name: getattr(torch, theirs) for name, theirs in TORCH_NAMES.items()}

#: bf16 has no NumPy dtype: its arrays are float32
NUMPY: dict[str, Any] = {
    "f32": np.float32,
    "f64": np.float64,
    "bf16": np.float32,
    "f16": np.float16,
    "i32": np.int32,
    "i64": np.int64,
    "u8": np.uint8,
    "u16": np.uint16,
    "bool": np.bool_,
}


def from_numpy(array: np.ndarray, dtype: str) -> torch.Tensor:
    """The array as a tensor of this dtype; shares memory if it already has it and is writable."""
    array = np.ascontiguousarray(array, NUMPY[dtype]).reshape(np.shape(array))
    if not array.flags.writeable:
        array = array.copy()
    return torch.from_numpy(array).to(TORCH[dtype])


def to_tensor(value: Any, type: TensorType) -> torch.Tensor:  # noqa: A002
    """A number, array or tensor as a tensor of this type's dtype and shape."""
    tensor = value if isinstance(value, torch.Tensor) else from_numpy(np.asarray(value), type.dtype)
    return tensor.to(TORCH[type.dtype]).reshape(type.shape)
