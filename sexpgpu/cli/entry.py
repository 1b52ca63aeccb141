"""Where the process of a command begins: what stands before anything large is imported."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import NoReturn

from sexpgpu.cli import bytecode
from sexpgpu.run import collector


def main() -> NoReturn:
    """The entry point."""
    try:
        prepare()
        import_module("sexpgpu.cli.main").main()
    except KeyboardInterrupt:  # during imports: nobody else answers it yet
        sys.exit(130)
    raise AssertionError("the command ends the process")


def prepare() -> None:
    """What decides how long imports take."""
    collector.begin()
    bytecode.keep(os.environ)
