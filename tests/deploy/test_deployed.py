"""An exported network decides what the predictor decides, under every rule, however samples are batched."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from exported import COSTS, OPEN, folder, images, middle, network, policy, table

from alight import Predictor, calibrate, deploy
from alight.errors import BadInput, Mismatch
from alight.export.manifest import Manifest
from alight.policies.limits import Quota
from alight.policies.policy import ExitAt, Lottery, Mixture, Patience, Streak, Threshold

GIVEN = {"open_exits": OPEN, "num_exits": 4, "costs": COSTS}


def certified(contract):
    method = calibrate.CONTRACTS[contract](calibrate.eero)(np.array(COSTS), 3.0, table().at_exits(OPEN))
    return replace(method, open_exits=OPEN, num_exits=4)


def threshold(score):
    scored = table().with_score(score).scores
    cuts = tuple(float(np.median(scored[:, index])) + 1e-4 for index in OPEN[:-1])
    return Threshold(cuts, score=score, **GIVEN)


RULES = {
    "threshold": policy,
    "entropy": lambda: threshold("negative_entropy"),
    "logits": lambda: threshold("logit_margin"),
    "patience": lambda: Patience(1, **GIVEN),
    "streak": lambda: Streak(middle(1, 0.4), 2, **GIVEN),
    "lottery": lambda: Lottery(exit_rates=(0.3, 0.3, 0.4), **GIVEN),
    "mixture": lambda: Mixture(policy(0.2), replace(policy(0.8)), 0.5, **GIVEN),
    "quota": lambda: Quota(exit_rates=(0.4, 0.3, 0.3), budget=3.0, **GIVEN),
    "paced": lambda: certified("stream"),
}


@pytest.fixture(scope="module")
def deployed():
    return deploy.load(folder(), num_threads=1, probabilities=True)


def predictor(rule, **settings):
    return Predictor(network(), rule, num_threads=1, **settings)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("batch_size", [1, 7, 64])
def test_it_decides_what_the_predictor_decides(name, batch_size, deployed):
    rule = RULES[name]()
    theirs = predictor(rule, probabilities=True, batch_size=batch_size)
    ours = deployed.with_policy(rule)
    ours.batch_size = batch_size
    expected, found = theirs(torch.from_numpy(images())), ours(images())
    assert (found.predictions == expected.predictions).all()
    assert (found.exits == expected.exits).all()
    assert (found.spent == expected.spent).all()
    assert len({*expected.exits.tolist()}) > 1 or (name, batch_size) == ("quota", 1)  # so that it could differ
    np.testing.assert_allclose(found.probabilities, expected.probabilities, atol=1e-5)


@pytest.mark.parametrize("fit", [calibrate.fit_gain, calibrate.fit_recall, calibrate.fit_ensemble])
def test_it_looks_through_lenses_as_the_predictor_does(fit):
    rule = calibrate.with_lens(calibrate.geometric, fit)(COSTS, 3.0, table().at_exits(OPEN))
    lens = replace(rule.lens, exits=tuple(OPEN[index] for index in rule.lens.exits))
    rule = replace(rule, open_exits=tuple(OPEN[index] for index in rule.open_exits), num_exits=4, lens=lens)
    ours = deploy.load(folder(), rule, num_threads=1)
    expected, found = predictor(rule)(torch.from_numpy(images())), ours(images())
    assert (found.predictions == expected.predictions).all()
    assert (found.exits == expected.exits).all()


def test_one_sample_alone_is_decided_as_in_a_batch(deployed):
    whole = deployed(images())
    for index in range(20):
        alone = deployed(images()[index : index + 1], samples=[index])
        assert (alone.predictions, alone.exits) == (whole.predictions[index], whole.exits[index])
        np.testing.assert_allclose(alone.probabilities, whole.probabilities[index], atol=1e-5)


def test_samples_are_known_by_their_index_and_answered_in_their_order(deployed):
    ours = deployed.with_policy(RULES["lottery"]())
    whole = ours(images())
    order = np.random.default_rng(0).permutation(len(images()))
    shuffled = ours(images()[order], samples=order)
    assert (shuffled.exits == whole.exits[order]).all()
    assert (shuffled.predictions == whole.predictions[order]).all()


def test_a_stream_is_remembered_from_call_to_call_and_can_be_restored(deployed):
    rule = RULES["paced"]()
    theirs, ours = predictor(rule), deployed.with_policy(rule)
    for start in range(0, 100, 20):
        batch = images()[start : start + 20]
        assert (theirs(torch.from_numpy(batch)).exits == ours(batch).exits).all()
    assert ours.memory[0].admitted == theirs.memory[0].admitted == 100
    assert ours.memory[0].spent == theirs.memory[0].spent
    again = deployed.with_policy(rule)
    again.memory = ours.memory
    assert (again(images()[100:]).exits == ours(images()[100:]).exits).all()


def test_batches_arrays_and_lists_of_samples_are_run_alike(deployed):
    whole, labels = deployed(images()), np.arange(len(images()))
    pairs = list(zip(images(), labels.tolist(), strict=True))
    parts = [images()[:64], images()[64:]]
    for data in (images(), [*images()], pairs, (images(), labels), parts, iter(parts)):
        assert (deployed.run(data, progress=False).exits == whole.exits).all()
    loader = torch.utils.data.DataLoader([(image, 0) for image in images()], batch_size=50)
    assert (deployed.run(loader, progress=False).predictions == whole.predictions).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_inputs_that_are_no_numbers_are_told_by_their_index_and_never_answered(bad, deployed):
    spoiled = images().copy()
    spoiled[70, 1, 2, 3] = bad
    with pytest.raises(BadInput, match="index 70 holds NaN"):
        deployed(spoiled)
    with pytest.raises(BadInput, match="index 1070 holds NaN"):
        deployed(spoiled[70:71], samples=[1070])
    assert len(deployed(images())) == len(images())  # and the next are


def test_logits_that_overflow_are_told_by_their_index(deployed):
    large = images().copy()
    large[9] = 3e38
    with pytest.raises(BadInput, match="no usable logits for 1 samples, the first of index 9"):
        deployed(large)


def test_another_network_or_other_exits_are_refused_and_both_named(deployed):
    foreign = replace(policy(), fingerprint="0123456789abcdef")
    with pytest.raises(Mismatch, match=f"0123456789abcdef and this is {policy().fingerprint}"):
        deploy.load(folder(), foreign)
    assert deploy.load(folder(), foreign, allow_mismatch=True).policy == foreign
    with pytest.raises(Mismatch, match=r"opens exits \(3,\) of 4, and exits \(0, 1, 3\) of 4"):
        deployed.with_policy(ExitAt(costs=(6.0,), open_exits=(3,), num_exits=4))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (np.zeros((4, 3, 8, 8), np.float32), r"shape \(4, 3, 8, 8\), and the network takes input_0"),
        (np.zeros((0, 3, 6, 7), np.float32), "at least 1"),
        (np.zeros((2, 3, 6, 7), complex), "no array of numbers"),
        ((images(), images()), "2 inputs"),
        ({"pixels": images()}, "the batch has"),
        ("text", "no array of numbers"),
        (np.zeros((2, 9, 9, 3), np.uint8), r"images of shape \(9, 9, 3\)"),
    ],
)
def test_what_the_network_does_not_take_is_refused(given, told, deployed):
    with pytest.raises(BadInput, match=told):
        deployed(given)


@pytest.mark.parametrize("samples", [[0, 0], [0.5, 1.0], [[0, 1]]])
def test_samples_are_told_by_whole_numbers_each_once(samples, deployed):
    with pytest.raises(BadInput, match="one whole number per sample"):
        deployed(images()[:2], samples)
    with pytest.raises(BadInput, match="1 indices for 2 samples"):
        deployed(images()[:2], [5])


def test_bad_settings_are_refused():
    with pytest.raises(BadInput, match="batch size 0"):
        deploy.load(folder(), batch_size=0)
    with pytest.raises(BadInput, match="0 threads"):
        deploy.load(folder(), num_threads=0)
    with pytest.raises(BadInput, match="no batch"):
        deploy.load(folder()).run([], progress=False)


def test_it_says_what_it_is(deployed):
    assert repr(deployed) == "Deployed(Threshold, 3 stages, onnx)"
    assert Manifest.load(folder()).classes == ("ant", "bee", "cat", "dog", "eel")
