"""Input that means harm or nonsense: files, names, values. Nothing executes, nothing breaks out, every end has a code."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from cases import CSV, GOOD, model, run

from sexpgpu.cli import main

BIDI, ESCAPE = "\u202e", "\x1b[31m"
NASTY = [f"a{BIDI}b", f"a{ESCAPE}b", "a\nerror[E-EVAL-001] b", "../../etc/passwd", "a\x00b", '"; import os; os._exit(9)', "{__import__('os')._exit(9)}",
         "$(touch owned)", "`touch owned`", "<script>alert(1)</script>", "a\r\nb", "%n%s", "\u2028", "..", "", "é" * 300]  # fmt: skip


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "d.csv").write_text(CSV, "utf-8")


def perform(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Exit code and everything printed, which is printable and whose lines that begin a message are ours."""
    code = main.perform(list(words))
    out, err = capsys.readouterr()
    assert code in (0, 1, 2, 3), err
    for text in (out, err):
        assert all(c.isprintable() or c in "\n\r" for c in text), ascii(text)
        assert "Traceback" not in text and not any(line.startswith("error[E-EVAL-001] b") for line in text.splitlines())
    assert not Path("owned").exists()
    return code, out + err


def lisp(text: str) -> str:
    """A string of the language."""
    return '"' + "".join(f"\\u{{{ord(c):x}}}" for c in text) + '"'


@pytest.mark.parametrize("text", NASTY, ids=ascii)
@pytest.mark.parametrize("place", ["(linear x 5 :name {})", "(tap-and {})", '(param {} [5] :init zeros)', "(state {} [5])"])
def test_names_of_the_model(capsys: pytest.CaptureFixture[str], text: str, place: str) -> None:
    body = place.format(lisp(text)).replace("(tap-and", "(tap")
    body = body.replace("(tap " + lisp(text), "(tap " + lisp(text) + " (mean x)")
    Path("p.lisp").write_text(model(f"(progn {body} (linear x 5))"), "utf-8")
    code, said = perform(capsys, "explain", "p.lisp")
    assert code == 2 and "E-EVAL-10" in said


@pytest.mark.parametrize("text", NASTY, ids=ascii)
def test_strings_that_mean_nothing_to_us(capsys: pytest.CaptureFixture[str], text: str) -> None:
    """Docstrings, docs of knobs, and knob values travel to explain, status, metrics and checkpoints."""
    program = GOOD.replace('"units of the hidden layer"', lisp(text)).replace("(defun f (x label)", f"(defun f (x label)\n  {lisp(text)}")
    Path("p.lisp").write_text(program + f"(defknob note {lisp(text)})\n(defun g () note)\n", "utf-8")
    assert perform(capsys, "explain", "p.lisp", "--ir")[0] == 0
    code, said = perform(capsys, "run", "p.lisp", "--metrics", "jsonl:m.jsonl", "--status", "s.json", "--checkpoint-dir", "ck")
    assert code == 0, said
    assert json.loads(Path("s.json").read_text("utf-8"))["knobs"]["note"]["value"] == text
    records = [json.loads(line) for line in Path("m.jsonl").read_bytes().split(b"\n") if line]
    assert {"run", "metric"} <= {r["type"] for r in records}
    assert json.loads(Path("ck/step-3/manifest.json").read_text("utf-8"))["knobs"]["note"]["value"] == text


