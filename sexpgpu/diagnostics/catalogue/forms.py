"""Codes of the def-forms (E-EVAL-1xx) and of choosing a run (E-RUN-1xx). `eval.py` and `run.py` take them in. A code is never reused."""

from sexpgpu.diagnostics.core import Entry

EVAL: dict[str, Entry] = {
    "E-EVAL-101": Entry("unknown key", "A form or function got a `:key` it does not have.\n\nWrong: `(batches digits :batch-size 64)`\nRight: `(batches digits :batch 64)`\n\n`docs/lisp.md` lists the keys of every form."),
    "E-EVAL-102": Entry("missing key", "A form needs a key that is not there.\n\nWrong: `(defrun train :loss f)`\nRight: `(defrun train :data (batches d :batch 8) :loss f :optimizer (sgd :lr 0.1) :steps 10)`"),
    "E-EVAL-103": Entry("wrong kind of value", "The value of a key or argument is of another kind than the form can use.\n\nWrong: `:steps \"500\"`\nRight: `:steps 500`"),
    "E-EVAL-104": Entry("malformed form", "A form's parts are missing, too many, or in another order than it takes.\n\nWrong: `(defdata (csv \"d.csv\"))`\nRight: `(defdata d (csv \"d.csv\" :fields ((x f32))))`"),
    "E-EVAL-105": Entry("misplaced or repeated definition", "`defknob` stands at the top level of a file, and each source, run and evaluation has a name of its own.\n\nWrong: `(let () (defknob lr 1))`\nRight: `(defknob lr 1)`"),
    "E-EVAL-106": Entry("used outside of a trace", "Layers, parameters, states and taps exist only while a loss, a metric or an evaluation is traced: they belong to a model path.\n\nWrong: `(defvar w (param \"w\" [3] :init zeros))` at the top level\nRight: `(defun loss (x) (mean (* x (param \"w\" [3] :init zeros))))`"),
    "E-EVAL-107": Entry("unknown name", "A data source, part of a split, evaluation, format or state is named that does not exist.\n\nWrong: `(batches digit :batch 8)` where the source is `digits`\nRight: `(batches digits :batch 8)`"),
    "E-EVAL-108": Entry("path made twice", "Within one entry a path of the model stands for one layer call, one parameter or one state.\n\nWrong: two `(linear x 8 :name \"a\")`\nRight: `:name \"a\"` and `:name \"b\"`, or `:share true` on the second to use the same weights"),
    "E-EVAL-109": Entry("unknown field", "Fields of the data reach a loss or metric by the names of its parameters.\n\nWrong: `(defun loss (img label) …)` where the fields are `image` and `label`\nRight: `(defun loss (image label) …)`"),
    "E-EVAL-110": Entry("not a scalar loss", "A loss or metric returns a float scalar, a mean over its samples, or `(list sum count)`.\n\nWrong: `(defun loss (x) (* x x))`\nRight: `(defun loss (x) (mean (* x x)))`"),
    "E-EVAL-111": Entry("parameter the loss does not have", "The run's loss decides which parameters exist. A metric or evaluation that makes another one would measure weights nobody trains.\n\nWrong: a metric that calls `(linear x 3 :name \"other\")`\nRight: a metric that calls the model under the same names as the loss"),
    "E-EVAL-112": Entry("optimizer returns the wrong thing", "An optimizer returns the new parameter and the new value of each of its slots, in order and with unchanged shapes.\n\nWrong: `(defoptimizer o (param grad) :state ((m zeros)) (- param grad))`\nRight: `(defoptimizer o (param grad) :state ((m zeros)) (list (- param grad) m))`"),
    "E-EVAL-113": Entry("number does not fit the tensor", "A compile-time number takes the dtype of the tensor it meets; fractions do not fit integer tensors.\n\nWrong: `(* label 0.5)` for an i32 label\nRight: `(* (cast label f32) 0.5)`"),
    "E-EVAL-114": Entry("tensor expected", "An op got something that is no tensor.\n\nWrong: `(relu \"x\")`\nRight: `(relu x)`"),
    "E-EVAL-115": Entry("not in this version", "The language has this form or key, and this version of the compiler does not support it yet."),
}

RUN: dict[str, Entry] = {
    "E-RUN-101": Entry("several runs", "The file has several runs, and the command names none.\n\nWhy: runs share no weights, so there is no one to prefer.\n\nWrong: `sexpgpu run file.lisp`\nRight: `sexpgpu run file.lisp train`"),
    "E-RUN-102": Entry("unknown run", "The file has no run of this name.\n\nWhy: a misspelling, or a run of another file.\n\nWrong: `sexpgpu run file.lisp trian`\nRight: `sexpgpu run file.lisp train`"),
    "E-RUN-103": Entry("no run", "The file defines no run, so there is nothing to do.\n\nWhy: a file of definitions is meant to be imported.\n\nWrong: a file of layers alone\nRight: `(defrun train :data … :loss … :optimizer … :steps 100)`"),
    "E-RUN-104": Entry("batch does not divide", "A batch is cut into equal micro-batches.\n\nWhy: unequal parts would weigh samples unequally.\n\nWrong: `:accumulate 3` with `:batch 64`\nRight: `:accumulate 4`"),
}
