"""Pages that commands write: examples, several networks, plans."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from commands import make_tables, run

from alight import read_points
from alight.planning import timing

SWEEP = "sweep labelled.npz test.npz --costs costs.json --methods geometric,eero --budgets 40%,70%"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_tables(tmp_path)
    return tmp_path


def networks_of(path: str) -> list[dict]:
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', Path(path).read_text(), re.DOTALL)
    return json.loads(data[1])["networks"]


def test_a_sweep_shows_test_images_where_they_left_under_its_first_method(folder, capsys):
    np.savez("images.npz", images=np.zeros((600, 8, 8), dtype=np.uint8))
    status, _, err = run(f"{SWEEP} --report page.html --images images.npz", capsys)
    assert status == 0, err
    (network,) = networks_of("page.html")
    points = [point for point in read_points("points.csv") if point.method == "geometric"]
    walks = network["examples"]["walks"]
    assert [(walk["method"], walk["budget"]) for walk in walks] == [(each.method, each.budget) for each in points]
    assert len(network["examples"]["images"]) == 60


def test_images_are_checked_before_the_sweep(folder, capsys):
    assert "give --report FILE" in run(f"{SWEEP} --images images.npz", capsys)[2]
    assert "images.npz: No such file" in run(f"{SWEEP} --report page.html --images images.npz", capsys)[2]
    status, _, err = run(f"{SWEEP} --report page.html --images labelled.npz", capsys)
    assert (status, "it holds no images" in err) == (1, True)
    assert not Path("page.html").exists()


def test_a_report_of_several_tables_has_a_network_for_each(folder, capsys):
    for name in ("small", "large", "other/large"):
        Path(name).parent.mkdir(exist_ok=True)
        assert run(f"{SWEEP} -o {name}.csv", capsys)[0] == 0
    assert run("report small.csv large.csv -o page.html", capsys)[0] == 0
    assert [network["name"] for network in networks_of("page.html")] == ["small", "large"]
    assert run("report large.csv other/large.csv -o page.html", capsys)[0] == 0
    assert [network["name"] for network in networks_of("page.html")] == ["large.csv", "other/large.csv"]
    assert "named twice" in run("report small.csv small.csv -o page.html", capsys)[2]


def test_a_plan_is_shown_beside_the_full_network(chain, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(timing, "SECONDS", 0.02)
    line = f"plan {chain}/model {chain}/labelled.npz --batch-size 16 --max-accuracy-loss 0.3 --report page.html --json"
    status, out, err = run(line, capsys)
    assert status == 0, err
    values = json.loads(out)
    (network,) = networks_of("page.html")
    assert values["report"] == "page.html"
    assert network["plan"]["planned"] == {"throughput": values["throughput"], "accuracy": values["accuracy"]}
    assert network["plan"]["full"]["throughput"] == values["full_throughput"]
    assert network["unit"] == "ms"
    assert network["exits"][:2] == ["layer1", "layer2"]
    assert "measured on" in network["note"]
    assert values["accuracy"] in network["chosen"]  # measured on the same samples as the plan
    assert network["speed"]["speedup"] == values["speedup"]
    assert network["guarantees"] == [values["reason"]]