@pytest.mark.parametrize("text", [t for t in NASTY if "\0" not in t], ids=ascii)
def test_flags_and_variables(capsys: pytest.CaptureFixture[str], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("p.lisp").write_text(GOOD, "utf-8")
    for words in (["--set", f"width={text}"], ["--set", f"{text}=1"], ["--variant", text], [text]):
        assert perform(capsys, "explain", "p.lisp", *words)[0] in (0, 2)
    assert perform(capsys, "run", "p.lisp", text)[0] == 2
    assert perform(capsys, text)[0] == 2 and perform(capsys, "run", f"--{text}")[0] == 2
    for flag in ("--metrics", "--resume", "--device", "--steps", "--max-time", "--eval-every"):
        assert perform(capsys, "run", "p.lisp", flag, text)[0] in (0, 2)
    monkeypatch.setenv("SEXPGPU_RUN_SLUG", text)
    code, said = perform(capsys, "run", "p.lisp", "--checkpoint-dir", "ck/{slug}")
    assert code in (0, 2)
    assert not (Path("..") / "etc").exists() and {p.name for p in Path("..").iterdir()} <= {Path.cwd().name, ".lock"} | {p.name for p in Path("..").iterdir() if p.is_dir()}


@pytest.mark.parametrize("text", ["__import__", "class", "lambda", "x}{y", "x%sy", "os.system", "é", "\\n", "$x", "x&y", "0x".replace("0", "o"), "self", "torch", "a.b", "_"],
                         ids=ascii)
def test_names_of_fields_functions_and_metrics(capsys: pytest.CaptureFixture[str], text: str) -> None:
    """Any name the reader takes: none of it reaches generated code as it is."""
    program = (
        f'(import "nn" "optim" "loss")\n(defdata d (csv "e.csv" :fields (({text} f32 [3]) (label i32))) :split ((train 4/5) (valid 1/5)))\n'
        f"(defun ff-{text} ({text} label) (cross-entropy (linear {text} 5) label))\n"
        f"(defrun run-{text} :data (batches d :split train :batch 8) :loss ff-{text} :optimizer (sgd :lr 0.1) :steps 2)\n"
        f"(defeval e :data (batches d :split valid :batch 3) :every 1 :metrics ((loss ff-{text})))\n"
    )
    Path("p.lisp").write_text(program, "utf-8")
    Path("e.csv").write_text(CSV.replace("x_", f"{text}_"), "utf-8")
    code, said = perform(capsys, "run", "p.lisp", "--metrics", "jsonl:m.jsonl")
    assert code == 0, said
    assert len(Path("m.jsonl").read_text("utf-8").splitlines()) > 3


@pytest.mark.parametrize("name", [f"a{BIDI}.lisp", f"a{ESCAPE}.lisp", "a\nb.lisp", "a;b.lisp", "a'b\".lisp", "-x.lisp", "é.lisp", "$(x).lisp"], ids=ascii)
def test_names_of_files(capsys: pytest.CaptureFixture[str], name: str) -> None:
    Path(name).write_text(GOOD, "utf-8")
    assert perform(capsys, "explain", "--", name)[0] == 0
    assert perform(capsys, "run", "--checkpoint-dir", "ck", "--", name)[0] == 0
    assert perform(capsys, "check", "--json", "--", name)[0] == 0
    Path(name).write_text(GOOD + "(lenght 3)\n", "utf-8")
    assert perform(capsys, "run", "--", name)[0] == 2
    Path(name).write_text(run("d.csv", "no.csv"), "utf-8")
    assert perform(capsys, "run", "--", name)[0] == 2


@pytest.mark.parametrize("location", ["/etc/passwd", "../d.csv", "/dev/zero", "\x00", "d.csv\n", ".", "https://x/y.csv", "file:///etc/passwd", "~/x.csv"], ids=ascii)
def test_places_of_data(capsys: pytest.CaptureFixture[str], location: str) -> None:
    Path("p.lisp").write_text(run('"d.csv"', lisp(location)), "utf-8")
    assert perform(capsys, "explain", "p.lisp")[0] in (0, 2)
    assert perform(capsys, "run", "p.lisp")[0] == 2


@pytest.mark.parametrize("what", ["folder", "fifo", "huge", "binary", "nul", "latin", "deep", "empty", "device", "link to itself"])
def test_files_that_are_no_programs(capsys: pytest.CaptureFixture[str], what: str) -> None:
    path = Path("q.lisp")
    if what == "folder":
        path.mkdir()
    elif what == "fifo":
        os.mkfifo(path)
    elif what == "link to itself":
        path.symlink_to(path)
    elif what == "device":
        path.symlink_to("/dev/zero")
    else:
        texts = {"huge": b";" * 4_000_001, "binary": bytes(range(256)) * 40, "nul": b"(a \0 b)", "latin": b"(caf\xe9)",
                 "deep": b"(" * 100_000 + b")" * 100_000, "empty": b""}  # fmt: skip
        path.write_bytes(texts[what])
    for command in ("explain", "check", "run"):
        code, said = perform(capsys, command, "q.lisp")
        text = what in ("nul", "deep")  # it can be opened: then what is wrong in it is a finding
        assert code == (1 if command == "check" and text else 2) or what == "empty", said
        assert "E-READ-" in said or what == "empty"


@pytest.mark.parametrize("change", [lambda b: b"\xef\xbb\xbf" + b, lambda b: b.replace(b"\n", b"\r\n"), lambda b: b.replace(b"\n", b"\r\n\r\n"),
                                    lambda b: b.rstrip(b"\n"), lambda b: b + b"\n\n \t\x0c\n"], ids=["bom", "crlf", "double", "no end", "blanks"])
def test_files_of_other_editors(capsys: pytest.CaptureFixture[str], change) -> None:
    Path("p.lisp").write_bytes(change(GOOD.encode()))
    assert perform(capsys, "check", "p.lisp")[0] == 0
    Path("p.lisp").write_bytes(change((GOOD + "(lenght 3)\n").encode()))
    code, said = perform(capsys, "check", "p.lisp", "--json")
    place = json.loads(said)["findings"][0]["place"]
    assert code == 1 and place["column"] == 2 and place["end_column"] == 8


def test_a_bug_leaves_what_reproduces_it(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object, **keys: object) -> None:
        raise ValueError(f"odd{BIDI}{ESCAPE}")

    monkeypatch.setenv("SEXPGPU_METRICS", "stdout")
    monkeypatch.setenv("SEXPGPU_CHECKPOINT_AWS_SECRET_ACCESS_KEY", "hunter2")
    monkeypatch.setattr("sexpgpu.compiler.trace_run", broken)
    Path("p.lisp").write_text(GOOD, "utf-8")
    assert main.perform(["explain", "p.lisp", "--set", "width=7"]) == 70
    out, err = capsys.readouterr()
    assert out == "" and "report" in err and "Traceback" not in err and BIDI not in err and "\x1b" not in err
    saved = next(Path("state/sexpgpu/bugs").iterdir()).read_text("utf-8")
    assert "Traceback" in saved and "width=7" in saved and "(deflayer model (x)" in saved and "SEXPGPU_METRICS" in saved
    assert "hunter2" not in saved and "(deflayer linear" not in saved
