"""Layers that know the elements. Their values were compared with flashcart 0.1.0's element-conditioned model by hand (energies to its
float32 buffers, docs/decisions/0053); here each is compared with what it says."""

import numpy as np
import pytest
from oracle import Bench
from test_potential_oracle import bind, called

from sexpgpu.compiler import Selection, load
from sexpgpu.ir import postorder

SPECIES = np.array([1, 0, 1, 1])
PROGRAM = """
(import "flashcart")
(defun features (x) (list (product-layer x :correlation 3 :l-max 1 %(more)s)))
(defun messages (x attributes radial cutoff senders receivers species)
  (list (interaction x attributes radial senders receivers 2 :hidden [3] :l-max 1 :species species :elements 2 :element-features 2
                     :cutoff cutoff)))
(defun conditioned (x species) (list (product-layer x :correlation 3 :l-max 1 :species species :elements 2 %(more)s)))
"""


def run(tmp_path, name, args, fields, more="", params=None):
    """The result of a function, and its parameters by the end of their paths; `params` (path, shape) -> array."""
    file = tmp_path / "p.lisp"
    file.write_text(PROGRAM % {"more": more})
    results = called(load(str(file), Selection()), name, args, ("y",))
    bench, given = Bench(), {}
    for node in postorder(results.values()):
        if node.op == "input":
            bind(bench, node, fields[node.attrs["name"]])
        if node.op == "param":
            given[node.attrs["path"]] = params(node.attrs["path"], node.type.shape)
            bind(bench, node, given[node.attrs["path"]])
    return bench.run(**results)["y"], given


def drawn(path, shape):
    seed = sum(ord(c) * (i + 1) for i, c in enumerate(path.rpartition("product-layer")[2]))
    return np.random.default_rng(seed).standard_normal(shape)


@pytest.fixture(params=["", ":reduced true"])
def more(request):
    return request.param


def test_products_have_weights_for_each_element(tmp_path, more):
    """Atoms of one element get what that element's weights alone give all atoms; weights of 1 give the layer without elements."""
    x = np.random.default_rng(0).standard_normal((4, 9, 2))
    typed, plain = {"x": ("f32", (4, 9, 2)), "species": ("i32", (4,))}, {"x": ("f32", (4, 9, 2))}
    tables = lambda path, shape: drawn(path, shape) * 0.3  # noqa: E731
    both, _ = run(tmp_path, "conditioned", typed, {"x": x, "species": SPECIES}, more, tables)
    for element in (0, 1):
        alone, _ = run(tmp_path, "conditioned", typed, {"x": x, "species": np.full(4, element)}, more, tables)
        np.testing.assert_allclose(both[SPECIES == element], alone[SPECIES == element], rtol=1e-12)
        if more:  # the layer without elements has trained weights too: those of this element
            own, _ = run(tmp_path, "features", plain, {"x": x}, more, lambda path, shape, element=element: tables(path, (2, *_flat(shape)))[element].reshape(shape) if "path-weight" in path else tables(path, shape))
            np.testing.assert_allclose(alone, own, rtol=1e-12)
    ones, _ = run(tmp_path, "conditioned", typed, {"x": x, "species": SPECIES}, more, lambda path, shape: np.zeros(shape) if "path-weight" in path else tables(path, shape))
    without, _ = run(tmp_path, "features", plain, {"x": x}, more, lambda path, shape: np.zeros(shape) if "path-weight" in path else tables(path, shape))
    np.testing.assert_allclose(ones, without, rtol=1e-12)
    assert np.abs(both - without).max() > 1e-3


def _flat(shape):
    return (int(np.prod(shape)),)


def test_messages_see_the_elements_of_both_ends(tmp_path):
    """Another element at a sender or at a receiver changes what arrives, and an edge at the cutoff brings nothing."""
    rng = np.random.default_rng(1)
    fields = {"x": rng.standard_normal((4, 1, 2)), "attributes": rng.standard_normal((3, 4)), "radial": rng.standard_normal((3, 2)),
              "cutoff": np.array([0.7, 0.4, 0.0]), "senders": np.array([0, 1, 2]), "receivers": np.array([1, 2, 3]), "species": SPECIES}
    fields["radial"][2] = 0  # radial functions have the cutoff in them
    args = {k: ("i32" if k in ("senders", "receivers", "species") else "f32", np.shape(v)) for k, v in fields.items()}
    y, params = run(tmp_path, "messages", args, fields, params=drawn)
    assert all(any(f"/{end}/" in path for path in params) for end in ("receiver", "sender")), list(params)
    arrived = y - run(tmp_path, "messages", args, fields | {"radial": fields["radial"] * 0, "cutoff": fields["cutoff"] * 0}, params=drawn)[0]
    assert np.abs(arrived[1]).max() > 1e-6 and np.abs(arrived[3]).max() < 1e-12  # the third edge is at the cutoff
    for atom, changed in ((0, {1}), (1, {1, 2}), (2, {2})):  # edges 0 -> 1 and 1 -> 2
        species = SPECIES.copy()
        species[atom] ^= 1
        other, _ = run(tmp_path, "messages", args, fields | {"species": species}, params=drawn)
        assert {i for i in range(4) if np.abs(other[i] - y[i]).max() > 1e-12} == changed
