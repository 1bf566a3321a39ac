"""One picture pipeline: what a network in PyTorch and its export get is the same, and what torch would compute."""

import numpy as np
import pytest
import torch
from exported import folder, network
from PIL import Image

from alight.data.batches import as_inputs, fitted
from alight.data.preprocess import InputSpec, Normalisation, TensorSpec, first_unusable, image_batch
from alight.engine.manifest import Manifest
from alight.errors import BadInput

PIXELS = np.random.default_rng(0).integers(0, 256, size=(5, 6, 7, 3), dtype=np.uint8)
FLOATS = np.random.default_rng(0).normal(size=(4, 3, 6, 7))
MEAN, STD = network().normalisation.mean, network().normalisation.std


def by_torch(pixels):
    """Bytes, channels last, as torch normalises them."""
    scaled = torch.from_numpy(np.ascontiguousarray(pixels)).permute(0, 3, 1, 2).float() / 255
    return ((scaled - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]).numpy()


def resized(pixels, size=(30, 20)):
    """Pictures of another size, and what is left of them at the network's: the middle of the resized ones."""
    pictures = [Image.fromarray(each).resize(size) for each in pixels]
    middle = [np.asarray(each.resize((9, 6), resample=Image.Resampling.BILINEAR))[:, 1:8] for each in pictures]
    return pictures, np.stack(middle)


FORMS = {
    "bytes": (PIXELS, by_torch(PIXELS)),
    "channels first": (PIXELS.transpose(0, 3, 1, 2), by_torch(PIXELS)),
    "tensor": (torch.from_numpy(PIXELS), by_torch(PIXELS)),
    "tuple": ((PIXELS,), by_torch(PIXELS)),
    "list": ([*PIXELS], by_torch(PIXELS)),
    "list of tensors": ([*torch.from_numpy(PIXELS)], by_torch(PIXELS)),
    "pictures": ([Image.fromarray(each) for each in PIXELS], by_torch(PIXELS)),
    "larger pictures": (resized(PIXELS)[0], by_torch(resized(PIXELS)[1])),
    "one picture": (Image.fromarray(PIXELS[0]), by_torch(PIXELS[:1])),
    "float64": (FLOATS, FLOATS.astype(np.float32)),
    "strided": (FLOATS.astype(np.float32)[:, ::-1], FLOATS.astype(np.float32)[:, ::-1]),
    "float32": (FLOATS.astype(np.float32), FLOATS.astype(np.float32)),
    "float32 tensor": (torch.from_numpy(FLOATS.astype(np.float32)), FLOATS.astype(np.float32)),
}


@pytest.mark.parametrize("form", FORMS)
def test_torch_and_onnx_get_the_same_images_and_what_torch_would_compute_bit_for_bit(form):
    inputs, expected = FORMS[form]
    exported = Manifest.load(folder()).input_spec
    (ours,) = as_inputs(inputs, network().input_spec)
    (theirs,) = fitted(as_inputs(inputs, exported), exported)
    assert theirs.dtype == np.float32
    assert theirs.flags["C_CONTIGUOUS"]
    assert np.array_equal(theirs, expected)
    assert np.array_equal(np.asarray(ours), expected)


def test_the_network_and_its_export_describe_what_they_take_alike():
    ours, theirs = network().input_spec, Manifest.load(folder()).input_spec
    assert ours == theirs
    assert ours.image_shape == (3, 6, 7)


def test_mean_and_deviation_are_applied_in_single_precision_for_every_byte():
    every = np.arange(256, dtype=np.uint8).reshape(1, 16, 16)
    spec = InputSpec(
        (TensorSpec("images", (None, 1, 16, 16), "float32"),), normalisation=Normalisation((0.1307,), (0.3081,))
    )
    expected = (torch.arange(256, dtype=torch.uint8).float() / 255 - torch.tensor(0.1307)) / torch.tensor(0.3081)
    assert np.array_equal(image_batch(every, spec).ravel(), expected.numpy())


def test_floats_are_copied_and_not_normalised():
    images = np.full((2, 3, 6, 7), 0.5, dtype=np.float32)
    made = image_batch(images, network().input_spec)
    assert (made == 0.5).all()
    assert not np.shares_memory(made, images)


def test_negative_tokens_are_found_since_onnx_would_count_them_from_the_end():
    assert first_unusable((np.array([[1, 2], [3, -1]]),)) == 1
    assert first_unusable((np.array([[1, 2], [3, 1]]),)) is None


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_the_first_row_with_an_unusable_number_is_found_in_any_input(bad):
    first, second = np.zeros((4, 3), np.float32), np.zeros((4, 2), np.float32)
    first[3, 0] = second[2, 1] = bad
    assert first_unusable((first, second)) == 2


def test_large_numbers_are_not_taken_for_infinity():
    assert first_unusable((np.full((2, 4), 3e38, dtype=np.float32),)) is None


BAD = {
    "another size": (PIXELS[:, :4], r"the data has images of shape \(4, 7, 3\) and the network takes \(3, 6, 7\)"),
    "unlike sizes": ([PIXELS[0], PIXELS[0, :4]], r"images of shape \(4, 7, 3\)"),
}


@pytest.mark.parametrize("case", BAD)
def test_images_that_cannot_be_used_get_one_sentence(case):
    images, message = BAD[case]
    with pytest.raises(BadInput, match=message):
        image_batch(images, network().input_spec)


def test_a_normalisation_of_other_channels_is_refused():
    spec = InputSpec(network().input_spec.tensors, normalisation=Normalisation((0.5,), (0.5,)))
    with pytest.raises(BadInput, match="normalises 1 channels and takes images of 3"):
        image_batch(PIXELS, spec)
