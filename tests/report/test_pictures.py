"""Examples: the right images, small, at the exits where they left."""

import base64
import io
from dataclasses import replace

import numpy as np
import pytest
from conftest import made_up
from PIL import Image

from alight import calibrate
from alight.errors import BadFile, BadInput
from alight.policies.route import replay
from alight.report import LETTERS, SIDE, as_pixels, data_address, examples, read_images, shortened

COSTS = [1.0, 2.0, 4.0]
OUTPUTS = made_up(0, 300, 3)
POLICIES = [calibrate.eero(COSTS, budget, OUTPUTS) for budget in (1.5, 2.5, 3.5)]
IMAGES = np.random.default_rng(0).integers(256, size=(300, 8, 8), dtype=np.uint8)


def pixels_of(address: str) -> np.ndarray:
    kind, _, content = address.partition(",")
    assert kind == "data:image/png;base64"
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(content))))


@pytest.mark.parametrize("shape", [(5, 7), (7, 5, 3)])
def test_an_address_holds_the_image_bit_by_bit(shape):
    image = np.random.default_rng(0).integers(256, size=shape, dtype=np.uint8)
    assert (pixels_of(data_address(image)) == image).all()


def test_examples_leave_where_the_policies_let_them_leave():
    found = examples(IMAGES, POLICIES, OUTPUTS, classes=list("abcde"), count=30)
    assert len(found.images) == 30
    rows = [int(np.flatnonzero((pixels_of(each) == IMAGES).all(axis=(1, 2)))[0]) for each in found.images]
    assert rows == sorted(rows)
    assert found.labels == tuple("abcde"[label] for label in OUTPUTS.labels[rows])
    for walk, policy in zip(found.walks, POLICIES, strict=True):
        decisions = replay(policy, OUTPUTS)
        assert (walk.method, walk.budget) == ("eero", policy.budget)
        assert walk.exits == tuple(decisions.exits[rows])
        assert walk.answers == tuple("abcde"[answer] for answer in decisions.predictions[rows])


def test_every_exit_of_the_middle_policy_has_as_many_examples_as_the_others():
    exits = examples(IMAGES, POLICIES, OUTPUTS, count=30).walks[1].exits
    left = np.bincount(replay(POLICIES[1], OUTPUTS).exits, minlength=3)
    assert left.min() >= 10
    assert np.bincount(exits).tolist() == [10, 10, 10]


def test_every_exit_of_the_chosen_policy_has_as_many_examples_and_its_walk_is_the_one_at_its_budget():
    chosen = replace(calibrate.eero_marginal(COSTS, 2.5, OUTPUTS), method="eero")
    found = examples(IMAGES, POLICIES, OUTPUTS, chosen=chosen, count=30)
    assert [walk.budget for walk in found.walks] == [1.5, 2.5, 3.5]
    assert found.walks[1].exits != examples(IMAGES, POLICIES, OUTPUTS, count=30).walks[1].exits
    assert np.bincount(found.walks[1].exits).tolist() == [10, 10, 10]


def test_a_policy_without_a_budget_stands_at_what_it_spends():
    free = replace(POLICIES[1], budget=None, method="free")
    assert examples(IMAGES, [free], OUTPUTS).walks[0].budget == replay(free, OUTPUTS).mean_cost


def test_texts_are_shown_in_one_line_cut_after_a_word():
    texts = [f"Text {row}\n  with  gaps " + "and words " * (row % 40) for row in range(300)]
    found = examples(texts, POLICIES, OUTPUTS, count=30)
    assert (found.images, len(found.texts), len(found)) == ((), 30, 30)
    assert max(map(len, found.texts)) <= LETTERS
    rows = [int(text.split()[1]) for text in found.texts]
    for row, text in zip(rows, found.texts, strict=True):
        whole = " ".join(texts[row].split())
        assert text == whole if len(whole) <= LETTERS else whole.startswith(text.removesuffix(" …"))
        assert text.removesuffix(" …").split()[-1] in ("gaps", "and", "words")
    assert found.walks[0].exits == tuple(replay(POLICIES[0], OUTPUTS).exits[rows])
    assert shortened("x" * 500) == "x" * (LETTERS - 2) + " …"


def test_channels_may_be_first_and_values_may_be_floats():
    image = np.zeros((3, 4, 5))
    image[0] = 1.0
    (pixels,) = as_pixels([image])
    assert pixels.shape == (4, 5, 3)
    assert pixels[0, 0].tolist() == [255, 0, 0]
    stretched = as_pixels([np.array([[-1.0, 0.0], [1.0, 3.0]])])[0]
    assert stretched.tolist() == [[0, 64], [128, 255]]
    assert as_pixels([np.full((2, 2, 1), 0.5)])[0].tolist() == [[128, 128], [128, 128]]
    assert as_pixels([np.zeros((2, 2))])[0].tolist() == [[0, 0], [0, 0]]


def test_large_images_are_shrunk_by_averaging():
    image = np.repeat(np.repeat(np.arange(100, dtype=np.uint8)[:, None], 150, axis=1), 3, axis=0)  # 300 x 150
    (pixels,) = as_pixels([image])
    assert max(pixels.shape) <= SIDE
    assert pixels.shape == (60, 30)
    assert pixels[:, 0].tolist() == pytest.approx(np.arange(300).reshape(60, 5).mean(axis=1) / 3, abs=1)


def test_what_cannot_be_shown_is_refused():
    with pytest.raises(BadInput, match="10 samples for a table of 300: give those that were recorded"):
        examples(IMAGES[:10], POLICIES, OUTPUTS)
    with pytest.raises(BadInput, match="0 policies and 60 examples"):
        examples(IMAGES, [], OUTPUTS)
    with pytest.raises(BadInput, match=r"shape \(4, 4, 7\)"):
        examples(np.zeros((300, 4, 4, 7)), POLICIES, OUTPUTS)


def test_images_are_read_from_a_file_that_holds_some(tmp_path):
    np.savez(tmp_path / "images.npz", images=IMAGES, labels=OUTPUTS.labels)
    assert (read_images(tmp_path / "images.npz") == IMAGES).all()
    np.savez(tmp_path / "others.npz", pictures=IMAGES)
    np.savez(tmp_path / "pickled.npz", images=np.array([{}], dtype=object))
    np.save(tmp_path / "bare.npy", IMAGES)
    (tmp_path / "text.npz").write_text("no images")
    for name in ("others.npz", "pickled.npz", "bare.npy", "text.npz"):
        with pytest.raises(BadFile, match="it holds no images"):
            read_images(tmp_path / name)
