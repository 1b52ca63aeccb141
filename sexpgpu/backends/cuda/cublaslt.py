"""The vendor's matrix products with their epilogues: cuBLASLt through ctypes.

Tensors here are row-major, D[m n] = A[m k] · B[k n]; the library's matrices are column-major, so it is handed the transposed equation,
Dᵀ = Bᵀ · Aᵀ: its A is our B, its rows are our columns. Numbers of constants, attributes and sizes are those of cublasLt.h of CUDA 13.0
(tests hold them against the library itself, where it is installed).
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint16, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

WORKSPACE = 32 << 20  # bytes that an algorithm may ask for: what the vendor recommends on this generation

TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}  # cudaDataType
NAMES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
COMPUTE, COMPUTE_TF32 = 68, 77  # cublasComputeType_t: float sums; of f32 operands rounded to tf32
SCALE = 0  # CUDA_R_32F
OPERATION = {False: 0, True: 1}  # cublasOperation_t

# cublasLtMatmulDescAttributes_t
TRANSA, TRANSB, EPILOGUE, BIAS_POINTER, AUX_POINTER, AUX_LD, BIAS_TYPE = 3, 4, 7, 8, 11, 12, 26
# cublasLtMatrixLayoutAttribute_t
BATCH_COUNT, BATCH_OFFSET = 5, 6
# cublasLtMatmulPreferenceAttributes_t
MAX_WORKSPACE, REDUCTIONS, ALIGNMENTS = 1, 3, (5, 6, 7, 8)
# cublasLtReductionScheme_t: parts of a sum over k wait in the output (in its type, one after another), or in the workspace in f32 or in the
# type of the output. Each has a fixed order; those that round parts to fewer bits than f32 are left out.
IN_PLACE, IN_COMPUTE_TYPE, IN_OUTPUT_TYPE = 1, 2, 4
# cublasLtMatmulAlgoConfigAttributes_t, in the order of a configuration: id, tile, stages, splits of k, how they are added, swizzle,
# custom option, inner shape, cluster
CONFIGURATION: tuple[tuple[int, Any], ...] = (
    (0, c_int32), (1, c_uint32), (6, c_uint32), (2, c_int32), (3, c_uint32), (4, c_uint32), (5, c_uint32), (7, c_uint16), (8, c_uint16),
)  # fmt: skip

#: cublasLtEpilogue_t by our names. GELU is the tanh approximation. RELU gives 0 for NaN, so no lowering uses it.
EPILOGUES = {
    "": 1, "bias": 4, "relu": 2 | 4, "relu-mask": 2 | 128 | 4, "relu-grad-sum": 8 | 128 | 16,
    "gelu": 32 | 4, "gelu-kept": 32 | 128 | 4, "gelu-grad": 64 | 128, "gelu-grad-sum": 64 | 128 | 16, "sum-of-b": 256, "sum-of-a": 512,
}  # fmt: skip

STATUS = {1: "not initialized", 3: "out of memory", 7: "invalid value", 8: "wrong architecture", 11: "mapping error", 13: "execution failed", 14: "internal error", 15: "not supported"}


class Unavailable(Exception):
    """The library cannot be reached, or refused a call: the text says which and why."""


class Algorithm(ctypes.Structure):
    """cublasLtMatmulAlgo_t"""

    _fields_ = (("data", c_uint64 * 8),)


class Result(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t"""

    _fields_ = (("algorithm", Algorithm), ("workspace", c_size_t), ("state", c_int), ("waves", c_float), ("reserved", c_int * 4))


@dataclass(frozen=True)
class Candidate:
    """An algorithm for a product. `name`: its configuration as text, equal for equal algorithms in every process."""

    name: str
    algorithm: Algorithm
    workspace: int


@dataclass(frozen=True)
class Matrix:
    """A [batch rows columns] tensor as the library sees it. `turned`: columns lie apart by `step` elements instead of rows."""

    dtype: torch.dtype
    rows: int
    columns: int
    step: int
    turned: bool
    batch: int
    apart: int


