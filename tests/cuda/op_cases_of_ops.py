"""The cases of tests/ops, for a folder that is not theirs."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ops"))

from op_cases import CASES, Case, leaf, value  # noqa: E402

__all__ = ["CASES", "Case", "leaf", "value"]
