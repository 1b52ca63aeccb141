"""Wrong programs and command lines, at least five of each family of codes where so many of its conditions can be provoked.

A case is a name (`FAMILY-what`), a command line, and files that differ from `FILES`. `golden/<name>.txt` has what it prints.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

ROWS = "".join(f"{i % 7},{i % 5},{i % 3},{i % 4}\n" for i in range(20))
CSV = "x_0,x_1,x_2,label\n" + ROWS
HEAD = """(import "nn" "optim" "loss")
(defknob width 4 "units of the hidden layer" :min 1)
(defknob lr 1e-3 "learning rate")
(defvariant wide :width 8)
(defdata d (csv "d.csv" :fields ((x f32 [3]) (label i32))) :split ((train 4/5) (valid 1/5)))
"""
MODEL = """(deflayer model (x)
  (linear (relu (linear x width :name "in")) 5 :name "out"))
(defun f (x label)
  (cross-entropy (model x) label))
"""
RUN = """(defrun train
  :data (batches d :split train :batch 8)
  :loss f
  :optimizer (adamw :lr lr)
  :steps 3)
"""
GOOD = HEAD + MODEL + RUN
Before = Callable[[Path], None]


@dataclass(frozen=True)
class Case:
    """`program` is p.lisp; `files` go beside it; `before` prepares the folder; `environ` is set while it runs."""

    name: str
    program: str = GOOD
    words: tuple[str, ...] = ("explain", "p.lisp")
    files: dict[str, bytes | str] = field(default_factory=dict)
    environ: dict[str, str] = field(default_factory=dict)
    first: tuple[str, ...] = ()  # a command that must succeed before
    before: Before | None = None
    patches: dict[str, object] = field(default_factory=dict)  # dotted attribute -> what stands there: machines that are not here


def model(body: str, more: str = "") -> str:
    """A program whose layer `model` is `body` of x f32 [8 3]."""
    return HEAD + more + f"(deflayer model (x)\n  {body})\n(defun f (x label)\n  (cross-entropy (model x) label))\n" + RUN


def top(text: str) -> str:
    return GOOD + text + "\n"


def loss(body: str) -> str:
    return HEAD + MODEL.split("(defun")[0] + f"(defun f (x label)\n  {body})\n" + RUN


def run(old: str, new: str) -> str:
    assert old in GOOD, old
    return GOOD.replace(old, new)


def go(*words: str) -> tuple[str, ...]:
    return ("run", "p.lisp", *words)


def _cut(folder: Path) -> None:
    part = next((folder / "ck").glob("step-*/part-*"))
    part.write_bytes(part.read_bytes()[:-9])


def _flipped(folder: Path) -> None:
    part = next((folder / "ck").glob("step-*/part-*"))
    data = bytearray(part.read_bytes())
    data[-5] ^= 1
    part.write_bytes(bytes(data))


def _no_manifest(folder: Path) -> None:
    next((folder / "ck").glob("step-*/manifest.json")).unlink()


def _other_program(text: str) -> Before:
    return lambda folder: (folder / "p.lisp").write_text(text, "utf-8") and None


SAVED = go("--steps", "1", "--checkpoint-dir", "ck")
READ = [
    Case("READ-unclosed", HEAD + MODEL.replace('"out"))', '"out")') + RUN),
    Case("READ-unclosed-binding", HEAD + "(defun g (x)\n  (let ((a (+ x 1))\n    a))\n" + MODEL + RUN),
    Case("READ-stray", HEAD + MODEL.replace("label))\n", "label)))\n") + RUN),
    Case("READ-mismatch", model("(reshape x [8 3)]")),
    Case("READ-string", model('(linear x 5 :name "out)')),
    Case("READ-number", model("(linear x 5.0.1)")),
    Case("READ-escape", top('(defparameter path "C:\\data")')),
    Case("READ-quote", top("(defparameter kinds (list 'a '))")),
    Case("READ-several", top("(defparameter a 1.2.3)\n(defparameter b #t)\n(defparameter c 3d)")),
    Case("READ-latin", words=("explain", "q.lisp"), files={"q.lisp": b"; caf\xe9\n(+ 1 2)\n"}),
    Case("READ-missing", words=("explain", "no-such.lisp")),
]
EVAL = [
    Case("EVAL-name", model("(lienar x 5)")),
    Case("EVAL-import", GOOD.replace(' "loss"', "")),
    Case("EVAL-arguments", top("(defun twice (a) (* 2 a))\n(defparameter b (twice 1 2))")),
    Case("EVAL-keyword", model('(linear x 5 :nam "out")')),
    Case("EVAL-keyword-of-library", model('(layer-norm (linear x 5) :axis 4)')),
    Case("EVAL-names-together", model("(lienar (rellu x) widht)")),
    Case("EVAL-decision", model("(if (> x 0) (linear x 5) x)")),
    Case("EVAL-let", top("(defun g (x)\n  (let (y 1) (+ x y)))\n(defparameter b (g 1))")),
    Case("EVAL-field", HEAD + MODEL.replace("(x label)", "(x lable)").replace("label))", "lable))") + RUN),
    Case("EVAL-outside-of-a-trace", top('(defparameter w (param "w" [3] :init zeros))')),
    Case("EVAL-optimizer", run(":optimizer (adamw :lr lr)", ":optimizer (mine)") +
         "(defoptimizer mine (param grad) :state ((m zeros)) (- param grad))\n"),
    Case("EVAL-path-twice", model('(+ (linear x 5 :name "a") (linear x 5 :name "a"))')),
    Case("EVAL-outward-name", model('(+ (linear x 5 :name "linear") (linear x 5))')),
    Case("EVAL-macro", model("(residual x)", "(defmacro residual (x layer) `(+ ,x (,layer ,x)))\n")),
    Case("EVAL-macro-body", model("(pick x)", "(defmacro pick (x) (nth 3 (list x x)))\n")),
    Case("EVAL-macro-use", model("(residual x relux)", "(defmacro residual (x layer) `(+ ,x (,layer ,x)))\n")),
    Case("EVAL-source", run("batches d ", "batches digits ")),
    Case("EVAL-part", run(":split train", ":split trian")),
    Case("EVAL-key", run(":optimizer", ":optimiser")),
    Case("EVAL-missing-key", run("  :optimizer (adamw :lr lr)\n", "")),
    Case("EVAL-kind", run(":steps 3", ':steps "3"')),
    Case("EVAL-scalar", loss("(model x)")),
    Case("EVAL-budget", top("(defparameter many (range 100000000))")),
    Case("EVAL-recursion", top("(defun count (n) (+ 1 (count (+ n 1))))\n(defparameter c (count 0))")),
    Case("EVAL-several", run(":steps 3", ":steps -3") + "(defparameter a (lenght [1]))\n(defparameter b (+ a 1))\n(defparameter c (/ 1 0))\n"),
    Case("EVAL-eval", top("(defeval valid :data (batches d :split valid :batch 4) :every 1 :metrics ((loss ff)))")),
]
SHAPE = [
    Case("SHAPE-matmul", model('(matmul (linear x width :name "in") (param "w" [3 5] :init zeros))')),
    Case("SHAPE-broadcast", model('(+ (linear x 5) (param "b" [4] :init zeros))')),
    Case("SHAPE-axis", model("(softmax (linear x 5) :axis 2)")),
    Case("SHAPE-reshape", model("(reshape (linear x 5) [8 6])")),
    Case("SHAPE-fraction", model("(linear x (/ width 3))")),
    Case("SHAPE-dtype", loss("(mean (* (model x) label))")),
    Case("SHAPE-concat", model('(concat (linear x 5 :name "a") (transpose x) :axis -1)')),
    Case("SHAPE-labels", loss("(cross-entropy (model x) (cast label f32))")),
    Case("SHAPE-inside-layer", HEAD + """(deflayer attention (x)
  (transpose (reshape x [8 2 2]) [0 2]))
