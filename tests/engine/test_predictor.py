"""A predictor decides what a replay of the recording decides: any backend, batch size, order and way of calling."""

import shutil
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import shared_folder
from exported import (
    ALL_COSTS,
    OPEN,
    chain,
    compile_network,
    drawn,
    folder,
    images,
    middle,
    network,
    policy,
    predictor,
    table,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from alight import MultiExitModel, Predictor, calibrate, load_policy, measure_costs, record, replay
from alight.engine.manifest import Manifest
from alight.engine.settings import RunSettings
from alight.errors import BadInput, Mismatch
from alight.policies.policy import ExitAt, Lottery, Threshold
from alight.policies.route import replay_on
from alight.serve.model import load_served_model

AOTI = pytest.param(
    "aoti",
    marks=[
        pytest.mark.slow,
        pytest.mark.timeout(900),  # which the first test needs for compiling
        pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler"),
    ],
)
BACKENDS = ["torch", "onnx", "cascade", AOTI]
CONTRACTS = {"batch": calibrate.certified_batch, "stream": calibrate.certified_stream}
KINDS = ["threshold", "patience", "streak", "mixture", "lottery"]
ALL_OPEN = (0, 1, 2, 3)
OPENED = [ALL_OPEN, OPEN, (1, 2)]  # three exports serve all tests

each_backend = pytest.mark.parametrize("backend", BACKENDS, indirect=True)


@pytest.fixture(scope="session")
def backend(request, tmp_path_factory):
    """The name of a backend, or the folder of stages that were compiled ahead of time, once for all tests."""
    if request.param != "aoti":
        return request.param
    return shared_folder(tmp_path_factory.getbasetemp(), "compiled", compile_network)


def opened_by(backend):
    """The exits that a backend can open here: stages that take a minute to compile have all of them open."""
    return [ALL_OPEN] if isinstance(backend, Path) else OPENED


def thresholds(share, open_exits=ALL_OPEN):
    cuts = tuple(middle(index, share) for index in open_exits[:-1])
    return Threshold(cuts, costs=tuple(ALL_COSTS[index] for index in open_exits), open_exits=open_exits, num_exits=4)


def assert_equal(decisions, expected, order=slice(None)):
    np.testing.assert_array_equal(decisions.exits, expected.exits[order])
    np.testing.assert_array_equal(decisions.predictions, expected.predictions[order])
    np.testing.assert_array_equal(decisions.spent, expected.spent[order])


@each_backend
@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from(KINDS),
    st.sampled_from(OPENED),
    st.just(1) | st.integers(1, 40),
    st.booleans(),
)
def test_the_predictor_equals_replay_for_any_batch_size_and_order(backend, seed, kind, opened, size, rebatch):
    rng = np.random.default_rng(seed)
    rule = drawn(kind, rng, opened if opened in opened_by(backend) else ALL_OPEN)
    found = predictor(backend, rule, batch_size=size, rebatch=rebatch)
    expected = replay(rule, table())
    assert_equal(found(images()), expected)
    order = rng.permutation(len(images()))
    assert_equal(found(images()[order], samples=order), expected, order)


def ways_to_call(found, rule):
    """Ways to give samples to a predictor: each takes samples and returns their exits and predictions, in order."""

    def streamed(part):
        first, answers = found.next_number, [*found.stream([part])]
        numbers = np.concatenate([each.samples for each in answers])
        assert sorted(numbers) == [*range(first, first + len(part))]
        order = np.argsort(numbers)
        exits = np.asarray(rule.open_exits)[np.concatenate([each.open_indices for each in answers])]
        return np.stack([exits, np.concatenate([each.predictions for each in answers])])[:, order]

    def decided(decisions):
        return np.stack([decisions.exits, decisions.predictions])

    return (
        lambda part: decided(found(part)),
        lambda part: decided(found.run([part[:1], part[1:]] if len(part) > 1 else part, progress=False)),
        lambda part: decided(found.with_policy(rule)(part)),
        lambda part: np.concatenate([decided(found(part[row : row + 1])) for row in range(len(part))], axis=1),
        streamed,
    )


