"""`sexpgpu.load`: the run's own evaluation bit for bit, the IR's gradients, derivatives to second order, weights, mistakes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import sexpgpu
from sexpgpu.backends.interpreter.program import Compiled
from sexpgpu.cli.main import perform
from sexpgpu.compiler import Selection, choose_run, program, stages
from sexpgpu.compiler import load as load_file_of_lisp
from sexpgpu.run.bind import bind

ROOT = Path(__file__).resolve().parents[2]
DIGITS = ROOT / "examples" / "digits.lisp"
CHAR_LM = ROOT / "examples" / "char_lm.lisp"

MIXED = """(import "nn" "optim" "loss")
(defknob precision f32 "arithmetic" :one-of (f32 f64 bf16))
(defknob rate 0.25 "dropout")
(defknob width 6)
(defdata d (csv "d.csv" :fields ((x f32 [4]) (label i32))) :split ((train 4/5) (valid 1/5)))
(deflayer model (x)
  (linear (dropout (tanh (batch-norm (linear x width :name "in"))) rate) 3 :name "out"))
(deflayer scale (x) (* x (param "by" [4] :init ones)))
(defun f (x label) (cross-entropy (model (scale x)) label))
(defun energy-and-forces (x)
  (let ((energy (sum (tanh (model x)))))
    (list energy (- (grad energy x)))))
(defun both (x &key (twice false) (shift 0))
  (let ((y (+ (model x) shift))) (list (if twice (* 2 y) y) "text" 7 nil (list (argmax y :axis -1) y))))
(defun relu-itself (x) relu)
(defun on-steps (x) (* (cast (step) f32) x))
(defrun train :data (batches d :split train :batch 8 :shuffle true) :loss f :optimizer (adamw :lr 1e-2)
  :steps 6 :seed 3 :precision precision :frozen ("scale/**") :ema 0.9 :checkpoint-every 2)
