"""Commands on recorded outputs: results on stdout, one sentence and a status when something is wrong."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from commands import COSTS, make_tables, run

from alight import HeadOutputs, calibrate, load_policy, read_points, recordings, replay
from alight.fitting.steps import LEAST_LABELS


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_tables(tmp_path)
    return tmp_path


def test_calibrate_writes_the_policy_that_python_would_make(folder, capsys):
    status, out, _ = run("calibrate labelled.npz --costs costs.json --budget 50% -o policy.json", capsys)
    expected = calibrate.certified_probability(calibrate.eero, seed=0)(COSTS, "50%", HeadOutputs.load("labelled.npz"))
    assert status == 0
    assert load_policy("policy.json") == expected
    assert out.strip() == str(expected)
    assert "Guaranteed with 95 % confidence: mean cost <= " in out


def test_calibrate_says_what_is_not_guaranteed_where_no_contract_is_wanted(folder, capsys):
    line = "calibrate labelled.npz --costs costs.json --budget 50% --contract none -o policy.json"
    _, out, _ = run(line, capsys)
    assert load_policy("policy.json") == calibrate.eero(COSTS, "50%", HeadOutputs.load("labelled.npz"))
    assert out.splitlines()[-1].startswith("Not guaranteed: new samples may cost a little more than the budget")


def test_calibrate_chooses_by_labels_where_there_are_enough(folder, capsys):
    labelled, _, costs = recordings.load()
    labelled.take(slice(0, LEAST_LABELS)).save("many.npz")
    costs.save("resnet.json")
    _, out, _ = run("calibrate many.npz --costs resnet.json --budget 50%", capsys)
    assert out.startswith("auto: ")
    _, out, _ = run("calibrate labelled.npz --costs costs.json --budget 50% --method auto", capsys)
    assert out.startswith("auto: ")
    assert re.search(r"choice \w+.*: \d+\.\d% accuracy in the comparison that chose it, (all|[+-]\d)", out)
    _, out, _ = run("calibrate unlabelled.npz --costs costs.json --budget 50%", capsys)
    assert out.startswith("eero: ")


def test_calibrate_takes_a_method_its_options_and_unlabelled_data(folder, capsys):
    line = (
        "calibrate labelled.npz --unlabelled unlabelled.npz --costs costs.json --budget 3 --method eero --contract none"
    )
    status, _, _ = run(line + " --set temperature=0.2 --set spend_all=true --set slack=exact -o policy.json", capsys)
    tables = [HeadOutputs.load(name) for name in ("labelled.npz", "unlabelled.npz")]
    assert status == 0
    assert load_policy("policy.json") == calibrate.eero(
        COSTS, 3.0, *tables, temperature=0.2, spend_all=True, slack="exact"
    )


def test_calibrate_and_sweep_combine_the_answers_of_exits(folder, capsys):
    line = "labelled.npz --costs costs.json --combine vote"
    assert run(f"calibrate {line} --budget 50% --contract none -o policy.json", capsys)[0] == 0
    combined = calibrate.combined(calibrate.eero, "vote")(COSTS, "50%", HeadOutputs.load("labelled.npz"))
    assert load_policy("policy.json") == combined
    tables = line.replace("labelled.npz", "labelled.npz test.npz")
    assert run(f"sweep {tables} --methods eero --budgets 50%", capsys)[0] == 0
    (point,) = (point for point in read_points("points.csv") if point.method == "eero")
    assert point.mean_cost == pytest.approx(replay(combined, HeadOutputs.load("test.npz")).mean_cost)
    status, _, err = run("calibrate labelled.npz --costs costs.json --budget 50% --combine geometric_mean", capsys)
    assert (status, "record it again" in err) == (1, True)  # these tables have no log-probabilities


@pytest.mark.parametrize("contract", ["mean", "probability", "batch", "stream"])
def test_calibrate_writes_what_it_guarantees(folder, capsys, contract):
    line = f"calibrate labelled.npz --costs costs.json --budget 50% --contract {contract} -o policy.json"
    status, out, _ = run(f"{line} --delta 0.1" if contract == "probability" else line, capsys)
    policy = load_policy("policy.json")
    assert status == 0
    assert policy.certificate.contract == contract
    assert str(policy.certificate) in out


def test_calibrate_finds_the_cheapest_policy_for_a_risk(folder, capsys):
    line = "calibrate labelled.npz --costs costs.json --risk disagreement --alpha 0.4 --method geometric -o policy.json"
    status, out, _ = run(line, capsys)
    assert status == 0
    assert "disagreement with the last exit" in out
    assert load_policy("policy.json").certificate.contract == "disagreement"


@pytest.mark.filterwarnings("always::alight.errors.ShiftWarning")
@pytest.mark.parametrize("command", ["calibrate", "sweep"])
def test_tables_of_two_distributions_are_reported_on_stderr(folder, capsys, command):
    table = HeadOutputs.load("test.npz")
    table.take(np.argsort(table.scores[:, 0])[: len(table) // 2]).save("harder.npz")
    line = {
        "calibrate": "calibrate labelled.npz --unlabelled harder.npz --costs costs.json --budget 50% --contract mean",
        "sweep": "sweep labelled.npz harder.npz --costs costs.json --methods eero --budgets 50% --contract mean --json",
    }[command]
    status, out, err = run(line, capsys)
    assert status == 0
    assert "samples differ at exit 1" in err
    assert "Doubtful" in out


def test_costs_may_be_written_out(folder, capsys):
    status, out, _ = run("calibrate labelled.npz --costs 1,2.5,4,6 --budget 3", capsys)
    assert status == 0
    assert "budget 3 per sample" in out


def test_another_score_of_the_table_may_be_chosen(folder, capsys):
    rng = np.random.default_rng(0)
    HeadOutputs.from_logits(rng.normal(size=(50, 4, 3)), features=["negative_entropy"]).save("both.npz")
    status, out, _ = run("calibrate both.npz --costs costs.json --budget 50% --score negative_entropy", capsys)
    assert status == 0
    assert "on the negative_entropy" in out


def test_sweep_and_report_chain(folder, capsys):
    line = (
        "sweep labelled.npz test.npz --costs costs.json --methods eero,geometric --budgets 40%,4,100% --report one.html"
    )
    status, out, err = run(line, capsys)
    assert status == 0
    points = read_points("points.csv")
    assert len(points) == 2 * 3 + 3 + 4
    header, *methods = [line.split() for line in out.splitlines()[:4]]
    assert header == ["accuracy", "(%)", "40", "%", "65.6", "%", "100", "%"]
    assert [row[0] for row in methods] == ["eero", "geometric", "full"]
    assert methods[2][-1] == f"{100 * points[-1].accuracy:.1f}"
    for column in (1, 2, 3):  # the best of each is marked, and is the highest
        marked = [row[column] for row in methods[:2] if row[column].endswith("*")]
        assert marked
        assert max(float(row[column].rstrip("*")) for row in methods[:2]) == float(marked[0].rstrip("*"))
    assert out.endswith("\npoints: points.csv\nreport: one.html\n")
    assert "sweep" in err  # progress
    status, out, _ = run("report points.csv -o two.html --title Test", capsys)
    assert status == 0
    assert out.strip() == str(folder / "two.html")
    assert (folder / "one.html").stat().st_size == pytest.approx((folder / "two.html").stat().st_size, rel=0.01)


def test_a_sweep_of_certified_policies_says_so(folder, capsys):
    line = "sweep labelled.npz test.npz --costs costs.json --methods geometric --budgets 60% --contract probability"
    assert run(f"{line} --delta 0.1 -o sure.csv --report sure.html", capsys)[0] == 0
    assert run("sweep labelled.npz test.npz --costs costs.json --methods geometric --budgets 60%", capsys)[0] == 0
    (sure,), (hoped,) = (
        [p for p in read_points(name) if p.method == "geometric"] for name in ("sure.csv", "points.csv")
    )
    assert sure.mean_cost < hoped.mean_cost
    assert "contract 'probability', delta 0.1" in Path("sure.html").read_text()


def test_sweep_chooses_budgets_from_the_cheapest_exit_to_the_full_network(folder, capsys):
    assert run("sweep labelled.npz test.npz --costs costs.json --methods geometric", capsys)[0] == 0
    budgets = [point.budget for point in read_points("points.csv") if point.method == "geometric"]
    assert len(budgets) == 17
    assert budgets[0] == pytest.approx(COSTS.budget("19%"))
    assert budgets[-1] == pytest.approx(COSTS.full)


def test_sweep_compares_the_default_method_of_fit_and_calibrate(folder, capsys):
    assert run("sweep labelled.npz test.npz --costs costs.json --budgets 60%", capsys)[0] == 0
    assert {"auto", "eero"} <= {point.method for point in read_points("points.csv")}


BAD = {
    "budget too small": ("calibrate labelled.npz --costs costs.json --budget 1%", 1, "below the cheapest exit"),
    "no such file": ("calibrate nowhere.npz --costs costs.json --budget 50%", 1, "nowhere.npz: No such file"),
    "costs of words": (
        "calibrate labelled.npz --costs cheap --budget 50%",
        1,
        "there is no such file, and they are not numbers",
    ),
    "falling costs": ("calibrate labelled.npz --costs 3,2,1,4 --budget 50%", 1, "exit 1 costs 3 and exit 2 costs 2"),
    "too few costs": ("calibrate labelled.npz --costs 1,2 --budget 50%", 1, "4 exits, but there are 2 costs"),
    "foreign file": ("calibrate costs.json --costs 1,2,3,4 --budget 50%", 1, "not a file of recorded outputs"),
    "policy as points": ("report costs.json", 1, "not a table of points"),
    "unknown option": (
        "calibrate labelled.npz --costs costs.json --budget 3 --set heat=1",
        1,
        "NAME one of temperature",
    ),
    "bad option": (
        "calibrate labelled.npz --costs costs.json --budget 3 --set temperature=-1",
        1,
        "temperature -1 must",
    ),
    "wrongly typed option": ("calibrate labelled.npz --costs costs.json --budget 3 --set temperature=hot", 1, "hot"),
    "bad score": ("calibrate labelled.npz --costs costs.json --budget 3 --score luck", 1, "no 'luck'"),
    "unlabelled test": ("sweep labelled.npz unlabelled.npz --costs costs.json", 1, "needs labels"),
    "test on itself": ("sweep test.npz test.npz --costs costs.json", 1, "labelled table is also the test table"),
    "unknown method": (
        "calibrate labelled.npz --costs costs.json --budget 3 --method luck",
        2,
        "invalid choice: 'luck'",
    ),
    "unknown methods": ("sweep labelled.npz test.npz --costs costs.json --methods eero,luck", 2, "no method 'luck'"),
    "no folder": ("sweep labelled.npz test.npz --costs costs.json -o missing/points.csv", 2, "no such folder"),
    "folder as output": ("calibrate labelled.npz --costs costs.json --budget 50% -o .", 2, "it is a folder"),
    "empty output": ("report points.csv -o=", 2, "empty name"),
    "report over points": ("sweep labelled.npz test.npz --costs costs.json -o x --report x", 1, "named twice"),
    "policy over table": ("calibrate labelled.npz --costs costs.json --budget 50% -o labelled.npz", 1, "named twice"),
    "test on itself by score": (
        "sweep both.npz both.npz --costs costs.json --score negative_entropy",
        1,
        "also the test",
    ),
    "one sample": ("calibrate one.npz --costs costs.json --budget 50%", 1, "has 1 sample"),
    "damaged file": ("calibrate damaged.npz --costs costs.json --budget 50%", 1, "it is damaged"),
    "bad unit": ("calibrate labelled.npz --costs costs.json --budget 3nFLOPs", 1, "unknown unit 'nFLOPs'"),
    "one bad budget": ("sweep labelled.npz test.npz --costs costs.json --budgets 50%,1%", 1, "below the cheapest exit"),
    "half a sample early": (
        "calibrate labelled.npz --costs costs.json --budget 3 --method two_exits --set early=1.5",
        1,
        "wrong kind",
    ),
    "no such axis": (
        "calibrate labelled.npz --costs costs.json --budget 3 --method gaussian --set axis=foo",
        1,
        "no axis 'foo'",
    ),
    "negative seed": (
        "calibrate labelled.npz --costs costs.json --budget 3 --method genetic --set seed=-1",
        1,
        "seed -1",
    ),
    "no budget": ("calibrate labelled.npz --costs costs.json", 1, "there is no budget"),
    "no alpha": ("calibrate labelled.npz --costs costs.json --risk error", 1, "--risk error has no limit"),
    "mean cost beside a risk": (
        "calibrate labelled.npz --costs costs.json --budget 50% --risk error --alpha 0.5 --contract mean",
        1,
        "not 'mean': leave cost out",
    ),
    "delta": (
        "calibrate labelled.npz --costs costs.json --budget 50% --contract probability --delta 2",
        1,
        "delta 2 must lie",
    ),
    "seed": ("calibrate labelled.npz --costs costs.json --budget 50% --contract mean --seed -1", 1, "seed -1"),
    "no command": ("", 2, "COMMAND"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gets_one_sentence_a_status_and_changes_nothing(case, folder, capsys):
    line, expected, message = BAD[case]
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    status, out, err = run(line, capsys)
    assert status == expected
    assert message in err
    assert "Traceback" not in err
    assert out == ""
    if expected == 1:
        assert err.startswith("alight: ")
        assert err.count("\n") == 1
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_policy_file_is_plain_json(folder, capsys):
    run("calibrate labelled.npz --costs costs.json --budget 50% -o policy.json", capsys)
    content = json.loads((folder / "policy.json").read_text())
    assert content["alight"] == "Policy"
    assert content["schema"] == 1


@pytest.mark.parametrize("options", ["", "--method geometric", "--contract batch", "--contract probability --seed 1"])
def test_a_folder_of_partitions_gives_the_policy_of_the_whole_table(folder, capsys, options):
    table = HeadOutputs.load("labelled.npz")
    Path("partitions").mkdir()
    for index, rows in enumerate((slice(0, 130), slice(130, 300))):
        table.take(rows).save(f"partitions/part-0000{index}.npz")
    for where in ("labelled.npz", "partitions"):
        status, _, err = run(f"calibrate {where} --costs costs.json --budget 50% {options} -o {where}.json", capsys)
        assert (status, err) == (0, "")
    assert load_policy("partitions.json") == load_policy("labelled.npz.json")
