"""What a file means, as plain frozen data. Knows neither Lisp nor torch; `run` and `cli` are handed it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from sexpgpu.source import Span


@dataclass(frozen=True)
class Knob:
    """A value a person may change. `source`: default, variant, set or override."""

    name: str
    value: Any
    source: str
    default: Any
    place: str
    doc: str = ""
    minimum: Any = None
    maximum: Any = None
    one_of: tuple[Any, ...] | None = None
    file_value: Any = None  # of an override: what the file states
    via: str = ""  # of an override: the flag or variable; of a variant: its name
    used: bool = False
    decides: tuple[str, ...] = ()  # places where it decided structure
    span: Span | None = None


@dataclass(frozen=True)
class Field:
    """One field of a source: a tensor a sample. `scale` multiplies after parsing; `pad` fills up shorter lists."""

    name: str
    dtype: str
    shape: tuple[int, ...] = ()
    scale: Fraction | float | int | None = None
    pad: int | float | None = None
    span: Span | None = None
    rows: int | None = None  # of a packed batch: the size of axis 0, which is not the samples


@dataclass(frozen=True)
class DataSource:
    """`(defdata name (format location …) :split …)`. `location` is as written; `folder` is what it is relative to."""

    name: str
    format: str
    location: str
    folder: str
    fields: tuple[Field, ...]
    options: dict[str, Any] = field(default_factory=dict)
    split: tuple[tuple[str, Fraction], ...] = ()
    span: Span | None = None
    location_span: Span | None = None

    @property
    def stream(self) -> bool:
        """Whether it is one long sequence of tokens, which `windows` cuts, and not rows of fields."""
        return not self.fields and not self.structures

    @property
    def structures(self) -> bool:
        """Whether its samples are atomic structures, which `graphs` packs."""
        return self.format == "extxyz"

    @property
    def scanned(self) -> bool:
        """Whether it is looked at before the program is traced, for its statistics."""
        return self.format in ("extxyz", "manifest")


#: field of a packed batch -> dtype, shape, and what its rows are
GRAPH_FIELDS: dict[str, tuple[str, tuple[int, ...], str]] = {
    "positions": ("f32", (3,), "atoms"),
    "species": ("i32", (), "atoms"),  # places in :elements
    "graph": ("i32", (), "atoms"),  # structure of each atom
    "atom-mask": ("f32", (), "atoms"),
    "senders": ("i32", (), "edges"),
    "receivers": ("i32", (), "edges"),  # ascending
    "offsets": ("f32", (3,), "edges"),  # of the sender's periodic image
    "edge-mask": ("f32", (), "edges"),
    "cell": ("f32", (3, 3), "structures"),
    "volume": ("f32", (), "structures"),  # 1 without a cell
    "atoms": ("f32", (), "structures"),  # how many, at least 1
    "graph-mask": ("f32", (), "structures"),
    "energy": ("f32", (), "structures"),
    "forces": ("f32", (3,), "atoms"),
    "stress": ("f32", (6,), "structures"),  # xx yy zz yz xz xy
}
NOMINAL = (32, 1024)  # atoms and edges of a structure, where no data was looked at


@dataclass(frozen=True)
class Batches:
    """`(batches source :split s :batch b :shuffle true :limit n)`: the samples of one step or evaluation batch.

    `(windows source :context c :stride n …)` has `context` and `stride` too; a window is a sample.
    """

    source: DataSource
    split: str | None
    batch: int
    shuffle: bool = False
    limit: int | None = None
    span: Span | None = None
    context: int | None = None
    stride: int | None = None
    buckets: int = 1
    parts: int = 1  # micro-batches of one batch; `graphs` packs each alone
    knobs: Mapping[str, frozenset[str]] = field(default_factory=dict, compare=False)  # key -> those that its value came from
    capacities: tuple[tuple[int, int, int], ...] = ()  # structures, atoms, edges of each size, from a scan, ascending

    @property
    def capacity(self) -> tuple[int, int, int]:
        """Structures, atoms and edges of the largest packed micro-batch. The last structure and atom are never real."""
        size = self.batch // self.parts
        return self.capacities[-1] if self.capacities else (size + 1, size * NOMINAL[0] + 1, size * NOMINAL[1])

    @property
    def fields(self) -> tuple[Field, ...]:
        """What a sample has: the source's fields, a window's tokens and the tokens one later, or a packed batch's parts."""
        if self.source.structures:
            rows = dict(zip(("structures", "atoms", "edges"), self.capacity, strict=True))
            labels = ("energy", "forces", "stress")
            return tuple(Field(name, dtype, shape, rows=rows[of]) for name, (dtype, shape, of) in GRAPH_FIELDS.items()
                         if name not in labels or name in self.source.options["required"])
        if self.context is None:
            return self.source.fields
        return (Field("tokens", "i32", (self.context,)), Field("targets", "i32", (self.context,)))

    @property
    def tokens(self) -> int | None:
        """Tokens of one batch of windows: the rate of a loss that counts none itself."""
        return None if self.context is None else self.batch * self.context