(defeval valid :data (batches d :split valid :batch 4) :every 3 :metrics ((loss f)))
(defeval smooth :data (batches d :split valid :batch 4) :every 3 :weights ema :metrics ((loss f)))
"""


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program beside its data and a location `runs` of a whole run of it."""
    folder = tmp_path_factory.mktemp("mixed")
    (folder / "p.lisp").write_text(MIXED, encoding="utf-8")
    rows = torch.randn(60, 4, generator=torch.Generator().manual_seed(1))
    lines = ["x_0,x_1,x_2,x_3,label", *(",".join([*(f"{v:.6f}" for v in row), str(i % 3)]) for i, row in enumerate(rows))]
    (folder / "d.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert perform(["run", str(folder / "p.lisp"), "--checkpoint-dir", str(folder / "runs")]) == 0
    return folder


@pytest.fixture
def evaluated(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, dict[str, float]]]:
    """The exact numbers of `sexpgpu eval`."""

    def call(*words: str) -> dict[str, dict[str, float]]:
        capsys.readouterr()
        assert perform(["eval", *words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)["evals"]

    return call


def by_module(file: Path, checkpoint: Path, evaluation: str, function: str, **more) -> float:
    """One metric of an evaluation by a loaded module, joined as the run joins it."""
    model = sexpgpu.load(file, checkpoint=checkpoint, **more)
    experiment = load_file_of_lisp(str(file), Selection(more.get("variant"))).experiment
    total, count = 0.0, 0.0
    for batch in bind(choose_run(experiment, None)).feeds.evals[evaluation]:
        tensors = {name: torch.from_numpy(array) for name, array in batch.items()}
        rows = len(next(iter(tensors.values())))
        with torch.no_grad():
            total, count = total + float(model[function](**tensors)) * rows, count + rows
    return total / count


def run_gradients(file: Path, model: torch.nn.Module, batch: dict[str, torch.Tensor], **selection) -> dict[str, torch.Tensor]:
    """The gradients that the run's own step takes of this batch at the model's weights."""
    loaded = load_file_of_lisp(str(file), Selection(**selection))
    staged = stages(loaded, choose_run(loaded.experiment, None))
    made = program(staged, "cpu", torch.get_num_threads())
    made.initialise()
    made.load(made.state() | {f"param/{n}": p.detach() for n, p in model.named_parameters()}, 0)
    out = Compiled(staged.micro(False)).run(made._leaves({n: t.numpy() for n, t in batch.items()}), staged.run.seed, 0)
    return {n.removeprefix("gradient/"): t for n, t in out.items() if n.startswith("gradient/")}


def first_batch(file: Path, **selection) -> dict[str, torch.Tensor]:
    run = choose_run(load_file_of_lisp(str(file), Selection(**selection)).experiment, None)
    return {name: torch.from_numpy(array) for name, array in bind(run).feeds.train.batch(0).items()}


def test_import_brings_no_torch() -> None:
    code = "import sys, sexpgpu; assert 'torch' not in sys.modules; sexpgpu.load; assert 'torch' in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr


def test_the_evaluation_is_the_runs_own(mixed: Path, evaluated) -> None:
    file, checkpoint = mixed / "p.lisp", mixed / "runs" / "step-6"
    exact = evaluated(str(file), "--resume", str(checkpoint))
    assert by_module(file, checkpoint, "valid", "f") == exact["valid"]["loss"]
    assert by_module(file, checkpoint, "smooth", "f", weights="ema") == exact["smooth"]["loss"] != exact["valid"]["loss"]


def test_the_evaluation_of_a_language_model(tmp_path: Path, evaluated) -> None:
    where = ["--checkpoint-dir", str(tmp_path / "c")]
    assert perform(["run", str(CHAR_LM), "--variant", "tiny", "--steps", "3", *where]) == 0
    exact = evaluated(str(CHAR_LM), "--variant", "tiny", "--resume", str(tmp_path / "c" / "step-3"))
    found = by_module(CHAR_LM, tmp_path / "c" / "step-3", "valid", "lm-loss", variant="tiny")
    assert found == exact["valid"]["loss"]


@pytest.mark.parametrize(
    ("file", "variant", "precision", "bound"),
    [(DIGITS, None, "f32", 1e-6), (CHAR_LM, "tiny", "f64", 1e-13), (CHAR_LM, "tiny", "f32", 1e-5), (CHAR_LM, "tiny", "bf16", 1e-2)],
    ids=["digits", "char_lm f64", "char_lm f32", "char_lm bf16"],
)
def test_gradients_are_those_of_the_step(file: Path, variant: str | None, precision: str, bound: float) -> None:
    """In train mode, draws of dropout included. The step fuses its sums in another way, so equal but for their rounding."""
    sets = (f"precision={precision}",)
    model = sexpgpu.load(file, variant, sets).train()
    batch = first_batch(file, variant=variant, sets=sets)
    expected = run_gradients(file, model, batch, variant=variant, sets=sets)
    model(**batch).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.dtype == expected[name].dtype
        assert torch.linalg.norm(parameter.grad - expected[name]) <= bound * torch.linalg.norm(expected[name]), name


def test_derivatives_against_finite_differences(mixed: Path) -> None:
    """First and second ones in float64, by torch's own check; of a function that itself differentiates, too."""
    model = sexpgpu.load(mixed / "p.lisp", set={"precision": "f64"})
    x = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2), requires_grad=True)
    label = torch.tensor([0, 2, 1, 0, 2])
    parameters = tuple(p for p in model.parameters() if p.requires_grad)

    def by_all(x, *values):
        return model.f(x, label)

    assert torch.autograd.gradcheck(by_all, (x, *parameters))
    assert torch.autograd.gradgradcheck(by_all, (x, *parameters))

    def forces(x, *values):
        return model.energy_and_forces(x)[1]

    assert torch.autograd.gradcheck(forces, (x, *parameters))
    assert torch.autograd.gradgradcheck(lambda x: model.energy_and_forces(x)[0], (x,))
    energy, force = model.energy_and_forces(x)
    assert torch.allclose(torch.autograd.grad(energy, x)[0], -force, atol=1e-12)
    third = torch.autograd.grad(torch.autograd.grad(torch.autograd.grad(
        model.f(x, label), x, create_graph=True)[0].pow(2).sum(), x, create_graph=True)[0].pow(2).sum(), x)[0]
    assert torch.isfinite(third).all() and third.abs().max() > 0


