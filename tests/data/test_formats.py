"""Data on disk: every kind gives the batches that the network takes, and damage gets one sentence."""

import json
import sys

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from exported import folder as exported
from exported import network as exported_network
from PIL import Image
from pyarrow import parquet
from torch import nn

from alight.data.batches import batches, in_batches, load_data
from alight.data.formats import names_of
from alight.data.preprocess import InputSpec, Normalisation, TensorSpec
from alight.engine.manifest import Manifest
from alight.engine.recorder import record
from alight.errors import BadFile, BadInput
from alight.networks.attach import attach_heads
from alight.networks.multi_exit import MultiExitModel, example_of

CHANNELS, HEIGHT, WIDTH = 3, 8, 10
HALF = Normalisation((0.5, 0.5, 0.5), (0.25, 0.5, 1.0))
UNCHANGED = Normalisation((0, 0, 0), (1, 1, 1))


def network(channels: int = CHANNELS, normalisation: Normalisation | None = HALF, classes=()) -> MultiExitModel:
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(channels * HEIGHT * WIDTH, 4), nn.Linear(4, 2))
    example = torch.zeros(2, channels, HEIGHT, WIDTH)
    return attach_heads(backbone, ["1"], example=example, normalisation=normalisation, classes=classes)


def spec(channels: int = CHANNELS, normalisation: Normalisation | None = HALF, classes=()) -> InputSpec:
    return network(channels, normalisation, classes).input_spec


@pytest.fixture
def images() -> np.ndarray:
    return np.random.default_rng(0).integers(256, size=(5, HEIGHT, WIDTH, CHANNELS), dtype=np.uint8)


def unpacked(loader):
    """Return the first input and the labels of every batch."""
    return [(batch.inputs[0], batch.labels) for batch in loader]


def expected(images: np.ndarray) -> np.ndarray:
    scaled = torch.tensor(images).permute(0, 3, 1, 2).float() / 255
    return ((scaled - torch.tensor(HALF.mean)[:, None, None]) / torch.tensor(HALF.std)[:, None, None]).numpy()


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
def test_bytes_of_either_layout_are_normalised_as_the_network_says(layout, images, tmp_path):
    given = images if layout == "NHWC" else images.transpose(0, 3, 1, 2)
    np.savez(tmp_path / "data.npz", images=given, labels=[0, 1, 0, 1, 1])
    (one, labels), (two, _) = unpacked(load_data(tmp_path / "data.npz", spec(), batch_size=3))
    np.testing.assert_array_equal(np.concatenate([one, two]), expected(images))
    assert labels.tolist() == [0, 1, 0]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_floats_of_a_file_are_what_the_network_takes_as_floats_in_memory_are(dtype, images, tmp_path):
    taken, takes = np.array(expected(images), dtype, order="C"), spec()
    np.savez(tmp_path / "data.npz", images=taken, labels=[0, 1, 0, 1, 1])
    np.save(tmp_path / "images.npy", taken)
    table = pa.table({"image": pa.FixedShapeTensorArray.from_numpy_ndarray(taken), "label": [0, 1, 0, 1, 1]})
    parquet.write_table(table, tmp_path / "data.parquet")
    forms = [taken, torch.tensor(taken), *(tmp_path / name for name in ("data.npz", "images.npy", "data.parquet"))]
    for form in forms:
        for loader in (in_batches(form, takes), in_batches(form, takes, shuffle=False), load_data(form, takes)):
            (batch,) = batches(loader, takes, "the test")
            np.testing.assert_array_equal(np.asarray(batch.inputs[0]), expected(images))


@pytest.mark.parametrize("scale", [1, 255])
def test_floats_that_look_like_pixels_are_warned_of(scale, images, tmp_path):
    np.savez(tmp_path / "data.npz", images=images.transpose(0, 3, 1, 2) * np.float32(scale / 255))
    for form in (tmp_path / "data.npz", np.load(tmp_path / "data.npz")["images"]):
        with pytest.warns(UserWarning, match=rf"images are floats from 0 to {scale}, .* give bytes \(uint8\) or norm"):
            record(network(), form, progress=False)
        assert len(record(network(normalisation=Normalisation((0,) * 3, (1 / scale,) * 3)), form, progress=False)) == 5


