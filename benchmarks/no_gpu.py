"""Kernels for an H200 compiled where there is none: Triton's own cache, filled without a device, hits on one that has the same Triton.

    install()            # before anything asks Triton for its driver; then what launches kernels compiles them and runs nothing

Triton's key of a kernel is over its own files and libtriton, the kernel's source and types, the options, and the version of ptxas: all
alike where the same wheel of Triton, for the same minor version of Python, is installed; and over those of its environment variables
that change code: TRITON_DEFAULT_FP_FUSION=1 on both, as our commands have it, and no other. `python no_gpu.py` prints the parts of the key: the lines are to be the same on both machines.
The cache is TRITON_CACHE_DIR. `python no_gpu.py FILE.txz PLACE [LIST]` packs it to be unpacked at PLACE, which is TRITON_CACHE_DIR there: the files hold
absolute paths. `LIBCUDA` names a folder with any libcuda.so.1 (an empty library will do) against which the
launchers in C are linked; without it they are compiled on the device, in 0.3 s each.
"""

from __future__ import annotations

import gc
import hashlib
import io
import json
import multiprocessing
import os
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial, wraps
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch
import triton
import triton.testing
from triton.backends.compiler import GPUTarget
from triton.backends.driver import GPUDriver
from triton.backends.nvidia import driver as nvidia
from triton.compiler import ASTSource
from triton.runtime.autotuner import Autotuner
from triton.runtime.errors import PTXASError

from sexpgpu.backends.interpreter.dtypes import TORCH

TARGET = GPUTarget("cuda", 90, 32)
KEPT = (".cubin", ".json", ".so", ".py")  # code and what describes it, launchers, and the caches of sources in the same folder
PROPERTIES = {"max_shared_mem": 232448, "max_num_regs": 65536, "multiprocessor_count": 132, "warpSize": 32, "sm_clock_rate": 1980000,
              "mem_clock_rate": 3201000, "mem_bus_width": 6144}  # fmt: skip


class _Utilities:
    """What loads a module and tells a device's properties, of no device."""

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        return 1, 1, 0, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        return PROPERTIES

    def __getattr__(self, name: str) -> Any:
        return lambda *_: 0


class _Launcher:
    """Compiles the launcher of a signature where there is something to link it against, and launches nothing."""

    def __init__(self, source: Any, metadata: Any):
        if os.environ.get("LIBCUDA"):
            with suppress(Exception):  # it is compiled at the first launch then
                nvidia.CudaLauncher(source, metadata)

    def __call__(self, *_: Any) -> None:
        pass


class Driver(GPUDriver):
    """A driver of one H200 that is not there."""

    def __init__(self) -> None:
        self.utils, self.launcher_cls = _Utilities(), _Launcher
        self.get_current_device = lambda: 0
        self.set_current_device = lambda device: None
        self.get_current_stream = lambda device: 0
        self.get_device_capability = lambda device: (9, 0)

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        return torch.cuda

    @staticmethod
    def is_active() -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return nvidia.ty_to_cpp(ty)

    def get_benchmarker(self) -> Callable[..., list[float]]:
        """Of a tuner: every candidate is compiled, and none is better."""
        return lambda call, quantiles: (call(), [1.0] * len(quantiles))[1]

    def get_empty_cache_for_benchmark(self) -> torch.Tensor:
        return torch.empty(0)

    def clear_cache(self, cache: torch.Tensor) -> None:
        pass


def install() -> None:
    """Triton's driver of this process is one of an H200 that is not there."""
    if os.environ.get("LIBCUDA"):
        triton.knobs.nvidia.libcuda_path = os.environ["LIBCUDA"]
        with suppress(Exception):  # kept in the cache, and of no use here
            nvidia.CudaUtils()
    triton.runtime.driver.set_active(Driver())


class Counted:
    """What Triton made since this stood: kernels found in its cache, and compiled, with their seconds. `KERNELS_LIST` names a file that gets a
    line for each, its folder in the cache: `pack` takes such a file."""

    def __init__(self) -> None:
        self.found, self.compiled, self.seconds = 0, 0, 0.0
        triton.knobs.compilation.listener = self._hear

    def _hear(self, *, times: Any, cache_hit: bool, metadata_group: dict[str, str], **_: Any) -> None:
        if os.environ.get("KERNELS_LIST") and metadata_group:
            with open(os.environ["KERNELS_LIST"], "a", encoding="utf-8") as file:
                file.write(Path(next(iter(metadata_group.values()))).parent.name + "\n")
        self.found += cache_hit
        self.compiled += not cache_hit
        self.seconds += 0.0 if cache_hit else times.total / 1e6

    def told(self) -> dict[str, float]:
        return {"found": self.found, "compiled": self.compiled, "compile_s": round(self.seconds, 2)}