def test_training_by_torch_follows_the_run(tmp_path: Path) -> None:
    """Five steps of torch's AdamW on the modules against five of the run."""
    assert perform(["run", str(DIGITS), "--steps", "5", "--checkpoint-dir", str(tmp_path / "c")]) == 0
    model = sexpgpu.load(DIGITS).train()
    run = choose_run(load_file_of_lisp(str(DIGITS), Selection()).experiment, None)
    feed = bind(run).feeds.train
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-2)
    for step in range(5):
        optimizer.zero_grad()
        model(**{n: torch.from_numpy(a) for n, a in feed.batch(step).items()}).backward()
        optimizer.step()
        model.updates += 1
    trained = sexpgpu.load(DIGITS, checkpoint=tmp_path / "c" / "step-5")
    assert trained.updates == 5
    for name, value in trained.state_dict().items():
        assert torch.allclose(model.state_dict()[name], value, atol=1e-6), name


def test_shapes_are_free(mixed: Path) -> None:
    model = sexpgpu.load(mixed / "p.lisp", checkpoint=mixed / "runs")
    x = torch.randn(7, 4)
    whole = model.model(x)
    assert torch.allclose(torch.cat([model.model(x[:3]), model.model(x[3:])]), whole, atol=1e-6)
    count = len(model._graphs)
    model.model(torch.randn(7, 4))
    assert len(model._graphs) == count == 3
    with pytest.raises(sexpgpu.SexpError, match="E-"):
        model.model(torch.randn(7, 5))


def test_dropout_and_states_are_explicit(mixed: Path) -> None:
    model = sexpgpu.load(mixed / "p.lisp")
    x = torch.randn(16, 4)
    assert not model.training and torch.equal(model.model(x), model.model(x))
    before = {n: b.clone() for n, b in model.named_buffers()}
    assert set(before) == {"model/batch-norm/mean", "model/batch-norm/variance"}
    model.train()
    assert model.model.training
    one, again = model.model(x), model.model(x)
    assert torch.equal(one, again)  # of the same update
    assert not torch.equal(before["model/batch-norm/mean"], dict(model.named_buffers())["model/batch-norm/mean"])
    model.updates = 1
    assert not torch.equal(model.model(x), one)
    (one.sum() + again.sum()).backward()  # the states were written in between
    model.model.eval()
    assert not model.training
    model.updates = 4
    assert torch.equal(model.on_steps(torch.ones(2, 4)), torch.full((2, 4), 4.0))


def test_states_follow_the_runs_step(mixed: Path) -> None:
    file = mixed / "p.lisp"
    loaded = load_file_of_lisp(str(file), Selection())
    made = program(stages(loaded, choose_run(loaded.experiment, None)), "cpu", torch.get_num_threads())
    made.initialise()
    batch = first_batch(file)
    made.step({n: t.numpy() for n, t in batch.items()}, False)
    model = sexpgpu.load(file).train()
    model(**batch)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, made.state()[f"state/{name}"]), name


def test_modules_share_the_models_parameters(mixed: Path) -> None:
    model = sexpgpu.load(mixed / "p.lisp")
    names = {"scale/by", "model/in/weight", "model/in/bias", "model/batch-norm/weight", "model/batch-norm/bias",
             "model/out/weight", "model/out/bias"}  # fmt: skip
    assert {n for n, _ in model.named_parameters()} == names == {n for n, _ in model.f.named_parameters()}
    assert {n for n, _ in model.model.named_parameters()} == {n for n in names if n.startswith("model/")}
    assert model.model is model["model"] and model.model._parameters["model/in/bias"] is model._parameters["model/in/bias"]
    assert {n for n, p in model.named_parameters() if not p.requires_grad} == {"scale/by"}  # :frozen
    assert model.functions() == ("model", "scale", "f", "energy-and-forces", "both", "relu-itself", "on-steps")
    assert "energy_and_forces" in dir(model) and "p.lisp" in repr(model) and hasattr(model, "both") and not hasattr(model, "nope")


