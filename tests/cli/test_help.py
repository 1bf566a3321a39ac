"""Help is short, grouped and true: every example in it runs."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torchvision
from commands import run
from safetensors.torch import save_file

from alight import recordings
from alight.cli.command import MEANINGS, ExitStatus
from alight.cli.parser import COMMANDS, GROUPS
from alight.networks.own import import_object
from alight.planning import plan as planning

NETS = """
from torch import nn

class Block(nn.Sequential):
    def __init__(self, inputs, outputs):
        super().__init__(nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.Conv2d(outputs, outputs, 1))

class Net(nn.Sequential):
    def __init__(self, width=4):
        blocks = [Block(3, width), *[Block(width, width) for _ in range(4)]]
        super().__init__(*blocks, nn.Flatten(), nn.Linear(1024 * width, 10))
"""
TESTED_ELSEWHERE = ("demo", "export", "run", "serve")
SLOW = ("--engine ray", "plan", "fit model", "--report report.html")  # more than five seconds


def test_the_installed_command_answers():
    done = subprocess.run([sys.executable, "-m", "alight", "--version"], capture_output=True, text=True)
    assert done.returncode == 0
    assert re.fullmatch(r"alight \d+\.\d+\.\d+\n", done.stdout)


def test_the_overview_is_short_and_shows_every_command_in_its_group(capsys):
    status, out, _ = run("--help", capsys)
    assert status == 0
    assert len(out.splitlines()) <= 45
    assert max(map(len, out.splitlines())) <= 110
    for title, commands in GROUPS.items():
        block = re.search(rf"^{re.escape(title)}:\n(.*?)\n\n", out, re.DOTALL | re.MULTILINE)[1]
        assert [line.split()[0] for line in block.splitlines()] == [command.name for command in commands]
    for status, meaning in MEANINGS.items():
        assert f"  {status:<3}  {meaning}\n" in out


@pytest.mark.parametrize("name", COMMANDS)
def test_every_help_is_there_with_its_examples(name, capsys):
    status, out, _ = run(f"{name} --help", capsys)
    assert status == 0
    assert COMMANDS[name].purpose in out
    for example in COMMANDS[name].examples:
        assert f"\n  alight {example}\n" in out
        assert example.startswith(name)


def examples():
    for name, command in COMMANDS.items():
        for number, example in enumerate(command.examples):
            if name not in TESTED_ELSEWHERE:
                slow = [pytest.mark.slow] if any(word in example for word in SLOW) else []
                yield pytest.param(name, example, number == 0, id=example, marks=slow)


@pytest.mark.filterwarnings(
    "ignore:the (last exit|full network)", "ignore:(Early exit|Faster here)"
)  # untrained weights
@pytest.mark.parametrize(("name", "example", "first"), [*examples()])
def test_every_example_runs_and_gives_json_if_asked(name, example, first, example_files, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(planning, "ROUNDS", 2)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(example_files, tmp_path, dirs_exist_ok=True)
    if name in ("attach", "fit", "train", "record") and " -o " in example:  # what they write must be new
        written = example.partition(" -o ")[2].split()[0]
        if written not in example.partition(" -o ")[0].split():  # but where a model is trained in its own place
            shutil.rmtree(written) if Path(written).is_dir() else Path(written).unlink(missing_ok=True)
    if "resnet18.safetensors" in example:
        save_file(torchvision.models.resnet18(num_classes=10).state_dict(), "resnet18.safetensors")
    if "nets.py" in example:
        Path("nets.py").write_text(NETS)
        torch.save({"state_dict": import_object("nets.py:Net")(8).state_dict()}, "weights.pt")
    if name == "benchmark":
        recordings.load().save("mine.npz")
        Path("mine.py").write_text("from alight.calibrate import geometric as mine\n")
    status, out, err = run(example, capsys)
    assert status == 0, err
    assert out.strip()
    if first and COMMANDS[name].results:
        again = " --force" * (name in ("attach", "cascade", "fit", "record")) + " --json" * ("--json" not in example)
        status, out, err = run(f"{example} --quiet{again}", capsys)
        assert (status, err) == (0, "")
        assert json.loads(out)
    assert not [path for path in tmp_path.rglob(".*") if path.is_file()]


def test_the_page_on_the_command_line_explains_every_exit_status():
    page = (Path(__file__).parents[2] / "docs" / "command_line.md").read_text()
    statuses = [int(status) for status in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)]
    assert statuses == [*ExitStatus] == [*MEANINGS]
