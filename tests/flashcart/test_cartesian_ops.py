"""What the oracle does not show: equivariance, higher ranks, empty and isolated rows, orders of edges, dtypes, mistakes."""

import numpy as np
import pytest
import torch
from oracle import Bench, derivatives, dot

from sexpgpu.ir import TensorType
from sexpgpu.ops import OpProblem, build
from sexpgpu.ops import table as op_table
from sexpgpu.ops.cartesian import algebra
from sexpgpu.ops.cartesian import product as product_
from sexpgpu.ops.cartesian.algebra import Path, components, multinomial, paths, terms
from sexpgpu.ops.cartesian.product import Form
from sexpgpu.passes.autodiff import grad

RNG = np.random.default_rng(5)


def rotate(x: np.ndarray, r: np.ndarray) -> np.ndarray:
    """Features [n (l+1)² c] with every index of every rank turned by r, by way of full tensors."""
    out, top = np.zeros_like(x), algebra.rank_of(x.shape[1])
    for rank in range(top + 1):
        block = x[:, rank**2 : (rank + 1) ** 2]
        full = np.zeros((len(x), *(3,) * rank, x.shape[2]))
        stored = {}
        for i, e in enumerate(components(rank)):
            stored[e] = block[:, i]
        for a, b, c in sorted(algebra.monomials(rank), key=lambda e: e[2]):
            if c > 1:
                stored[a, b, c] = -stored[a + 2, b, c - 2] - stored[a, b + 2, c - 2]
        for place in np.ndindex(*(3,) * rank):
            full[(slice(None), *place)] = stored[tuple(place.count(k) for k in range(3))]
        for axis in range(rank):
            full = np.moveaxis(np.tensordot(r, full, (1, axis + 1)), 0, axis + 1)
        for i, e in enumerate(components(rank)):
            out[:, rank**2 + i] = full[(slice(None), *(k for k in range(3) for _ in range(e[k])))]
    return out


def orthogonal(improper: bool) -> np.ndarray:
    q, _ = np.linalg.qr(RNG.standard_normal((3, 3)))
    q *= np.sign(np.linalg.det(q))
    return -q if improper else q


@pytest.mark.parametrize("ranks", [(3, 3, 3), (4, 4, 4), (5, 2, 4)], ids=str)
@pytest.mark.parametrize("improper", [False, True])
def test_product_turns_with_its_operands(ranks, improper):
    l1, l2, top = ranks
    r = orthogonal(improper)
    x, y = RNG.standard_normal((2, (l1 + 1) ** 2, 3)), RNG.standard_normal((2, (l2 + 1) ** 2, 3))
    w = RNG.standard_normal((2, len(paths(l1, l2, top)) * 3))
    got = []
    for a, b in ((x, y), (rotate(x, r), rotate(y, r))):
        bench = Bench()
        out = build("tensor-product", bench.leaf("a", a), bench.leaf("b", b), bench.leaf("w", w),
                    **{"l-max": top, "reduce-paths": True})
        got.append(bench.run(out=out)["out"])
    np.testing.assert_allclose(rotate(got[0], r), got[1], atol=1e-11 * np.abs(got[0]).max())


@pytest.mark.parametrize("rank", range(7))
def test_direction_tensors_turn_and_contract_to_legendre(rank):
    n, q = (v / np.linalg.norm(v) for v in RNG.standard_normal((2, 3)))
    bench = Bench()
    got = bench.run(y=build("cartesian-expand", bench.leaf("n", [n]), **{"l-max": rank}))["y"]
    r = orthogonal(True)
    other = Bench()
    turned = other.run(y=build("cartesian-expand", other.leaf("n", [r @ n]), **{"l-max": rank}))["y"]
    np.testing.assert_allclose(rotate(got[..., None], r)[..., 0], turned, atol=1e-12)
    stored = dict(zip(components(rank), got[0, rank**2 :], strict=True))
    for a, b, c in sorted(algebra.monomials(rank), key=lambda e: e[2]):
        if c > 1:
            stored[a, b, c] = -stored[a + 2, b, c - 2] - stored[a, b + 2, c - 2]
    contracted = sum(multinomial(e) * t * np.prod(q**np.array(e)) for e, t in stored.items())
    assert contracted == pytest.approx(np.polynomial.legendre.legval(n @ q, [0] * rank + [1]), abs=1e-12)


@pytest.mark.parametrize("path", paths(4, 4, 4), ids=str)
def test_direction_tensors_multiply_to_direction_tensors(path):
    n = RNG.standard_normal(3)
    n /= np.linalg.norm(n)
    bench = Bench()
    expanded = bench.run(y=build("cartesian-expand", bench.leaf("n", [n]), **{"l-max": 4}))["y"][0]
    found = np.zeros(2 * path.result + 1)
    for i, j, k, c in terms(path):
        found[k] += float(c) * expanded[path.first**2 + i] * expanded[path.second**2 + j]
    np.testing.assert_allclose(found, expanded[path.result**2 : (path.result + 1) ** 2], atol=1e-13)