@each_backend
@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from(["mixture", "lottery"]),
    st.sampled_from(OPENED),
    st.integers(1, 40),
    st.lists(st.tuples(st.integers(1, 60), st.integers(0, 4)), min_size=1, max_size=8),
)
def test_a_stream_is_decided_alike_however_it_is_divided_into_calls(backend, seed, kind, opened, size, calls):
    rule = drawn(kind, np.random.default_rng(seed), opened if opened in opened_by(backend) else ALL_OPEN)
    found, parts, start = predictor(backend, rule, batch_size=size), [], 0
    for count, way in calls:
        part = images()[start : start + count]
        if len(part):
            parts.append(ways_to_call(found, rule)[way](part))
        assert found.next_number == start + len(part)
        start += len(part)
    expected = replay(rule, table())
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), [expected.exits[:start], expected.predictions[:start]])


@each_backend
def test_own_sample_numbers_are_kept_and_not_counted(backend):
    rule = Lottery(costs=ALL_COSTS, exit_rates=(0.25,) * 4)
    found, expected = predictor(backend, rule), replay(rule, table())
    for own in (np.arange(40, 70), np.arange(69, 40, -1), np.arange(0, 60, 7), [3]):
        assert_equal(found(images()[own], samples=own), expected, own)
    assert found.next_number == 0
    assert_equal(found(images()), expected)


@each_backend
def test_single_samples_spend_what_one_call_spends(backend):
    """Numbered from 0 in each call, all of them would take one branch of the mixture."""
    rule = calibrate.certified_mean(calibrate.patience, seed=0)(ALL_COSTS, 3.0, table())
    found = predictor(backend, rule)
    alone = np.array([found(images()[row : row + 1]).spent[0] for row in range(len(images()))])
    np.testing.assert_array_equal(alone, replay(rule, table()).spent)
    assert len({found(images()[:1]).spent[0] for _ in range(100)}) > 1  # one sample takes either branch


def test_threads_share_one_counter_and_keep_their_own_order():
    rule, expected = thresholds(0.5), replay(thresholds(0.5), table())
    found = predictor("onnx", rule)
    batches = [images()[start : start + 5] for start in range(0, len(images()), 5)]
    with ThreadPoolExecutor(4) as pool:
        for decisions in pool.map(lambda _: found.run(batches, progress=False), range(8)):
            assert_equal(decisions, expected)
        streams = [*pool.map(lambda _: [*found.with_policy(rule).stream(batches)], range(8))]
    numbers = np.concatenate([each.samples for stream in streams for each in stream])
    assert sorted(numbers) == [*range(8 * len(images()), 16 * len(images()))]


@each_backend
@pytest.mark.parametrize("score", ["max_probability", "negative_entropy", "logit_margin"])
def test_every_score_is_read_as_it_was_recorded(backend, score):
    scored = table().with_score(score)
    cuts = tuple((np.median(scored.scores[:, :-1], axis=0) + 1e-4).tolist())
    rule = Threshold(cuts, score=score, costs=ALL_COSTS)
    first = predictor(backend, thresholds(0.6))
    assert_equal(first.with_policy(rule)(images()), replay(rule, scored))
    assert_equal(first(images()), replay(thresholds(0.6), table()))


@each_backend
@pytest.mark.parametrize("batch_size", [1, 16])
@pytest.mark.parametrize("combine", calibrate.COMBINE)
def test_answers_are_combined_in_the_network_as_in_the_table(backend, combine, batch_size):
    rule = calibrate.combined(calibrate.geometric, combine)(ALL_COSTS, 3.0, table())
    if backend != "torch" and rule.open_exits not in opened_by(backend):
        pytest.skip("opens exits that are not exported here")
    found = predictor(backend, rule, batch_size=batch_size)
    expected = replay(rule, table())
    assert_equal(found(images()), expected)
    assert found(images()[:1]).predictions.tolist() == expected.predictions[:1].tolist()  # a single sample


