"""The site of docs/: it is built without the network, every page is in it, links lead somewhere, and a browser reads it."""

from __future__ import annotations

import functools
import http.server
import importlib.util
import re
import shutil
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--virtual-time-budget=8000"]  # fmt: skip


class Page(HTMLParser):
    """The links and anchors of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.sources: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.anchors |= {found["id"]} if found.get("id") else set()  # type: ignore[arg-type]
        if tag == "a" and found.get("href"):
            self.links.append(str(found["href"]))
        if tag in ("script", "img") and found.get("src"):
            self.sources.append(str(found["src"]))
        if tag == "link" and found.get("rel") in ("stylesheet", "preconnect", "icon") and found.get("href"):
            self.sources.append(str(found["href"]))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site, from a copy, so that nothing is written into the checkout."""
    pytest.importorskip("zensical")
    place = tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "docs", place / "docs", ignore=shutil.ignore_patterns("*.py", "*.toml", "__pycache__"))
    shutil.copy(ROOT / "zensical.toml", place)
    done = subprocess.run([sys.executable, "-m", "zensical", "build", "--clean", "--strict"], cwd=place, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return place / "build/site"


def parsed(path: Path) -> Page:
    page = Page()
    page.feed(path.read_text("utf-8"))
    return page


def test_every_page_is_built_and_in_the_navigation(site: Path) -> None:
    pages = {p.relative_to(ROOT / "docs").with_suffix(".html").as_posix() for p in (ROOT / "docs").glob("**/*.md")}
    assert pages <= {p.relative_to(site).as_posix() for p in site.glob("**/*.html")}
    listed = {target for section in tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"] for target in _targets(section)}
    assert {p.relative_to(ROOT / "docs").as_posix() for p in (ROOT / "docs").glob("**/*.md")} == listed


def _targets(entry: object) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    elif isinstance(entry, dict):
        for value in entry.values():
            yield from _targets(value)
    elif isinstance(entry, list):
        for value in entry:
            yield from _targets(value)


def test_links_lead_somewhere_and_nothing_is_fetched(site: Path) -> None:
    pages = {p: parsed(p) for p in site.glob("**/*.html") if p.name != "404.html"}
    broken = []
    for path, page in pages.items():
        for link in page.links:
            if re.match(r"[a-z]+:", link):
                continue
            target, anchor = urldefrag(link)
            to = (path.parent / unquote(target)).resolve() if target else path
            to = to / "index.html" if to.is_dir() else to
            if not to.exists() or (anchor and to in pages and unquote(anchor) not in pages[to].anchors):
                broken.append(f"{path.relative_to(site)}: {link}")
        outside = [s for s in page.sources if re.match(r"(https?:)?//", s)]
        assert not outside, f"{path.name} would load {outside}"
    assert not broken, broken[:20]


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base's word
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (apt-get install chromium)")
@pytest.mark.parametrize(("page", "wanted"), [
    ("index.html", ["SexpGPU", "Tutorial", "Decision 1"]),
    ("ops.html", ["softmax-cross-entropy", "<table"]),
    ("errors.html", ["E-SHAPE-003", 'id="e-shape-003"']),
    ("stdlib.html", ["layer-norm"]),
    ("environment.html", ["SEXPGPU_EVAL_LIMIT"]),
    ("cli.html", ["sexpgpu explain", "--why PATH"]),
    ("design.html", ["Tracing", 'id="gradients"']),
])  # fmt: skip
def test_a_browser_finds_what_it_should(address: str, page: str, wanted: list[str], tmp_path: Path) -> None:
    assert CHROMIUM is not None
    done = subprocess.run([CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path}", "--dump-dom", f"{address}/{page}"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    text = done.stdout
    missing = [w for w in wanted if w not in text]
    assert not missing, missing
    assert "md-search" in text or "search" in text, "the page's scripts ran"


# --- the index ---

def generator():
    spec = importlib.util.spec_from_file_location("docs_generate_site", ROOT / "docs/generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_llms_is_generated_and_names_every_page_once() -> None:
    module = generator()
    text = (ROOT / "llms.txt").read_text("utf-8")
    assert text == module.llms(), "llms.txt is not current: write docs/pages.toml and run `python docs/generate.py`"
    targets = re.findall(r"^- \[[^\]]+\]\(([^)]+)\): \S", text, re.M)
    assert len(targets) == len(set(targets))
    assert {p.relative_to(ROOT).as_posix() for p in ROOT.glob("docs/**/*.md")} <= set(targets)
    assert all((ROOT / target).exists() for target in targets)


def test_a_page_nobody_listed_speaks_for_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = generator()
    docs = tmp_path / "docs"
    (docs / "decisions").mkdir(parents=True)
    (docs / "pages.toml").write_text('["Start"]\n"docs/a.md" = "A: the first"\n')
    (docs / "a.md").write_text("# A\n")
    (docs / "b.md").write_text("# Bees\n\nThey fly. They sting.\n")
    (docs / "decisions/0031-why.md").write_text("# 31. Why it is so\n\nBecause.\n")
    monkeypatch.setattr(module, "DOCS", docs)
    assert module.index() == {"Start": {"docs/a.md": ("A", "the first"), "docs/b.md": ("Bees", "They fly"),
                                        "docs/decisions/0031-why.md": ("Decision 31", "why it is so")}}  # fmt: skip


@pytest.mark.parametrize("name", ["cli.md", "index.md"])
def test_generated_pages_of_the_site_are_current(name: str) -> None:
    pages = {path.name: text for path, text in generator().pages().items()}
    assert (ROOT / "docs" / name).read_text("utf-8") == pages[name], f"docs/{name} is not current: run `python docs/generate.py`"


def test_the_navigation_is_current() -> None:
    path = ROOT / "zensical.toml"
    assert path.read_text("utf-8") == generator().navigation(path.read_text("utf-8"))