def flashcart(times: int = 1) -> None:
    """flashcart takes its kernels for tensors of the CPU too, and those for so many times as many atoms."""
    available, torch.cuda.is_available = torch.cuda.is_available, lambda: True
    try:
        from flashcart.o3 import _irreps, _linear, _tensor_product  # noqa: F401
    finally:
        torch.cuda.is_available = available
    torch.Tensor.is_cuda = property(lambda self: True)
    torch.cuda.current_device = lambda: 0
    _linear._sm_count = lambda device: PROPERTIES["multiprocessor_count"]
    parts = _linear._wgrad_split_n
    if parts.__module__ == _linear.__name__:
        _linear._wgrad_split_n = lambda rows, *rest: parts(rows * times, *rest)


def bounds() -> list[Any]:
    """Where graphs for a GPU are kept as they are bound, from now on in this process: to tensors of the CPU, and never launched."""
    from sexpgpu.backends.cuda import executable, flight, program
    from sexpgpu.potential import device

    found: list[Any] = []

    class Recorded(executable.Bound):
        def __init__(self, compiled: Any, leaves: Any, into: Any, arena: Any, *rest: Any, **named: Any):
            arena = torch.empty(compiled.plan.size, dtype=torch.uint8) if arena is None else arena
            super().__init__(compiled, leaves, into, arena, *rest, **named)
            found.append(self)

    def compiled(results: Any, into: Any, place: str, *rest: Any) -> Any:
        made = executable.Compiled(results, into, "cuda", *rest)
        made.device = "cpu"
        return made

    program.Bound = device.Bound = Recorded
    program.Compiled = device.Compiled = compiled
    device.open_device, device.interpreted = lambda chosen: None, lambda: True
    flight.Replay.run = lambda self: None
    return found


def calls(bounds: Sequence[Any]) -> list[Callable[[], Any]]:
    """A call for each kernel of bound graphs: those that are emitted, those by hand, and of each launch of a tensor product."""
    from sexpgpu.backends.cuda import library, modules
    from sexpgpu.backends.cuda.cartesian.launch import runner
    from sexpgpu.backends.cuda.cartesian.plan import plan
    from sexpgpu.backends.cuda.cartesian.product import of_node

    found: list[Callable[[], Any]] = []
    products: dict[Any, None] = {}
    for bound in bounds:
        wanted = list(bound._wanted)
        bound_already = {id(function) for function, *_ in wanted}
        for emitted in bound.compiled.emitted.values():  # those that read what a library allocates are bound when they are launched
            function = modules.load(emitted.source, emitted.name)
            if id(function) not in bound_already:
                wanted.append((function, [_type(*argument) for argument in emitted.arguments], {"num_warps": emitted.warps}))
        for launch in bound.compiled.schedule.launches:
            node = getattr(launch, "node", None)
            if node is not None and node.op in library.AHEAD:
                wanted += library.AHEAD[node.op](node)
            if node is not None and node.op.startswith("tensor-product"):
                products[of_node(node)[0], node.op.endswith("parts")] = None
        found += [partial(function.warmup, *arguments, grid=(1,), **options) for function, arguments, options in wanted]
    run = runner(False, "NVIDIA H200")
    return [partial(_launched, run, product, launch, onto) for product, onto in products if run.takes(product) for launch in (plan(product, run.config) if onto else run.plan(product))] + found


def _type(what: str, *parts: Any) -> torch.dtype:
    """Of a tensor that an emitted kernel takes."""
    if what in ("key", "draw"):
        return torch.int64 if what == "key" else torch.int32
    dtype = "f32" if what == "parts" else parts[0].type.dtype
    if what == "partial":
        dtype = {"bool": "i32", "bf16": "f32", "f16": "f32"}.get(dtype, dtype)
    return torch.int8 if dtype == "bool" else TORCH[dtype]