(deflayer model (x)
  (linear (attention (linear x 4 :name "in")) 5 :name "out"))
(defun f (x label)
  (cross-entropy (model x) label))
""" + RUN),
    Case("SHAPE-library", model('(rms-norm (mean x))')),
]
KNOB = [
    Case("KNOB-unknown", words=("explain", "p.lisp", "--set", "widht=8")),
    Case("KNOB-bounds", words=("explain", "p.lisp", "--set", "width=0")),
    Case("KNOB-kind", words=("explain", "p.lisp", "--set", "width=4.5")),
    Case("KNOB-twice", top("(defknob lr 3)")),
    Case("KNOB-variant", words=("explain", "p.lisp", "--variant", "wyde")),
    Case("KNOB-set", words=("explain", "p.lisp", "--set", "width")),
    Case("KNOB-set-twice", words=("explain", "p.lisp", "--set", "lr=1", "--set", "lr=2")),
    Case("KNOB-datum", words=("explain", "p.lisp", "--set", "width=[1")),
    Case("KNOB-reserved", top("(defknob run/steps 3)")),
    Case("KNOB-circle", top("(defvariant a :extends b)\n(defvariant b :extends a)"), ("explain", "p.lisp", "--variant", "a")),
    Case("KNOB-one-of", top('(defknob act "relu" :one-of ("relu" "tanh"))'), ("explain", "p.lisp", "--set", "act=gelu")),
    Case("KNOB-in-variant", top("(defvariant deep :withd 3)")),
]
ENV = [
    Case("ENV-option", words=go("--devise", "cpu")),
    Case("ENV-command", words=("rum", "p.lisp")),
    Case("ENV-argument", words=("run",)),
    Case("ENV-number", words=go("--steps", "1e3")),
    Case("ENV-variable", words=go(), environ={"SEXPGPU_EVAL_LIMIT": "many"}),
    Case("ENV-unknown-variable", words=("explain", "p.lisp"), environ={"SEXPGPU_DIAGNOSTIC": "x"}),
    Case("ENV-code", words=("explain", "E-SHAPE-999")),
    Case("ENV-device", words=go("--device", "gpu")),
    Case("ENV-devices-twice", words=go("--device", "cuda"), environ={"SEXPGPU_DEVICES": "0,0"}),
    Case("ENV-devices-words", words=go(), environ={"SEXPGPU_DEVICES": "all"}),
    Case("ENV-target", words=go("--metrics", "json:m.jsonl")),
    Case("ENV-needs", words=go("--resume", "latest")),
]
DATA = [
    Case("DATA-missing", run('"d.csv"', '"data.csv"'), go()),
    Case("DATA-column", words=go(), files={"d.csv": CSV.replace("x_2", "x_3")}),
    Case("DATA-word", words=go(), files={"d.csv": CSV.replace("\n3,", "\nthree,", 1)}),
    Case("DATA-ragged", words=go(), files={"d.csv": CSV.replace("\n3,3,0,3\n", "\n3,3,0\n", 1)}),
    Case("DATA-gzip", run('"d.csv"', '"d.csv.gz"'), go(), files={"d.csv.gz": gzip.compress(CSV.encode(), mtime=0)[:-9]}),
    Case("DATA-empty", words=go(), files={"d.csv": "x_0,x_1,x_2,label\n"}),
    Case("DATA-label", words=go(), files={"d.csv": CSV.replace("\n6,1,0,2\n", "\n6,1,0,5\n", 1)}),
    Case("DATA-range", words=go(), files={"d.csv": CSV.replace("\n6,1,0,2\n", "\n6,1,0,2.5\n", 1)}),
    Case("DATA-windows", run("batches d", "windows d :context 3"), go()),
    Case("DATA-json", run('(csv "d.csv"', '(jsonl "d.jsonl"'), go(), files={"d.jsonl": '{"x": [1, 2, 3], "label": 1}\n{"x": [1, 2], "label": 1}\n'}),
    Case("DATA-npy", run('(csv "d.csv"', '(npy "d.npz"'), go(), files={"d.npz": b"PK\x03\x04 not an archive"}),
]
CKPT = [
    Case("CKPT-none", words=go("--resume", "ck")),
    Case("CKPT-location", words=go("--resume", "ck"), first=SAVED),
    Case("CKPT-cut", words=go("--resume", "ck/step-1"), first=SAVED, before=_cut),
    Case("CKPT-flipped", words=go("--resume", "ck/step-1"), first=SAVED, before=_flipped),
    Case("CKPT-no-manifest", words=go("--resume", "ck/step-1"), first=SAVED, before=_no_manifest),
    Case("CKPT-other-run", words=go("--checkpoint-dir", "ck"), first=SAVED),
    Case("CKPT-shapes", words=go("--resume", "ck/step-1", "--set", "width=5"), first=SAVED),
    Case("CKPT-trajectory", words=go("--resume", "ck/step-1", "--set", "lr=1"), first=SAVED),
    Case("CKPT-eval", words=("eval", "p.lisp")),
    Case("CKPT-export", words=("export", "ck/step-1", "d.csv"), first=SAVED),
    Case("CKPT-predict", words=("predict", "p.lisp", "modle", "--resume", "ck/step-1", "--input", "d.csv", "--out", "y.npz"), first=SAVED),
]
S3 = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "SEXPGPU_AWS_REGION": "eu-west-1", "AWS_ENDPOINT_URL": "https://127.0.0.1:9"}
NET = [
    Case("NET-scheme", words=go("--checkpoint-dir", "ftp://host/runs")),
    Case("NET-keys", words=go("--checkpoint-dir", "s3://bucket/runs"), environ=S3 | {"SEXPGPU_AWS_REGION": "", "AWS_SECRET_ACCESS_KEY": ""}),
    Case("NET-endpoint", words=go("--checkpoint-dir", "s3://bucket/runs"), environ=S3 | {"AWS_ENDPOINT_URL": "127.0.0.1:9000"}),
    Case("NET-plain", words=go("--checkpoint-dir", "s3://bucket/runs"), environ=S3 | {"AWS_ENDPOINT_URL": "http://10.1.1.1"}),
    Case("NET-bucket", words=go("--checkpoint-dir", "s3:///runs"), environ=S3),
    Case("NET-metrics", words=go("--metrics", "syvain"), environ={"SYVAIN_METRICS_API_KEY": "k", "SYVAIN_METRICS_HOST": "http://127.0.0.1:9"}),
    Case("NET-push", words=("metrics", "push", "m.jsonl"), first=go("--metrics", "jsonl:m.jsonl")),
    Case("NET-data-scheme", run('"d.csv"', '"gs://bucket/d.csv"'), go()),
    Case("NET-resume-scheme", words=go("--resume", "http://host/runs/step-3")),
    Case("NET-init-scheme", run(":steps 3", ':steps 3\n  :init (from "ftp://host/w.safetensors")'), go()),
]
RUNS = [
    Case("RUN-several", GOOD + RUN.replace("train\n", "again\n"), go()),
    Case("RUN-unknown", words=("run", "p.lisp", "trian")),
    Case("RUN-none", HEAD + MODEL, go()),
    Case("RUN-accumulate", run(":steps 3", ":steps 3\n  :accumulate 3"), go()),
    Case("RUN-time", words=go("--max-time", "90")),
    Case("RUN-target-twice", words=go("--metrics", "jsonl:m.jsonl,jsonl:m.jsonl")),
    Case("RUN-target-file", words=go("--metrics", "jsonl:p.lisp")),
    Case("RUN-status", words=go("--status", "p.lisp/s.json")),
    Case("RUN-not-finite", loss("(mean (log (- 0 (square (model x)))))"), go()),
    Case("RUN-glob", HEAD + MODEL.replace("(linear (relu", '(tap "mean" (mean x))\n  (linear (relu') + RUN, ("explain", "p.lisp"),
         environ={"SEXPGPU_DIAGNOSTICS": "modle/*"}),
]
MEM = [
    Case("MEM-parameter", model('(matmul x (param "w" [3 4000000000000] :init zeros))').replace("(cross-entropy (model x) label)", "(mean (model x))"), go()),
    Case("MEM-batch", run(":batch 8", ":batch 400000000000000"), go()),
    Case("MEM-activation", loss("(+ (cross-entropy (model x) label) (mean (exp (broadcast (mean x) [10000000 10000000]))))"), go()),
    Case("MEM-state", model('(progn (state "cache" [4000000000000]) (linear x 5))'), go()),
    Case("MEM-width", words=go("--set", "width=4000000000000")),
]
def _raises(text: str) -> Callable[[], None]:
    def init() -> None:
        raise RuntimeError(text)

    return init


def gpus(count: int, **changed: object) -> dict[str, object]:
    """torch as on a machine with that many GPUs."""
    torch: dict[str, object] = {"__version__": "2.13.0", "version.cuda": "12.8", "cuda.init": lambda: None, "cuda.device_count": lambda: count,
                                "cuda.get_device_name": lambda i: "NVIDIA H200", **changed}
    return {f"torch.{name}": value for name, value in torch.items()} | {"sexpgpu.cli.device.cache": lambda environ: []}


CUDA = go("--device", "cuda")
TOO_OLD = "The NVIDIA driver on your system is too old (found version 11040)."
DEV = [
    Case("DEV-build", words=CUDA, patches=gpus(0, **{"version.cuda": None, "__version__": "2.13.0+cpu"})),
    Case("DEV-none", words=CUDA, patches=gpus(0), environ={"CUDA_VISIBLE_DEVICES": ""}),
    Case("DEV-driver", words=CUDA, patches=gpus(1, **{"cuda.init": _raises(TOO_OLD)})),
    Case("DEV-number", words=CUDA, patches=gpus(2), environ={"SEXPGPU_DEVICES": "2"}),
    Case("DEV-which", words=CUDA, patches=gpus(2)),
    Case("DEV-triton", words=CUDA, patches=gpus(1) | {"sexpgpu.backends.cuda.device.find_spec": lambda name: None}),
]
CASES = [*READ, *EVAL, *SHAPE, *KNOB, *ENV, *DATA, *CKPT, *NET, *RUNS, *MEM, *DEV]
