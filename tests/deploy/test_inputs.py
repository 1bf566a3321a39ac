"""Inputs become the arrays that a network trained in PyTorch was given, to the last bit."""

import numpy as np
import pytest
import torch
from exported import folder, network
from PIL import Image

from alight.data.batches import as_inputs
from alight.deploy.inputs import admit, first_unusable
from alight.engine.manifest import Described, Manifest
from alight.errors import BadInput

PIXELS = np.random.default_rng(0).integers(0, 256, size=(5, 6, 7, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def manifest():
    return Manifest.load(folder())


@pytest.mark.parametrize(
    "inputs",
    [
        PIXELS,
        PIXELS.transpose(0, 3, 1, 2),
        [*PIXELS],
        [Image.fromarray(each) for each in PIXELS],
        [Image.fromarray(each).resize((30, 20)) for each in PIXELS],
        Image.fromarray(PIXELS[0]),
        np.random.default_rng(0).normal(size=(4, 3, 6, 7)),
        np.random.default_rng(0).normal(size=(4, 3, 6, 7)).astype(np.float32)[:, ::-1],
    ],
    ids=["bytes", "channels first", "list", "pictures", "larger pictures", "one picture", "float64", "strided"],
)
def test_images_are_what_torch_makes_of_them_to_the_last_bit(inputs, manifest):
    whole = np.ascontiguousarray(inputs) if isinstance(inputs, np.ndarray) else inputs  # torch takes no such strides
    expected = as_inputs(whole, network()).numpy()
    (found,) = admit(inputs, manifest)
    assert found.dtype == np.float32
    assert found.flags["C_CONTIGUOUS"]
    assert np.array_equal(found, expected)


def test_tensors_are_taken_too(manifest):
    assert np.array_equal(admit(torch.from_numpy(PIXELS), manifest)[0], admit(PIXELS, manifest)[0])


TEXT = Manifest(
    "onnx",
    "",
    ("end",),
    (Described("input_ids", (None, None), "int64"), Described("attention_mask", (None, None), "int64")),
    ("input_ids", "attention_mask"),
    (),
    "",
)


def test_texts_come_by_name_or_in_order_with_any_whole_numbers():
    ids, mask = np.arange(6, dtype=np.int32).reshape(2, 3), np.ones((2, 3), dtype=bool)
    batch = {"input_ids": ids, "attention_mask": mask, "token_type_ids": 0 * ids, "labels": [0, 1]}
    for given in (batch, (ids, mask), [ids, mask]):
        found = admit(given, TEXT)
        assert [each.dtype for each in found] == [np.int64, np.int64]
        assert np.array_equal(found[0], ids)


@pytest.mark.parametrize(
    ("batch", "told"),
    [
        ({"input_ids": np.zeros((2, 3), int)}, "the network takes"),
        ({"input_ids": np.zeros((2, 3)), "attention_mask": np.ones((2, 3), int)}, "array of float64"),
        ({"input_ids": np.zeros((2, 3), int), "attention_mask": np.ones((1, 3), int)}, r"\[1, 2\] samples"),
        (
            {name: np.ones((2, 3), int) for name in ("input_ids", "attention_mask", "token_type_ids")},
            "pairs of texts",
        ),
    ],
)
def test_texts_that_do_not_fit_are_refused(batch, told):
    with pytest.raises(BadInput, match=told):
        admit(batch, TEXT)


def test_negative_tokens_are_found_since_onnx_would_count_them_from_the_end():
    assert first_unusable((np.array([[1, 2], [3, -1]]),)) == 1
    assert first_unusable((np.array([[1, 2], [3, 1]]),)) is None


def test_large_numbers_are_no_infinity():
    assert first_unusable((np.full((2, 4), 3e38, dtype=np.float32),)) is None


def test_a_plain_array_is_taken_as_it_is(manifest):
    array = np.zeros((2, 3, 6, 7), dtype=np.float32)
    assert admit(array, manifest)[0] is array
