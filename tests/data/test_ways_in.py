"""One way in for data: every form gives what plain tensors give, to the bit, and what is refused gets a sentence."""

import copy
import csv
import io
import json
from functools import cache, partial
from pathlib import Path

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
import torchvision
from PIL import Image
from pyarrow import parquet
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset
from transformers import BertConfig, BertTokenizerFast

from alight import (
    HeadOutputs,
    Normalisation,
    Predictor,
    Threshold,
    TrainingSettings,
    attach_heads,
    from_timm,
    from_transformers,
    load_model,
    record,
    save_model,
    train_heads,
)
from alight.cli import main
from alight.data.batches import as_batch, as_inputs, first_batch, in_batches, load_data
from alight.errors import AlightError
from alight.networks.store import fingerprint

COUNT, BATCH = 24, 8
CLASSES = ("cat", "ant", "bee")  # not in the order of the alphabet
Y = np.repeat([1, 2, 0], COUNT // 3)  # in the order of folders
NAMES = [CLASSES[label] for label in Y]
RNG = np.random.default_rng(0)
PIXELS = RNG.integers(256, size=(COUNT, 3, 8, 8), dtype=np.uint8)
PICTURES = [Image.fromarray(np.ascontiguousarray(each.transpose(1, 2, 0))) for each in PIXELS]
MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)
ROWS = RNG.normal(size=(COUNT, 4)).astype(np.float32)
COLUMNS = ("length", "width", "height", "weight")
WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] where is my card the new bank lost money today".split()
TEXTS = [" ".join(RNG.choice(WORDS[5:], size=RNG.integers(2, 9))) for _ in range(COUNT)]


def tokenizer():
    return BertTokenizerFast(vocab={word: index for index, word in enumerate(WORDS)}, model_max_length=16)


TOKENS = {
    name: values.astype(np.int64)
    for name, values in tokenizer()(TEXTS, padding=True, return_tensors="np", return_token_type_ids=False).items()
}


class Reader(nn.Module):
    """The mean of words, and two layers."""

    def __init__(self):
        super().__init__()
        self.words, self.first, self.last = nn.Embedding(len(WORDS), 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, input_ids, attention_mask):
        mask = attention_mask[..., None].float()
        mean = (self.words(input_ids) * mask).sum(1) / mask.sum(1)
        return self.last(torch.relu(self.first(mean)))


def network(kind, classes=CLASSES):
    return copy.deepcopy(attached(kind, classes))


@cache
def attached(kind, classes):
    torch.manual_seed(0)
    if kind == "images":
        layers = nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3)
        backbone, after, example = nn.Sequential(*layers), ["1"], torch.zeros(2, 3, 8, 8)
    elif kind == "numbers":
        backbone, after, example = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), ["1"], torch.zeros(2, 4)
    else:
        backbone, after = Reader(), ["first"]
        example = {name: torch.from_numpy(values[:2]) for name, values in TOKENS.items()}
    normalisation = Normalisation(MEAN, STD) if kind == "images" else None
    model = attach_heads(backbone, after, example=example, classes=classes, normalisation=normalisation)
    if kind == "texts":
        model.tokenizer = tokenizer()
    return model.eval()


def plain(kind):
    """Inputs and labels as tensors."""
    mean, std = (torch.tensor(each)[:, None, None] for each in (MEAN, STD))
    inputs = {
        "images": (torch.from_numpy(PIXELS).float() / 255 - mean) / std,
        "numbers": torch.from_numpy(ROWS),
        "texts": {name: torch.from_numpy(values) for name, values in TOKENS.items()},
    }[kind]
    return inputs, torch.from_numpy(Y)


X = {kind: plain(kind)[0] for kind in ("images", "numbers", "texts")}


class Samples(Dataset):
    """A data set of whatever samples."""

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]


class Labelled(torchvision.datasets.VisionDataset):
    """A data set as torchvision's are: pictures with indices of classes in the order of the alphabet."""

    classes = ("ant", "bee", "cat")

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        picture, label = PICTURES[index], self.classes.index(NAMES[index])
        return picture if self.transform is None else self.transform(picture), label


def pictures_by_name():
    return [{"image": picture, "label": name} for picture, name in zip(PICTURES, NAMES, strict=True)]


def png(picture):
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def hugging_face(columns, **features):
    """A data set of Hugging Face."""
    table = datasets.Dataset.from_dict(columns)
    return table.cast(datasets.Features({**table.features, **features})) if features else table


def images_of_hub(**names):
    """A data set with the columns of CIFAR-100 on the hub."""
    columns = {"img": [{"bytes": png(each), "path": None} for each in PICTURES], "fine_label": Y, "coarse_label": 0 * Y}
    return hugging_face(columns, img=datasets.Image(), **names)


