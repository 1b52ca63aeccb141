"""Programs of a few lines over the library, run on the interpreter in float64 with the tensors a test gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from sexpgpu.compiler import Selection, load, program, stages

MODULES = ("nn", "rnn", "loss", "optim", "schedule", "init", "flashcart")
LIBRARY = Path(__file__).parents[2] / "lisp-stdlib"


def made(folder: Path, text: str, fields: str = "(x f32 [2])", rows: int = 2, loss: str = "f", optimizer: str = "(sgd :lr 1)",
         keys: str = ":precision f64", evals: str = "") -> Any:  # fmt: skip
    """The program of `text`, which defines the loss function."""
    imports = " ".join(f'"{m}"' for m in MODULES)
    whole = f"""(import {imports})
(defdata d (csv "d.csv" :fields ({fields})) :split ((train 1/2) (valid 1/2)))
{text}
(defrun train :data (batches d :split train :batch {rows}) :loss {loss} :optimizer {optimizer} :steps 1000 {keys})
{evals}"""
    path = folder / "p.lisp"
    path.write_text(whole, encoding="utf-8")
    found = load(str(path), Selection())
    result = program(stages(found, found.experiment.runs["train"]), "cpu", 1)
    result.initialise()
    return result


def batch(seed: int, rows: int, **shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    return {name: draw.normal(size=(rows, *shape)).astype(np.float32) for name, shape in shapes.items()}


def parameters(p: Any) -> dict[str, torch.Tensor]:
    return {
        name.removeprefix("param/"): value.clone() for name, value in p.state().items() if name.startswith("param/")
    }


def put(p: Any, values: dict[str, torch.Tensor]) -> None:
    """Replaces parameters and states by outward name."""
    state = p.state()
    for name, value in values.items():
        key = name if name in state else f"param/{name}"
        assert state[key].shape == value.shape, (key, state[key].shape, value.shape)
        state[key] = value.detach().clone().to(state[key].dtype)
    p.load(state, p.updates)


def double(rows: dict[str, np.ndarray], name: str) -> torch.Tensor:
    return torch.from_numpy(rows[name]).double()