def test_arrays_need_no_labels_and_grey_images_no_channel(tmp_path):
    grey = np.zeros((3, HEIGHT, WIDTH), np.uint8)
    np.savez(tmp_path / "data.npz", x=grey)
    table = record(
        network(1, Normalisation((0,), (1,))),
        load_data(tmp_path / "data.npz", spec(1, Normalisation((0,), (1,)))),
        progress=False,
    )
    assert len(table) == 3
    assert table.labels is None


@pytest.mark.parametrize("named", [(), ("dog", "cat")])
def test_a_folder_for_each_class_is_read_by_the_networks_own_names(named, images, tmp_path):
    for name, pixels in {"cat/one.png": images[0], "dog/deep/two.png": images[1], "dog/three.png": images[2]}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(tmp_path / name)
    (tmp_path / "dog" / "notes.txt").write_text("no image")
    ((pictures, labels),) = unpacked(load_data(tmp_path, spec(classes=named)))
    np.testing.assert_array_equal(pictures, expected(images[[0, 1, 2]]))
    assert labels.tolist() == ([1, 0, 0] if named else [0, 1, 1])


@pytest.mark.parametrize("named", [(), ("dog", "cat")])
@pytest.mark.parametrize("kind", ["npz", "npy"])
def test_names_of_classes_beside_arrays_are_the_networks_own(named, kind, images, tmp_path):
    names = np.array(["cat", "dog", "dog"])
    if kind == "npz":
        np.savez(path := tmp_path / "data.npz", images=images[:3], labels=names)
    else:
        path = tmp_path
        np.save(tmp_path / "images.npy", images[:3])
        np.save(tmp_path / "labels.npy", names)
    ((_, labels),) = unpacked(load_data(path, spec(classes=named)))
    assert labels.tolist() == ([1, 0, 0] if named else [0, 1, 1])
    with pytest.raises(BadInput, match="has a class 'cat' that the network does not know: dog, eel"):
        load_data(path, spec(classes=("dog", "eel")))


def test_pictures_of_any_size_and_mode_are_brought_to_the_networks(tmp_path):
    for name, size in {"tall": (5, 40), "wide": (90, 16), "large": (100, 80)}.items():
        (tmp_path / "a").mkdir(exist_ok=True)
        Image.new("RGBA" if name == "wide" else "L", size, 255 if name != "wide" else "white").save(
            tmp_path / "a" / f"{name}.png"
        )
    (tmp_path / "b").mkdir()
    ((pictures, _),) = unpacked(load_data(tmp_path, spec(normalisation=UNCHANGED)))
    assert pictures.shape == (3, CHANNELS, HEIGHT, WIDTH)
    np.testing.assert_array_equal(pictures, np.ones_like(pictures))


def test_a_torchvision_data_set_on_disk_is_read(tmp_path):
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part, shade in {"train": 255, "t10k": 0}.items():  # as Yann LeCun's files are
        pixels, labels = np.full((4, 28, 28), shade, np.uint8), np.arange(4, dtype=np.uint8) % 2
        sizes = b"".join(size.to_bytes(4, "big") for size in pixels.shape)
        (raw / f"{part}-images-idx3-ubyte").write_bytes(b"\x00\x00\x08\x03" + sizes + pixels.tobytes())
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(b"\x00\x00\x08\x01" + (4).to_bytes(4, "big") + labels.tobytes())
    for split, shade in {"train": 1.0, "test": 0.0}.items():
        ((pictures, labels),) = unpacked(load_data(f"mnist:{tmp_path}", spec(normalisation=UNCHANGED), split=split))
        assert pictures.shape == (4, CHANNELS, HEIGHT, WIDTH)
        assert pictures.unique().tolist() == [shade]
        assert labels.tolist() == [0, 1, 0, 1]


