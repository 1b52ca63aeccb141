"""The pages of error codes, as `sexpgpu explain E-EVAL-041` prints them."""

from __future__ import annotations

import re

from sexpgpu.diagnostics import entry, fail, suggestion
from sexpgpu.diagnostics.core import CATALOGUE
from sexpgpu.diagnostics.core import codes as codes_of

#: family of a code -> the page that describes what it is about
SEE = {
    "READ": "docs/lisp.md", "EVAL": "docs/lisp.md", "SHAPE": "docs/ops.md", "KNOB": "docs/knobs.md", "ENV": "docs/environment.md",
    "DATA": "docs/data.md", "MEM": "docs/devices.md", "DEV": "docs/devices.md", "CKPT": "docs/checkpoints.md", "NET": "docs/data.md",
    "RUN": "docs/run.md",
}  # fmt: skip


def is_code(text: str) -> bool:
    """Whether a word is written as a code of an error or a warning."""
    return re.fullmatch(r"[EeWw]-[A-Za-z]+-[0-9]+", text) is not None


def codes() -> list[str]:
    """Every code of the catalogue."""
    return sorted(code for family in CATALOGUE for code in codes_of(family))


def page(code: str) -> str:
    """The page of a code."""
    found = entry(code)
    if found is None:
        fail(
            "E-ENV-007",
            f"there is no code {code}",
            help=(*suggestion(code, codes(), "codes"), "docs/errors.md lists all"),
        )
    return f"{code}: {found.title}\n\n{found.page.strip()}\n\nSee also: {SEE[code.split('-')[1]]}"
