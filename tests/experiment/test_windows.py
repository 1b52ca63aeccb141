"""`windows`: the form, its fields in the trace, order, seek, and how parts are cut."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import error, loaded, traced

from sexpgpu.compiler import label_bounds, trajectory
from sexpgpu.diagnostics import SexpError
from sexpgpu.experiment.model import Batches, DataSource, Field
from sexpgpu.run.bind import bind
from sexpgpu.run.data import open_source
from sexpgpu.run.data.dataset import FieldBound
from sexpgpu.run.data.feed import eval_feed, train_feed
from sexpgpu.run.data.stream import Stream, windows
from sexpgpu.run.events import StepDone
from sexpgpu.run.loop import train
from sexpgpu.run.program import StepResult

HEAD = """(import "nn" "optim" "loss")
(defknob context 4)
(defdata corpus (text "c.txt"{options}) :split ((train 3/4) (valid 1/4)))
(defdata d (csv "d.csv" :fields ((x f32 [3]) (label i32))))
(defun g (tokens targets) (mean (* (linear (cast tokens f32) 1) (mean (cast targets f32)))))
"""
RUN = "(defrun train :data {data} :loss g :optimizer (adamw :lr 1e-3) :steps 10)\n"
VALID = "(defeval valid :data (windows corpus :split valid :context 4 :batch {}) :every 5 :metrics ((loss g)))"
DATA = "(windows corpus :split train :context context :batch 8 :shuffle true)"


def program(data: str = DATA, options: str = "", more: str = "") -> str:
    return HEAD.format(options=options) + RUN.format(data=data) + more


def stream(count: int, split=()) -> Stream:
    source = DataSource("c", "tokens", "c.bin", ".", (), {"dtype": "u16"}, tuple(split))
    return Stream(source, np.arange(count, dtype=np.uint16), "0")


def cut(found: Stream, context: int, batch: int = 2, part: str | None = None, stride: int | None = None, **keys) -> Batches:
    return Batches(found.source, part, batch, context=context, stride=stride or context, **keys)


def test_the_form(tmp_path):
    run = loaded(tmp_path, program()).experiment.runs["train"]
    data = run.data
    assert (data.context, data.stride, data.batch, data.shuffle, data.split) == (4, 4, 8, True, "train")
    assert data.fields == (Field("tokens", "i32", (4,)), Field("targets", "i32", (4,))) and data.tokens == 32
    assert data.source.options == {"tokens": "bytes"} and data.source.stream
    strided = loaded(tmp_path, program("(windows corpus :context 4 :stride 1 :batch 2)")).experiment.runs["train"].data
    assert strided.stride == 1


def test_the_trace_sees_tokens_and_targets(tmp_path):
    _, found = traced(tmp_path, program())
    inputs = {n.attrs["name"]: n.type for n in nodes(found) if n.op == "input"}
    assert set(inputs) == {"tokens", "targets"}
    assert all(t.dtype == "i32" and t.shape == (8, 4) and t.batch for t in inputs.values())


def nodes(found):
    from_loss = [found.loss.total]
    seen = []
    while from_loss:
        node = from_loss.pop()
        seen.append(node)
        from_loss += node.inputs
    return seen


@pytest.mark.parametrize(("code", "data", "options", "says"), [
    ("E-DATA-030", "(batches corpus :batch 8)", "", "one sequence of tokens"),
    ("E-DATA-030", "(windows d :context 4 :batch 8)", "", "rows of fields"),
    ("E-EVAL-102", "(windows corpus :batch 8)", "", ":context"),
    ("E-EVAL-103", "(windows corpus :context 0 :batch 8)", "", "at least 1"),
    ("E-EVAL-103", "(windows corpus :context 4 :stride 0 :batch 8)", "", "at least 1"),
    ("E-EVAL-103", "(windows corpus :context 4 :batch 8 :limit 2)", "", ":limit"),
    ("E-EVAL-101", "(windows corpus :contxt 4 :batch 8)", "", "contxt"),
    ("E-EVAL-101", "(batches d :batch 8 :context 4)", "", "context"),
    ("E-EVAL-104", "(windows :context 4 :batch 8)", "", "(windows corpus"),
    ("E-EVAL-107", "(windws corpus :context 4 :batch 8)", "", "windws"),
    ("E-EVAL-107", "(windows corpus :split trian :context 4 :batch 8)", "", "trian"),
    ("E-EVAL-103", DATA, " :tokens words", "words"),
    ("E-EVAL-103", DATA, ' :tokens "bpe.json"', '(bpe "tokenizer.json")'),
    ("E-EVAL-101", DATA, " :fields ((x f32))", "fields"),
])
def test_mistakes_of_the_form(tmp_path, code, data, options, says):
    assert says in error(tmp_path, program(data, options), code).message


def test_token_dtype(tmp_path):
    def text(dtype):
        return program().replace('(text "c.txt")', f'(tokens "c.bin" :dtype {dtype})')

    assert loaded(tmp_path, text("u32")).experiment.data["corpus"].options == {"dtype": "u32"}
    assert "u16, u32" in error(tmp_path, text("i32"), "E-EVAL-103").message


def test_an_evaluation_has_a_limit_and_an_unknown_field_is_named(tmp_path):
    more = VALID.format("8 :limit 2")
    assert loaded(tmp_path, program(more=more)).experiment.evals["valid"].data.limit == 2
    wrong = program().replace("(tokens targets)", "(tokens target)").replace("(cast targets", "(cast target")
    assert "targets" in error(tmp_path, wrong, "E-EVAL-109").help[0]


def test_trajectory_knows_context_stride_and_options(tmp_path):
    def data(text):
        found, run = traced(tmp_path, text)
        return trajectory(run, found.experiment.runs["train"])["data"]

    def cutting(context, stride):
        return data(program(f"(windows corpus :split train :context {context} :stride {stride} :batch 8 :shuffle true)"))

    base = data(program())
    assert base == data(program(options=" :tokens bytes")) == cutting(4, 4)
    assert base not in (cutting(4, 2), cutting(5, 4))
    tokens = [program().replace('(text "c.txt")', f'(tokens "c.bin" :dtype {d})') for d in ("u16", "u32")]
    assert len({base, *map(data, tokens)}) == 3


def test_bind_opens_a_text_once_and_divides_it_in_file_order(tmp_path):
    text = bytes(range(100))
    (tmp_path / "c.txt").write_bytes(text)
    more = VALID.format("4")
    bound = bind(loaded(tmp_path, program(more=more)).experiment.runs["train"])
    assert bound.digests()["corpus"]["count"] == 100
    seen = np.concatenate([bound.feeds.train.batch(step)["tokens"].reshape(-1) for step in range(9)])[: 18 * 4]
    assert sorted(seen) == list(range(72)) and seen.dtype == np.int32
    batches = list(bound.feeds.evals["valid"])
    assert [len(b["tokens"]) for b in batches] == [4, 2]
    assert batches[0]["tokens"][0].tolist() == [75, 76, 77, 78]
    assert batches[0]["targets"][0].tolist() == [76, 77, 78, 79]
    (tmp_path / "c.txt").write_bytes(text[:15])
    with pytest.raises(SexpError) as caught:
        bind(loaded(tmp_path, program(more=more)).experiment.runs["train"])
    assert caught.value.diagnostic.code == "E-DATA-036" and "`valid`" in caught.value.diagnostic.message


def test_tokens_that_embed_cannot_take_are_found_in_bind(tmp_path):
    (tmp_path / "c.txt").write_bytes(bytes(range(100)))
    model = '(defun g (tokens targets) (mean (embed (param "t" [50 2] :init zeros) tokens)))'
    text = program().replace(HEAD.splitlines()[4], model)
    found, graphs = traced(tmp_path, text)
    bounds = [FieldBound(*bound) for bound in label_bounds(graphs)]
    assert [(b.field, b.low, b.high) for b in bounds] == [("tokens", 0, 49)]
    with pytest.raises(SexpError) as caught:
        bind(found.experiment.runs["train"], bounds)
    assert caught.value.diagnostic.code == "E-DATA-014" and "token 51" in caught.value.diagnostic.message


@settings(max_examples=100, deadline=None)
@given(count=st.integers(2, 200), context=st.integers(1, 12), stride=st.integers(1, 15))
def test_windows_are_whole_and_regular(count, context, stride):
    found = stream(count)
    data = cut(found, context, stride=stride)
    if count < context + 1:
        with pytest.raises(SexpError):
            windows(found, data)
        return
    cutter = windows(found, data)
    all_of_them = cutter.take(np.arange(len(cutter)))
    assert (all_of_them["tokens"][:, 0] == np.arange(len(cutter)) * stride).all()
    assert (all_of_them["targets"] == all_of_them["tokens"] + 1).all()
    last = all_of_them["targets"][-1, -1]
    assert last < count <= last + stride  # one more window would not fit


@settings(max_examples=60, deadline=None)
@given(count=st.integers(30, 300), context=st.integers(1, 6), share=st.integers(1, 9))
def test_parts_share_no_token(count, context, share):
    found = stream(count, (("a", Fraction(share, 10)), ("b", Fraction(10 - share, 10))))
    (start, middle), (again, stop) = found.part("a"), found.part("b")
    assert start == 0 and middle == again and stop == count
    for name, low, high in (("a", 0, middle), ("b", middle, count)):
        if high - low > context:
            cutter = windows(found, cut(found, context, part=name))
            taken = cutter.take(np.arange(len(cutter)))
            assert taken["tokens"].min() >= low and taken["targets"].max() < high


@settings(max_examples=60, deadline=None)
@given(count=st.integers(10, 150), context=st.integers(1, 5), batch=st.integers(1, 40), seed=st.integers(0, 9))
def test_every_epoch_has_each_window_once_and_batches_span_epochs(count, context, batch, seed):
    found = stream(count)
    feed = train_feed(found, cut(found, context, batch, shuffle=True), seed)
    n = len(feed.samples)
    steps = -(-3 * n // batch)
    batches = [feed.batch(step)["tokens"] for step in range(steps)]
    assert {b.shape for b in batches} == {(batch, context)}
    first = np.concatenate(batches)[: 3 * n, 0].reshape(3, n) // context
    assert all(sorted(epoch) == list(range(n)) for epoch in first)
    if n >= 20:
        assert len({tuple(epoch) for epoch in first}) == 3
    far = train_feed(found, cut(found, context, batch, shuffle=True), seed)
    assert (far.batch(steps - 1)["tokens"] == batches[-1]).all() and far.cursor(steps) == divmod(steps * batch, n)


@settings(max_examples=30, deadline=None)
@given(count=st.integers(10, 150), batch=st.integers(1, 20), limit=st.none() | st.integers(1, 3))
def test_an_evaluation_goes_once_in_order(count, batch, limit):
    found = stream(count)
    taken = [b["tokens"] for b in eval_feed(found, cut(found, 3, batch, limit=limit))]
    n = (count - 4) // 3 + 1
    expected = min(n, n if limit is None else limit * batch)
    assert np.concatenate(taken).reshape(-1).tolist() == list(range(expected * 3))
    assert all(len(b) == batch for b in taken[:-1])


def test_seek_is_constant_time_over_many_windows():
    class Long:
        dtype = np.dtype("u2")

        def __len__(self):
            return 10**12

        def __getitem__(self, index):
            return (index % 65536).astype(np.uint16)

    found = Stream(stream(1).source, Long(), "0")
    feed = train_feed(found, cut(found, 1024, 4, stride=1, shuffle=True), 3)
    batch = feed.batch(10**9)
    assert batch["tokens"].shape == (4, 1024) and batch["tokens"].dtype == np.int32


def test_char_lm_corpus_opens():
    folder = Path(__file__).parents[2] / "examples"
    source = DataSource("corpus", "text", "data/corpus.txt.gz", str(folder), (), {"tokens": "bytes"},
                        (("train", Fraction(9, 10)), ("valid", Fraction(1, 10))))
    data = Batches(source, "train", 32, shuffle=True, context=128, stride=128)
    corpus = open_source(source)
    assert corpus.count == 382_708 and corpus.tokens.max() < 128
    assert train_feed(corpus, data, 1337).batch(0)["tokens"].shape == (32, 128)


class Still:
    """A program whose steps do nothing; `tokens` is what its loss counts."""

    def __init__(self, tokens):
        self.tokens = tokens

    def step(self, batch, logged):
        return StepResult(1.0, 1.0, {"": 0.1}, True, {}, {}, tokens=self.tokens)


@pytest.mark.parametrize(("counted", "seen"), [(None, 2 * 8 * 4), (5.0, 10)])
def test_tokens_of_windows_are_counted_where_the_loss_counts_none(tmp_path, counted, seen):
    (tmp_path / "c.txt").write_bytes(bytes(range(100)))
    run = loaded(tmp_path, program()).experiment.runs["train"]
    events = list(train(Still(counted), replace(run, log_every=2), bind(run).feeds, 0, 2))
    (done,) = [e for e in events if isinstance(e, StepDone) and e.logged]
    assert done.interval_tokens == seen and done.interval_samples == 16
