"""The stage dumps and diffs that tests/explain/test_stages.py compares; `python tests/explain/goldens.py` writes them anew."""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from pathlib import Path

from sexpgpu.experiment.load import Selection, choose_run
from sexpgpu.explain.stages import GRAPHS, STAGES, Traced, changed, watched
from sexpgpu.ir import postorder
from sexpgpu.ir.text import graph_text

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent / "golden"
#: example -> the variant that is small enough to look at
EXAMPLES = {
    "digits": None, "conv_digits": None, "pinn": None, "vae": None, "own_optimizer": None, "char_lm": "tiny", "gpt2": "tiny", "potential": None,
}  # fmt: skip
WHOLE = {"digits"}  # examples whose graphs are kept as text; of the others, what they are made of and a hash
DIFFS = (("forms", "expanded"), ("ir", "differentiated"), ("differentiated", "precision"), ("precision", "simplified"))


def traced(example: str) -> Traced:
    """The example's first run."""
    loaded = watched(str(ROOT / f"examples/{example}.lisp"), Selection(variant=EXAMPLES[example]))
    return Traced(loaded, choose_run(loaded.experiment, next(iter(loaded.experiment.runs))))


def dumps(example: str) -> dict[str, str]:
    """File name -> text: each stage, and the differences between neighbours."""
    t = traced(example)
    found = {f"{example}.{stage}.txt": summary(t, stage, example) for stage in STAGES if stage in ("forms", "expanded", *GRAPHS)}
    for a, b in DIFFS:
        text = changed(t, a, b)
        if example not in WHOLE and a in GRAPHS:
            text = "\n".join(line for line in text.splitlines() if line.startswith(("---", "+++", "@@"))) + f"\nsha256 {digest(text)}"
        found[f"{example}.{a}-{b}.diff"] = text + "\n"
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
