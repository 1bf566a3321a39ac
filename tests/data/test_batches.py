"""Data in whatever form people have it: the same samples give the same table, answers and training."""

import sys
import threading

import numpy as np
import pytest
import torch
from digits import digits, network
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from alight import Normalisation, Predictor, TrainingSettings, attach_heads, record, train_heads
from alight.data.batches import Batch, as_batch, as_inputs, as_tensor, fitted, in_batches, prefetch, split_labels
from alight.data.preprocess import InputSpec, TensorSpec
from alight.errors import BadInput
from alight.networks.store import fingerprint
from alight.policies.policy import Threshold

IMAGES, LABELS = digits()[1][:40]  # (40, 1, 8, 8) in 0..1
BYTES = (255 * IMAGES).round().to(torch.uint8)  # (40, 1, 8, 8)
PICTURES = [Image.fromarray(each[0].numpy()) for each in BYTES]
MEAN, STD = 0.3, 0.4
TAKEN = (BYTES.float() / 255 - MEAN) / STD  # what the network takes
NOTHING = InputSpec()  # of a network that was built by hand


class Pictures(Dataset):
    """A data set as torchvision's are: a picture and its class."""

    def __len__(self):
        return len(PICTURES)

    def __getitem__(self, index):
        return PICTURES[index], int(LABELS[index])


def model():
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 8, 3), nn.Flatten(), nn.Linear(128, 10))
    made = attach_heads(backbone, after=["1"], num_classes=10, example=torch.zeros(1, 1, 8, 8))
    made.normalisation = Normalisation((MEAN,), (STD,))
    return made.eval()


SPEC = model().input_spec
DATA = {
    "loader": DataLoader(TensorDataset(TAKEN, LABELS), 16),
    "list of batches": [(TAKEN[:30], LABELS[:30]), (TAKEN[30:], LABELS[30:])],
    "list of batches of bytes": [(BYTES[:30], LABELS[:30]), (BYTES[30:].numpy(), LABELS[30:].numpy())],
    "list of batches of pictures": [(PICTURES[:30], LABELS[:30].tolist()), [PICTURES[30:], LABELS[30:]]],
    "data set": TensorDataset(TAKEN, LABELS),
    "data set of pictures": Pictures(),
    "tensors": (TAKEN, LABELS),
    "arrays": (TAKEN.numpy(), LABELS.numpy()),
    "arrays of doubles": (TAKEN.double().numpy(), LABELS.numpy()),
    "dict": {"images": TAKEN.numpy(), "labels": LABELS.numpy()},
    "dict of lists": {"images": TAKEN.tolist(), "labels": LABELS.tolist()},
    "bytes": (BYTES, LABELS),
    "bytes with channels last": (BYTES.permute(0, 2, 3, 1).numpy(), LABELS.numpy()),
    "list of pictures and labels": [(picture, int(label)) for picture, label in zip(PICTURES, LABELS, strict=True)],
    "list of images and labels": list(zip(TAKEN, LABELS.tolist(), strict=True)),
}


@pytest.mark.parametrize("form", DATA)
def test_a_recording_is_the_same_from_any_form_of_data(form):
    expected = record(model(), DATA["loader"], progress=False)
    found = record(model(), DATA[form], batch_size=16, progress=False)
    np.testing.assert_array_equal(found.labels, expected.labels)
    np.testing.assert_array_equal(found.predictions, expected.predictions)
    np.testing.assert_allclose(found.scores, expected.scores, atol=1e-5)


UNLABELLED = {
    "tensor": TAKEN,
    "array": TAKEN.numpy(),
    "array of doubles": TAKEN.double().numpy(),
    "bytes": BYTES,
    "array of bytes with channels last": BYTES.permute(0, 2, 3, 1).numpy(),
    "list of pictures": PICTURES,
    "list of images": list(TAKEN),
    "list of arrays": list(TAKEN.numpy()),
    "list of arrays of bytes": list(BYTES.numpy()),
}


