"""Every value of the oracle below the model: tables, expansion, single paths, graphs, variants, linear, geometry."""

from fractions import Fraction

import numpy as np
import pytest
from oracle import Bench, checks, close, derivatives, dot, oracle

from sexpgpu.ops import build
from sexpgpu.ops.cartesian import algebra
from sexpgpu.ops.cartesian.algebra import Path, paths
from sexpgpu.passes.autodiff import grad

ORACLE = oracle()


@pytest.mark.parametrize("key", ORACLE["bilinear_tables"]["tables"])
def test_tables_of_exact_fractions(key):
    expected = ORACLE["bilinear_tables"]["tables"][key]
    got = [[t.k, t.i, t.j, t.coefficient] for t in algebra.terms(Path(*map(int, key.split(","))))]
    assert got == [[k, i, j, Fraction(c)] for k, i, j, c in expected]


def test_names_and_order_of_components():
    for rank, names in ORACLE["about"]["component_names"].items():
        assert [algebra.component_name(e) for e in algebra.components(int(rank))] == names


@pytest.mark.parametrize("entry", ORACLE["expansion"], ids=lambda e: str(e["dir"]))
def test_expansion_with_two_derivatives(entry):
    b = Bench()
    n, ct, v = b.leaf("n", [entry["dir"]]), b.leaf("ct", [entry["cotangent"]]), b.leaf("v", [entry["v"]])
    y = build("cartesian-expand", n, **{"l-max": entry["l_max"]})
    (g,) = grad(dot(y, ct), [n])
    (second,) = grad(dot(g, v), [n])
    got = b.run(y=y, g=g, second=second)
    close(got["y"], entry["values"])
    close(got["g"], entry["grad_dir_unprojected"])
    close(got["second"], entry["second_d_dir"])


def test_expansion_from_raw_vectors():
    entry = ORACLE["expansion_from_raw_vectors"]
    b = Bench()
    x = b.leaf("x", np.reshape(entry["vectors"], (2, 3)))
    length = build("sqrt", build("sum", build("*", x, x), axis=(1,), **{"keep-dims": True}))
    y = build("cartesian-expand", build("/", x, length), **{"l-max": 3})
    got = b.run(y=y, g=grad(dot(y, b.leaf("ct", entry["cotangent_row"])), [x])[0])
    close(got["y"], entry["values"])
    close(got["g"], entry["grad_vectors"])


@pytest.mark.parametrize("entry", ORACLE["single_path"], ids=lambda e: str(e["path_index"]))
def test_single_path_with_its_derivatives(entry):
    l1, l2, l3 = entry["rank_in1"], entry["rank_in2"], entry["rank_out"]
    assert paths(3, 3, 3)[entry["path_index"]] == (l1, l2, l3)
    b = Bench()
    full = lambda rank, values: np.concatenate([np.zeros(rank * rank), values])[None]  # noqa: E731
    x, y, w = b.leaf("x", full(l1, entry["in1"])), b.leaf("y", full(l2, entry["in2"])), b.leaf("w", [[1.0]])
    below = [next(p for p in paths(l1, l2, l3) if p.result == rank) for rank in range(l3)]
    chosen = tuple(tuple(p) for p in (*below, Path(l1, l2, l3)))
    w = b.leaf("w", [[0.0] * l3 + [1.0]])
    out = build("tensor-product", x, y, w, paths=chosen, **{"l-max": l3, "reduce-paths": True})
    ct = b.leaf("ct", full(l3, entry["cotangent"])[..., None])
    g1, g2, gw = grad(dot(out, ct), [x, y, w])
    got = b.run(out=out, g1=g1, g2=g2, gw=gw)
    close(got["out"][0, l3**2 :], entry["out"])
    close(got["g1"][0, l1**2 :], entry["grad_in1"])
    close(got["g2"][0, l2**2 :], entry["grad_in2"])
    close(got["gw"][0, -1:], entry["grad_weight"])


def index(b: Bench):
    i, j = (np.array(ORACLE["graph_index"][k]) for k in ("receiver_idx_i", "sender_idx_j"))
    return b.leaf("senders", j, "i32"), b.leaf("receivers", i, "i32")


def ramp(size: int, a: int, b: int, m: int) -> np.ndarray:
    half = (m - 1) // 2
    return ((a * np.arange(size) + b) % m - half) / half