def test_operands_change_places():
    for path in paths(3, 3, 3):
        other = {(t.j, t.i, t.k): t.coefficient for t in terms(Path(path.second, path.first, path.result))}
        assert {(t.i, t.j, t.k): t.coefficient for t in terms(path)} == other


def graph(bench: Bench, nodes: int, edges: int, channels: int, top: int, order: np.ndarray | None = None):
    rng = np.random.default_rng(3)
    receivers, senders = np.sort(rng.integers(0, nodes, edges)), rng.integers(0, nodes, edges)
    x, y = rng.standard_normal((nodes, (top + 1) ** 2, channels)), rng.standard_normal((edges, (top + 1) ** 2))
    w = rng.standard_normal((edges, len(paths(top, top, top)) * channels))
    order = np.arange(edges) if order is None else order
    return (bench.leaf("x", x), bench.leaf("y", y[order]), bench.leaf("w", w[order]),
            bench.leaf("s", senders[order], "i32"), bench.leaf("r", receivers[order], "i32"))


def results(bench: Bench, operands, **attrs):
    out = build("tensor-product", *operands, **attrs)
    c = bench.leaf("c", RNG.standard_normal(out.type.shape))
    wrt = list(operands[:3])
    first, second = derivatives(out, wrt, c, [bench.leaf(f"v{i}", np.cos(np.arange(x.type.size) + i).reshape(x.type.shape))
                                              for i, x in enumerate(wrt)])
    return bench.run(out=out, **{str(i): g for i, g in enumerate(first + second)})


@pytest.mark.parametrize("attrs", [{}, {"reduce-paths": True}], ids=str)
def test_zero_edges_and_isolated_nodes(attrs):
    bench = Bench()
    got = results(bench, graph(bench, 4, 0, 2, 2), **attrs)
    assert not got["out"].any() and not got["0"].any() and got["1"].shape == (0, 9)
    bench = Bench()
    out = build("tensor-product", *graph(bench, 30, 5, 2, 2), **attrs)
    got = bench.run(out=out)["out"]
    assert ((np.abs(got).reshape(30, -1).sum(1) > 0).sum()) <= 5


def test_zero_rows():
    bench = Bench()
    x = bench.leaf("x", np.zeros((0, 4, 3)))
    w = bench.leaf("w", np.ones(len(paths(1, 1, 2)) * 3))
    out = build("tensor-product", x, x, w, **{"l-max": 2, "reduce-paths": True})
    y = build("equivariant-linear", out, *(bench.leaf(f"w{i}", np.ones((3, 2))) for i in range(3)))
    got = bench.run(y=y, g=grad(build("sum", y), [w])[0])
    assert got["y"].shape == (0, 9, 2) and not got["g"].any()


def test_edges_in_any_order_give_the_same():
    c = np.random.default_rng(9)
    order = c.permutation(40)
    got = []
    for o in (None, order):
        bench = Bench()
        out = build("tensor-product", *graph(bench, 7, 40, 2, 3, o))
        got.append(bench.run(out=out)["out"])
    np.testing.assert_allclose(got[0], got[1], atol=1e-12 * np.abs(got[0]).max())


def test_third_derivative_agrees_with_differences():
    bench = Bench()
    x = bench.leaf("x", RNG.standard_normal((2, 9, 1)))
    w = bench.leaf("w", RNG.standard_normal(len(paths(2, 2, 2))))
    y = build("tensor-product", x, x, w, **{"l-max": 2, "reduce-paths": True, "symmetric": False})
    z = build("tensor-product", y, x, w, **{"l-max": 2, "reduce-paths": True})
    u = bench.leaf("u", RNG.standard_normal((2, 9, 1)))
    scalar = dot(z, u)
    for _ in range(2):
        scalar = dot(grad(scalar, [x])[0], u)
    third = grad(scalar, [x])[0]
    found = bench.run(t=third)["t"]
    bump = np.zeros_like(found)
    values = bench.bindings[x]
    for i in range(found.size):
        kept = float(values.view(-1)[i])
        side = []
        for h in (1e-4, -1e-4):
            values.view(-1)[i] = kept + h
            side.append(bench.run(s=scalar)["s"])
        values.view(-1)[i] = kept
        bump.reshape(-1)[i] = (side[0] - side[1]) / 2e-4
    np.testing.assert_allclose(found, bump, rtol=1e-6, atol=1e-6 * np.abs(found).max())


