"""The text form, verify, and the executable."""

import math
import subprocess
import sys
import time

import pytest
import torch

from sexpgpu.backends.interpreter import Executable, emit
from sexpgpu.ir import TensorType, intern
from sexpgpu.ir.text import TextProblem, graph_hash, graph_text, read_graph
from sexpgpu.ops import build, constant
from sexpgpu.ops.verify import VerifyError, verify
from sexpgpu.passes.autodiff import grad
from sexpgpu.passes.simplify import simplify


def network():
    x, y = build("input", name="x", shape=(64, 64)), build("input", name="y", shape=(64,), dtype="i32")
    sizes = (("w", (64, 128)), ("b", (128,)), ("v", (128, 10)), ("c", (10,)))
    w, b, v, c = (build("param", path=p, shape=s) for p, s in sizes)
    h = build("relu", build("+", build("matmul", x, w), b))
    loss = build("mean", build("softmax-cross-entropy", build("+", build("matmul", h, v), c), y))
    return loss, (x, y), (w, b, v, c)


def test_text_reads_back_as_the_same_nodes():
    loss, _, params = network()
    odd = build("constant", value=math.nan, dtype="f32")
    results = {
        "loss": loss,
        'odd "name"\n': build("clamp", build("param", path='a "b" :c [d] é', shape=()), low=-math.inf),
        "n": build("+", odd, constant(-0.0, "f32")),
        "draw": build("random-bernoulli", shape=(2, 3), path="p/0", number=1, p=0.1),
        **{f"g{i}": g for i, g in enumerate(grad(loss, params))},
    }
    text = graph_text(results)
    again = read_graph(text)
    assert again == results and graph_text(again) == text
    verify(again)


def test_hash_is_stable_and_knows_no_order_of_making():
    a, b = (build("param", path=p, shape=(2,)) for p in "ab")
    first = {"s": build("+", a, b), "t": build("*", a, b)}
    second = dict(reversed(first.items()))
    assert graph_hash(first) == graph_hash(second)
    assert graph_hash(first) != graph_hash({"s": build("+", b, a), "t": first["t"]})
    code = (
        "from sexpgpu.ops import build\nfrom sexpgpu.ir.text import graph_hash\n"
        "b=build('param',path='b',shape=(2,)); a=build('param',path='a',shape=(2,))\n"
        "t=build('*',a,b); print(graph_hash({'t':t,'s':build('+',a,b)}))"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=_environment())
    assert other.stdout.strip() == graph_hash(first)


def _environment():
    import os

    return {**os.environ, "PYTHONHASHSEED": "77", "PYTHONPATH": ":".join(p for p in sys.path if p)}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "sexpgpu-ir 2\n",
        "sexpgpu-ir 1\n%0 f31[] = step\n",
        'sexpgpu-ir 1\nresult "a" %3\n',
        "sexpgpu-ir 1\n%0 i32[] = step :a [1\x00]]\n",
        "sexpgpu-ir 1\nnonsense\n",
    ],
)
def test_text_that_is_no_graph(text):
    with pytest.raises(TextProblem):
        read_graph(text)


def test_verify_catches_what_no_op_gives():
    a = build("param", path="a", shape=(2, 3))
    attrs = build("sum", a).attrs
    for wrong in (
        intern("exp", [a], {}, TensorType("f32", (3, 2))),
        intern("exp", [a], {}, TensorType("f64", (2, 3))),
        intern("exp", [a, a], {}, TensorType("f32", (2, 3))),
        intern("exq", [a], {}, TensorType("f32", (2, 3))),
        intern("exp", [a], {"axis": 1}, TensorType("f32", (2, 3))),
        intern("sum", [a], attrs, TensorType("f32", (), True)),
        intern("matmul", [a, a], {}, TensorType("f32", (2, 3))),
    ):
        with pytest.raises(VerifyError):
            verify({"y": build("neg", wrong)})


def test_it_agrees_with_eager_torch_and_costs_no_more():
    loss, (x, y), params = network()
    results = simplify({"loss": loss, **{p.attrs["path"]: g for p, g in zip(params, grad(loss, params), strict=True)}})
    executable = Executable(results)
    torch.manual_seed(0)
    bind = {p: torch.randn(p.type.shape) * 0.1 for p in (x, *params)}
    bind[y] = torch.randint(0, 10, (64,), dtype=torch.int32)
    executable.check(bind)
    theirs = [bind[p].clone().requires_grad_() for p in params]

    def eager():
        h = torch.relu(bind[x] @ theirs[0] + theirs[1])
        value = torch.nn.functional.cross_entropy(h @ theirs[2] + theirs[3], bind[y].long())
        return value, *torch.autograd.grad(value, theirs)

    def seconds(f):
        times = []
        for _ in range(60):
            start = time.perf_counter()
            f()
            times.append(time.perf_counter() - start)
        return min(times)

    for got, expected in zip(executable.run(bind).values(), eager(), strict=True):
        torch.testing.assert_close(got, expected.detach(), rtol=1e-4, atol=1e-6)
    assert seconds(lambda: executable.run(bind)) < 2.0 * seconds(eager)


def test_step_is_filled_in_and_a_missing_binding_is_named():
    a = build("param", path="a", shape=(2,))
    y = build("*", a, build("cast", build("step"), dtype="f32"))
    executable = Executable({"y": y, "a": a, "again": a})
    assert executable.leaves == [a]
    out = executable.run({a: torch.ones(2)}, step=3)
    assert out["y"].tolist() == [3.0, 3.0] and out["a"] is out["again"]
    with pytest.raises(ValueError, match="param"):
        executable.check({})
    with pytest.raises(ValueError, match="float64"):
        executable.check({a: torch.ones(2, dtype=torch.float64)})


def test_no_text_of_a_user_reaches_the_source():
    evil = "\n import os; os.abort() #"
    p = build("param", path=evil, shape=(2,))
    i = build("input", name=evil, shape=(2,))
    y = build("+", build("+", p, i), build("random-uniform", shape=(2,), path=evil))
    source, _ = emit.emit({evil: y}, Executable({"y": y}).leaves)
    assert "abort" not in source


def test_buffers_are_freed_after_their_last_use():
    a = build("param", path="a", shape=(2,))
    y = build("exp", build("sin", build("exp", a)))
    source, _ = emit.emit({"y": y}, [a])
    assert source.count("del ") == 3


def test_the_gradient_of_gelu_takes_a_cotangent_that_broadcasts():
    """Found by fuzzing: torch's gelu_backward fails, or worse, where the shapes differ."""
    x = build("input", name="x", dtype="f32", shape=(2, 8), batch=True)
    for shape in ((2, 1), (8,), ()):
        ct = build("input", name="ct", dtype="f32", shape=shape, batch=False)
        node = build("gelu-grad", x, ct)
        values = {x: torch.linspace(-2, 2, 16).reshape(2, 8), ct: torch.linspace(1, 3, ct.type.size).reshape(shape)}
        wide = values[ct].expand(2, 8).contiguous()
        got = Executable({"g": node}).run(values)["g"]
        assert torch.allclose(got, torch.ops.aten.gelu_backward(wide, values[x]))
