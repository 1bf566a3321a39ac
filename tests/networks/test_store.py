"""A network comes back from its folder bit by bit, without being traced; what is damaged or foreign is refused."""

import copy
import json
import subprocess
import sys
from importlib.metadata import version

import pytest
import torch
from torch import nn
from torch.nn import functional

from alight.cutting import tracing
from alight.cutting.cut import CUTTERS, register_cutter
from alight.data.preprocess import Normalisation
from alight.errors import BadFile, BadInput, Mismatch
from alight.networks import store as folders
from alight.networks.attach import attach_heads, from_outputs
from alight.networks.libraries import build_network, from_timm, from_torchvision, from_transformers
from alight.networks.multi_exit import MultiExitModel
from alight.networks.store import fingerprint, load_model, save_model
from alight.networks.zoo import msdnet_cifar, resnet_digits

SMALL_TIMM = {"depths": (1, 1, 1, 1), "dims": (8, 16, 24, 32), "image_size": 64}


def backbone(width=8):
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.ReLU()),
        nn.Sequential(nn.Conv2d(width, width, 3), nn.ReLU()),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 4)),
    )


def attached(head="auto"):
    return attach_heads(backbone(), ["0", "1"], example=torch.zeros(2, 3, 8, 8), head=head)


def images(model):
    return torch.randn(3, *model.recipe["example"]["shape"][1:], generator=torch.Generator().manual_seed(0))


def same(one, other, batch):
    with torch.no_grad():
        pairs = zip(one.eval()(batch), other.eval()(batch), strict=True)
        return all(torch.equal(ours, theirs) for ours, theirs in pairs)


REBUILT = {
    "msdnet": lambda: msdnet_cifar(10, blocks=2, base=1, step=1, channels=4, growth=4),
    "zoo, heads as chosen": lambda: resnet_digits(5, head=["mlp", "conv", "mlp"]),
    "timm": lambda: from_timm("convnext_atto", num_classes=5, **SMALL_TIMM),
    "timm, one channel": lambda: from_timm("convnext_atto", num_classes=5, in_chans=1, **SMALL_TIMM),
    "timm, a transformer": lambda: from_timm(
        "vit_tiny_patch16_224", num_classes=5, after=["blocks.1"], img_size=64, depth=3, embed_dim=24
    ),
    "torchvision": lambda: from_torchvision("mobilenet_v3_small", num_classes=5, image_size=64, width_mult=0.25),
}


SIZES = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32}


def text_model(name, count=2, **settings):
    """A small text classifier of Hugging Face with exits, its weights far from where training starts."""
    import transformers

    torch.manual_seed(0)
    model = from_transformers(getattr(transformers, name)(**settings), count=count)
    with torch.no_grad():
        for weight in model.parameters():
            weight += torch.randn_like(weight) / 4
    return model


def texts(tokens=16):
    generator = torch.Generator().manual_seed(0)
    mask = (torch.arange(tokens) < torch.randint(3, tokens + 1, (5, 1), generator=generator)).long()
    return {"input_ids": torch.randint(4, 50, (5, tokens), generator=generator) * mask, "attention_mask": mask}


def test_names_of_classes_and_inputs_of_a_text_network_come_back(tmp_path):
    from transformers import BertConfig

    config = BertConfig(**SIZES)
    config.id2label = {0: "good", 1: "bad"}
    model = from_transformers(config, count=2)
    again = load_model(save_model(model, tmp_path))
    assert same(model, again, texts())
    assert again.classes == ("good", "bad")
    assert again.input_names == ("input_ids", "attention_mask")


def test_mpnet_keeps_its_position_bias_when_it_is_loaded(tmp_path):
    """It is computed from the lengths of texts, and 1, of which an example may be made, is the padding."""
    model = text_model("MPNetConfig", **SIZES)
    again = load_model(save_model(model, tmp_path))
    assert same(model, again, texts())
    with torch.no_grad():
        assert torch.equal(again(texts())[-1], model.network(**texts()).logits)


class TwoOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 8)
        self.early, self.late, self.drop = nn.Linear(8, 3), nn.Linear(8, 3), nn.Dropout(0.5)

    def forward(self, x):
        x = self.drop(torch.relu(self.first(x)))
        return [self.early(x), self.late(torch.relu(self.second(x)))]


class WithConstant(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)
        self.table = torch.arange(4.0)  # neither a parameter nor a buffer

    def forward(self, x):
        return self.second(functional.dropout(self.first(x) + self.table, 0.5, self.training))


