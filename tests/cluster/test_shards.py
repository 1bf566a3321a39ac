"""Shards: every sample is in one of them, they are the same every time, in any file system."""

import io
import pickle

import numpy as np
import pyarrow as pa
import pytest
from networks import as_arrays, as_pictures, as_table
from PIL import Image
from pyarrow import fs, parquet

from alight import from_timm
from alight.cluster.shards import ArrayFile, column_values, open_data
from alight.cluster.stores import Store, public_name
from alight.errors import BadFile, BadInput

ROWS, COUNT = 16, 70


@pytest.fixture(scope="module")
def model():
    return from_timm("test_resnet", num_classes=10, image_size=8, count=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The same images in every form that can be read."""
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    arrays = {
        "images": rng.integers(256, size=(COUNT, 3, 8, 8), dtype=np.uint8),
        "labels": np.arange(COUNT) * 10 // COUNT,  # by class, as folders are
    }
    np.savez(folder / "all.npz", **arrays)
    as_arrays(folder / "all.npz", folder / "arrays")
    as_pictures(folder / "all.npz", folder / "pictures")
    as_table(folder / "all.npz", folder / "table", rows=6)
    return folder


def read(data):
    """Return images and labels of all shards, each read as if on another machine."""
    found = []
    for shard in map(pickle.loads, map(pickle.dumps, data.shards)):
        samples = list(shard.samples())
        assert len(samples) == len(shard)
        found += samples
    images = [np.asarray(image) for image, _ in found]
    return np.stack([each.transpose(2, 0, 1) if each.shape[-1] == 3 else each for each in images]), found


@pytest.mark.parametrize("name", ["arrays", "pictures", "table", "table/a.parquet"])
def test_every_sample_is_in_one_shard_in_its_order(name, folder, model):
    data = open_data(str(folder / name), model, ROWS)
    stops = [0, *(shard.stop for shard in data.shards)]
    assert [shard.start for shard in data.shards] == stops[:-1]
    assert [shard.index for shard in data.shards] == list(range(len(data.shards)))
    with np.load(folder / "all.npz") as arrays:
        images, labels = arrays["images"][: len(data)], arrays["labels"][: len(data)]
    assert len(data) == (COUNT // 2 if name.endswith("a.parquet") else COUNT)
    seen, found = read(data)
    assert np.array_equal(seen, images)
    assert [label for _, label in found] == labels.tolist()


def test_a_partition_of_parquet_is_whole_row_groups(folder, model):
    data = open_data(str(folder / "table"), model, ROWS)
    assert [len(shard) for shard in data.shards] == [
        18,
        17,
        18,
        17,
    ]  # three groups of 6, and the ends of files


def test_shards_are_the_same_until_a_file_changes(folder, model, tmp_path):
    (tmp_path / "pictures").symlink_to(folder / "pictures")
    first, second = (open_data(str(tmp_path / "pictures"), model, ROWS) for _ in range(2))
    assert (first.content, first.shards) == (second.content, second.shards)
    array = tmp_path / "copy.npy"
    array.write_bytes((folder / "arrays" / "images.npy").read_bytes())
    before = open_data(str(array), model, ROWS).content
    np.save(array, np.zeros((9, 3, 8, 8), dtype=np.uint8))
    assert open_data(str(array), model, ROWS).content != before


@pytest.mark.parametrize("kind", ["uri", "fsspec", "subtree"])
def test_any_file_system_of_pyarrow_can_be_read(kind, folder, model):
    where = {
        "uri": f"file://{folder}",
        "fsspec": f"fsspec+file://{folder}",
        "subtree": Store(fs.SubTreeFileSystem(str(folder), fs.LocalFileSystem()), ""),
    }[kind]
    for name in ("arrays", "pictures", "table"):
        there = where / name if isinstance(where, Store) else f"{where}/{name}"
        images, _ = read(open_data(there, model, ROWS))
        assert len(images) == COUNT


def test_names_of_samples_leave_out_the_settings_of_a_uri(folder, model):
    data = open_data(f"file://{folder}/pictures?region=here", model, ROWS)
    assert data.where == f"file://{folder}/pictures"
    assert data.shards[0].names()[0] == f"file://{folder}/pictures/0/00000.png"
    assert public_name(f"s3://key:secret@{folder}?region=here") == f"s3://{folder}"


def test_an_unknown_uri_is_refused():
    with pytest.raises(BadInput, match=r"nonsense://x is not a URI that pyarrow supports"):
        Store.at("nonsense://x")


def test_a_truncated_array_is_named_with_the_row(folder, tmp_path):
    path = tmp_path / "images.npy"
    path.write_bytes((folder / "arrays" / "images.npy").read_bytes()[:-5])
    array = ArrayFile.open(Store.at(path))
    assert len([*array.rows(3, 60)]) == 57
    with pytest.raises(BadFile, match="it ends before row 70"):
        list(array.rows(60, COUNT))


def png(image):
    file = io.BytesIO()
    Image.fromarray(image).save(file, "png")
    return file.getvalue()


def test_columns_hold_images_in_four_forms_and_text():
    images = np.random.default_rng(0).integers(256, size=(2, 8, 8, 3), dtype=np.uint8)
    files = [png(image) for image in images]
    ways = [
        pa.array(files),
        pa.array([{"bytes": file, "path": "a.png"} for file in files]),
        pa.array(images.tolist(), pa.list_(pa.list_(pa.list_(pa.uint8())))),
        pa.FixedShapeTensorArray.from_numpy_ndarray(images),
    ]
    for column in ways:
        assert np.array_equal(np.stack([np.asarray(value) for value in column_values(column, "x")]), images)
    assert [*column_values(pa.array(["hello"]), "x")] == ["hello"]
    with pytest.raises(BadFile, match="a row holds nothing where an image or text should be"):
        list(column_values(pa.array([None]), "x"))


def test_labels_by_name_need_a_network_that_knows_them(tmp_path, model):
    model.classes = tuple(f"digit {index}" for index in range(10))
    table = pa.table({"text": ["a", "b"], "label": ["digit 3", "letter"]})
    parquet.write_table(table, tmp_path / "texts.parquet")
    data = open_data(str(tmp_path / "texts.parquet"), model, ROWS)
    samples = data.shards[0].samples()
    assert next(samples) == ("a", 3)
    assert "a label 'letter', which the network does not know" in next(samples).reason
    model.classes = ()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: (folder / "x.npy").write_bytes(b"nonsense"), r"not a complete \.npy file"),
        (lambda folder: [np.save(folder / name, np.zeros(3)) for name in ("a", "b")], r"has a, b: save images\.npy"),
        (lambda folder: [np.save(folder / name, np.zeros(3)) for name in ("images", "labels")], r"shape \(3,\)"),
        (lambda folder: np.save(folder / "x.npy", np.array(["a", None])), "holds objects"),
        (lambda folder: np.savez(folder / "x.npz", images=np.zeros(3)), r"no images .*np\.save writes \.npy"),
        (lambda folder: (folder / "x.parquet").write_bytes(b"PAR1 nonsense PAR1"), "not a complete Parquet"),
        (lambda folder: parquet.write_table(pa.table({"a": [1]}), folder / "x.parquet"), "name one 'image' or 'text'"),
        (lambda folder: (folder / "x.txt").write_text("a"), "has no images"),
    ],
)
def test_unreadable_data_is_refused_with_its_reason(make, message, tmp_path, model):
    make(tmp_path)
    with pytest.raises((BadFile, BadInput), match=message):
        open_data(str(tmp_path), model, ROWS)
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        open_data(str(tmp_path / "nothing"), model, ROWS)
