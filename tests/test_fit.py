"""From nothing to a report: `alight.fit` and `alight fit` on ten kinds of users, and the laws that they keep."""

import copy
import csv
import itertools
import json
import re
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import chromium
import numpy as np
import pytest
import timm
import torch
import torchvision
import transformers
from commands import run
from digits import digits
from exported import older_exporter
from PIL import Image
from safetensors.torch import save_file
from torch import nn

import alight
from alight import Costs, HeadOutputs, Predictor, TrainingSettings, deploy, load_policy, replay
from alight.data.preprocess import InputSpec, TensorSpec
from alight.errors import BadInput, BudgetTooSmall
from alight.evaluation import Point
from alight.fitting import steps
from alight.fitting.calls import Steps
from alight.fitting.checks import compare_samples, known_preprocess, warn_of_table
from alight.fitting.fitted import reported_folder
from alight.fitting.heads import NamedNetwork, with_heads
from alight.planning import engines, timing
from alight.planning import plan as planning
from alight.training.training import train_heads

pytestmark = [
    pytest.mark.filterwarnings("ignore:Early exit is not worth it"),  # small networks on a busy machine
    pytest.mark.filterwarnings("ignore:the (last exit|full network) has"),  # of weights that are not trained
    pytest.mark.filterwarnings("ignore:Faster here"),  # and much is lost
    pytest.mark.filterwarnings("ignore:.* validation samples are few"),
]


@pytest.fixture(autouse=True)
def short(monkeypatch, tmp_path):
    """Short timings, one thread, and a folder of its own."""
    monkeypatch.setattr(timing, "SECONDS", 0.02)
    monkeypatch.setattr(planning, "ROUNDS", 2)
    monkeypatch.setattr(steps, "TIMED", 1)
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)


def conv_bn_relu(channels, width, **further):
    return [nn.Conv2d(channels, width, 3, padding=1, **further), nn.BatchNorm2d(width), nn.ReLU()]


def own_cnn(channels=1):
    """Six layers in a row, as people write them."""
    torch.manual_seed(0)
    widths = [channels, 16, 16, 32, 32, 32, 32]
    layers = [layer for pair in itertools.pairwise(widths) for layer in conv_bn_relu(*pair)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)).eval()


def nudged(model):
    """Change the weights of a head, as a training loop of one's own does, so that it does not count as new."""
    with torch.no_grad():
        next(model.heads[0].parameters()).add_(1e-3)
    return model


@pytest.fixture(scope="module")
def trained():
    """The network once it has learned the digits."""
    network, (images, labels) = own_cnn(), digits()[0].tensors
    optimizer = torch.optim.Adam(network.parameters(), 5e-3)
    network.train()
    for epoch in range(4):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
        for rows in order.split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(images[rows]), labels[rows]).backward()
            optimizer.step()
    return network.eval()


@pytest.fixture(scope="module")
def fitted(trained):
    """The trained network at 60 % of its FLOPs."""
    train, validation = (data.tensors for data in digits())
    settings = TrainingSettings(epochs=2, learning_rate=1e-2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "TIMED", 1)
        return alight.fit(trained, train, validation, budget="60%", training=settings, progress=False)


# Ten users


def texts(rows, start=0):
    words = ("good great fine", "bad awful poor")
    numbers = range(start, start + rows)
    return [f"{words[row % 2]} {'film ' * (row % 3)}{row}" for row in numbers], [row % 2 for row in numbers]


