"""The stage dumps and diffs that tests/explain/test_stages.py compares; `python tests/explain/goldens.py` writes them anew."""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from pathlib import Path

from sexpgpu.backends.interpreter.report import programs
from sexpgpu.backends.interpreter.report import rows as call_rows
from sexpgpu.compiler import stages
from sexpgpu.experiment.load import Selection, choose_run
from sexpgpu.explain.lowering import last_of, lowered
from sexpgpu.explain.stages import GRAPHS, STAGES, Traced, after, changed, watched
from sexpgpu.ir import Origins, postorder
from sexpgpu.ir.text import graph_text

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent / "golden"
#: example -> the variant that is small enough to look at
EXAMPLES = {
    "digits": None, "conv_digits": None, "pinn": None, "vae": None, "own_optimizer": None, "char_lm": "tiny", "gpt2": "tiny", "potential": None,
}  # fmt: skip
WHOLE = {"digits"}  # examples whose graphs are kept as text; of the others, what they are made of and a hash
LAUNCHES = {"digits", "gpt2"}  # examples whose launches on `cuda` are counted: of the others tests/cuda says enough
DIFFS = (("forms", "expanded"), ("ir", "differentiated"), ("differentiated", "precision"), ("precision", "simplified"))


def traced(example: str) -> Traced:
    """The example's first run."""
    loaded = watched(str(ROOT / f"examples/{example}.lisp"), Selection(variant=EXAMPLES[example]))
    return Traced(loaded, choose_run(loaded.experiment, next(iter(loaded.experiment.runs))))


def dumps(example: str) -> dict[str, str]:
    """File name -> text: each stage, and the differences between neighbours."""
    t = traced(example)
    found = {f"{example}.{stage}.txt": summary(t, stage, example) for stage in STAGES if stage in ("forms", "expanded", *GRAPHS)}
    found |= lowered_dumps(t, example)
    for a, b in DIFFS:
        text = changed(t, a, b)
        if example not in WHOLE and a in GRAPHS:
            text = "\n".join(line for line in text.splitlines() if line.startswith(("---", "+++", "@@"))) + f"\nsha256 {digest(text)}"
        found[f"{example}.{a}-{b}.diff"] = text + "\n"
    return found


def lowered_dumps(t: Traced, example: str) -> dict[str, str]:
    """What the device runs: the interpreter's calls and their plan as text of the examples in `WHOLE`, else how many of each; and the
    launches of `cuda`, how many of each. The kernels' sources are compared with what they compute instead (tests/cuda)."""
    if example in WHOLE:
        found = {f"{example}.{stage}.txt": after(t, stage) + "\n" for stage in ("fused", "plan")}
    else:
        rows = [(graph, row) for graph, _, written in programs(stages(t.loaded, t.run)) for row in call_rows(written, Origins())]
        counts = Counter((graph, row.name, "fused" if row.why.startswith("fused") else row.where) for graph, row in rows)
        text = "\n".join(f"{graph}: {count} {name}, {how}" for (graph, name, how), count in sorted(counts.items()))
        found = {f"{example}.fused.txt": text + "\n"}
    if example not in LAUNCHES:
        return found
    launches = Counter((low.name, type(launch).__name__, last_of(launch).op) for low in lowered(stages(t.loaded, t.run, "cuda")) for launch in low.schedule.launches)
    found[f"{example}.launches.txt"] = "".join(f"{graph}: {count} {kind} {op}\n" for (graph, kind, op), count in sorted(launches.items()))
    return found


def summary(t: Traced, stage: str, example: str) -> str:
    """A stage's text without the places, which move with any line of the library."""
    if stage not in GRAPHS:
        return STAGES[stage](t)
    text = graph_text(t.graph(stage))
    if example in WHOLE:
        return text
    counts = Counter(node.op for node in postorder(t.graph(stage).values()))
    return "\n".join([*(f"{op} {n}" for op, n in sorted(counts.items())), f"sha256 {digest(text)}", ""])


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def main() -> None:
    HERE.mkdir(exist_ok=True)
    for example in EXAMPLES:
        for name, text in dumps(example).items():
            (HERE / name).write_text(text, "utf-8")


if __name__ == "__main__":
    sys.exit(main())
