"""The documentation is built strictly, holds every public name and command, and asks nothing of other hosts."""

import importlib.util
import inspect
import os
import re
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import get_args, is_typeddict

import chromium
import pytest
import yaml
from mkdocs.exceptions import PluginError

import alight
from alight import calibrate, evaluation
from alight.cli.parser import COMMANDS

ROOT = Path(__file__).parent.parent
ROOMS = {"calibrate", "evaluation"}  # whose names are there one by one

pytestmark = pytest.mark.site


def built(config: Path, target: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(config)]
    return subprocess.run(
        [*command, "--site-dir", str(target)],
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("site")
    done = built(ROOT / "mkdocs.yml", target)
    assert done.returncode == 0, done.stderr
    return target


@pytest.mark.slow
def test_every_public_name_is_in_the_reference(site):
    anchors = set()
    for page in (site / "reference").glob("*.html"):
        anchors |= set(re.findall(r'id="(alight\.[\w.]+)"', page.read_text()))
    names = [name for name in alight.__all__ if name not in ROOMS]
    public = {name for name, each in vars(calibrate).items() if not inspect.ismodule(each)}
    names += [f"calibrate.{name}" for name in public if not name.startswith("_")]
    own = {name for name, each in vars(evaluation).items() if getattr(each, "__module__", "") == evaluation.__name__}
    names += [f"evaluation.{name}" for name in own - {*alight.__all__} if not name.startswith("_")]
    missing = {name for name in names if not anchors & {f"alight.{name}", f"alight.{name}.{name.split('.')[-1]}"}}
    assert not missing


def parameters(name: str) -> list[str]:
    """The parameters of a public function or class; those that a class takes over stand with the class before it."""
    value = getattr(alight, name)
    if not callable(value) or value is alight.AlightError:
        return []
    own = inspect.signature(value).parameters
    inherited = {each for base in getattr(value, "__mro__", ())[1:] for each in getattr(base, "__annotations__", ())}
    unpacked = [name for each in own.values() for of in get_args(each.annotation) for name in _fields(of)]
    named = [each for each in own if own[each].kind is not inspect.Parameter.VAR_KEYWORD]
    return [each for each in (*named, *unpacked) if each not in inherited]


def _fields(annotation: object) -> list[str]:
    return [*annotation.__annotations__] if is_typeddict(annotation) else []


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in alight.__all__ if name not in ROOMS and parameters(name)])
def test_the_reference_describes_every_parameter(site, name):
    pages = "".join(page.read_text() for page in (site / "reference").glob("*.html"))
    described = re.split(rf'id="alight\.{name}"', pages)[1].partition("<h2")[0]
    shown = set(re.findall(r"<li class=\"doc-section-item.*?<b><code>\**(\w+)</code></b>", described, re.DOTALL))
    if not re.search(r"[Aa]rguments as of", described):
        assert set(parameters(name)) <= shown


@pytest.mark.slow
def test_every_command_is_in_the_reference(site):
    page = (site / "reference" / "commands.html").read_text()
    for name, command in COMMANDS.items():
        assert f"alight {name}" in page
        assert command.purpose in page


@pytest.mark.slow
def test_formulas_are_drawn_by_the_browser_alone(site):
    page = (site / "method.html").read_text()
    assert page.count("<math") > 50
    assert "arithmatex" not in page


@pytest.mark.slow
def test_what_pages_link_to_in_the_repository_is_in_the_site(site):
    assert (site / "results" / "cut_coverage.csv").read_bytes() == (ROOT / "results" / "cut_coverage.csv").read_bytes()


@pytest.mark.slow
def test_styles_fetch_nothing_from_other_hosts(site):
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*[\"']?(https?:)?//", sheet.read_text()), sheet


PAGES = ("index.html", "how-to/fit.html", "tutorial/images.html", "method.html", "reference/commands.html")


@pytest.mark.skipif(chromium.found() is None, reason="no Chromium: install one, or let CHROMIUM name it")
@pytest.mark.slow
def test_a_browser_asks_no_other_host_and_sees_no_error(site, tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    here = f"http://127.0.0.1:{server.server_port}/"
    try:
        for scheme, theme in (("light", "default"), ("dark", "slate")):
            with chromium.opened(chromium.found(), tmp_path / scheme) as tab:  # a profile keeps the first visit's theme
                tab.prefer(scheme)
                for (width, height), page in product(((1440, 900), (768, 1024), (375, 812)), PAGES):
                    tab.resize(width, height)
                    tab.requests.clear()
                    tab.go(here + page)
                    asked = {each.removeprefix(here).partition("?")[0] for each in tab.requests}
                    assert sum((site / each).stat().st_size for each in asked if (site / each).is_file()) < 3_000_000
                    assert not [each for each in tab.requests if not each.startswith((here, "data:"))]
                    if page == "index.html":
                        top = "document.querySelector('article img').getBoundingClientRect().top"
                        assert 0 < tab.ask(top) < height, width  # its figure is on the first screen
                    if page == "how-to/fit.html":
                        box = "document.querySelector('article table').closest('.md-typeset__scrollwrap')"
                        assert tab.ask(f"{box}.scrollWidth - {box}.clientWidth") <= 0, width  # none of it is cut off
                    assert tab.ask("document.documentElement.scrollWidth") <= width, page
                    assert tab.ask("document.body.dataset.mdColorScheme") == theme, page
            assert tab.console == []
    finally:
        server.shutdown()
        server.server_close()


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


def built_pages(folder: Path, hook: str, pages: dict[str, str], nav: list[str]) -> subprocess.CompletedProcess[str]:
    """Build a site of these pages with one of our hooks and our settings."""
    (folder / "docs").mkdir()
    for name, text in pages.items():
        (folder / "docs" / f"{name}.md").write_text(text)
    config = yaml.load((ROOT / "mkdocs.yml").read_text(), yaml.SafeLoader)
    config |= {"plugins": [], "extra_css": [], "nav": nav, "hooks": [str(ROOT / "docs/hooks" / hook)]}
    (folder / "mkdocs.yml").write_text(yaml.dump(config))
    return built(folder / "mkdocs.yml", folder / "site")


def test_broken_links_missing_anchors_and_forgotten_pages_are_errors(tmp_path):
    pages = {"index": "[a](nowhere.md) [b](other.md#nothing)", "other": "# Other", "lost": "# Lost"}
    done = built_pages(tmp_path, "site.py", pages, ["index.md", "other.md"])
    assert done.returncode != 0
    for word in ("nowhere.md", "#nothing", "lost.md"):
        assert word in done.stderr


@pytest.mark.slow
def test_tables_come_from_results_and_a_missing_file_fails_the_build(tmp_path, site):
    table = (site / "instead.html").read_text()
    assert "<td>ResNet-10, compiled</td>" in table
    assert "<!-- table" not in table
    done = built_pages(tmp_path, "tables.py", {"index": "<!-- table: results/nothing.csv -->"}, ["index.md"])
    assert done.returncode != 0
    assert "index.md: the table of results/nothing.csv cannot be rendered" in done.stderr


@pytest.mark.parametrize("tag", ['<script src="https://cdn.example/a.js">', "<img alt='' src=//cdn.example/a.png>"])
def test_a_page_that_fetches_from_another_host_is_an_error(tag):
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs/hooks/site.py")
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)

    page = SimpleNamespace(file=SimpleNamespace(src_uri="index.md"))
    with pytest.raises(PluginError, match="another host"):
        hooks.on_post_page(f"<p>{tag}</p>", page)
    fine = '<a href="https://keepachangelog.com">a link is followed by choice</a>'
    assert hooks.on_post_page(fine, page) == fine