def test_bf16_is_summed_in_float32():
    rng = np.random.default_rng(2)
    count = 3000
    bench = Bench("bf16")
    x, w = bench.leaf("x", np.ones((1, 1, 2))), bench.leaf("w", np.ones((count, 2)))
    y = bench.leaf("y", rng.integers(1, 3, (count, 1)))
    edges = bench.leaf("s", np.zeros(count, int), "i32"), bench.leaf("r", np.zeros(count, int), "i32")
    out = build("tensor-product", x, y, w, *edges)
    assert out.type.dtype == "bf16"
    exact = torch.tensor(float(bench.bindings[y].double().sum())).bfloat16()
    assert (bench.run(out=out)["out"] == float(exact)).all()


def test_threads_do_not_change_a_bit():
    before = torch.get_num_threads()
    got = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        bench = Bench("f32")
        out = build("tensor-product", *graph(bench, 9, 500, 8, 2))
        got.append(bench.run(out=out)["out"])
    torch.set_num_threads(before)
    np.testing.assert_array_equal(*got)


def t(*shape: int, dtype: str = "f32"):
    return build("input", name="x" + "-".join(map(str, shape)), dtype=dtype, shape=shape, batch=False)


X, Y, W = t(5, 4, 3), t(7, 9), t(7, len(paths(1, 2, 2)) * 3)
S, R = t(7, dtype="i32"), t(7, dtype="i64")
MISTAKES = [
    ("E-SHAPE-014", "needs two operands and weights", lambda: build("tensor-product", X, Y)),
    ("E-SHAPE-030", "(l+1)²", lambda: build("tensor-product", t(5, 6, 3), Y, W)),
    ("E-SHAPE-030", "last axis of 3", lambda: build("cartesian-expand", t(5, 2), **{"l-max": 2})),
    ("E-SHAPE-015", "integer of 0 or more", lambda: build("cartesian-expand", t(5, 3), **{"l-max": -1})),
    ("E-SHAPE-015", "integer of 0 or more", lambda: build("tensor-product", X, X, W, **{"l-max": -1})),
    ("E-SHAPE-031", "1+1+1 is odd", lambda: build("tensor-product", X, X, W, paths=((1, 1, 1),))),
    ("E-SHAPE-031", "no triangle", lambda: build("tensor-product", X, Y, W, paths=((0, 1, 3),))),
    ("E-SHAPE-031", "is outside", lambda: build("tensor-product", X, Y, W, paths=((3, 1, 2),))),
    ("E-SHAPE-031", "given twice", lambda: build("tensor-product", X, Y, W, paths=((0, 0, 0), (0, 0, 0)))),
    ("E-SHAPE-031", "gives rank 0", lambda: build("tensor-product", X, Y, W, paths=((1, 0, 1),))),
    ("E-SHAPE-031", "names no path", lambda: build("tensor-product", X, Y, W, paths=())),
    ("E-SHAPE-031", "[l1 l2 l3]", lambda: build("tensor-product", X, Y, W, paths=((1, 1),))),
    ("E-SHAPE-031", "l1 >= l2", lambda: build("tensor-product", X, X, W, symmetric=True, paths=((0, 0, 0), (0, 1, 1)))),
    ("E-SHAPE-031", "no path makes rank 4", lambda: build("tensor-product", X, Y, W, **{"l-max": 4})),
    ("E-SHAPE-032", "same tensor twice", lambda: build("tensor-product", X, t(5, 4, 3, dtype="f64"), W, symmetric=True)),
    ("E-SHAPE-033", "3 channels do not pair with 2", lambda: build("tensor-product", X, t(5, 4, 2), W)),
    ("E-SHAPE-034", "paths of 3 channels", lambda: build("tensor-product", X, Y, t(7, 5), S, R)),
    ("E-SHAPE-035", "together", lambda: build("tensor-product", X, Y, W, S)),
    ("E-SHAPE-035", "together", lambda: build("tensor-product", X, Y, W, S, R, R)),
    ("E-SHAPE-035", "differ: 7 and 8", lambda: build("tensor-product", X, Y, W, S, t(8, dtype="i32"))),
    ("E-SHAPE-035", "indices need one axis", lambda: build("tensor-product", X, Y, W, t(7, 1, dtype="i32"), R)),
    ("E-SHAPE-035", "7 rows, and there are 6 edges", lambda: build("tensor-product", X, Y, W, t(6, dtype="i32"), t(6, dtype="i32"))),
    ("E-SHAPE-035", "rows of the first operand", lambda: build("tensor-product", X, Y, W)),
    ("E-SHAPE-012", "i32 or i64", lambda: build("tensor-product", X, Y, W, S, t(7))),
    ("E-SHAPE-002", "dtypes differ", lambda: build("tensor-product", X, Y, t(7, 24, dtype="f64"), S, R)),
    ("E-SHAPE-006", "float", lambda: build("tensor-product", X, Y, t(7, 24, dtype="i32"), S, R)),
    ("E-SHAPE-003", "columns", lambda: build("equivariant-linear", t(5, 7), t(2, 4), t(3, 4))),
    ("E-SHAPE-001", "4 and 5 outputs", lambda: build("equivariant-linear", X, t(3, 4), t(3, 5))),
    ("E-SHAPE-030", "a weight for each", lambda: build("equivariant-linear", X, t(3, 4))),
    ("E-SHAPE-007", "2 axes", lambda: build("equivariant-linear", X, t(3), t(3))),
    ("E-SHAPE-007", "features need", lambda: build("equivariant-linear", t(5), t(3, 4))),
    ("E-SHAPE-014", "a weight for each", lambda: build("equivariant-linear", X)),
    ("E-SHAPE-015", "l-max", lambda: build("equivariant-linear", X, t(3, 4), t(3, 4), **{"l-max": -2})),
]