@each_backend
@pytest.mark.parametrize("batch_size", [1, 16])
def test_learned_scores_decide_in_the_network_as_in_the_table_and_keep_probabilities(backend, batch_size):
    rule = calibrate.learned_stopping(ALL_COSTS, 3.0, table())
    middle = np.sort(rule.view(table()).scores, axis=0)[len(table()) // 2 :][:2].mean(axis=0)  # no sample's own score
    rule = replace(rule, thresholds=tuple(middle[:-1]), tie_shares=(1.0,) * 3, exit_rates=())
    decisions = predictor(backend, rule, batch_size=batch_size, probabilities=True)(images())
    assert_equal(decisions, replay(rule, table()))
    logs = table().top_log_probabilities[np.arange(len(images())), decisions.exits, 0]
    np.testing.assert_allclose(np.log(decisions.probabilities), logs, atol=2e-3)


@each_backend
@pytest.mark.parametrize("contract", ["batch", "stream"])
def test_contracts_of_batches_and_streams_equal_replay_on_the_same_batches(backend, contract):
    rule = CONTRACTS[contract](calibrate.geometric)(ALL_COSTS, 3.0, table())
    first = predictor(backend, rule, batch_size=20)
    expected, memory = replay_on(rule, table(), batch_size=20)
    assert_equal(first(images()), expected)
    if contract == "stream":
        assert first.memory[0].spent == memory[0].spent
        again = first(images())  # the stream continues
        assert first.memory[0].admitted == 300
        assert first.memory[0].spent == pytest.approx(expected.spent.sum() + again.spent.sum())
        fresh = predictor(backend, rule, batch_size=20)
        fresh.memory = (memory[0],)
        assert_equal(fresh(images()), again)


@each_backend
def test_a_stream_is_kept_by_copies_under_an_equal_policy(backend, tmp_path):
    """A copy began anew, so that one of every call spent a full pass more than the budget each time."""
    rule = calibrate.certified_stream(calibrate.geometric, seed=0)(ALL_COSTS, 1.5, table())
    rule.save(tmp_path / "policy.json")
    found, spent = predictor(backend, rule), 0.0
    for count in range(1, 61):
        found = found.with_policy(load_policy(tmp_path / "policy.json"))
        spent += float(found(images()[count - 1 : count]).spent[0])
        assert spent <= count * 1.5 + ALL_COSTS[-1]
    assert found.memory[0].admitted == 60
    assert found.with_policy(thresholds(0.5)).memory == ()


@each_backend
def test_own_sample_numbers_may_be_any_of_64_bits(backend):
    rule = Threshold((np.inf,) * 3, costs=ALL_COSTS)
    numbers = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, size=len(images()), endpoint=True)
    numbers[:2] = -(2**63), 2**63 - 1
    found = predictor(backend, rule)(images(), samples=numbers)
    np.testing.assert_array_equal(found.predictions, table().predictions[:, 3])


@each_backend
def test_own_sample_numbers_serve_a_stream_repeatedly(backend):
    rule = calibrate.certified_stream(calibrate.geometric, seed=0)(ALL_COSTS, 3.0, table())
    found = predictor(backend, rule, batch_size=20)
    own = np.arange(1000, 1000 + len(images()))
    first, again = found(images(), samples=own), found(images(), samples=own)
    assert len(first) == len(again) == len(images())
    assert found.memory[0].admitted == 2 * len(images())


