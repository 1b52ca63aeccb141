"""The one answer to a host that is out of memory, whoever notices: E-MEM-001."""

from __future__ import annotations

from sexpgpu.diagnostics.core import SexpError, problem


def out_of_memory(error: BaseException, exit_code: int = 2) -> SexpError | None:
    """The coded mistake if the exception says that the host has no memory left, else None.

    torch's CPU allocator has no exception of its own: it is a RuntimeError that says so.
    """
    text = str(error) if isinstance(error, RuntimeError) else ""
    if not isinstance(error, MemoryError) and "allocate memory" not in text:
        return None
    return problem(
        "E-MEM-001",
        "the machine's memory is used up",
        help="make what is largest smaller: a smaller :batch, the same batch cut by :accumulate, or a narrower model",
        exit_code=exit_code,
    )
