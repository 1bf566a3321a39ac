"""Help is short, grouped and true: every example in it runs."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torchvision
from commands import run
from safetensors.torch import save_file

from alight.cli.command import MEANINGS, ExitStatus
from alight.cli.parser import COMMANDS, GROUPS
from alight.planning import plan as planning
from alight.planning import timing

TESTED_ELSEWHERE = ("demo", "export", "run", "serve")
SLOW = ("--engine ray", "plan")  # more than five seconds


def test_the_installed_command_answers():
    done = subprocess.run([sys.executable, "-m", "alight.cli", "--version"], capture_output=True, text=True)
    assert done.returncode == 0
    assert re.fullmatch(r"alight \d+\.\d+\.\d+\n", done.stdout)


def test_the_overview_is_short_and_shows_every_command_in_its_group(capsys):
    status, out, _ = run("--help", capsys)
    assert status == 0
    assert len(out.splitlines()) <= 40
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


@pytest.mark.filterwarnings("ignore:the last exit")  # of weights that are not trained
@pytest.mark.parametrize(("name", "example", "first"), [*examples()])
def test_every_example_runs_and_gives_json_if_asked(name, example, first, example_files, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(timing, "SECONDS", 0.02)
    monkeypatch.setattr(planning, "ROUNDS", 2)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(example_files, tmp_path, dirs_exist_ok=True)
    if name in ("attach", "train", "record") and " -o " in example:  # what they write must be new
        written = Path(example.rpartition(" ")[2])
        shutil.rmtree(written) if written.is_dir() else written.unlink(missing_ok=True)
    if "resnet18.safetensors" in example:
        save_file(torchvision.models.resnet18(num_classes=10).state_dict(), "resnet18.safetensors")
    status, out, err = run(example, capsys)
    assert status == 0, err
    assert out.strip()
    if first and COMMANDS[name].results:
        again = " --force" * (name in ("attach", "record")) + " --json" * ("--json" not in example)
        status, out, err = run(f"{example} --quiet{again}", capsys)
        assert (status, err) == (0, "")
        assert json.loads(out)
    assert not [path for path in tmp_path.rglob(".*") if path.is_file()]


def test_the_page_on_the_command_line_explains_every_exit_status():
    page = (Path(__file__).parents[2] / "docs" / "command_line.md").read_text()
    statuses = [int(status) for status in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)]
    assert statuses == [*ExitStatus] == [*MEANINGS]