def save_text_network(folder):
    """A tiny BERT and its tokenizer, as transformers saves them."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {word: index for index, word in enumerate("[PAD] [UNK] good great fine bad awful poor film".split())}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 4, "intermediate_size": 32}
    config = transformers.BertConfig(vocab_size=len(vocabulary), num_labels=2, **sizes)
    network = transformers.BertForSequenceClassification(config).eval()
    network.save_pretrained(folder)
    return network, fast


def pixels(images):
    """Digits as colour images in bytes, 32 x 32."""
    return (255 * images.repeat(1, 3, 4, 4)).to(torch.uint8).numpy()


def write_pictures(folder, images, labels, prefix="class "):
    for row, (image, label) in enumerate(zip(images, labels, strict=True)):
        place = Path(folder) / f"{prefix}{label}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray((255 * image[0]).to(torch.uint8).numpy()).save(place / f"{row}.png")


def write_texts(path, rows, start=0):
    with Path(path).open("w", newline="") as file:
        csv.writer(file).writerows([("text", "label"), *zip(*texts(rows, start), strict=True)])


def tones(count, seed=0):
    """Tones of two pitches with noise, (samples, 1, 200)."""
    rng = np.random.default_rng(seed)
    labels = np.arange(count) % 2
    waves = np.sin(np.linspace(0, 40, 200) * (1 + labels[:, None]))
    return (waves + rng.normal(size=waves.shape))[:, None].astype(np.float32), labels


def prepare_images(space):
    train, validation = (data.tensors for data in digits())
    space |= {"images": train[0][:300], "labels": train[1][:300], "held_out": validation[0], "truth": validation[1]}


def prepare_own(space):
    prepare_images(space)
    space["network"] = own_cnn()


def prepare_timm(space):
    prepare_images(space)
    space |= {"images": pixels(space["images"][:100]), "labels": space["labels"][:100]}
    space |= {"held_out": pixels(space["held_out"][:200]), "truth": space["truth"][:200]}
    space["network"] = timm.create_model("test_convnext", num_classes=10)


def prepare_torchvision(space):
    prepare_timm(space)
    space["network"] = torchvision.models.shufflenet_v2_x0_5(num_classes=10)


def prepare_vision_transformer(space):
    prepare_images(space)
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 4, "intermediate_size": 32}
    config = transformers.ViTConfig(image_size=8, patch_size=4, num_channels=1, num_labels=10, **sizes)
    space["network"] = transformers.ViTForImageClassification(config)
    space["Pairs"] = lambda images, labels: torch.utils.data.TensorDataset(images, labels)


def prepare_text(space):
    space["network"], space["tokenizer"] = save_text_network("bert")
    space["texts"], space["labels"] = texts(100)
    space["held_out"], space["truth"] = texts(300, start=100)


def prepare_audio(space):
    space["train"], space["validation"] = tones(200), tones(400, seed=1)
    widths = [1, 8, 8, 16, 16]
    layers = []
    for pair in itertools.pairwise(widths):
        layers += [nn.Conv1d(*pair, 5, padding=2), nn.BatchNorm1d(pair[1]), nn.ReLU()]
    space["network"] = nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(16, 2))


def prepare_logits(space):
    rng = np.random.default_rng(0)
    space["labels"] = rng.integers(5, size=600)
    truth = np.eye(5)[space["labels"]][:, None]
    space["logits"] = rng.normal(size=(600, 3, 5)) + truth * np.array([1.0, 2.0, 4.0])[:, None]


def prepare_pictures(space):
    prepare_own(space)
    write_pictures("train", space["images"][:120], space["labels"][:120])
    write_pictures("validation", space["held_out"][:250], space["truth"][:250])


def prepare_csv(space):
    prepare_text(space)
    write_texts("train.csv", 100)
    write_texts("validation.csv", 300, start=100)


def prepare_folder(space):
    model = alight.zoo.resnet_digits()
    settings = TrainingSettings(mode="joint", epochs=1)
    images, labels = (part[:200] for part in digits()[0].tensors)
    train_heads(model, ((255 * images).to(torch.uint8), labels), settings, progress=False)
    alight.save_model(model, "model")
    images, labels = (part[:250] for part in digits()[1].tensors)
    np.savez("validation.npz", images=(255 * images).to(torch.uint8).numpy(), labels=labels.numpy())


ARRAYS = 'predictor = alight.fit(network, (images, labels), (held_out, truth), budget="70%")'
REPORT = 'predictor.report("report.html")'
USERS = {  # what a user writes once network and data are there, and how these are prepared here
    "own CNN": (prepare_own, [ARRAYS, REPORT]),
    "timm": (prepare_timm, [ARRAYS, REPORT]),
    "torchvision": (
        prepare_torchvision,
        [
            "imagenet = alight.Normalisation((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))",
            ARRAYS.replace("budget", "preprocess=imagenet, budget"),
            REPORT,
        ],
    ),
    "Hugging Face vision": (
        prepare_vision_transformer,
        ['predictor = alight.fit(network, Pairs(images, labels), Pairs(held_out, truth), budget="70%")', REPORT],
    ),
    "Hugging Face text": (
        prepare_text,
        [ARRAYS.replace("images", "texts").replace("budget", "preprocess=tokenizer, budget"), REPORT],
    ),
    "audio": (prepare_audio, ['predictor = alight.fit(network, train, validation, budget="70%")', REPORT]),
    "logits alone": (
        prepare_logits,
        [
            "costs = alight.Costs.from_cumulative([1.0, 2.0, 4.0])",
            "predictor = alight.fit(costs, validation=(logits, labels))",
            REPORT,
        ],
    ),
    "folder of pictures": (
        prepare_pictures,
        [
            "unchanged = alight.Normalisation((0,), (1,))",
            'predictor = alight.fit(network, "train", "validation", preprocess=unchanged, budget="70%")',
            REPORT,
        ],
    ),
    "CSV of texts": (
        prepare_csv,
        ["alight fit transformers:bert train.csv validation.csv --budget 70% --epochs 2 --report report.html"],
    ),
    "saved folder": (prepare_folder, ["alight fit model validation.npz --budget 70% --report report.html"]),
}
NUMBER_OF_LINES = {
    "own CNN": 2, "timm": 2, "torchvision": 3, "Hugging Face vision": 2, "Hugging Face text": 2, "audio": 2,
    "logits alone": 3, "folder of pictures": 3, "CSV of texts": 1, "saved folder": 1,
}  # fmt: skip


SMALL = (
    "nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(),"
    " nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))\n"
)


@pytest.mark.slow
@pytest.mark.parametrize("user", USERS)
def test_ten_users_get_from_a_network_to_a_report_in_three_lines(user, capsys):
    prepare, lines = USERS[user]
    space = {"alight": alight}
    prepare(space)
    assert len(lines) == NUMBER_OF_LINES[user]
    for line in lines:
        if line.startswith("alight "):
            status, _, err = run(line.removeprefix("alight "), capsys)
            assert status == 0, err
        else:
            exec(line, space)
    page = Path("report.html").read_text()
    assert page.startswith(("<!doctype html>", "<!DOCTYPE html>"))
    assert len(page) < 3_000_000
    if "predictor" in space:
        assert space["predictor"].policy.certificate is not None
        assert "full network" in space["predictor"].summary


@pytest.mark.slow
def test_the_command_of_the_readme_runs(capsys):
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    (line,) = re.findall(r"^`alight (fit .*)`\.$", readme, re.MULTILINE)
    for folder, (images, labels) in zip(("train", "validation"), (data.tensors for data in digits()), strict=True):
        write_pictures(folder, images[:200], labels[:200])
    save_file(timm.create_model("resnet18", num_classes=10).state_dict(), "yours.safetensors")
    status, out, err = run(f"{line} --image-size 32 --epochs 1", capsys)
    assert status == 0, err
    assert {"accuracy", "cost", "speed-up", "Guaranteed"} <= {row.split(" ")[0] for row in out.splitlines()}
    assert "full network" in Path("report.html").read_text()
    assert Predictor.load("fitted").policy.certificate is not None


# Laws


def test_the_network_of_the_user_is_not_changed(fitted, trained):
    model = fitted.network
    own = {id(each) for each in trained.parameters()}
    assert not any(id(each) in own for each in model.parameters())
    images = digits()[1].tensors[0][:5]
    with torch.no_grad():
        assert torch.equal(model.eval()(images)[-1], trained(images))  # heads alone were trained
    assert not trained.training


def test_a_fitted_predictor_instead_of_its_network_is_answered_with_where_that_is(fitted):
    train, validation = (data.tensors for data in digits())
    with pytest.raises(BadInput, match=r"a FittedPredictor is not a network, but holds one: give predictor\.network"):
        alight.fit(fitted, train, validation, progress=False)


def test_costs_are_those_of_the_validation_samples_where_these_have_another_size(trained, capsys):
    images, labels = digits()[1].tensors
    larger = (nn.functional.interpolate(images[:240], scale_factor=2), labels[:240])
    train = tuple(part[:64] for part in digits()[0].tensors)
    predictor = alight.fit(trained, train, larger, budget="70%", training=TrainingSettings(epochs=1))
    expected = alight.measure_costs(predictor.network, torch.zeros(2, 1, 16, 16)).full
    assert predictor.fitted.costs.full == expected > 3 * alight.measure_costs(predictor.network).full
    assert "fit: costs are measured at the size of the validation samples, not at 1 x 8 x 8" in capsys.readouterr().err
    assert "example = torch.zeros(2, 1, 16, 16)\ncosts = alight.measure_costs(model, example)" in predictor.calls
    predictor(larger[0][:2])
    with pytest.warns(
        UserWarning, match="samples of 1 x 8 x 8, and the policy was calibrated on samples of 1 x 16 x 16"
    ):
        predictor(images[:2])
    table = alight.record(predictor.network, larger, progress=False)
    recorded = alight.fit(predictor.network, None, table, budget="70%", progress=False)
    assert recorded.fitted.costs.full == expected


def test_the_budget_is_kept_on_samples_that_were_not_used_and_the_answers_are_those_of_replay(fitted):
    images = digits()[1].tensors[0]
    decisions = fitted(images)
    assert decisions.mean_cost <= fitted.policy.budget == pytest.approx(0.6 * fitted.fitted.costs.full)
    test = fitted.fitted.test
    assert test.labels is not None
    assert len(test) + len(fitted.fitted.labelled) == len(images)
    assert replay(fitted.policy, test).accuracy(test.labels) > 0.9


def test_the_table_has_the_full_network_alongside_and_the_guarantee_in_a_sentence(fitted):
    lines = fitted.summary.splitlines()
    assert lines[0].split() == "full network with exits".split()
    names = [line.split("  ")[0].strip() or line.strip().split("  ")[0] for line in lines[1:7]]
    assert [name.split(",")[0] for name in names] == [
        "accuracy", "cost per sample", "of the full network", "samples/s", "speed-up", "one sample"
    ]  # fmt: skip
    assert lines[-1].startswith("Guaranteed with 95 % confidence: mean cost <= ")
    assert "test samples were answered: " in lines[7]


@pytest.mark.slow
def test_the_printed_calls_make_the_same_policy(fitted, trained):
    train, validation = (data.tensors for data in digits())
    space = {"network": trained, "train": train, "validation": validation}
    space["training"] = TrainingSettings(epochs=2, learning_rate=1e-2)
    exec(fitted.calls, space)
    assert space["policy"] == fitted.policy
    assert isinstance(space["predictor"], Predictor)


def test_a_saved_fit_is_loaded_with_its_policy_and_decides_alike(fitted, trained, capsys):
    folder = fitted.save("fitted")
    names = {path.name for path in folder.iterdir()}
    assert {
        "config.json",
        "model.safetensors",
        "policy.json",
        "costs.json",
        "labelled.npz",
        "test_outputs.npz",
    } <= names
    assert load_policy(folder / "policy.json") == fitted.policy
    assert HeadOutputs.load(folder / "labelled.npz").fingerprint == fitted.policy.fingerprint
    assert Costs.load(folder / "costs.json").full == fitted.fitted.costs.full
    images = digits()[1].tensors[0][:50].numpy()
    expected = fitted(images, samples=range(50))
    again = Predictor.load(folder)(images, samples=range(50))  # without the network's own code
    assert np.array_equal(again.exits, expected.exits)
    with pytest.raises(AttributeError, match="a Predictor has no 'report': `alight report FOLDER` draws what"):
        Predictor.load(folder).report("report.html")
    own, saved = fitted.fitted.reported(), reported_folder(folder)
    assert replace(own, examples=None) == saved
    status, _, err = run("report fitted -o page.html", capsys)
    assert (status, fitted.fitted.verdict in Path("page.html").read_text()) == (0, True), err
    with pytest.raises(BadInput, match=r"fitted holds a network of 10 classes .*: give another folder, or force=True"):
        fitted.save("fitted")
    assert fitted.save("fitted", force=True) == folder


def test_a_fit_is_run_by_every_installed_runtime_on_its_validation_samples(fitted, capsys):
    with older_exporter():
        found = fitted.compare_runtimes()
        made = found.export("made")
    runtimes = {"torch", *engines.installed_runtimes()}
    assert {each.runtime for each in found.ranked} == runtimes
    images = digits()[1].tensors[0][:50].numpy()
    alone = len(Predictor.load(made).policy.open_exits) == 1  # where the full network is the fastest
    expected = np.full(50, fitted.policy.num_exits - 1) if alone else fitted(images, samples=range(50)).exits
    assert np.array_equal(Predictor.load(made)(images, samples=range(50)).exits, expected)
    fitted.save("net")
    samples, labels = (each.numpy() for each in digits()[1].tensors)
    np.savez("validation.npz", images=samples, labels=labels)
    with older_exporter():
        deployed = deploy(fitted, (samples, labels), "int8", budget="60%", progress=False)
        assert len(deployed.predictor()(samples[:5])) == 5
        status, out, err = run("fit net validation.npz --budget 60% --runtimes -o again --json --quiet", capsys)
    assert status == 0, err
    assert {each["runtime"] for each in json.loads(out)["runtimes"][0]["trials"]} == runtimes
    status, _, err = run("fit net net/labelled.npz --runtimes -o third", capsys)
    assert (status, "--runtimes runs samples, and these are recorded outputs: give validation data" in err) == (1, True)


def test_a_saved_network_of_a_library_is_loaded_with_its_policy_and_decides_alike(capsys):
    floats, labels = digits()[1].tensors
    images = (255 * floats).to(torch.uint8).numpy()
    predictor = alight.fit(nudged(alight.zoo.resnet_digits()), None, (images, labels), budget="70%", progress=False)
    predictor.save("fitted")
    expected = predictor(images[:50], samples=range(50))
    again = Predictor.load("fitted")(images[:50], samples=range(50))
    assert np.array_equal(again.exits, expected.exits)
    np.savez("test.npz", images=images[:50], labels=labels[:50].numpy())
    status, out, _ = run("predict fitted test.npz", capsys)
    full = 100 * predictor.fitted.values()["full_accuracy"]
    assert (status, f"(the full network's was {full:.1f} % on 199 test samples; on these: alight bench" in out) == (
        0,
        True,
    )


def test_a_network_of_an_own_file_takes_its_example_from_the_data():
    Path("nets.py").write_text(
        "from torch import nn\ndef build(num_classes=10):\n"
        "    blocks = [nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(4)]\n"
        "    return nn.Sequential(*blocks, nn.Linear(4, num_classes))\n"
    )
    numbers = np.zeros((8, 4), np.float32), np.arange(8) % 3
    torch.save(nn.Sequential(*(nn.Sequential(nn.Linear(4, 4)) for _ in range(4)), nn.Linear(4, 3)).state_dict(), "w.pt")
    calls = Steps(progress=False)
    made = with_heads(NamedNetwork("nets.py:build", num_classes=3, weights="w.pt"), numbers, None, calls)
    assert (made.model.num_classes, made.untrained) == (3, False)
    assert with_heads("nets.py:build", numbers, None, Steps(progress=False)).untrained
    space = {}
    exec(str(calls), space)
    assert all(map(torch.equal, made.model.state_dict().values(), space["model"].state_dict().values()))


OWN_NETWORK = """
from torch import nn
def build():
    sizes = [64, 48, 48, 48]
    blocks = [nn.Sequential(nn.Linear(*pair), nn.ReLU()) for pair in zip(sizes, sizes[1:])]
    return nn.Sequential(*blocks, nn.Linear(48, 10))
