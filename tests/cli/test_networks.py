"""Commands that run a network, each on what the one before it wrote."""

import csv
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as parquet
import pytest
import timm
import torch
from commands import run
from safetensors.torch import save_file

from alight import Costs, HeadOutputs, Predictor, load_policy, replay
from alight.costing.measure import measure_costs
from alight.display import quantity
from alight.engine.predictor import load_network
from alight.networks.store import fingerprint, load_model
from alight.planning import timing
from alight.planning.engines import RuntimeComparison, RuntimeTrial
from alight.training.checkpoints import Checkpoint


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_attach_train_record_costs_and_calibrate_chain(chain):
    out, err = ({path.stem: path.read_text() for path in chain.glob(f"*.{kind}")} for kind in ("out", "err"))
    assert "validation accuracy" in out["train"]
    assert "accuracy by exit" in err["train"]
    assert sorted(path.name for path in (chain / "model").iterdir()) == ["config.json", "model.safetensors"]
    assert "record: 100%" in err["record"]
    table, model = HeadOutputs.load(chain / "labelled.npz"), load_model(chain / "model")
    assert f"end {100 * (1 - table.risks()[-1]):.1f} %" in out["record"]
    assert table.exits == model.exits == ("layer1", "layer2", "end")
    assert table.risks()[-1] < 0.1
    assert table.fingerprint == fingerprint(model)
    assert set(table.features) == {"negative_entropy"}
    assert "heads before the last: 0." in out["costs"]
    expected = measure_costs(model, torch.zeros(1, 3, 16, 16))
    np.testing.assert_allclose(Costs.load(chain / "costs.json").cumulative(), expected.cumulative())
    policy = load_policy(chain / "policy.json")
    assert policy.fingerprint == table.fingerprint
    assert (policy.exits, policy.full_cost) == (model.exits, pytest.approx(expected.full))
    assert "predict: 100%" in err["predict"]
    with (chain / "answers.csv").open() as file:
        rows = list(csv.DictReader(file))
    decisions = replay(policy, table)
    assert [*rows[0]] == ["sample", "prediction", "exit", "cost_FLOPs", "probability", "label"]
    assert [int(row["prediction"]) for row in rows] == decisions.predictions.tolist()
    assert [int(row["label"]) for row in rows] == table.labels.tolist()
    assert [row["exit"] for row in rows] == [model.exits[index] for index in decisions.exits]
    assert sum(float(row["cost_FLOPs"]) for row in rows) == pytest.approx(decisions.spent.sum())
    assert all(0 < float(row["probability"]) <= 1 for row in rows)
    lines = out["predict"].splitlines()
    assert lines[0] == f"{len(table)} samples, answers: answers.csv"
    assert lines[1].startswith(f"accuracy {100 * decisions.accuracy():.1f} % (the full network's: alight bench model ")
    assert lines[2].startswith(f"spent {quantity(decisions.mean_cost, 'FLOPs')} per sample (")
    assert lines[2].endswith("% of the full network); budget 2.21 MFLOPs (90 %)")
    assert [line.split()[0] for line in lines[3:]] == ["exit", *model.exits]


def test_answers_may_be_parquet_and_costs_milliseconds(network, chain, folder, capsys):
    assert run(f"predict {chain}/model {chain}/policy.json {network}/test.npz -o answers.parquet", capsys)[0] == 0
    decisions = replay(load_policy(chain / "policy.json"), HeadOutputs.load(chain / "labelled.npz"))
    exits = [decisions.exit_names[index] for index in decisions.exits]
    assert parquet.read_table("answers.parquet").column("exit").to_pylist() == exits
    assert run(f"costs {chain}/model --unit ms --batch-size 8 -o ms.json", capsys)[0] == 0
    assert Costs.load("ms.json").unit == "ms"


def test_a_policy_of_another_network_is_refused(network, chain, folder, capsys):
    status, _, err = run(f"predict {network}/model {chain}/policy.json {network}/test.npz", capsys)
    assert status == 1
    assert "was calibrated on outputs of the network" in err


