"""cuBLASLt as its header describes it, on the CPU: column-major matrices, epilogues, and a list of algorithms."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from sexpgpu.backends.cuda import cublaslt

TORCH = {number: dtype for dtype, number in cublaslt.TYPES.items()}


class Function:
    """A function that ctypes would give: it takes `argtypes`."""

    def __init__(self, work: Any):
        self.work, self.argtypes, self.restype = work, (), None

    def __call__(self, *arguments: Any) -> Any:
        return self.work(*arguments)


class Vendor:
    """The loaded file. `algorithms`: how many it proposes; `refuses`: functions that fail, with their status."""

    def __init__(self, algorithms: int = 3, refuses: dict[str, int] | None = None):
        self.algorithms, self.refuses = algorithms, refuses or {}
        self.made: dict[int, dict[Any, Any]] = {}
        self.calls: list[str] = []
        for name in dir(self):
            if name.startswith("_cublas"):
                setattr(self, name[1:], Function(self._counted(name[1:], getattr(self, name))))
        for kind in ("MatmulDesc", "MatrixLayout", "MatmulPreference"):
            setattr(self, f"cublasLt{kind}Create", Function(self._counted(f"cublasLt{kind}Create", self._create)))
            setattr(self, f"cublasLt{kind}Destroy", Function(self._destroy))
            setattr(self, f"cublasLt{kind}SetAttribute", Function(self._counted(f"cublasLt{kind}SetAttribute", self._set)))

    def _counted(self, name: str, work: Any) -> Any:
        def call(*arguments: Any) -> Any:
            self.calls.append(name)
            return self.refuses[name] if name in self.refuses else work(*arguments)

        return call

    def _create(self, out: Any, *arguments: Any) -> int:
        number = len(self.calls) + 1000
        out._obj.value = number
        self.made[number] = {"create": arguments}
        return 0

    def _destroy(self, made: Any) -> int:
        del self.made[made.value]
        return 0

    def _set(self, target: Any, attribute: int, value: Any, size: int) -> int:
        assert ctypes.sizeof(value._obj) == size
        self.made[target.value][attribute] = value._obj.value
        return 0

    def _cublasLtGetVersion(self) -> int:
        return 130100

    def _cublasLtCreate(self, out: Any) -> int:
        out._obj.value = 1
        return 0

    def _cublasLtMatmulDescGetAttribute(self, *arguments: Any) -> int:
        raise AssertionError("nothing asks for it")

    def _cublasLtMatmulAlgoGetHeuristic(self, handle: Any, description: Any, a: Any, b: Any, c: Any, d: Any, preference: Any, most: int, results: Any, count: Any) -> int:
        self.preference = dict(self.made[preference.value])
        for i in range(min(most, self.algorithms)):
            results[i].algorithm.data[0] = i + 1
            results[i].workspace, results[i].state = 16 * i, 0
        count._obj.value = min(most, self.algorithms)
        return 0

    def _cublasLtMatmulAlgoConfigGetAttribute(self, algorithm: Any, attribute: int, value: Any, size: int, written: Any) -> int:
        value._obj.value = algorithm._obj.data[0] if attribute == 0 else attribute
        return 0

    def _matrix(self, address: int, layout: Any) -> torch.Tensor:
        """[batch rows columns], column-major as it lies."""
        facts = self.made[layout.value]
        dtype, rows, columns, step = TORCH[facts["create"][0]], *facts["create"][1:]
        batch, apart = facts.get(cublaslt.BATCH_COUNT, 1), facts.get(cublaslt.BATCH_OFFSET, 0)
        return memory(address, dtype, (batch - 1) * apart + (columns - 1) * step + rows).as_strided((batch, rows, columns), (apart, 1, step))

    def _cublasLtMatmul(self, handle: Any, description: Any, alpha: Any, a: int, a_lies: Any, b: int, b_lies: Any, beta: Any, c: int, c_lies: Any,
                        d: int, d_lies: Any, algorithm: Any, workspace: int, size: int, stream: int) -> int:
        facts = self.made[description.value]
        left, right, old, out = self._matrix(a, a_lies), self._matrix(b, b_lies), self._matrix(c, c_lies), self._matrix(d, d_lies)
        left = left.mT if facts[cublaslt.TRANSA] else left
        right = right.mT if facts[cublaslt.TRANSB] else right
        found = left.float() @ right.float() * alpha._obj.value
        if beta._obj.value:
            found += beta._obj.value * old.float()
        epilogue = facts[cublaslt.EPILOGUE]
        rows, columns = found.shape[1:]
        row = lambda size: memory(facts[cublaslt.BIAS_POINTER], TORCH[facts[cublaslt.BIAS_TYPE]], size)  # noqa: E731
        aux = None
        if epilogue & 128:
            assert facts[cublaslt.AUX_LD] % 8 == 0 and facts[cublaslt.AUX_LD] >= rows
            aux = memory(facts[cublaslt.AUX_POINTER], out.dtype, (columns - 1) * facts[cublaslt.AUX_LD] + rows).as_strided((rows, columns), (1, facts[cublaslt.AUX_LD]))
        if epilogue & 4:
            found += row(rows).float()[:, None]
        if epilogue & 32:
            if aux is not None:
                aux.copy_(found[0])
            found = torch.nn.functional.gelu(found, approximate="tanh")
        if epilogue & 2:
            found = torch.where(found > 0, found, 0.0)  # NaN gives 0, as there
        if epilogue & 64:
            found = torch.ops.aten.gelu_backward(found, aux.float()[None], approximate="tanh")
            if epilogue & 16:
                row(rows).copy_(found[0].sum(1))
        if epilogue == 256:
            row(rows).copy_(left[0].float().sum(1))
        if epilogue == 512:
            row(columns).copy_(right[0].float().sum(0))
        out.copy_(found)
        return 0


def memory(address: int, dtype: torch.dtype, count: int) -> torch.Tensor:
    """A tensor over `count` elements at an address."""
    size = count * torch.empty((), dtype=dtype).element_size()
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=dtype)


class Library(cublaslt.Library):
    """The binding over `Vendor`."""

    def __init__(self, vendor: Vendor):
        self.vendor = vendor
        super().__init__("vendor")

    def _load(self, places: list[str]) -> Any:  # type: ignore[override]
        return self.vendor

    @property
    def handle(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(1)