def test_augmented_images_are_flipped_and_moved_and_follow_the_seed(images, tmp_path):
    np.savez(tmp_path / "data.npz", images=np.repeat(images, 20, axis=0))
    data = load_data(tmp_path / "data.npz", spec(normalisation=UNCHANGED), augment=True)
    drawn = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        drawn.append(next(iter(data)).inputs[0])
    assert drawn[0].shape == (100, CHANNELS, HEIGHT, WIDTH)
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert len(drawn[0][:20].unique(dim=0)) > 5  # of one image


def test_workers_load_the_same(images, tmp_path):
    np.savez(tmp_path / "data.npz", images=images)
    (alone,), (helped,) = (load_data(tmp_path / "data.npz", spec(), workers=count) for count in (0, 1))
    assert np.array_equal(alone.inputs[0], helped.inputs[0].numpy())


def test_an_example_is_what_the_network_describes():
    assert example_of(network()).shape == (2, CHANNELS, HEIGHT, WIDTH)
    described = {name: {"shape": [2, 16], "dtype": "int64"} for name in ("input_ids", "attention_mask")}
    text = MultiExitModel([nn.Identity()], [nn.Identity()], input_names=tuple(described), recipe={"example": described})
    assert {name: tuple(tensor.shape) for name, tensor in example_of(text, 30).items()} == {
        "input_ids": (2, 30),
        "attention_mask": (2, 30),
    }
    with pytest.raises(BadInput, match="does not say what it takes"):
        example_of(MultiExitModel([nn.Identity()], [nn.Identity()]))


def test_loose_images_have_no_labels_and_are_known_by_their_files(images, tmp_path):
    for index, image in enumerate(images[:3]):
        Image.fromarray(image).save(tmp_path / f"{index}.png")
    data = load_data(tmp_path, spec(), batch_size=2)
    assert [len(batch) for batch in data] == [2, 1]
    assert names_of(data) == [str(tmp_path / f"{index}.png") for index in range(3)]
    (tmp_path / "class").mkdir()
    with pytest.raises(BadInput, match="both images and folders"):
        load_data(tmp_path, spec())


def bad(name: str, folder) -> tuple[str, MultiExitModel]:
    """A path to data that cannot be used, and the network."""
    path, model = folder / "data.npz", network()
    if name == "wrong size":
        np.savez(path, images=np.zeros((2, 9, 9, 3), np.uint8))
    elif name == "floats with channels last":
        np.savez(path, images=np.full((2, HEIGHT, WIDTH, CHANNELS), 0.5))
    elif name == "no images":
        np.savez(path, pictures=np.zeros(3))
    elif name == "no samples":
        np.savez(path, images=np.zeros((0, HEIGHT, WIDTH, CHANNELS), np.uint8), labels=np.zeros(0, np.int64))
    elif name == "pickled":
        np.savez(path, images=np.array([{}], dtype=object))
    elif name == "odd labels":
        np.savez(path, images=np.zeros((2, HEIGHT, WIDTH, CHANNELS), np.uint8), labels=[0.5, 1.0])
    elif name == "damaged":
        path.write_bytes(b"PK nonsense")
    elif name == "channels":
        np.savez(path, images=np.zeros((2, HEIGHT, WIDTH), np.uint8))
        model = network(1)
    elif name == "damaged picture":
        path = folder / "pictures"
        for each in "ab":
            (path / each).mkdir(parents=True)
            (path / each / "one.png").write_bytes(b"no picture")
    elif name == "empty folder":
        path = folder / "empty"
        path.mkdir()
    elif name in ("one class", "unknown class"):
        path = folder / "pictures"
        (path / "cat").mkdir(parents=True)
        Image.new("L", (8, 8)).save(path / "cat" / "one.png")
        model = network(classes=("dog", "bird") if name == "unknown class" else ())
    elif name == "text for images":
        path = folder / "lines.jsonl"
        path.write_text('{"text": "hello", "label": 0}\n')
    elif name == "unknown kind":
        path = folder / "data.txt"
        path.write_text("")
    elif name == "hugging face":
        path = folder / "saved"
        path.mkdir()
        (path / "dataset_info.json").write_text("{}")
    else:
        return {"no set": "cifar99:somewhere", "not there": f"cifar10:{folder}", "nowhere": "nowhere.npz"}[name], model
    return str(path), model