@pytest.mark.filterwarnings("default:labels run from")
def test_labels_that_the_network_lacks_are_said_and_give_no_accuracy(network, chain, folder, capsys, monkeypatch):
    monkeypatch.setattr(timing, "SECONDS", 0.02)
    with np.load(network / "test.npz") as arrays:
        np.savez("foreign.npz", images=arrays["images"], labels=arrays["labels"] + 50)
    for command, further in {"bench": "--samples 32 --batch-sizes 16", "predict": "-o foreign.csv"}.items():
        status, out, err = run(f"{command} {chain}/model {chain}/policy.json foreign.npz {further}", capsys)
        assert (status, "accuracy" in out, "labels run from 5" in err) == (0, False, True), (out, err)


def test_bench_and_plan_compare_with_the_full_network(network, chain, folder, capsys, monkeypatch):
    monkeypatch.setattr(timing, "SECONDS", 0.02)
    line = f"bench {chain}/model {chain}/policy.json {network}/test.npz --samples 32 --batch-sizes 16"
    status, out, err = run(line, capsys)
    assert status == 0, err
    assert out.startswith("batches of 16  samples/s ")
    assert re.search(r"\n32 samples: spent .* MFLOPs per sample \(.* %\ of the full network\); budget 2.21 MFLOPs", out)
    assert re.search(r"\naccuracy [\d.]+ % with exits, [\d.]+ % of the full network\n", out)
    line = f"plan {chain}/model {chain}/labelled.npz --batch-size 16 --max-accuracy-loss 0.3 -o planned.json"
    status, out, err = run(line, capsys)
    assert status == 0, err
    assert "full network" in out
    assert "plan: 3/3" in err
    assert load_policy("planned.json").unit == "ms"
    assert load_policy("planned.json").exits == ("layer1", "layer2", "end")
    assert run(f"predict {chain}/model planned.json {network}/test.npz -o planned.csv", capsys)[0] == 0


@pytest.mark.slow
def test_the_commands_that_a_plan_prints_run_its_policy_as_it_was_planned(network, chain, folder, capsys, monkeypatch):
    monkeypatch.setattr(timing, "SECONDS", 0.02)
    monkeypatch.setattr(RuntimeComparison, "fastest", RuntimeTrial("onnxruntime", "with exits", 1e9))
    shutil.copytree(chain / "model", "a model")
    line = f"plan 'a model' {chain}/labelled.npz --batch-size 16 --threads 1 --runtimes -o 'a plan.json'"
    status, out, err = run(line, capsys)
    assert status == 0, err
    said = out.splitlines()[-1]
    exported, ran = said.removeprefix("policy: a plan.json for onnxruntime: alight ").split(", then alight ")
    assert ran == "run FOLDER DATA --runtime onnxruntime --batch-size 16 --threads 1"
    assert run(exported, capsys)[0] == 0
    assert run(ran.replace("DATA", f"{network}/test.npz"), capsys)[0] == 0


@pytest.mark.slow
def test_speed_auto_measures_which_options_pay(network, chain, folder, capsys, monkeypatch):
    monkeypatch.setattr(timing, "SECONDS", 0.02)
    for line in (
        f"predict {chain}/model {chain}/policy.json {network}/test.npz -o quick.csv",
        f"bench {chain}/model {chain}/policy.json {network}/test.npz --samples 32 --batch-sizes 16",
        f"record {chain}/model {network}/test.npz -o quick.npz",
    ):
        status, _, err = run(f"{line} --speed auto --threads 1", capsys)
        assert status == 0, err
        assert "channels_last=True" in err
    assert len(Path("quick.csv").read_text().splitlines()) == 1 + len(HeadOutputs.load(chain / "labelled.npz"))
    line = f"plan {chain}/model {chain}/labelled.npz --batch-size 16 --speed auto --threads 1 -o quick.json"
    status, out, err = run(line, capsys)
    assert status == 0, err
    assert "channels_last=True" in out


