"""The command line: results on stdout, one sentence and a status when something is wrong, nothing half-written."""

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as parquet
import pytest
import timm
import torch
from conftest import made_up
from digits import digits
from safetensors.torch import save_file

from alight import Costs, HeadOutputs, calibrate, load_policy, read_points, replay
from alight.cli import main
from alight.models.checkpoints import Checkpoint
from alight.models.fingerprint import fingerprint
from alight.models.folder import load_model
from alight.models.measure import measure_costs
from alight.runtime import trial

COSTS = Costs([1.0, 1.0, 2.0, 2.0], [0.1] * 4, unit="ms")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made_up(1, 300, 4).save("labelled.npz")
    made_up(2, 300, 4).unlabelled().save("unlabelled.npz")
    made_up(3, 600, 4).save("test.npz")
    COSTS.save("costs.json")
    made_up(4, 1, 4).save("one.npz")
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(50, 4, 3))
    HeadOutputs.from_logits(logits, rng.integers(3, size=50), features=["negative_entropy"]).save("both.npz")
    content = (tmp_path / "labelled.npz").read_bytes()
    (tmp_path / "damaged.npz").write_bytes(content[:300] + content[340:])
    return tmp_path


def run(line, capsys):
    """Status, stdout and stderr of a command."""
    try:
        status = main(line.split())
    except SystemExit as error:
        status = error.code
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_calibrate_writes_the_policy_that_python_would_make(folder, capsys):
    status, out, _ = run("calibrate labelled.npz --costs costs.json --budget 50% -o policy.json", capsys)
    expected = calibrate.eero(COSTS, "50%", HeadOutputs.load("labelled.npz"))
    assert status == 0
    assert load_policy("policy.json") == expected
    assert out.strip() == str(expected)


def test_calibrate_takes_a_method_its_options_and_unlabelled_data(folder, capsys):
    line = "calibrate labelled.npz --unlabelled unlabelled.npz --costs costs.json --budget 3 --method eero"
    status, _, _ = run(line + " --set temperature=0.2 --set spend_all=true --set slack=exact -o policy.json", capsys)
    tables = [HeadOutputs.load(name) for name in ("labelled.npz", "unlabelled.npz")]
    assert status == 0
    assert load_policy("policy.json") == calibrate.eero(
        COSTS, 3.0, *tables, temperature=0.2, spend_all=True, slack="exact"
    )


@pytest.mark.parametrize("contract", ["mean", "probability", "batch", "stream"])
def test_calibrate_writes_what_it_promises(folder, capsys, contract):
    line = f"calibrate labelled.npz --costs costs.json --budget 50% --contract {contract} --delta 0.1 -o policy.json"
    status, out, _ = run(line, capsys)
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
    assert len(out.splitlines()) == 6
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
    assert "contract &#x27;probability&#x27;, delta 0.1" in Path("sure.html").read_text()


def test_sweep_chooses_budgets_from_the_cheapest_exit_to_the_plain_network(folder, capsys):
    assert run("sweep labelled.npz test.npz --costs costs.json --methods geometric", capsys)[0] == 0
    budgets = [point.budget for point in read_points("points.csv") if point.method == "geometric"]
    assert len(budgets) == 17
    assert budgets[0] == pytest.approx(COSTS.budget("19%"))
    assert budgets[-1] == pytest.approx(COSTS.plain)