def predictor_of(network):
    """One under which half of the images leave early, no score being near the threshold."""
    scores = np.sort(record(network, TAKEN, progress=False).scores[:, 0])
    middle = np.argmax(np.diff(scores)[10:30]) + 10
    threshold = Threshold(thresholds=(scores[middle : middle + 2].mean(),), costs=(1.0, 3.0))
    return Predictor(network, threshold, batch_size=16)


@pytest.mark.parametrize("form", UNLABELLED)
def test_a_predictor_answers_any_form_of_images_alike(form):
    predictor = predictor_of(model())
    expected = predictor(TAKEN)
    assert 0 < expected.exit_shares[0] < 1
    for found in (predictor(UNLABELLED[form]), predictor.run(UNLABELLED[form], progress=False)):
        np.testing.assert_array_equal(found.predictions, expected.predictions)
        np.testing.assert_array_equal(found.exits, expected.exits)
    assert sum(len(answers.samples) for answers in predictor.stream(UNLABELLED[form])) == len(TAKEN)


def test_one_picture_is_a_batch_of_one():
    predictor = predictor_of(model())
    assert predictor(PICTURES[3]).predictions == predictor(TAKEN[3:4]).predictions


@pytest.mark.parametrize("form", ["tensors", "arrays", "data set", "list of pictures and labels"])
def test_training_shuffles_what_comes_without_a_loader_and_can_be_repeated(form):
    networks = [model() for _ in range(3)]
    for each, seed in zip(networks, (0, 0, 1), strict=True):
        settings = TrainingSettings(mode="joint", epochs=2, seed=seed)
        train_heads(each, DATA[form], settings, batch_size=16, progress=False)
    first, again, other = map(fingerprint, networks)
    assert first == again
    assert first != other


@pytest.mark.parametrize("form", ["arrays of doubles", "bytes", "data set of pictures", "list of pictures and labels"])
def test_training_draws_the_same_batches_from_any_form_of_data(form):
    drawn = []
    for data in (TensorDataset(TAKEN, LABELS), DATA[form]):
        torch.manual_seed(5)
        drawn.append([as_batch(batch, SPEC).to("cpu") for batch in in_batches(data, SPEC, 16, shuffle=True)])
    for expected, found in zip(*drawn, strict=True):
        assert torch.equal(found.inputs[0], expected.inputs[0])
        assert torch.equal(found.labels, expected.labels)


def test_training_takes_the_same_forms_for_validation():
    settings = TrainingSettings(mode="joint", epochs=1)
    history = train_heads(model(), DATA["tensors"], settings, validation=DATA["arrays"], batch_size=16, progress=False)
    assert all(each is not None for each in history.epochs[-1].validation_accuracies)


def test_what_comes_in_batches_stays_unchanged():
    for form in ("loader", "list of batches"):
        assert in_batches(DATA[form], SPEC) is DATA[form]
    stream = iter(DATA["loader"])
    assert in_batches(stream, SPEC) is stream
    assert in_batches([TAKEN[:20], TAKEN[20:]], NOTHING) is not TAKEN


@pytest.mark.parametrize("shuffle", [None, False, True])
@pytest.mark.parametrize("form", ["arrays", "list of images and labels", "data set"])
def test_a_loader_knows_how_many_batches_it_gives_and_starts_anew(form, shuffle):
    loader = in_batches(DATA[form], SPEC, 16, shuffle=shuffle)
    assert len(loader) == 3
    for _ in range(2):
        assert [len(batch.labels) for batch in loader] == [16, 16, 8]


def test_bytes_are_left_alone_for_a_network_that_takes_no_images():
    tokens = torch.ones(3, 5, dtype=torch.uint8)
    assert as_inputs(tokens, network().input_spec)[0] is tokens
    bytes_taken = InputSpec((TensorSpec("images", (None, 1, 8, 8), "uint8"),))
    assert as_inputs(BYTES, bytes_taken)[0] is BYTES


