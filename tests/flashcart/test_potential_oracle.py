"""The four complete tiny potentials of the oracle, written in Lisp over the library: energy, forces, stress."""

import numpy as np
import pytest
from oracle import Bench, close, oracle

from sexpgpu.compiler import Selection, load
from sexpgpu.experiment.trace import Registry, Trace
from sexpgpu.ir import Node, Origins, postorder
from sexpgpu.lisp.values import Tensor
from sexpgpu.ops import build
from sexpgpu.ops.cartesian.algebra import paths
from sexpgpu.passes.expand import expand_gradients
from sexpgpu.passes.precision import apply_precision

MODEL, GEOMETRY = oracle()["model"], oracle()["geometry"]
CELL = np.array([[4, 0, 0], [0.5, 4.2, 0], [0.1, -0.3, 4.4]])
SPECIES = [0, 1, 0, 1, 0, 0]

PROGRAM = """
(import "nn" "loss" "flashcart")
(defun potential (positions offsets cell volume species senders receivers graph scale)
  (let* ((strain (free-strain cell))
         (vectors (strained (edge-vectors positions offsets senders receivers) strain graph receivers))
         (lengths (vector-lengths vectors))
         (attributes (edge-attributes vectors lengths 2))
         (radial (* (chebyshev lengths :count 3 :r-max 2.3)
                    (reshape (polynomial-cutoff lengths :r-max 2.3) [(dim lengths 0) 1])))
         (x (reshape (embedding species 2 2) [6 1 2]))
         (found nil))
    (dolist (i (range 2))
      (let ((result (if (= i 1) 0 1)))
        (setq x (interaction x attributes radial senders receivers 2 :l-max %(edge)s :hidden [3] :neighbours 4 :norm %(norm)s))
        %(gate)s
        %(product)s
        (setq found (append found [(scalars x)]))))
    (let* ((site (* (per-element scale species) (reshape (scalar-mlp (concat found :axis -1) [3 1] :name "readout") [6])))
           (energy (sum-by site graph 1)))
      (list energy site (forces-of energy positions) (stress-of energy strain volume)))))
"""


def text(config: dict) -> str:
    products = config["correlation"] > 1
    reduced, norm = (str(config.get(k, False)).lower() for k in ("path_reduced_product", "layer_norm"))
    return PROGRAM % {
        "edge": "2" if products else "result",
        "norm": norm,
        "gate": "(setq x (gate x))" if config["nonlinearity"] else "",
        "product": f"(setq x (product-layer x :l-max result :reduced {reduced} :norm {norm}))" if products else "",
    }


def neighbours() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Receivers, senders and offsets of all pairs within 2.3, over the nearest images."""
    x = np.reshape(GEOMETRY["positions"], (6, 3))
    found = []
    for image in np.ndindex(3, 3, 3):
        shift = (np.array(image) - 1) @ CELL
        for i in range(6):
            for j in range(6):
                d = np.linalg.norm(x[j] - x[i] + shift)
                if 0 < d < 2.3:
                    found.append((i, j, shift))
    found.sort(key=lambda edge: edge[0])
    return np.array([e[0] for e in found]), np.array([e[1] for e in found]), np.array([e[2] for e in found])


def theirs(path: str, config: dict) -> tuple[str, int | None] | None:
    """The oracle's parameter of one of ours, and its rank where one tensor holds several."""
    words = path.split("/")
    last = words[-1]
    rank = last.removeprefix("weight-") if last.startswith("weight-") else None
    if words[0] == "embedding":
        return "embedding.weight", None
    if words[0] == "readout":
        return f"readout.readout_mlp.{2 * int(words[2])}.weight", None
    layer = int(words[1])
    if words[0] == "interaction":
        root = f"interactions.{layer}."
        if words[2] == "radial":
            return f"{root}radial_mlp.{2 * int(words[4])}.weight", None
        if words[2] == "rank-norm":
            return f"{root}layer_norm.weights", -1
        if words[2] == "skip" and layer == 0:
            return f"{root}skip_projection.weight", None
        name = {"first": "linear_first", "second": "linear_second", "skip": "skip_projection"}[words[2]]
        return f"{root}{name}.weight.{rank}", None
    if words[0] == "gate":
        root = f"nonlinearities.{layer}."
        if words[2] == "gate":
            return f"{root}gate_linear.{last}", None
        name = {"value": "value_linear", "out": "output_linear"}[words[2]]
        return f"{root}{name}.weight.{rank}", None
    root = f"products.{layer}."
    if words[2].startswith("path-weight-"):
        return f"{root}path_weights.{words[2][-1]}.delta", None
    if words[2] == "rank-norm":
        return f"{root}layer_norm.weights", -1
    if words[2].startswith("mix-"):
        return f"{root}product_linears.{words[2][-1]}.weight.{rank}", None
    name = {"skip": "skip_projection", "final": "final_linear"}[words[2]]
    return f"{root}{name}.weight.{rank}", None