"""


@pytest.fixture
def own_files():
    """A network in a file, not trained, and digits as rows of numbers."""
    Path("nets.py").write_text(OWN_NETWORK)
    for name, data in zip(("train", "validation"), digits(), strict=True):
        images, labels = data.tensors
        np.savez(f"{name}.npz", x=images.flatten(1).numpy(), labels=labels.numpy())


def test_pictures_are_brought_to_the_size_that_is_asked_for_of_a_network_of_an_own_file():
    write_pictures("train", digits()[0].tensors[0][:20], digits()[0].tensors[1][:20])
    network = NamedNetwork("net.py:Net", image_size=6)
    Path("net.py").write_text("from torch import nn\nNet = lambda: " + SMALL)
    made = with_heads(network, "train", alight.Normalisation((0,), (1,)), Steps(False))
    assert made.example.shape == (2, 1, 6, 6)
    assert made.model.input_spec.image_shape == (1, 6, 6)


def test_the_calls_that_the_command_prints_run_by_themselves(own_files, capsys):
    line = "fit nets.py:build train.npz validation.npz --budget 80% --epochs 2 --set learning_rate=0.01 -o fitted"
    status, _, err = run(line, capsys)
    assert status == 0, err
    calls = Path("fitted/calls.txt").read_text()
    assert "as given to fit" not in calls
    torch.manual_seed(7)  # nothing depends on what was drawn before
    exec(calls, space := {})
    assert space["policy"] == load_policy("fitted/policy.json")
    HeadOutputs.joined([space["labelled"], space["test"]]).save("table.npz")
    for network, budget in {"fitted": "85%", "fitted/costs.json": "90%"}.items():
        status, _, err = run(f"fit {network} table.npz --budget {budget} -o again --force", capsys)
        assert status == 0, err
        exec(Path("again/calls.txt").read_text(), space := {})
        assert space["policy"] == load_policy("again/policy.json")


def test_a_network_of_a_file_without_weights_starts_from_the_same_ones_every_time(own_files):
    made = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        made.append(with_heads("nets.py:build", "train.npz", None, Steps(progress=False)).model.state_dict())
    assert all(map(torch.equal, made[0].values(), made[1].values()))


@pytest.mark.skipif(chromium.found() is None, reason="no Chromium: install one, or let CHROMIUM name it")
def test_the_page_of_a_fit_in_a_browser(fitted, tmp_path):
    page = fitted.report("report.html")
    assert page.stat().st_size < 3_000_000
    with chromium.opened(chromium.found(), tmp_path / "profile") as tab:
        for width, scheme in ((1440, "light"), (768, "dark"), (375, "light")):
            tab.resize(width)
            tab.prefer(scheme)
            tab.open(page.resolve())
            assert tab.ask("document.documentElement.scrollWidth") <= width
            assert tab.text("#verdict") == fitted.fitted.verdict
            assert tab.text("#guarantees summary").startswith("Guaranteed with 95 % confidence")
            assert len(tab.texts("#numbers .number")) == 3
            assert tab.ask("document.querySelectorAll('#line img').length") > 0
    assert tab.console == []


def test_speeds_and_speed_up_agree(fitted):
    batches, single = fitted.fitted.speeds
    for each in (batches, single):
        assert each.per_second == pytest.approx(each.full_per_second * each.speedup)
    rows = {line.split("  ")[0]: line for line in fitted.summary.splitlines()}
    assert f"{batches.per_second:,.0f}" in rows["samples/s, batches of 64"]


DIGITS = "zero one two three four five six seven eight nine".split()


def prepare_names_of_a_network(space):
    prepare_vision_transformer(space)
    space["network"].config.id2label = dict(enumerate(DIGITS))
    return tuple((space[x], space[y]) for x, y in (("images", "labels"), ("held_out", "truth")))


def prepare_names_of_a_data_set(space):
    import datasets

    prepare_own(space)
    features = {"pixels": datasets.Array3D((1, 8, 8), "float32"), "label": datasets.ClassLabel(names=DIGITS)}
    pairs = (("images", "labels"), ("held_out", "truth"))
    columns = ({"pixels": space[x].numpy(), "label": space[y].numpy()} for x, y in pairs)
    return tuple(datasets.Dataset.from_dict(each, datasets.Features(features)).with_format("torch") for each in columns)


def prepare_names_of_folders(space):
    prepare_own(space)
    for name, images, labels in (("train", "images", "labels"), ("validation", "held_out", "truth")):
        write_pictures(name, space[images], [DIGITS[index] for index in space[labels]], "")
    return "train", "validation"


@pytest.mark.parametrize("prepare", [prepare_names_of_a_network, prepare_names_of_a_data_set, prepare_names_of_folders])
def test_the_report_names_classes_where_network_or_data_know_their_names(prepare):
    space = {}
    data = prepare(space)
    terms = {"preprocess": alight.Normalisation((0,), (1,))} if isinstance(data[0], str) else {}
    once = TrainingSettings(mode="joint", epochs=1)
    predictor = alight.fit(space["network"], *data, budget="80%", training=once, progress=False, **terms)
    classes, page = predictor.network.classes, predictor.report("report.html").read_text()
    assert sorted(classes) == sorted(DIGITS)
    shown = json.loads(page.partition('id="data">')[2].partition("</script>")[0])["networks"][0]
    worst = {row[[*Point.__dataclass_fields__].index("worst_class")] for row in shown["points"]} - {""}
    assert shown["classes"] == {index: classes[int(index)] for index in worst}
    assert reported_folder(predictor.save("fitted")).classes == classes
    assert {*shown["examples"]["labels"]} <= {*DIGITS}


def test_the_verdict_says_what_is_lost_and_what_to_do(trained):
    train, validation = (data.tensors for data in digits())
    untrained = TrainingSettings(epochs=1, learning_rate=1e-9)  # heads that guess
    predictor = alight.fit(trained, train, validation, budget="50%", training=untrained, progress=False)
    lost = 100 * (predictor.fitted.values()["full_accuracy"] - predictor.fitted.values()["accuracy"])
    assert lost > 20
    assert f"{lost:.1f} points of accuracy are lost at this budget: raise it, train the whole" in predictor.summary
    assert "Early exit pays" not in predictor.summary


def test_a_network_near_guessing_is_said_first_and_does_not_pay():
    torch.manual_seed(0)
    images, labels = digits()[1].tensors
    data = (255 * images).to(torch.uint8).numpy(), labels
    predictor = alight.fit(nudged(alight.zoo.resnet_digits()), None, data, budget="70%", progress=False)
    first = predictor.summary.splitlines()[0]
    assert first.startswith("The full network has ")
    assert "near the 10.0% of guessing: train it longer, or check that its weights are loaded" in first
    assert "Early exit pays" not in predictor.summary
    shown = predictor.fitted.reported()
    assert (shown.caution, shown.verdict) == (predictor.fitted.caution, predictor.fitted.verdict)
    assert shown.verdict not in shown.guarantees
    assert predictor.fitted.values()["caution"] == first


def test_a_budget_above_the_full_network_is_said_first_and_not_to_be_raised(fitted):
    predictor = alight.fit(fitted.network, None, digits()[1].tensors, budget="200%", progress=False)
    assert predictor.summary.startswith("The budget 200% allows the full network (")
    assert "raise it" not in predictor.summary
    assert "the full network is within it" in steps.lost_too_much(0.1, goal=steps.Goal("200%"), allows_full=True)


def test_costs_of_timed_stages_are_named_so_beside_measured_speeds(fitted):
    costs = Costs([0.3, 0.3, 0.3, 0.1], [0.2, 0.2, 0.2, 0.0], "ms")
    timed = replace(fitted.fitted, costs=costs)
    names = timed.columns()[0]
    assert "cost per sample, by timed stages" in names
    assert not {"cost per sample", "of the full network"} & {*names}
    assert "cost per sample" in replace(timed, speeds=()).columns()[0]  # nothing else is known then


def test_a_budget_that_the_test_samples_exceed_is_explained(fitted):
    cheap = replace(fitted.fitted, policy=replace(fitted.policy, budget=0.3 * fitted.fitted.costs.full))
    assert "over 30.0%: the guarantee is about the mean of all new samples." in str(cheap)
    assert "over" not in str(fitted.fitted)


LABELLED = HeadOutputs([[0.5, 0.9]] * 300, [[0, 1], [1, 1], [1, 0]] * 100, [1, 1, 0] * 100)
TABLES = {  # recorded validation samples: the warning
    "few": (LABELLED.take(range(60)), "60 validation samples are few: .* known to about .-18 points; give 2,000"),
    "one class": (replace(LABELLED, labels=[0] * 300), "all 300 validation samples have the label 0"),
    "a class without samples": (
        replace(LABELLED, labels=[2, 2, 0] * 100),
        "none of 300 .* is of class 1: accuracies and",
    ),
    "guessing": (replace(LABELLED, labels=[0, 1] * 150), "the full network has 50.0% accuracy on the validation"),
    "another order": (replace(LABELLED, labels=[0, 0, 1] * 100), "0.0% accuracy on 300 .* another order 100.0%"),
}


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.filterwarnings("default")
def test_validation_samples_that_say_little_are_warned_of(name):
    table, message = TABLES[name]
    with pytest.warns(UserWarning, match=message):
        warn_of_table(table, 3 if "class without" in name else 2)


def test_a_usual_table_is_not_warned_of(recwarn):
    warn_of_table(LABELLED, 2)
    warn_of_table(LABELLED, 100)  # 300 samples of 100 classes need not have all of them
    assert not recwarn.list


IMAGES = InputSpec((TensorSpec("images", (None, 1, 8, 8), "float32"),), num_classes=10)
TEXTS = InputSpec(names=("input_ids",), tokenizer="bert", num_classes=2)


def shared_arrays(images, labels):
    return (images[:50], labels[:50]), (images[:100].numpy(), labels[:100])


def shared_texts(_, __):
    return (["a", "b", "c"] * 17, [0, 1, 1] * 17), (["c"] * 50 + ["d"] * 50, [1, 0] * 50)


def shared_arrays_in_files(images, labels):
    np.savez("train.npz", images=images[:50].numpy(), labels=labels[:50].numpy())
    np.savez("validation.npz", images=images[:100].numpy(), labels=labels[:100].numpy())
    return "train.npz", "validation.npz"


def shared_texts_in_files(_, __):
    write_texts("train.csv", 50)
    write_texts("validation.csv", 100)
    return "train.csv", "validation.csv"


def shared_pictures(images, labels):
    write_pictures("train", images[:50], labels[:50])
    write_pictures("validation", images[:100], labels[:100])
    return "train", "validation"


def parts_of_tensors(images, labels):
    whole = torch.utils.data.TensorDataset(images, labels)
    return torch.utils.data.Subset(whole, range(50)), torch.utils.data.Subset(whole, range(100))


def loaders_of_tensors(images, labels):
    return [torch.utils.data.DataLoader(each, 32, shuffle=True) for each in parts_of_tensors(images, labels)]


def parts_of_any_data_set(images, labels):
    class Digits(torch.utils.data.Dataset):
        def __len__(self):
            return 200

        def __getitem__(self, row):
            raise AssertionError("nothing is read")

    sampler, whole = torch.utils.data.SubsetRandomSampler, Digits()
    loader = torch.utils.data.DataLoader(whole, 32, sampler=sampler(range(50)))
    return loader, torch.utils.data.Subset(torch.utils.data.Subset(whole, range(150)), range(100))


SHARED = [each for name, each in globals().copy().items() if name.startswith(("shared_", "parts_of", "loaders_of"))]


@pytest.mark.parametrize("made", SHARED, ids=lambda made: made.__name__)
def test_samples_that_are_trained_and_validated_on_are_found(made):
    train, validation = made(*digits()[0].tensors)
    with pytest.warns(UserWarning, match="50 of 100 validation samples are among the training samples"):
        compare_samples(train, validation, TEXTS if "texts" in made.__name__ else IMAGES)


def test_samples_that_are_not_shared_are_not_warned_of():
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        images, labels = digits()[0].tensors
        compare_samples((images[:50], labels[:50]), (images[50:100], labels[50:100]), IMAGES)  # 1,797 different digits
        whole = torch.utils.data.TensorDataset(images, labels)
        parts = torch.utils.data.random_split(whole, [700, len(images) - 700])
        compare_samples(*parts, IMAGES)
        compare_samples(*[torch.utils.data.DataLoader(each, 32) for each in parts], IMAGES)
        compare_samples([(images[:5], labels[:5])], iter([(images[:5], labels[:5])]), IMAGES)  # batches: unknown
    assert found == []


def test_training_and_validation_data_that_may_be_exchanged_are_warned_of():
    images, labels = digits()[0].tensors
    with pytest.warns(UserWarning, match="60 training samples and 300 for validation: training data come first"):
        compare_samples((images[:60], labels[:60]), (images[100:400], labels[100:400]), IMAGES)
    compare_samples((images[:100], labels[:100]), (images[100:400], labels[100:400]), IMAGES)


def test_too_few_validation_samples_for_a_guarantee_are_said_first_with_the_number_that_is_enough(recwarn):
    logits = np.random.default_rng(0).normal(size=(400, 2, 3)) * [[[2.0], [4.0]]]
    labels = logits[:, 1].argmax(1)
    costs = Costs.from_cumulative([1.0, 4.0])
    few = alight.fit(costs, validation=(logits[:24], labels[:24]), budget="40%", progress=False)
    caution = few.fitted.caution
    assert caution.startswith("24 validation samples certify no policy but the first exit for all samples: give ")
    assert str(few).startswith(caution)
    enough = int(caution.partition("give ")[2].partition(" or more")[0])
    again = alight.fit(costs, validation=(logits[:enough], labels[:enough]), budget="40%", progress=False)
    assert (again.fitted.caution, len(again.policy.open_exits)) == ("", 2)


def test_a_network_that_gives_probabilities_is_warned_of(trained):
    train, validation = (data.tensors for data in digits())
    network, once = nn.Sequential(*trained, nn.Softmax(1)), TrainingSettings(epochs=1)
    with pytest.warns(UserWarning, match="the network gives probabilities, not logits: leave its softmax out"):
        alight.fit(network, train, validation, budget="90%", training=once, progress=False)


def test_normalisations_are_known_by_their_mean_and_std():
    own = alight.Normalisation((0.5, 0.4, 0.3), (0.2, 0.2, 0.2))
    mean, std = [*own.mean], [*own.std]
    known = [
        transformers.ViTImageProcessor(image_mean=mean, image_std=std),
        torchvision.transforms.Normalize(mean, std),
        torchvision.transforms._presets.ImageClassification(crop_size=32, mean=own.mean, std=own.std),
        {"input_size": (3, 32, 32), "mean": own.mean, "std": own.std},  # timm.data.resolve_model_data_config
    ]
    assert [known_preprocess(each) for each in known] == [own] * 4
    tokenizer = save_text_network("bert")[1]
    assert known_preprocess(tokenizer) is tokenizer
    assert known_preprocess("bert") == "bert"


def test_an_image_processor_is_a_normalisation_and_not_a_tokenizer():
    processor = transformers.ViTImageProcessor(image_mean=[0.5], image_std=[0.5])
    steps = Steps(progress=False)
    images = (255 * digits()[0].tensors[0][:4]).to(torch.uint8).numpy()
    made = with_heads(own_cnn(), images, known_preprocess(processor), steps)
    assert (made.model.tokenizer, made.model.normalisation) == (None, alight.Normalisation((0.5,), (0.5,)))
    assert "tokenizer" not in str(steps)


def test_names_of_classes_in_the_data_are_the_networks_where_it_has_none(capsys):
    network, tokenizer = save_text_network("bert")
    sentences, labels = texts(20)
    data = sentences, [["bad", "good"][label] for label in labels]
    made = with_heads(network, data, tokenizer, Steps(progress=True))
    assert made.model.classes == ("bad", "good")
    assert "the logits are taken to be in this order: bad, good" in capsys.readouterr().err
    network.config.id2label = {0: "good", 1: "bad"}  # the network's own come first
    assert with_heads(network, data, tokenizer, Steps(progress=False)).model.classes == ("good", "bad")


def test_a_network_of_a_library_gets_as_many_classes_as_the_data_has():
    write_pictures("train", digits()[0].tensors[0][:30], [row % 3 for row in range(30)])
    named = NamedNetwork("timm:test_resnet", image_size=32)
    made = with_heads(named, "train", None, Steps(progress=False))
    assert made.model.classes == ("class 0", "class 1", "class 2")
    assert made.untrained
    numbered = np.zeros((9, 3, 32, 32), np.float32), np.arange(9) % 4
    assert with_heads(named, numbered, None, Steps(progress=False)).model.num_classes == 4
    assert with_heads(replace(named, num_classes=7), numbered, None, Steps(progress=False)).model.num_classes == 7


def test_inputs_by_name_with_classes_by_number_need_no_names():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.last = nn.Linear(4, 8), nn.Linear(3, 8), nn.Linear(8, 2)
            self.body = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(4)))

        def forward(self, pixels, audio):
            return self.last(self.body(self.first(pixels) + self.second(audio)))

    rng = np.random.default_rng(0)
    data = {"pixels": rng.normal(size=(9, 4)), "audio": rng.normal(size=(9, 3)), "labels": np.arange(9) % 2}
    made = with_heads(Two(), data, None, Steps(progress=False))
    assert (made.model.input_names, made.model.num_classes, made.model.classes) == (("pixels", "audio"), 2, ())


def test_downloaded_weights_with_another_number_of_classes_are_not_all_trained():
    assert NamedNetwork("timm:resnet18", pretrained=True).is_trained
    assert not NamedNetwork("timm:resnet18", pretrained=True, num_classes=10).is_trained  # a new classifier
    assert NamedNetwork("timm:resnet18", num_classes=10, weights="own.pt").is_trained
    assert not NamedNetwork("transformers:bert", num_classes=3).is_trained


def test_one_hot_rows_are_the_classes_of_validation_samples(fitted):
    images, labels = (each[:50] for each in digits()[1].tensors)
    rows = nn.functional.one_hot(labels, 10).float()
    assert np.array_equal(alight.record(fitted.network, (images, rows), progress=False).labels, labels)


def test_labels_are_not_needed(trained):
    train, validation = (data.tensors[0][:300] for data in digits())
    predictor = alight.fit(trained, train, validation, budget="70%", training=None, progress=False)
    assert predictor.summary.startswith("The validation data has no labels: accuracy here is agreement with the full")
    assert "agreement  " in predictor.summary
    assert predictor.policy.settings["truth"] == "the last exit"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Early exit")  # whether it pays is up to the machine
@pytest.mark.parametrize("goal", [{"max_accuracy_loss": 0.2}, {"speedup": 1.05}, {"budget": "1000 ms"}])
def test_goals_in_time_give_a_policy_in_milliseconds_or_the_full_network(fitted, goal, short_trials, capsys):
    predictor = alight.fit(fitted.network, None, digits()[1].tensors, **goal, progress=False)
    assert capsys.readouterr() == ("", "")
    assert predictor.policy.unit == "ms"
    assert predictor.fitted.verdict
    if predictor.policy.method == "full network":
        assert predictor.policy.open_exits == (predictor.policy.num_exits - 1,)
        row = next(line for line in predictor.summary.splitlines() if line.startswith("speed-up"))
        assert row.split()[1:3] == ["1.00x", "1.00x"]


def test_a_speed_up_that_no_exit_can_give_is_answered_by_the_full_network(fitted, monkeypatch):
    slow_heads = alight.Costs([0.1, 0.02, 0.02, 0.02], [0.3, 0.3, 0.3, 0.01], "ms")
    monkeypatch.setattr(planning, "walking_costs", lambda *_, **__: slow_heads)
    twice = timing.SpeedComparison(64, 100, 200, 2, 2, 2, (1, 1), (1, 1), None, None)  # if all left at the first exit
    monkeypatch.setattr(steps._Fitting, "_compared", lambda *_, **__: twice)
    with pytest.warns(UserWarning, match="the first exit takes 2.35 times as long as the full network, which answers"):
        predictor = alight.fit(fitted.network, None, digits()[1].tensors, speedup=1.05, progress=False)
    assert predictor.policy.method == "full network"
    assert "policy = full_network(model)" in predictor.calls


def test_a_speed_up_is_not_overshot(fitted, monkeypatch):
    """Early exits are faster than their stages alone let expect, so that the first budget is fast enough by far."""
    flops, recorded = fitted.fitted.costs, steps.Recorder.table

    def better_exit_by_exit(recorder, data, **options):
        labels, rng = recorded(recorder, data, **options).labels, np.random.default_rng(0)
        sure = np.array([1.0, 2.0, 3.0, 5.0])[:, None] * np.eye(10)[labels][:, None]
        return HeadOutputs.from_logits(rng.normal(size=sure.shape) + sure, labels)

    timed_alone = Costs.from_cumulative([0.7, 0.8, 0.9, 1.0], "ms")

    def by_flops(self, policy, *_, **__):
        shares = replay(policy, self.labelled).exit_shares if hasattr(self, "labelled") else [1.0]
        mean = float(np.dot(flops.cumulative(policy.open_exits), np.asarray(shares)[[*policy.open_exits]]))
        faster = flops.full / mean
        return timing.SpeedComparison(64, 100, 100 * faster, faster, faster, faster, (1, 1), (1, 1), None, None)

    monkeypatch.setattr(steps.Recorder, "table", better_exit_by_exit)
    monkeypatch.setattr(steps._Fitting, "_measure_time", lambda self: setattr(self, "costs", timed_alone))
    monkeypatch.setattr(steps._Fitting, "_compared", by_flops)
    predictor = alight.fit(fitted.network, None, digits()[1].tensors, speedup=1.2, progress=False)
    assert 1.2 <= predictor.fitted.speeds[0].speedup < 1.4
    assert predictor.policy.budget > timed_alone.full / 1.2


SPEEDS = {  # speed-up by the share of the full network's time: wanted, and the share that gives it
    "as modelled": (lambda share: 1 / share, 2.0, 0.5),
    "slower": (lambda share: 0.7 / share, 1.2, 0.7 / 1.2),
    "faster": (lambda share: 3.3 - 2 * share, 1.2, 1.05),
    "a step": (lambda share: 2.93 if share < 0.9 else 1.0, 1.2, 0.9),
}


@pytest.mark.parametrize("name", SPEEDS)
def test_the_largest_budget_that_is_fast_enough_is_found_from_below_and_above(name):
    speedup, wanted, expected = SPEEDS[name]
    share = steps.largest_share(speedup, wanted, 0.2, 1.3)
    assert speedup(share) >= wanted
    assert share == pytest.approx(expected, abs=0.03)


def test_advice_about_lost_accuracy_is_by_goal():
    assert "at this speed-up: ask for a smaller one, train longer" in steps.lost_too_much(
        0.1, "joint", steps.Goal(speedup=2)
    )
    assert "10.0 points of accuracy are lost on the test samples, of 5 asked for: give more validation data" in (
        steps.lost_too_much(0.1, goal=steps.Goal(max_accuracy_loss=0.05))
    )
    assert not steps.lost_too_much(0.1, goal=steps.Goal(max_accuracy_loss=0.2))


def test_recorded_outputs_of_a_network_enter_at_calibration(fitted):
    table = HeadOutputs.joined([fitted.fitted.labelled, fitted.fitted.test])
    predictor = alight.fit(fitted.network, None, table, budget="70%", progress=False)
    assert predictor.policy.certificate is not None
    assert predictor.fitted.verdict.startswith("Not timed")
    with pytest.raises(BadInput, match="this predictor was fitted to recorded outputs: give samples to run"):
        predictor.compare_runtimes()
    with pytest.raises(BadInput, match="a speed-up is timed on samples, and these are recorded outputs"):
        alight.fit(fitted.network, None, table, speedup=1.001, progress=False)
    with pytest.raises(alight.AlightError, match="a table of 2 exits for a network of"):
        alight.fit(fitted.network, None, table.at_exits([0, 1]), progress=False)


def test_logits_need_no_torch():
    code = """