def test_several_tensors_of_a_known_kind_are_taken_at_once_and_others_are_looked_at():
    batch = {name: torch.ones(3, 5, dtype=torch.int64) for name in TEXT.names}
    for given in (batch, tuple(batch.values()), dict(reversed(batch.items()))):
        taken = as_inputs(given, TEXT)
        assert [id(each) for each in taken] == [id(batch[name]) for name in TEXT.names]
    name = TEXT.names[0]
    for wrong in (torch.ones(2, 5, dtype=torch.int64), torch.ones(3, 5), torch.ones(3, 5, 2, dtype=torch.int64)):
        with pytest.raises(BadInput):
            as_inputs(batch | {name: wrong}, TEXT)
    with pytest.raises(BadInput, match="samples: the first axis"):
        as_inputs({each: part[:0] for each, part in batch.items()}, TEXT)


def test_tensors_and_arrays_are_passed_on_without_a_copy():
    array = np.zeros((2, 1, 8, 8), dtype=np.float32)
    assert as_inputs(array, SPEC)[0] is array
    assert fitted((array,), SPEC)[0] is array
    assert np.shares_memory(as_tensor(array).numpy(), array)
    for tensor in (TAKEN, TAKEN.half(), TAKEN.permute(0, 1, 3, 2)):
        assert as_inputs(tensor, SPEC)[0] is tensor
        assert as_tensor(tensor) is tensor


def test_an_array_that_cannot_be_written_to_becomes_a_tensor_without_a_warning():
    array = np.zeros((2, 1, 8, 8), dtype=np.float32)
    array.flags.writeable = False
    assert as_tensor(as_inputs(array, SPEC)[0]).sum() == 0


def test_one_image_of_a_batch_in_reverse_order_becomes_a_tensor():
    array = np.arange(128, dtype=np.float32).reshape(2, 1, 8, 8)
    assert as_tensor(as_inputs(array[::-1][:1], SPEC)[0]).flatten()[0] == 64


def test_floats_that_look_like_pixels_are_warned_of_when_a_predictor_first_sees_some():
    policy = Threshold((0.5,), costs=(1.0, 2.0))
    for pixels in (IMAGES.numpy(), 255 * IMAGES.double().numpy()):
        predictor = Predictor(model(), policy)
        with pytest.warns(UserWarning, match="images are floats from 0 to .*give bytes .uint8. or normalised floats"):
            predictor(pixels)
        predictor(pixels)  # which was said


def test_doubles_stay_doubles_where_the_network_takes_them():
    double = InputSpec((TensorSpec("numbers", (None, 4), "float64"),))
    assert as_inputs(np.zeros((2, 4)), double)[0].dtype == np.float64
    assert as_inputs(np.zeros((2, 4)), NOTHING)[0].dtype == np.float32


@pytest.mark.parametrize("dtype", [">f4", ">f8", "longdouble", ">f2"])
def test_floats_of_any_kind_are_taken(dtype):
    for spec in (SPEC, NOTHING):
        found = as_tensor(as_inputs(TAKEN.numpy().astype(dtype), spec)[0])
        assert found.dtype in (torch.float32, torch.float16)
        assert torch.allclose(found.float(), TAKEN, atol=2e-3)


def test_numbers_in_lists_are_one_input_and_arrays_in_a_list_are_several():
    assert as_inputs([[0.5, 1.0], [2.0, 3.0]], NOTHING)[0].tolist() == [[0.5, 1.0], [2.0, 3.0]]
    assert len(as_inputs([np.zeros((2, 3)), torch.zeros(2, 5)], NOTHING)) == 2


TEXT = InputSpec(
    (TensorSpec("input_ids", (None, None), "int64"), TensorSpec("attention_mask", (None, None), "int64")),
    ("input_ids", "attention_mask"),
)