def test_state_dict_and_exported_weights(mixed: Path, tmp_path: Path) -> None:
    file, x = mixed / "p.lisp", torch.randn(3, 4)
    trained = sexpgpu.load(file, checkpoint=mixed / "runs" / "step-6")
    assert perform(["export", str(mixed / "runs" / "step-6"), str(tmp_path / "w.safetensors")]) == 0
    exported = load_file(tmp_path / "w.safetensors")
    assert exported.keys() == trained.state_dict().keys()
    fresh = sexpgpu.load(file)
    assert not torch.equal(fresh.model(x), trained.model(x))
    fresh.load_state_dict(exported)
    part = mixed / "runs" / "step-6" / "part-00001-of-00001.safetensors"
    for other in (fresh, sexpgpu.load(file, checkpoint=tmp_path / "w.safetensors"), sexpgpu.load(file, checkpoint=part),
                  sexpgpu.load(file, checkpoint=mixed / "runs")):
        assert torch.equal(other.model(x), trained.model(x))
    layer = sexpgpu.load(file)
    layer.model.load_state_dict(trained.model.state_dict())
    assert torch.equal(layer.model(x), trained.model(x))
    with pytest.raises(RuntimeError, match="Unexpected"):
        fresh.load_state_dict({**exported, "other": x})


def test_names_with_a_dot(tmp_path: Path) -> None:
    text = MIXED.replace('"in"', '"in.1"')
    (tmp_path / "p.lisp").write_text(text, encoding="utf-8")
    model = sexpgpu.load(tmp_path / "p.lisp")
    assert "model/in.1/weight" in model.state_dict()
    model.load_state_dict(model.state_dict())


def test_values_and_arguments(mixed: Path) -> None:
    model = sexpgpu.load(mixed / "p.lisp", set=["width=5", "rate=0"])
    x = torch.randn(2, 4)
    y, text, seven, nothing, (best, same) = model.both(x, twice=True)
    assert (text, seven, nothing) == ("text", 7, None) and best.dtype == torch.int32 and not best.requires_grad
    assert torch.equal(y, 2 * same) and torch.equal(best.long(), same.argmax(-1))
    assert torch.equal(model.both(x, shift=1.5)[0], model.both(x=x)[0] + 1.5)
    shift = torch.tensor(2.0, requires_grad=True)
    model.both(x, shift=shift)[0].sum().backward()
    assert shift.grad == 6
    assert torch.equal(model.model(x.numpy()), model.model(x))
    same.sum().backward()  # one of several results


MISTAKES = [
    ("E-RUN-050", "double", lambda m: m.model(torch.zeros(2, 4).half()), "float()"),
    ("E-RUN-050", "kind", lambda m: m.model({"a": 1}), "dict"),
    ("E-RUN-050", "complex", lambda m: m.model(torch.zeros(2, 4, dtype=torch.complex64)), "complex64"),
    ("E-RUN-050", "range", lambda m: m.f(torch.zeros(1, 4), torch.tensor([2**40])), "label"),
    ("E-RUN-051", "function", lambda m: m.relu_itself(torch.zeros(2, 4)), "a function"),
    ("E-RUN-052", "dtype", lambda m: m.double().model(torch.zeros(2, 4)), "float64"),
    ("E-RUN-053", "label", lambda m: m.f(torch.zeros(1, 4), torch.tensor([3])), "0…2"),
    ("E-EVAL-003", "count", lambda m: m.model(), "model"),
    ("E-EVAL-004", "keyword", lambda m: m.both(torch.zeros(2, 4), twise=True), "twice"),
    ("E-CKPT-034", "name", lambda m: m["modle"], "model"),
    ("E-EVAL-111", "parameter", lambda m: m.linear(torch.zeros(2, 4), 3), "linear"),
]


