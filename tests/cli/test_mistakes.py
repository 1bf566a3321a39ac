"""Typical mistakes, each with the sentence that is printed: no traceback, and it says what to do."""

import shutil
import warnings
from pathlib import Path

import numpy as np
import pandas
import pytest
import timm
import torch
import transformers
from commands import run
from torch import nn
from torch.utils.data import IterableDataset

import alight
from alight import calibrate, recordings
from alight.cli.parser import COMMANDS as KNOWN
from alight.cli.parser import SYNONYMS
from alight.errors import AlightError

OWN = (
    "from torch import nn\nclass Net(nn.Linear):\n    def __init__(self, width):\n        super().__init__(width, 3)\n"
)

OWN_CNN = """from torch import nn
class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10))
"""
COMMANDS = {  # a command line: the start of what it prints on stderr, after "alight: "
    # budgets
    "calibrate labelled.npz --costs costs.json --budget 0.5": (
        "budget 0.5 FLOPs per sample is below the cheapest exit (888 KFLOPs, 35.6 % of the full network): did you mean"
        " '50%'?"
    ),
    "calibrate labelled.npz --costs costs.json --budget 50": (
        "budget 50 FLOPs per sample is below the cheapest exit (888 KFLOPs, 35.6 % of the full network): did you mean"
        " '50%'?"
    ),
    "calibrate labelled.npz --costs ms.json --budget 50": (
        "budget 50 ms per sample is 5 times what the full network costs (10 ms): did you mean '50%'? Write '50 ms' to"
    ),
    "calibrate labelled.npz --costs costs.json --budget 1%": "budget 24.9 KFLOPs per sample is below the cheapest exit",
    "calibrate labelled.npz --costs costs.json --budget '3 ms'": (
        "budget '3 ms' is not in the costs' unit FLOPs: give a percentage, or measure costs in that unit first (`alight"
        " costs --unit ms`"
    ),
    "calibrate labelled.npz --costs costs.json --budget half": "budget 'half' is not a number, percentage or quantity",
    "calibrate labelled.npz --costs costs.json --budget 5%%": "unknown unit '%%' in budget '5%%': alight knows",
    "calibrate labelled.npz --costs costs.json": "there is no budget: give --budget 50%",
    # files and their order
    "calibrate labeled.npz --costs costs.json --budget 50%": (
        "{here}/labeled.npz: No such file or directory; did you mean labelled.npz?"
    ),
    "calibrate labelled.npz --costs cost.json --budget 50%": "costs 'cost.json': there is no such file, and they are",
    "calibrate costs.json --costs labelled.npz --budget 50%": (
        "the arguments are in another order: write `alight calibrate labelled.npz --costs costs.json ...`"
    ),
    "calibrate labelled.npz --costs policy.json --budget 50%": "policy.json is a policy, not a file of costs: give the",
    "calibrate test.npz --costs costs.json --budget 50%": (
        "test.npz is data (images or texts), not a file of recorded outputs: give the .npz that `alight record` wrote"
    ),
    "predict policy.json model test.npz": (
        "the arguments are in another order: write `alight predict model policy.json test.npz ...`"
    ),
    "predict model test.npz policy.json": (
        "the arguments are in another order: write `alight predict model policy.json test.npz ...`"
    ),
    "predict model costs.json test.npz": "costs.json is a file of costs, not a policy: give the JSON that `alight",
    "predict test.npz fitted": "the arguments are in another order: write `alight predict fitted test.npz ...`",
    "predict model test.npz": "model has no policy.json: name the JSON that `alight calibrate` or `alight plan` wrote",
    "plan labelled.npz model": "the arguments are in another order: write `alight plan model labelled.npz ...`",
    "record model labelled.npz": "labelled.npz is a file of recorded outputs, not data (images or texts): give what",
    "record modle test.npz": "there is no folder modle",
    "run model test.npz": "model is the folder of a network, not the folder of an exported network: give the folder",
    "record model empty.npz": "cannot read empty.npz: it has scores; save np.savez(path, images=..., labels=...)",
    "record model texts.jsonl": "the network does not take text but input_0 of shape (samples, 3, 32, 32)",
    "record model last.npz": (
        "images of shape (4, 32, 32, 3) with their channels last, and the network takes input_0 of shape (samples, 3,"
        " any, any), float32: put them first, x.transpose(0, 3, 1, 2) of an array"
    ),
    "attach timm:test_resnet --image-size 32 -o model": "model holds a network of 10 classes with exits after",
    # names
    "attach resnet18": "network 'resnet18': write timm:NAME, torchvision:NAME, transformers:FOLDER, zoo:NAME, FILE.py",
    "attach timm:resnet118 -o new": "timm",  # and its version
    "attach timm:test_resnet --after layer1,layer9 -o new": "no module is called 'layer9': the nearest",
    "attach transformers:bert-base -o new": "there is no folder 'bert-base': check the path, or give --pretrained to",
    "attach timm:local-dir:nowhere -o new": "there is no folder 'nowhere': check the path of timm:local-dir:FOLDER",
    "attach timm:test_resnet --set depht=3 -o new": "timm:test_resnet does not accept these options",
    "attach nets.py:Net -o new": "nets.py:Net needs width: give --set width=..., or name a function without arguments",
    "attach nets.py:Net --set width=4 -o new": "nets.py:Net does not say what it takes: give --input-shape, as 3,32,32",
    "attach nets.py:Nets -o new": "nets.py has no 'Nets': it has Net",
    "attach nets.py:Net --set width=4 --set depth=2 -o new": "nets.py:Net takes no argument 'depth': it takes width",
    "attach nets.py:Net --set width=4 --input-shape 3,8,8 -o new": "nets.py:Net does not run on a batch of shape (2,",
    "attach timm:test_resnet --image-size 32 --weights whole.pt -o new": (
        "cannot read whole.pt: it is damaged, or holds more than weights, such as a whole network, whose code is not"
    ),
    "attach timm:test_resnet --image-size 32 --weights other.pt -o new": (
        "the weights are another network's: 92 missing in the file, as conv1.0.weight; 2 not in the network, as weight;"
    ),
    "calibrate labelled.npz --costs costs.json --budget 50% --method eero --set heat=1": (
        "--set 'heat=1': write NAME=VALUE with NAME one of"
    ),
    # what does not belong together
    "predict model foreign.json test.npz": "the policy was calibrated on outputs of the network 0123456789abcdef and",
    "sweep labelled.npz unlabelled.npz --costs costs.json": "a sweep's test table needs labels and there are none:",
    "sweep labelled.npz labelled.npz --costs costs.json": "the labelled table is also the test table: split it, so",
    "calibrate labelled.npz --costs 1,2 --budget 50%": "the labelled table has 4 exits, but there are 2 costs: give",
    "train model strange.npz --epochs 1 -o new": "labels run from 0 to 99, but the network has 10 classes, 0 to 9:",
    # the one command that does it all
    "fit train.npz test.npz nets.py:Net -o new": (
        "the arguments are in another order: write `alight fit nets.py:Net train.npz test.npz ...`"
    ),
    "fit model train.npz train.npz -o new": "{here}/train.npz is named twice among inputs and outputs: give each",
    "fit model train.npz test.npz strange.npz -o new": "3 data sets: give training and validation data, or validation",
    "fit other.pt train.npz test.npz -o new": "other.pt holds weights alone: name the network that they are of, with",
    "fit costs.json test.npz -o new": "test.npz is data (images or texts), not a file of recorded outputs: give the",
    "fit policy.json labelled.npz -o new": "policy.json is a policy, not a file of costs: give the JSON that `alight",
    "fit transformers:fitted train.npz test.npz -o new": "'fitted' is not a network of transformers (Unrecognized",
    "fit transformers:nothing train.npz test.npz -o new": "the folder 'nothing' has no config.json: give one that",
    "fit config_alone train.npz test.npz -o new": (
        "cannot read config_alone: it holds a network of transformers; write transformers:config_alone to"
    ),
    "fit build.py:three train.npz test.npz -o new": "build.py:three returns 3: name what returns a torch.nn.Module",
    "record model semicolons.csv": "cannot read semicolons.csv: its cells are separated by ';'; save it with commas",
    "fit transformers:config_alone train.npz test.npz -o new": (
        "the folder 'config_alone' has a config.json and no weights: save a trained network there, network.save_pre"
    ),
    "fit model nothing test.npz -o new": "nothing has no images (.png .jpg",
    "fit model trian.npz test.npz -o new": "trian.npz: there is no such file or folder; did you mean train.npz?",
    "fit model test.npz -o fitted": "fitted holds a network of 10 classes with exits after",
    "fit model test.npz --classes 5 -o new": "model is a saved network, which has its own num_classes: leave it out",
    "fit model test.npz --budget 50% --speedup 2 -o new": "budget and speedup are 2 goals: give one of them",
    "fit model train.npz test.npz --budget 0.5 -o new": "budget 0.5 FLOPs per sample is below the cheapest exit",
    "fit model train.npz test.npz --budget half -o new": "budget 'half' is not a number, percentage or quantity",
    "fit model train.npz last.npz -o new": "images of shape (4, 32, 32, 3) with their channels last",
    "fit model train.npz strange.npz -o new": "labels run from 0 to 99, but the network has 10 classes, 0 to 9:",
    "fit model train.npz texts.jsonl -o new": "the network does not take text but input_0 of shape (samples, 3, 32",
    "fit model train.npz test.npz -o /proc/new": "/proc/new: No such file or directory",
    "fit timm:test_resnet train.npz test.npz --weights other.pt --image-size 32 -o new": "the weights are another",
    "fit model train.npz test.npz --after layer1 -o new": "after=['layer1'] is where exits go, and this is a network",
    "fit model train.npz test.npz --set keep_best=true -o new": "6 of 64 training samples would be held out to",
    "fit cnn.py:Net last.npz test.npz --image-size 8 -o new": (
        "image_size=8 is for pictures and bytes, and the data are neither: leave it out"
    ),
    "fit cnn.py:Net bytes.npz test.npz --mean 0.5 --std 0.25 -o new": (
        "the normalisation and so the images have 1 channel, and the network takes 3: give 3 means and 3 standard"
    ),
    "fit cnn.py:Net train.npz test.npz --pretrained -o new": (
        "cnn.py:Net is your own network, and no library has weights of it: give weights in a file"
    ),
    "fit model train.npz test.npz --set lr=0.1 -o new": "--set 'lr=0.1': write NAME=VALUE with NAME one of",
    "fit ./nowhere train.npz test.npz -o new": "there is no folder './nowhere': check the path, or name a network, as",
    # options that do nothing there
    "calibrate labelled.npz --costs costs.json --budget 50% --alpha 0.1": (
        "--alpha is the highest risk that is allowed: give --risk, and say of what"
    ),
    "calibrate labelled.npz --costs costs.json --risk error": "--risk error has no limit: give --alpha 0.01, which",
    "calibrate labelled.npz --costs costs.json --budget 50% --max-costs 1,2": (
        "--max-costs is for a log of models, and these are recorded outputs: leave it out"
    ),
    "calibrate labelled.npz --costs costs.json --budget 50% --incomplete drop": "--incomplete is for a log of models",
    "calibrate labelled.npz --costs costs.json --budget 50% --contract none --delta 0.1": (
        "--delta is the probability that a guarantee fails: give --contract probability, or leave it out"
    ),
    "calibrate labelled.npz --costs costs.json --budget 50% --method patience --set heat=1": (
        "--set 'heat=1': there are none here, leave it out"
    ),
    "sweep labelled.npz test_outputs.npz --costs costs.json --unit USD": "--unit is for a log of models, and these",
    "sweep labelled.npz test_outputs.npz --costs costs.json --delta 0.1": "--delta is the probability that a guarantee",
    "record model test.npz --on-error skip -o new.npz": (
        "--on-error is for many machines: give --engine ray, or leave it out"
    ),
    "predict model policy.json test.npz --actors 2 -o new.csv": "--actors is for many machines: give --engine ray, or",
    "record model test.npz -o new.csv": "recorded outputs are .npz, by which other commands know them: give -o new.npz",
    "fit model test.npz --epochs 3 -o new": "--epochs is for a training, and there are no training data: leave it out",
    "fit costs.json labelled.npz --weights other.pt -o new": (
        "--weights is for a network, and costs.json has none: leave it out"
    ),
    "fit costs.json train.npz labelled.npz -o new": (
        "train.npz is training data, and costs.json has no network to train: leave it out"
    ),
    "fit cnn.py:Net bytes.npz test.npz --mean 0,0,0 --after 0 --classes 7 -o new": (
        "cnn.py:Net has 10 classes, and 7 were asked for: leave that out, or let it take num_classes"
    ),
    "fit model test.npz --tokenizer model --mean 0,0,0 -o new": "--tokenizer is for texts, and --mean and --std are",
    "predict nowhere test.npz": "there is no folder nowhere: give one that `alight fit` or `alight attach` wrote",
}
if not torch.cuda.is_available():
    COMMANDS["fit model test.npz --device cuda -o new"] = "--device cuda: torch finds no GPU here; leave it out to run"