import sys
import numpy as np
import alight
logits = np.random.default_rng(0).normal(size=(400, 2, 3)) * [[[2.0], [4.0]]]
costs = alight.Costs.from_cumulative([1.0, 4.0])
predictor = alight.fit(costs, validation=(logits, logits[:, 1].argmax(1)), budget="60%", progress=False)
predictor.report("report.html")
predictor.save("decided")
loss = alight.fit(costs, validation=(logits, logits[:, 1].argmax(1)), max_accuracy_loss=0.5, progress=False)
assert loss.policy.certificate.contract == "excess_error"
assert predictor(logits).mean_cost < 0.62 * 4
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert Path("decided/policy.json").is_file()


def test_the_command_reads_costs_and_a_recording_and_gives_json(capsys):
    space = {}
    prepare_logits(space)
    table = HeadOutputs.from_logits(space["logits"], space["labels"])
    replace(table, fingerprint="of some network").save("labelled.npz")
    Costs.from_cumulative([1.0, 2.0, 4.0]).save("costs.json")
    status, out, err = run("fit costs.json labelled.npz --budget 60% -o decided --json", capsys)
    assert status == 0, err
    values = json.loads(out)
    assert values["mean_cost"] <= 0.62 * values["full_cost"]
    assert "certified_probability" in values["calls"]
    line = (
        "fit costs.json labelled.npz --budget 60% -o decided --force --report page.html --smaller 'small net,70%,1.5'"
    )
    status, _, err = run(line, capsys)
    assert status == 0, err
    assert '"smaller":{"name":"small net","accuracy":0.7,"cost":1.5}' in Path("page.html").read_text()
    status, _, err = run("fit costs.json labelled.npz --budget 60% -o decided", capsys)
    assert (status, "--force to replace it" in err) == (1, True)


