"""Networks of a user's own files and packages: built by name, saved whole, loaded without their code."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from alight import TrainingSettings, attach_heads, fingerprint, load_model, save_model, train_heads
from alight.cli import main
from alight.errors import BadFile, BadInput, Mismatch
from alight.networks.libraries import from_name, recognised
from alight.networks.own import build_own, example_for
from alight.networks.store import load_backbone, read_weights

SOURCE = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(outputs)
        self.unused = nn.Linear(3, 3)
        self.register_buffer("scale", torch.full((1,), 1.5), persistent=False)
        self.register_buffer("shift", torch.full((1,), 0.5))

    def forward(self, x):
        y = torch.relu(self.norm(self.conv(x))) * self.scale + self.shift
        return y + x if y.shape == x.shape else y

class Net(nn.Module):
    def __init__(self, width=4, depth=2, num_classes=5):
        super().__init__()
        self.stem = Block(3, width)
        self.blocks = nn.Sequential(*[Block(width, width) for _ in range(depth)])
        self.drop = nn.Dropout(0.1)
        self.classifier = nn.Linear(width, num_classes)

    def forward(self, x):
        return self.classifier(self.drop(self.blocks(self.stem(x)).mean((2, 3))))

def build(width):
    return Net(width)

class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(7, 4), nn.Linear(4, 3)

    def forward(self, ids):
        return self.out(self.embed(ids).mean(1))

net, number = Net(), 3
"""
SHAPE = (3, 8, 8)


class Sign(torch.autograd.Function):
    """A function with a gradient of its own, which is code."""

    @staticmethod
    def forward(context, values):
        return values.sign()

    @staticmethod
    def backward(context, gradient):
        return gradient


class Sided(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.last(Sign.apply(self.first(x)))


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_nets.py").write_text(SOURCE)
    (tmp_path / "own_package").mkdir()
    (tmp_path / "own_package" / "__init__.py").touch()
    (tmp_path / "own_package" / "models.py").write_text(SOURCE)
    yield tmp_path / "own_nets.py"
    for name in [name for name in sys.modules if name.startswith("own_")]:
        del sys.modules[name]
    sys.path[:] = [each for each in sys.path if str(tmp_path) not in each]


def attached(name: str = "own_nets.py:Net", **options):
    torch.manual_seed(0)
    return from_name(name, input_shape=SHAPE, count=2, **options).eval()


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("own_nets.py:Net", {"width": 6}),
        ("own_nets.py:build", {"width": 6}),
        ("own_nets.py:net", None),
        ("own_package.models:Net", None),
    ],
)
def test_a_class_a_function_and_a_network_are_built_by_name(file, name, arguments):
    model = attached(name, arguments=arguments)
    assert model.num_classes == 5
    assert model.exits[-1] == "end"


def test_the_number_of_classes_is_passed_on(file):
    assert attached(num_classes=9).num_classes == 9
    with pytest.raises(BadInput, match="num_classes is 9, but the network itself gives 5 logits"):
        attached("own_nets.py:build", num_classes=9, arguments={"width": 4})


def test_a_saved_network_is_loaded_in_a_process_that_has_never_seen_its_code(file, tmp_path):
    model = attached()
    images = torch.rand(5, *SHAPE)
    save_model(model, tmp_path / "saved")
    torch.save([*model(images)], tmp_path / "logits.pt")
    file.unlink()
    code = f"""
import torch
from alight import fingerprint, load_model
model = load_model("saved")
torch.manual_seed(0)
expected = torch.load("logits.pt")
images = torch.load("images.pt")
assert all(map(torch.equal, model(images), expected))
assert fingerprint(model) == {fingerprint(model)!r}
"""
    torch.save(images, tmp_path / "images.pt")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_network_that_was_loaded_alone_trains_and_is_saved_again(file, tmp_path):
    save_model(attached(), tmp_path / "saved")
    images, labels = torch.rand(16, *SHAPE), torch.arange(16) % 5
    whole = load_model(tmp_path / "saved", build_own("own_nets.py:Net", {}))
    alone = load_model(tmp_path / "saved")
    assert whole.network is not None
    assert alone.network is None
    for model in (whole, alone):
        torch.manual_seed(0)
        settings = TrainingSettings(mode="joint", epochs=1, learning_rate=0.01)
        train_heads(model, (images, labels), settings, batch_size=8, progress=False)
    assert fingerprint(alone) == fingerprint(whole)
    assert alone.stages[0].get_submodule("stem.norm").num_batches_tracked == 2
    save_model(alone, tmp_path / "again")
    assert fingerprint(load_model(tmp_path / "again")) == fingerprint(whole)
    with pytest.raises(BadInput, match=r"its weights were changed since.*backbone="):
        alone.verify()


