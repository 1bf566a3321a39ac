"""Runs the blocks of a page, as its reader would, and writes what each prints below it.

    python experiments/page_outputs.py docs/tutorial/images.md      # a minute on two cores

Blocks of Python share one namespace; a block of shell is a list of commands. All run in one temporary folder. A block
of text right below is what it printed, and is written anew. Between its `run` markers the page says on what that was.
"""

import ast
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import chdir, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

from alight.cli import main as alight
from alight.files import write_text
from alight.provenance import provenance

FENCE = re.compile(r"^```(?P<kind>[a-z]*)\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE)
OUTPUT = re.compile(r"\n\n```text\n(?P<said>.*?)^```$", re.DOTALL | re.MULTILINE)
MADE = re.compile(r"(?<=<!-- run -->\n).*?(?=<!-- end of run -->)", re.DOTALL)
SHELL = re.compile(r"[|>&;$]")  # what a shell has to read
KINDS = ("python", "bash")
PACKAGES = ("torch",)


class Block(NamedTuple):
    """A block of code on a page, where it ends, and what stands below it as its output."""

    kind: str
    code: str
    end: int
    said: str | None
    said_end: int


def blocks(text: str) -> list[Block]:
    """The blocks that are run, in order.

    >>> [(block.kind, block.said) for block in blocks("```python\\nprint(1)\\n```\\n\\n```text\\n1\\n```\\n")]
    [('python', '1\\n')]
    """
    made = []
    for found in FENCE.finditer(text):
        if found["kind"] in KINDS:
            below = OUTPUT.match(text, found.end())
            ends = (found.end(), below["said"], below.end()) if below else (found.end(), None, found.end())
            made.append(Block(found["kind"], found["code"], *ends))
    return made


def run(text: str, where: str) -> Iterator[tuple[Block, str]]:
    """Every block and what it prints when it is run, in this folder."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(text):
        with redirect_stdout(io.StringIO()) as said:
            if block.kind == "python":
                exec(compile(ast.parse(block.code), where, "exec"), names)
            else:
                for line in commands(block.code):
                    _do(line)
        yield block, said.getvalue()


def commands(code: str) -> list[str]:
    """The commands of a block of shell, without comments, continued lines joined."""
    lines = code.replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]


def _do(line: str) -> None:
    """Run a command; one of alight in this process, which has its libraries loaded."""
    if line.startswith("alight ") and not SHELL.search(line):
        try:
            status = alight(shlex.split(line, comments=True)[1:])
        except SystemExit as done:  # of --help
            status = int(done.code or 0)
    else:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        ran = subprocess.run(["bash", "-c", line], capture_output=True, text=True, env={**os.environ, "PATH": path})
        print(ran.stdout, end="")
        status = ran.returncode
    if status:
        raise RuntimeError(f"{line}: status {status}")


def page(text: str, said: list[tuple[Block, str]], made: str) -> str:
    """The page with these outputs in the place of those that it had."""
    for block, output in reversed(said):
        below = f"\n\n```text\n{output.rstrip()}\n```" if output.strip() else ""
        text = text[: block.end] + below + text[block.said_end :]
    return MADE.sub(made, text)


def main() -> None:
    for name in sys.argv[1:]:
        path = Path(name).resolve()
        text = path.read_text(encoding="utf-8")
        begin = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder, chdir(folder):
            said = list(run(text, path.name))
        seconds = time.perf_counter() - begin
        about = provenance(*PACKAGES, folder=path.parent)
        taken = f" in {seconds:.0f} seconds" if seconds > 5 else ""
        made = f"Run on {about['date']}{taken}: {about['hardware']}; {about['versions']}.\n"
        write_text(path, page(text, said, made))


if __name__ == "__main__":
    main()