INVALID = {  # arguments that no command has: status 2
    "bench model policy.json test.npz --batch-size 8": "there is no option --batch-size: did you mean --batch-sizes?",
    "fit model test.npz --buget 50%": "there is no option --buget: did you mean --budget? (see alight fit --help)",
    "predict model policy.json test.npz --budget 30%": "there is no option --budget (see alight predict --help)",
    "predict model policy.json test.npz other.npz": "too many arguments: other.npz (see alight predict --help)",
    "fit model test.npz --epochs 0": "argument --epochs: '0': give a whole number, 1 or more",
    "fit model test.npz --report nowhere/r.html": "argument --report: cannot write 'nowhere/r.html': there is no such",
    "fit model test.npz --smaller half": "argument --smaller: 'half': give name, accuracy and cost, as 'ResNet-10,70%",
    "fit model test.npz --speedup fast": "argument --speedup: 'fast': give a factor, as 2 or 2x",
    "fit model test.npz --max-accuracy-loss little": "argument --max-accuracy-loss: 'little': give a share, as 0.01 or",
    "deploy model": "there is no command 'deploy': did you mean export? (see alight --help)",
    "tune model": "there is no command 'tune': did you mean plan? (see alight --help)",
    "compare-runtimes model": "there is no command 'compare-runtimes': did you mean bench? (see alight --help)",
    "measure_costs model": "there is no command 'measure_costs': did you mean costs? (see alight --help)",
    "export_model model": "there is no command 'export_model': did you mean export? (see alight --help)",
    "fitt model test.npz": "there is no command 'fitt': did you mean fit? (see alight --help)",
    "predict model policy.json test.npz -o a.xlsx": (
        "argument -o/--output: 'a.xlsx': answers are CSV or Parquet, so give .csv or .parquet (see alight predict"
    ),
    "run exported test.npz -o a.txt": "argument -o/--output: 'a.txt': answers are CSV or Parquet, so give .csv or",
    "serve model policy.json --port 99999": "argument --port: '99999': give a whole number, 0 to 65535 (see alight",
    "fit model": "the following arguments are required: DATA (see alight fit --help)",
}


