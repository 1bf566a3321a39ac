"""From words to an exit status: one line on stderr for what is wrong, results alone on stdout."""

import subprocess
import sys
import warnings

import numpy as np
import pytest
from commands import make_tables, run

from alight import HeadOutputs, replay
from alight.cli.arguments import salted_by
from alight.cli.command import ExitStatus
from alight.cli.running import spent_of
from alight.policies.policy import Lottery, Threshold

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
    command = f"{sys.executable} -m alight {SWEEP} --quiet | exec 0<&-; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout.strip() == str(int(ExitStatus.BROKEN_PIPE))


def test_a_missing_file_of_costs_is_refused(folder, capsys):
    assert run("calibrate labelled.npz --costs nowhere.json --budget 50%", capsys)[0] == ExitStatus.FAILURE


def test_the_first_sample_of_every_run_draws_for_itself(tmp_path):
    policy = Lottery(costs=(1.0, 2.0), exit_rates=(0.5, 0.5))
    exits = []
    for number in range(200):
        (tmp_path / "picture").write_bytes(f"{number}".encode())
        salted = salted_by(policy, f"{tmp_path}/picture")
        assert salted == salted_by(policy, f"{tmp_path}/picture")  # the same in every run
        exits.append(bool(salted.step(0, np.array([0]), np.array([0]), np.array([0.0]), ())[0][0]))
    assert 70 <= sum(exits) <= 130  # without it: all or none


def test_a_folder_is_salted_by_its_files(tmp_path):
    policy = Lottery(costs=(1.0, 2.0), exit_rates=(0.5, 0.5))
    salts = set()
    for name in ("one.png", "two.png"):
        (tmp_path / name).write_bytes(b"")
        salts.add(salted_by(policy, f"{tmp_path}").salt)
    assert len(salts) == 2


def test_data_that_is_not_a_path_is_salted_by_its_name():
    policy = Lottery(costs=(1.0, 2.0), exit_rates=(0.5, 0.5))
    assert len({salted_by(policy, name).salt for name in ("s3://bucket/a", "s3://bucket/b", "cifar100:folder")}) == 3


@pytest.mark.parametrize(("share", "over"), [(0.5, False), (0.52, False), (0.7, True)])
def test_significant_overspending_is_said(share, over):
    scores = (np.arange(400) < (1 - share) * 400).astype(float)[:, None]  # so many leave at the first of two exits
    table = HeadOutputs(np.hstack([scores, scores]), np.zeros((400, 2), int))
    policy = Threshold((0.5,), costs=(1.0, 3.0), budget=2.0, full_cost=3.0)
    assert ("overspent significantly: are these samples like" in spent_of(replay(policy, table), policy)) == over
