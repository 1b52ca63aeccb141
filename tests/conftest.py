"""What every test stands on: a clean environment, and the repository's root."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OURS = ("SEXPGPU_", "FLASHCART_", "SYVAIN_", "AWS_")

# Before any test module imports torch: idle OpenMP threads must sleep, not spin, on small shared machines.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)

# A shell that runs the tests in the background (`.ci/run &` in a script) has Ctrl-C ignored, and whatever the tests start inherits that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables of the person who runs the tests decide nothing in them."""
    for name in list(os.environ):
        if name.startswith(OURS):
            monkeypatch.delenv(name)


@pytest.fixture
def root() -> Path:
    """The repository's root."""
    return ROOT