MISTAKES = {
    "two goals": ({"budget": "50%", "speedup": 2}, "budget and speedup are 2 goals: give one of them"),
    "loss in percent": ({"max_accuracy_loss": 1}, "0.01 is one point"),
    "slower": ({"speedup": 0.5}, "speedup 0.5 must be above 1"),
    "out of reach": ({"speedup": 1000.0}, "a speed-up of 1000 is out of reach here: if every sample left after"),
    "no cheap exit": ({"budget": "0.1%"}, "is below the cheapest exit"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_goals_that_cannot_be_met_are_refused_before_anything_is_trained(name):
    goal, message = MISTAKES[name]
    with pytest.raises(BadInput, match=message):
        alight.fit(own_cnn(), digits()[0].tensors, digits()[1].tensors, **goal, progress=False)


def test_heads_that_nothing_trains_are_refused(trained, capsys):
    images, labels = digits()[1].tensors
    message = "the heads after .* are new, and nothing trains them: give training data before the validation data"
    with pytest.raises(BadInput, match=message):
        alight.fit(trained, None, (images, labels), progress=False)
    np.savez("validation.npz", images=np.zeros((40, 3, 32, 32), np.float32), labels=np.arange(40) % 10)
    status, _, err = run("fit timm:test_resnet validation.npz --image-size 32 --classes 10 -o new", capsys)
    assert (status, "are new, and nothing trains them" in err, Path("new").exists()) == (1, True, False)


def test_what_is_missing_is_asked_for():
    with pytest.raises(BadInput, match="there is no validation data"):
        alight.fit(own_cnn(), digits()[0].tensors)
    with pytest.raises(BadInput, match="a dict is not a network: give a torch module"):
        alight.fit({}, None, digits()[1].tensors)
    bytes_of = (255 * digits()[0].tensors[0]).to(torch.uint8)
    with pytest.raises(BadInput, match="how the network normalises them is unknown: give Normalisation"):
        alight.fit(own_cnn(), (bytes_of, digits()[0].tensors[1]), digits()[1].tensors)
    with pytest.raises(BadInput, match="the class Linear is not a network"):
        alight.fit(nn.Linear, None, digits()[1].tensors)
    images, labels = digits()[1].tensors
    with pytest.raises(BadInput, match=r"images of shape \(1, 8, 8, 1\) with their channels last, .*: put them first"):
        alight.fit(own_cnn(), None, (images.permute(0, 2, 3, 1), labels))
    with pytest.raises(BadInput, match=r"labels have shape \(32, 10\) .*argmax of one-hot rows"):
        alight.fit(own_cnn(), None, (images, nn.functional.one_hot(labels)), progress=False)
    with pytest.raises(BudgetTooSmall):
        alight.fit(Costs.from_cumulative([2.0, 4.0]), validation=np.zeros((40, 2, 3)), budget=1.0, progress=False)


def test_exits_stand_where_the_user_says(trained):
    train, validation = (data.tensors for data in digits())
    once = TrainingSettings(epochs=1)
    terms = {"training": once, "progress": False, "budget": "80%"}
    model = alight.attach_heads(copy.deepcopy(trained), ["5", "11"], example=train[0][:2])
    untrained = copy.deepcopy(model.heads[0].state_dict())
    predictor = alight.fit(model, train, validation, **terms)
    assert predictor.fitted.exits == ("5", "11", "end")
    trained_now = predictor.backend.model.heads[0].state_dict()
    assert any(not torch.equal(each, trained_now[name]) for name, each in untrained.items())


def test_the_command_places_exits_by_name_and_number(capsys):
    images = np.random.default_rng(0).normal(size=(60, 3, 32, 32)).astype(np.float32)
    for name in ("train", "validation"):
        np.savez(f"{name}.npz", images=images + (name == "train"), labels=np.arange(60) % 10)
    line = "fit timm:test_resnet train.npz validation.npz --image-size 32 --epochs 1 --mode frozen --budget 90%"
    status, _, err = run(f"{line} --after layer1 -o named", capsys)
    assert (status, alight.load_model("named").exits) == (0, ("layer1", "end")), err
    assert "after=['layer1']" in err
    status, _, err = run(f"{line} --count 1 -o counted", capsys)
    assert (status, len(alight.load_model("counted").exits)) == (0, 2), err
    status, _, err = run(f"{line} --count 1 --after layer1 -o both", capsys)
    assert (status, "give one of them" in err) == (1, True)


def test_the_best_epoch_is_chosen_by_training_samples_that_are_held_out(trained, monkeypatch):
    train, validation = (data.tensors for data in digits())
    settings = TrainingSettings(epochs=3, keep_best=True, patience=1, learning_rate=1e-2)
    seen = []

    def spy(model, data, settings, *, validation, **further):
        seen.append([torch.cat([each.inputs[0] for each in part]) for part in (data, validation)])
        return train_heads(model, data, settings, validation=validation, **further)

    monkeypatch.setattr("alight.training.training.train_heads", spy)
    predictor = alight.fit(trained, train, validation, budget="60%", training=settings, progress=False)
    ((learnt, held_out),) = seen
    assert len(learnt) + len(held_out) == len(train[0])
    assert len(held_out) == len(train[0]) // 10
    known = {row.numpy().tobytes() for row in train[0]}
    assert all(row.numpy().tobytes() in known for row in held_out)  # and none is a validation sample
    assert "part, held_out = split_batches(train, model.input_spec, 0.1, 64, 0)" in predictor.calls
    assert "validation=held_out, batch_size=64" in predictor.calls


def test_where_no_sample_can_be_held_out_it_is_said_what_to_do(trained):
    (images, labels), validation = (data.tensors for data in digits())
    terms = {"training": TrainingSettings(epochs=1, keep_best=True), "progress": False}
    with pytest.raises(BadInput, match=r"10 of 100 training samples would be held .*, and 50 are needed: give"):
        alight.fit(trained, (images[:100], labels[:100]), validation, **terms)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images, labels), 64)
    with pytest.raises(BadInput, match="a DataLoader comes in batches, of which no samples can be held out"):
        alight.fit(trained, loader, validation, **terms)