def value(case: dict, path: str, shape: tuple[int, ...]) -> np.ndarray:
    layout = {name: (s, start) for name, s, start in case["param_layout_name_shape_start"]}

    def tensor(name: str) -> np.ndarray:
        size, start = layout[name]
        q = start + np.arange(int(np.prod(size)))
        return (((73 * q + 19) % 127 - 63) / 63).reshape(size)

    name, many = theirs(path, case["config"])
    if many is not None:
        return np.stack([tensor(f"{name}.{rank}") for rank in range(shape[0])])
    found = tensor(name)
    matrix = found.ndim == 2 and not path.startswith("embedding")
    return (found.T if matrix else found).reshape(shape)


@pytest.mark.parametrize("name", ["plain", "default_style", "path_reduced", "no_products"])
def test_tiny_potential(name, tmp_path):
    case = MODEL[name]
    file = tmp_path / "p.lisp"
    file.write_text(text(case["config"]))
    loaded = load(str(file), Selection())
    receivers, senders, offsets = neighbours()
    assert len(receivers) == case["n_edges"]
    fields = {
        "positions": np.reshape(GEOMETRY["positions"], (6, 3)), "offsets": offsets, "cell": CELL[None],
        "volume": [np.linalg.det(CELL)], "species": SPECIES, "senders": senders, "receivers": receivers,
        "graph": np.zeros(6), "scale": [1.5, 0.5],
    }  # fmt: skip
    whole = {"species", "senders", "receivers", "graph"}
    args = {k: ("i32" if k in whole else "f32", np.shape(v)) for k, v in fields.items()}
    results = called(loaded, "potential", args, ("energy", "site", "forces", "stress"))
    bench = Bench()
    count = 0
    for node in postorder(results.values()):
        if node.op == "input":
            bind(bench, node, fields[node.attrs["name"]])
        if node.op == "param":
            bind(bench, node, value(case, node.attrs["path"], node.type.shape))
            count += node.type.size
    assert count == case["n_params"]
    got = bench.run(**results)
    close(got["energy"], case["energy"])
    close(got["site"], case["node_energies"])
    close(got["forces"], case["forces"])
    close(got["stress"], case["stress_voigt"])
    close(-got["stress"] * np.linalg.det(CELL), case["virials"])


def called(loaded, name: str, args: dict, names: tuple[str, ...]) -> dict[str, Node]:
    """The results of a file's function on inputs of these dtypes and shapes, in float64."""
    leaves = [Tensor(build("input", name=k, dtype=d, shape=s, batch=False)) for k, (d, s) in args.items()]
    trace = Trace(name, Registry(), True, True)
    before, loaded.ev.trace = loaded.ev.trace, trace
    found = loaded.ev.call(loaded.ev.main.env.lookup(name), leaves, {}, None)
    trace.close()
    loaded.ev.trace = before
    results = dict(zip(names, (t.node for t in found), strict=True))
    return apply_precision(expand_gradients(results, Origins()), "f64")


def test_radial_functions(tmp_path):
    file = tmp_path / "r.lisp"
    file.write_text("""(import "flashcart")
(defun radial (r far)
  (list (chebyshev r :count 4 :r-min 0.2 :r-max 2.3 :affine true) (chebyshev r :count 4 :r-max 2.3)
        (polynomial-cutoff far :r-max 2.3 :order 6) (bessel r :count 3 :r-max 2.3)))""")
    radial, bench = oracle()["radial"], Bench()
    names = ("affine", "cosine", "cutoff", "bessel")
    results = called(load(str(file), Selection()), "radial", {"r": ("f32", (4,)), "far": ("f32", (7,))}, names)
    values = {"r": radial["affine"]["r"], "far": radial["cutoff"]["r"]}
    for node in postorder(results.values()):
        if node.op == "input":
            bind(bench, node, values[node.attrs["name"]])
    got = bench.run(**results)
    for name in names[:3]:
        close(got[name], radial[name]["values"])
    r = np.array(values["r"])[:, None]
    close(got["bessel"], np.sqrt(2 / 2.3) * np.sin(np.arange(1, 4) * np.pi * r / 2.3) / r)


def test_paths_in_lisp_are_those_of_the_op(tmp_path):
    file = tmp_path / "p.lisp"
    file.write_text("""(import "flashcart")
(defknob a 3) (defknob b 2) (defknob c 4)
(defun found () (product-paths a b c))
(defun symmetric () (product-paths a a b :symmetric true))""")
    ev = load(str(file), Selection()).ev
    for name, expected in (("found", paths(3, 2, 4)), ("symmetric", paths(3, 3, 2, True))):
        got = ev.call(ev.main.env.lookup(name), [], {}, None)
        assert [tuple(map(int, p)) for p in got] == [tuple(p) for p in expected]


def bind(bench: Bench, node: Node, array) -> None:
    bench.bindings[node] = bench.bindings.pop(bench.leaf("x", np.asarray(array), node.type.dtype))

