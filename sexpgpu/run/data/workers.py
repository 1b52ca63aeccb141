"""Workers that read and parse: a thread of ours each, which reads, with a process of its own, which parses.

Parsing holds Python's lock, so it is done by processes (docs/decisions says how they compare with threads); reading
waits, so it is done by threads, which also means that no child needs a key to a store. At most twice as many tasks as
workers are on the way: memory is bounded. Results come in the order of the tasks, whatever the workers do.
"""

from __future__ import annotations

import os
import queue
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sexpgpu.diagnostics import problem
from sexpgpu.run.children import python
from sexpgpu.run.data.child import call, receive, send
from sexpgpu.run.signals import Halted

STALL = 60.0  # seconds without a byte after which a read is given up
READERS = 3  # threads without workers: one parses while the others wait for a disk or a store
KEPT = ("PATH", "HOME", "LANG", "TMPDIR", "TZ", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "SYSTEMROOT")


@dataclass(eq=False)
class Progress:
    """When a reader last got something. `parsing`: reading is over, and no read can stall."""

    moved: float = field(default_factory=time.monotonic)
    parsing: bool = False

    def touch(self) -> None:
        self.moved = time.monotonic()


@dataclass(eq=False)
class Task:
    """`function(*arguments)` of child.call; `prepare`, where given, is called first by the thread, with a Progress,
    and gives the arguments. `what` names the task in messages; `scrap` is a file removed when it is done; what begins
    with `stage` is removed where it is not done."""

    function: str
    arguments: tuple[Any, ...] = ()
    prepare: Any = None
    what: str = "a piece of data"
    scrap: Path | None = None
    stage: Path | None = None
    progress: Progress = field(default_factory=Progress)
    result: Any = None
    error: BaseException | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def sweep(self) -> None:
        """What a process that was ended has left."""
        if self.scrap is not None:
            self.scrap.unlink(missing_ok=True)
        if self.stage is not None:
            for path in self.stage.parent.glob(f"{self.stage.name}*"):
                path.unlink(missing_ok=True)


def default_workers(work: int, each: int = 8 << 20) -> int:
    """Workers for `work` bytes: none below `each` (starting one costs more), at most one a CPU, at most 8."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(work // each, cpus, 8)


def run_all(tasks: Iterable[Task], workers: int, stall: float = STALL, ended: Callable[[], bool] = lambda: False) -> Iterator[Any]:
    """The tasks' results, in order. The first error ends it, and so does `ended` (Halted). 0 workers: READERS threads
    read, this process parses."""
    ahead = 2 * workers or READERS
    pool = _Pool(workers or READERS, inline=workers < 1)
    waiting: deque[Task] = deque()
    try:
        for task in tasks:
            waiting.append(task)
            pool.put(task)
            while len(waiting) >= ahead:
                yield _await(waiting[0], stall, ended)
                waiting.popleft()
        while waiting:
            yield _await(waiting[0], stall, ended)
            waiting.popleft()
    finally:
        pool.close()
        for task in waiting:
            task.sweep()


def _await(task: Task, stall: float, ended: Callable[[], bool]) -> Any:
    while not task.done.wait(0.2):
        if ended():
            raise Halted
        idle = time.monotonic() - task.progress.moved
        if not task.progress.parsing and idle > stall:
            raise problem("E-DATA-029", f"{task.what}: nothing was read for {idle:.0f} seconds",
                          help="see whether the disk or the store answers, then run again")
    if task.error is not None:
        raise task.error
    return task.result


class _Pool:
    def __init__(self, workers: int, inline: bool):
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._inline = inline
        self._children: list[subprocess.Popen[bytes]] = []
        self._closed = False
        self._parsing = threading.Lock()
        self._count = workers
        for _ in range(workers):  # daemons: one that hangs in a read does not keep the process
            threading.Thread(target=self._work, name="sexpgpu-data", daemon=True).start()

    def put(self, task: Task) -> None:
        task.progress.touch()
        self._tasks.put(task)

    def close(self) -> None:
        self._closed = True
        for _ in range(self._count):
            self._tasks.put(None)
        for child in self._children:
            child.kill()
        for child in self._children:  # what they were writing is about to be removed
            child.wait()

    def _work(self) -> None:
        child: subprocess.Popen[bytes] | None = None
        while (task := self._tasks.get()) is not None and not self._closed:
            try:
                task.progress.touch()
                if task.prepare is not None:
                    task.arguments = task.prepare(task.progress)
                task.progress.parsing = True
                if self._inline:
                    with self._parsing:  # two at a time would only take the lock of Python from each other
                        task.result = call(task.function, task.arguments)
                else:
                    child = child if child is not None else self._start()
                    task.result = _ask(child, task)
            except BaseException as error:
                task.error = error
            finally:
                if task.scrap is not None:
                    task.scrap.unlink(missing_ok=True)
            task.done.set()
        if child is not None:
            _end(child)

    def _start(self) -> subprocess.Popen[bytes]:
        child = subprocess.Popen(
            [*python(), "-m", "sexpgpu.run.data.child"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=child_environment())
        self._children.append(child)
        if self._closed:
            child.kill()
        return child


def _ask(child: subprocess.Popen[bytes], task: Task) -> Any:
    assert child.stdin is not None and child.stdout is not None
    try:
        send(child.stdin, (task.function, task.arguments))
        good, value = receive(child.stdout)
    except (EOFError, OSError):
        code = child.wait()
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        raise problem("E-DATA-018", f"{task.what}: the process that parsed it ended ({how})",
                      help="the machine's memory may be used up") from None
    if good:
        return value
    raise value


def _end(child: subprocess.Popen[bytes]) -> None:
    for stream in (child.stdin, child.stdout):
        if stream is not None:
            try:
                stream.close()
            except OSError:
                pass  # it was killed with something unsent
    try:
        child.wait(5)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def child_environment() -> dict[str, str]:
    """What a worker needs and no more: no key, token or endpoint of anything."""
    kept = {name: value for name, value in os.environ.items()
            if name in KEPT or name.startswith(("PYTHON", "LC_", "XDG_CACHE")) or name == "OMP_NUM_THREADS"}
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    kept["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [kept.get("PYTHONPATH")])])
    return kept