@dataclass(frozen=True)
class Metric:
    """A named entry; `function` is the evaluator's value, opaque here."""

    name: str
    function: Any
    span: Span | None = None


@dataclass(frozen=True)
class Eval:
    name: str
    data: Batches
    every: int
    metrics: tuple[Metric, ...]
    weights: str = "raw"
    span: Span | None = None


@dataclass(frozen=True)
class KeepBest:
    """`:keep-best (eval metric [max])`: the checkpoint of the least value, or the largest, is never removed."""

    eval: str
    metric: str
    largest: bool = False


@dataclass(frozen=True)
class Init:
    """`:init (from path :map ((new old) …))`. `path` is as written; `folder` is what it is relative to."""

    path: str
    folder: str
    renames: tuple[tuple[str, str], ...] = ()  # both name a tensor, or both end in `**`
    span: Span | None = None

    def old_name(self, name: str) -> str:
        """What the file calls the tensor of this outward name, by the first rule that fits."""
        for new, old in self.renames:
            if renames(new, name):
                return old if new == name else old[:-2] + name[len(new) - 2 :]
        return name


def renames(new: str, name: str) -> bool:
    """Whether a rule's left side takes the name, from its start: the name itself, or a prefix before `**`."""
    return new == name or (new.endswith("**") and len(name) > len(new) - 2 and name.startswith(new[:-2]))


@dataclass(frozen=True)
class Run:
    """One `defrun`, its settings final (flags applied; overrides are in `Experiment.knobs`)."""

    name: str
    data: Batches
    loss: Metric
    optimizer: Any
    steps: int
    seed: int
    precision: str = "f32"
    accumulate: int = 1
    clip_norm: float | None = None
    checkpoint_every: int | None = None
    keep: int = 3
    log_every: int = 10
    deterministic: bool = True
    deterministic_at: Span | None = None  # where the file states it to be true
    diagnostics: tuple[str, ...] = ()
    diagnostics_via: str = ""  # the flag or variable that gave the globs; else the file
    metrics: tuple[Metric, ...] = ()
    evals: tuple[Eval, ...] = ()
    ema: float | None = None  # decay of the averaged weights
    frozen: tuple[str, ...] = ()  # globs of parameters that are not trained
    keep_best: KeepBest | None = None
    init: Init | None = None  # weights to start from
    shard: bool = False  # optimizer state is divided over ranks
    remat: bool | tuple[str, ...] = False  # layers whose values the backward pass makes again: all outer ones, or of these names
    span: Span | None = None
    statistics: dict[str, Any] = field(default_factory=dict)  # source/name -> a number, or one an element, from a scan


@dataclass(frozen=True)
class SourceText:
    """A text of the program: the main file first, then imports. `name` is relative, with `/`."""

    name: str
    text: str


@dataclass(frozen=True)
class Experiment:
    file: str
    texts: tuple[SourceText, ...]
    knobs: dict[str, Knob]
    data: dict[str, DataSource]
    runs: dict[str, Run]
    evals: dict[str, Eval]
    variant: str | None = None
    warnings: tuple[Any, ...] = ()
