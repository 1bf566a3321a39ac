"""Shards: every sample in one of them, the same ones every time, from any file system."""

import io
import pickle

import numpy as np
import pyarrow as pa
import pytest
from networks import as_pictures, as_table
from PIL import Image
from pyarrow import fs, parquet

from alight import from_timm
from alight.cluster.archives import Member
from alight.cluster.columns import values_of
from alight.cluster.shards import open_data
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
    np.savez(folder / "stored.npz", **arrays)
    np.savez_compressed(folder / "packed.npz", **arrays)
    as_pictures(folder / "stored.npz", folder / "pictures")
    as_table(folder / "stored.npz", folder / "table", rows=6)
    return folder


def read(data):
    """Images and labels of all shards, each read as if on another machine."""
    opened, found = {}, []
    for shard in map(pickle.loads, map(pickle.dumps, data.shards)):
        samples = list(shard.samples(opened))
        assert len(samples) == shard.stop - shard.start
        found += samples
    images = [np.asarray(image) for image, _ in found]
    return np.stack([each.transpose(2, 0, 1) if each.shape[-1] == 3 else each for each in images]), found


@pytest.mark.parametrize("name", ["stored.npz", "packed.npz", "pictures", "table", "table/a.parquet"])
def test_every_sample_is_in_one_shard_in_its_order(name, folder, model):
    data = open_data(str(folder / name), model, ROWS)
    stops = [0, *(shard.stop for shard in data.shards)]
    assert [shard.start for shard in data.shards] == stops[:-1]
    assert [shard.index for shard in data.shards] == list(range(len(data.shards)))
    with np.load(folder / "stored.npz") as arrays:
        images, labels = arrays["images"][: len(data)], arrays["labels"][: len(data)]
    assert len(data) == (COUNT // 2 if name.endswith("a.parquet") else COUNT)
    seen, found = read(data)
    assert np.array_equal(seen, images)
    assert [label for _, label in found] == labels.tolist()


def test_a_partition_of_parquet_is_whole_row_groups(folder, model):
    data = open_data(str(folder / "table"), model, ROWS)
    assert [shard.stop - shard.start for shard in data.shards] == [18, 17, 18, 17]  # three groups of 6, and the rests


def test_shards_are_the_same_until_a_file_changes(folder, model, tmp_path):
    (tmp_path / "pictures").symlink_to(folder / "pictures")
    first, second = (open_data(str(tmp_path / "pictures"), model, ROWS) for _ in range(2))
    assert (first.content, first.shards) == (second.content, second.shards)
    archive = tmp_path / "copy.npz"
    archive.write_bytes((folder / "stored.npz").read_bytes())
    before = open_data(str(archive), model, ROWS).content
    np.savez(archive, images=np.zeros((9, 3, 8, 8), dtype=np.uint8))
    assert open_data(str(archive), model, ROWS).content != before


@pytest.mark.parametrize("kind", ["uri", "fsspec", "subtree"])
def test_any_file_system_of_pyarrow_will_do(kind, folder, model):
    where = {
        "uri": f"file://{folder}",
        "fsspec": f"fsspec+file://{folder}",
        "subtree": Store(fs.SubTreeFileSystem(str(folder), fs.LocalFileSystem()), ""),
    }[kind]
    for name in ("stored.npz", "pictures", "table"):
        there = where / name if isinstance(where, Store) else f"{where}/{name}"
        images, _ = read(open_data(there, model, ROWS))
        assert len(images) == COUNT


def test_samples_of_a_uri_are_named_without_its_settings(folder, model):
    data = open_data(f"file://{folder}/pictures?region=here", model, ROWS)
    assert data.where == f"file://{folder}/pictures"
    assert data.shards[0].names()[0] == f"file://{folder}/pictures/0/00000.png"
    assert public_name(f"s3://key:secret@{folder}?region=here") == f"s3://{folder}"


def test_a_place_that_nobody_knows_is_refused():
    with pytest.raises(BadInput, match=r"nonsense://x is no place that pyarrow knows"):
        Store.at("nonsense://x")


def test_a_compressed_array_is_read_once_by_who_asks_in_order(folder):
    file = Store.at(folder / "packed.npz")
    member = Member(file, "images")
    restarts = []
    rewind = member._file._orig_compress_start  # where zipfile begins anew
    read_rows = [member.rows(start, start + 5) for start in range(0, COUNT, 5)]
    restarts.append(member._file._orig_compress_start == rewind)
    with np.load(folder / "packed.npz") as arrays:
        assert np.array_equal(np.concatenate(read_rows), arrays["images"])
        assert np.array_equal(member.rows(3, 4), arrays["images"][3:4])  # backwards works, too
    assert restarts == [True]


def png(image):
    file = io.BytesIO()
    Image.fromarray(image).save(file, "png")
    return file.getvalue()


def test_columns_hold_images_in_many_ways():
    images = np.random.default_rng(0).integers(256, size=(2, 8, 8, 3), dtype=np.uint8)
    files = [png(image) for image in images]
    ways = [
        pa.array(files),
        pa.array([{"bytes": file, "path": "a.png"} for file in files]),
        pa.array(images.tolist(), pa.list_(pa.list_(pa.list_(pa.uint8())))),
        pa.FixedShapeTensorArray.from_numpy_ndarray(images),
    ]
    for column in ways:
        assert np.array_equal(np.stack([np.asarray(value) for value in values_of(column, "x")]), images)
    assert [*values_of(pa.array(["hello"]), "x")] == ["hello"]
    with pytest.raises(BadFile, match="a row holds nothing where an image or text should be"):
        list(values_of(pa.array([None]), "x"))


def test_labels_by_name_need_a_network_that_knows_them(tmp_path, model):
    model.classes = tuple(f"digit {index}" for index in range(10))
    table = pa.table({"text": ["a", "b"], "label": ["digit 3", "letter"]})
    parquet.write_table(table, tmp_path / "texts.parquet")
    data = open_data(str(tmp_path / "texts.parquet"), model, ROWS)
    assert data.kind == "text"
    samples = data.shards[0].samples({})
    assert next(samples) == ("a", 3)
    with pytest.raises(BadFile, match="a label 'letter', which the network does not know"):
        next(samples)
    model.classes = ()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: (folder / "x.npz").write_bytes(b"PK nonsense"), "it is damaged"),
        (lambda folder: np.savez(folder / "x.npz", other=np.zeros(3)), "it has other; save images"),
        (lambda folder: np.savez(folder / "x.npz", images=np.zeros((3, 2)), labels=np.zeros(3)), r"shape \(3,\)"),
        (lambda folder: np.savez(folder / "x.npz", images=np.array(["a", None])), "holds objects"),
        (lambda folder: (folder / "x.parquet").write_bytes(b"PAR1 nonsense PAR1"), "no whole Parquet"),
        (lambda folder: parquet.write_table(pa.table({"a": [1]}), folder / "x.parquet"), "name one 'image' or 'text'"),
        (lambda folder: (folder / "x.txt").write_text("a"), "has no images"),
    ],
)
def test_what_cannot_be_read_is_told_in_a_line(make, message, tmp_path, model):
    make(tmp_path)
    where = next(tmp_path.iterdir())
    with pytest.raises((BadFile, BadInput), match=message):
        open_data(str(where if where.suffix == ".npz" else tmp_path), model, ROWS)
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        open_data(str(tmp_path / "nothing"), model, ROWS)
