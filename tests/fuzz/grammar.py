"""Programs from a grammar: a net of random layers, ops and sizes, right more often than not. Same seed, same program."""

from __future__ import annotations

import random

HEAD = '(import "nn" "optim" "loss")\n'
UNARY = ["relu", "tanh", "exp", "abs", "neg", "gelu", "softmax", "sqrt", "sigmoid", "square", "log", "stop-gradient", "layer-norm"]
BINARY = ["+", "-", "*", "/", "max", "min", "power"]
REDUCE = ["sum", "mean", "reduce-max", "variance"]


class Writer:
    """Writes one program; `wild` is how often it takes a shape or kind that need not fit."""

    def __init__(self, rng: random.Random, wild: float = 0.1):
        self.rng, self.wild = rng, wild

    def number(self) -> str:
        return self.rng.choice(["1", "2", "0.5", "1/3", "-1", "0", "1e-3", "(+ 1 2)", "(* width 2)", "width"])

    def size(self) -> str:
        return self.rng.choice(["1", "2", "3", "4", "width", "(* 2 width)", "(/ width 2)", "(+ width 1)"])

    def expression(self, names: list[str], depth: int) -> str:
        pick = self.rng.random()
        if depth <= 0 or pick < 0.15:
            return self.rng.choice(names) if self.rng.random() > self.wild else self.number()
        x = self.expression(names, depth - 1)
        if pick < 0.4:
            return f"({self.rng.choice(UNARY)} {x})"
        if pick < 0.6:
            return f"({self.rng.choice(BINARY)} {x} {self.rng.choice([self.number(), self.expression(names, depth - 1)])})"
        if pick < 0.7:
            return f"(linear {x} {self.size()})"
        if pick < 0.76:
            return f"({self.rng.choice(REDUCE)} {x} :axis {self.rng.choice(['-1', '1', '0'])})"
        if pick < 0.82:
            return f"(let ((h {x})) (concat h {self.rng.choice(['h', '(relu h)', x])} :axis -1))"
        if pick < 0.87:
            return f"(where (> {x} {self.number()}) {x} {self.number()})"
        if pick < 0.91:
            last = self.rng.choice(["-1", self.size()])
            return f"(reshape {x} [(dim {x} 0) {last}])"
        if pick < 0.95:
            return f"(layer-{self.rng.randrange(3)} {x})"
        return self.rng.choice([f"(transpose {x})", f"(cast {x} i32)", f"(dropout {x} 0.1)", f'(tap "t" (mean {x}))', f"(grad (sum {x}) x)"])

    def program(self) -> str:
        rng = self.rng
        out = [HEAD, f"(defknob width {rng.choice([2, 3, 4, 8])})\n"]
        out.append('(defdata d (csv "d.csv" :fields ((x f32 [4]) (y f32))))\n')
        for i in range(3):
            body = self.expression(["x"], 2).replace(f"layer-{i}", "relu").replace("layer-0", "relu" if i == 0 else "layer-0")
            for later in range(i, 3):
                body = body.replace(f"(layer-{later} ", "(relu ")
            out.append(f"(deflayer layer-{i} (x) {body})\n")
        loss = rng.choice(["(mean {})", "(sum {})", "(list (sum {}) 4.0)", "(mean (* {0} {0}))", "{}"] if rng.random() < 0.3 else ["(mean (* y (sum {} :axis -1)))"])
        out.append(f"(defun f (x y) {loss.format(self.expression(['x', '(linear x width)'], 4))})\n")
        optimizer = rng.choice(["(adamw :lr 1e-3)", "(sgd :lr 0.1)", "(adam :lr width)", '(by-path ("**/bias" (sgd :lr 0.1)) (else (adamw)))'])
        extra = rng.choice(["", ":accumulate 2", ":precision bf16", ":ema 0.9", ':frozen ("**/bias")', ":clip-norm 1"])
        out.append(f"(defrun train :data (batches d :batch 4) :loss f :optimizer {optimizer} :steps {rng.choice(['3', 'width'])} {extra})\n")
        return "".join(out)


def program(seed: int) -> str:
    """The program of a seed."""
    return Writer(random.Random(seed)).program()