def test_texts_come_by_name_or_in_order_with_any_whole_numbers():
    ids, mask = np.arange(6, dtype=np.int32).reshape(2, 3), np.ones((2, 3), dtype=bool)
    batch = {"input_ids": ids, "attention_mask": mask, "token_type_ids": 0 * ids, "labels": [0, 1]}
    for given in (batch, (ids, mask), [ids, mask], {name: as_tensor(np.array(part)) for name, part in batch.items()}):
        found = fitted(as_inputs(given, TEXT), TEXT)
        assert [each.dtype for each in found] == [np.int64, np.int64]
        assert np.array_equal(found[0], ids)


@pytest.mark.parametrize("kind", [np.asarray, torch.as_tensor, np.ndarray.tolist])
@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"input_ids": np.zeros((2, 3), int)}, "the network takes"),
        ({"input_ids": np.zeros((2, 3)), "attention_mask": np.ones((2, 3), int)}, "array of float(32|64)"),
        ({"input_ids": np.zeros((2, 3), int), "attention_mask": np.ones((1, 3), int)}, r"\[1, 2\] samples"),
        (
            {name: np.ones((2, 3), int) for name in ("input_ids", "attention_mask", "token_type_ids")},
            r"'token_type_ids' \(pairs of texts\), and the network was cut with \['input_ids', 'attention_mask'\]",
        ),
        (
            {name: np.zeros((2, 3), int) for name in ("input_ids", "attention_mask", "position_ids")},
            "the batch has 'position_ids', and the network was cut with",
        ),
    ],
)
def test_texts_that_do_not_fit_are_refused(batch, message, kind):
    with pytest.raises(BadInput, match=message):
        fitted(as_inputs({name: kind(part) for name, part in batch.items()}, TEXT), TEXT)


def test_the_last_of_several_is_the_labels_if_it_has_one_axis():
    ids, mask, labels = np.ones((2, 3)), np.ones((2, 3)), np.array([1, 0])
    for batch in ((ids, labels), [ids, [1, 0]], {"x": ids, "label": labels}, {"labels": labels, "x": ids, "label": 0}):
        assert np.array_equal(as_batch(batch, NOTHING).inputs[0], ids)
        assert np.array_equal(split_labels(batch).labels, labels)
    for batch in ((ids, mask), (ids,), ids, {"x": ids, "mask": mask}):
        assert split_labels(batch).labels is None
    assert len(split_labels((ids, mask, labels)).inputs) == 2


def test_a_tensor_more_than_the_network_takes_is_the_labels():
    images, labels = np.zeros((2, 1, 8, 8), np.float32), np.array([[1, 0, 1], [0, 1, 0]])
    assert split_labels((images, labels), SPEC).labels is labels
    with pytest.raises(BadInput, match=r"labels have shape \(2, 3\) for 2 samples.* several labels per sample"):
        as_batch((images, labels), SPEC)
    batch = as_batch((images, labels.astype(np.float32)), SPEC)
    with pytest.raises(BadInput, match=r"the labels of 1 of 2 samples .* sample 0 lie in \[0, 1\] and sum to 2"):
        batch.check(3)
    assert as_batch([images[0], images[1]], SPEC).labels is None  # a list of two images


@pytest.mark.parametrize("kind", [torch.as_tensor, np.asarray])
def test_labels_are_whole_numbers_or_shares_of_classes(kind):
    ids = np.ones((2, 3))
    assert as_batch((ids, kind(np.array([1, 0], np.uint8))), NOTHING).labels.tolist() == [1, 0]
    assert str(as_batch((ids, kind(np.array([1, 0], np.int32))), NOTHING).labels.dtype).endswith("int64")
    shares = as_batch({"x": ids, "labels": kind(np.eye(2))}, NOTHING)
    assert str(shares.labels.dtype).endswith("float32")
    with pytest.raises(BadInput, match="among 2 classes, but the network has 3"):
        shares.check(3)
    for bad in (np.array([0.5, 1.0]), np.array([True, False]), np.array([1j, 0])):
        with pytest.raises(BadInput, match="not class indices"):
            as_batch((ids, kind(bad)), NOTHING)