@pytest.fixture(scope="module")
def place(example_files, tmp_path_factory):
    """The files of the examples, and some with mistakes in them."""
    folder = tmp_path_factory.mktemp("mistakes")
    shutil.copytree(example_files, folder, dirs_exist_ok=True)
    table = alight.HeadOutputs.load(folder / "labelled.npz")
    table.unlabelled().save(folder / "unlabelled.npz")
    policy = alight.load_policy(folder / "policy.json").to_dict() | {"fingerprint": "0123456789abcdef"}
    alight.policies.policy_from_dict(policy).save(folder / "foreign.json")
    alight.Costs([4.0, 2.0, 2.0, 2.0], [0.0] * 4, "ms").save(folder / "ms.json")
    np.savez(folder / "empty.npz", scores=np.zeros(3))
    with np.load(folder / "train.npz") as arrays:
        np.savez(folder / "strange.npz", images=arrays["images"][:8], labels=np.array([0, 99] * 4))
    np.savez(folder / "bytes.npz", images=np.zeros((4, 3, 8, 8), np.uint8), labels=np.arange(4))
    np.savez(folder / "last.npz", images=np.zeros((4, 32, 32, 3), np.float32))
    (folder / "texts.jsonl").write_text('{"text": "hello", "label": 1}\n')
    (folder / "nets.py").write_text(OWN)
    (folder / "cnn.py").write_text(OWN_CNN)
    (folder / "build.py").write_text("def three():\n    return 3\n")
    (folder / "semicolons.csv").write_text("text;label\ngood;1\nbad;0\n")
    (folder / "nothing").mkdir()
    transformers.BertConfig(num_hidden_layers=2, hidden_size=8, num_attention_heads=2).save_pretrained(
        folder / "config_alone"
    )
    torch.save(nn.Linear(2, 2), folder / "whole.pt")
    torch.save(nn.Linear(2, 2).state_dict(), folder / "other.pt")
    return folder


