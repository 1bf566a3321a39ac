"""The two commands of a fresh clone, as make would run them."""

import os
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
INDEX = "https://wheels.example/cpu"
DRAWN = (
    "paper_tables",
    "paper_summaries",
    "paper_figures",
    "benchmark_figures",
    "capacity",
    "paper_report",
)  # in this order

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def planned(*arguments: str) -> list[str]:
    """The commands that make would run."""
    alone = {name: each for name, each in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    line = ["make", "-n", "--no-print-directory", *arguments]
    done = subprocess.run(line, cwd=ROOT, env=alone, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def position(commands: list[str], *words: str) -> int:
    return next(index for index, command in enumerate(commands) if all(word in command for word in words))


@pytest.mark.parametrize("target", ["demo", "test"])
def test_a_fresh_clone_makes_an_environment_and_installs_once(target, tmp_path):
    commands = planned(target, f"VENV={tmp_path}/venv")
    assert position(commands, "-m venv") < position(commands, "pip install", "--editable")
    assert not [command for command in commands if "--index-url" in command]
    (tmp_path / "venv").mkdir()
    for stamp in (".python", ".installed", ".installed-dev"):
        (tmp_path / "venv" / stamp).touch()
    again = planned(target, f"VENV={tmp_path}/venv")
    assert not [command for command in again if "install" in command or "-m venv" in command]


def test_the_demo_gets_what_it_trains_with(tmp_path):
    commands = planned("demo", f"VENV={tmp_path}/venv")
    assert position(commands, "--editable", "[torch,learn]") < position(commands, "alight demo")


@pytest.mark.slow
def test_the_demo_takes_less_than_a_minute_once_it_is_installed(tmp_path):
    """On one core, by its CPU time, which other work on the machine does not change."""
    (tmp_path / "venv").mkdir()
    for stamp in (".python", ".installed"):
        (tmp_path / "venv" / stamp).touch()
    (command,) = planned("demo", f"VENV={tmp_path}/venv")
    program, *arguments = shlex.split(command)
    assert program == f"{tmp_path}/venv/bin/alight"
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    # fmt: off
    with (tmp_path / "printed").open("wb") as printed, subprocess.Popen(
        [sys.executable, "-m", "alight", *arguments], cwd=tmp_path, env=os.environ | threads,
        stdout=printed, stderr=subprocess.STDOUT,
    ) as running:
        _, status, used = os.wait4(running.pid, 0)
        running.returncode = os.waitstatus_to_exitcode(status)
    # fmt: on
    assert running.returncode == 0, (tmp_path / "printed").read_text()
    assert (tmp_path / "alight-demo" / "report.html").is_file()
    assert used.ru_utime + used.ru_stime < 60


@pytest.mark.parametrize("target", ["demo", "test"])
def test_torch_may_come_from_another_index(target, tmp_path):
    commands = planned(target, f"VENV={tmp_path}/venv", f"TORCH_INDEX={INDEX}")
    torch = position(commands, "pip install", "torch torchvision", f"--index-url {INDEX}")
    assert torch < position(commands, "pip install", "--editable")


def test_another_index_is_heeded_even_after_a_first_demo(tmp_path):
    (tmp_path / "venv").mkdir()
    for stamp in (".python", ".installed"):
        (tmp_path / "venv" / stamp).touch()
    assert position(planned("test", f"VENV={tmp_path}/venv", f"TORCH_INDEX={INDEX}"), f"--index-url {INDEX}") >= 0


def test_figures_need_no_network_and_are_computed_before_they_are_drawn():
    commands = planned("figures")
    scripts = [position(commands, f"experiments/{name}.py") for name in DRAWN]
    assert scripts == sorted(scripts)
    assert not [command for command in commands if "[dev]" in command or "_page.py" in command]


def test_the_site_is_built_strictly_without_torch(tmp_path):
    commands = planned("docs", f"VENV={tmp_path}/venv", f"TORCH_INDEX={INDEX}")
    assert position(commands, "pip install", '".[docs]"') < position(commands, "mkdocs build", "--strict")
    assert not [command for command in commands if "torch" in command]


def test_testing_runs_lint_types_and_all_tests():
    commands = planned("test")
    for words in (["ruff", "check"], ["ruff", "format", "--check"], ["mypy"], ["pytest"]):
        assert position(commands, *words) >= 0
    assert "make test" in (ROOT / ".ci" / "run").read_text()


def run_as_make_does(folder: Path, test: str, *options: str) -> subprocess.CompletedProcess[str]:
    """The run of a file of tests with the options and settings of `make test`, some of them replaced."""
    commands = planned("test")
    command = commands[position(commands, "pytest", "--dist")].split("-m pytest")[1].split("&&")[0]
    own = [option if option != "auto" else "2" for option in shlex.split(command, comments=True)]
    (folder / "test_these.py").write_text(test)
    line = [sys.executable, "-m", "pytest", "-p", "xdist", "-p", "pytest_timeout", *own, *options]
    environment = {name: each for name, each in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(
        [*line, "-c", ROOT / "pyproject.toml", "--rootdir", folder, folder],
        env=environment | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize(
    ("test", "option", "said"),
    [
        ("import os, signal\n\ndef test_this(): os.kill(os.getpid(), signal.SIGKILL)", "-q", "crashed while running"),
        ("import threading\n\ndef test_this(): threading.Event().wait()", "--override-ini=timeout=1", "Timeout"),
        ("def test_this(): pass", "--override-ini=session_timeout=0.001", "session-timeout: 0.001 sec exceeded"),
    ],
    ids=["a crash", "a test that hangs", "a run that takes too long"],
)
def test_a_run_ends_and_says_why(test, option, said, tmp_path):
    others = "".join(f"\n\ndef test_{number}(): pass" for number in range(40))
    done = run_as_make_does(tmp_path, f"{test}{others}\n", option)
    assert done.returncode != 0, done.stdout
    assert said in done.stdout
    assert "test_this" in done.stdout or "session-timeout" in said
    assert "41 passed" not in done.stdout


def test_a_run_that_nothing_ends_passes_and_both_limits_are_set(tmp_path):
    done = run_as_make_does(tmp_path, "def test_this(): pass\n")
    assert (done.returncode, "1 passed" in done.stdout) == (0, True), done.stdout
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert 0 < settings["timeout"] <= 300
    assert 0 < settings["session_timeout"] <= 3000