WRONG = {
    "the logits that the network gave when it was saved": lambda logits: 1.1 * logits,
    "depend on the other samples of its batch": lambda logits: logits - logits.mean(0) * (len(logits) > 2),
}


@pytest.mark.parametrize("problem", WRONG)
def test_a_network_without_its_code_is_checked_by_saved_logits_and_for_samples_that_mix(file, tmp_path, problem):
    model = load_model(save_model(attached(), tmp_path / "saved"))
    assert model.network is None
    assert model.verify() == ""
    model.stages[-1].register_forward_hook(lambda _, __, logits: WRONG[problem](logits))
    with pytest.raises(BadInput, match=problem):
        model.verify()


def test_the_check_of_a_folder_without_code_says_what_is_not_checked(file, tmp_path, capsys):
    save_model(attached(), tmp_path / "saved")
    assert main(["check", str(tmp_path / "saved")]) == 0
    out = capsys.readouterr().out
    assert "gives the logits that the network gave when it was saved; samples do not mix, and may leave" in out
    assert "not checked, as the folder holds no code of the network: other sizes" in out


def test_a_network_that_cannot_be_written_down_is_passed_in_again(tmp_path):
    model = attach_heads(Sided(), ["first"], example=torch.zeros(2, 4))
    save_model(model, tmp_path)
    with pytest.raises(Mismatch, match=r"cannot build Sided again: pass it in as load_model\(folder, backbone="):
        load_model(tmp_path)
    assert fingerprint(load_model(tmp_path, Sided())) == fingerprint(model)


def test_a_saved_layer_of_another_kind_is_refused(file, tmp_path):
    save_model(attached(), tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    for changes, message in (
        ({"class": "os.system"}, "has no module 'os.system'"),
        ({"settings": {"_parameters": 1}}, "cannot have the setting '_parameters'"),
    ):
        layer = next(iter(config["layers"][0].values()))
        damaged = json.loads(json.dumps(config))
        name = next(iter(config["layers"][0]))
        damaged["layers"][0][name] = layer | changes
        (tmp_path / "saved" / "config.json").write_text(json.dumps(damaged))
        with pytest.raises(BadFile, match=message):
            load_model(tmp_path / "saved")


def test_networks_of_libraries_are_remembered_by_name(tmp_path):
    import timm
    import torchvision
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 32}
    tokens = torch.ones(2, 6, dtype=torch.int64)
    networks = {
        "timm": (timm.create_model("test_resnet", num_classes=4, in_chans=1), torch.zeros(2, 1, 32, 32)),
        "torchvision": (torchvision.models.squeezenet1_1(num_classes=4), torch.zeros(2, 3, 48, 48)),
        "transformers": (
            BertForSequenceClassification(BertConfig(vocab_size=30, num_labels=4, **sizes)),
            {"input_ids": tokens, "attention_mask": tokens},
        ),
    }
    for source, (network, example) in networks.items():
        model = attach_heads(network, 1, example=example)
        save_model(model, tmp_path / source)
        loaded = load_model(tmp_path / source)
        assert loaded.recipe["source"] == source
        assert fingerprint(loaded) == fingerprint(model)
        assert type(loaded.network) is type(network)