@pytest.mark.parametrize("line", COMMANDS)
def test_a_mistake_on_the_command_line_gets_one_sentence(line, place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    before = sorted(path.name for path in place.iterdir() if path.name != "__pycache__")
    status, out, err = run(line, capsys)
    printed = err.rpartition("\r")[2].strip().rpartition("\n")[2]  # after a bar of progress
    assert printed.startswith(f"alight: {COMMANDS[line].format(here=place)}"), err
    assert (status, out, "Traceback" in err) == (1, "", False)
    assert sorted(path.name for path in place.iterdir() if path.name != "__pycache__") == before


@pytest.mark.parametrize("line", INVALID)
def test_arguments_that_no_command_has_get_one_sentence(line, place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    status, _, err = run(line, capsys)
    assert (status, err.startswith(f"alight: {INVALID[line]}")) == (2, True), err


def network():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, 3))


def model(made=None):
    return alight.attach_heads(made or network(), ["1"], example=torch.zeros(1, 3, 8, 8))


def normalised():
    made = model()
    made.normalisation = alight.Normalisation((0.5,) * 3, (0.25,) * 3)
    alight.train_heads(made, (IMAGES, LABELS), JOINT, progress=False)
    return made


def scripted():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated
        return torch.jit.script(network())


def fit(*given, **further):
    return alight.fit(*given, **further, progress=False)