BAD = {
    "unlike lengths": (
        lambda: in_batches((TAKEN, LABELS[:3]), SPEC),
        "40 inputs and 3 labels: give one",
    ),
    "nothing": (lambda: in_batches(TAKEN[:0], SPEC), "no samples"),
    "no batch": (lambda: in_batches(TAKEN, SPEC, 0), "batch size 0"),
    "no sample": (lambda: as_inputs(TAKEN[:0], SPEC), r"\[0\] samples: the first axis is the samples, at least 1"),
    "a number": (lambda: as_inputs(np.float32(3), NOTHING), r"\[0\] samples: the first axis is the samples"),
    "pictures for a network by hand": (lambda: as_inputs(PICTURES, NOTHING), "does not say which images"),
    "pictures for numbers": (
        lambda: as_inputs(PICTURES, InputSpec((TensorSpec("numbers", (None, 4), "float32"),))),
        "does not take images",
    ),
    "another size": (lambda: as_inputs(BYTES[:, :, :4], SPEC), r"shape \(1, 4, 8\) and the network takes"),
    "unlike shapes": (lambda: as_inputs([TAKEN[0], TAKEN[1, :, :4]], SPEC), "do not fit into one batch"),
    "unlike arrays": (
        lambda: as_inputs([TAKEN[0].numpy(), TAKEN[1, :, :4].numpy()], SPEC),
        "do not fit into one batch",
    ),
    "words": (lambda: as_inputs(np.array(["a", "b"]), SPEC), "the network does not take text but input_0 of shape"),
    "a text": (lambda: as_inputs("text", SPEC), "the path text is a whole data set and not a batch"),
    "complex numbers": (lambda: as_inputs(np.zeros((2, 1, 8, 8), complex), SPEC), "is not an array of numbers"),
    "two inputs": (lambda: as_inputs((TAKEN, TAKEN), SPEC), "2 inputs, and the network takes input_0 of shape"),
    "other sizes for a graph": (
        lambda: fitted(as_inputs(TAKEN[..., :4], SPEC), SPEC),
        r"shape \(40, 1, 8, 4\), and the network takes input_0 of shape \(samples, 1, 8, 8\), float32",
    ),
    "tokens that do not fit": (
        lambda: fitted((np.array([[1, 2**32 + 5]]),), InputSpec((TensorSpec("tokens", (None, None), "int32"),))),
        "an array of int64 with 4294967301, and the network takes tokens",
    ),
    "names for one tensor": (
        lambda: as_inputs({"a": TAKEN, "b": TAKEN}, SPEC),
        "the batch has columns a, b, and",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_data_that_cannot_be_used_gets_one_sentence(case):
    made, message = BAD[case]
    with pytest.raises(BadInput, match=message):
        list(made())


def test_permuted_images_are_trained_with_their_channels_first_in_memory():
    permuted = torch.rand(2, 8, 8, 3).permute(0, 3, 1, 2)
    (placed,) = Batch((permuted,), None).to("cpu").inputs
    assert placed.is_contiguous()
    assert torch.equal(placed, permuted)


def test_the_thread_that_fetches_may_end_what_it_fetches_for(monkeypatch):
    held, asked, ended, errors = {}, threading.Event(), threading.Event(), []
    monkeypatch.setattr(sys, "unraisablehook", errors.append)

    def source():
        yield 0
        asked.wait(10)
        held.clear()  # as the garbage collector does in whatever thread it runs
        ended.set()
        yield 1

    others = set(threading.enumerate())
    held["batches"] = prefetch(source())
    assert next(held["batches"]) == 0
    (fetching,) = set(threading.enumerate()) - others
    asked.set()
    assert ended.wait(10)
    fetching.join(10)
    assert not fetching.is_alive()
    assert not errors, errors[0].exc_value
