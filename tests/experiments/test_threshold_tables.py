"""The tables of the page on the method are those that this code gives."""

import csv
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    return importlib.import_module("thresholds")


@pytest.mark.parametrize("name", ["slack", "passing"])
def test_committed_rows_are_those_of_this_code(name, script):
    with (ROOT / "results" / f"{name}.csv").open(newline="") as file:
        committed = list(csv.DictReader(file))
    for row, expected in zip(script.TABLES[name](), committed, strict=True):
        for column, value in row.items():
            assert expected[column] == (value if isinstance(value, str) else f"{value:.4f}"), (column, row)
