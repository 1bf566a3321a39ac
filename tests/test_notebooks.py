"""Notebooks run from top to bottom, show what they end their cells with, and are kept without outputs."""

import ast
import json
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


def cells(path: Path) -> list[str]:
    found = json.loads(path.read_text())["cells"]
    return ["".join(cell["source"]) for cell in found if cell["cell_type"] == "code"]


def shown(source: str, names: dict[str, object], where: str) -> object:
    """The value that a cell ends with, as a notebook would show it."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, where, "exec"), names)
    return None if last is None else eval(compile(ast.Expression(last.value), where, "eval"), names)


def test_there_is_a_tour():
    assert [path.name for path in NOTEBOOKS] == ["tour.ipynb"]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_runs_and_its_tables_are_shown(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    tables = []
    for number, source in enumerate(cells(path)):
        value = shown(source, names, f"{path.name}, cell {number}")
        tables += [value._repr_html_()] if hasattr(value, "_repr_html_") else []
    assert {"HeadOutputs", "Costs", "Policy", "Decisions", "Plan"} <= {
        kind for table in tables for kind in kinds(table)
    }


def kinds(table: str) -> list[str]:
    texts = {"HeadOutputs": "HeadOutputs(", "Costs": "Costs per sample", "Policy": "leave at the first score"}
    texts |= {"Decisions": "Decisions: ", "Plan": "open exits: "}
    return [kind for kind, words in texts.items() if words in table]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_is_kept_without_outputs(path):
    for cell in json.loads(path.read_text())["cells"]:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