def class_folders(folder):
    for index, (picture, name) in enumerate(zip(PICTURES, NAMES, strict=True)):
        (folder / "classes" / name).mkdir(parents=True, exist_ok=True)
        picture.save(folder / "classes" / name / f"{index:02}.png")
    return folder / "classes"


def image_files(folder):
    return sorted(class_folders(folder).rglob("*.png"))


def arrays_file(folder, images=PIXELS):
    np.savez(folder / "images.npz", images=images, labels=Y)
    return folder / "images.npz"


def arrays_folder(folder):
    np.save(folder / "images.npy", PIXELS)
    np.save(folder / "labels.npy", Y)
    return folder


def parquet_file(folder, columns):
    parquet.write_table(pa.table(columns), folder / "table.parquet")
    return folder / "table.parquet"


def csv_file(folder, columns):
    with (folder / "table.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    return folder / "table.csv"


def lines_file(folder, columns):
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    (folder / "lines.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder / "lines.jsonl"


def saved(folder, table):
    table.save_to_disk(folder / "saved")
    return folder / "saved"


def frame(**labels):
    return pd.DataFrame({**dict(zip(COLUMNS, ROWS.T, strict=True)), **labels})


def tokenised(**labels):
    return hugging_face({**{name: values.tolist() for name, values in TOKENS.items()}, "text": TEXTS, **labels})


LAYOUT = {"image": [png(each) for each in PICTURES], "label": Y}
NUMBERS = {**dict(zip(COLUMNS, ROWS.T.astype(float), strict=True)), "label": Y}
PAIR = {"text": TEXTS, "label": Y.tolist()}
to_tensor = torchvision.transforms.Compose(
    [torchvision.transforms.ToTensor(), torchvision.transforms.Normalize(MEAN, STD)]
)

# form of data: kind of network, and what makes the data, of files in a folder
FORMS = {
    # images in memory
    "tensors": ("images", lambda _: (X["images"], torch.from_numpy(Y))),
    "arrays and an array": ("images", lambda _: (X["images"].numpy(), Y)),
    "arrays and a list": ("images", lambda _: (X["images"].numpy(), Y.tolist())),
    "arrays and a Series": ("images", lambda _: (X["images"].numpy(), pd.Series(Y, index=np.arange(COUNT)[::-1]))),
    "arrays and names": ("images", lambda _: (X["images"].numpy(), NAMES)),
    "arrays and a Series of names": ("images", lambda _: (X["images"].numpy(), pd.Series(NAMES, dtype="category"))),
    "doubles": ("images", lambda _: (X["images"].double(), torch.from_numpy(Y))),
    "bytes": ("images", lambda _: (PIXELS, Y)),
    "bytes with channels last": ("images", lambda _: (PIXELS.transpose(0, 2, 3, 1), Y)),
    "pictures and a tensor": ("images", lambda _: (PICTURES, torch.from_numpy(Y))),
    "list of arrays and a list": ("images", lambda _: ([*X["images"].numpy()], Y.tolist())),
    "pairs of picture and label": ("images", lambda _: [*zip(PICTURES, Y.tolist(), strict=True)]),
    "pairs of picture and name": ("images", lambda _: [*zip(PICTURES, NAMES, strict=True)]),
    "pairs as lists": ("images", lambda _: [[picture, int(label)] for picture, label in zip(PICTURES, Y, strict=True)]),
    "pairs of tensors": ("images", lambda _: [*zip(X["images"], torch.from_numpy(Y), strict=True)]),
    "dicts of picture and label": (
        "images",
        lambda _: [{"image": x, "label": y} for x, y in zip(PICTURES, NAMES, strict=True)],
    ),
    "dict of arrays": ("images", lambda _: {"images": X["images"].numpy(), "labels": Y}),
    "dict with labels beside it": ("images", lambda _: ({"images": X["images"]}, torch.from_numpy(Y))),
    "DataFrame of pictures": ("images", lambda _: pd.DataFrame({"image": PICTURES, "label": NAMES})),
    # data sets and loaders
    "TensorDataset": ("images", lambda _: TensorDataset(X["images"], torch.from_numpy(Y))),
    "Subset": ("images", lambda _: Subset(TensorDataset(X["images"], torch.from_numpy(Y)), range(COUNT))),
    "data set of pictures": ("images", lambda _: Samples([*zip(PICTURES, Y.tolist(), strict=True)])),
    "Subset of pictures": (
        "images",
        lambda _: Subset(Samples([*zip(PICTURES, Y.tolist(), strict=True)]), range(COUNT)),
    ),
    "Subset of torchvision": ("images", lambda _: Subset(Labelled(), range(COUNT))),
    "data set of dicts": (
        "images",
        lambda _: Samples([{"image": x, "label": int(y)} for x, y in zip(PICTURES, Y, strict=True)]),
    ),
    "data set of torchvision": ("images", lambda _: Labelled()),
    "data set of torchvision, transformed": ("images", lambda _: Labelled(transform=to_tensor)),
    "loader of tuples": ("images", lambda _: DataLoader(TensorDataset(X["images"], torch.from_numpy(Y)), BATCH)),
    "loader of dicts": (
        "images",
        lambda _: DataLoader(Samples([{"x": x, "y": int(y)} for x, y in zip(X["images"], Y, strict=True)]), BATCH),
    ),
    "loader with names": ("images", lambda _: DataLoader(Samples([*zip(X["images"], NAMES, strict=True)]), BATCH)),
    "list of batches": ("images", lambda _: [[X["images"][r : r + 8], Y[r : r + 8]] for r in range(0, COUNT, BATCH)]),
    # Hugging Face
    "Hugging Face images": ("images", lambda _: images_of_hub()),
    "Hugging Face images, torch": ("images", lambda _: images_of_hub().with_format("torch")),
    "Hugging Face images, numpy": ("images", lambda _: images_of_hub().with_format("numpy")),
    "Hugging Face images, shuffled": (
        "images",
        lambda _: images_of_hub().select(range(COUNT)[::-1]).select(range(24)[::-1]),
    ),
    "Hugging Face images, transformed": (
        "images",
        lambda _: images_of_hub().with_transform(
            lambda rows: {"pixel_values": [*map(to_tensor, rows["img"])], "labels": rows["fine_label"]}
        ),
    ),
    "Hugging Face classes in another order": (
        "images",
        lambda _: hugging_face(
            {"image": images_of_hub()["img"], "label": [Labelled.classes.index(name) for name in NAMES]},
            label=datasets.ClassLabel(names=[*Labelled.classes]),
        ),
    ),
    "Hugging Face texts": ("texts", lambda _: hugging_face({"sentence": TEXTS, "label": Y, "idx": range(COUNT)})),
    "Hugging Face texts, torch": ("texts", lambda _: hugging_face(PAIR).with_format("torch")),
    "Hugging Face tokens": ("texts", lambda _: tokenised(label=Y)),
    "Hugging Face tokens of each text alone": ("texts", lambda _: hugging_face({**tokenizer()(TEXTS), "label": Y})),
    "lists of tokens": ("texts", lambda _: {**tokenizer()(TEXTS), "label": NAMES}),
    "Hugging Face tokens, torch": (
        "texts",
        lambda _: tokenised(labels=Y).with_format("torch", columns=["input_ids", "attention_mask", "labels"]),
    ),
    "Hugging Face tokens in a loader": (
        "texts",
        lambda _: DataLoader(tokenised(labels=Y).remove_columns("text").with_format("torch"), BATCH),
    ),
    # texts and numbers in memory
    "texts and labels": ("texts", lambda _: (TEXTS, Y)),
    "array of texts and names": ("texts", lambda _: (np.array(TEXTS), NAMES)),
    "pairs of text and label": ("texts", lambda _: [*zip(TEXTS, Y.tolist(), strict=True)]),
    "data set of texts": ("texts", lambda _: Samples([*zip(TEXTS, Y.tolist(), strict=True)])),
    "loader of texts": ("texts", lambda _: DataLoader(Samples([*zip(TEXTS, Y.tolist(), strict=True)]), BATCH)),
    "DataFrame of texts": ("texts", lambda _: pd.DataFrame({"utterance": TEXTS, "label": NAMES})),
    "Series of texts": ("texts", lambda _: (pd.Series(TEXTS), pd.Series(NAMES))),
    "tokens with labels beside them": ("texts", lambda _: (TOKENS, Y)),
    "tokens with labels inside": ("texts", lambda _: {**TOKENS, "labels": Y}),
    "tokens in order": ("texts", lambda _: (*map(torch.from_numpy, TOKENS.values()), torch.from_numpy(Y))),
    "rows of numbers": ("numbers", lambda _: (ROWS.tolist(), Y.tolist())),
    "DataFrame of numbers": ("numbers", lambda _: frame(label=Y)),
    "DataFrame of numbers and names": ("numbers", lambda _: frame(target=NAMES)),
    "DataFrame and a Series": ("numbers", lambda _: (frame(), pd.Series(Y))),
    "DataFrame and a list": ("numbers", lambda _: (frame(), NAMES)),
    "Hugging Face numbers": ("numbers", lambda _: hugging_face(NUMBERS)),
    # files
    "npz": ("images", arrays_file),
    "npz of floats": ("images", lambda folder: arrays_file(folder, X["images"].numpy())),
    "folder of npy": ("images", arrays_folder),
    "folder of classes": ("images", class_folders),
    "folder of classes as a string": ("images", lambda folder: str(class_folders(folder))),
    "image folder of torchvision": ("images", lambda folder: f"imagefolder:{class_folders(folder)}"),
    "image files and labels": ("images", lambda folder: (image_files(folder), Y)),
    "Parquet of images": ("images", lambda folder: parquet_file(folder, LAYOUT)),
    "Parquet of numbers": ("numbers", lambda folder: parquet_file(folder, NUMBERS)),
    "Parquet of texts": ("texts", lambda folder: parquet_file(folder, {"text": TEXTS, "label": NAMES})),
    "saved by Hugging Face": ("images", lambda folder: saved(folder, images_of_hub())),
    "part of what Hugging Face saved": (
        "images",
        lambda folder: f"{saved(folder, datasets.DatasetDict({'dev': images_of_hub()}))}[dev]",
    ),
    "CSV of texts": ("texts", lambda folder: csv_file(folder, PAIR)),
    "CSV of texts and names": ("texts", lambda folder: csv_file(folder, {"label": NAMES, "sentence": TEXTS})),
    "CSV of numbers": ("numbers", lambda folder: csv_file(folder, NUMBERS)),
    "JSON lines of texts": ("texts", lambda folder: lines_file(folder, PAIR)),
    "JSON lines of texts and names": ("texts", lambda folder: lines_file(folder, {"text": TEXTS, "label": NAMES})),
}
UNLABELLED = {  # forms of inputs alone
    "tensor": ("images", lambda _: X["images"]),
    "array of doubles": ("images", lambda _: X["images"].double().numpy()),
    "list of pictures": ("images", lambda _: PICTURES),
    "tuple of pictures": ("images", lambda _: tuple(PICTURES)),
    "list of tensors": ("images", lambda _: [*X["images"]]),
    "list of bytes": ("images", lambda _: [*PIXELS]),
    "list of files": ("images", image_files),
    "list of texts": ("texts", lambda _: TEXTS),
    "array of texts": ("texts", lambda _: np.array(TEXTS)),
    "Series of texts": ("texts", lambda _: pd.Series(TEXTS)),
    "dict of tokens": ("texts", lambda _: TOKENS),
    "output of a tokenizer": ("texts", lambda _: tokenizer()(TEXTS, padding=True, return_tensors="pt")),
    "DataFrame": ("numbers", lambda _: frame()),
    "DataFrame of doubles": ("numbers", lambda _: frame().astype(float)),
    "rows in lists": ("numbers", lambda _: ROWS.tolist()),
    "rows in tuples": ("numbers", lambda _: [*ROWS]),
}


def assert_same(table, expected):
    assert np.array_equal(table.scores, expected.scores)
    assert np.array_equal(table.predictions, expected.predictions)
    assert np.array_equal(table.labels, expected.labels)


@cache
def recorded(kind):
    return record(network(kind), batches_of(kind), batch_size=BATCH, progress=False)


def batches_of(kind):
    """Plain tensors in batches."""
    inputs, labels = plain(kind)
    rows = [slice(start, start + BATCH) for start in range(0, COUNT, BATCH)]
    if kind == "texts":
        return [({name: part[each] for name, part in inputs.items()} | {"labels": labels[each]}) for each in rows]
    return [(inputs[each], labels[each]) for each in rows]


@cache
def predictor(kind):
    """One under which about half of the samples leave early."""
    table = recorded(kind)
    scores = np.sort(table.scores[:, 0])
    middle = float(scores[COUNT // 2 - 1 : COUNT // 2 + 1].mean())
    return Predictor(network(kind), Threshold((middle,), costs=(1.0, 3.0)), batch_size=BATCH)


def test_the_tables_have_forty_combinations_and_more():
    assert 2 * len(FORMS) + 2 * len(UNLABELLED) > 150


@pytest.mark.parametrize("form", FORMS)
def test_a_recording_is_that_of_tensors_to_the_bit(form, tmp_path):
    kind, make = FORMS[form]
    assert_same(record(network(kind), make(tmp_path), batch_size=BATCH, progress=False), recorded(kind))


@pytest.mark.parametrize("form", FORMS)
def test_a_prediction_is_that_of_tensors_to_the_bit(form, tmp_path):
    kind, make = FORMS[form]
    expected, found = predictor(kind).run(batches_of(kind), progress=False), None
    found = predictor(kind).run(make(tmp_path), progress=False)
    assert 0 < expected.exit_shares[0] < 1
    assert np.array_equal(found.predictions, expected.predictions)
    assert np.array_equal(found.exits, expected.exits)


def test_labels_that_the_network_lacks_give_no_accuracy_but_a_warning():
    images, labels = plain("images")
    expected = predictor("images").run(images, progress=False)
    for others, said in {labels.clamp(max=1) + 6: "6 to 7", labels - 1: "-1 to 1"}.items():
        with pytest.warns(UserWarning, match=f"labels run from {said}, and the network has 3 classes, 0 to 2: the lab"):
            found = predictor("images").run((images, others), progress=False)
        assert found.labels is None
        assert np.array_equal(found.exits, expected.exits)
    assert predictor("images").run((images, 0 * labels - 1), progress=False).labels is None  # there are none


def test_one_hot_rows_are_labels_in_files_too(tmp_path):
    images, labels = plain("images")
    rows = np.eye(3)[labels]
    np.savez(tmp_path / "rows.npz", images=images, labels=rows)
    for data in ((images, rows), tmp_path / "rows.npz"):
        assert np.array_equal(predictor("images").run(data, progress=False).labels, labels)
        assert np.array_equal(record(network("images"), data, progress=False).labels, labels)


@pytest.mark.parametrize("form", UNLABELLED)
def test_a_batch_is_decided_as_tensors_are_to_the_bit(form, tmp_path):
    kind, make = UNLABELLED[form]
    data, inputs = make(tmp_path), as_inputs(X[kind], network(kind).input_spec)
    assert all(map(np.array_equal, map(np.asarray, as_inputs(data, network(kind).input_spec)), map(np.asarray, inputs)))
    expected = predictor(kind).run(batches_of(kind), progress=False)
    for found in (predictor(kind)(data), predictor(kind).run(data, progress=False)):
        assert np.array_equal(found.predictions, expected.predictions)
        assert np.array_equal(found.exits, expected.exits)


@cache
def trained(kind):
    return trained_on(kind, plain(kind))


def trained_on(kind, data):
    model = network(kind)
    train_heads(model, data, TrainingSettings(mode="joint", epochs=1), batch_size=BATCH, progress=False)
    return fingerprint(model)


@pytest.mark.parametrize("form", [form for form in FORMS if "loader" not in form and "batches" not in form])
def test_a_training_is_that_of_tensors_to_the_bit(form, tmp_path):
    kind, make = FORMS[form]
    assert trained_on(kind, make(tmp_path)) == trained(kind)


ON_DISK = (
    *("npz", "npz of floats", "folder of npy", "folder of classes", "image folder of torchvision", "Parquet of images"),
    *("saved by Hugging Face", "part of what Hugging Face saved", "Parquet of texts", "CSV of texts"),
    *("CSV of texts and names", "JSON lines of texts", "JSON lines of texts and names"),
)


@cache
def built(kind):
    """A network that alight can build again, so that commands can load it."""
    torch.manual_seed(0)
    if kind == "images":
        model = from_timm("test_resnet", num_classes=3, image_size=8, after=["layer1", "layer2"])
        model.normalisation = Normalisation(MEAN, STD)
    else:
        sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 16}
        model = from_transformers(BertConfig(vocab_size=len(WORDS), **sizes), num_classes=3, count=1)
        model.tokenizer = tokenizer()
    model.classes = CLASSES
    return model.eval()


@pytest.mark.parametrize("form", ON_DISK)
def test_the_command_line_reads_the_same_to_the_bit(form, tmp_path, capsys):
    kind, make = FORMS[form]
    (tmp_path / "data").mkdir()
    data, model = make(tmp_path / "data"), save_model(built(kind), tmp_path / "model")
    line = ["record", str(model), str(data), "-o", str(tmp_path / "out.npz"), "--batch-size", str(BATCH), "--quiet"]
    assert main(line) == 0, capsys.readouterr().err
    assert_same(HeadOutputs.load(tmp_path / "out.npz"), record(built(kind), batches_of(kind), progress=False))


def test_the_part_of_a_torchvision_data_set_stands_in_brackets(tmp_path):
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part, shade in {"train": 255, "t10k": 0}.items():  # as Yann LeCun's files are
        pixels, labels = np.full((3, 28, 28), shade, np.uint8), np.arange(3, dtype=np.uint8)
        sizes = b"".join(size.to_bytes(4, "big") for size in pixels.shape)
        (raw / f"{part}-images-idx3-ubyte").write_bytes(b"\x00\x00\x08\x03" + sizes + pixels.tobytes())
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(b"\x00\x00\x08\x01" + (3).to_bytes(4, "big") + labels.tobytes())
    spec = network("images", classes=()).input_spec
    for part, shade in {"train": 1.0, "test": 0.0}.items():
        (batch,) = in_batches(f"mnist:{tmp_path}[{part}]", spec)
        expected = (np.float32(shade) - np.float32(MEAN)) / np.float32(STD)
        assert np.array_equal(np.asarray(batch.inputs[0][0, :, 0, 0]), expected)
        assert batch.labels.tolist() == [0, 1, 2]


def test_a_first_batch_has_as_many_samples_as_asked_for_from_any_form(tmp_path):
    for form in ("tensors", "loader of dicts", "npz", "Hugging Face texts", "DataFrame of numbers"):
        kind, make = FORMS[form]
        batch = first_batch(make(tmp_path), network(kind).input_spec, 3)
        assert len(batch) == 3
        assert np.array_equal(batch.labels, Y[:3])


def test_names_of_classes_may_look_like_numbers(tmp_path):
    file = csv_file(tmp_path, {"text": TEXTS, "label": Y})
    for classes, expected in {("2", "0", "1"): (Y + 1) % 3, CLASSES: Y}.items():
        batch = first_batch(file, network("texts", classes).input_spec, COUNT)
        assert np.array_equal(batch.labels, expected)


def test_a_tokenizer_is_saved_with_its_network_and_loaded(tmp_path):
    tokenizer().save_pretrained(tmp_path / "words")
    for given in (tokenizer(), tmp_path / "words", str(tmp_path / "words")):
        model = network("texts")
        model.tokenizer = given
        loaded = load_model(save_model(model, tmp_path / "model", force=True), backbone=Reader())
        again = load_model(save_model(loaded, tmp_path / "again", force=True), backbone=Reader())
        for each in (model, loaded, again, load_model(save_model(again, tmp_path / "again"), backbone=Reader())):
            (ids, mask) = as_inputs(TEXTS, each.input_spec)
            assert np.array_equal(ids, TOKENS["input_ids"])
            assert np.array_equal(mask, TOKENS["attention_mask"])
    assert not (tmp_path / "again" / "tokenizer" / "config.json").exists()


def test_sizes_that_are_proven_free_may_differ_and_others_may_not():
    free, spec = network("images"), network("images").input_spec
    assert len(record(free, torch.zeros(3, 3, 12, 9), progress=False)) == 3
    assert spec.accepted[0].shape == (None, 3, None, None)
    fixed = attach_heads(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)),
        ["1"],
        example=torch.zeros(2, 3, 8, 8),
    )
    with pytest.raises(
        AlightError, match=r"shape \(3, 3, 12, 9\), and the network takes input_0 of shape \(samples, 3, 8, 8\)"
    ):
        record(fixed, torch.zeros(3, 3, 12, 9), progress=False)


def no_tokenizer():
    model = network("texts")
    model.tokenizer = None
    return model


images, rows, texts = (partial(network, kind) for kind in ("images", "numbers", "texts"))
SHAPE = r"\(samples, 3, any, any\)"
REFUSED = {  # what is done with a network, and the sentence
    "floats with channels last": (
        lambda _: record(images(), X["images"].permute(0, 2, 3, 1)),
        rf"shape \(24, 8, 8, 3\) with their channels last, and .*{SHAPE}.*permute\(0, 3",
    ),
    "one image": (
        lambda _: predictor("images")(X["images"][0]),
        rf"one sample of shape \(3, 8, 8\), and .* {SHAPE}, float32: give a batch, x\[None\]",
    ),
    "one image and its label": (
        lambda _: record(images(), (X["images"][0], 1)),
        "one sample and its label: give a list",
    ),
    "one image with channels last": (
        lambda _: predictor("images").run(X["images"][0].permute(1, 2, 0).numpy()),
        r"one image of shape \(8, 8, 3\) with its channels last.*x\.transpose\(2, 0, 1\)\[None\] has",
    ),
    "one image of bytes": (lambda _: predictor("images")(PIXELS[0]), r"one image of shape \(3, 8, 8\): give a batch"),
    "one picture as an array": (
        lambda _: record(images(), np.asarray(PICTURES[0])),
        r"one image of shape \(8, 8, 3\): give a batch, x\[None\]",
    ),
    "grey images": (lambda _: record(images(), torch.zeros(4, 1, 8, 8)), "images of 1 channels .*convert grey to RGB"),
    "flat images": (lambda _: record(images(), torch.zeros(4, 192)), r"shape \(4, 192\), and .*: give 4 axes"),
    "one row of numbers": (lambda _: predictor("numbers")(ROWS[0]), r"one sample of shape \(4,\), .*: give a batch"),
    "too few numbers": (lambda _: record(rows(), (ROWS[:, :3], Y)), "samples of 3 numbers, and .*: give 4 numbers"),
    "too many columns": (
        lambda _: record(rows(), frame(species=Y)),
        r"5 columns beside the label \(length, width, height, weight, species\), and the network takes",
    ),
    "a column of texts": (
        lambda _: record(rows(), frame(label=Y).assign(weight="heavy")),
        "column 'weight' of the data holds 'heavy', which is not a number",
    ),
    "whole numbers that are not bytes": (
        lambda _: record(images(), PIXELS.astype(int)),
        r"images of int64: give bytes",
    ),
    "tokens as floats": (
        lambda _: predictor("texts")({name: each.astype(np.float32) for name, each in TOKENS.items()}),
        "an array of float32, and the network takes input_ids of shape",
    ),
    "pair for a batch": (
        lambda _: predictor("images")((X["images"], torch.from_numpy(Y))),
        r"a pair of inputs and labels where the network takes inputs alone .* both to `predictor\.run`",
    ),
    "texts and labels for a batch": (lambda _: predictor("texts")((TEXTS, Y)), "a pair of inputs and labels where"),
    "loader for a batch": (
        lambda _: predictor("images")(DataLoader(TensorDataset(X["images"]), BATCH)),
        r"a DataLoader is a whole data set and not a batch: `predictor\.run\(data\)`",
    ),
    "data set for a batch": (lambda _: predictor("images")(images_of_hub()), "a Dataset is a whole data set and not"),
    "path for a batch": (lambda folder: predictor("images")(folder), "the path .* is a whole data set and not a batch"),
    "labels as floats": (
        lambda _: record(images(), (X["images"], Y.astype(float))),
        r"labels are float64.*y\.astype\(int\)",
    ),
    "labels as floats in a tensor": (
        lambda _: record(images(), (X["images"], torch.from_numpy(Y).float())),
        r"labels are torch\.float32, not class indices: .*y\.long\(\)",
    ),
    "labels as flags": (lambda _: record(images(), (X["images"], Y > 0)), "labels are bool, not class indices"),
    "several labels": (
        lambda _: record(images(), (X["images"], np.eye(3, dtype=int)[Y])),
        r"labels have shape \(24, 3\) for 24 samples: .*argmax of one-hot rows; .*several labels per sample",
    ),
    "lists of labels": (
        lambda _: record(images(), (X["images"], [[0], [1, 2]] * 12)),
        r"labels have rows of different lengths, such as \[0\]: give one class index per sample",
    ),
    "a column of labels": (
        lambda _: record(rows(), (ROWS, pd.DataFrame({"y": Y}))),
        r"labels have shape \(24, 1\)|\(8, 1\)",
    ),
    "too many labels": (
        lambda _: record(images(), (X["images"][:5], Y)),
        "5 inputs and 24 labels: give one label for each",
    ),
    "unknown name": (
        lambda _: record(images(), (X["images"], ["dog"] * COUNT)),
        "a class 'dog' that the network does not",
    ),
    "names for a network without any": (
        lambda _: record(images(classes=()), (X["images"], ["dog", "cow"] * 12)),
        r"has classes by name \(.*\), 2 of them, and the network has 3: build it with 2",
    ),
    "names in a loader for a network without any": (
        lambda _: record(images(classes=()), DataLoader(Samples([*zip(X["images"], NAMES, strict=True)]), BATCH)),
        "labels are names such as 'ant', and the network has no names for its classes: set model.classes",
    ),
    "labels of which some are missing": (
        lambda _: record(images(), (X["images"], [None, *NAMES[1:]])),
        "the label of sample 0 is None, not a name or an index like the others",
    ),
    "a loader of classes in another order": (
        lambda _: record(images(), DataLoader(Subset(Labelled(transform=to_tensor), range(COUNT)), BATCH)),
        "numbers its classes ant, bee, cat, ... and the network cat, ant, bee, ...: give the data set itself",
    ),
    "labels out of bounds": (
        lambda _: record(images(), (X["images"], Y + 1)),
        "labels run from 1 to 3, but the network",
    ),
    "all parts": (
        lambda _: record(images(), datasets.DatasetDict({"train": images_of_hub()})),
        r"a DatasetDict has the parts train: choose one, as in data\['train'\]",
    ),
    "a stream of Hugging Face": (
        lambda _: record(images(), images_of_hub().to_iterable_dataset()),
        "an IterableDataset gives samples one by one.*DataLoader",
    ),
    "texts without a tokenizer": (
        lambda _: record(no_tokenizer(), (TEXTS, Y)),
        r"holds text, which needs a tokenizer: set model\.tokenizer to the folder of one",
    ),
    "texts without a tokenizer for a batch": (
        lambda _: Predictor(no_tokenizer(), Threshold((0.5,), costs=(1.0, 3.0)))(TEXTS),
        r"holds text, which needs a tokenizer: set model\.tokenizer",
    ),
    "tokens of different lengths without a tokenizer": (
        lambda _: record(no_tokenizer(), {**tokenizer()(TEXTS), "label": NAMES}),
        "has tokens of different lengths: pad them, or set model.tokenizer",
    ),
    "texts for images": (lambda _: record(images(), (TEXTS, Y)), "the network does not take text but input_0 of shape"),
    "pictures for numbers": (lambda _: record(rows(), PICTURES), "the network does not take images"),
    "a text that is missing": (
        lambda _: record(texts(), [*TEXTS[:4], None]),
        "the text of sample 4 of a batch is None",
    ),
    "two columns of texts": (
        lambda _: record(texts(), pd.DataFrame({"question": TEXTS, "answer": TEXTS, "label": Y})),
        r"2 columns of texts \(question, answer\), and the network reads one text: name one 'text'",
    ),
    "no column of texts": (
        lambda _: record(texts(), frame(label=Y)),
        "has columns length, .*, and the network reads one",
    ),
    "columns without names": (
        lambda _: record(images(), {"a": X["images"], "b": X["images"]}),
        "has columns a, b, and the network takes input_0",
    ),
    "nothing": (lambda _: record(images(), None), "a NoneType is not data: give tensors, arrays"),
    "a network": (lambda _: record(images(), nn.ReLU()), "a ReLU is not data"),
    "an empty list": (lambda _: record(images(), []), "the loader gave no batch in the recording"),
    "an empty array": (lambda _: record(images(), X["images"][:0]), "the Tensor has no samples: give at least one"),
    "an empty DataFrame": (lambda _: record(rows(), frame(label=Y)[:0]), "has no samples: give at least one"),
    "pairs and others": (
        lambda _: record(images(), [(PICTURES[0], 1), PICTURES[1]]),
        "sample 1 is not 2 values like those before it: give",
    ),
    "images of different sizes": (
        lambda _: record(images(), [X["images"][0], X["images"][1, :, :4]]),
        "the samples do not fit into one batch",
    ),
    "no such file": (lambda folder: record(images(), folder / "nowhere.npz"), "there is no such file or folder"),
    "another kind of file": (
        lambda folder: record(images(), csv_file(folder, PAIR).rename(folder / "data.txt")),
        r"data\.txt is not a kind of data that alight reads: give \.npz, \.npy, \.parquet, \.csv",
    ),
    "a damaged Parquet file": (
        lambda folder: record(images(), arrays_file(folder).rename(folder / "data.parquet")),
        r"data\.parquet: it is not a complete Parquet file",
    ),
    "a CSV row that is too long": (
        lambda folder: record(texts(), written(folder / "table.csv", "text,label\nyes, it is,1\n")),
        r"table\.csv: line 2 has 3 cells, and the first line names 2 columns; write texts that hold commas",
    ),
    "a CSV file without names": (
        lambda folder: record(rows(), written(folder / "table.csv", "1,1,2,3\n1,2,3,4\n")),
        "its first line is '1,1,2,3'; let it name every column",
    ),
    "a CSV cell that is not a number": (
        lambda folder: record(rows(), written(folder / "table.csv", "a,b,c,d,label\n1,2,x,4,0\n")),
        "column 'c' of .*table.csv holds 'x', which is not a number",
    ),
    "a CSV file of nothing": (lambda folder: record(texts(), written(folder / "table.csv", "text\n")), "it is empty"),
    "a label that is not whole": (
        lambda folder: record(texts(), written(folder / "table.csv", "text,label\nmy card,0.5\n")),
        r"the label of sample 0 is .*0\.5.*, not a name or an index",
    ),
    "parts of torchvision": (
        lambda folder: record(images(), f"cifar10:{folder}"),
        r"has several parts: choose one, as in 'cifar10:.*\[train\]' or \[test\]",
    ),
    "augmentation of numbers": (
        lambda folder: load_data(csv_file(folder, NUMBERS), rows().input_spec, augment=True),
        "is to be augmented, and the network does not take images",
    ),
}


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize("form", REFUSED)
def test_what_cannot_be_used_gets_a_sentence_that_says_what_to_do(form, tmp_path):
    attempt, message = REFUSED[form]
    with pytest.raises((AlightError, FileNotFoundError), match=message) as caught:
        attempt(tmp_path)
    text = str(caught.value)
    assert "\n" not in text
    assert "mat1" not in text


def test_a_batch_of_a_stream_is_checked_too():
    with pytest.raises(AlightError, match="one sample of shape"):
        as_batch(X["images"][0], network("images").input_spec)