@pytest.mark.parametrize(("code", "call", "word"), [(c, f, w) for c, _, f, w in MISTAKES], ids=[n for _, n, _, _ in MISTAKES])
def test_mistakes_of_a_call(mixed: Path, code: str, call, word: str) -> None:
    with pytest.raises(sexpgpu.SexpError) as caught:
        call(sexpgpu.load(mixed / "p.lisp"))
    text = str(caught.value)
    assert text.startswith(f"error[{code}]") and word in text and f"sexpgpu explain {code}" in text
    assert caught.value.__cause__ is None and caught.value.__suppress_context__


def test_mistakes_of_loading(mixed: Path, tmp_path: Path) -> None:
    file = mixed / "p.lisp"
    (tmp_path / "torn.safetensors").write_bytes(b"no")
    for code, word, call in (
        ("E-READ-014", "none.lisp", lambda: sexpgpu.load(tmp_path / "none.lisp")),
        ("E-KNOB-001", "width", lambda: sexpgpu.load(file, set={"wdith": 3})),
        ("E-KNOB-005", "big", lambda: sexpgpu.load(file, "big")),
        ("E-RUN-102", "tain", lambda: sexpgpu.load(file, run="tain")),
        ("E-RUN-054", "lr=1", lambda: sexpgpu.load(file, set="lr=1")),
        ("E-RUN-054", "width", lambda: sexpgpu.load(file, set={"width": object()})),
        ("E-RUN-054", "mean", lambda: sexpgpu.load(file, weights="mean")),
        ("E-CKPT-001", "nowhere", lambda: sexpgpu.load(file, checkpoint=tmp_path / "nowhere")),
        ("E-CKPT-020", "model/in/weight: f32[4 6] in the weights, f32[4 7]",
         lambda: sexpgpu.load(file, set={"width": 7}, checkpoint=mixed / "runs" / "step-6")),
        ("E-CKPT-020", "perceptron/in/weight: the program has it", lambda: sexpgpu.load(DIGITS, checkpoint=mixed / "runs")),
        ("E-DATA-040", "none.safetensors", lambda: sexpgpu.load(file, checkpoint=tmp_path / "none.safetensors")),
        ("E-DATA-041", "torn", lambda: sexpgpu.load(file, checkpoint=tmp_path / "torn.safetensors")),
        ("E-CKPT-036", "torn", lambda: sexpgpu.load(file, checkpoint=tmp_path / "torn.safetensors", weights="ema")),
    ):  # fmt: skip
        with pytest.raises(sexpgpu.SexpError) as caught:
            call()
        assert str(caught.value).startswith(f"error[{code}]") and word in str(caught.value), (code, str(caught.value))


def test_another_program_is_a_warning(mixed: Path) -> None:
    with pytest.warns(UserWarning, match="knob rate: was 0.25, is 0"):
        model = sexpgpu.load(mixed / "p.lisp", set={"rate": 0}, checkpoint=mixed / "runs" / "step-6")
    assert model.updates == 6


def test_a_loss_of_sum_and_count_is_a_scalar(mixed: Path) -> None:
    """As the run counts it; the function itself gives both."""
    text = MIXED.replace("(cross-entropy (model (scale x)) label))", "(cross-entropy (model (scale x)) label :ignore 1))")
    (mixed / "counted.lisp").write_text(text, encoding="utf-8")
    model = sexpgpu.load(str(mixed / "counted.lisp"))
    x, label = torch.randn(5, 4), torch.tensor([0, 1, 2, 1, 0])
    loss = model(x, label)
    expected = torch.nn.functional.cross_entropy(model.model(model.scale(x)), label, ignore_index=1)
    assert loss.shape == () and torch.allclose(loss, expected, atol=1e-6)
    total, count = model.f(x, label)
    assert count == 3 and torch.equal(total / count, loss)
    loss.backward()
    assert model.get_parameter("model/out/weight").grad.abs().sum() > 0
