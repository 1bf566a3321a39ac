"""Shells, asked as their own Tab asks."""

import os
import pty
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path
from threading import Timer

import pytest

ASK_BASH = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_alight
printf '%s\\n' "${COMPREPLY[@]}"
"""
ASK_FISH = "source $argv[1]; complete --do-complete $argv[2]"
ASK_ZSH = """
autoload -Uz compinit; compinit -u -D
source "$SCRIPT"
compadd() {  # every word that is offered passes here; those that only look (-O, -A, -D) offer none
    if [[ ${@[1,(i)(-|--)]} == *-(O|A|D)\\ * ]]; then builtin compadd "$@"; return; fi
    local -a found; builtin compadd -O found "$@"; offered+=("${found[@]}")
    builtin compadd "$@"
}
tell() { zle complete-word; print -rl -- "${(@u)offered}" > "$TOLD"; exit }
zle -N tell; bindkey '^T' tell
"""
CONTROL_T = b"\x14"
SECONDS = 30


def offered(shell: str, script: Path, words: list[str]) -> list[str]:
    """What the shell offers for the last word, files that lie beside the script too, sorted."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    asked = {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](script, words)
    return sorted(word for word in asked.splitlines() if word)


def _bash(script: Path, words: list[str]) -> str:
    return _told(["bash", "--norc", "-c", ASK_BASH, "bash", str(script), *words], script.parent)


def _fish(script: Path, words: list[str]) -> str:
    told = _told(["fish", "--no-config", "-c", ASK_FISH, str(script), " ".join(words)], script.parent)
    return "\n".join(line.partition("\t")[0] for line in told.splitlines())  # what a word is for stands behind it


def _told(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=SECONDS, check=True)
    assert done.stderr == ""
    return done.stdout


def _zsh(script: Path, words: list[str]) -> str:
    """Asked in a terminal, without which zsh does not complete."""
    ask, told = script.with_name(".ask"), script.with_name(".told")
    ask.write_text(ASK_ZSH)
    ours, theirs = pty.openpty()
    given = {"env": {**os.environ, "TERM": "dumb", "SCRIPT": str(script), "TOLD": str(told)}, "cwd": script.parent}
    with subprocess.Popen(["zsh", "-f", "-i"], stdin=theirs, stdout=theirs, stderr=theirs, **given) as process:
        os.close(theirs)
        watch = Timer(SECONDS, process.kill)
        watch.start()
        os.write(ours, f"source {ask}\n{' '.join(words)}".encode() + CONTROL_T)
        with suppress(OSError):  # the terminal is gone with the shell
            while os.read(ours, 4096):
                pass
        watch.cancel()
    os.close(ours)
    return told.read_text()