@each_backend
def test_loaders_arrays_and_lists_of_samples_are_run_alike(backend, capsys):
    rule, labels = thresholds(0.5), np.arange(len(images())) % 5
    found, expected = predictor(backend, rule, batch_size=32), replay(thresholds(0.5), table())
    pairs = list(zip(images(), labels.tolist(), strict=True))
    parts = [images()[:7], images()[7:8], images()[8:100], images()[100:]]
    for data in (images(), [*images()], pairs, (images(), labels), parts, iter(parts)):
        assert_equal(found.run(data, progress=False), expected)
    loader = torch.utils.data.DataLoader([(image, 0) for image in images()], batch_size=50)
    assert_equal(found.run(loader), expected)
    assert "predict" in capsys.readouterr().err


@each_backend
def test_a_stream_gives_early_answers_before_late_ones_are_computed(backend):
    answers = list(predictor(backend, thresholds(0.5), batch_size=150).stream([images()]))
    assert [set(each.open_indices) for each in answers] == [{0}, {1}, {2}, {3}]
    assert sorted(np.concatenate([each.samples for each in answers])) == list(range(150))


def test_what_is_done_between_answers_is_the_callers_own():
    settings = RunSettings(threads=2)
    found, before = Predictor(network(), policy(), batch_size=10, settings=settings), torch.get_num_threads()
    answers = found.stream([images()[start : start + 10] for start in range(0, 50, 10)])
    for _ in answers:
        assert not torch.is_inference_mode_enabled()
        assert torch.get_num_threads() == before
        torch.nn.Linear(4, 1)(torch.randn(2, 4)).sum().backward()
    suspended = found.answers(images())
    next(suspended)
    with ThreadPoolExecutor(1) as other:
        other.submit(suspended.close).result()
    assert not torch.is_inference_mode_enabled()


@each_backend
@pytest.mark.parametrize("batch_size", [1, 64])
def test_probabilities_are_those_of_the_answers(backend, batch_size):
    decisions = predictor(backend, thresholds(0.5), probabilities=True, batch_size=batch_size)(images())
    rows = np.arange(len(images()))
    logs = table().top_log_probabilities[rows, decisions.exits, 0]
    np.testing.assert_allclose(np.log(decisions.probabilities), logs, atol=2e-3)
    assert predictor(backend, thresholds(0.5))(images()).probabilities is None