@pytest.mark.parametrize("name", ["graph_l2", "graph_l3"])
def test_graph_with_first_and_second_derivatives(name):
    g = ORACLE[name]
    b = Bench()
    size1, size2 = (g["l1"] + 1) ** 2, (g["l2"] + 1) ** 2
    shape = {"in1": (6, size1, 2), "in2": (20, size2), "w": (20, 2 * g["n_paths"]), "c": g["out_shape"]}
    shape |= {"v1": shape["in1"], "v2": shape["in2"], "vw": shape["w"]}
    node = {k: b.leaf(k, np.reshape(g[k], s)) for k, s in shape.items()}
    wrt = [node["in1"], node["in2"], node["w"]]
    out = build("tensor-product", *wrt, *index(b), **{"l-max": g["lo"]})
    first, second = derivatives(out, wrt, node["c"], [node["v1"], node["v2"], node["vw"]])
    names = ["g1", "g2", "gw", "dc", "d1", "d2", "dw"]
    got = b.run(out=out, **dict(zip(names, first + second, strict=True)))
    for key, value in got.items():
        close(value, g[key])


G3, G2 = ORACLE["graph_l3"], ORACLE["graph_l2"]
IN1, IN2, W = (np.reshape(G3[k], (n, -1)) for k, n in (("in1", 6), ("in2", 20), ("w", 20)))
IN1_L2, IN2_L2, W_L2 = (np.reshape(G2[k], (n, -1)) for k, n in (("in1", 6), ("in2", 20), ("w", 20)))
ROWWISE = (IN1, W[:6, :32], W[6:12])
#: variant -> in1, in2 and w by the oracle's words
VARIANTS = {
    "l3_reduce": (IN1, IN2, W),
    "l3_shared": (IN1, IN2, W[0]),
    "l3_shared_reduce": (IN1, IN2, W[0]),
    "l3_no_vw": (IN1, IN2, W),
    "l3_f12": (IN2[:6], W[:, :32], W),
    "l3_f22": (IN1, W[:, :32], W),
    "l3_rowwise_f22": ROWWISE,
    "l3_rowwise_f22_reduce": ROWWISE,
    "l3_rowwise_f21": (IN1, IN2[:6], W[6:12]),
    "l3_sym": (IN1, None, W[:6, :30]),
    "l3_sym_to0_shared_ones": (IN1, None, np.ones(8)),
    "l233": (IN1_L2, IN2, W[:, :34]),
    "l033": (IN1[:, :2], IN2, W[:, :8]),
    "l133": (IN1[:, :8], IN2, W[:, :20]),
    "l332": (IN1, IN2, W[:, :34]),
    "l330": (IN1, IN2, W[:, :8]),
    "l003": (IN1[:, :2], IN2[:, :1], W[:, :2]),
    "l2_reduce": (IN1_L2, IN2_L2, W_L2),
}


def test_variants_are_all_here():
    assert set(ORACLE["variants"]) == set(VARIANTS)


def variant(b: Bench, name: str):
    """The product of a variant, its distinct operands, and the nodes of c and the tangents."""
    v, (in1, in2, w) = ORACLE["variants"][name], VARIANTS[name]
    (l1, l2, top), (f1, f2) = v["ranks"], v["features"]
    x = b.leaf("in1", in1.reshape(len(in1), (l1 + 1) ** 2, f1))
    y = x if in2 is None else b.leaf("in2", in2.reshape(len(in2), (l2 + 1) ** 2, f2))
    weights = b.leaf("w", w)
    edges = index(b) if v["scatter"] else ()
    # a rank that no path reaches is refused here, and left out there
    attrs = {"l-max": min(top, l1 + l2), "reduce-paths": v["reduce_paths"], "symmetric": v["symmetric"]}
    out = build("tensor-product", x, y, weights, *edges, **attrs)
    wrt = [x, weights] if y is x else [x, y, weights]
    c = b.leaf("c", ramp(out.type.size, 37, 11, 101).reshape(out.type.shape))
    tangents = [b.leaf("v1", ramp(x.type.size, 53, 7, 97).reshape(x.type.shape))]
    if y is not x:
        tangents.append(b.leaf("v2", ramp(y.type.size, 29, 3, 89).reshape(y.type.shape)))
    vw = ramp(weights.type.size, 61, 5, 83).reshape(weights.type.shape)
    tangents.append(b.leaf("vw", 0 * vw if v["vw_zero"] else vw))
    return out, wrt, c, tangents


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_with_first_and_second_derivatives(name):
    v = ORACLE["variants"][name]
    b = Bench()
    out, wrt, c, tangents = variant(b, name)
    first, second = derivatives(out, wrt, c, tangents)
    names = ["g1", "g2", "gw"] if len(wrt) == 3 else ["g1", "gw"]
    names += ["dc", *(n.replace("g", "d") for n in names)]
    got = b.run(out=out, **dict(zip(names, first + second, strict=True)))
    assert int(np.prod(v["out_shape"])) == out.type.size
    close(got["out"].reshape(-1)[:8], v["first8"])
    for key, value in got.items():
        checks(value, v[key])


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_in_float32(name):
    got = []
    for dtype in ("f64", "f32"):
        b = Bench(dtype)
        out, wrt, c, tangents = variant(b, name)
        first, second = derivatives(out, wrt, c, tangents)
        got.append(b.run(out=out, **{str(i): g for i, g in enumerate(first + second)}))
    for key, wide in got[0].items():
        assert np.max(np.abs(wide - got[1][key])) <= 2e-5 * np.max(np.abs(wide))