def matrix(x: torch.Tensor) -> Matrix | None:
    """How a tensor of 2 or 3 axes lies, or None where the library cannot take it without a copy."""
    if x.dtype not in TYPES or x.dim() not in (2, 3) or not x.numel():
        return None
    batch, apart = (x.shape[0], x.stride(0)) if x.dim() == 3 else (1, 0)
    rows, columns = x.shape[-2:]
    across, along = x.stride(-2), x.stride(-1)
    if (along == 1 or columns == 1) and (rows == 1 or across >= columns):
        return Matrix(x.dtype, rows, columns, columns if rows == 1 else across, False, batch, apart)
    if (across == 1 or rows == 1) and (columns == 1 or along >= rows):
        return Matrix(x.dtype, rows, columns, rows if columns == 1 else along, True, batch, apart)
    return None


def _lying(x: torch.Tensor) -> Matrix:
    found = matrix(x)
    if found is None:
        raise Unavailable("a tensor that lies in no order of the library")
    return found


def paths() -> list[str]:
    """Where the library may be: the one that torch has loaded first."""
    name = f"libcublasLt.so.{(torch.version.cuda or '13').split('.')[0]}"
    found = [name]
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
        found += [line.split(None, 5)[5] for line in lines if "/libcublasLt.so" in line]
    except (OSError, IndexError):
        pass
    spec = find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        found += [str(path) for path in sorted(Path(folder).glob(f"*/lib/{name}"))]
    return list(dict.fromkeys(found))


class Library:
    """The loaded library: calls that raise `Unavailable` with the call's name where they fail."""

    def __init__(self, path: str | None = None):
        self.file = self._load([path] if path is not None else paths())
        for function, *arguments in (
            ("cublasLtCreate", c_void_p),
            ("cublasLtMatmulDescCreate", c_void_p, c_int, c_int),
            ("cublasLtMatmulDescDestroy", c_void_p),
            ("cublasLtMatmulDescSetAttribute", c_void_p, c_int, c_void_p, c_size_t),
            ("cublasLtMatmulDescGetAttribute", c_void_p, c_int, c_void_p, c_size_t, c_void_p),
            ("cublasLtMatrixLayoutCreate", c_void_p, c_int, c_uint64, c_uint64, c_int64),
            ("cublasLtMatrixLayoutDestroy", c_void_p),
            ("cublasLtMatrixLayoutSetAttribute", c_void_p, c_int, c_void_p, c_size_t),
            ("cublasLtMatmulPreferenceCreate", c_void_p),
            ("cublasLtMatmulPreferenceDestroy", c_void_p),
            ("cublasLtMatmulPreferenceSetAttribute", c_void_p, c_int, c_void_p, c_size_t),
            ("cublasLtMatmulAlgoGetHeuristic", *(c_void_p,) * 7, c_int, POINTER(Result), POINTER(c_int)),
            ("cublasLtMatmulAlgoConfigGetAttribute", c_void_p, c_int, c_void_p, c_size_t, c_void_p),
            ("cublasLtMatmul", *(c_void_p,) * 14, c_size_t, c_void_p),
        ):
            try:
                getattr(self.file, function).argtypes = arguments
                getattr(self.file, function).restype = c_int
            except AttributeError:
                raise Unavailable(f"{function} is not in the library") from None
        self.file.cublasLtGetVersion.argtypes = ()
        self.file.cublasLtGetVersion.restype = c_size_t
        self.version = int(self.file.cublasLtGetVersion())
        self._handles: dict[int, c_void_p] = {}

    @staticmethod
    def _load(places: list[str]) -> Any:
        why = "no path"
        for path in places:
            try:
                return ctypes.CDLL(path)
            except OSError as error:
                why = str(error)
        raise Unavailable(f"libcublasLt is not there: {why}")

    def call(self, function: str, *arguments: Any) -> None:
        code = getattr(self.file, function)(*arguments)
        if code:
            raise Unavailable(f"{function}: {STATUS.get(code, f'status {code}')}")

    @property
    def handle(self) -> c_void_p:
        """The handle of torch's current device."""
        device = torch.cuda.current_device()
        if device not in self._handles:
            made = c_void_p()
            self.call("cublasLtCreate", byref(made))
            self._handles[device] = made
        return self._handles[device]


@cache
def library() -> Library:
    """The library that torch uses; raises `Unavailable`."""
    return Library()


