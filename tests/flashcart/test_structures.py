"""Extended XYZ, neighbour lists, statistics and packed batches."""

import gzip
import os
from fractions import Fraction

import numpy as np
import pytest
import torch

from sexpgpu.backends.cuda.cartesian.launch import LONGEST, Edges
from sexpgpu.compiler import Selection, choose_run, load, program, stages, train_graph
from sexpgpu.diagnostics import SexpError
from sexpgpu.experiment.model import Batches, DataSource
from sexpgpu.experiment.structures import ENERGIES, LENGTHS
from sexpgpu.run import storage
from sexpgpu.run.bind import bind
from sexpgpu.run.data.extxyz import edges_of, neighbours, parse, read
from sexpgpu.run.data.structures import capacities, pack, packed, statistics
from sexpgpu.run.measure import measured
from sexpgpu.settings import load as load_settings

OPTIONS = {
    "elements": ["H", "O"], "cutoff": 2.5, "energy-key": "energy", "forces-key": "forces", "stress-key": "stress",
    "length-unit": "angstrom", "energy-unit": "eV", "required": ["energy", "forces"],
}  # fmt: skip
WATER = """3
Properties=species:S:1:pos:R:3:forces:R:3 energy=-10.5 pbc="F F F" note="a b=c"
O 0 0 0 0.1 0 0
H 0.96 0 0 -0.1 0.25 0
H -0.24 0.93 0 0 -0.25 0
"""
CRYSTAL = """2
Lattice="2.0 0 0 0.3 2.2 0 0 0.1 2.4" Properties=species:S:1:pos:R:3:id:I:1:forces:R:3 stress="1 2 3 2 4 5 3 5 6" energy=-3 pbc="T T T"
O 0 0 0 1 1 2 3
H 1 1 1 2 -1 -2 -3
"""


def source(folder, name="a.extxyz", split=(), **options) -> DataSource:
    return DataSource("set", "extxyz", name, str(folder), (), OPTIONS | options, split)


def write(folder, text: str, name="a.extxyz"):
    path = folder / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