@pytest.mark.parametrize("code, words, make", MISTAKES, ids=lambda v: v if isinstance(v, str) else "")
def test_mistakes_have_codes_before_anything_runs(code, words, make):
    with pytest.raises(OpProblem) as caught:
        make()
    assert caught.value.code == code and words in caught.value.message + caught.value.help, caught.value.message


def test_paths_can_be_chosen():
    chosen = ((0, 0, 0), (1, 1, 0), (1, 0, 1))
    node = build("tensor-product", X, X, t(5, 9), paths=chosen)
    assert node.type == TensorType("f32", (5, (2 + 3) * 3)) and node.attrs["l-max"] == 1


def test_rows_of_the_result_are_by_rank_component_path():
    form = Form(1, 1, 1, 1, paths(1, 1, 1), False)
    assert form.rows == ((0, 0), (1, 0), (2, 0), (3, 0), (2, 1), (3, 1), (2, 2), (3, 2))


def test_whoever_asks_first_decides_no_device():
    """Tables are made once a process: first on `meta`, as a plan without a device does, and then where there are numbers."""
    node = build("cartesian-expand", build("input", name="v", dtype="f64", shape=(1, 3), batch=False), **{"l-max": 7})
    with torch.device("meta"):
        assert op_table()["cartesian-expand"].reference(torch, node, [torch.ones(1, 3, dtype=torch.float64)]).is_meta
    found = op_table()["cartesian-expand"].reference(torch, node, [torch.tensor([[0.0, 0.0, 1.0]], dtype=torch.float64)])
    assert found[0, :4].tolist() == [1.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize(("edges", "shared", "reduced"), [(True, False, False), (True, True, True), (False, False, True), (False, True, False)])
def test_a_part_of_the_edges_at_a_time_gives_the_same(monkeypatch, edges, shared, reduced):
    """And no more paths are held than there is room for."""
    b, rows, nodes = Bench(), 23, 7 if edges else 23
    size = len(paths(2, 1, 2)) * 3
    wrt = [b.leaf("x", RNG.standard_normal((nodes, 9, 3))), b.leaf("y", RNG.standard_normal((rows, 4))), b.leaf("w", RNG.standard_normal(size if shared else (rows, size)))]
    ends = [b.leaf(n, RNG.integers(0, nodes, rows), "i32") for n in ("senders", "receivers")] if edges else []
    out = build("tensor-product", *wrt, *ends, **{"l-max": 2, "reduce-paths": reduced})
    first, second = derivatives(out, wrt, b.leaf("c", RNG.standard_normal(out.type.shape)), [b.leaf(f"v{i}", RNG.standard_normal(x.type.shape)) for i, x in enumerate(wrt)])
    results = {"out": out} | {str(i): g for i, g in enumerate([*first, *second])}
    whole = b.run(**results)
    held, derive = [], product_._derivative

    def watched(torch_, tables, target, x, y, w, c):
        held.append(max(len(t) for t in (x, y, c) if t is not None))
        return derive(torch_, tables, target, x, y, w, c)

    monkeypatch.setattr(product_, "_derivative", watched)
    components = sum(2 * p.result + 1 for p in paths(2, 1, 2))
    monkeypatch.setattr(product_, "TOGETHER", 5 * components * 3 * 8)
    parts = b.run(**results)
    assert max(held) == 5 and len(held) > 5 * 8 and len(held) % 5 == 0  # 23 rows are 5 times 5
    for name, value in whole.items():
        np.testing.assert_allclose(parts[name], value, rtol=1e-13, atol=1e-13)
