"""From words to an exit status: one line on stderr for what is wrong, results alone on stdout."""

import subprocess
import sys
import warnings

import pytest
from commands import make_tables, run

from alight.cli.command import ExitStatus

SWEEP = "sweep labelled.npz test.npz --costs costs.json --methods geometric,eero --budgets 50%"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_tables(tmp_path)
    return tmp_path


def test_quiet_leaves_results_alone(folder, capsys):
    loud = run(SWEEP, capsys)
    quiet = run(f"{SWEEP} --quiet", capsys)
    assert "sweep: 100%" in loud[2]
    assert quiet == (0, loud[1], "")


def test_a_fault_is_one_line_and_debug_shows_where(folder, capsys, monkeypatch):
    def broken(*_, **__):
        raise ZeroDivisionError("by\nnothing")

    monkeypatch.setattr("alight.cli.tables.sweep", broken)
    status, out, err = run(SWEEP, capsys)
    assert (status, out) == (ExitStatus.INTERNAL_ERROR, "")
    assert (
        err == "alight: ZeroDivisionError: by nothing (internal error of alight or of a library: --debug shows where)\n"
    )
    with pytest.raises(ZeroDivisionError):
        run(f"{SWEEP} --debug", capsys)


@pytest.mark.filterwarnings("default")
def test_a_warning_is_one_line_and_does_not_stop(folder, capsys, monkeypatch):
    from alight.evaluation import sweep

    def warned(*given, **settings):
        warnings.warn("careful:\n  it is hot", stacklevel=1)
        return sweep(*given, **settings)

    monkeypatch.setattr("alight.cli.tables.sweep", warned)
    status, _, err = run(SWEEP, capsys)
    assert status == 0
    assert "alight: careful: it is hot\n" in err
    assert run(f"{SWEEP} --quiet", capsys)[2] == ""


def test_an_unknown_word_is_one_line(capsys):
    for line in ("swep", "sweep", "report points.csv --titel x", "plan a b --batch-size 0"):
        status, out, err = run(line, capsys)
        assert (status, out) == (ExitStatus.INVALID_ARGUMENTS, "")
        assert err.startswith("alight: ")
        assert err.count("\n") == 1
        assert "--help" in err


def test_no_word_at_all_shows_what_there_is(capsys):
    status, out, err = run("", capsys)
    assert (status, out) == (ExitStatus.INVALID_ARGUMENTS, "")
    assert "recorded outputs:" in err


def test_a_closed_pipe_is_not_an_error(folder):
    command = f"{sys.executable} -m alight.cli {SWEEP} --quiet | exec 0<&-; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout.strip() == str(int(ExitStatus.BROKEN_PIPE))


def test_a_missing_file_of_costs_is_refused(folder, capsys):
    assert run("calibrate labelled.npz --costs nowhere.json --budget 50%", capsys)[0] == ExitStatus.FAILURE
