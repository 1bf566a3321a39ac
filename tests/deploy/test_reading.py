"""Data on disk is read without PyTorch as it is read with it."""

import json

import numpy as np
import pytest
from exported import folder, network
from PIL import Image

from alight.data.formats import load_data
from alight.deploy.inputs import admit
from alight.deploy.reading import read_data
from alight.engine.manifest import Manifest
from alight.errors import BadFile, BadInput

PIXELS = np.random.default_rng(0).integers(0, 256, size=(5, 6, 7, 3), dtype=np.uint8)


def read(where):
    manifest = Manifest.load(folder())
    samples = read_data(where, folder(), manifest, batch_size=2, max_tokens=8)
    return samples, np.concatenate([admit(batch, manifest)[0] for batch in samples])


@pytest.mark.parametrize(
    "images", [PIXELS, PIXELS.transpose(0, 3, 1, 2), PIXELS / 255.0], ids=["last", "first", "0..1"]
)
def test_arrays_are_read_as_torch_reads_them(images, tmp_path):
    np.savez(tmp_path / "images.npz", images=images, labels=np.zeros(5, int))
    samples, found = read(tmp_path / "images.npz")
    expected = np.concatenate([batch[0].numpy() for batch in load_data(tmp_path / "images.npz", network())])
    assert len(samples) == 3
    assert np.array_equal(found, expected)


def test_pictures_are_read_with_their_names(tmp_path):
    for name, pixels in zip("edcba", PIXELS, strict=True):
        Image.fromarray(pixels).resize((20, 30)).save(tmp_path / f"{name}.png")
    samples, found = read(tmp_path)
    expected = np.concatenate([batch.numpy() for batch in load_data(tmp_path, network())])
    assert [name[-5:] for name in samples.names] == ["a.png", "b.png", "c.png", "d.png", "e.png"]
    assert np.array_equal(found, expected)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("broken.npz", b"PK", "it is damaged"),
        ("other.csv", b"a,b", "no kind of data that is read here"),
        ("lines.jsonl", json.dumps({"words": "no"}).encode(), "line 1 has no text"),
        ("empty.jsonl", b"", "it is empty"),
        ("broken.jsonl", b"{", "line 1 is no JSON object"),
    ],
)
def test_what_cannot_be_read_is_told(name, content, told, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises((BadFile, BadInput), match=told):
        read(tmp_path / name)


def test_a_broken_image_and_an_empty_folder_are_named(tmp_path):
    with pytest.raises(BadInput, match="has no image"):
        read(tmp_path)
    (tmp_path / "broken.png").write_bytes(b"\x89PNG")
    with pytest.raises(BadFile, match=r"broken\.png: it is no whole image"):
        read(tmp_path)
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "nowhere")


def test_numbers_outside_of_0_to_1_are_refused(tmp_path):
    np.savez(tmp_path / "images.npz", images=PIXELS.astype(float))
    with pytest.raises(BadInput, match="give bytes"):
        read(tmp_path / "images.npz")
