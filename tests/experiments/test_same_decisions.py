"""What engines decide is compared sample by sample, and what differs is counted."""

import importlib
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from exported import network, older_exporter, policy

FOLDER = Path(__file__).parent.parent.parent


@pytest.fixture
def script(monkeypatch):
    before = set(sys.modules)
    for folder in ("benchmarks", "experiments"):
        monkeypatch.syspath_prepend(str(FOLDER / folder))
    found = importlib.import_module("same_decisions")
    monkeypatch.setattr(found, "ENGINES", {"torch": found.by_torch, "onnx": found.by_onnx})
    with older_exporter():
        yield found
    for name in set(sys.modules) - before:
        if (FOLDER / "benchmarks" / f"{name}.py").exists() or (FOLDER / "experiments" / f"{name}.py").exists():
            sys.modules.pop(name)  # only scripts: a library without its package, such as PIL, breaks later tests


@pytest.fixture
def case(script, tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, size=(50, 6, 7, 3), dtype=np.uint8)
    return script.Case("images", network(), replace(policy(), fingerprint=""), [pixels[:32], pixels[32:]], tmp_path)


def test_torch_and_onnx_decide_the_same(script, case):
    (row,) = script.compared(case)
    assert (row["data"], row["engine"], row["beside"], row["samples"]) == ("images", "onnx", "torch", 50)
    assert row["other_labels"] == row["other_exits"] == row["different"] == 0
    assert row["exits_taken"] > 1
    assert float(row["score_gap"]) < 1e-5
    assert float(row["probability_gap"]) < 1e-5


def test_what_differs_is_counted(script, case, monkeypatch):
    def wrong(given):
        said = script.by_torch(given)
        said.decisions.exits[:3] = (said.decisions.exits[:3] + 1) % 4
        said.decisions.predictions[3] += 1
        return replace(said, scores=said.scores + 0.5)

    monkeypatch.setattr(script, "ENGINES", {"torch": script.by_torch, "wrong": wrong})
    (row,) = script.compared(case)
    assert (row["other_exits"], row["other_labels"], row["different"], row["score_gap"]) == (3, 1, 4, "5.00e-01")


def test_a_score_at_a_threshold_is_near(script, case):
    table = script._table(case)
    moved = replace(case.policy, thresholds=(float(table.scores[7, 0]) + 5e-6, case.policy.thresholds[1]))
    assert script.near_a_threshold(moved, table)[7]
    assert not script.near_a_threshold(replace(case.policy, thresholds=(2.0, 2.0)), table).any()