def test_the_demo_compares_eero_with_the_papers_rule_and_single_exits(tmp_path, capsys):
    for _ in range(2):  # twice: it can be run again
        status, out, err = run(f"demo -o {tmp_path}/shown", capsys)
    assert status == 0
    assert "sweep" in err
    table = [line.split() for line in out.splitlines() if re.match(r"\s*\d+%", line)]
    assert [row[0] for row in table] == [f"{percent}%" for percent in range(20, 101, 10)]
    for row in table:
        eero, spent, paper, paper_spent, single, _ = (float(cell.rstrip("%")) for cell in row[1:])
        assert eero >= paper >= 0
        assert eero >= single
        assert paper_spent <= spent + 0.1
        assert spent <= 1.025 * float(row[0].rstrip("%"))
    assert str(tmp_path / "shown" / "report.html") in out
    assert load_policy(tmp_path / "shown" / "policy.json").method == "eero"
    dearest, _, ahead, delay = re.search(
        r"spends ([\d.]+)%.*: ([\d.]+)%.*than ([\d.]+) full.*after (\d+) of", out, re.S
    ).groups()
    assert float(dearest) <= 100
    assert float(ahead) <= 1
    assert int(delay) <= 2000
    with (tmp_path / "shown" / "resnet18_cifar100_joint.csv").open() as file:
        assert {row["method"] for row in csv.DictReader(file)} >= {"eero", "patience", "oracle", "single_exit"}


