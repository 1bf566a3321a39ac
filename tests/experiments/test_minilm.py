"""Sentences of banking77 and CLINC150 are read unchanged, and results of one do not touch those of the other."""

import csv
import importlib
import json
import sys
from pathlib import Path

import pytest

EXPERIMENTS = Path(__file__).parent.parent.parent / "experiments"


@pytest.fixture
def script(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    found = importlib.import_module("minilm_exits")
    monkeypatch.setattr(found, "RESULT", tmp_path / "minilm_exits.csv")
    yield found
    for name in ("minilm_exits", "cifar100_ship", "recorded_cifar100"):
        sys.modules.pop(name, None)


def test_sentences_have_their_intents(script, tmp_path):
    for part in ("train", "test"):
        (tmp_path / f"{part}.csv").write_text('text,category\n"a card, please",card_arrival\nno cash,cash\n')
    train, test = script.read_banking77(tmp_path)
    assert train == test == [("a card, please", "card_arrival"), ("no cash", "cash")]
    found = {"train": [["play it", "music"]], "test": [["stop", "stop"]], "oos_test": [["who won", "oos"]]}
    (tmp_path / "data_full.json").write_text(json.dumps(found))
    assert script.read_clinc150(tmp_path) == ([("play it", "music")], [("stop", "stop")])


def test_rows_of_one_data_set_replace_its_own_alone(script):
    made = dict.fromkeys(("hardware", "versions", "date", "commit", "seed", "seconds"), "here")
    about = made | {"exits": ["first", "end"], "test_accuracy": [0.5, 0.9]}
    for name, shares in (("clinc150", [0.2, 1.0]), ("banking77", [0.3, 1.0]), ("clinc150", [0.4, 1.0])):
        script.write_exits(name, about, shares)
    with script.RESULT.open(newline="") as file:
        found = [(row["data"], row["exit"], row["share_of_flops"]) for row in csv.DictReader(file)]
    assert found == [
        ("banking77", "first", "0.3000"),
        ("banking77", "end", "1.0000"),
        ("clinc150", "first", "0.4000"),
        ("clinc150", "end", "1.0000"),
    ]


def test_calibration_and_test_come_from_one_shuffled_pool(script):
    train, test = ([(f"{part} {index}", "intent") for index in range(6000)] for part in ("train", "test"))
    parts = script.split(train, test)
    assert [len(own) for own in parts.values()] == [5000, 1000, 5000]
    assert set(parts["train"]) <= set(train)
    assert sorted(parts["calibration"] + parts["test"]) == sorted(test)
    assert 0.1 < sum(int(text.split()[1]) < 3000 for text, _ in parts["calibration"]) / 1000 < 0.9  # in no order
