"""Times of inference and of training by phase, as a table and as a document; no device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sexpgpu.diagnostics import printable
from sexpgpu.passes.phases import PHASES


@dataclass(frozen=True)
class Piece:
    """A launch, or an op on the CPU, that was timed once. bytes: read and written once each."""

    name: str
    path: str
    phase: str
    seconds: float
    bytes: int


@dataclass(frozen=True)
class Share:
    """A phase: seconds, pieces and bytes in all."""

    phase: str
    seconds: float
    count: int
    bytes: int


@dataclass(frozen=True)
class Kernel:
    """Pieces of one name, model path and phase."""

    name: str
    path: str
    phase: str
    calls: int
    seconds: float
    bytes_per_second: float


@dataclass(frozen=True)
class Part:
    """`inference` or `training`. seconds: of the whole as it runs; the pieces are timed one by one, and their sum is larger."""

    name: str
    seconds: float
    phases: tuple[Share, ...]
    kernels: tuple[Kernel, ...]


@dataclass(frozen=True)
class Phases:
    """settings: the FLASHCART_ variables that were set."""

    device: str
    settings: dict[str, str]
    parts: tuple[Part, ...]

    def document(self) -> dict[str, Any]:
        """The whole as JSON."""
        return asdict(self)


def part(name: str, seconds: float, pieces: Sequence[Piece]) -> Part:
    """The pieces by phase and by name, the longest first."""
    shares: list[Share] = []
    groups: dict[tuple[str, str, str], list[Piece]] = {}
    for phase in PHASES:
        own = [p for p in pieces if p.phase == phase]
        if own:
            shares.append(Share(phase, sum(p.seconds for p in own), len(own), sum(p.bytes for p in own)))
    for p in pieces:
        groups.setdefault((p.name, p.path, p.phase), []).append(p)
    kernels = []
    for (kernel, path, phase), own in groups.items():
        total = sum(p.seconds for p in own)
        kernels.append(Kernel(kernel, path, phase, len(own), total, sum(p.bytes for p in own) / total if total else 0.0))
    return Part(name, seconds, tuple(shares), tuple(sorted(kernels, key=lambda k: (-k.seconds, k.name, k.path, k.phase))))


def lines(found: Phases, most: int | None) -> list[str]:
    """The tables of a person; `most` kernels of each part."""
    out = [found.device + "".join(f"  {name}={printable(value)}" for name, value in found.settings.items())]
    for p in found.parts:
        total = sum(s.seconds for s in p.phases)
        out += ["", f"{p.name}: {p.seconds * 1e3:.3f} ms; its {sum(s.count for s in p.phases)} launches {total * 1e3:.3f} ms one by one"]
        out += _aligned([("phase", "share", "ms", "launches", "GB"), *(
            (s.phase, _share(s.seconds, total), f"{s.seconds * 1e3:.3f}", str(s.count), f"{s.bytes / 1e9:.3f}") for s in p.phases)])
        shown = p.kernels[:most]
        out += ["", *_aligned([("launch", "share", "ms", "calls", "GB/s", "phase", "path"), *(
            (k.name, _share(k.seconds, total), f"{k.seconds * 1e3:.3f}", str(k.calls), f"{k.bytes_per_second / 1e9:,.0f}", k.phase, printable(k.path))
            for k in shown)])]
        rest = p.kernels[len(shown) :]
        out += [f"  and {len(rest)} more, {_share(sum(k.seconds for k in rest), total)}"] if rest else []
    return out


def _share(seconds: float, total: float) -> str:
    return f"{100 * seconds / total:.1f}%" if total else "0.0%"


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  " + "  ".join(c.rjust(w) if 0 < i < 5 else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))).rstrip() for row in rows]


def compared(documents: Sequence[dict[str, Any]]) -> list[str]:
    """Several profiles of one program under different settings: ms of each part and of its phases, over those of the first."""
    out: list[str] = []
    for number, first in enumerate(documents[0]["parts"]):
        names = [s["phase"] for s in first["phases"]]
        rows = [("settings", "ms", *names)]
        for document in documents:
            own = document["parts"][number]
            by = {s["phase"]: s["seconds"] for s in own["phases"]}
            words = " ".join(f"{k}={v}" for k, v in document["settings"].items()) or "defaults"
            base = {s["phase"]: s["seconds"] for s in first["phases"]}
            cells = [f"{by.get(n, 0.0) * 1e3:.3f} ({by.get(n, 0.0) / base[n]:.2f})" if base[n] else "0" for n in names]
            rows.append((words, f"{own['seconds'] * 1e3:.3f}", *cells))
        out += ["", f"{first['name']}:", *_aligned([tuple(map(printable, row)) for row in rows])]
    return out[1:]