class Product:
    """One product on tensors that stay where they are: out = epilogue(a · b [+ c]), sums in f32.

    a [m k], b [k n], out [m n], or all with one more axis in front; a and b may be transposed views. c: added before the epilogue, of
    the type of `out`, which it may be. row: the bias [n], or where the epilogue sums, where its sums [n] (of-a: [m]) go. aux: [m n], what
    GELU was applied to: written by `gelu-kept`, read by `gelu-grad`. Raises `Unavailable` for tensors that the library cannot take.
    """

    def __init__(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, epilogue: str = "", row: torch.Tensor | None = None,
                 aux: torch.Tensor | None = None, c: torch.Tensor | None = None, tf32: bool = False, lt: Library | None = None):
        self.lt = library() if lt is None else lt
        self.operands, self.row, self.aux = (a, b, out if c is None else c, out), row, aux  # kept alive
        self.epilogue, self.tf32 = epilogue, tf32 and a.dtype == torch.float32
        self.a, self.b, self.c, self.d = (_lying(x) for x in (a, b, out if c is None else c, out))
        if self.c.turned or self.d.turned:
            raise Unavailable("a result whose columns lie apart")
        self._check()
        self._made: list[tuple[str, c_void_p]] = []
        self._one, self._zero = c_float(1.0), c_float(0.0)
        self.beta = self._zero if c is None else self._one
        self.onto = c is out  # whether a run adds to what is there
        self.description = self._new("cublasLtMatmulDesc", COMPUTE_TF32 if self.tf32 else COMPUTE, SCALE)
        self._describe(row, aux)
        self.layouts = [self._layout(m) for m in (self.b, self.a, self.c, self.d)]

    def _check(self) -> None:
        a, b, c, d = self.a, self.b, self.c, self.d
        if (a.rows, b.columns, a.columns) != (d.rows, d.columns, b.rows) or (c.rows, c.columns) != (d.rows, d.columns):
            raise Unavailable(f"shapes do not fit: {a}, {b}, {d}")
        if a.dtype != b.dtype or c.dtype != d.dtype or not a.batch == b.batch == c.batch == d.batch:
            raise Unavailable(f"types or batches do not fit: {a}, {b}, {d}")
        row, aux = self.row, self.aux
        wanted = d.rows if self.epilogue == "sum-of-a" else d.columns
        if row is not None and (row.dim() != 1 or row.shape[0] != wanted or not row.is_contiguous()):
            raise Unavailable("the row of an epilogue does not fit")
        if self.epilogue.startswith("gelu-"):
            lies = matrix(aux) if aux is not None else None
            if lies is None or lies.turned or (lies.dtype, lies.rows, lies.columns) != (d.dtype, d.rows, d.columns):
                raise Unavailable("what GELU was applied to does not fit")
            if lies.step % 8:
                raise Unavailable("the rows of what GELU was applied to must lie apart by a multiple of 8")
        if d.batch > 1 and self.epilogue:
            raise Unavailable("an epilogue of a batch")

    def _new(self, kind: str, *arguments: Any) -> c_void_p:
        made = c_void_p()
        self.lt.call(f"{kind}Create", byref(made), *arguments)
        self._made.append((kind, made))
        return made

    def _set(self, kind: str, target: c_void_p, attribute: int, value: Any) -> None:
        self.lt.call(f"{kind}SetAttribute", target, attribute, byref(value), ctypes.sizeof(value))

    def _describe(self, row: torch.Tensor | None, aux: torch.Tensor | None) -> None:
        kind, target = "cublasLtMatmulDesc", self.description
        self._set(kind, target, TRANSA, c_int32(OPERATION[self.b.turned]))
        self._set(kind, target, TRANSB, c_int32(OPERATION[self.a.turned]))
        self._set(kind, target, EPILOGUE, c_uint32(EPILOGUES[self.epilogue]))
        if row is not None:
            self._set(kind, target, BIAS_POINTER, c_void_p(row.data_ptr()))
            self._set(kind, target, BIAS_TYPE, c_int32(TYPES[row.dtype]))
        if aux is not None:
            self._set(kind, target, AUX_POINTER, c_void_p(aux.data_ptr()))
            bits = self.epilogue.startswith("relu")  # a mask of bits, whose rows are whole multiples of 128
            self._set(kind, target, AUX_LD, c_int64(8 * aux.stride(-2) if bits else aux.stride(-2)))

    def _layout(self, m: Matrix) -> c_void_p:
        rows, columns = (m.rows, m.columns) if m.turned else (m.columns, m.rows)
        made = self._new("cublasLtMatrixLayout", TYPES[m.dtype], rows, columns, m.step)
        if m.batch > 1:
            self._set("cublasLtMatrixLayout", made, BATCH_COUNT, c_int32(m.batch))
            self._set("cublasLtMatrixLayout", made, BATCH_OFFSET, c_int64(m.apart))
        return made

    def __del__(self) -> None:
        for kind, made in getattr(self, "_made", ()):
            getattr(self.lt.file, f"{kind}Destroy")(made)

    @property
    def key(self) -> str:
        """All that decides which algorithms there are, as text."""
        def lies(m: Matrix) -> str:
            return f"{NAMES[m.dtype]}{'t' if m.turned else ''}{m.step}" + (f"+{m.apart}" if m.batch > 1 else "")

        a, b, d = self.a, self.b, self.d
        sizes = f"{d.batch}x{d.rows}x{d.columns}x{a.columns}"
        row = self.row
        more = [self.epilogue] if self.epilogue else []
        more += [NAMES[row.dtype]] if row is not None else []
        more += ["added"] if self.beta is self._one else []
        more += ["tf32"] if self.tf32 else []
        return " ".join([sizes, lies(a), lies(b), lies(d), "/".join(str(n) for n in self.alignments), *more])

    @property
    def alignments(self) -> tuple[int, ...]:
        """Bytes to which the library's A, B, C and D are aligned, 256 at most."""
        a, b, c, out = self.operands
        return tuple(min(256, x.data_ptr() & -x.data_ptr() or 256) for x in (b, a, c, out))

    def candidates(self, most: int, workspace: int = WORKSPACE) -> list[Candidate]:
        """Algorithms that the library proposes, the likely fastest first; raises `Unavailable` where it has none."""
        preference = self._new("cublasLtMatmulPreference")
        kind = "cublasLtMatmulPreference"
        self._set(kind, preference, MAX_WORKSPACE, c_uint64(workspace))
        reductions = IN_PLACE | IN_COMPUTE_TYPE | IN_OUTPUT_TYPE if self.d.dtype == torch.float32 else IN_COMPUTE_TYPE
        self._set(kind, preference, REDUCTIONS, c_uint32(reductions))
        for attribute, bytes_ in zip(ALIGNMENTS, self.alignments, strict=True):
            self._set(kind, preference, attribute, c_uint32(bytes_))
        results, count = (Result * most)(), c_int()
        self.lt.call("cublasLtMatmulAlgoGetHeuristic", self.lt.handle, self.description, *self.layouts, preference, most, results, byref(count))
        found: dict[str, Candidate] = {}
        for result in results[: count.value]:
            if result.state == 0 and result.workspace <= workspace:
                algorithm = Algorithm.from_buffer_copy(result.algorithm)
                name = configuration(self.lt, algorithm)
                found.setdefault(name, Candidate(name, algorithm, int(result.workspace)))
        if not found:
            raise Unavailable(f"no algorithm for {self.key}")
        return list(found.values())

    def run(self, candidate: Candidate, workspace: torch.Tensor) -> None:
        """On torch's current stream; `workspace`: bytes on the device, at least what the candidate asks for."""
        a, b, c, out = self.operands
        self.lt.call(
            "cublasLtMatmul", self.lt.handle, self.description, byref(self._one), b.data_ptr(), self.layouts[0], a.data_ptr(), self.layouts[1],
            byref(self.beta), c.data_ptr(), self.layouts[2], out.data_ptr(), self.layouts[3],
            byref(candidate.algorithm), workspace.data_ptr(), workspace.numel(), torch.cuda.current_stream().cuda_stream,
        )


def configuration(lt: Library, algorithm: Algorithm) -> str:
    """The configuration of an algorithm: the numbers of `CONFIGURATION`, with points between."""
    found = []
    for attribute, kind in CONFIGURATION:
        value, written = kind(), c_size_t()
        lt.call("cublasLtMatmulAlgoConfigGetAttribute", byref(algorithm), attribute, byref(value), ctypes.sizeof(value), byref(written))
        found.append(str(value.value))
    return ".".join(found)