BAD = {
    "wrong size": (BadInput, r"shape \(9, 9, 3\) and the network takes \(3, 8, 10\)"),
    "floats with channels last": (BadInput, r"images of shape \(2, 8, 10, 3\) with their channels last"),
    "no images": (BadFile, "it has pictures; save np.savez"),
    "no samples": (BadInput, "has no samples"),
    "pickled": (BadFile, "damaged or holds objects"),
    "odd labels": (BadFile, "labels are float64"),
    "damaged": (BadFile, "it is damaged"),
    "channels": (BadInput, "normalises 3 channels and takes images of 1"),
    "damaged picture": (BadFile, "it is not a usable image"),
    "empty folder": (BadInput, "has no images"),
    "one class": (BadInput, r"has classes by name \(.*\), 1 of them, and the network has 2"),
    "unknown class": (BadInput, "class 'cat' that the network does not know: dog, bird"),
    "text for images": (BadInput, "the network does not take text but input_0 of shape"),
    "unknown kind": (BadInput, "is not a kind of data that alight reads"),
    "no set": (BadInput, "torchvision has no data set 'cifar99'"),
    "not there": (BadInput, "CIFAR10 is not in"),
    "nowhere": (FileNotFoundError, "there is no such file"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_data_get_an_error_that_says_what_to_do(name, tmp_path):
    kind, message = BAD[name]
    where, model = bad(name, tmp_path)
    with pytest.raises(kind, match=message):
        list(load_data(where, model.input_spec, split="train"))


def test_a_hugging_face_data_set_on_disk_is_read(tmp_path):
    pictures = [Image.new("RGB", (WIDTH, HEIGHT))] * 3
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    table = datasets.Dataset.from_dict({"image": pictures, "label": [0, 1, 0]}, features=features)
    datasets.DatasetDict({"train": table}).save_to_disk(tmp_path / "saved")
    for given in ({"split": "train"}, {}):
        where = tmp_path / "saved" if given else f"{tmp_path / 'saved'}[train]"
        ((images, labels),) = unpacked(load_data(where, spec(), **given))
        assert images.shape == (3, CHANNELS, HEIGHT, WIDTH)
        assert labels.tolist() == [0, 1, 0]
    with pytest.raises(BadInput, match=r"has the parts train: choose one, as in '.*saved\[train\]'"):
        load_data(tmp_path / "saved", spec())
    with pytest.raises(BadInput, match="has no part 'test': choose among train"):
        load_data(tmp_path / "saved", spec(), split="test")
    datasets.Dataset.from_dict({"sound": [1.0, 2.0]}).save_to_disk(tmp_path / "other")
    with pytest.raises(BadInput, match="has columns sound"):
        load_data(tmp_path / "other", spec())


@pytest.mark.parametrize("labels", [[4.8, 0.2], [[0, 1], [1]]])
def test_targets_that_are_not_classes_are_not_rounded_to_classes(labels, tmp_path):
    datasets.Dataset.from_dict({"text": ["a", "b"], "label": labels}).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(
        BadFile, match=r"the label of sample 0 is .*one class: several labels per sample .* a regression"
    ):
        load_data(tmp_path / "saved", spec())


def test_a_hugging_face_data_set_without_its_library_says_what_to_install(tmp_path, monkeypatch):
    where, model = bad("hugging face", tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(BadInput, match="datasets is not installed: pip install datasets"):
        load_data(where, model.input_spec)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["{"], "line 1 is not JSON"),
        ([json.dumps({"text": "a", "label": 0}), json.dumps({"label": 1})], "line 2 has no text"),
        ([], "it is empty"),
        ([json.dumps({"text": "a", "label": "x"}), json.dumps({"text": "b"})], "label of sample 1 is None, not a name"),
        (
            [json.dumps({"text": "a", "label": 1}), json.dumps({"text": "b", "label": 0.5})],
            "sample 1 is 0.5, not a name",
        ),
        ([json.dumps({"text": "a", "label": [0, 2]})], r"sample 0 is \[0, 2\].*several labels per sample need"),
    ],
)
def test_bad_lines_are_named(lines, message, tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(BadFile, match=message):
        load_data(path, TEXT)


TEXT = InputSpec((TensorSpec("input_ids", (None, None), "int64"),), ("input_ids",), num_classes=2)
PIXELS = np.random.default_rng(0).integers(0, 256, size=(5, 6, 7, 3), dtype=np.uint8)


def read_by_both(where) -> tuple[np.ndarray, np.ndarray]:
    """What a network in PyTorch and its export get of the data, once read by torch's loader, once without torch."""
    ours, theirs = exported_network().input_spec, Manifest.load(exported()).input_spec
    loaders = load_data(where, ours, shuffle=False, batch_size=3), load_data(where, theirs, batch_size=2, labels=False)
    return tuple(
        np.concatenate([np.asarray(batch.inputs[0]) for batch in batches(loader, each, "the test")])
        for loader, each in zip(loaders, (ours, theirs), strict=True)
    )


@pytest.mark.parametrize(
    "images",
    [PIXELS, PIXELS.transpose(0, 3, 1, 2), PIXELS.transpose(0, 3, 1, 2) / 100 - 1],
    ids=["last", "first", "floats"],
)
def test_arrays_are_read_for_an_export_as_for_the_network_bit_for_bit(images, tmp_path):
    np.savez(tmp_path / "images.npz", images=images, labels=np.zeros(5, int))
    ours, theirs = read_by_both(tmp_path / "images.npz")
    assert theirs.dtype == np.float32
    assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("depth", ["", "deep/er"])
def test_pictures_are_read_for_an_export_as_for_the_network_bit_for_bit(depth, tmp_path):
    (tmp_path / depth).mkdir(parents=True, exist_ok=True)
    for name, pixels in zip("edcba", PIXELS, strict=True):
        Image.fromarray(pixels).resize((20, 30)).save(tmp_path / depth / f"{name}.png")
    samples = load_data(tmp_path, Manifest.load(exported()).input_spec, batch_size=2, labels=False)
    assert len(samples) == 3
    assert [name[-5:] for name in names_of(samples)] == ["a.png", "b.png", "c.png", "d.png", "e.png"]
    if not depth:  # with labels, a folder has the name of a class
        ours, theirs = read_by_both(tmp_path)
        assert np.array_equal(ours, theirs)


def test_without_labels_inputs_are_read_whatever_the_labels_are(images, tmp_path):
    np.savez(tmp_path / "data.npz", images=images, labels=[0.5] * 5)
    (batch,) = load_data(tmp_path / "data.npz", spec(), labels=False)
    np.testing.assert_array_equal(batch.inputs[0], expected(images))
    assert batch.labels is None


def test_pictures_are_read_when_their_batch_is_asked_for(tmp_path):
    for index, pixels in enumerate(PIXELS[:3]):
        Image.fromarray(pixels).save(tmp_path / f"{index}.png")
    (tmp_path / "2.png").write_bytes(b"\x89PNG")
    loaded = iter(load_data(tmp_path, Manifest.load(exported()).input_spec, batch_size=2))
    assert len(next(loaded)) == 2
    with pytest.raises(BadFile, match=r"2\.png: it is not a usable image"):
        next(loaded)