def _launched(run: Any, product: Any, launch: Any, onto: bool = False) -> None:
    """One launch of a product, on a graph of few edges, or on a part of them."""
    from sexpgpu.backends.cuda.cartesian.launch import Edges
    from sexpgpu.backends.cuda.cartesian.sweep import PartOutputs

    nodes, many = 24, 600 if product.edges else 24
    ends = torch.arange(many) % nodes
    edges = Edges(ends, ends, nodes) if product.edges else None
    dtype, paths = TORCH[product.dtype], len(product.form.paths)

    def rows(slot: str) -> int:
        return 1 if slot == "weights" and product.shared else nodes if slot in ("a", "result") else many

    operands: list[Any] = []
    for number, slot in enumerate(product.slots):
        inner = product.factored(number)
        if inner:
            operands.append((run.packed_rows(torch.empty(many, inner, dtype=dtype)), run.packed_matrix(torch.empty(inner, paths * product.form.channels, dtype=dtype), paths)))
        else:
            operands.append(torch.empty(rows(slot), product.components(slot) * product.channels(slot), dtype=dtype))
    part = product.only([product.outputs[n] for n in launch.outputs])
    alone = type(launch)(launch.mode, tuple(range(len(launch.outputs))), launch.ranks, launch.firsts)
    run.tiles[part, alone] = run.tile(product, launch)
    if onto:
        piece = edges.parts(many)[0]
        PartOutputs(run, part, operands, piece, nodes, {}, {}).prepared(alone)()
    else:
        run.run(part, operands, edges, nodes, [alone])


@contextmanager
def candidate(number: int) -> Iterator[None]:
    """Tuners compile their candidate of this number alone, where they have so many, and choose none."""
    before = Autotuner.run

    def run(self: Autotuner, *args: Any, **given: Any) -> None:
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        configs = self.prune_configs(given)
        if number < len(configs):
            self.fn.run(*args, **given, **configs[number].all_kwargs())

    Autotuner.run = run
    try:
        yield
    finally:
        Autotuner.run = before


def key() -> dict[str, str]:
    """The parts of a kernel's key that belong to a machine and not to the kernel, as digests."""
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime.build import platform_key
    from triton.runtime.cache import triton_key

    backend = CUDABackend(TARGET)
    short = lambda text: hashlib.sha256(text.encode()).hexdigest()[:16]  # noqa: E731
    return {"triton": triton.__version__, "files": short(triton_key()), "ptxas": short(backend.hash()), "options": short(backend.parse_options({}).hash()),
            "environment": json.dumps(get_cache_invalidating_env_vars()), "launchers": platform_key(), "python": ".".join(map(str, sys.version_info[:2])),
            "cache": triton.knobs.cache.dir}  # fmt: skip


def narrow() -> None:
    """flashcart's tuners leave out programs wider than twice the channels, half of whose threads and more have nothing to do: a third of what they
    would compile. Of 64 channels those of 128, of 20 those of 64 and 128."""
    before = Autotuner.prune_configs
    if before.__name__ == "narrowed":
        return

    def narrowed(self: Autotuner, given: dict[str, Any]) -> list[Any]:
        channels = max(32, given.get("OUT_FEATURES", 1 << 30))
        found = before(self, given)
        return [c for c in found if c.kwargs.get("FEATURE_BLOCK", 0) < 2 * channels] or found

    Autotuner.prune_configs = narrowed


def tune_quickly(warmup: int, rep: int) -> None:
    """Triton's tuner measures each candidate for so many ms, and not for 25 and 100, in this process."""
    quick = lambda self: lambda call, quantiles: triton.testing.do_bench(call, quantiles=quantiles, warmup=warmup, rep=rep)  # noqa: E731
    Autotuner.do_bench = property(quick)


def settle() -> None:
    """Triton's tuners keep the candidates that they have chosen, alone: torch.compile would compile and measure all of them once more."""
    for tuner in [x for x in gc.get_objects() if issubclass(type(x), Autotuner)]:  # a proxy of what is gone has no other type
        if tuner.cache:
            tuner.configs = list({str(config): config for config in tuner.cache.values()}.values())


