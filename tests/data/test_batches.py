"""Data in whatever form people have it: the same samples give the same table, answers and training."""

import numpy as np
import pytest
import torch
from digits import digits, network
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from alight import Normalisation, Predictor, TrainingSettings, attach_heads, record, train_heads
from alight.data.batches import as_inputs, in_batches
from alight.errors import BadInput
from alight.networks.store import fingerprint
from alight.policies.policy import Threshold

IMAGES, LABELS = digits()[1][:40]  # (40, 1, 8, 8) in 0..1
BYTES = (255 * IMAGES).round().to(torch.uint8)  # (40, 1, 8, 8)
PICTURES = [Image.fromarray(each[0].numpy()) for each in BYTES]
MEAN, STD = 0.3, 0.4
TAKEN = (BYTES.float() / 255 - MEAN) / STD  # what the network takes


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


DATA = {
    "loader": DataLoader(TensorDataset(TAKEN, LABELS), 16),
    "list of batches": [(TAKEN[:30], LABELS[:30]), (TAKEN[30:], LABELS[30:])],
    "data set": TensorDataset(TAKEN, LABELS),
    "data set of pictures": Pictures(),
    "tensors": (TAKEN, LABELS),
    "arrays": (TAKEN.numpy(), LABELS.numpy()),
    "arrays of doubles": (TAKEN.double().numpy(), LABELS.numpy()),
    "dict": {"images": TAKEN.numpy(), "labels": LABELS.numpy()},
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
def test_training_shuffles_what_is_no_loader_and_can_be_repeated(form):
    networks = [model() for _ in range(3)]
    for each, seed in zip(networks, (0, 0, 1), strict=True):
        settings = TrainingSettings(mode="joint", epochs=2, seed=seed)
        train_heads(each, DATA[form], settings, batch_size=16, progress=False)
    first, again, other = map(fingerprint, networks)
    assert first == again
    assert first != other


def test_training_takes_the_same_forms_for_validation():
    settings = TrainingSettings(mode="joint", epochs=1)
    history = train_heads(model(), DATA["tensors"], settings, validation=DATA["arrays"], batch_size=16, progress=False)
    assert all(each is not None for each in history.epochs[-1].validation_accuracies)


def test_what_comes_in_batches_stays_as_it_is():
    for form in ("loader", "list of batches"):
        assert in_batches(DATA[form], model()) is DATA[form]
    stream = iter(DATA["loader"])
    assert in_batches(stream, model()) is stream
    assert in_batches([TAKEN[:20], TAKEN[20:]], network()) is not TAKEN


def test_bytes_are_left_alone_for_a_network_that_takes_no_images():
    tokens = torch.ones(3, 5, dtype=torch.uint8)
    assert as_inputs(tokens, network()).dtype is torch.uint8


BAD = {
    "unlike lengths": (lambda: in_batches((TAKEN, LABELS[:3]), model()), r"arrays with \[40, 3\] samples"),
    "nothing": (lambda: in_batches(TAKEN[:0], model()), "no samples"),
    "no batch": (lambda: in_batches(TAKEN, model(), 0), "batch size 0"),
    "pictures for a network by hand": (lambda: as_inputs(PICTURES, network()), "does not say which images"),
    "another size": (lambda: as_inputs(BYTES[:, :, :4], model()), r"shape \(1, 4, 8\) and the network takes"),
    "unlike shapes": (lambda: as_inputs([TAKEN[0], TAKEN[1, :, :4]], model()), "do not fit into one batch"),
    "words": (lambda: as_inputs(np.array(["a", "b"]), model()), "is no numbers"),
}


@pytest.mark.parametrize("case", BAD)
def test_data_that_cannot_be_used_gets_one_sentence(case):
    made, message = BAD[case]
    with pytest.raises(BadInput, match=message):
        list(made())
