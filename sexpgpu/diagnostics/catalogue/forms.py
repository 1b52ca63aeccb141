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
EVAL |= {
    "E-EVAL-130": Entry("nothing to share", "A call of a layer says `:share true`, and within this entry no earlier call made that path.\n\nWhy: `:share true` means the parameters of an earlier call; a first call makes them.\n\nWrong: `(linear x 8 :share true)`\nRight: `(linear x 8 :name \"a\")`, then `(linear y 8 :name \"a\" :share true)`"),
    "W-EVAL-001": Entry("unused parameter", "`sexpgpu check` warns: the body of a function or layer never mentions one of its parameters.\n\nWhy: often another name was meant. A name that begins with `_` says that it is on purpose.\n\nWrong: `(deflayer block (x width) (linear x 64))`\nRight: `(deflayer block (x width) (linear x width))`"),
    "W-EVAL-002": Entry("tensor that is not trained", "`sexpgpu check` warns: a parameter of the model is made, but the loss does not depend on it, so its gradient is 0 in every step.\n\nWhy: often the result of a layer is not used.\n\nWrong: `(let ((h (linear x 8))) (mean x))`\nRight: `(let ((h (linear x 8))) (mean h))`\n\nA tensor that should stay as it is belongs into `:frozen`, or is a `state`."),
    "W-EVAL-003": Entry("import hidden", "`sexpgpu check` warns: a definition of the file has the name of one that an import gives. The file's own wins in this file; the library goes on using its own.\n\nWhy: that may be wanted, but a reader who knows the library expects the other.\n\nWrong: `(import \"nn\") (deflayer linear (x) …)`\nRight: `(import \"nn\") (deflayer my-linear (x) …)`"),
}

RUN: dict[str, Entry] = {
    "E-RUN-101": Entry("several runs", "The file has several runs, and the command names none.\n\nWhy: runs share no weights, so there is no one to prefer.\n\nWrong: `sexpgpu run file.lisp`\nRight: `sexpgpu run file.lisp train`"),
    "E-RUN-102": Entry("unknown run", "The file has no run of this name.\n\nWhy: a misspelling, or a run of another file.\n\nWrong: `sexpgpu run file.lisp trian`\nRight: `sexpgpu run file.lisp train`"),
    "E-RUN-103": Entry("no run", "The file defines no run, so there is nothing to do.\n\nWhy: a file of definitions is meant to be imported.\n\nWrong: a file of layers alone\nRight: `(defrun train :data … :loss … :optimizer … :steps 100)`"),
    "E-RUN-104": Entry("batch does not divide", "A batch is cut into equal micro-batches.\n\nWhy: unequal parts would weigh samples unequally.\n\nWrong: `:accumulate 3` with `:batch 64`\nRight: `:accumulate 4`"),
    "W-RUN-001": Entry("tap out of reach", "`sexpgpu check` warns: only a metric or an evaluation makes the tap, and taps are recorded from a run's loss, so no glob can select it.\n\nWhy: metrics and evaluations give their own numbers.\n\nWrong: `(tap \"max\" (reduce-max p))` in the function of a metric\nRight: the tap in the model that the loss calls, or a metric `(max largest)`"),
    "W-RUN-002": Entry("glob without a tap", "A glob of `:diagnostics`, `--diagnostics` or SEXPGPU_DIAGNOSTICS matches no tap of the run's loss; the message lists the taps.\n\nWhy: a misspelling, or a layer of another name. `*` stands for one component, `**` for any number.\n\nWrong: `:diagnostics (\"atention/*\")`\nRight: `:diagnostics (\"attention/*\")`"),
    "W-RUN-003": Entry("evaluation that never runs", "`sexpgpu check` warns: no run has the evaluation in its `:evals`, or its `:every` is 0.\n\nWhy: a run with `:evals (a b)` runs exactly those.\n\nWrong: `(defeval test …)` with `:evals (valid)`\nRight: `:evals (valid test)`"),
}