class Tuners:
    """Triton's tuners, from now on in this process: each candidate is measured for so many ms. `carried`: only candidates whose kernels are in Triton's
    cache, and of a tuner that has none there the first is compiled and taken unmeasured. Once `over()`, a candidate raises TimeoutError.

    `told`: how many were `measured`, and `left_out` as not carried.
    """

    def __init__(self, warmup: int, rep: int, carried: bool, over: Callable[[], bool]):
        tune_quickly(warmup, rep)
        self.told: Counter[str] = Counter()
        self._refuses = self._refused = False
        bench, make = Autotuner._bench, ASTSource.make_ir

        def measured(tuner: Autotuner, *args: Any, config: Any, **meta: Any) -> Any:
            if over():
                raise TimeoutError("a tuner of flashcart's had no time left")
            self._refuses, self._refused = carried, False
            try:
                found = bench(tuner, *args, config=config, **meta)
            finally:
                self._refuses = False
            self.told["left_out" if self._refused else "measured"] += 1
            return found

        @wraps(make)  # torch.compile looks at its signature
        def made(source: ASTSource, *args: Any, **given: Any) -> Any:
            """What Triton asks for where a kernel is not in its cache."""
            if self._refuses:
                self._refused = True
                raise PTXASError("not in the cache")  # which a tuner takes for a candidate that cannot run
            return make(source, *args, **given)

        Autotuner._bench, ASTSource.make_ir = measured, made


def _begin() -> None:
    torch.set_num_threads(1)
    install()


def spread(work: Callable[[Any], tuple[Any, dict[str, float], str]], tasks: Sequence[Any], processes: int, seconds: float) -> dict[str, Any]:
    """Tasks done in their order by processes that have no GPU; none is begun after so many seconds. `work` gives the task's name, what it compiled
    (`Counted.told`) and what went wrong; slow and failed ones are said on stderr. Returns what all took."""
    started, done, failed = time.perf_counter(), 0, 0
    total = {"found": 0.0, "compiled": 0.0, "compile_s": 0.0}
    free = multiprocessing.Semaphore(processes + 2)  # the pool takes tasks ahead, which would all begin before the time is over

    def within() -> Iterator[Any]:
        for task in tasks:
            free.acquire()
            if time.perf_counter() - started > seconds:
                return
            yield task

    with multiprocessing.get_context("spawn").Pool(processes, _begin) as pool:
        for name, told, problem in pool.imap_unordered(work, within()):
            free.release()
            done, failed = done + 1, failed + bool(problem)
            total = {key: round(total[key] + told[key], 1) for key in total}
            if problem or told["compile_s"] > 5:
                print(f"{time.perf_counter() - started:7.1f} s  {name}: {told['compiled']} kernels {told['compile_s']} s {problem}", file=sys.stderr, flush=True)
    return {"name": "compiled", "seconds": round(time.perf_counter() - started, 1), "tasks": len(tasks), "done": done, "failed": failed, **total}


def pack(file: Path, place: str, listed: Path | None = None) -> dict[str, Any]:
    """The cache as archives that are whole when unpacked at `place`: code and what describes it, with the paths that will hold there. FILE-1.txz and so
    on beside FILE.txz hold what is more than 15 MiB. listed: a file that names the kernels' folders (`Counted`); the others are left out."""
    folder, files, archive = Path(triton.knobs.cache.dir), [], None
    wanted = None if listed is None else set(listed.read_text().split())
    kernels = {path.parent.name for path in folder.glob("*/*.cubin")}
    left = set() if wanted is None else kernels - wanted
    for path in sorted(folder.glob("*/*")):
        if path.suffix not in KEPT or path.parent.name in left:
            continue
        if archive is None or files[-1].stat().st_size > 15 << 20:
            if archive is not None:
                archive.close()
            files.append(file.with_stem(f"{file.stem}-{len(files)}") if files else file)
            archive = tarfile.open(files[-1], "w:xz", preset=3)  # noqa: SIM115
        data = path.read_bytes()
        if path.name.startswith("__grp__"):  # Triton wants every file that it names
            members = [name for name in json.loads(data)["child_paths"] if name.endswith(KEPT)]
            data = json.dumps({"child_paths": {name: f"{place}/{path.parent.name}/{name}" for name in members}}).encode()
        entry = tarfile.TarInfo(str(path.relative_to(folder)))
        entry.size = len(data)
        archive.addfile(entry, io.BytesIO(data))
    if archive is not None:
        archive.close()
    return {"kernels": len(kernels - left), "missing": len((wanted or set()) - kernels), "shared objects": len(list(folder.glob("*/*.so"))),
            "mib": {f.name: round(f.stat().st_size / 2**20, 2) for f in files}}  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(key() | (pack(Path(sys.argv[1]), sys.argv[2], *map(Path, sys.argv[3:4])) if len(sys.argv) > 1 else {})))
