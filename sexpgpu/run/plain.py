"""Values of knobs as JSON can say them, for metrics, status and manifests alike."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from sexpgpu.experiment.model import Knob


def plain(value: Any) -> Any:
    """Numbers, strings, booleans and lists as they are; a ratio as `a/b`, a symbol as its name."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Fraction):
        return f"{value.numerator}/{value.denominator}"
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(getattr(value, "name", value))


def plain_knobs(knobs: Mapping[str, Knob]) -> dict[str, dict[str, Any]]:
    """{name: {value, source, place}}; an override also says the file's value and the flag or variable."""
    out: dict[str, dict[str, Any]] = {}
    for name, knob in knobs.items():
        out[name] = {"value": plain(knob.value), "source": knob.source, "place": knob.place}
        if knob.source == "override":
            out[name] |= {"file_value": plain(knob.file_value), "via": knob.via}
    return out