BAD = {
    "budget too small": ("calibrate labelled.npz --costs costs.json --budget 1%", 1, "below the cheapest exit"),
    "no such file": ("calibrate nowhere.npz --costs costs.json --budget 50%", 1, "nowhere.npz: No such file"),
    "costs of words": ("calibrate labelled.npz --costs cheap --budget 50%", 1, "neither a file nor numbers"),
    "falling costs": ("calibrate labelled.npz --costs 3,2,1,4 --budget 50%", 1, "exit 0 costs 3 and exit 1 costs 2"),
    "too few costs": ("calibrate labelled.npz --costs 1,2 --budget 50%", 1, "4 exits, but there are 2 costs"),
    "foreign file": ("calibrate costs.json --costs costs.json --budget 50%", 1, "it is no .npz"),
    "policy as points": ("report costs.json", 1, "no table of points"),
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
    "no alpha": ("calibrate labelled.npz --costs costs.json --risk error", 1, "alpha None must lie"),
    "delta": (
        "calibrate labelled.npz --costs costs.json --budget 50% --contract mean --delta 2",
        1,
        "delta 2 must lie",
    ),
    "no rates": (
        "calibrate labelled.npz --costs costs.json --budget 50% --method patience --contract batch",
        1,
        "plans none",
    ),
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


def test_an_interrupt_prints_one_line_and_leaves_nothing_half_written(folder, capsys, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("alight.cli.sweep", interrupted)
    before = sorted(folder.iterdir())
    status, _, err = run("sweep labelled.npz test.npz --costs costs.json", capsys)
    assert status == 130
    assert err == "alight: interrupted, nothing half-written is left\n"
    assert sorted(folder.iterdir()) == before


def test_the_installed_command_answers():
    done = subprocess.run([sys.executable, "-m", "alight.cli", "--version"], capture_output=True, text=True)
    assert done.returncode == 0
    assert re.fullmatch(r"alight \d+\.\d+\.\d+\n", done.stdout)


@pytest.mark.parametrize(
    "command",
    ["", "demo", "attach", "train", "record", "costs", "predict", "plan", "bench", "calibrate", "sweep", "report"],
)
def test_every_help_is_there_with_an_example(command, capsys):
    status, out, _ = run(f"{command} --help", capsys)
    assert status == 0
    assert "COMMAND" in out if not command else f"example: alight {command}" in out


def test_a_policy_file_is_plain_json(folder, capsys):
    run("calibrate labelled.npz --costs costs.json --budget 50% -o policy.json", capsys)
    content = json.loads((folder / "policy.json").read_text())
    assert content["alight"] == "Policy"
    assert content["schema"] == 1


@pytest.fixture(scope="module")
def digit_files(tmp_path_factory):
    """Digits as pictures of 16 x 16, and a small network of timm with exits, in a folder."""
    folder = tmp_path_factory.mktemp("digits")
    for name, data in zip(("train", "test"), digits(), strict=True):
        images, labels = data.tensors
        doubled = (255 * images.repeat(1, 3, 2, 2)).to(torch.uint8)
        np.savez(folder / f"{name}.npz", images=doubled.numpy(), labels=labels.numpy())
    line = f"attach timm:test_resnet --classes 10 --image-size 16 --after layer1,layer2 -o {folder}/model"
    assert main(line.split()) == 0
    return folder


def test_attach_train_record_costs_and_calibrate_chain(digit_files, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = digit_files
    line = f"train {data}/model {data}/train.npz --mode joint --epochs 4 --validation {data}/test.npz -o trained"
    status, out, err = run(f"{line} --set learning_rate=0.003", capsys)
    assert status == 0, err
    assert "validation accuracy" in out
    assert "accuracy %" in err
    assert sorted(path.name for path in (tmp_path / "trained").iterdir()) == ["config.json", "model.safetensors"]
    status, out, err = run(f"record trained {data}/test.npz -o labelled.npz --features negative_entropy", capsys)
    assert status == 0, err
    assert "record: 100%" in err
    table, model = HeadOutputs.load("labelled.npz"), load_model("trained")
    assert f"end {1 - table.risks()[-1]:.1%}" in out
    assert table.risks()[-1] < 0.1
    assert table.fingerprint == fingerprint(model)
    assert set(table.features) == {"negative_entropy"}
    status, out, err = run("costs trained", capsys)
    assert status == 0, err
    assert "heads before the last: 0." in out
    costs = Costs.load("costs.json")
    expected = measure_costs(model, torch.zeros(1, 3, 16, 16))
    np.testing.assert_allclose(costs.cumulative(), expected.cumulative())
    assert run("costs trained --unit ms --batch-size 8 -o ms.json", capsys)[0] == 0
    assert Costs.load("ms.json").unit == "ms"
    status, _, err = run("calibrate labelled.npz --costs costs.json --budget 90% -o policy.json", capsys)
    assert status == 0, err
    policy = load_policy("policy.json")
    assert policy.fingerprint == table.fingerprint
    status, out, err = run(f"predict trained policy.json {data}/test.npz", capsys)
    assert status == 0, err
    assert "predict: 100%" in err
    with Path("answers.csv").open() as file:
        rows = list(csv.DictReader(file))
    expected = replay(policy, table)
    assert [int(row["label"]) for row in rows] == expected.predictions.tolist()
    assert [int(row["exit"]) for row in rows] == expected.exits.tolist()
    assert sum(float(row["cost_FLOPs"]) for row in rows) == pytest.approx(expected.spent.sum())
    assert all(0 < float(row["probability"]) <= 1 for row in rows)
    assert run(f"predict trained policy.json {data}/test.npz -o answers.parquet", capsys)[0] == 0
    assert parquet.read_table("answers.parquet").column("exit").to_pylist() == expected.exits.tolist()
    status, out, err = run(f"bench trained policy.json {data}/test.npz --samples 32 --batch-sizes 16", capsys)
    assert status == 0, err
    assert "batch 16: " in out
    assert "accuracy with exits" in out
    status, out, err = run("plan trained labelled.npz --batch-size 16 --max-accuracy-loss 0.3 -o planned.json", capsys)
    assert status == 0, err
    assert "plain network" in out
    assert load_policy("planned.json").unit == "ms"
    assert run(f"predict trained planned.json {data}/test.npz -o planned.csv", capsys)[0] == 0
    monkeypatch.setattr(trial, "SECONDS", 0.02)
    for line in (
        f"predict trained policy.json {data}/test.npz -o quick.csv",
        f"bench trained policy.json {data}/test.npz --samples 32 --batch-sizes 16",
        f"record trained {data}/test.npz -o quick.npz",
    ):
        status, out, err = run(f"{line} --speed auto --threads 1", capsys)
        assert status == 0, err
        assert "channels_last=True" in err
    assert Path("quick.csv").read_text().count("\n") == len(rows) + 1
    status, out, err = run("plan trained labelled.npz --batch-size 16 --speed auto --threads 1 -o quick.json", capsys)
    assert status == 0, err
    assert "channels_last=True" in out
    assert (
        "was calibrated on outputs of the network"
        in run(f"predict {data}/model policy.json {data}/test.npz", capsys)[2]
    )


def test_an_interrupted_training_goes_on_where_it_was(digit_files, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = f"train {digit_files}/model {digit_files}/test.npz --mode joint --epochs 2 --augment -o"
    assert run(f"{line} whole", capsys)[0] == 0
    save = Checkpoint.save

    def interrupted(checkpoint, path):
        save(checkpoint, path)
        raise KeyboardInterrupt

    monkeypatch.setattr(Checkpoint, "save", interrupted)
    assert run(f"{line} parts", capsys)[0] == 130
    assert [path.name for path in (tmp_path / "parts").iterdir()] == ["checkpoint.safetensors"]
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert run(f"{line} parts", capsys)[0] == 0
    assert fingerprint(load_model("parts")) == fingerprint(load_model("whole"))
    assert not (tmp_path / "parts" / "checkpoint.safetensors").exists()


def test_attach_takes_trained_weights_and_a_normalisation(digit_files, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(1)
    backbone = timm.create_model("test_resnet", num_classes=7).eval()
    save_file(backbone.state_dict(), "weights.safetensors")
    line = "attach timm:test_resnet --classes 7 --image-size 32 --count 2 --weights weights.safetensors"
    status, out, err = run(f"{line} --mean 0.1,0.2,0.3 --std 0.5,0.5,0.5 -o own", capsys)
    assert status == 0, err
    assert str(tmp_path / "own") in out
    model, images = load_model("own"), torch.rand(2, 3, 32, 32)
    assert model.num_exits == 3
    assert model.normalisation.mean == (0.1, 0.2, 0.3)
    with torch.no_grad():
        assert torch.equal(model(images)[-1], backbone(images))
    assert run(line.replace("--classes 7", "--classes 5"), capsys)[2].startswith("alight: the weights are another")


def test_a_missing_library_is_named_with_what_brings_it(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    status, _, err = run("attach timm:test_resnet", capsys)
    assert status == 1
    assert 'pip install "alight[vision]"' in err


NETWORK_BAD = {
    "unknown network": ("attach resnet18", "write timm:NAME"),
    "unknown in the zoo": ("attach zoo:lenet", "NAME one of convnext_cifar"),
    "exits of the zoo": ("attach zoo:resnet18_cifar --count 5", "stand where its paper puts them"),
    "unknown module": ("attach timm:test_resnet --after layer9", "layer9"),
    "unknown option": ("attach timm:test_resnet --set depth=3", "does not take these options"),
    "no weights": ("attach timm:test_resnet --weights nowhere.safetensors", "nowhere.safetensors"),
    "no model": ("train nowhere train.npz", "there is no folder nowhere"),
    "no data": ("train {data}/model nowhere.npz", "nowhere.npz: there is no such file"),
    "bad setting": ("train {data}/model {data}/test.npz --set heat=1", "NAME one of backbone_epochs"),
    "mistyped setting": ("train {data}/model {data}/test.npz --set learning_rate=hot", "of the wrong kind"),
    "table over data": ("record {data}/model {data}/test.npz -o {data}/test.npz", "named twice"),
    "no threads": ("record {data}/model {data}/test.npz --threads 0", "0 threads: give 1 or more"),
    "table as data": ("record {data}/model other.npz", "save np.savez(path, images=..., labels=...)"),
}


@pytest.mark.parametrize("case", NETWORK_BAD)
def test_bad_input_to_a_network_gets_one_sentence_and_a_status(case, digit_files, folder, capsys):
    line, message = NETWORK_BAD[case]
    np.savez("other.npz", scores=np.zeros(3))
    status, out, err = run(line.format(data=digit_files), capsys)
    assert status == 1
    assert message in err
    assert err.startswith("alight: ")
    assert err.count("\n") == 1
    assert out == ""
