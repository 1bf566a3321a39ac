"""Documents are true: their code runs, their links lead somewhere, their figures come from results."""

import csv
import importlib.util
import re
from pathlib import Path

import pytest

from alight import read_points

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.name)
def test_every_block_of_code_on_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in blocks(page):  # in order, as a reader would
        exec(compile(block, str(page), "exec"), names)
    assert names


def test_the_readme_has_code_to_run():
    assert blocks(ROOT / "README.md")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_local_link_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), target


def experiment(name: str, folder: str = "experiments"):
    spec = importlib.util.spec_from_file_location(name, ROOT / folder / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_of_methods_are_those_that_results_give():
    recorded = experiment("recorded_resnet18")
    assert recorded.table(read_points(recorded.RESULTS["frozen"])) in (ROOT / "README.md").read_text()
    for path in recorded.RESULTS.values():
        assert recorded.table(read_points(path), recorded.LONG) in (ROOT / "docs" / "comparison.md").read_text()


def test_figures_of_guarantees_are_those_of_their_results():
    page = (ROOT / "docs" / "guarantees.md").read_text()
    assert experiment("guarantees").page(page) == page


def test_figures_of_speed_are_those_of_their_results():
    page = (ROOT / "docs" / "speed.md").read_text()
    assert experiment("speed_page", "benchmarks").page(page) == page


def test_the_page_on_models_counts_the_families_that_were_cut():
    with (ROOT / "results" / "cut_coverage.csv").open() as file:
        fine = [row["ok"] == "True" for row in csv.DictReader(file)]
    assert f"{sum(fine)} of {len(fine)} give" in (ROOT / "docs" / "models.md").read_text()


def test_the_tree_in_the_design_page_names_every_room():
    tree = (ROOT / "docs" / "design.md").read_text()
    for path in (ROOT / "src" / "alight").iterdir():
        if path.name != "__init__.py" and (path.suffix == ".py" or (path / "__init__.py").exists()):
            assert path.name in tree
