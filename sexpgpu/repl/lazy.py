"""What brings torch, or leads back here: imported when it is first used, so that a prompt appears at once."""

from __future__ import annotations

from importlib import import_module
from typing import Any

PARTS = {
    "perform": "sexpgpu.repl.commands:perform",
    "Running": "sexpgpu.repl.running:Running",
    "Values": "sexpgpu.repl.tensors:Values",
    "shown": "sexpgpu.repl.tensors:text",
}


def lazily(name: str) -> Any:
    """A part by its name in `PARTS`."""
    module, attribute = PARTS[name].split(":")
    return getattr(import_module(module), attribute)
