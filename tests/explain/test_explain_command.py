"""`sexpgpu explain` as a person calls it: the screen, documents, comparisons, estimates, and what it must not import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sexpgpu import compiler
from sexpgpu.backends.interpreter.report import computed, programs, rows
from sexpgpu.cli.main import perform
from sexpgpu.diagnostics import SexpError
from sexpgpu.experiment.load import Selection
from sexpgpu.explain.compare import side, word
from sexpgpu.explain.cost import DEVICES, assumptions, device
from sexpgpu.explain.lowering import last_of, lowered
from sexpgpu.explain.memory import fits, gpu_memory, planned
from sexpgpu.explain.report import estimated
from sexpgpu.ir import Origins, postorder
from sexpgpu.ops import table

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "triton", "boto3", "rich")


def call(capsys: Any, *words: str) -> tuple[int, str, str]:
    code = perform(["explain", *words])
    out, err = capsys.readouterr()
    return code, out, err


def document(capsys: Any, *words: str) -> Any:
    code, out, _ = call(capsys, *words, "--json")
    assert code == 0
    return json.loads(out)


@pytest.fixture(autouse=True)
def _at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("words", [
    ["--help"], ["explain", "--help"], ["explain", "E-SHAPE-003"], ["explain", "examples/gpt2.lisp", "--variant", "tiny"],
    ["explain", "examples/digits.lisp", "--json"], ["explain", "examples/digits.lisp", "--ir"], ["explain", "examples/digits.lisp:19"],
    ["explain", "examples/digits.lisp", "--why", "in/weight"], ["explain", "examples/digits.lisp", "--after", "simplified"],
    ["explain", "examples/digits.lisp", "--diff", "ir", "simplified"], ["explain", "examples/char_lm.lisp", "--diff", "tiny", "dry"],
    ["explain", "--diff", "examples/digits.lisp", "examples/conv_digits.lisp"], ["explain", "examples/gpt2.lisp", "--variant", "tiny", "--device", "cuda"],
    ["explain", "examples/digits.lisp", "--after", "fused"], ["explain", "examples/digits.lisp", "--diff", "simplified", "plan"],
])  # fmt: skip
def test_nothing_heavy_is_imported(words: list[str]) -> None:
    program = f"import sys; from sexpgpu.cli.main import perform; code = perform({words!r}); " \
        f"print([m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr); sys.exit(code)"  # fmt: skip
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, env=dict(os.environ), timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "[]"
    assert done.stdout


def test_the_screen(capsys: Any) -> None:
    code, out, err = call(capsys, "examples/digits.lisp", "--set", "hidden=32")
    assert code == 0 and not err
    for wanted in ("hidden     32     (set --set, default 128)", "sizes of perceptron/in/weight", ":optimizer of run train", "at the peak: parameters",
                   "about ", "bounded by", "largest tensors of train at the peak", "parameters of train: 2,410 values", "eval valid"):  # fmt: skip
        assert wanted in out, wanted


def test_unused_knobs_and_influences(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "m.lisp"
    file.write_text('''(import "nn" "optim" "loss")
(defknob wide 8) (defknob never 1) (defknob small 2) (defknob slow 0.1) (defknob deviation 0.5)
(defparameter size (* 2 small))
(defdata d (csv "d.csv" :fields ((x f32 [4]) (y f32 [2]))))
(deflayer net (x) (linear (matmul x (param "w" [4 wide] :init (normal :std deviation))) 2))
(defun the-loss (x y) (mse (net x) y))
(defrun r :data (batches d :batch size) :loss the-loss :steps small :optimizer (sgd :lr slow))
''')
    knobs = document(capsys, str(file))["knobs"]
    assert knobs["never"]["used"] is False and knobs["wide"]["used"] is True and knobs["never"]["influences"] == []
    assert "sizes of net/w, net/linear/weight" in knobs["wide"]["influences"]
    assert knobs["small"]["influences"] == [":data of run r", ":steps of run r"], "through a variable of the file too"
    assert ":optimizer of run r" in knobs["slow"]["influences"] and "initial values of net/w" in knobs["deviation"]["influences"]
    assert "never read" in call(capsys, str(file))[1]


def test_documents(capsys: Any) -> None:
    found = document(capsys, "examples/char_lm.lisp", "--variant", "tiny")
    run = found["runs"]["pretrain"]
    assert found["variant"] == "tiny" and run["values"] == sum(_size(p["shape"]) for p in run["parameters"] if p["kind"] == "param")
    assert run["memory"]["kept"]["parameters"] == 4 * run["values"] == run["memory"]["kept"]["gradients"]
    assert run["memory"]["kept"]["optimizer"] == 8 * run["values"], "adamw keeps two slots"
    assert run["memory"]["batch"] == 2 * 8 * 32 * 4, "tokens and targets, 8 windows of 32, i32"
    assert run["memory"]["peak"] == sum(run["memory"]["kept"].values()) + run["memory"]["batch"] + run["memory"]["step"]
    assert abs(sum(run["estimate"]["limits"].values()) - 1) < 1e-9
    assert document(capsys, "E-SHAPE-003")["code"] == "E-SHAPE-003"
    assert document(capsys, "examples/digits.lisp", "--after", "forms")["text"].startswith("(import")
    assert document(capsys, "examples/digits.lisp:19")[0]["parameters"]
    assert document(capsys, "examples/digits.lisp", "--why", "in/weight")["knobs"] == ["hidden", "lr"]
    assert "are the same" in document(capsys, "examples/digits.lisp", "--diff", "ir", "simplified")["text"]


def _size(shape: list[int]) -> int:
    product = 1
    for n in shape:
        product *= n
    return product


# --- comparisons ---

BASE = '''(import "nn" "optim" "loss")
(defknob wide 8)
(defknob rate 0.1)
(defknob long 10)
(defvariant wider :wide 16)
(defvariant faster :rate 0.2)
(defvariant longer :long 20)
(defdata d (csv "d.csv" :fields ((x f32 [4]) (y f32 [2]))))
(defun the-loss (x y) (mse (linear (relu (linear x wide :name "a")) 2 :name "b") y))
(defrun r :data (batches d :batch 2) :loss the-loss :steps long :optimizer (sgd :lr rate) :checkpoint-every 5)
'''


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "a.lisp").write_text(BASE)
    (tmp_path / "comment.lisp").write_text(BASE + "; a remark\n")
    (tmp_path / "data.lisp").write_text(BASE.replace(":batch 2", ":batch 4"))
    (tmp_path / "d.csv").write_text("x_0,x_1,x_2,x_3,y_0,y_1\n" + "".join(f"{i},{i},{i},{i},{i},{i}\n" for i in range(10)))
    return tmp_path


@pytest.mark.parametrize(("b", "verdict", "line"), [
    ("a.lisp", "equal", None),
    ("comment.lisp", "harmless", None),
    ("a.lisp@longer", "harmless", ":steps was 10, is 20"),
    ("a.lisp@faster", "trajectory-changing", "optimizer"),
    ("data.lisp", "trajectory-changing", "data: batch"),
    ("a.lisp@wider", "impossible", "param/a/weight: f32[4 8] in the checkpoint, f32[4 16] in the program"),
])  # fmt: skip
def test_verdicts_of_files(files: Path, capsys: Any, b: str, verdict: str, line: str | None) -> None:
    found = document(capsys, "--diff", str(files / "a.lisp"), str(files / b))
    assert found["verdict"] == verdict, found
    listed = [row for key in ("impossible", "changing", "harmless") for row in found[key]]
    assert line is None or any(line in row for row in listed), listed
    shown = call(capsys, "--diff", str(files / "a.lisp"), str(files / b))[1]
    assert shown.splitlines()[0].split(": ")[1] == verdict


def test_variants_of_a_file(files: Path, capsys: Any) -> None:
    assert document(capsys, str(files / "a.lisp"), "--diff", "base", "wider")["verdict"] == "impossible"
    assert document(capsys, str(files / "a.lisp"), "--diff", "longer", "base")["verdict"] == "harmless"
    code, _, err = call(capsys, str(files / "a.lisp"), "--diff", "base", "widest")
    assert code == 2 and "E-ENV-006" in err and "did you mean `wider`?" in err


def test_a_checkpoint_is_judged_as_a_resume_judges_it(files: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(files)
    made = subprocess.run([sys.executable, "-m", "sexpgpu", "run", "a.lisp", "--checkpoint-dir", "kept", "--steps", "5"],
                          capture_output=True, text=True, env=dict(os.environ), timeout=120)  # fmt: skip
    assert made.returncode == 0, made.stderr
    for b, verdict, code in (("a.lisp", "harmless", 0), ("data.lisp", "trajectory-changing", 2)):
        assert document(capsys, "--diff", "kept/step-5", b)["verdict"] == verdict
        resumed = subprocess.run([sys.executable, "-m", "sexpgpu", "run", b, "--resume", "kept/step-5", "--steps", "6"],
                                 capture_output=True, text=True, env=dict(os.environ), timeout=120)  # fmt: skip
        assert resumed.returncode == code, resumed.stderr
        assert code == 0 or "E-CKPT-021" in resumed.stderr
    assert document(capsys, "--diff", "a.lisp@wider", "kept/step-5")["verdict"] == "impossible"
    assert call(capsys, "--diff", "kept/step-5", "kept/step-5")[0] == 2
    assert call(capsys, "--diff", "kept/step-7", "a.lisp")[0] == 2


def test_words() -> None:
    from sexpgpu.run.checkpoints.compare import Comparison

    assert word(Comparison()) == "equal" and word(Comparison(("a",))) == "harmless"
    assert word(Comparison(("a",), ("b",))) == "trajectory-changing" and word(Comparison((), (), ("c",))) == "impossible"
    with pytest.raises(SexpError):
        side("nowhere", None, Selection())


# --- costs ---

def test_assumptions_change_the_estimate(capsys: Any) -> None:
    base = document(capsys, "examples/digits.lisp")["runs"]["train"]["estimate"]
    slow = document(capsys, "examples/digits.lisp", "--assume", "bandwidth=1e6", "--assume", "flops=1e15", "--assume", "launch=1e-9")["runs"]["train"]["estimate"]
    assert slow["limits"]["memory"] > 0.99 and slow["seconds"] > base["seconds"]
    calls = [row for _, _, written in programs(staged("digits")) for row in rows(written, Origins())]
    assert slow["seconds"] == pytest.approx(sum(row.bytes for row in calls) / 1e6, rel=0.02), "all of it is traffic"
    fast = document(capsys, "examples/digits.lisp", "--device", "h200")["runs"]["train"]["estimate"]
    assert fast["device"] == "h200" and fast["seconds"] < base["seconds"]
    assert device("cuda", {}) == DEVICES["h200"]
    assert "does not fit" in call(capsys, "examples/digits.lisp", "--assume", "memory=1e5")[1]


@pytest.mark.parametrize(("sets", "measured"), [(("batch=32",), 61.97e-3), (("batch=64",), 119.7e-3)])
def test_the_estimate_is_near_what_the_h200_took(sets: tuple[str, ...], measured: float) -> None:
    """The steps of GPT-2 124M in benchmarks/step_time.py."""
    found = estimated(staged("gpt2", *sets, kind="cuda"), "h200")
    assert found.seconds == pytest.approx(measured, rel=0.25) and found.limits["arithmetic"] > 0.7


def test_layers_that_run_again_cost_no_more_than_a_third(tmp_path: Path) -> None:
    """What a kernel reads of a second making is read, and not made once more inside it."""
    text = (ROOT / "examples/char_lm.lisp").read_text("utf-8").replace("(defrun pretrain", "(defrun pretrain :remat true")
    (tmp_path / "remat.lisp").write_text(text, "utf-8")
    loaded = compiler.load(str(tmp_path / "remat.lisp"), Selection())
    again = estimated(compiler.stages(loaded, compiler.choose_run(loaded.experiment, None), "cuda"), "h200")
    whole = estimated(staged("char_lm", kind="cuda"), "h200")
    assert whole.seconds < again.seconds < 4 / 3 * whole.seconds
    assert again.limits["arithmetic"] < 2 * whole.limits["arithmetic"] + 0.05


def test_small_launches_cost_their_start() -> None:
    loaded = compiler.load("benchmarks/programs/perceptron.lisp", Selection())
    stages = compiler.stages(loaded, compiler.choose_run(loaded.experiment, None), "cuda")
    count = sum(len(graph.schedule.launches) for graph in lowered(stages))
    found = estimated(stages, "h200")
    assert count * 1e-6 < found.seconds < count * 8e-6 and found.limits["launches"] > 0.5


def staged(example: str, *sets: str, kind: str = "cpu") -> Any:
    loaded = compiler.load(f"examples/{example}.lisp", Selection(sets=sets))
    return compiler.stages(loaded, compiler.choose_run(loaded.experiment, None), kind)


# --- does it fit ---

def test_a_budget() -> None:
    """The largest batch is the largest: it fits, and one more does not; so is the least number of parts."""
    loaded = compiler.load("examples/char_lm.lisp", Selection(variant="tiny"))
    run = compiler.choose_run(loaded.experiment, None)
    plan = lambda other: planned(loaded, other, "cpu")  # noqa: E731
    whole = plan(run)
    assert fits(whole, run, whole.peak, plan).fits
    found = fits(whole, run, 0.6 * whole.peak, plan)
    assert not found.fits and 1 <= found.batch < run.data.batch
    at = lambda batch: plan(replace(run, data=replace(run.data, batch=batch))).peak  # noqa: E731
    assert at(found.batch) <= found.budget < at(found.batch + 1)
    assert found.accumulate and run.data.batch % found.accumulate == 0
    assert plan(replace(run, accumulate=found.accumulate)).peak == found.accumulated <= found.budget
    assert f":batch {found.batch}" in found.line() and f":accumulate {found.accumulate}" in found.line()
    hopeless = fits(whole, run, 1000, plan)
    assert hopeless.batch == 0 and hopeless.accumulate is None and "a narrower model" in hopeless.line()


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_budget_on_the_command_line(capsys: Any, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setenv("SEXPGPU_MEMORY", "0.23" if kind == "cuda" else "0.07")
    words = ("examples/char_lm.lisp", "--set", "layers=2", "--device", kind)
    found = document(capsys, *words)["runs"]["pretrain"]["budget"]
    assert found["fits"] is False and found["budget"] < found["need"] and 0 < found["batch"] < 32
    assert "does not fit: it takes" in call(capsys, *words)[1]
    monkeypatch.setenv("SEXPGPU_MEMORY", "64")
    assert document(capsys, *words)["runs"]["pretrain"]["budget"]["fits"] is True
    monkeypatch.setenv("SEXPGPU_MEMORY", "zero")
    code, _, err = call(capsys, *words)
    assert code == 2 and "E-ENV-001" in err and "SEXPGPU_MEMORY" in err


def test_a_run_over_its_budget_does_not_start(capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SEXPGPU_MEMORY", "0.05")
    assert perform(["run", "examples/char_lm.lisp", "--set", "layers=1", "--steps", "1", "--checkpoint-dir", str(tmp_path / "kept")]) == 2
    err = capsys.readouterr().err
    assert "E-MEM-002" in err and "SEXPGPU_MEMORY allows" in err and "gpt/0" in err and ":batch" in err and ":accumulate" in err
    assert not (tmp_path / "kept").exists()


def test_the_plan_for_a_gpu_is_the_program_s() -> None:
    """Launches one for one, and bytes but for partial sums of kernels."""
    pytest.importorskip("triton")
    from sexpgpu.backends.cuda.report import graphs
    from sexpgpu.backends.cuda.report import lowered as program_of

    for example, sets in (("digits", ()), ("char_lm", ("layers=2",)), ("conv_digits", ()), ("gpt2", ("layers=1", "batch=2", "vocabulary=1024", "context=256"))):
        stages = staged(example, *sets, kind="cuda")
        program = program_of(stages)
        found = lowered(stages)
        for ours, (_, compiled) in zip(found, graphs(program), strict=True):
            made = [Counter(str(last_of(launch)) for launch in launches) for launches in (ours.schedule.launches, compiled.schedule.launches)]
            assert made[0] == made[1], example
        assert gpu_memory(stages, found).peak == pytest.approx(program.plan.total, rel=0.05, abs=70 << 20), example


# --- calls and launches ---

def test_calls_of_the_interpreter(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEXPGPU_EXPLAIN", "kernels")
    text = call(capsys, "examples/digits.lisp")[1]
    for wanted in ("calls of train on cpu", "forward and backward: ", "addmm", "f32[*64 128]", "perceptron/0/in", "fused: one call for matmul, +",
                   "alone: nothing is added to it", "alone: a view", "update: ", "fused with its forward pass, of which it takes logs, index"):  # fmt: skip
        assert wanted in text, wanted
    graphs = document(capsys, "examples/digits.lisp")["runs"]["train"]["launches"]
    first = graphs[0]["calls"][0]
    assert first["name"] == "addmm" and first["flops"] == 2 * 64 * 64 * 128 + 64 * 128 and first["inside"] == ["matmul"]
    assert first["bytes"] == 4 * (64 * 64 + 64 * 128 + 128 + 64 * 128) and first["path"] == "perceptron/0/in"
    assert all(row["why"] for graph in graphs for row in graph["calls"])
    low = call(capsys, "examples/char_lm.lisp", "--variant", "tiny", "--set", "precision=bf16")[1]
    assert "alone: bf16 is computed op by op" in low


def test_calls_of_a_run(capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SEXPGPU_EXPLAIN", "kernels")
    assert perform(["run", "examples/digits.lisp", "--steps", "1"]) == 0
    out, err = capsys.readouterr()
    assert "fused: one call for matmul, +" in err and "addmm" not in out


def test_every_node_of_a_step_is_in_one_call() -> None:
    """No op of the graph is lost or computed twice in what the report says."""
    for example in ("digits", "conv_digits", "vae", "char_lm"):
        stages = staged(example, *(("layers=1",) if example == "char_lm" else ()))
        for _, _, written in programs(stages):
            made = [node for line in written.lines for node in computed(line.step)]
            ops = {n for n in postorder(written.results.values()) if table()[n.op].lowering.kind not in ("leaf", "view") and n.op not in ("constant", "iota")}
            twice = {n for n, times in Counter(made).items() if times > 1 and n in ops}
            assert not {n for n in twice if n.op != "*"}, example  # a square is made where it is read
            lost = ops - set(made)
            assert not lost, (example, lost)


@pytest.mark.parametrize("text", ["bandwith=1", "bandwidth", "bandwidth=x", "bandwidth=0", "bandwidth=nan", "bandwidth=inf"])
def test_wrong_assumptions(text: str) -> None:
    with pytest.raises(SexpError) as found:
        assumptions([text])
    assert found.value.diagnostic.code == "E-ENV-006" and found.value.diagnostic.help


@pytest.mark.parametrize("words", [
    [], ["nowhere.lisp"], ["examples/digits.lisp", "--after", "zork"], ["examples/digits.lisp", "--why", "zork"], ["examples/digits.lisp:9999"],
    ["examples/digits.lisp", "--device", "tpu"], ["examples/digits.lisp", "zork"], ["--diff", "examples/digits.lisp", "nowhere.lisp"],
    ["examples/digits.lisp:1"], ["examples/digits.lisp", "--diff", "ir", "zork"], ["examples/digits.lisp", "--diff", "ir", "wide"],
    ["examples/digits.lisp", "--after", "ir", "--why", "in/weight"], ["E-SHAPE-003", "--ir"], ["examples/digits.lisp:19", "--ir"],
    ["examples/digits.lisp", "--assume-ranks", "0"], ["--diff", "nowhere", "nowhere.lisp"], ["E-SHAPE-999"],
])  # fmt: skip
def test_mistakes_have_codes(capsys: Any, words: list[str]) -> None:
    code, out, err = call(capsys, *words)
    assert code == 2 and err.startswith("error[E-") and "bug" not in err and not out


def test_two_files_that_are_not_there_are_both_told(capsys: Any) -> None:
    code, _, err = call(capsys, "--diff", "nowhere.lisp", "neither.lisp")
    assert code == 2 and err.count("error[E-READ-014]") == 2 and "nowhere.lisp" in err and "neither.lisp" in err


@pytest.mark.parametrize(("name", "value"), [("SEXPGPU_MEMORY", "zero"), ("OMP_NUM_THREADS", "zero"), ("SEXPGPU_EXPLAIN", "kernal"), ("SEXPGPU_DEVICE", "gpu")])
def test_settings_that_are_not_understood(capsys: Any, monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    code, _, err = call(capsys, "examples/digits.lisp")
    assert code == 2 and "E-ENV-001" in err and f"{name} is `{value}`" in err


def test_a_comparison_with_a_checkpoint_brings_no_torch(files: Path) -> None:
    made = subprocess.run([sys.executable, "-m", "sexpgpu", "run", "a.lisp", "--checkpoint-dir", "kept", "--steps", "1"], capture_output=True, text=True,
                          cwd=files, env=dict(os.environ), timeout=300)  # fmt: skip
    assert made.returncode == 0, made.stderr
    program = "import sys; from sexpgpu.cli.main import perform; code = perform(['explain', '--diff', 'kept/step-1', 'a.lisp']); " \
        f"print([m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr); sys.exit(code)"  # fmt: skip
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=files, env=dict(os.environ), timeout=300)
    assert done.returncode == 0 and done.stderr.splitlines()[-1] == "[]" and "harmless" in done.stdout
