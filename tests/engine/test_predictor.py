"""The predictor decides what a replay of the recording decides, however samples are batched, in whatever order."""

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from alight import HeadOutputs, calibrate, replay
from alight.engine import walk
from alight.engine.predictor import Predictor
from alight.engine.recorder import record
from alight.engine.walk import Engine
from alight.errors import AlightError, BadInput, Mismatch
from alight.networks.attach import attach_heads
from alight.networks.multi_exit import MultiExitModel
from alight.networks.store import fingerprint
from alight.policies.policy import ExitAt, Lottery, Mixture, Patience, Streak, Threshold
from alight.policies.route import replay_on

COSTS = (1.0, 2.5, 3.0, 6.0)


class Second(nn.Module):
    """A stage that carries a second tensor of each sample past the features."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(6, 6, 3, padding=1)

    def forward(self, features, *others):
        carried = others[0] if others else features.mean(dim=(2, 3))
        return torch.relu(self.convolution(features)) + features, carried + features.amax(dim=(2, 3))


class Both(nn.Module):
    reads_everything = True

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 5)

    def forward(self, features, carried):
        return self.linear(torch.cat([features.mean(dim=(2, 3)), carried], dim=1))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    first = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
    pooled = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5))
    made = MultiExitModel([first, Second(), Second(), Second()], [pooled, Both(), Both(), Both()]).eval()
    for head in made.heads:
        for each in head.parameters():
            each.data *= 12
    return made


@pytest.fixture(scope="module")
def images():
    return torch.randn(150, 3, 7, 7, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def table(model, images):
    with torch.inference_mode():
        labels = np.random.default_rng(0).integers(5, size=len(images))
        return HeadOutputs.from_logits(
            [logits.numpy() for logits in model(images)],
            labels,
            features=["negative_entropy", "logit_margin"],
            keep_log_probabilities=True,
        )


def middle(table, exit_index, share):
    """A threshold halfway between two recorded scores, so that the last bits decide nothing."""
    scores = np.sort(table.scores[:, exit_index])
    place = int(share * (len(scores) - 2))
    return float((scores[place] + scores[place + 1]) / 2)


def drawn_policy(table, kind, rng):
    opened = tuple(sorted(rng.choice(4, size=rng.integers(2, 5), replace=False).tolist()))
    terms = {"costs": tuple(COSTS[index] for index in opened), "open_exits": opened, "num_exits": 4}
    thresholds = tuple(middle(table, index, rng.uniform()) for index in opened[:-1])
    if kind == "threshold":
        return Threshold(thresholds, **terms)
    if kind == "patience":
        return Patience(int(rng.integers(0, 3)), **terms)
    if kind == "streak":
        return Streak(thresholds[0], int(rng.integers(1, 3)), **terms)
    if kind == "mixture":
        return Mixture(Patience(1, **terms), Threshold(thresholds, **terms), float(rng.uniform()), **terms)
    if kind == "lottery":
        return Lottery(exit_rates=tuple(rng.dirichlet(np.ones(len(opened))).tolist()), **terms)
    index = int(rng.integers(4))
    return ExitAt(costs=(COSTS[index],), open_exits=(index,), num_exits=4)


def assert_equal(decisions, expected):
    np.testing.assert_array_equal(decisions.exits, expected.exits)
    np.testing.assert_array_equal(decisions.predictions, expected.predictions)
    np.testing.assert_array_equal(decisions.spent, expected.spent)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from(["threshold", "patience", "streak", "mixture", "lottery", "exit at"]),
    st.just(1) | st.integers(1, 40),
    st.booleans(),
)
def test_the_predictor_equals_replay_for_any_batch_size_and_order(model, images, table, seed, kind, size, rebatch):
    rng = np.random.default_rng(seed)
    policy = drawn_policy(table, kind, rng)
    predictor = Predictor(model, policy, batch_size=size, rebatch=rebatch)
    assert_equal(predictor(images), replay(policy, table))
    order = rng.permutation(len(images))
    shuffled = predictor(images[torch.from_numpy(order)], samples=order)
    expected = replay(policy, table)
    np.testing.assert_array_equal(shuffled.exits, expected.exits[order])
    np.testing.assert_array_equal(shuffled.predictions, expected.predictions[order])


@pytest.mark.parametrize("fit", [calibrate.fit_gain, calibrate.fit_recall, calibrate.fit_ensemble])
def test_a_lens_sees_in_the_network_what_it_sees_in_the_table(model, images, table, fit):
    policy = calibrate.with_lens(calibrate.geometric, fit)(COSTS, 3.0, table)
    assert_equal(Predictor(model, policy, batch_size=16)(images), replay(policy, table))


@pytest.mark.parametrize("batch_size", [1, 8, 64])
def test_texts_of_unlike_length_keep_their_masks_when_they_are_put_together(batch_size):
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=60, hidden_size=16, num_hidden_layers=4, num_attention_heads=2, intermediate_size=32
    )
    config.initializer_range, config.num_labels = 0.5, 5  # attention that matters
    encoder = transformers.BertForSequenceClassification(config).eval()
    mask = (torch.arange(9) < torch.randint(2, 10, (400, 1))).long()
    texts = {"input_ids": torch.randint(5, 60, (400, 9)) * mask, "attention_mask": mask}
    model = attach_heads(encoder, [f"bert.encoder.layer.{index}" for index in range(3)], example=texts)
    for each in model.heads[:-1].parameters():
        nn.init.normal_(each)
    table = record(model, [texts], log_probabilities=True, progress=False)
    policy = Threshold(tuple(middle(table, index, 0.8) for index in range(3)), costs=COSTS)
    given = {name: each.clone() for name, each in texts.items()}
    decisions = Predictor(model, policy, batch_size=batch_size, probabilities=True)(texts)
    assert_equal(decisions, replay(policy, table))
    chances = table.log_probabilities[np.arange(400), decisions.exits, decisions.predictions]
    np.testing.assert_allclose(np.log(decisions.probabilities), chances, atol=2e-3)
    assert all(torch.equal(texts[name], given[name]) for name in texts)


@pytest.mark.parametrize("contract", ["batch", "stream"])
def test_contracts_of_batches_and_streams_equal_replay_on_the_same_batches(model, images, table, contract):
    policy = calibrate.CONTRACTS[contract](calibrate.geometric)(COSTS, 3.0, table)
    predictor = Predictor(model, policy, batch_size=20)
    expected, memory = replay_on(policy, table, batch_size=20)
    assert_equal(predictor(images), expected)
    if contract == "stream":
        assert predictor.memory[0].spent == memory[0].spent
        again = predictor(images)  # the stream goes on
        assert predictor.memory[0].admitted == 300
        assert predictor.memory[0].spent == pytest.approx(expected.spent.sum() + again.spent.sum())
        fresh = Predictor(model, policy, batch_size=20)
        fresh.memory = (memory[0],)
        assert_equal(fresh(images), again)


def test_indices_of_ones_own_serve_a_stream_again_and_again(model, images, table):
    policy = calibrate.certified_stream(calibrate.geometric)(COSTS, 3.0, table)
    predictor = Predictor(model, policy, batch_size=20)
    own = np.arange(1000, 1000 + len(images))
    first, again = predictor(images, samples=own), predictor(images, samples=own)
    assert len(first) == len(again) == len(images)
    assert predictor.memory[0].admitted == 2 * len(images)


def test_a_loader_of_any_batches_gives_the_same_answers_in_its_order(model, images, table, capsys):
    policy = drawn_policy(table, "threshold", np.random.default_rng(3))
    loader = [images[:7], images[7:8], images[8:100], images[100:]]
    assert_equal(Predictor(model, policy, batch_size=32).run(loader), replay(policy, table))
    assert "predict" in capsys.readouterr().err


def test_a_stream_gives_early_answers_before_late_ones_are_computed(model, images, table):
    policy = Threshold(tuple(middle(table, index, 0.5) for index in range(3)), costs=COSTS)
    answers = list(Predictor(model, policy, batch_size=150).stream([images]))
    assert [set(each.open_indices) for each in answers] == [{0}, {1}, {2}, {3}]
    assert sorted(np.concatenate([each.samples for each in answers])) == list(range(150))


def test_closed_exits_are_not_evaluated_and_the_rest_of_the_network_is_not_run(model, images, table):
    ran = []
    hooks = [
        module.register_forward_hook(lambda *_, name=name: ran.append(name))
        for index in range(4)
        for name, module in ((f"stage {index}", model.stages[index]), (f"head {index}", model.heads[index]))
    ]
    policy = Threshold((middle(table, 1, 0.5),), costs=(2.5, 3.0), open_exits=(1, 2), num_exits=4)
    Predictor(model, policy)(images)
    for hook in hooks:
        hook.remove()
    assert ran == ["stage 0", "stage 1", "head 1", "stage 2", "head 2"]


def test_only_those_who_stay_run_on_and_full_batches_are_put_together(model, images, table):
    sizes = []
    hook = model.stages[3].register_forward_hook(lambda _, inputs, __: sizes.append(len(inputs[0])))
    policy = Threshold(tuple(middle(table, index, 0.8) for index in range(3)), costs=COSTS)
    staying = int((replay(policy, table).exits == 3).sum())
    Predictor(model, policy, batch_size=15)(images)
    hook.remove()
    assert sum(sizes) == staying
    assert sizes == [15] * (staying // 15) + [staying % 15] * (staying % 15 > 0)


@pytest.mark.parametrize("batch_size", [1, 64])
def test_probabilities_are_those_of_the_answers(model, images, table, batch_size):
    policy = Threshold(tuple(middle(table, index, 0.5) for index in range(3)), costs=COSTS)
    decisions = Predictor(model, policy, probabilities=True, batch_size=batch_size)(images)
    rows = np.arange(len(images))
    logs = table.log_probabilities[rows, decisions.exits, decisions.predictions]
    np.testing.assert_allclose(np.log(decisions.probabilities), logs, atol=2e-3)
    assert Predictor(model, policy)(images).probabilities is None


def test_half_precision_needs_and_has_its_own_decisions(model, images):
    with torch.inference_mode():
        halved = [logits.float().numpy() for logits in _half(model)(images.bfloat16())]
    table = HeadOutputs.from_logits(halved)
    policy = Threshold(tuple(middle(table, index, 0.5) for index in range(3)), costs=COSTS)
    decisions, expected = Predictor(model, policy, dtype="bf16")(images), replay(policy, table)
    thresholds = np.array([*policy.thresholds, np.inf])
    near = (np.abs(table.scores - thresholds) < 2e-2).any(axis=1)
    np.testing.assert_array_equal(decisions.exits[~near], expected.exits[~near])
    assert next(model.parameters()).dtype == torch.float32  # the user's network is as it was


def _half(model):
    import copy

    return copy.deepcopy(model).to(torch.bfloat16)


def test_training_mode_does_not_change_answers_and_is_left_as_it_was(model, images, table):
    policy = Threshold(tuple(middle(table, index, 0.5) for index in range(3)), costs=COSTS)
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    decisions = Predictor(model, policy)(images)
    assert model.training
    assert model.stages[0].training
    model.eval()
    assert_equal(decisions, replay(policy, table))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("score", ["margin", "max_probability", "negative_entropy", "logit_margin"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_no_score_hides_that_one_sample_alone_cannot_be_used(model, images, score, value):
    predictor = Predictor(model, Threshold((0.5, 0.5, 0.5), costs=COSTS, score=score))
    predictor(images[:1])
    with pytest.raises(BadInput, match="1 samples, the first of index 0, at exit 0"):
        predictor(images[:1] * value)


@pytest.mark.parametrize("batch_size", [1, 25])
def test_not_a_number_is_reported_by_index_and_finished_answers_are_kept(model, images, table, batch_size):
    broken = images.clone()
    broken[77] = float("nan")
    policy = Threshold(tuple(middle(table, index, 0.5) for index in range(3)), costs=COSTS)
    with pytest.raises(BadInput, match="1 samples, the first of index 77, at exit 0") as caught:
        Predictor(model, policy, batch_size=batch_size)(broken)
    finished = np.concatenate([each.samples for each in caught.value.finished])
    expected = replay(policy, table)
    for each in caught.value.finished:
        np.testing.assert_array_equal(each.predictions, expected.predictions[each.samples])
    assert len(finished)
    assert 77 not in finished


@pytest.mark.parametrize("error", [RuntimeError("disk gone"), KeyboardInterrupt(), torch.OutOfMemoryError("full")])
def test_what_goes_wrong_in_a_loader_loses_no_finished_answer(model, images, table, error):
    def loader():
        yield images[:60]
        yield images[60:120]
        raise error

    policy = Threshold(tuple(middle(table, index, 0.3) for index in range(3)), costs=COSTS)
    with pytest.raises(type(error)) as caught:
        Predictor(model, policy, batch_size=30).run(loader(), progress=False)
    answered = sum(len(each.samples) for each in caught.value.finished)
    assert 0 < answered <= 120
    assert f"{answered} samples were answered before" in caught.value.__notes__[-1]


def test_an_error_inside_a_stage_says_where(model, images, table):
    class Full(nn.Module):
        def forward(self, features, *others):
            raise torch.OutOfMemoryError("no memory")

    stages = [*model.stages[:2], Full(), *model.stages[3:]]
    policy = Threshold(tuple(middle(table, index, 0.9) for index in range(3)), costs=COSTS)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        Predictor(MultiExitModel(stages, [*model.heads]), policy)(images)
    assert "segment 2" in caught.value.__notes__[0]
    assert len(caught.value.finished) == 2
    with pytest.raises(torch.OutOfMemoryError, match="no memory") as caught:
        Predictor(MultiExitModel(stages, [*model.heads]), policy, batch_size=1)(images)
    assert "segment 2" in caught.value.__notes__[0]


def test_a_policy_of_another_network_is_refused(model, images, table):
    policy = Threshold(tuple(middle(table, index, 0.5) for index in range(3)), costs=COSTS, fingerprint="deadbeef")
    with pytest.raises(Mismatch, match=f"deadbeef and this is {fingerprint(model)}"):
        Predictor(model, policy)
    assert len(Predictor(model, policy, allow_mismatch=True)(images)) == len(images)
    with pytest.raises(Mismatch, match="for 2 exits and the network has 4"):
        Predictor(model, Threshold((0.5,), costs=(1.0, 2.0)))


def test_another_policy_can_take_over_the_same_network(model, images, table):
    first = drawn_policy(table, "threshold", np.random.default_rng(5))
    terms = {"costs": first.costs, "open_exits": first.open_exits, "num_exits": 4}
    second = Patience(1, **terms)
    predictor = Predictor(model, first, batch_size=32)
    assert_equal(predictor.with_policy(second)(images), replay(second, table))
    assert_equal(predictor(images), replay(first, table))
    with pytest.raises(Mismatch, match="make a new predictor"):
        predictor.with_policy(ExitAt(costs=(1.0,), open_exits=(0,), num_exits=4))


def test_answers_that_nobody_waits_for_are_fetched_before_their_logits_take_too_much_room(model, images, monkeypatch):
    predictor = Predictor(model, ExitAt(costs=(1.0,), open_exits=(3,), num_exits=4), batch_size=10)
    expected = predictor(images).predictions
    predictor.engine._on_host = False  # as on a GPU, where answers are fetched late
    counts, fetched = [], Engine._fetched
    monkeypatch.setattr(Engine, "_fetched", lambda self, late: counts.append(len(late)) or fetched(self, late))
    np.testing.assert_array_equal(predictor(images).predictions, expected)
    assert counts == [15]
    with torch.inference_mode():
        monkeypatch.setattr(walk, "LATE_BYTES", 3 * model(images[:10])[-1].nbytes)
    np.testing.assert_array_equal(predictor(images).predictions, expected)
    assert counts[1:] == [4, 4, 4, 3]


@pytest.mark.compiled
def test_compiled_segments_decide_the_same_for_any_batch_size(model, images, table):
    policy = Threshold((middle(table, 1, 0.5),), costs=(2.5, 6.0), open_exits=(1, 3))
    predictor = Predictor(model, policy, compile=True, batch_size=64)
    expected = replay(policy, table)
    assert_equal(predictor(images), expected)
    for size in (7, 33):
        predictor.batch_size = size
        assert_equal(predictor(images), expected)


@pytest.mark.compiled
def test_networks_of_one_shape_are_compiled_apart_and_run_with_the_weights_they_have(images):
    policy = Threshold((0.3,), costs=(1.0, 2.0))
    made = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        stages = [nn.Sequential(nn.Flatten(), nn.Linear(147, 8), nn.Dropout()), nn.Linear(8, 8)]
        made.append(MultiExitModel(stages, [nn.Linear(8, 5), nn.Linear(8, 5)]).eval())
    plain, quick = ([Predictor(each, policy, compile=compiled) for each in made] for compiled in (False, True))
    for one, other in zip(plain, quick, strict=True):
        assert_equal(other(images), one(images))
    made[0].load_state_dict(made[1].state_dict())
    assert_equal(quick[0](images), plain[1](images))
    for training in (True, False):  # what changes the network as a whole is noticed
        made[0].train(training)
        first, second = (quick[0](images).predictions for _ in range(2))
        assert (first == second).all() == (not training)  # dropout
    made[0].double()
    assert_equal(quick[0](images.double()), plain[0](images.double()))


@pytest.mark.compiled
def test_a_network_that_cannot_be_compiled_is_an_error_and_no_silent_fall_back(images):
    class Asks(nn.Module):
        def forward(self, features):
            return features if float(features.sum()) > 0 else -features

    model = MultiExitModel([nn.Flatten(), Asks()], [nn.Linear(147, 5), nn.Linear(147, 5)])
    predictor = Predictor(model, Threshold((0.5,), costs=(1.0, 2.0)), compile=True)
    with pytest.raises(AlightError, match=r"compiling segment 1 gave up .* compile=False"):
        predictor(images)


@pytest.mark.parametrize("entered", [False, True])
def test_one_sample_alone_is_known_by_its_index_however_it_is_given(model, images, entered):
    predictor = Predictor(model, Lottery(costs=COSTS, exit_rates=(0.25,) * 4))
    own = np.arange(100, 100 + len(images))
    together = predictor(images, samples=own)
    with torch.inference_mode(entered):
        for row, index in enumerate(own.tolist()):
            for given in ([index], (index,), np.array([index]), [np.int32(index)]):
                alone = predictor(images[row : row + 1], samples=given)
                assert (alone.exits, alone.predictions) == (together.exits[row], together.predictions[row])
    for wrong in ([0.5], [True], ["0"]):
        with pytest.raises(BadInput, match="one whole number per sample"):
            predictor(images[:1], samples=wrong)


def test_bad_input_says_what_to_do(model, images, table):
    policy = Threshold((0.5, 0.5, 0.5), costs=COSTS)
    with pytest.raises(BadInput, match="at least 1"):
        Predictor(model, policy)(images[:0])
    with pytest.raises(BadInput, match="each once"):
        Predictor(model, policy)(images[:2], samples=[4, 4])
    with pytest.raises(BadInput, match="2 indices for 3 samples"):
        Predictor(model, policy)(images[:3], samples=[4, 5])
    with pytest.raises(BadInput, match="batch size 0"):
        Predictor(model, policy, batch_size=0)
    with pytest.raises(BadInput, match="no dtype 'int3'"):
        Predictor(model, policy, dtype="int3")
    with pytest.raises(BadInput, match="gave no batch"):
        Predictor(model, policy).run([])
    lens = calibrate.with_lens(calibrate.geometric, calibrate.fit_recall)(COSTS, 3.0, table)
    with pytest.raises(BadInput, match="through a lens"):
        Predictor(model, lens, probabilities=True)
