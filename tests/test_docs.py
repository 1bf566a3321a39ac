"""Documents are true: their code runs, their links lead somewhere, their figures come from results."""

import csv
import importlib.util
import re
from pathlib import Path

import pytest

from alight import read_points
from alight.planning import plan as planning
from alight.planning import timing

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def experiment(name: str, folder: str = "experiments"):
    spec = importlib.util.spec_from_file_location(name, ROOT / folder / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(ROOT / folder))  # where it finds what it shares with others
        spec.loader.exec_module(module)
    return module


OUTPUTS = experiment("page_outputs")
CLOCK = re.compile(r"\b(plan|tune_speed)\(")  # what these say hangs on the machine


def told(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> list:
    return OUTPUTS.blocks(page.read_text())


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=told)
def test_every_block_of_code_on_a_page_runs_and_prints_what_stands_below(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(timing, "SECONDS", 0.02)
    monkeypatch.setattr(planning, "ROUNDS", 2)
    text = page.read_text()
    shows = "<!-- run -->" in text
    for block, said in OUTPUTS.run(text, page.name):  # in order, as a reader would
        if shows or block.said is not None:
            assert bool(said.strip()) == bool(block.said), block.code
            assert CLOCK.search(block.code) or words(said) == words(block.said or ""), block.code


def words(output: str) -> list[str]:
    """The words of the first line: numbers differ from machine to machine."""
    return re.findall(r"[A-Za-z]{2,}", output.strip().partition("\n")[0])


@pytest.mark.parametrize("page", PAGES, ids=told)
def test_every_block_says_what_it_is_and_no_code_goes_unrun(page):
    text = page.read_text()
    assert len(OUTPUTS.FENCE.findall(text)) * 2 == len(re.findall(r"^ *```", text, re.MULTILINE))
    for kind, code in OUTPUTS.FENCE.findall(text):
        assert kind in ("", "text", "yaml", *OUTPUTS.KINDS)
        assert kind in OUTPUTS.KINDS or not re.search(r"^(import|from|>>>|alight) ", code, re.MULTILINE), code


def test_the_readme_has_code_to_run():
    assert blocks(ROOT / "README.md")


@pytest.mark.parametrize("page", PAGES, ids=told)
def test_every_local_link_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_tables_of_methods_are_those_that_results_give():
    recorded = experiment("recorded_resnet18")
    for path in recorded.RESULTS.values():
        assert recorded.table(read_points(path)) in (ROOT / "docs" / "comparison.md").read_text()


@pytest.mark.parametrize("name", ["README.md", "docs/index.md", "docs/does_not_pay.md"])
def test_short_tables_are_those_that_results_give(name):
    tables = experiment("short_tables")
    text = (ROOT / name).read_text()
    assert tables.page(text, tables.PAGES[name]) == text


def test_figures_of_guarantees_are_those_of_their_results():
    page = (ROOT / "docs" / "guarantees.md").read_text()
    assert experiment("guarantees").page(page) == page


def test_figures_of_speed_are_those_of_their_results():
    page = (ROOT / "docs" / "speed.md").read_text()
    assert experiment("speed_page", "benchmarks").page(page) == page


def test_figures_of_the_service_are_those_of_their_results():
    page = (ROOT / "docs" / "deploy.md").read_text()
    assert experiment("serve_page", "benchmarks").page(page) == page


def test_figures_of_exported_networks_are_those_of_their_results():
    page = (ROOT / "docs" / "deploy.md").read_text()
    assert experiment("deploy_page", "benchmarks").page(page) == page


def test_the_page_on_models_counts_the_families_that_were_cut():
    with (ROOT / "results" / "cut_coverage.csv").open() as file:
        fine = [row["ok"] == "True" for row in csv.DictReader(file)]
    assert f"{sum(fine)} of {len(fine)} give" in (ROOT / "docs" / "models.md").read_text()
    for name in ("README.md", "docs/how-to/backbone.md"):
        assert f"of each of {len(fine)} families" in (ROOT / name).read_text()


def test_the_tree_in_the_design_page_names_every_room():
    tree = (ROOT / "docs" / "design.md").read_text()
    for path in (ROOT / "src" / "alight").iterdir():
        if path.name != "__init__.py" and (path.suffix == ".py" or (path / "__init__.py").exists()):
            assert path.name in tree
