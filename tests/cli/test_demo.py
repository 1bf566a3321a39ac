"""The demo: runs anywhere, again and again, and what it prints is what was measured."""

import csv
import re

from commands import run

from alight import load_policy
from alight.cli.parser import COMMANDS


def test_the_demo_compares_eero_with_the_papers_rule_and_single_exits(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):  # twice: it can be run again
        status, out, err = run(COMMANDS["demo"].examples[0], capsys)
    assert status == 0
    assert "sweep" in err
    table = [line.split() for line in out.splitlines() if re.match(r"\s*\d+%", line)]
    assert [row[0] for row in table] == [f"{percent}%" for percent in range(20, 101, 10)]
    for row in table:
        eero, spent, paper, paper_spent, single, _ = (float(cell.rstrip("%")) for cell in row[1:])
        assert eero >= paper >= 0
        assert eero >= single
        assert paper_spent <= spent + 0.1
        assert spent <= 1.025 * float(row[0].rstrip("%"))
    assert str(tmp_path / "alight-demo" / "report.html") in out
    assert load_policy(tmp_path / "alight-demo" / "policy.json").method == "eero"
    dearest, _, ahead, delay = re.search(
        r"spends ([\d.]+)%.*: ([\d.]+)%.*than ([\d.]+) full.*after (\d+) of", out, re.S
    ).groups()
    assert float(dearest) <= 100
    assert float(ahead) <= 1
    assert int(delay) <= 2000
    with (tmp_path / "alight-demo" / "resnet18_cifar100_joint.csv").open() as file:
        assert {row["method"] for row in csv.DictReader(file)} >= {"eero", "patience", "oracle", "single_exit"}