@each_backend
@pytest.mark.parametrize("score", ["margin", "max_probability", "negative_entropy", "logit_margin"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_no_score_hides_an_unusable_single_sample(backend, score, value):
    found = predictor(backend, Threshold((0.5, 0.5, 0.5), costs=ALL_COSTS, score=score))
    found(images()[:1])
    with pytest.raises(BadInput, match=r"sample 1 holds NaN|the first is sample 1, at exit 0") as caught:
        found(images()[:1] * np.float32(value))
    assert caught.value.__notes__[-1].endswith("This call's samples are numbered from 1.")


@each_backend
@pytest.mark.parametrize("batch_size", [1, 25])
def test_an_unusable_sample_is_reported_by_its_number_and_finished_answers_are_kept(backend, batch_size):
    broken = images().copy()
    broken[77] = float("nan")
    with pytest.raises(BadInput, match=r"sample 77 holds NaN|1 samples, the first is sample 77, at exit 0") as caught:
        predictor(backend, thresholds(0.5), batch_size=batch_size)(broken)
    finished = np.concatenate([each.samples for each in caught.value.finished])
    expected = replay(thresholds(0.5), table())
    for each in caught.value.finished:
        np.testing.assert_array_equal(each.predictions, expected.predictions[each.samples])
    assert len(finished)
    assert 77 not in finished


@each_backend
def test_logits_that_overflow_are_reported_by_their_number(backend):
    large = images().copy()
    large[9] = 3e38
    found = predictor(backend, thresholds(0.5))
    with pytest.raises(BadInput, match="unusable logits for 1 samples, the first is sample 9"):
        found(large)
    assert len(found(images())) == len(images())  # and the next are answered


@each_backend
@pytest.mark.parametrize("error", [RuntimeError("disk gone"), KeyboardInterrupt(), torch.OutOfMemoryError("full")])
def test_a_failing_loader_loses_no_finished_answer(backend, error):
    def loader():
        yield images()[:60]
        yield images()[60:120]
        raise error

    with pytest.raises(type(error)) as caught:
        predictor(backend, thresholds(0.3), batch_size=30).run(loader(), progress=False)
    answered = sum(len(each.samples) for each in caught.value.finished)
    assert 0 < answered <= 120
    assert f"{answered} samples were answered before" in caught.value.__notes__[-1]


@each_backend
def test_another_policy_can_take_over_the_same_network(backend):
    rng = np.random.default_rng(5)
    first, second = drawn("threshold", rng, ALL_OPEN), drawn("patience", rng, ALL_OPEN)
    found = predictor(backend, first, batch_size=32)
    assert_equal(found.with_policy(second)(images()), replay(second, table()))
    assert_equal(found(images()), replay(first, table()))
    with pytest.raises(Mismatch, match=r"opens exits \(3,\) and these stages end at exits \(0, 1, 2, 3\): make"):
        found.with_policy(ExitAt(costs=(6.0,), open_exits=(3,), num_exits=4))


@each_backend
def test_a_policy_of_another_network_is_refused(backend):
    foreign = replace(thresholds(0.5), fingerprint="deadbeef")
    own = chain().fingerprint if backend == "cascade" else policy().fingerprint
    with pytest.raises(Mismatch, match=f"deadbeef and this is {own}"):
        predictor(backend, foreign)
    assert len(predictor(backend, foreign, allow_mismatch=True)(images())) == len(images())
    with pytest.raises(Mismatch, match="for 2 exits and the network has 4"):
        predictor("torch", Threshold((0.5,), costs=(1.0, 2.0)))


@each_backend
@pytest.mark.parametrize("entered", [False, True])
def test_a_single_sample_is_known_by_its_number_however_it_is_given(backend, entered):
    rule = Lottery(costs=ALL_COSTS, exit_rates=(0.25,) * 4)
    found, own = predictor(backend, rule, probabilities=True), np.arange(100, 100 + len(images()))
    whole = found(images(), samples=own)
    with torch.inference_mode(entered):
        for row, number in enumerate(own[:60].tolist()):
            for samples in ([number], (number,), np.array([number]), [np.int32(number)]):
                single = found(images()[row : row + 1], samples=samples)
                assert (single.exits, single.predictions) == (whole.exits[row], whole.predictions[row])
                np.testing.assert_allclose(single.probabilities, whole.probabilities[row], atol=1e-5)
    for unusable in ([0.5], [True], ["0"]):
        with pytest.raises(BadInput, match="one whole number per sample"):
            found(images()[:1], samples=unusable)


@each_backend
def test_bad_input_says_what_to_do(backend):
    found = predictor(backend, thresholds(0.5))
    with pytest.raises(BadInput, match="at least 1"):
        found(images()[:0])
    with pytest.raises(BadInput, match="each once"):
        found(images()[:2], samples=[4, 4])
    with pytest.raises(BadInput, match="2 sample numbers for 3 samples"):
        found(images()[:3], samples=[4, 5])
    for count in (1, 2):
        with pytest.raises(BadInput, match=f"3 sample numbers for {count} sample"):
            found(images()[:count], samples=[4, 5, 6])
    with pytest.raises(BadInput, match="batch size 0"):
        predictor(backend, thresholds(0.5), batch_size=0)
    with pytest.raises(BadInput, match="gave no batch"):
        found.run([], progress=False)
    voted = calibrate.combined(calibrate.geometric, "vote")(ALL_COSTS, 3.0, table())
    with pytest.raises(BadInput, match="an answer need not be its exit's own"):
        predictor("torch", voted, probabilities=True)
    with pytest.raises(BadInput, match="no dtype 'int3'"):
        RunSettings(dtype="int3")
    with pytest.raises(BadInput, match="0 threads"):
        RunSettings(threads=0)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (np.zeros((4, 3, 8, 8), np.float32), r"shape \(4, 3, 8, 8\), and the network takes input_0"),
        (np.zeros((0, 3, 6, 7), np.float32), "at least 1"),
        ((images(), images()), "2 inputs"),
        ({"pixels": images(), "others": images()}, "the batch has columns pixels, others"),
        (np.zeros((2, 9, 9, 3), np.uint8), r"images of shape \(9, 9, 3\)"),
    ],
)
def test_inputs_of_another_kind_are_refused_by_exported_stages(inputs, message):
    with pytest.raises(BadInput, match=message):
        predictor("onnx", policy())(inputs)


