"""Help is short, grouped and true: every example in it runs, in the order of the work, each on what others wrote."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torchvision
from commands import run
from digits import digits
from pyarrow import parquet
from safetensors.torch import save_file

from alight.cli.command import MEANINGS, ExitStatus
from alight.cli.parser import COMMANDS, GROUPS
from alight.planning import timing

WORK = "attach train record costs calibrate sweep report predict plan bench doctor completion".split()


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


@pytest.mark.filterwarnings("ignore:the last exit has")  # of weights that know nothing
def test_every_example_runs_and_gives_json_if_asked(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(timing, "SECONDS", 0.02)
    save_file(torchvision.models.resnet18(num_classes=10).state_dict(), "resnet18.safetensors")
    images, labels = digits()[0][:264]
    pictures = np.tile(255 * images.numpy(), (1, 3, 4, 4)).astype(np.uint8)
    for name, rows in {"train": slice(32), "validation": slice(32, 232), "test": slice(232, 264)}.items():
        np.savez(f"{name}.npz", images=pictures[rows], labels=labels[rows].numpy())
        tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(pictures[rows])
        parquet.write_table(pa.table({"image": tensors, "label": labels[rows].numpy()}), f"{name}.parquet")
    assert {*WORK, "demo", "export", "run", "serve"} == set(COMMANDS)  # the last four have tests of their own
    for name in WORK:
        for example in COMMANDS[name].examples:
            status, out, err = run(example, capsys)
            assert status == 0, (example, err)
            assert out.strip(), example
        if COMMANDS[name].results:
            status, out, err = run(f"{example} --quiet" + " --json" * ("--json" not in example), capsys)
            assert (status, err) == (0, ""), example
            assert json.loads(out), example
    assert not [path for path in tmp_path.rglob(".*") if path.is_file()]


def test_the_page_on_the_command_line_explains_every_exit_status():
    page = (Path(__file__).parents[2] / "docs" / "command_line.md").read_text()
    statuses = [int(status) for status in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)]
    assert statuses == [*ExitStatus] == [*MEANINGS]
