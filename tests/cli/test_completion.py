"""Completion: what a Tab offers is what the parser takes."""

import shutil
import subprocess

import pytest
from commands import run
from shells import offered

from alight import calibrate
from alight.cli.completion import OVERVIEW, SHELLS
from alight.cli.parser import COMMANDS


def script(shell, capsys):
    status, out, _ = run(f"completion {shell}", capsys)
    assert status == 0
    return out


CASES = {
    "a command": ("alight cal", {"calibrate"}),
    "any command": ("alight ", set(COMMANDS)),
    "what stands without a command": ("alight --v", {"--version"}),
    "an option": ("alight sweep --me", {"--methods"}),
    "a value": ("alight costs --unit m", {"ms"}),
    "any value": ("alight calibrate --method ", set(calibrate.METHODS)),
    "a word of a few": ("alight completion ", set(SHELLS)),
    "a file": ("alight report poi", {"points.csv"}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shell", SHELLS)
def test_a_tab_completes(shell, case, capsys, tmp_path):
    written = tmp_path / f"alight.{shell}"
    written.write_text(script(shell, capsys))
    (tmp_path / "points.csv").touch()
    line, expected = CASES[case]
    found = set(offered(shell, written, line.split(" ")))
    if shell == "bash":
        expected = {"any command": expected | {*OVERVIEW}, "a file": set()}.get(case, expected)  # it adds files itself
    if shell == "fish" and case == "a value":
        expected = expected | {"MACs"}  # whatever the case of letters
    assert found == expected


def test_every_option_is_in_every_script(capsys):
    for shell in SHELLS:
        text = script(shell, capsys)
        for name in COMMANDS:
            assert name in text
        for option in ("max-accuracy-loss", "allow-mismatch", "log-probabilities", "json"):
            assert option in text


@pytest.mark.parametrize("shell", SHELLS)
def test_the_shell_itself_takes_its_script(shell, capsys):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    text = script(shell, capsys)
    check = {"fish": ["fish", "--no-execute"], "bash": ["bash", "-n"], "zsh": ["zsh", "-n"]}[shell]
    done = subprocess.run(check, input=text, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