def test_exported_stages_take_no_settings_but_threads():
    with pytest.raises(BadInput, match="was exported, and channels_last is for networks that were not"):
        Predictor.load(folder(), settings=RunSettings(channels_last=True))
    assert len(Predictor.load(folder(), settings=RunSettings(device="cpu", threads=1))(images())) == len(images())


@each_backend
def test_a_predictor_says_what_it_is(backend):
    names = {"torch": "PyTorch", "onnx": "onnxruntime", "cascade": "cascade of PyTorch, onnxruntime"}
    name = names.get(backend, "PyTorch, compiled ahead of time")
    assert repr(predictor(backend, thresholds(0.5))) == f"Predictor(Threshold, 4 stages, {name})"
    assert Manifest.load(folder()).classes == network().classes == ("ant", "bee", "cat", "dog", "eel")


@pytest.mark.parametrize("backend", [AOTI], indirect=True)
def test_compiled_stages_are_loaded_where_that_is_allowed_and_use_the_threads_of_that_machine(backend):
    assert sorted(path.suffix for path in backend.iterdir()) == [".json"] * 2 + [".pt2"] * 4
    with pytest.raises(BadInput, match="holds machine code that torch compiled: load it with allow_compiled=True"):
        Predictor.load(backend)
    with zipfile.ZipFile(backend / "stage_0.pt2") as package:
        code = "".join(package.read(name).decode() for name in package.namelist() if name.endswith(".cpp"))
    assert "#pragma omp parallel\n" in code
    rule = thresholds(0.5)
    served = load_served_model(backend, {"rule": rule}, settings=RunSettings(threads=1))
    assert_equal(served.predictors["rule"](images()), replay(rule, table()))
    assert served.engine == "PyTorch, compiled ahead of time"


def of_any_size():
    """A network that takes images of any size."""
    torch.manual_seed(0)
    stages = [nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)]
    heads = [nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)) for _ in stages]
    return MultiExitModel(stages, heads)


WAYS_IN = {
    "a batch": lambda found, batch: found(batch),
    "single samples": lambda found, batch: [found(batch[row : row + 1]) for row in range(2)],
    "a data set": lambda found, batch: found.run(batch, progress=False),
    "a stream": lambda found, batch: [*found.stream([batch])],
    "answers": lambda found, batch: [*found.answers(batch)],
}


@pytest.mark.parametrize("way", WAYS_IN)
def test_images_of_another_size_than_the_policy_was_calibrated_on_are_warned_of_once(way):
    model, small = of_any_size(), torch.randn(40, 3, 16, 16)
    labelled = record(model, (small, torch.arange(40) % 4), progress=False)
    policy = calibrate.eero(measure_costs(model, small), "100%", labelled)
    found, run = Predictor(model, policy), WAYS_IN[way]
    run(found, small)
    said = r"samples of 3 x 32 x 32, and the policy was calibrated on samples of 3 x 16 x 16: costs, budget and guaran"
    for batch in (torch.randn(4, 3, 32, 32), torch.randn(4, 3, 16, 32)):
        with pytest.warns(UserWarning, match=said.replace("3 x 32 x 32", " x ".join(map(str, batch.shape[1:])))):
            run(found, batch)
        run(found, batch)
        run(found.with_policy(policy), batch)
    run(Predictor(model, replace(policy, sample_shape=())), batch)  # as of a policy that does not say its size