def opened(folder, text, name="a.extxyz", say=lambda t: None, split=(), **options):
    return read(source(folder, name, split, **options), write(folder, text, name), say)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(storage, "_granted", load_settings({"XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}))


@pytest.mark.parametrize("name", ["a.extxyz", "a.extxyz.gz"])
def test_frames_of_both_kinds(tmp_path, name):
    data = opened(tmp_path, WATER + CRYSTAL + WATER, name, required=["energy", "forces"])
    assert data.count == 3 and data.starts.tolist() == [0, 3, 5, 8]
    assert data.species.tolist() == [1, 0, 0, 1, 0, 1, 0, 0]
    assert data.labels["energy"].tolist() == [-10.5, -3.0, -10.5]
    np.testing.assert_array_equal(data.labels["forces"][3:5], [[1, 2, 3], [-1, -2, -3]])
    np.testing.assert_array_equal(data.cells[1], [[2, 0, 0], [0.3, 2.2, 0], [0, 0.1, 2.4]])
    assert data.edges(np.arange(3))[0] == 6 and data.edges(np.arange(3))[1] > 6


def test_stress_and_units(tmp_path):
    plain = opened(tmp_path, CRYSTAL, required=["energy", "forces", "stress"])
    assert plain.labels["stress"].tolist() == [[1, 4, 6, 5, 3, 2]]
    six = opened(tmp_path, CRYSTAL.replace("1 2 3 2 4 5 3 5 6", "1 4 6 5 3 2"), required=["stress"])
    np.testing.assert_array_equal(six.labels["stress"], plain.labels["stress"])
    b, h = LENGTHS["bohr"], ENERGIES["hartree"]
    odd = opened(tmp_path, CRYSTAL, required=["energy", "forces", "stress"], cutoff=9.0, **{"length-unit": "bohr", "energy-unit": "hartree"})
    np.testing.assert_allclose(odd.positions, plain.positions * b)
    np.testing.assert_allclose(odd.labels["energy"], plain.labels["energy"] * h)
    np.testing.assert_allclose(odd.labels["forces"], plain.labels["forces"] * h / b)
    np.testing.assert_allclose(odd.labels["stress"], plain.labels["stress"] * h / b**3)
    assert ENERGIES["kcal/mol"] == pytest.approx(h / 627.5094740631, rel=1e-9)


def test_keys_and_zeros_are_told(tmp_path):
    said = []
    text = WATER.replace("energy=", "REF_energy=").replace("forces:R:3", "REF_forces:R:3")
    data = opened(tmp_path, text, say=said.append, **{"energy-key": "REF_energy", "forces-key": "REF_forces"})
    assert data.labels["energy"].tolist() == [-10.5]
    assert said == ["data set: 5 of 9 force components are exactly 0 (56 %)"]


MISTAKES = [
    ("E-DATA-061", "frame 2 has no energy (`energy`)", WATER + WATER.replace("energy=", "e=")),
    ("E-DATA-061", "has no forces", WATER.replace(":forces:R:3", "")),
    ("E-DATA-062", "frame 1: the element `He`", WATER.replace("O 0", "He 0")),
    ("E-DATA-062", "frame 1: `h` is no chemical element", WATER.replace("H 0.96", "h 0.96")),
    ("E-DATA-060", "frame 2: atoms 1 and 3 stand at one place", WATER + WATER.replace("H -0.24 0.93 0", "H 0 0 0")),
    ("E-DATA-060", "frame 2: its atoms, or its Lattice, are spread over hundreds", WATER + WATER.replace("H -0.24 0.93 0", "H 1e6 1e6 0")),
    ("E-DATA-060", "`pos` has `1.0D-1`, which is no number", WATER.replace("0.96", "1.0D-1")),
    ("E-DATA-060", "`energy` stands there twice", WATER.replace("energy=-10.5", "energy=-10.5 energy=-11")),
    ("E-DATA-060", "frame 1, line 4: 6 columns, and Properties need 7", WATER.replace("-0.1 0.25 0", "-0.1 0.25")),
    ("E-DATA-060", "line 1: expected a number of atoms", "three" + WATER[1:]),
    ("E-DATA-060", "line 6: expected a number of atoms", WATER + "9" + WATER[1:]),
    ("E-DATA-060", "is no number", WATER.replace("0.96", "x")),
    ("E-DATA-060", "is not finite", WATER.replace("-10.5", "nan")),
    ("E-DATA-060", "`energy` has 2 numbers", WATER.replace("-10.5", '"1 2"')),
    ("E-DATA-060", "Properties is no list", WATER.replace("forces:R:3", "forces:R")),
    ("E-DATA-060", "no species", WATER.replace("species:S", "kind:S")),
    ("E-DATA-060", "pbc is three", WATER.replace('"F F F"', '"F F"')),
    ("E-DATA-060", "has no volume", CRYSTAL.replace("2.0 0 0 0.3", "0 0 0 0.3")),
    ("E-DATA-060", "columns, not 3", WATER.replace("forces:R:3", "forces:R:2")),
    ("E-DATA-006", "no frames", "\n\n"),
]


@pytest.mark.parametrize("code, words, text", MISTAKES, ids=lambda v: v[:30] if isinstance(v, str) else "")
def test_mistakes_name_their_frame(tmp_path, code, words, text):
    with pytest.raises(SexpError) as caught:
        opened(tmp_path, text)
    assert caught.value.diagnostic.code == code and words in caught.value.diagnostic.message


@pytest.mark.parametrize("text, help", [
    (WATER.replace("energy=", "REF_energy="), ':energy-key "REF_energy"'),
    (WATER.replace("forces:", "REF_force:"), ':forces-key "REF_force"'),
    (WATER.replace("O 0", "o 0"), "`O` is how it is written"),
    (WATER.replace("O 0", "8 0"), "species are the symbols of chemical elements"),
    (WATER.replace("O 0", "He 0"), ":elements (H O He)"),
], ids=str)  # fmt: skip
def test_mistakes_tell_the_mend(tmp_path, text, help):
    with pytest.raises(SexpError) as caught:
        opened(tmp_path, text)
    assert help in caught.value.diagnostic.help


def test_a_slab_whose_third_vector_is_zero(tmp_path):
    """As ASE writes it: the direction that is not periodic needs no vector."""
    slab = WATER.replace('pbc="F F F"', 'Lattice="3 0 0 0 3 0 0 0 0" pbc="T T F"')
    high = slab.replace("0 0 0 0\"", "0 0 0 40\"")
    (one, two), apart = parse(source(tmp_path), slab + high), []
    for frame in (one, two):
        apart.append(edges_of(frame.positions, frame.cell, frame.periodic, 2.9))
    assert len(apart[0][0]) > 4
    for x, y in zip(*apart, strict=True):
        np.testing.assert_allclose(x, y)
    turned = parse(source(tmp_path), slab.replace("3 0 0 0 3 0 0 0 0", "0 0 0 2 2 0 0 0 3").replace("T T F", "F T T"))
    assert len(edges_of(*((f := next(turned)).positions, f.cell, f.periodic), 2.9)[0]) > 4


def brute(positions, cell, periodic, cutoff):
    span = range(-3, 4) if any(periodic) else (0,)
    found = set()
    for shift in np.array([(a, b, c) for a in span for b in span for c in span]):
        if any(s and not p for s, p in zip(shift, periodic, strict=True)):
            continue
        for i in range(len(positions)):
            for j in range(len(positions)):
                d = np.linalg.norm(positions[j] - positions[i] + shift @ cell)
                if d < cutoff and (i != j or shift.any()):
                    found.add((i, j, *np.round(shift @ cell, 9)))
    return found


@pytest.mark.parametrize("periodic", [(False,) * 3, (True,) * 3, (True, True, False)], ids=str)
def test_edges_are_all_pairs(periodic):
    rng = np.random.default_rng(4)
    cell = np.array([[3.0, 0, 0], [0.4, 3.1, 0], [0.2, -0.3, 3.3]])
    positions = rng.random((7, 3)) @ cell
    receivers, senders, offsets = edges_of(positions, cell, periodic, 3.0)
    assert (np.diff(receivers) >= 0).all()
    assert {(int(i), int(j), *np.round(o, 9)) for i, j, o in zip(receivers, senders, offsets, strict=True)} == brute(positions, cell, periodic, 3.0)
    assert len(receivers) == len(brute(positions, cell, periodic, 3.0))


def test_neighbours_are_cached_and_a_torn_cache_is_made_again(tmp_path, monkeypatch):
    frames = list(parse(source(tmp_path), WATER + CRYSTAL))
    first = neighbours(frames, 2.5, "k")
    path = os.path.join(storage.granted().xdg_cache_home, "sexpgpu", "data", "k.npz")
    assert os.path.exists(path)
    with monkeypatch.context() as without:
        without.setattr("sexpgpu.run.data.extxyz.edges_of", None)
        again = neighbours(frames, 2.5, "k")
    for a, b in zip(first, again, strict=True):
        for x, y in zip(a, b, strict=True):
            np.testing.assert_array_equal(x, y)
    with open(path, "wb") as file:
        file.write(b"PK torn")
    assert len(neighbours(frames, 2.5, "k")) == 2
    assert len(neighbours(frames[:1], 2.5, "k")) == 1  # an entry of other frames is none


def test_an_isolated_atom_has_no_edges(tmp_path):
    data = opened(tmp_path, "1\nProperties=species:S:1:pos:R:3:forces:R:3 energy=-1\nO 0 0 0 0 0 0\n")
    assert data.edges(np.array([0])).tolist() == [0]
    fields = pack(data, np.array([0]), (2, 8, 64), 2.5)
    assert fields["edge-mask"].sum() == 0 and fields["receivers"].tolist() == sorted(fields["receivers"]) and fields["receivers"].min() == 1


def test_statistics(tmp_path):
    other = WATER.replace("3\n", "2\n", 1).replace("H -0.24 0.93 0 0 -0.25 0\n", "").replace("-10.5", "-7")
    data = opened(tmp_path, WATER + other)
    found = statistics(data, np.arange(2))
    assert found["neighbours"] == 8 / 5
    assert found["force-rms"] == pytest.approx(np.sqrt((data.labels["forces"] ** 2).mean()))
    counts, energy = np.array([[2.0, 1], [1, 1]]), np.array([-10.5, -7])
    mean = energy.sum() / 5
    expected = mean + np.linalg.solve(counts.T @ counts + np.eye(2), counts.T @ (energy - mean * counts.sum(1)))
    np.testing.assert_allclose(found["shifts"], expected)


def test_a_packed_batch(tmp_path):
    data = opened(tmp_path, WATER + CRYSTAL)
    fields = pack(data, np.array([1, 0]), (4, 16, 192), 2.5)
    n = int(data.edges(np.arange(2)).sum())
    assert fields["graph-mask"].tolist() == [1, 1, 0, 0] and fields["atom-mask"].sum() == 5 and fields["edge-mask"].sum() == n
    assert (np.diff(fields["receivers"]) >= 0).all() and (fields["receivers"][n:] >= 5).all() and (fields["senders"][n:] == fields["receivers"][n:]).all()
    assert fields["graph"].tolist() == [0, 0, 1, 1, 1] + [3] * 11
    assert fields["energy"].tolist() == [-3, -10.5, 0, 0] and fields["atoms"].tolist() == [2, 3, 1, 1]
    assert fields["volume"][0] == pytest.approx(abs(np.linalg.det(data.cells[1]))) and fields["volume"][1] == 1
    x, s, r = fields["positions"], fields["senders"], fields["receivers"]
    length = np.linalg.norm(x[s] - x[r] + fields["offsets"], axis=1)
    assert (length[:n] < 2.5).all() and (length[n:] == 5).all()
    assert {a.dtype for a in fields.values()} == {np.dtype("f4"), np.dtype("i4")}


@pytest.mark.parametrize("room", [(4, 16, 192), (4, 6, 1088), (3, 16, 64), (3, 8, 11)])
def test_rows_of_atoms_end_at_the_real_edges(tmp_path, room):
    """By the row pointers of a device's launches: padding stands behind the rows of real atoms, shared out among the others, and in short walks."""
    data = opened(tmp_path, WATER + CRYSTAL)
    rows = np.array([0]) if room[2] == 11 else np.array([1, 0])
    fields, real, n = pack(data, rows, room, 2.5), int(data.atoms(rows).sum()), int(data.edges(rows).sum())
    edges = Edges(*(torch.from_numpy(fields[end]) for end in ("senders", "receivers")), room[1])
    for end in ("receiver", "sender"):
        walk = edges.by(end)
        sizes = np.diff(walk.starts.numpy())
        assert sizes[:real].tolist() == np.bincount(fields[end + "s"][:n], minlength=real).tolist() and walk.starts[real] == n
        assert sizes[real:].sum() == room[2] - n and np.ptp(sizes[real:]) <= 1
        assert int((walk.ends - walk.begins).max()) <= LONGEST


def test_capacities_hold_every_batch_and_come_in_buckets(tmp_path):
    data = opened(tmp_path, (WATER * 30) + (CRYSTAL * 10))
    rows = np.arange(40)
    sizes = capacities(data, rows, 8, 3)
    assert 1 < len(sizes) <= 3 and list(sizes) == sorted(sizes) and {s for s, _, _ in sizes} == {9}
    batches = Batches(data.source, None, 8, buckets=3)
    feed = packed(data, batches)
    used = set()
    for seed in range(50):
        fields = feed.take(np.random.default_rng(seed).permutation(40)[:8])
        used.add((9, len(fields["atom-mask"]), len(fields["edge-mask"])))
    assert used <= set(sizes) and len(used) > 1
    assert len(capacities(data, np.arange(30), 8, 3)) == 1  # equal structures need one size
    assert len(feed.take(np.array([0]))["graph-mask"]) == 9  # what remains of an evaluation fits too


PROGRAM = """
(import "nn" "optim" "flashcart")
(defdata set (extxyz "a.extxyz" :elements (H O) :cutoff 2.5) :split ((train 3/4) (valid 1/4)))
(deflayer model (vectors species senders receivers)
  (let* ((lengths (vector-lengths vectors))
         (radial (* (chebyshev lengths :count 4 :r-max 2.5) (reshape (polynomial-cutoff lengths :r-max 2.5) [(dim lengths 0) 1])))
         (x (reshape (embedding species (dim (statistic set "shifts") 0) 4) [(dim species 0) 1 4]))
         (y (interaction x (edge-attributes vectors lengths 1) radial senders receivers 4 :l-max 1 :hidden [8]
                         :neighbours (statistic set "neighbours"))))
    (+ (per-element (statistic set "shifts") species) (reshape (scalar-mlp (scalars (product-layer y :l-max 0)) [8 1]) [(dim species 0)]))))
(defun both (positions offsets species senders receivers graph graph-mask)
  (let ((e (sum-by (model (edge-vectors positions offsets senders receivers) species senders receivers) graph (dim graph-mask 0))))
    (list e (forces-of (* e graph-mask) positions))))
(defun loss (positions offsets species senders receivers graph graph-mask atom-mask energy forces)
  (destructuring-bind (e f) (both positions offsets species senders receivers graph graph-mask)
    (list (+ (masked-sum (square (- e energy)) graph-mask) (masked-sum (square (- f forces)) atom-mask)) (sum graph-mask))))
(defrun train :data (graphs set :split train :batch 4 :shuffle true %s) :loss loss :optimizer (adam :lr 1e-2) :steps 20 %s)
(defeval valid :data (graphs set :split valid :batch 3) :every 5 :metrics ((loss loss)))
"""


def prepared(folder, keys="", run_keys="", text=WATER * 30 + CRYSTAL * 10):
    write(folder, text)
    file = folder / "p.lisp"
    file.write_text(PROGRAM % (keys, run_keys))
    loaded = load(str(file), Selection())
    run = measured(choose_run(loaded.experiment, None))
    compiled = program(stages(loaded, run), "cpu", 1)
    compiled.initialise()
    return loaded, run, compiled, bind(run)


def test_buckets_change_no_number_and_compile_once_each(tmp_path):
    losses, graphs = [], []
    for keys in (":buckets 1", ":buckets 3"):
        _, run, compiled, data = prepared(tmp_path, keys, ":precision f64")
        losses.append([compiled.step(data.feeds.train.batch(i), False).loss for i in range(20)])
        graphs.append(len(compiled._graphs))
        assert (len(run.data.capacities) > 1) == (keys[-1] == "3")
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-9)
    assert losses[0][-1] < losses[0][0] and graphs == [0, 1]


def test_a_statistic_of_unused_data_is_refused(tmp_path):
    write(tmp_path, WATER * 8)
    text = PROGRAM.replace("(deflayer model", '(defdata other (extxyz "b.extxyz" :elements (H O) :cutoff 2.5))\n(deflayer model')
    (tmp_path / "p.lisp").write_text(text.replace('(statistic set "neighbours")', '(statistic other "neighbours")') % ("", ""))
    loaded = load(str(tmp_path / "p.lisp"), Selection())
    with pytest.raises(SexpError) as caught:
        stages(loaded, measured(choose_run(loaded.experiment, None)))
    assert caught.value.diagnostic.code == "E-EVAL-107" and "`other`" in caught.value.diagnostic.message
    assert caught.value.diagnostic.span.text.startswith("(statistic other")


def test_micro_batches_are_packed_alone_and_change_no_number(tmp_path):
    losses = []
    for keys in (":precision f64", ":precision f64 :accumulate 2"):
        _, run, compiled, data = prepared(tmp_path, "", keys)
        losses.append([compiled.step(data.feeds.train.batch(i), False).loss for i in range(8)])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-9)
    batch = data.feeds.train.batch(0)
    assert run.data.capacity[0] == 3 and len(batch["graph-mask"]) == 6 and batch["graph-mask"].tolist() == [1, 1, 0, 1, 1, 0]


def test_an_index_out_of_range_is_named(tmp_path):
    text = PROGRAM.replace(" radial senders receivers 4", " radial (+ senders 1000) receivers 4")
    assert text != PROGRAM
    write(tmp_path, WATER * 8)
    (tmp_path / "p.lisp").write_text(text % ("", ""))
    loaded = load(str(tmp_path / "p.lisp"), Selection())
    run = measured(choose_run(loaded.experiment, None))
    compiled = program(stages(loaded, run), "cpu", 1)
    compiled.initialise()
    with pytest.raises(SexpError) as caught:
        compiled.step(bind(run).feeds.train.batch(0), False)
    assert caught.value.diagnostic.code == "E-RUN-031" and "tensor-product in model/0/interaction" in caught.value.diagnostic.message


def test_an_evaluation_counts_only_what_is_real(tmp_path):
    _, run, compiled, data = prepared(tmp_path)
    totals = [compiled.evaluate("valid", b)["loss"] for b in data.feeds.evals["valid"]]
    assert sum(count for _, count in totals) == 10


def test_the_manifest_keeps_the_statistics(tmp_path):
    _, run, _, data = prepared(tmp_path)
    kept = data.digests()["set"]["statistics"]
    assert set(kept) == {"neighbours", "force-rms", "shifts"} and kept["neighbours"] == run.statistics["set/neighbours"]


def test_without_data_the_program_still_traces(tmp_path):
    file = tmp_path / "p.lisp"
    file.write_text(PROGRAM % ("", ""))
    loaded = load(str(file), Selection())
    run = choose_run(loaded.experiment, None)
    assert run.data.capacities == () and train_graph(loaded, run).params
    assert dict(run.data.source.split) == {"train": Fraction(3, 4), "valid": Fraction(1, 4)}


WRONG = [
    ("E-EVAL-102", "elements", ":elements (H O)", ""),
    ("E-EVAL-103", "no element `Q`", "(H O)", "(H Q)"),
    ("E-EVAL-103", "each element once", "(H O)", "(H H)"),
    ("E-EVAL-103", "above 0", ":cutoff 2.5)", ":cutoff 0)"),
    ("E-EVAL-103", "none of angstrom", ":cutoff 2.5)", ":cutoff 2.5 :length-unit ångström)"),
    ("E-EVAL-103", "no label `charge`", ":cutoff 2.5)", ":cutoff 2.5 :required (charge))"),
    ("E-DATA-030", "atomic structures", "(graphs set :split train", "(batches set :split train"),
    ("E-EVAL-107", "no statistic `neighbors`", '"neighbours"', '"neighbors"'),
    ("E-EVAL-107", "no data source `sets`", '(statistic set "neighbours")', '(statistic sets "neighbours")'),
    ("E-EVAL-104", "is called as", '(statistic set "neighbours")', "(statistic set)"),
    ("E-EVAL-109", "stress", "graph-mask atom-mask energy forces)", "graph-mask atom-mask energy stress forces)"),
    ("E-EVAL-105", "stands as the :data", "(defrun", "(defun f () (graphs set))\n(f)\n(defrun"),
]


@pytest.mark.parametrize("code, words, old, new", WRONG, ids=lambda v: v[:24] if isinstance(v, str) else "")
def test_mistakes_in_the_file(tmp_path, code, words, old, new):
    text = PROGRAM % ("", "")
    assert old in text
    file = tmp_path / "p.lisp"
    file.write_text(text.replace(old, new, 1))
    with pytest.raises(SexpError) as caught:
        loaded = load(str(file), Selection())
        train_graph(loaded, choose_run(loaded.experiment, None))
    found = [d for d in caught.value.diagnostics if d.code == code]
    assert found and words in found[0].message, [(d.code, d.message) for d in caught.value.diagnostics]
