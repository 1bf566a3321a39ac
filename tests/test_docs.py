"""Documents are true: their code runs, their links lead somewhere, their figures come from results."""

import csv
import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from alight import read_points
from alight.planning import plan as planning

ROOT = Path(__file__).parent.parent
SLOW = ("docs/tutorial/images.md", "docs/tutorial/texts.md", "docs/how-to/latency.md", "docs/how-to/train.md")
SLOW += (
    "docs/how-to/fit.md",
    "docs/method.md",
    "docs/how-to/own_network.md",
    "docs/benchmark.md",
    "docs/command_line.md",
)
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def experiment(name: str, folder: str = "experiments"):
    spec = importlib.util.spec_from_file_location(name, ROOT / folder / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(ROOT / folder))  # where it finds what it shares with others
        spec.loader.exec_module(module)
    return module


OUTPUTS = experiment("page_outputs")
TABLES = experiment("tables", "docs/hooks")
WORDS = 20_800  # README and docs/ together, directives of tables included: what `wc -w` counts
CLOCK = re.compile(r"\b(plan|tune_speed|fit)\(")  # what these say hangs on the machine


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> list:
    return OUTPUTS.blocks(page.read_text())


def slow_or_not(page):
    return pytest.param(page, marks=[pytest.mark.slow] * (name_of(page) in SLOW), id=name_of(page))


@pytest.mark.filterwarnings("ignore:Early exit is not worth it on this machine:UserWarning")
@pytest.mark.parametrize("page", [slow_or_not(page) for page in PAGES if blocks(page)])
def test_every_block_of_code_on_a_page_runs_and_prints_what_stands_below(page, tmp_path, monkeypatch, short_trials):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(planning, "ROUNDS", 2)
    text = page.read_text()
    shows = any(block.said for block in blocks(page) if block.kind == "python")
    for block, said in OUTPUTS.run(text, page.name):  # in order, as a reader would
        if (shows and block.kind == "python") or block.said is not None:
            assert bool(said.strip()) == bool(block.said), block.code
            assert CLOCK.search(block.code) or words(said) == words(block.said or ""), block.code
            if "alight.fit(" in block.code:
                check_fit(said, block.said)
            if "print(predictor.calls)" in block.code:
                assert said == block.said


def check_fit(said: str, shown: str) -> None:
    """Check that a table of `fit` is the one that a page shows, but for times, and for accuracies within 3 points."""
    rows, expected = ([line for line in text.splitlines() if line.strip()] for text in (said, shown))
    named = [re.sub(r"[\d.,]+|\([^)]*\)| +", " ", line).split() for line in rows]
    timed = [bool(re.match(r"Early exit|Faster here", line)) for line in rows]
    for line, other, words_of, judged in zip(rows, expected, named, timed, strict=True):
        assert judged or words_of == re.sub(r"[\d.,]+|\([^)]*\)| +", " ", other).split(), (line, other)
        if line.startswith(("accuracy", "of the full network")):
            shares, own = (np.array(re.findall(r"([\d.]+)%", each), float) for each in (line, other))
            assert np.abs(shares - own).max() <= 3, (line, other)


def words(output: str) -> list[str]:
    """The words of the first line: numbers differ from machine to machine."""
    return re.findall(r"[A-Za-z]{2,}", output.strip().partition("\n")[0])


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_says_what_it_is_and_no_code_goes_unrun(page):
    text = page.read_text()
    assert len(OUTPUTS.FENCE.findall(text)) * 2 == len(re.findall(r"^ *```", text, re.MULTILINE))
    printed = [block.said for block in blocks(page)]  # compared with what the code above prints
    for kind, code in OUTPUTS.FENCE.findall(text):
        assert kind in ("", "text", "yaml", *OUTPUTS.KINDS)
        assert (
            kind in OUTPUTS.KINDS or code in printed or not re.search(r"^(import|from|>>>|alight) ", code, re.MULTILINE)
        ), code


def test_the_readme_and_the_pages_stay_short():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    assert sum(len(page.read_text().split()) for page in pages) <= WORDS


def test_the_readme_has_code_to_run():
    assert blocks(ROOT / "README.md")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_local_link_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", [page for page in PAGES if TABLES.DIRECTIVE.search(page.read_text())], ids=name_of)
def test_every_table_of_a_page_is_rendered_from_results(page):
    text = page.read_text()
    shown = TABLES.on_page_markdown(text, SimpleNamespace(file=SimpleNamespace(src_uri=name_of(page))))
    assert "<!-- table" not in shown
    assert len(re.findall(r"^ *\| --- \|", shown, re.MULTILINE)) >= len(TABLES.DIRECTIVE.findall(text)) > 0


def test_the_table_of_the_readme_is_that_of_the_first_page():
    _, path, options = TABLES.DIRECTIVE.search((ROOT / "docs" / "index.md").read_text()).groups()
    assert path == "results/instead.csv"
    table = "\n".join(TABLES.render(path, options))
    assert "| --- |" in table
    assert f"\n\n{table}\n\n" in (ROOT / "README.md").read_text()


def test_speed_ups_over_the_full_network_are_ratios_of_its_throughput():
    with (ROOT / "results" / "instead.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert rows[0]["name"] == "ResNet-18"
    for row in rows:
        ratio = float(row["per_second"]) / float(rows[0]["per_second"])
        assert float(row["speedup"]) == pytest.approx(ratio, abs=1e-4)


def test_accuracies_of_methods_at_equal_spent_budget_are_those_that_results_give():
    recorded = experiment("recorded_resnet18")
    with recorded.EQUAL_SPEND.open() as file:
        committed = list(csv.DictReader(file))
    found = [row for heads, path in recorded.RESULTS.items() for row in recorded.equal_spend(heads, read_points(path))]
    assert found == committed
    assert {row["heads"] for row in committed} == {"frozen", "joint"}


def test_the_tree_in_the_design_page_names_every_room():
    tree = (ROOT / "docs" / "design.md").read_text()
    for path in (ROOT / "src" / "alight").iterdir():
        if path.name != "__init__.py" and (path.suffix == ".py" or (path / "__init__.py").exists()):
            assert path.stem in tree
