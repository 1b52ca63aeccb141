"""What must stand before torch is imported for a device, and the device itself. Imports neither torch nor Triton."""

from __future__ import annotations

import atexit
import ctypes
import os
import shutil
import stat
import tempfile
from collections.abc import MutableMapping
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import Any

from sexpgpu.cli import output
from sexpgpu.diagnostics import Diagnostic, fail, note_warning, printable

#: where a GPU is opened; brings torch
OPEN = "sexpgpu.backends.cuda.device:open_device"


def prepare(environ: MutableMapping[str, str], device: str, deterministic: bool = True) -> list[Diagnostic]:
    """Sets what `cuda` needs and is not set, beside what `threads.prepare` does; warnings. Call it with `os.environ` before the
    first import of torch."""
    if device != "cuda":
        return []
    if deterministic and not environ.get("CUBLAS_WORKSPACE_CONFIG"):
        environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    if not environ.get("TRITON_DEFAULT_FP_FUSION"):
        environ["TRITON_DEFAULT_FP_FUSION"] = "1"
    return cache(environ)


def cache(environ: MutableMapping[str, str]) -> list[Diagnostic]:
    """Names the folder of compiled kernels; a temporary one, with a warning, where none can be used."""
    given = environ.get("TRITON_CACHE_DIR")
    home = environ.get("XDG_CACHE_HOME") or os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".cache")
    folder = Path(given) if given else Path(home) / "sexpgpu" / "triton"
    trouble = unusable(folder)
    if not trouble:
        environ["TRITON_CACHE_DIR"] = str(folder)
        return []
    spare = tempfile.mkdtemp(prefix="sexpgpu-kernels-")
    atexit.register(shutil.rmtree, spare, ignore_errors=True)
    environ["TRITON_CACHE_DIR"] = spare
    return [
        note_warning(
            "E-DEV-007", f"the cache of compiled kernels, {printable(str(folder))}, is not used: {trouble}",
            notes=("kernels are compiled into a folder that goes when the run ends, so every start takes longer",),
            help="export XDG_CACHE_HOME=<a folder of your own>",
        )
    ]


def unusable(folder: Path) -> str:
    """Why the folder, made where it is missing, may not hold kernels: contracts.md, "Safety"; else an empty text."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        facts = folder.stat()
        if facts.st_uid != os.geteuid():
            return "it belongs to another user"
        if facts.st_mode & (stat.S_IWOTH | stat.S_IWGRP) and not facts.st_mode & stat.S_ISVTX:
            return "others may write into it"
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return error.strerror or type(error).__name__


#: the driver's library, whatever the version of CUDA
DRIVER = "libcuda.so.1"


def wake(settings: Any, ordinal: int | None = None) -> Thread | None:
    """Opens the GPU that the run will take on a thread of its own: the driver's start and its context take their time outside
    Python's lock, and so go on while the program is traced and torch imported. A GPU that cannot be opened is said by `open_device`.
    None where there is nothing to open."""
    if settings.device != "cuda" or os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        return None
    chosen = ordinal if ordinal is not None else settings.devices[0] if settings.devices else None
    thread = Thread(target=_wake, args=(chosen,), name="sexpgpu-wake")  # waited for at exit: nothing is to be ended inside a driver
    thread.start()
    return thread


def _wake(ordinal: int | None) -> None:
    count, handle, context = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
    try:
        driver = ctypes.CDLL(DRIVER)
        if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or (ordinal is None and count.value != 1):
            return
        if not driver.cuDeviceGet(ctypes.byref(handle), ordinal or 0):
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle)  # the one that torch takes; kept as it keeps it, to the end
    except (OSError, AttributeError):  # no driver
        return


def open_device(settings: Any, ordinal: int | None = None) -> Any:
    """The device that the settings ask for: None is the CPU. ordinal: of one rank's, among several. Raises E-DEV-…"""
    if settings.device != "cuda":
        return None
    module, name = OPEN.split(":")
    return getattr(import_module(module), name)(settings.devices if ordinal is None else (ordinal,))


def speaks(opened: Any) -> str:
    """What the ranks' collectives are made for: `cuda`, or `cpu`, also where kernels run on it."""
    return "cpu" if opened is None or opened.interpreted else "cuda"


def check_scatter(settings: Any, stated: Any) -> None:
    """Atomic sums on a GPU: refused where the file states that runs repeat (`stated`: the place), else said. E-DEV-009."""
    if settings.device != "cuda" or settings.flashcart_tp_scatter_kernel != "edge":
        return
    if stated is not None:
        fail("E-DEV-009", "FLASHCART_TP_SCATTER_KERNEL is `edge`, which adds in any order, and the file states :deterministic true", stated,
             help=("unset FLASHCART_TP_SCATTER_KERNEL: `csr` adds in a fixed order", "or leave :deterministic out"))
    output.say("not bit-exact: FLASHCART_TP_SCATTER_KERNEL=edge")


def begin(settings: Any, deterministic: bool, stated: Any = None, ordinal: int | None = None, waking: Thread | None = None) -> Any:
    """`prepare`, with its warnings said, and the device. After it torch is imported. stated: where the file says `:deterministic true`;
    ordinal: of one rank's device; waking: of `wake`."""
    check_scatter(settings, stated)
    output.report(prepare(os.environ, settings.device, deterministic))
    if waking is not None:
        import_module("torch")  # meanwhile
        waking.join()
    return open_device(settings, ordinal)