class Stream(IterableDataset):
    def __iter__(self):
        return zip(torch.zeros(12, 3, 8, 8), range(12), strict=True)


IMAGES, LABELS = np.zeros((12, 3, 8, 8), np.float32), np.arange(12) % 3
OTHERS = np.ones((12, 3, 8, 8), np.float32), LABELS
JOINT = alight.TrainingSettings(mode="joint", epochs=1)
POLICY = alight.Threshold((0.5,), costs=(1.0, 2.0))
LABELLED, TEST, COSTS = recordings.load()
CALLS = {  # a call: what is raised
    "a fraction for a percentage": (
        lambda: calibrate.eero(COSTS, 0.5, LABELLED),
        "budget 0.5 FLOPs per sample is below the cheapest exit (155 MFLOPs, 13.9 % of the full network): did you mean"
        " '50%'?",
    ),
    "a bare percentage": (lambda: calibrate.eero(COSTS, 50, LABELLED), "budget 50 FLOPs per sample is below the"),
    "a misspelt layer": (
        lambda: alight.attach_heads(network(), ["0.conv"], example=torch.zeros(1, 3, 8, 8)),
        "no module is called '0.conv': the nearest names are '0', '1', '2'",
    ),
    "another number of classes": (
        lambda: alight.attach_heads(network(), ["1"], example=torch.zeros(1, 3, 8, 8), num_classes=5),
        "num_classes is 5, but the network itself gives 3 logits: give num_classes=3",
    ),
    "no heads yet": (lambda: alight.Predictor(network(), POLICY), "a Sequential has no exits yet: attach_heads makes"),
    "a policy of another network": (
        lambda: alight.Predictor(model(), alight.Threshold((0.5, 0.5), costs=(1.0, 2.0, 3.0))),
        "the policy is for 3 exits and the network has 2: calibrate on outputs of this network",
    ),
    "labels of another network": (
        lambda: alight.record(model(), (torch.zeros(2, 3, 8, 8), torch.tensor([0, 7])), progress=False),
        "labels run from 0 to 7, but the network has 3 classes, 0 to 2: number the classes from 0",
    ),
    "channels last": (
        lambda: alight.Predictor(model(), POLICY)(np.zeros((2, 8, 8, 3), np.float32)),
        "images of shape (2, 8, 8, 3) with their channels last, and the network takes input_0 of shape (samples, 3,",
    ),
    "accuracy without labels": (
        lambda: alight.Predictor(model(), POLICY)(torch.zeros(2, 3, 8, 8)).accuracy(),
        "accuracy needs labels and there are none: give labelled data",
    ),
    "a unit that is not measured": (
        lambda: alight.measure_costs(model(), unit="seconds"),
        "there is no unit 'seconds' to measure in: choose one of FLOPs, MACs, ms, J",
    ),
    "a folder that is not there": (
        lambda: alight.from_transformers("./nowhere"),
        "there is no folder './nowhere': check the path, or give a name of the hub, as owner/name",
    ),
    "a misspelt network": (lambda: alight.from_torchvision("resnet_18"), "torchvision"),
    "a policy before the network": (
        lambda: alight.Predictor(POLICY, model()),
        "the arguments are in another order: write Predictor(network, policy)",
    ),
    "a table for a policy": (lambda: alight.Predictor(model(), LABELLED), "a HeadOutputs is not a policy: give one"),
    "layers before the network": (
        lambda: alight.attach_heads(["1"], network(), example=torch.zeros(1, 3, 8, 8)),
        "a list is not a network, the arguments are in another order: write attach_heads(network, after, example=...)",
    ),
    "costs of a network without exits": (
        lambda: alight.measure_costs(network()),
        "a Sequential has no exits yet: attach_heads makes a MultiExitModel of it",
    ),
    "a table before the network": (
        lambda: alight.plan(LABELLED, model()),
        "the arguments are in another order: write plan(model, labelled)",
    ),
    "a table before its costs": (
        lambda: calibrate.eero(LABELLED, COSTS, "50%"),
        "the arguments are in another order, recorded outputs first: write (costs, budget, labelled)",
    ),
    "a table before its costs, with a guarantee": (
        lambda: calibrate.certified_probability(calibrate.eero)(LABELLED, COSTS, "50%"),
        "the arguments are in another order, recorded outputs first: write (costs, budget, labelled)",
    ),
    # fit
    "a compiled network": (
        lambda: fit(torch.compile(network()), (IMAGES, LABELS), OTHERS),
        "the network is compiled: give the module itself, network._orig_mod",
    ),
    "TorchScript": (
        lambda: fit(scripted(), (IMAGES, LABELS), OTHERS),
        "the network is TorchScript, which cannot be cut: give the torch module that it was made of",
    ),
    "weights without data": (
        lambda: fit(network().to("meta"), (IMAGES, LABELS), OTHERS),
        "the network's weights hold no data (device meta): load them first",
    ),
    "a network in double": (
        lambda: fit(network().double(), (IMAGES, LABELS), OTHERS),
        "the network's weights are float64: give network.float()",
    ),
    "a network without a place for exits": (
        lambda: fit(nn.Sequential(nn.Flatten(), nn.Linear(192, 3)), (IMAGES, LABELS), OTHERS),
        "0 places found to cut a Sequential and 3 asked for: an exit with its head would cost as much as all; run the",
    ),
    "a batch size in quotes": (
        lambda: fit(network(), (IMAGES, LABELS), OTHERS, batch_size="64"),
        "batch_size='64' is not a whole number of samples: give 64",
    ),
    "labels that are missing": (
        lambda: fit(network(), (IMAGES, np.where(LABELS == 1, np.nan, LABELS)), OTHERS, budget="95%"),
        "labels are float64, not class indices: give integers",
    ),
    "data before the network": (
        lambda: fit((IMAGES, LABELS), network(), OTHERS),
        "the arguments are in another order: write fit(network, train, validation)",
    ),
    "more than inputs and labels": (
        lambda: fit(network(), (IMAGES, LABELS, LABELS), OTHERS, budget="95%"),
        "a tuple of 2 inputs beside labels, and the network takes one, input_0 of shape (samples, 3, 8, 8), float32:"
        " give (inputs, labels)",
    ),
    "training data without labels": (
        lambda: fit(network(), IMAGES, OTHERS, training=alight.TrainingSettings(epochs=1), budget="95%"),
        "the training data have no labels: give (inputs, labels), or a dict with 'labels'",
    ),
    "half precision": (
        lambda: fit(network(), (IMAGES.astype("float16"), LABELS), OTHERS),
        "the data are float16, and the network takes float32: give x.astype('float32'), or x.float()",
    ),
    "validation in half precision": (
        lambda: fit(network(), (IMAGES, LABELS), (torch.ones(12, 3, 8, 8).bfloat16(), LABELS)),
        "the data are bfloat16, and the network takes float32: give x.astype('float32'), or x.float()",
    ),
    "images as columns of a table": (
        lambda: fit(network(), (pandas.DataFrame(IMAGES.reshape(12, -1)), LABELS), OTHERS),
        "the network fails on two samples of the data, shape (2, 192), with RuntimeError: Expected 3D",
    ),
    "a network that fails on its data": (
        lambda: fit(nn.Sequential(network(), nn.Linear(7, 3)), (IMAGES, LABELS), OTHERS),
        "the network fails on two samples of the data, shape (2, 3, 8, 8), with RuntimeError: ",
    ),
    "a network of segmentation": (
        lambda: fit(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 3, 1)), (IMAGES, LABELS), OTHERS),
        "the network gives a tensor of shape (2, 3, 6, 6), not (samples, classes): exits decide about one class per",
    ),
    "inside of no_grad": (
        lambda: torch.no_grad()(fit)(network(), (IMAGES, LABELS), OTHERS),
        "fit is called inside torch.no_grad(), where nothing can be trained: call it outside of it",
    ),
    "inside of inference_mode": (
        lambda: torch.inference_mode()(fit)(network(), (IMAGES, LABELS), OTHERS),
        "fit is called inside torch.inference_mode(), where nothing can be trained: call it outside of it",
    ),
    "a class": (lambda: fit(nn.Linear, (IMAGES, LABELS), OTHERS), "the class Linear is not a network: give a torch"),
    "weights": (lambda: fit("net.pt", (IMAGES, LABELS), OTHERS), "net.pt holds weights alone: load them into the"),
    "weights in memory": (
        lambda: fit(network().state_dict(), (IMAGES, LABELS), OTHERS),
        "these are weights alone: load them into the network, network.load_state_dict(weights), give that",
    ),
    "an optimizer instead of what makes one": (
        lambda: alight.TrainingSettings(optimizer=torch.optim.Adam(network().parameters())),
        "optimizer Adam(...) is none of 'adamw', 'sgd', and not a function: give what makes one of parameter groups",
    ),
    "labels as validation": (
        lambda: fit(network(), IMAGES, LABELS),
        "the validation data look like the labels of the training data: give pairs",
    ),
    "one data set for all": (
        lambda: fit(network(), OTHERS, OTHERS),
        "the training data are also the validation data: hold out samples",
    ),
    "no validation data": (lambda: fit(network(), (IMAGES, LABELS)), "there is no validation data: give samples that"),
    "no samples": (lambda: fit(network(), (IMAGES[:0], LABELS[:0]), OTHERS), "the data have no samples: give at"),
    "logits with exits first": (
        lambda: fit(alight.Costs.from_cumulative([1.0, 2.0]), None, (np.zeros((2, 12, 3)), LABELS)),
        "logits of shape (2, 12, 3) and 12 labels: samples come first, as in np.stack(logits, axis=1); or give a list",
    ),
    "bytes of one channel for a network of timm": (
        lambda: fit(timm.create_model("test_resnet", in_chans=1), (IMAGES[:, 0].astype(np.uint8), LABELS), OTHERS),
        "the data are pictures or bytes, and how the network normalises them is unknown: give Normalisation",
    ),
    "three samples": (
        lambda: fit(alight.Costs.from_cumulative([1.0, 2.0]), None, (np.zeros((3, 2, 3)), LABELS[:3])),
        "3 validation samples: give at least 6",
    ),
    "five samples": (
        lambda: fit(alight.Costs.from_cumulative([1.0, 2.0]), None, (np.zeros((5, 2, 3)), LABELS[:5])),
        "5 validation samples: give at least 6, better 2,000; half of them are the test",
    ),
    "a frozen backbone that is to be trained": (
        lambda: alight.train_heads(model(network().requires_grad_(False)), (IMAGES, LABELS), JOINT),
        "mode 'joint' trains the whole network, and none of the 6 weights of its stages requires a gradient: call",
    ),
    "samples one by one with their labels": (
        lambda: alight.Predictor(model(), POLICY).run(Stream(), progress=False),
        "the data give samples one by one, with a number beside each: give batches of it: torch.utils.data.DataLoader",
    ),
    "another normalisation than that of trained heads": (
        lambda: fit(normalised(), None, OTHERS, preprocess=alight.Normalisation((0.1,) * 3, (1.0,) * 3)),
        "Normalisation(mean=(0.1, 0.1, 0.1), std=(1.0, 1.0, 1.0)), and the network has Normalisation(mean=(0.5, 0.5",
    ),
    "one-based labels": (
        lambda: fit(network(), (IMAGES, LABELS + 1), (IMAGES, LABELS + 1)),
        "labels run from 1 to 3, but the network has 3 classes, 0 to 2: number the classes from 0",
    ),
    "labels as floats": (
        lambda: fit(network(), (IMAGES, LABELS), (IMAGES, LABELS / 1)),
        "labels are float64, not class indices: give integers",
    ),
    "channels last in the training": (
        lambda: fit(network(), (IMAGES.transpose(0, 2, 3, 1), LABELS), OTHERS),
        "images of shape (1, 8, 8, 3) with their channels last",
    ),
    "labels before their samples": (
        lambda: fit(network(), (LABELS, IMAGES), (LABELS, OTHERS[0])),
        "a pair begins with its labels: give (inputs, labels)",
    ),
    "labels in a column": (
        lambda: fit(network(), (IMAGES, LABELS), (OTHERS[0], LABELS[:, None])),
        "labels have shape (12, 1) for 12 samples: give one class index per sample (y[:, 0])",
    ),
    "yes and no": (
        lambda: fit(network(), (IMAGES, LABELS), (OTHERS[0], LABELS > 0)),
        "labels are bool, not class indices: give integers, or rows of shares (y.astype(int))",
    ),
    "shares of classes in the validation": (
        lambda: fit(network(), (IMAGES, LABELS), (OTHERS[0], np.full((12, 3), 1 / 3, np.float32))),
        "labels share samples among classes, which is for training alone: give validation data with one class",
    ),
    "NaN in the validation": (
        lambda: fit(network(), (IMAGES, LABELS), (np.full_like(IMAGES, np.nan), LABELS)),
        "the first validation samples hold NaN or infinite numbers: replace them, or leave them out",
    ),
    "an iterator": (
        lambda: fit(network(), iter([(IMAGES, LABELS)]), OTHERS),
        "the training data are a list_iterator, which is spent after one pass: give a DataLoader, a list, or anything",
    ),
    "a data set that gives samples one by one": (
        lambda: fit(network(), Stream(), OTHERS),
        "the data give samples one by one, with a number beside each: give batches of it: torch.utils.data.DataLoader",
    ),
    "grey images": (
        lambda: fit(network(), (IMAGES[:, :1], LABELS), OTHERS),
        "images of 1 channels (shape (2, 1, 8, 8)), and the network takes images of shape (samples, 3, any, any)",
    ),
    "one image": (
        lambda: fit(network(), (IMAGES[0], LABELS[:3]), OTHERS),
        "an input of shape (2, 8, 8), and the network takes images of shape (samples, 3, any, any)",
    ),
    "integers": (
        lambda: fit(network(), (IMAGES.astype(int), LABELS), OTHERS),
        "the data are int64, and the network takes floats: give x.astype('float32')",
    ),
    "bytes": (
        lambda: fit(network(), (IMAGES.astype(np.uint8), LABELS), OTHERS),
        "the data are pictures or bytes, and how the network normalises them is unknown: give Normalisation",
    ),
    "a function as preprocess": (
        lambda: fit(network(), (IMAGES, LABELS), OTHERS, preprocess=lambda x: x / 255),
        "preprocess is a function: give alight.Normalisation(mean, std), an image processor, or a tokenizer",
    ),
    "texts for a network of images": (
        lambda: fit(network(), (["good", "bad"], [1, 0]), OTHERS),
        "the data are texts, such as 'good', and the network takes no 'input_ids': give a network that reads text",
    ),
    "settings as a dict": (
        lambda: fit(network(), (IMAGES, LABELS), OTHERS, training={"epochs": 3}),
        "training={'epochs': 3} is not settings: give alight.TrainingSettings(epochs=3)",
    ),
    "a loss in percent": (
        lambda: fit(network(), (IMAGES, LABELS), OTHERS, max_accuracy_loss="1%"),
        "max_accuracy_loss '1%' is not a number: 0.01 is one point",
    ),
    "a speed-up with an x": (
        lambda: fit(network(), (IMAGES, LABELS), OTHERS, speedup="2x"),
        "speedup '2x' is not a number: 2 is twice as fast",
    ),
}


@pytest.mark.parametrize("case", CALLS)
def test_a_mistake_in_a_call_gets_one_sentence(case):
    call, sentence = CALLS[case]
    with pytest.raises(AlightError) as caught:
        call()
    assert str(caught.value).startswith(sentence)


def test_misspelt_names_are_answered_with_the_nearest(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "has no classifier 'resnet118': did you mean resnet1" in run("attach timm:resnet118", capsys)[2]
    assert not [*Path().iterdir()]


def test_the_table_has_sixty_mistakes():
    assert len(COMMANDS) + len(INVALID) + len(CALLS) >= 60


def test_every_other_word_for_a_command_names_one():
    assert {*SYNONYMS.values()} <= {*KNOWN}
    assert not {*SYNONYMS} & {*KNOWN}