def test_an_interrupted_training_resumes_where_it_stopped(network, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = f"train {network}/model {network}/test.npz --mode joint --epochs 2 --augment -o"
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


def test_a_training_stops_for_want_of_patience_and_keeps_the_best_epoch(network, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = f"train {network}/model {network}/test.npz --mode joint --epochs 9 -o trained --set patience=1"
    status, _, err = run(line, capsys)
    assert (status, "judge epochs by validation data: give some" in err) == (1, True)
    # a learning rate of nothing: only batch-norm statistics change
    line = f"{line} --validation {network}/test.npz --set keep_best=yes --set monitor_exit=end --set learning_rate=1e-9"
    status, out, err = run(line, capsys)
    assert status == 0, err
    assert re.match(r"epoch \d of [2-9], the best  ", out)


def test_a_training_that_diverges_leaves_no_empty_folder(network, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = f"train {network}/model {network}/test.npz --mode joint --epochs 2 -o runs/first"
    status, _, err = run(f"{line} --quiet --set optimizer=sgd --set learning_rate=1e30", capsys)
    assert status == 1
    assert err.startswith("alight: training diverged: the loss of layer1 is")
    assert not (tmp_path / "runs").exists()


BAD_PATHS = (
    "attach resnet18",
    "attach timm:resnet18 --weights nowhere.safetensors",
    "train nowhere data.npz",
    "train model nowhere.npz",
    "train model data.npz --validation nowhere.npz",
    "record model cifar10:nowhere",
    "costs nowhere",
    "predict model nowhere.json data.npz",
    "plan model nowhere.npz",
    "bench nowhere policy.json data.npz",
)
RUN_EACH = """
import sys
from alight.cli import main
for line in sys.argv[1:]:
    print(main(line.split()), "torch" in sys.modules, line)
"""


def test_a_bad_path_is_refused_before_torch_is_loaded(folder):
    Path("model").mkdir()
    for name in ("model/model.safetensors", "model/config.json", "data.npz"):
        Path(name).touch()
    done = subprocess.run([sys.executable, "-c", RUN_EACH, *BAD_PATHS], capture_output=True, text=True)
    assert done.stdout.splitlines() == [f"1 False {line}" for line in BAD_PATHS]
    assert done.stderr.count("\n") == len(BAD_PATHS)


def test_attach_takes_trained_weights_and_a_normalisation(network, tmp_path, capsys, monkeypatch):
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


def test_what_is_there_is_replaced_only_by_force(network, chain, folder, capsys):
    for path, name in ((chain / "model", "trained"), (network / "model", "fresh")):
        shutil.copytree(path, name)
    shutil.copy(chain / "labelled.npz", "labelled.npz")
    attach = "attach timm:test_resnet --classes 7 --image-size 16 --after layer1 -o trained"
    train = f"train fresh {network}/test.npz --epochs 1 -o trained"
    record = f"record fresh {network}/test.npz -o labelled.npz"
    holding = {
        attach: "trained holds a network of 10 classes with exits after layer1, layer2, end",
        train: "trained holds a network of 7 classes with exits after layer1, end",
        record: "labelled.npz holds a recording of 397 samples at 3 exits",
    }
    for line, held in holding.items():
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        status, _, err = run(line, capsys)
        assert status == 1
        assert held in err
        assert err.endswith("give another place with -o, or --force to replace it\n")
        assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        assert run(f"{line} --force --quiet", capsys)[0] == 0
    assert load_model("trained").num_classes == 10  # trained after it was attached anew
    assert HeadOutputs.load("labelled.npz").fingerprint == fingerprint(load_model("fresh"))
    assert run(f"train fresh {network}/test.npz --epochs 1 --quiet", capsys)[0] == 1  # by default into `trained`
    in_place = f"train fresh {network}/test.npz --epochs 1 --quiet -o fresh"
    assert run(in_place, capsys)[0] == 0  # where that is asked for
    shutil.copy(chain / "policy.json", "fresh/policy.json")  # as `fit` leaves it
    status, _, err = run(in_place, capsys)
    assert (status, Path("fresh/policy.json").is_file()) == (1, True)
    assert err.startswith("alight: fresh holds a fitted network, its policy and tables: give another place with -o")
    assert run(f"{in_place} --force", capsys)[0] == 0


def test_a_missing_library_is_named_with_what_brings_it(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    status, _, err = run("attach timm:test_resnet", capsys)
    assert status == 1
    assert 'pip install "alight[vision]"' in err


NETWORK_BAD = {
    "unknown network": ("attach resnet18", "write timm:NAME"),
    "unknown in the zoo": ("attach zoo:lenet", "NAME one of msdnet_cifar"),
    "exits of the zoo": ("attach zoo:resnet18_cifar --count 5", "stand where its paper puts them"),
    "unknown module": ("attach timm:test_resnet --after layer9", "layer9"),
    "unknown option": ("attach timm:test_resnet --set depth=3", "does not accept these options"),
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
def test_bad_input_to_a_network_gets_one_sentence_and_a_status(case, network, folder, capsys):
    line, message = NETWORK_BAD[case]
    np.savez("other.npz", scores=np.zeros(3))
    status, out, err = run(line.format(data=network), capsys)
    assert status == 1
    assert message in err
    assert err.startswith("alight: ")
    assert err.count("\n") == 1
    assert out == ""


@pytest.mark.filterwarnings("ignore:the last exit")  # of weights that are not trained
def test_a_cascade_is_recorded_measured_calibrated_and_predicted_from_the_shell(example_files, folder, capsys):
    shutil.copytree(example_files, folder, dirs_exist_ok=True)
    for line in (
        "cascade small model -o chain",
        "record chain validation.npz -o table.npz",
        "costs chain -o chain_costs.json",
        "calibrate table.npz --costs chain_costs.json --budget 80% --contract none -o chain.json",
        "predict chain chain.json test.npz -o chain.csv",
    ):
        status, _, err = run(f"{line} --quiet", capsys)
        assert status == 0, err
    costs, policy = Costs.load("chain_costs.json"), load_policy("chain.json")
    assert costs.is_cascade
    assert costs.full == costs.alone.max()  # the first is the more expensive one here
    answers = [int(row["prediction"]) for row in csv.DictReader(Path("chain.csv").read_text().splitlines())]
    with np.load("test.npz") as arrays:
        assert answers == Predictor(load_network("chain"), policy)(arrays["images"]).predictions.tolist()


TWO_OUTPUTS = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        features = self.second(self.first(x).relu())
        return features, self.last(features.relu())
"""


def test_the_logits_of_an_own_network_are_named_and_it_is_checked_with_its_code(folder, capsys):
    (folder / "nets.py").write_text(TWO_OUTPUTS)
    line = "attach nets.py:Net --input-shape 6 --after first -o own"
    status, _, err = run(line, capsys)
    assert (status, "say which are the logits" in err, "(--logits 0)" in err) == (1, True, True)
    assert run(f"{line} --logits 1", capsys)[0] == 0
    status, out, _ = run("check own", capsys)
    assert (status, "--network FILE.py:NAME" in out) == (0, True)
    status, out, _ = run("check own --network nets.py:Net", capsys)
    assert (status, "equal to the network, bit by bit" in out) == (0, True)
    status, _, err = run("attach timm:test_resnet --channels last -o other", capsys)
    assert (status, "says itself where its channels are" in err) == (1, True)


@pytest.mark.parametrize(
    "name", ["timm:gernet_s", "timm:hf-hub:nobody/nothing", "torchvision:mnasnet0_5", "transformers:nobody/nothing"]
)
def test_weights_that_cannot_be_downloaded_are_refused_at_once_in_one_sentence(name, folder, capsys, monkeypatch):
    for variable in ("HTTPS_PROXY", "https_proxy"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")  # where nothing answers
    monkeypatch.setenv("TORCH_HOME", str(folder / "torch"))
    status, _, err = run(f"attach {name} --pretrained -o new", capsys)
    *_, last = err.splitlines()
    assert last.startswith(f"alight: {name.partition(':')[2]} cannot be downloaded (")
    assert last.endswith(
        "Connection refused): check the connection, or give a folder or a file of weights that is here"
    )
    assert (status, "Retrying" in err, Path("new").exists()) == (1, False, False)