def test_a_network_of_a_library_that_was_changed_is_not_taken_for_the_library_s(tmp_path):
    import timm

    network = timm.create_model("test_resnet", num_classes=4)
    network.layer1[0].act2 = nn.Tanh()
    assert recognised(network, 4) is None
    model = attach_heads(network, ["layer1", "layer2"], example=torch.zeros(2, 3, 32, 32)).eval()
    save_model(model, tmp_path)
    loaded, images = load_model(tmp_path), torch.rand(3, 3, 32, 32)
    assert loaded.recipe["source"] == "backbone"
    torch.testing.assert_close(loaded(images)[-1], model(images)[-1])  # kernels depend on where tensors lie


WRAPPED = {
    "bare.pt": lambda state: state,
    "lightning.pth": lambda state: {"epoch": 3, "state_dict": state, "optimizer": {"lr": 0.1}},
    "nested.pt": lambda state: {"model": {"model_state_dict": state}},
    "parallel.pt": lambda state: {"model": {f"module.{name}": each for name, each in state.items()}},
    "attribute.ckpt": lambda state: {"state_dict": {f"net.{name}": each for name, each in state.items()}},
    "compiled.pt": lambda state: {f"_orig_mod.{name}": each for name, each in state.items()},
}


@pytest.mark.parametrize("path", [*WRAPPED, "weights.safetensors"])
def test_weights_are_read_as_trainings_save_them(file, path):
    state = build_own("own_nets.py:Net", {}).state_dict()
    save_file(state, path) if path.endswith("safetensors") else torch.save(WRAPPED[path](state), path)
    model = attached()
    load_backbone(model, path)
    assert all(torch.equal(each, state[name]) for name, each in model.network.state_dict().items())


def test_weights_of_another_network_or_with_code_are_refused(file):
    model = attached()
    state = build_own("own_nets.py:Net", {"width": 6}).state_dict()
    state["head.weight"] = state.pop("classifier.weight")
    torch.save(state, "other.pt")
    with pytest.raises(
        Mismatch, match=r"1 missing in the file, as classifier.weight; 1 not in the network, as head.weight; \d+ of an"
    ):
        load_backbone(model, "other.pt")
    torch.save(build_own("own_nets.py:Net", {}), "whole.pt")
    Path("text.pt").write_text("weights")
    torch.save({"epoch": 3}, "nothing.pt")
    for path, message in {"whole.pt": "code is not run", "text.pt": "damaged", "nothing.pt": "but epoch"}.items():
        with pytest.raises(BadFile, match=message):
            read_weights(path)


REFUSED = {
    "own_nets.py:Nett": "own_nets.py has no 'Nett': it has Block, Net, build, Tokens",
    "own_nets.py:number": "is a int: name a class or a function",
    "own_nets.py:build": "needs width: give --set width=",
    "own_nets.py:Block": "needs inputs, outputs",
    "nowhere.py:Net": "there is no file 'nowhere.py'",
    "own_package.layers:Net": "there is no module 'own_package.layers'",
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_name_that_is_not_a_network_is_refused(file, name):
    with pytest.raises(BadInput, match=REFUSED[name]):
        build_own(name, {})


def test_a_file_that_fails_is_named(file):
    file.write_text("import nothing_of_this_name")
    with pytest.raises(BadInput, match=r"own_nets.py cannot be imported \(ModuleNotFoundError: No module named"):
        build_own("own_nets.py:Net", {})


def test_an_example_is_of_numbers_or_of_tokens(file):
    assert example_for(build_own("own_nets.py:Tokens", {}), "net", (6,)).dtype == torch.int64
    assert example_for(build_own("own_nets.py:Net", {}), "net", None, 8).shape == (2, 3, 8, 8)
    with pytest.raises(BadInput, match="does not say what it takes: give --input-shape"):
        from_name("own_nets.py:Net")
    with pytest.raises(BadInput, match=r"does not run on a batch of shape \(2, 4, 8, 8\)"):
        example_for(build_own("own_nets.py:Net", {}), "net", (4, 8, 8))
