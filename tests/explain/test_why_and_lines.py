"""`--why PATH` and `FILE:LINE`: questions whose answers are known from the texts of the examples, and a check by trying."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from sexpgpu.compiler import train_graph
from sexpgpu.diagnostics import SexpError
from sexpgpu.experiment.load import Selection, choose_run, load
from sexpgpu.explain.lines import Line, line, split
from sexpgpu.explain.stages import Traced, watched
from sexpgpu.explain.why import Why, why

ROOT = Path(__file__).resolve().parents[2]


@cache
def traced(example: str, variant: str | None = None) -> Traced:
    loaded = watched(str(ROOT / f"examples/{example}.lisp"), Selection(variant=variant))
    return Traced(loaded, choose_run(loaded.experiment, None))


def ask(example: str, path: str, variant: str | None = None) -> Why:
    t = traced(example, variant)
    return why(t.loaded, t.run, path, t.traced)


def at(example: str, text: str, number: int = 0) -> int:
    """The line of an example that has a text."""
    lines = (ROOT / f"examples/{example}.lisp").read_text("utf-8").splitlines()
    return [i for i, found in enumerate(lines, 1) if text in found][number]


# --- why: (example, path, what is asked, the answer) ---

QUESTIONS = [
    ("digits", "perceptron/in/weight", "axes", ((64, ()), (128, ("hidden",)))),
    ("digits", "perceptron/in/bias", "axes", ((128, ("hidden",)),)),
    ("digits", "perceptron/out/weight", "axes", ((128, ("hidden",)), (10, ()))),
    ("digits", "perceptron/out/bias", "axes", ((10, ()),)),
    ("digits", "perceptron/out/weight", "init_knobs", ("hidden",)),
    ("digits", "perceptron/in/weight", "init_knobs", ()),
    ("digits", "perceptron/in/weight", "optimizer", "adamw"),
    ("digits", "out/bias", "path", "perceptron/out/bias"),
    ("digits", "perceptron/in/weight", "exists", ()),
    ("char_lm", "gpt/token", "axes", ((256, ()), (128, ("d-model",)))),
    ("char_lm", "gpt/token", "exists", ()),
    ("char_lm", "gpt/token", "init_knobs", ()),
    ("char_lm", "gpt/token", "optimizer", "adamw"),
    ("char_lm", "gpt/position", "knobs", ("context", "d-model", "lr", "steps")),
    ("char_lm", "gpt/block/3/feed-forward/up/weight", "axes", ((128, ("d-model",)), (512, ("d-model",)))),
    ("char_lm", "gpt/block/3/feed-forward/up/weight", "exists", (("layers", "char_lm.lisp:49:46"),)),
    ("char_lm", "block/0/self-attention/query/weight", "exists", (("layers", "char_lm.lisp:49:46"),)),
    ("char_lm", "gpt/layer-norm/bias", "exists", ()),
    ("char_lm", "gpt/layer-norm/bias", "axes", ((128, ("d-model",)),)),
    ("gpt2", "gpt2/token", "axes", ((50304, ("vocabulary",)), (768, ("d-model",)))),
    ("gpt2", "gpt2/position", "axes", ((1024, ("context",)), (768, ("d-model",)))),
    ("gpt2", "gpt2/block/5/self-attention/out/weight", "init_knobs", ("layers",)),
    ("gpt2", "gpt2/block/5/self-attention/qkv/weight", "init_knobs", ()),
    ("gpt2", "gpt2/block/5/self-attention/qkv/weight", "exists", (("layers", "gpt2.lisp:58:46"),)),
    ("conv_digits", "network/stage/0/convolution/weight", "axes", ((16, ("channels",)), (1, ()), (3, ()), (3, ()))),
    ("conv_digits", "network/stage/1/convolution/weight", "axes", ((32, ("channels",)), (16, ("channels",)), (3, ()), (3, ()))),
    ("vae", "encoder/mean/weight", "axes", ((128, ("hidden",)), (8, ("latent",)))),
    ("vae", "decoder/in/weight", "axes", ((8, ("latent",)), (128, ("hidden",)))),
    ("vae", "decoder/out/bias", "axes", ((64, ()),)),
    ("own_optimizer", "perceptron/out/weight", "optimizer", "adabelief"),
    ("own_optimizer", "perceptron/out/weight", "optimizer_place", "own_optimizer.lisp:63:14"),
]


@pytest.mark.parametrize(("example", "path", "asked", "answer"), QUESTIONS)
def test_why(example: str, path: str, asked: str, answer: object) -> None:
    assert getattr(ask(example, path), asked) == answer


def test_schedules() -> None:
    settings = {key: (value, knobs) for key, value, knobs in ask("char_lm", "gpt/token").settings}
    assert settings["lr"] == ("a schedule of the step", ("lr", "steps")) and settings["weight-decay"] == ("0.1", ())
    plain = {key: (value, knobs) for key, value, knobs in ask("digits", "perceptron/in/weight").settings}
    assert plain["lr"] == ("0.001", ("lr",))


def test_the_calls_lead_to_the_parameter() -> None:
    found = ask("char_lm", "gpt/block/0/feed-forward/up/weight")
    assert found.made.startswith("lisp-stdlib/nn.lisp:")
    lines = [int(place.split(":")[1]) for place in found.calls if place.startswith("char_lm")]
    assert lines[-1] == at("char_lm", ':name "up"'), "the innermost call is the linear's"
    assert at("char_lm", "(range layers)") in lines and at("char_lm", "(cross-entropy (gpt") in lines


def test_groups_and_frozen_parameters(tmp_path: Path) -> None:
    file = tmp_path / "groups.lisp"
    file.write_text('''(import "nn" "optim" "loss")
(defknob rate 0.1)
(defknob deep true)
(defdata d (csv "d.csv" :fields ((x f32 [4]) (y i32))))
(deflayer net (x)
  (let ((h (linear x 4 :name "a")))
    (linear (if deep (linear h 4 :name "b") h) 2 :name "c")))
(defun the-loss (x y) (cross-entropy (net x) y))
(defrun r :data (batches d :batch 2) :loss the-loss :steps 1 :frozen ("net/a/*")
  :optimizer (by-path ("**/bias" (sgd :lr 0.5)) (else (adam :lr rate))))
''')
    loaded = load(str(file), Selection())
    run = choose_run(loaded.experiment, None)
    assert why(loaded, run, "net/a/weight").frozen == "net/a/*" and why(loaded, run, "net/a/weight").optimizer == ""
    bias, weight = why(loaded, run, "net/b/bias"), why(loaded, run, "net/b/weight")
    assert (bias.optimizer, weight.optimizer) == ("sgd", "adam") and weight.settings == (("lr", "0.1", ("rate",)),)
    assert [knob for knob, _ in weight.exists] == ["deep"] and why(loaded, run, "net/c/bias").exists == ()
    with pytest.raises(SexpError) as wrong:
        why(loaded, run, "net/a/wieght")
    assert wrong.value.diagnostic.code == "E-RUN-082" and "net/a/weight" in " ".join(wrong.value.diagnostic.help)
    with pytest.raises(SexpError) as several:
        why(loaded, run, "bias")
    assert "several" in several.value.diagnostic.message


@pytest.mark.parametrize(("example", "variant", "knob", "other"), [
    ("digits", None, "hidden", "96"), ("digits", None, "batch", "32"), ("char_lm", "tiny", "d-model", "48"), ("char_lm", "tiny", "context", "16"),
    ("char_lm", "tiny", "layers", "3"), ("conv_digits", "tiny", "channels", "6"), ("vae", None, "latent", "5"), ("vae", None, "hidden", "60"),
    ("gpt2", "tiny", "vocabulary", "300"), ("gpt2", "tiny", "layers", "3"),
])  # fmt: skip
def test_by_trying(example: str, variant: str | None, knob: str, other: str) -> None:
    """With another value of a knob, exactly what the answer says may change does: sizes, initial values, existence."""
    t = traced(example, variant)
    changed = load(str(ROOT / f"examples/{example}.lisp"), Selection(variant=variant, sets=(f"{knob}={other}",)))
    before, after = t.traced, train_graph(changed, choose_run(changed.experiment, None))
    moved = 0
    for name, spec in before.params.items():
        answer, now = why(t.loaded, t.run, name, t.traced), after.params.get(name)
        if now is None:
            assert knob in dict(answer.exists), name
            continue
        for (size, knobs), new in zip(answer.axes, now.shape, strict=True):
            moved += size != new
            assert size == new or knob in knobs, f"{name}: {size} became {new}"
        assert spec.init == now.init or knob in answer.init_knobs, name
    for name in set(after.params) - set(before.params):
        sibling = next(n for n in before.params if n.rpartition("/")[2] == name.rpartition("/")[2] and "/block/0/" in n)
        assert knob in dict(why(t.loaded, t.run, sibling, t.traced).exists), name
    assert moved or knob in ("batch", "layers")


# --- lines ---

def became(example: str, text: str, variant: str | None = None, number: int = 0) -> Line:
    return line(traced(example, variant), at(example, text, number))


def ops(groups: object, phase: str = "forward") -> dict[str, int]:
    return {op: n for group in groups if group.phase == phase for op, n in group.ops}  # type: ignore[attr-defined]


LINES = [
    ("digits", "(linear (relu (linear image", None, {"relu": 1}, {"matmul": 2, "+": 2}, 4),
    ("digits", "(cross-entropy (perceptron", None, {}, {"softmax-cross-entropy": 1, "relu": 1, "matmul": 2}, 4),
    ("digits", "(defknob hidden", None, {}, {}, 0),
    ("digits", ":metrics ((accuracy", None, {}, {"matmul": 2}, 0),
    ("char_lm", '(table (param "token"', "tiny", {"param": 1}, {}, 1),
    ("char_lm", "(x (+ (embed table", "tiny", {"embed": 1, "+": 1}, {}, 0),
    ("char_lm", "(y (attend q k v", "tiny", {"attend": 2}, {}, 0),
    ("char_lm", ':name "query"', "tiny", {}, {"matmul": 2}, 2),
    ("char_lm", "(residual x feed-forward)", "tiny", {"+": 2}, {"gelu": 2, "matmul": 4, "normalize": 2}, 12),
    ("char_lm", "(dropout (linear (gelu", "tiny", {"gelu": 2}, {"matmul": 4, "random-bernoulli": 2}, 8),
    ("char_lm", "(range layers)", "tiny", {}, {"attend": 2, "gelu": 2}, 2 * 13),
    ("char_lm", "(destructuring-bind (b t d)", "tiny", {}, {}, 0),
    ("conv_digits", "(max-pool (relu", None, {"max-pool": 2, "relu": 2}, {"convolve": 2}, 4),
    ("conv_digits", "(x (stage x (* 2", None, {}, {"max-pool": 1, "convolve": 1}, 2),
    ("vae", "(+ reconstruction (* beta", None, {"+": 1}, {"mean": 1}, 0),
    ("vae", "(list (linear h latent", None, {}, {"matmul": 2}, 4),
]


@pytest.mark.parametrize(("example", "text", "variant", "written", "called", "parameters"), LINES)
def test_lines(example: str, text: str, variant: str | None, written: dict[str, int], called: dict[str, int], parameters: int) -> None:
    found = became(example, text, variant)
    assert len(found.parameters) == parameters
    own, below = ops(found.written), ops(found.called)
    assert {op: own.get(op) for op in written} == written and {op: below.get(op) for op in called} == called
    if not written:
        assert not own
    if not called:
        assert not below


def test_bytes_and_operations_of_a_line() -> None:
    found = became("digits", "(linear (relu (linear image")
    forward = next(group for group in found.written if group.phase == "forward")
    assert forward.bytes == 64 * 128 * 4 and forward.moved == 2 * forward.bytes, "relu of 64 x 128 floats, read and written"
    below = next(group for group in found.called if group.phase == "forward")
    products = 2 * 64 * 64 * 128 + 2 * 64 * 128 * 10
    assert below.flops == products + 64 * 128 + 64 * 10, "two products and two sums"
    assert ops(found.written, "backward") == {"relu-grad": 1}


def test_calls_of_a_line() -> None:
    (calls,) = became("digits", "(linear (relu (linear image").kernels
    assert calls.graph == "forward and backward"
    assert dict(calls.names) == {"addmm": 2, "relu": 1, "threshold_backward": 1, "mm": 3, "total": 2}, "two layers with their gradients, and relu between"
    products = 2 * 64 * 64 * 128 * 2 + 2 * 64 * 128 * 10 * 3  # that by the image is not needed
    assert calls.flops == products + 2 * 64 * 128 + 64 * 10 + 2 * 64 * 128 + 64 * 10, "and two sums, relu and its gradient, and two sums over samples"
    t = traced("digits")
    launches = line(Traced(t.loaded, t.run, "cuda"), at("digits", "(linear (relu (linear image"))
    assert {name for kernels in launches.kernels for name, _ in kernels.names} >= {"kernel", "library matmul"}


def test_what_a_knob_s_line_decides() -> None:
    found = became("digits", "(defknob hidden")
    assert "hidden: sizes of perceptron/in/weight, perceptron/in/bias, perceptron/out/weight" in found.decides and not found.kernels
    assert became("digits", "(linear (relu (linear image").decides == ()


def test_a_line_without_a_form() -> None:
    with pytest.raises(SexpError) as found:
        line(traced("digits"), 1)
    assert found.value.diagnostic.code == "E-RUN-082" and "line 2" in " ".join(found.value.diagnostic.help)


def test_forms_and_expansions_of_a_line() -> None:
    found = became("char_lm", "(residual x feed-forward)", "tiny")
    assert found.forms == ("(residual x feed-forward)",)
    assert found.expanded == ("(let ((skip x)) (+ skip (feed-forward (layer-norm skip))))",)
    inside = became("char_lm", ":loss lm-loss")
    assert inside.forms[0].startswith("(defrun pretrain"), "a line on which no list begins: the one that holds it"


def test_places_of_a_command_line() -> None:
    assert split("a/b.lisp:12") == ("a/b.lisp", 12) and split("a.lisp:12:3") == ("a.lisp", 12)
    assert split("a.lisp") is None and split("s3://x:80") is None
    with pytest.raises(SexpError) as found:
        line(traced("digits"), 10_000)
    assert found.value.diagnostic.code == "E-RUN-082"
