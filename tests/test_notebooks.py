"""Notebooks run from top to bottom, show what is kept below their cells, and end in a network that is faster."""

import importlib.util
import json
from pathlib import Path

import matplotlib
import pytest

from alight.planning import plan as planning
from alight.planning import timing

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MEGABYTE = 1_000_000


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("notebook_outputs", ROOT / "experiments" / "notebook_outputs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def kept(path: Path) -> list[dict]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def text_of(cell: dict) -> str:
    """All that is kept below a cell, without figures."""
    parts = [[*each.get("text", []), *each.get("data", {}).get("text/html", [])] for each in cell["outputs"]]
    return "".join(line for part in parts for line in part)


def kinds(cell: dict) -> list[str]:
    return [kind for each in cell["outputs"] for kind in sorted(each.get("data", ["stream"]))]


def test_there_is_a_tour():
    assert [path.name for path in NOTEBOOKS] == ["tour.ipynb"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Early exit is not worth it on this machine:UserWarning")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_runs_and_shows_what_is_kept_below_its_cells(path, script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(timing, "SECONDS", 0.02)
    monkeypatch.setattr(planning, "ROUNDS", 2)
    matplotlib.use("agg")
    ran = script.run(json.loads(path.read_text()), path.name)
    shown = [script.outputs(printed, value, number) for number, (_, printed, value) in enumerate(ran)]
    assert [kinds({"outputs": each}) for each in shown] == [kinds(cell) for cell in kept(path)]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_is_kept_with_tables_figures_and_a_win(path):
    texts = [text_of(cell) for cell in kept(path)]
    for words in ("HeadOutputs(", "Costs per sample", "leave at the first score", "Decisions: ", "open exits: "):
        assert any(words in text for text in texts), words
    assert sum("image/png" in kinds(cell) for cell in kept(path)) == 2
    assert any("Early exit pays here: " in text for text in texts)
    assert "Early exit pays; " in texts[-1]
    assert path.stat().st_size < MEGABYTE
