"""Completion: what a Tab offers in bash is what the parser accepts, and other shells accept their script."""

import shutil
import subprocess
import sys

import pytest
from commands import run

from alight import calibrate
from alight.cli.parser import COMMANDS, SHELLS

pytest.importorskip("shtab")

COMPLETE = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
compopt() { :; }  # which bash only allows while it completes
$(complete -p alight | sed 's/.*-F \\([^ ]*\\).*/\\1/')
printf '%s\\n' "${COMPREPLY[@]}"
"""
CASES = {
    "a command": ("alight cal", {"calibrate"}),
    "any command": ("alight ", set(COMMANDS)),
    "an option without a command": ("alight --v", {"--version"}),
    "an option": ("alight sweep --me", {"--methods"}),
    "a value": ("alight costs model --unit m", {"ms"}),
    "any value": ("alight calibrate --method ", set(calibrate.METHODS)),
    "a choice": ("alight completion ", set(SHELLS)),
    "a file": ("alight report poi", {"points.csv"}),
    "a file of an option": ("alight sweep --images im", {"images.npz"}),
}


@pytest.fixture
def script(capsys):
    def printed(shell):
        status, out, err = run(f"completion {shell}", capsys)
        assert (status, err) == (0, "")
        return out

    return printed


@pytest.mark.parametrize("case", CASES)
def test_a_tab_completes_in_bash(case, script, tmp_path):
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    (tmp_path / "alight.bash").write_text(script("bash"))
    for name in ("points.csv", "images.npz"):
        (tmp_path / name).touch()
    line, expected = CASES[case]
    command = ["bash", "--norc", "-c", COMPLETE, "bash", "alight.bash", *line.split(" ")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")
    assert {word.strip() for word in done.stdout.splitlines() if word.strip()} == expected


@pytest.mark.parametrize("shell", SHELLS)
def test_every_script_has_commands_and_options_and_is_accepted_by_its_shell(shell, script, tmp_path):
    text = script(shell)
    for word in (*COMMANDS, "max-accuracy-loss", "allow-mismatch", "features", "json"):
        assert word in text
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "script").write_text(text)
    done = subprocess.run([shell, "-n", "script"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_without_shtab_one_line_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "shtab", None)
    status, out, err = run("completion bash", capsys)
    assert (status, out) == (1, "")
    assert err.endswith('pip install "alight[completion]"\n')
    assert err.count("\n") == 1