@pytest.fixture
def untrained_folder():
    """What `alight attach` writes: a network with heads that nothing trained, and data."""
    alight.save_model(alight.attach_heads(own_cnn(), ["5", "11"], example=torch.zeros(2, 1, 8, 8)), "attached")
    for name, (images, labels) in zip(("train", "validation"), (data.tensors for data in digits()), strict=True):
        np.savez(f"{name}.npz", images=images.numpy(), labels=labels.numpy())


def test_heads_of_a_folder_that_nothing_trained_are_trained_or_refused(untrained_folder, capsys):
    status, _, err = run("fit attached validation.npz -o new", capsys)
    assert (status, "are new, and nothing trains them: give training data" in err) == (1, True)
    status, _, err = run("fit attached train.npz validation.npz --epochs 1 --budget 90% -o fitted", capsys)
    assert (status, "training the heads, and nothing else" in err) == (0, True), err
    status, _, err = run("fit fitted validation.npz --budget 90% -o again", capsys)  # its heads are trained
    assert status == 0, err


@pytest.mark.filterwarnings("default:the heads in")
def test_commands_say_in_a_line_that_heads_are_not_trained_until_they_are(untrained_folder, capsys):
    said = "alight: the heads in attached are not trained, so early answers are guesses: `alight fit attached"
    status, out, err = run("record attached validation.npz -o table.npz", capsys)
    assert (status, err.count(said)) == (0, 1), err
    assert out.splitlines()[-1].startswith("accuracy: layer 5 ")
    assert run("train attached train.npz --epochs 1 -o trained", capsys)[0] == 0
    status, _, err = run("record trained validation.npz -o other.npz", capsys)
    assert (status, "not trained" in err) == (0, False)
    model = alight.load_model("attached")
    assert model.is_untrained("heads")
    alight.save_model(nudged(model), "own")
    assert not alight.load_model("own").is_untrained("heads")


def test_a_folder_of_random_weights_is_trained_as_a_whole(capsys):
    images = np.random.default_rng(0).normal(size=(60, 3, 32, 32)).astype(np.float32)
    for name in ("train", "validation"):
        np.savez(f"{name}.npz", images=images + (name == "train"), labels=np.arange(60) % 10)
    assert run("attach timm:test_resnet --classes 10 --image-size 32 --after layer1 -o random", capsys)[0] == 0
    status, _, err = run("fit random train.npz validation.npz --epochs 1 --budget 90% -o fitted", capsys)
    assert (status, "training the whole network (joint)" in err) == (0, True), err
    assert NamedNetwork("fitted").is_trained
    assert not NamedNetwork("random").is_trained