def test_linear():
    e = ORACLE["linear"]
    b = Bench()
    x = b.leaf("x", [e["x"]])
    weights = [b.leaf(f"w{i}", np.reshape(w, (2, -1)).T) for i, w in enumerate(e["weights"])]
    scaled = [build("*", w, b.leaf(f"s{i}", e["scales"][i])) for i, w in enumerate(weights)]
    y = build("equivariant-linear", x, *scaled, **{"l-max": e["out_l_max"]})
    gx, *gw = grad(dot(build("reshape", y, shape=(1, 32)), b.leaf("ct", [e["cotangent"]])), [x, *weights])
    got = b.run(y=y, gx=gx, **{f"g{i}": g for i, g in enumerate(gw)})
    close(got["y"], e["y"])
    close(got["gx"], e["grad_x"])
    for i, expected in enumerate(e["grad_weights"]):
        close(got[f"g{i}"].T, expected)


def chebyshev(lengths, count: int, r_max: float):
    """T_0 … of cos(π r / r_max): cos k π r / r_max. [edges count]."""
    order = build("cast", build("iota", count=count), dtype="f64")
    angle = build("*", build("reshape", lengths, shape=(lengths.type.size, 1)), order)
    t = build("cos", build("*", angle, build("constant", value=float(np.pi / r_max), dtype="f64")))
    return t


def number(value: float):
    return build("constant", value=value, dtype="f64")


@pytest.mark.parametrize("case", ["case_l1_1", "case_l1_0"])
def test_geometry_forces_and_their_derivatives(case):
    g = ORACLE["geometry"]
    e, b = g[case], Bench()
    positions = b.leaf("positions", np.reshape(g["positions"], (6, 3)))
    receivers, senders = b.leaf("receivers", g["edges_receiver"], "i32"), b.leaf("senders", g["edges_sender"], "i32")
    vectors = build("-", build("gather", positions, senders), build("gather", positions, receivers))
    lengths = build("sqrt", build("sum", build("*", vectors, vectors), axis=(1,)))
    q = build("/", lengths, number(g["r_max"]))
    powers = [build("power", q, number(p)) for p in (6.0, 7.0, 8.0)]
    envelope = number(1.0)
    for scale, p in zip((-28.0, 48.0, -21.0), powers, strict=True):
        envelope = build("+", envelope, build("*", number(scale), p))
    basis = build("*", chebyshev(lengths, g["n_radial"], g["r_max"]), build("reshape", envelope, shape=(22, 1)))
    columns = 2 * e["n_paths"]
    wr = b.leaf("wr", ((47 * np.arange(4 * columns) + 13) % 103 - 51).reshape(4, columns) / 51)
    weights = build("matmul", basis, wr)
    size = (e["l1"] + 1) ** 2
    in1 = b.leaf("in1", IN1[:, : 2 * size].reshape(6, size, 2))
    directions = build("/", vectors, build("reshape", lengths, shape=(22, 1)))
    attributes = build("cartesian-expand", directions, **{"l-max": 3})
    out = build("tensor-product", in1, attributes, weights, senders, receivers, **{"l-max": 3})
    energy = dot(b.leaf("c", ramp(out.type.size, 37, 11, 101).reshape(out.type.shape)), out)
    forces = build("neg", grad(energy, [positions])[0])
    u = b.leaf("u", ((31 * np.arange(18) + 4) % 29 - 14).reshape(6, 3) / 14)
    scalar = dot(forces, u)
    by_positions, by_in1, by_wr = grad(scalar, [positions, in1, wr])
    got = b.run(out=out, E=energy, forces=forces, G=scalar, p=by_positions, i=by_in1, w=by_wr, d=lengths, n=envelope, b=basis)
    close(got["d"], g["distances"])
    close(got["n"], g["envelope"])
    close(got["b"][0] / got["n"][0], g["basis_row0"])
    close(got["E"], e["E"])
    close(got["forces"], e["forces"])
    close(got["G"], e["G=sum(F*u)"])
    close(got["p"], e["dG_dpos"])
    checks(got["out"], e["out"])
    checks(got["i"], e["dG_din1"])
    checks(got["w"], e["dG_dWr"])