DECODER = {"n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 16, "vocab_size": 50, "pad_token_id": 0}
FAMILIES = {  # how to make each, what it is passed when it is loaded, and a batch
    **{name: (make, None, images) for name, make in REBUILT.items()},
    "zoo": (resnet_digits, None, images),
    "transformers, an encoder": (lambda: text_model("BertConfig", **SIZES), None, lambda _: texts()),
    "transformers, a decoder": (lambda: text_model("GPT2Config", **DECODER), None, lambda _: texts()),
    "own backbone": (attached, backbone, images),
    "own backbone, constants": (
        lambda: attach_heads(WithConstant(), ["first"], example=torch.randn(2, 4)),
        WithConstant,
        lambda _: torch.randn(5, 4),
    ),
    "several outputs": (lambda: from_outputs(TwoOutputs(), torch.randn(2, 4)), TwoOutputs, lambda _: torch.randn(5, 4)),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_come_back_bit_by_bit_and_nothing_is_traced(family, tmp_path, monkeypatch):
    torch.manual_seed(0)
    make, passed_in, batch_of = FAMILIES[family]
    model = make()
    batch = batch_of(model)
    assert save_model(model, tmp_path / "net") == tmp_path / "net"

    def refuse(*_):
        raise AssertionError("the network is traced again")

    monkeypatch.setattr(tracing, "record_calls", refuse)
    again = load_model(tmp_path / "net", **({} if passed_in is None else {"backbone": passed_in()}))
    assert not again.training
    assert same(model, again, batch)
    assert fingerprint(again) == fingerprint(model)
    assert (again.exits, again.num_classes) == (model.exits, model.num_classes)
    assert again.normalisation == model.normalisation
    if family in REBUILT:  # the weights of others were changed since, so they are not the random ones
        assert again.recipe == json.loads(json.dumps(model.recipe))
    found, expected = gradients(again, batch), gradients(model, batch)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


def gradients(model, batch):
    """Of all weights, in training mode."""
    model = copy.deepcopy(model).train()
    torch.manual_seed(0)
    sum(logits.square().sum() for logits in model(batch)).backward()
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def test_a_network_is_loaded_with_two_runs_that_check_it(tmp_path):
    save_model(attached(), tmp_path)
    network, runs = backbone(), []
    network.register_forward_hook(lambda _, inputs, output: runs.append(len(inputs[0])))
    load_model(tmp_path, backbone=network)
    assert runs == [5, 5]  # with the weights of the folder, and with others


class FixedPositions(nn.Module):
    """The loop over positions fixes their number."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        x = self.first(x)
        return self.second(sum(x[:, index] * index for index in range(x.shape[1])))


def test_a_size_that_the_code_fixes_comes_back(tmp_path):
    model = attach_heads(FixedPositions(), ["first"], example=torch.zeros(2, 5, 4))
    again = load_model(save_model(model, tmp_path), backbone=FixedPositions())
    for each in (model, again):
        with pytest.raises(BadInput, match=r"an input of \(6, 4\) per sample, and the network was cut for \(5, 4\)"):
            each(torch.zeros(2, 6, 4))


def negated(config):
    """Negate what the second stage returns."""
    nodes = config["graph"]["stages"][1]["evaluation"]
    op, target, args, kwargs = nodes.pop()
    (returned,) = args[0]["tuple"]
    nodes.append(["call_method", "neg", [returned], {}])
    nodes.append([op, target, [{"tuple": [{"node": len(nodes) - 1}]}], kwargs])


def test_a_graph_of_another_network_is_detected(tmp_path):
    save_model(attached(), tmp_path)
    rewrite(tmp_path / "config.json", negated)
    with pytest.raises(Mismatch, match=r"stages do not give what the network gives that was passed in"):
        load_model(tmp_path, backbone=backbone())
    save_model(resnet_digits(), tmp_path, force=True)
    rewrite(tmp_path / "config.json", negated)
    with pytest.raises(BadFile, match=r"stages do not give what the network gives; it was saved with .*torch \d"):
        load_model(tmp_path)


def test_a_backbone_with_other_code_is_detected(tmp_path):
    save_model(attached(), tmp_path)
    other = backbone()
    other.forward = lambda x: nn.Sequential.forward(other, x) * 2  # with the same weights
    with pytest.raises(Mismatch, match=r"pass in the one that was saved"):
        load_model(tmp_path, backbone=other)


def test_a_graph_that_names_other_code_is_refused(tmp_path):
    save_model(resnet_digits(), tmp_path)
    call = ["call_function", "os.system", ["true"], {}]
    rewrite(tmp_path / "config.json", lambda config: config["graph"]["stages"][0]["evaluation"].insert(1, call))
    with pytest.raises(BadFile, match=r"the graph has a call_function of 'os.system', which is not a tensor function"):
        load_model(tmp_path)


class Doubled(nn.Module):
    def __init__(self, *modules):
        super().__init__()
        self.modules_in_order = nn.Sequential(*modules)

    def forward(self, features):
        return (self.modules_in_order(features),)


class OwnNetwork(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 4), nn.Linear(4, 3))


def test_a_network_of_a_registered_cutter_is_cut_again(tmp_path):
    @register_cutter(OwnNetwork)
    def cut_own(model, after, example):
        return [Doubled(model[0]), model[1]]

    try:
        model = attach_heads(OwnNetwork(), ["0"], example=torch.randn(2, 4))
        save_model(model, tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        assert config["graph"] is None
        assert config["cut_again"] == "a registered cutter made the stages"
        assert same(model, load_model(tmp_path, backbone=OwnNetwork()), torch.randn(3, 4))
    finally:
        CUTTERS.pop()


def test_a_folder_of_hugging_face_is_a_source(tmp_path):
    from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32, image_size=32, num_labels=3
    )
    network = ViTForImageClassification(config).eval()
    network.save_pretrained(tmp_path / "theirs")
    model = from_transformers(tmp_path / "theirs", count=1).eval()
    batch = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(model(batch)[-1], network(batch).logits)
    save_model(model, tmp_path / "ours")
    assert same(model, load_model(tmp_path / "ours"), batch)

    assert model.normalisation is None
    for given, own in (({}, Normalisation((0.5,) * 3, (0.5,) * 3)), ({"rescale_factor": 1 / 127.5}, None)):
        ViTImageProcessor(**given).save_pretrained(tmp_path / "theirs")
        assert from_transformers(tmp_path / "theirs", count=1).normalisation == own


def test_a_custom_backbone_is_loaded_without_it_or_passed_in_again(tmp_path):
    model = attached()
    save_model(model, tmp_path)
    assert same(model, load_model(tmp_path), images(model))
    fresh = backbone()
    again = load_model(tmp_path, backbone=fresh)
    assert same(model, again, images(model))
    assert torch.equal(fresh[0][0].weight, model.state_dict()["stages.0.0.0.weight"])
    with pytest.raises(Mismatch, match=r"another network's \(9 weights differ.*pass in the one that was saved"):
        load_model(tmp_path, backbone=backbone(width=9))


def test_custom_heads_are_passed_in_again(tmp_path):
    def head(shape):
        return nn.Sequential(nn.Flatten(), nn.Linear(torch.Size(shape).numel(), 4))

    model = attached(head=head)
    save_model(model, tmp_path)
    with pytest.raises(Mismatch, match=r"its heads are torch.*Sequential, not alight's: .* head="):
        load_model(tmp_path, backbone=backbone())
    assert same(model, load_model(tmp_path, backbone=backbone(), head=head), images(model))
    model = attached(head=lambda shape: nn.Sequential(nn.Flatten(), nn.LazyLinear(4)))
    save_model(model, tmp_path, force=True)
    lazy = [lambda shape: nn.Sequential(nn.Flatten(), nn.LazyLinear(4))] * 2
    assert same(model, load_model(tmp_path, backbone=backbone(), head=lazy), images(model))


def test_stages_are_passed_in_again(tmp_path):
    def stages():
        return MultiExitModel([nn.Linear(4, 8), nn.Linear(8, 8)], [nn.Linear(8, 3), nn.Linear(8, 3)])

    batch, model = torch.randn(2, 4), stages()
    save_model(model, tmp_path / "stages")
    assert same(model, load_model(tmp_path / "stages", backbone=stages()), batch)
    other = MultiExitModel([nn.Linear(4, 9), nn.Linear(9, 8)], [nn.Linear(9, 3), nn.Linear(8, 3)])
    with pytest.raises(
        Mismatch, match=r"another network's \(4 weights differ, the first 'heads.0.weight': \(3, 9\) here"
    ):
        load_model(tmp_path / "stages", backbone=other)
    with pytest.raises(Mismatch, match="cannot build a MultiExitModel built by hand again"):
        load_model(tmp_path / "stages")


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


def test_tied_weights_are_written_once_and_stay_tied(tmp_path):
    model = attach_heads(Tied(), ["first"], example=torch.zeros(2, 4))
    save_model(model, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["tied"] == {
        "stages.1.second.weight": "stages.0.first.weight"
    }
    fresh = Tied()
    assert same(model, load_model(tmp_path, backbone=fresh), torch.randn(3, 4))
    assert fresh.second.weight is fresh.first.weight


def test_the_dtype_comes_back(tmp_path):
    model = attached().to(torch.bfloat16)
    save_model(model, tmp_path)
    again = load_model(tmp_path, backbone=backbone())
    assert again.heads[0].linear.weight.dtype == torch.bfloat16
    assert same(model, again, images(model).to(torch.bfloat16))


def test_loading_leaves_the_random_state_unchanged(tmp_path):
    save_model(REBUILT["msdnet"](), tmp_path)
    before = torch.get_rng_state()
    load_model(tmp_path)
    assert torch.equal(torch.get_rng_state(), before)


def test_names_and_normalisation_come_back(tmp_path):
    model = attach_heads(
        backbone(),
        ["0"],
        example=torch.zeros(2, 3, 8, 8),
        classes=["a", "b", "c", "d"],
        normalisation=Normalisation((0.5, 0.5, 0.5), (0.2, 0.2, 0.2)),
    )
    save_model(model, tmp_path)
    again = load_model(tmp_path, backbone=backbone())
    assert again.classes == ("a", "b", "c", "d")
    assert again.normalisation == model.normalisation
    assert json.loads((tmp_path / "config.json").read_text())["versions"]["torch"] == version("torch")


def test_saving_again_keeps_other_files(tmp_path):
    model = attached()
    save_model(model, tmp_path)
    (tmp_path / "policy.json").write_text("{}")
    save_model(model, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors", "policy.json"}


def test_another_network_is_replaced_by_force_alone_and_with_all_that_a_fit_wrote(tmp_path):
    save_model(attached(), tmp_path)
    for name in ("policy.json", "costs.json", "labelled.npz", "test_outputs.npz", "calls.txt", "notes.txt"):
        (tmp_path / name).write_text("of the first network")
    with pytest.raises(BadInput, match=r"holds a network of 4 classes with exits after .*, or force=True to replace"):
        save_model(resnet_digits(), tmp_path)
    assert load_model(tmp_path).num_classes == 4
    save_model(resnet_digits(), tmp_path, force=True)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors", "notes.txt"}


SAVE = """
import os, resource, signal, sys
from torch import nn
from alight.networks.store import save_model
from alight.networks.multi_exit import MultiExitModel
model = MultiExitModel([nn.Linear(4, 8)], [nn.Linear(8, 3)])
{trouble}
save_model(model, sys.argv[1], force=True)
"""
TROUBLE = {
    "a kill": "os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)",
    "a full disk": "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (99, 99))",
}


def by_hand():
    return MultiExitModel([nn.Linear(4, 8)], [nn.Linear(8, 3)])


@pytest.mark.parametrize("trouble", TROUBLE)
def test_a_save_that_fails_leaves_the_old_network(trouble, tmp_path):
    model = by_hand()
    save_model(model, tmp_path)
    program = SAVE.format(trouble=TROUBLE[trouble])
    ended = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True)
    assert ended.returncode == -9 or "OSError" in ended.stderr
    assert fingerprint(load_model(tmp_path, backbone=by_hand())) == fingerprint(model)


def test_a_save_cut_off_between_its_two_files_is_whole(tmp_path, monkeypatch):
    save_model(by_hand(), tmp_path)
    model = MultiExitModel([nn.Linear(4, 8)], [nn.Linear(8, 3)], exits=["another name"])
    monkeypatch.setattr(folders, "write_json", lambda *_: None)
    save_model(model, tmp_path, force=True)
    again = load_model(tmp_path, backbone=MultiExitModel([nn.Linear(4, 8)], [nn.Linear(8, 3)], exits=["another name"]))
    assert fingerprint(again) == fingerprint(model)


def rewrite(path, change):
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


DAMAGES = {
    "no weights": lambda path: (path / "model.safetensors").unlink(),
    "no config": lambda path: (path / "config.json").unlink(),
    "half the weights": lambda path: (path / "model.safetensors").write_bytes(
        (path / "model.safetensors").read_bytes()[:-1000]
    ),
    "no safetensors": lambda path: (path / "model.safetensors").write_bytes(b"PK\x03\x04"),
    "a flipped bit": lambda path: (path / "model.safetensors").write_bytes(
        (path / "model.safetensors").read_bytes()[:-1] + b"\x7f"
    ),
    "half a config": lambda path: (path / "config.json").write_text('{"alight": '),
    "a foreign config": lambda path: (path / "config.json").write_text('{"model_type": "bert"}'),
    "no recipe": lambda path: rewrite(path / "config.json", lambda config: config.pop("recipe")),
    "a recipe of nonsense": lambda path: rewrite(
        path / "config.json", lambda config: config["recipe"].update(name="nonsense")
    ),
    "settings of nonsense": lambda path: rewrite(
        path / "config.json", lambda config: config["recipe"]["arguments"].update(nonsense=1)
    ),
    "something to fetch": lambda path: rewrite(
        path / "config.json", lambda config: config["recipe"]["arguments"].update(checkpoint_path="/tmp/evil.pth")
    ),
    "a newer schema": lambda path: rewrite(path / "config.json", lambda config: config.update(schema=99)),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    torch.manual_seed(0)
    return save_model(REBUILT["timm"](), tmp_path_factory.mktemp("saved"))


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_or_foreign_folder_is_refused_by_name(damage, saved, tmp_path):
    for path in saved.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    DAMAGES[damage](tmp_path)
    with pytest.raises(BadFile, match=str(tmp_path)):
        load_model(tmp_path)


@pytest.mark.parametrize("settings", [{"attn_implementation": "x/y"}, {"part": {"_attn_implementation": "x/y"}}])
def test_code_from_a_hub_is_refused(settings):
    with pytest.raises(BadInput, match="code from elsewhere"):
        build_network({"source": "transformers", "name": "bert", "arguments": settings})


def test_weights_from_elsewhere_are_refused(tmp_path):
    from safetensors.torch import save_file

    save_model(attached(), tmp_path)
    save_file({"weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(BadFile, match="alight did not write it"):
        load_model(tmp_path, backbone=backbone())


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no folder .*nowhere"):
        load_model(tmp_path / "nowhere")


def test_a_missing_library_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ImportError, match=r"pip install \"alight\[vision\]\""):
        from_timm("convnext_atto")


def test_an_unknown_network_is_answered_with_the_nearest_names():
    with pytest.raises(BadInput, match=r"timm [\d.]+ has no classifier 'resnet19': did you mean resnet1"):
        from_timm("resnet19")
    with pytest.raises(BadInput, match=r"torchvision [\d.+a-z]+ has no classifier 'resnet19': did you mean resnet1"):
        from_torchvision("resnet19")


def test_a_network_of_hugging_face_that_names_no_image_size_takes_the_usual_one():
    from transformers import ResNetConfig

    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=3)
    assert from_transformers(config, count=1).recipe["example"]["shape"] == [2, 3, 224, 224]


def test_a_network_that_is_not_a_classifier_is_refused():
    from transformers import CLIPTextConfig

    with pytest.raises(BadInput, match="classifies neither text nor images"):
        from_transformers(CLIPTextConfig())


class RandomFrequencies(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("frequencies", torch.randn(4, 8), persistent=False)
        self.rnn, self.last = nn.GRU(8, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(self.rnn((x @ self.frequencies).sin())[0][:, -1])


def test_a_network_whose_random_buffer_is_not_saved_is_refused_when_it_is_loaded(tmp_path):
    torch.manual_seed(0)
    network = RandomFrequencies()
    folder = save_model(attach_heads(network, ["rnn"], example=torch.randn(2, 5, 4), channels="last"), tmp_path)
    with pytest.raises(
        Mismatch,
        match=r"persistent=False.*gives other logits than the network that was passed in: pass in the one that",
    ):
        load_model(folder, RandomFrequencies())
    same = RandomFrequencies()
    same.frequencies.copy_(network.frequencies)
    assert load_model(folder, same).num_exits == 2


class ColumnsFirst(nn.Sequential):
    def forward(self, x):
        return super().forward(x).t().contiguous().t()


def test_logits_that_do_not_lie_in_rows_are_saved(tmp_path):
    network = ColumnsFirst(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))
    model = attach_heads(network, ["0"], example=torch.randn(2, 6)).eval()
    batch = torch.randn(5, 6)
    assert torch.equal(load_model(save_model(model, tmp_path / "saved")).eval()(batch)[-1], model(batch)[-1])
