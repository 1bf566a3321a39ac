"""Completion: what a Tab offers is what the parser takes."""

import shutil
import subprocess

import pytest
from commands import run

from alight import calibrate
from alight.cli.completion import SHELLS
from alight.cli.parser import COMMANDS


def script(shell, capsys):
    status, out, _ = run(f"completion {shell}", capsys)
    assert status == 0
    return out


def offered(words, capsys, folder):
    """What bash offers for the last word, asked as its own Tab asks."""
    code = f"""{script("bash", capsys)}
COMP_WORDS=({" ".join(f"'{word}'" for word in words)}); COMP_CWORD={len(words) - 1}
_alight
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, cwd=folder, check=True)
    assert done.stderr == ""
    return done.stdout.split()


def test_bash_completes_commands_options_and_their_values(capsys, tmp_path):
    assert set(offered(["alight", ""], capsys, tmp_path)) == {*COMMANDS, "--help", "--version"}
    assert offered(["alight", "cal"], capsys, tmp_path) == ["calibrate"]
    assert offered(["alight", "sweep", "--me"], capsys, tmp_path) == ["--methods"]
    assert set(offered(["alight", "calibrate", "--method", ""], capsys, tmp_path)) == set(calibrate.METHODS)
    assert offered(["alight", "costs", "--unit", "m"], capsys, tmp_path) == ["ms"]
    assert offered(["alight", "completion", ""], capsys, tmp_path) == list(SHELLS)
    assert offered(["alight", "report", "poi"], capsys, tmp_path) == []  # so that bash offers files


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
